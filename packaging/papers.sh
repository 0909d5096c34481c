#!/bin/sh
# Repeats experiments of papers and writes docs/papers.md: papers.sh [--quick]. Nothing else should run on the machine meanwhile.
set -eu
case "$*" in *--only*)
    echo "papers: the page has all experiments; run poolfs-bench paper danaus --only NAME for one" >&2
    exit 1
    ;;
esac
cd "$(dirname "$0")/.."
out=docs/papers.md
samples=target/papers
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
${MAKE:-make} --no-print-directory ceph >&2
# As real clusters have it, and to compare with.
packaging/install-missing.sh --no-servers ceph-mgr ceph-fuse unionfs-fuse fuse-overlayfs rocksdb-tools >&2 ||
    echo "papers: measuring without what could not be installed" >&2
mkdir -p "$samples"
target/release/poolfs-bench paper danaus --json "$samples/danaus.json" --html "$samples/danaus.html" "$@" >"$work/danaus"
{
    cat <<'TEXT'
# Papers

Experiments of the papers that poolfs follows, repeated on one small machine, for readers who want to compare. Machines, data and times are smaller
than the papers', so only ratios between systems of one table mean something.

`make bench-papers` writes this page on an otherwise idle machine, and all samples and plots of them to `target/papers/`. Each round runs every system once, in
rotating order. Figures are medians of all rounds, in brackets in parts of the first row's.

## Danaus (Middleware '21)

TEXT
    printf '`poolfs-bench paper danaus%s`, %s. ' "$(printf ' %s' "$@" | sed 's/ $//')" "$(date -u +%F)"
    cat "$work/danaus"
} >"$work/document"
cp "$work/document" "$out"
cat "$work/danaus"
