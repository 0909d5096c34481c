# about: Redis with an append-only file: 60,000 keys, rewrite while writing, snapshot, restart, kill -9 after fsync, restart
# packages: redis-server redis-tools
# version: redis-server --version | sed 's/.*v=\([^ ]*\).*/\1/'
# limit: 300
socket=$W/r.sock
cli() { redis-cli -s "$socket" "$@"; }
start() {
    redis-server --port 0 --unixsocket "$socket" --dir "$W" --appendonly yes --appendfsync "$1" --save '' \
        --enable-debug-command yes --logfile "$W/redis.log" --daemonize no --auto-aof-rewrite-percentage 0 >&2 &
    server=$!
    n=0
    until [ "$(cli ping 2>/dev/null)" = PONG ]; do
        n=$((n + 1))
        [ $n -lt 300 ] || { cat "$W/redis.log" >&2; exit 1; }
        sleep 0.1
    done
}
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true' EXIT
wait_for() { until cli info persistence | tr -d '\r' | grep -qx "$1"; do sleep 0.1; done; }
start everysec
awk 'BEGIN { for (i = 0; i < 60000; i++) { print "SET key:" i " value:" i * 7919; if (i % 3 == 0) print "RPUSH list:" i % 100 " " i; if (i % 5 == 0) print "HSET hash:" i % 200 " f" i " " i } }' |
    cli --pipe | tail -n 1
cli bgrewriteaof
awk 'BEGIN { for (i = 0; i < 20000; i++) { print "INCR counter"; print "APPEND key:" i " more"; if (i % 4 == 0) print "DEL key:" i + 30000 } }' | cli --pipe | tail -n 1
wait_for aof_rewrite_in_progress:0
cli info persistence | tr -d '\r' | grep -E '^(aof_last_bgrewrite_status|aof_last_write_status):'
cli bgsave
wait_for rdb_bgsave_in_progress:0
cli info persistence | tr -d '\r' | grep '^rdb_last_bgsave_status:'
before=$(cli debug digest)
cli dbsize
cli shutdown nosave || true
wait "$server"
redis-check-aof "$W/appendonlydir/appendonly.aof.manifest" | grep -c 'is valid'
start always
[ "$(cli debug digest)" = "$before" ] && echo same after restart
awk 'BEGIN { for (i = 0; i < 2000; i++) print "SET last:" i " " i }' | cli --pipe | tail -n 1
before=$(cli debug digest)
kill -9 "$server"
wait "$server" || true
start always
[ "$(cli debug digest)" = "$before" ] && echo same after kill -9
redis-benchmark -s "$socket" -q -n 3000 -c 20 -t set,get,lpush,lpop >&2
redis-check-rdb "$W/dump.rdb" | grep -c 'RDB looks OK'
cli get counter
cli shutdown save || true
wait "$server"
server=
echo "$(ls "$W/appendonlydir" | wc -l) files of the log, 60,000 keys"
