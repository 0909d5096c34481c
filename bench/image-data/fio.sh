# packages: fio python3
# Files of 128 MiB, one for each case; the time until all requests were answered, and what was written is on disk. All of them have to fit into
# memory that a virtual machine has used before, several times: what its host has to find first is slow.
megabytes=128
for size in 4k 64k 1m; do
    for kind in read randread write randwrite; do
        file=$W/$kind-$size
        if [ "${1:-}" = prepare ]; then
            head -c $((megabytes << 20)) /dev/urandom >"$file"
            continue
        fi
        fio --name=case --filename="$file" --rw=$kind --bs=$size --size=${megabytes}M --ioengine=psync --end_fsync=1 \
            --output-format=json --output="$S/fio.json"
        python3 - "$S/fio.json" "$kind, $size" <<'END'
import json, sys
[job] = json.load(open(sys.argv[1]))["jobs"]
assert job["error"] == 0, job["error"]
print(f"fio, {sys.argv[2]}, all of 128 MiB\t{max(job['job_runtime'], 1) * 1000000}")
END
    done
done
