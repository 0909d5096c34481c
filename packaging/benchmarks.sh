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
usual="round-trip transports overhead copy files copy-up starts containers clones"
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
    databases) echo "Databases" ;;
    *)
        echo "there is no measurement $1; there are: $all" >&2
        return 1
        ;;
    esac
}

about() {
    case $1 in
    round-trip) echo "the service on CPU 0, the caller on CPU 0 or CPU 1." ;;
    transports)
        echo "one pool on both CPUs. Single requests: the caller on CPU 1."
        echo "Streams: each thread has a file of its own, in calls of 128 KiB, from the first one's begin to the last one's end. What is read is in the"
        echo "service's cache and not in the kernel's (ext4: in the kernel's); what is written is new, and the time ends when all are synced."
        echo "Read-ahead: one thread reads one file, with what the mount sets and with what the kernel has of its own accord."
        ;;
    overhead) echo "files that are not in a pool, with the library preloaded and without." ;;
    copy) echo "one copy of so many bytes, both areas in memory." ;;
    files)
        echo "a union over one lower directory on the same disk (ext4: a plain copy of the directory)."
        echo "gVisor: its runsc with a directory of the disk (directfs); overlay: with what is written kept in memory. Neither where there is no Go to install it by."
        echo "What is called cached was read some seconds before, so that both caches hold it in large pages."
        echo "\"mapped memory\" is the limit of what is cached: the same loop copies from a mapping, with all its pages, of a tmpfs file of the same size."
        ;;
    copy-up)
        echo "fresh filesystems, each in a file on the disk: a union of poolfs over ext4, overlayfs over each."
        echo "All files are full of data. First bytes: median of all files of that size in a round; names are known and the block is cached before. The library"
        echo "opens by the kernel, which asks by /dev/fuse or by io_uring. A file written all over: 410 bytes into each of 524,288 blocks, one after the other;"
        echo "the columns of poolfs by /dev/fuse. Room: what the upper branch takes on its disk (du), a file."
        ;;
    starts)
        echo "programs in a root directory that is a union over one image (ext4: a plain copy of it), started before in the same"
        echo "mounts; each by chroot and exec from one process, the same for all. Containers: \`poolfs run --rm\` (FUSE: \`--fuse\`), and the union"
        echo "mounted, \`runc run\` with the same specification, and unmounted."
        ;;
    containers)
        echo "so many lighttpd in root directories of one image, each a union of its own, until all have answered a request. Mounting them one"
        echo "after the other by the command line is a line of its own. Memory is what was added from empty caches, twice seen: as charged to"
        echo "the pool's control groups (processes, the service, page cache, the kernel's notes), and as missing from the machine's free memory."
        ;;
    clones)
        echo "so many processes, each with a union of its own over one lower directory, have all of a file of 96 MiB read, or mapped"
        echo "privately and read, and hold it."
        ;;
    image-data)
        echo "\`bench/image-data/*.sh\` on data of the lower branch (ext4: a plain copy of it), nothing cached before, each in a new"
        echo "union. fio: psync, one job, end_fsync. MariaDB: sysbench oltp_read_write by four threads, 24 tables of 100,000 rows."
        ;;
    databases)
        echo "\`bench/databases/*.sh\` in a directory of a union (ext4: of the disk). Redis and PostgreSQL: the machine's time of one"
        echo "operation of all clients."
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

Written by `make bench` and `make bench-databases`, on an otherwise idle machine; each section by the command it names (`make bench ONLY=NAME`).
Medians of all rounds; every round runs each target once, in a turning order, so that ratios compare what ran side by side. In brackets: how many
times the first column's time.
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
