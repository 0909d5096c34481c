# packages: redis-server redis-tools
socket=$S/redis.sock
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true' EXIT
measure() {
    mkdir "$W/$1"
    redis-server --port 0 --unixsocket "$socket" --dir "$W/$1" --appendonly yes --appendfsync "$1" --save '' --logfile "$S/redis.log" >&2 &
    server=$!
    n=0
    until [ "$(redis-cli -s "$socket" ping 2>/dev/null)" = PONG ]; do
        n=$((n + 1))
        [ $n -lt 600 ] || { cat "$S/redis.log" >&2; exit 1; }
        sleep 0.05
    done
    redis-benchmark -s "$socket" --csv -n "$2" -c 20 -r 10000 -d 200 -t set | tr -d '"' |
        awk -F, -v mode="$1" '$1 == "SET" { printf "Redis SET, 20 clients, appendfsync %s\t%.0f\n", mode, 1e9 / $2; found = 1 } END { exit !found }'
    redis-cli -s "$socket" shutdown nosave >&2 || true
    wait "$server" || true
    server=
}
measure everysec 60000
measure always 6000
