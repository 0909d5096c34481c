#!/bin/sh
# Runs every measurement and writes docs/benchmarks.md. Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/.."
bench=target/release/poolfs-bench
out=docs/benchmarks.md
part=$(mktemp)
trap 'rm -f "$part"' EXIT
{
    cat <<'TEXT'
# Benchmarks

Written by `make bench` (about five minutes, on an otherwise idle machine). Medians of all rounds; every round runs each target once, in a
turning order, so that ratios compare what ran side by side. In brackets: how many times the first column's time.

TEXT
    echo "Machine: $(nproc) CPUs ($(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)), Linux $(uname -r | cut -d- -f1), $(date -u +%F)."
    printf '\n## A round trip\n\n`poolfs-bench round-trip`: the service on CPU 0, the caller on CPU 0 or CPU 1.\n\n'
    $bench round-trip --work target/bench-round-trip
    printf '\n## Requests of the kernel by /dev/fuse and by io_uring\n\n`poolfs-bench transports`: one pool on both CPUs, the caller on CPU 1.\n\n'
    $bench transports --work target/bench-transports
    printf '\n## Calls of others\n\n`poolfs-bench overhead`: files that are not in a pool, with the library preloaded and without.\n\n'
    $bench overhead --work target/bench-overhead
    printf '\n## Bulk copy\n\n`poolfs-bench copy`: one copy of so many bytes, both areas in memory.\n\n'
    $bench copy
    printf '\n## File operations\n\n`poolfs-bench files`: a union over one lower directory on the same disk (ext4: a plain copy of the directory).\n\n'
    $bench files --work target/bench-files
} >"$part"
cp "$part" "$out"
cat "$out"
