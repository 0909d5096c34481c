# packages: postgresql postgresql-contrib
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
if [ "$(id -u)" = 0 ]; then
    chown nobody: "$W"
    exec setpriv --reuid nobody --regid nogroup --clear-groups --no-new-privs sh -eu "$0"
fi
export PGHOST=$W PGUSER=t PGDATABASE=postgres PGDATA=$W/data LC_ALL=C
server=
trap '[ -z "$server" ] || kill -QUIT "$server" 2>/dev/null || true' EXIT
"$bin/initdb" -D "$W/data" -U t -A trust --no-sync >&2
"$bin/postgres" -D "$W/data" -c listen_addresses= -c unix_socket_directories="$W" -c shared_buffers=32MB -c log_min_messages=warning >"$W/log" 2>&1 &
server=$!
n=0
until "$bin/pg_isready" -q; do
    n=$((n + 1))
    [ $n -lt 600 ] || { cat "$W/log" >&2; exit 1; }
    sleep 0.05
done
"$bin/pgbench" -q -i -s 5 >&2 2>&1
measure() {
    title=$1
    shift
    "$bin/pgbench" -n -c 4 -j 2 -T 2 "$@" 2>"$W/errors" |
        awk -v title="$title" '$1 == "tps" { printf "%s\t%.0f\n", title, 1e9 / $3; found = 1 } END { exit !found }' || { cat "$W/errors" >&2; exit 1; }
}
measure 'PostgreSQL, pgbench (TPC-B), 4 clients'
measure 'PostgreSQL, pgbench -S, 4 clients' -S
kill -INT "$server"
wait "$server" || true
server=
