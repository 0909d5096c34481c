# about: RocksDB by db_bench: fill, overwrite, delete, read back with values verified, mmap and direct I/O, kill -9 and recovery
# packages: rocksdb-tools
# version: dpkg-query -W -f '${Version}' rocksdb-tools | cut -d- -f1
# limit: 400
bench() { db_bench --db="$W/db" --seed=7 --num=100000 --value_size=400 --threads=1 --write_buffer_size=4194304 --disable_wal=false "$@" 2>&1; }
# How many of the asked for were found; times are left out.
found() { tee /dev/stderr | grep -oE '\([0-9]+ of [0-9]+ found\)' || true; }
verify() { ldb --db="$W/db" checkconsistency 2>&1 | tail -n 1; }
bench --benchmarks=fillseq,fillrandom,overwrite,compact,readrandom --verify_checksum=true | found
verify
bench --benchmarks=readrandom,readseq,multireadrandom --use_existing_db=true --verify_checksum=true --mmap_read=true | found
bench --benchmarks=overwrite,readrandom --use_existing_db=true --use_direct_reads=true --use_direct_io_for_flush_and_compaction=true | found
bench --benchmarks=overwrite,readrandom --use_existing_db=true --mmap_write=true | found
bench --benchmarks=verifychecksum,deleteseq,compact,readrandom --use_existing_db=true --num=20000 | found
ldb --db="$W/db" dump --count_only 2>/dev/null | grep -i 'keys in range' || true
# A writer with an fsync for every write is killed; everything it had acknowledged must be there.
for n in 1 2 3; do
    ldb --db="$W/killed" --create_if_missing put first "$n" >/dev/null
    db_bench --db="$W/killed" --use_existing_db=true --benchmarks=overwrite --num=10000000 --sync=true --value_size=2000 --seed="$n" >"$W/killed.log" 2>&1 &
    writer=$!
    trap 'kill -9 "$writer" 2>/dev/null || true' EXIT
    sleep 2
    kill -9 "$writer"
    wait "$writer" || true
    trap - EXIT
    ldb --db="$W/killed" get first
    ldb --db="$W/killed" checkconsistency 2>&1 | tail -n 1
    db_bench --db="$W/killed" --use_existing_db=true --benchmarks=verifychecksum --num=1 2>&1 | grep -ciE 'corrupt|fail' || true
done
for table in "$W"/db/*.sst; do sst_dump --file="$table" --command=verify >"$W/verify.log" 2>&1 || cat "$W/verify.log"; grep -ciE 'corrupt' "$W/verify.log" >&2 || true; done
echo "100,000 keys, every table verified, 3 kills"
