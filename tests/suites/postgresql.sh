# about: PostgreSQL: initdb with checksums, pgbench with 8 clients, dump and restore, kill -9 and recovery, amcheck, checksums; as user nobody
# packages: postgresql postgresql-contrib
# version: $(ls /usr/lib/postgresql/*/bin/postgres | tail -n 1) --version | cut -d' ' -f3
# limit: 600
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
if [ "$(id -u)" = 0 ]; then
    chown nobody: "$W"
    exec setpriv --reuid nobody --regid nogroup --clear-groups --no-new-privs sh -eu "$0"
fi
export PGHOST=$W PGUSER=t PGDATABASE=postgres PGDATA=$W/data LC_ALL=C
server=
trap '[ -z "$server" ] || kill -QUIT "$server" 2>/dev/null || true' EXIT
start() {
    "$bin/postgres" -D "$W/data" -c listen_addresses= -c unix_socket_directories="$W" -c shared_buffers=32MB -c max_wal_size=64MB \
        -c checkpoint_timeout=30s -c log_min_messages=warning >>"$W/log" 2>&1 &
    server=$!
    n=0
    until "$bin/pg_isready" -q; do
        n=$((n + 1))
        [ $n -lt 600 ] || { cat "$W/log" >&2; exit 1; }
        sleep 0.1
    done
}
sql() { "$bin/psql" -X -q -A -t -c "$1" "${2:-postgres}"; }
"$bin/initdb" -D "$W/data" -U t -A trust --data-checksums >&2
start
"$bin/pgbench" -q -i -s 8 --foreign-keys >&2 2>&1
sql "select 'sizes', (select count(*) from pgbench_accounts), (select count(*) from pgbench_tellers)"
"$bin/pgbench" -n --random-seed=7 -c 1 -t 1000 >&2
sql "select 'one client', sum(abalance), (select count(*) from pgbench_history) from pgbench_accounts"
"$bin/pgbench" -n --random-seed=7 -c 8 -j 2 -t 300 >&2
sums="select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history), (select sum(bbalance) from pgbench_branches) = (select sum(tbalance) from pgbench_tellers), count(*) from pgbench_history"
sql "$sums"
sql "create table big as select g, md5(g::text) m from generate_series(1, 200000) g; create index on big(m); create extension amcheck"
sql "create tablespace other location '$W/space'" 2>/dev/null || { mkdir "$W/space" && sql "create tablespace other location '$W/space'"; }
sql "alter table big set tablespace other"
sql "vacuum full big"
sql "select 'big', count(*), md5(string_agg(m, '' order by g)) from big"
"$bin/pg_dump" -Fd -j 2 -f "$W/dump" postgres
sql "create database again"
"$bin/pg_restore" -d again -j 2 "$W/dump"
for database in postgres again; do "$bin/pg_dump" --inserts -t big "$database" | grep INSERT | sort | md5sum; done
"$bin/pg_amcheck" --all --heapallindexed >&2 && echo amcheck clean
# Killed in the middle of it all: what was committed is there, and nothing by halves.
"$bin/pgbench" -n -c 8 -j 2 -T 60 >/dev/null 2>&1 &
load=$!
sleep 4
kill -9 "$server"
wait "$server" || true
wait "$load" || true
# Its children notice and end; only then may another be started.
n=0
while pgrep -f "^postgres: .*" -u nobody >/dev/null && [ $n -lt 100 ]; do n=$((n + 1)); sleep 0.1; done
rm -f "$W/data/postmaster.pid" "$W"/.s.PGSQL.*
start
sql "$sums" | cut -d'|' -f1,2
sql "select 'committed before', count(*) >= 3400 from pgbench_history"
"$bin/pg_amcheck" --all --heapallindexed >&2 && echo amcheck clean
"$bin/pg_basebackup" -D "$W/backup" -c fast >&2 && "$bin/pg_verifybackup" "$W/backup" >&2 && echo backup verified || { rm -rf "$W/backup"; "$bin/pg_basebackup" -D "$W/backup" -c fast -T "$W/space=$W/space2" >&2 && "$bin/pg_verifybackup" "$W/backup" >&2 && echo backup verified; }
kill -INT "$server"
wait "$server" || true
server=
"$bin/pg_checksums" --check -D "$W/data" | grep -E '^Bad'
grep -cE 'PANIC|invalid page|checksum' "$W/log" || true
echo "800,000 accounts, 3,400 transactions and those until the kill"
