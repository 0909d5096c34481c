# packages: rocksdb-tools
bench() {
    title=$1
    shift
    db_bench --db="$W/db" --seed=7 --threads=1 --key_size=16 --value_size=400 --disable_wal=false --write_buffer_size=16777216 --compression_type=none "$@" 2>"$W/log" |
        awk -v title="$title" '$2 == ":" && $4 == "micros/op" { printf "RocksDB %s\t%.0f\n", title, $3 * 1000; found = 1 } END { exit !found }' || { cat "$W/log" >&2; exit 1; }
}
bench fillrandom --benchmarks=fillrandom --num=150000
bench readrandom --benchmarks=readrandom --use_existing_db=true --num=150000 --reads=60000 --cache_size=1048576
bench overwrite --benchmarks=overwrite --use_existing_db=true --num=150000
bench 'overwrite, sync' --benchmarks=overwrite --use_existing_db=true --num=150000 --writes=400 --sync=true
