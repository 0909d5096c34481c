#!/bin/sh
# Runs measurements and writes their sections of docs/benchmarks.md: benchmarks.sh [NAME...]. The others stay as they are.
# Without names: all but the databases. Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/.."
image=.poolfs-demo/bench-root.tar
bench=target/release/poolfs-bench
out=docs/benchmarks.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
usual="round-trip transports overhead copy files copy-up starts containers clones ceph"
all="$usual image-data databases"
[ $# -gt 0 ] || set -- $usual

heading() {
    case $1 in
    round-trip) echo "A round trip" ;;
    transports) echo "Requests of the kernel by /dev/fuse and by io_uring" ;;
    overhead) echo "Calls of others" ;;
    copy) echo "Bulk copy" ;;
    files) echo "File operations" ;;
    copy-up) echo "First writes of lower files" ;;
    image-data) echo "Data of an image that programs write" ;;
    starts) echo "Starts of programs and containers" ;;
    containers) echo "Many containers" ;;
    clones) echo "Memory of containers that read one file" ;;
    ceph) echo "A directory of a Ceph cluster" ;;
    databases) echo "Databases" ;;
    *)
        echo "there is no measurement $1; there are: $all" >&2
        return 1
        ;;
    esac
}

about() {
    case $1 in
    round-trip) echo "the service runs on CPU 0, the caller on CPU 0 or CPU 1." ;;
    transports)
        echo "one pool has both CPUs. Single requests: the caller runs on CPU 1."
        echo "Streams: each thread has a file of its own, in calls of 128 KiB. The time is from the start of the first to the end of the last. Data that is"
        echo "read is in the service's cache and not in the kernel's (ext4: in the kernel's). Data that is written is new, and the time includes the sync."
        echo "Read-ahead: one thread reads one file, with the read-ahead that the mount sets and with the kernel's default."
        ;;
    overhead) echo "calls on files outside of poolfs, with and without the preloaded library." ;;
    copy) echo "one copy of the given size between two areas in memory. SMO is the papers' shared-memory-optimised copy." ;;
    files)
        echo "a union over one lower directory on the same disk (ext4: a plain copy of the directory)."
        echo "gVisor: its runsc with a directory of the disk (directfs); overlay: with written data kept in memory. Both are left out where there is no Go to install runsc with."
        echo "*Cached* data was read some seconds before, so that both caches hold it in large pages. *Mapped memory* is the limit for cached reads: the same loop"
        echo "copies from a mapping of a tmpfs file of the same size, with all its pages present."
        ;;
    copy-up)
        echo "fresh filesystems, each in a file on the disk: a union of poolfs over ext4, and overlayfs over each filesystem."
        echo "All files are full of data."
        echo
        echo "- First bytes: the median of all files of a size in a round. Names are known and the block is cached before. The library opens files by the kernel,"
        echo "  which sends its messages by /dev/fuse or by io_uring."
        echo "- A file written all over: 410 bytes into each of 524,288 blocks, one after the other. The columns of poolfs are by /dev/fuse."
        echo "- Room: the disk space of the upper branch (du), per file."
        echo
        ;;
    starts)
        echo "programs in a root directory that is a union over one image (ext4: a plain copy of it). They were started before in the"
        echo "same mounts. For all targets each is started by exec from one process, in a mount namespace with that root. Containers: \`poolfs run --rm\` (FUSE:"
        echo "\`--fuse\`). For the other targets the union is mounted, \`runc run\` runs with the same specification, and the union is unmounted."
        ;;
    containers)
        echo "N lighttpd servers in root directories of one image, each a union of its own, until all have answered a request. Mounting"
        echo "them one after the other by the command line is a row of its own. Memory is what was added from empty caches, measured in two ways: as charged to the"
        echo "pool's control groups (processes, the service, page cache, kernel memory), and as the decrease of the machine's free memory."
        ;;
    clones)
        echo "N processes, each with a union of its own over one lower directory, read all of a file of 96 MiB, or map it privately and read"
        echo "it, and keep it open or mapped."
        ;;
    image-data)
        echo "\`bench/image-data/*.sh\` on data of the lower branch (ext4: a plain copy of it). Nothing is cached before, and each run"
        echo "has a new union. fio: psync, one job, end_fsync. MariaDB: sysbench oltp_read_write by four threads, 24 tables of 100,000 rows."
        ;;
    ceph)
        echo "a directory of a CephFS on this machine (one monitor, one OSD with BlueStore, one metadata server, one manager, which share the CPUs with all"
        echo "clients). Each client has a directory of its own. Library and FUSE: \`mount --dir ceph:/PATH\`, where one pool writes the directory; strict: \`--consistency strict\`,"
        echo "where anybody writes it and each use asks the cluster. ceph-fuse: as it is installed, and with \`fuse_disable_pagecache\`. libcephfs: the program calls Ceph's library"
        echo "itself, with the library's cache on. Everything runs in one pool of 4 GiB. Numbers in brackets are ratios of times, also where speeds are shown."
        echo
        echo "Clones: unions, each with a writable branch on the disk, over one lower branch at the cluster. Resident: \`VmRSS\` of poolfs-service, or of ceph-fuse and all"
        echo "unions' programs. Control groups: what was added from empty caches, with the page cache and the readers."
        echo
        ;;
    databases)
        echo "\`bench/databases/*.sh\` in a directory of a union (ext4: of the disk). Redis and PostgreSQL: elapsed time divided by the"
        echo "operations of all clients."
        ;;
    esac
}

measure() {
    case $1 in
    copy) $bench copy ;;
    starts | containers) $bench "$1" --work "target/bench-$1" --image "$image" ;;
    image-data) $bench image-data --work target/bench-image-data --scripts bench/image-data ;;
    databases) $bench databases --work target/bench-databases --scripts bench/databases ;;
    *) $bench "$1" --work "target/bench-$1" ;;
    esac
}

# The section with this heading as the document has it, without the heading.
present() {
    [ ! -e "$out" ] || awk -v heading="## $1" '/^## / { inside = $0 == heading; next } inside && (/./ || begun) { begun = 1; print }' "$out"
}

write() {
    {
        cat <<'TEXT'
# Benchmarks

This page compares poolfs with ext4, overlayfs, fuse-overlayfs and others, for operators and for readers who choose between filesystems.
[performance.md](performance.md) gives the reasons for the slower results.

`make bench` and `make bench-databases` write this page, on an otherwise idle machine. Each section names the command that measures it, its machine
and its date; `make bench ONLY=NAME` measures one section. Figures are medians of all rounds. Each round runs each target once, in rotating order,
so that ratios compare runs made close together. The number in brackets is the ratio to the first column.
TEXT
        for part in $all; do
            heading=$(heading "$part")
            section=$(if [ -e "$work/$part" ]; then cat "$work/$part"; else present "$heading"; fi)
            [ -z "$section" ] || printf '\n## %s\n\n%s\n' "$heading" "$section"
        done
    } >"$work/document"
    cp "$work/document" "$out"
}

for name; do heading "$name" >/dev/null; done
machine="$(nproc) CPUs ($(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)), Linux $(uname -r | cut -d- -f1)"
for name; do
    case $name in
    ceph)
        ${MAKE:-make} --no-print-directory ceph >&2
        # As real clusters have it, and to compare with.
        packaging/install-missing.sh --no-servers ceph-mgr ceph-fuse unionfs-fuse >&2 || echo "benchmarks: measuring without what could not be installed" >&2
        ;;
    starts | containers) packaging/make-root-image.sh "$image" lighttpd python3 >&2 ;;
    image-data | databases)
        # shellcheck disable=SC2046 # one word a package
        packaging/install-missing.sh --no-servers $(sed -n 's/^# packages: //p' bench/"$name"/*.sh) >&2
        ;;
    esac
    measure "$name" >"$work/table"
    {
        printf '`poolfs-bench %s`: %s\n' "$name" "$(about "$name")"
        printf '%s, %s.\n\n' "$machine" "$(date -u +%F)"
        cat "$work/table"
    } >"$work/$name"
    write
    cat "$work/$name"
done
