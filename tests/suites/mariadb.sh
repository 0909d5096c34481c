# about: MariaDB: install-db, sysbench oltp with 4 threads on InnoDB, Aria and MyISAM, dump and reload, kill -9 and recovery, extended check
# packages: mariadb-server mariadb-client sysbench
# version: mariadbd --version | sed 's/.*Ver \([0-9.]*\).*/\1/'
# limit: 600
socket=$W/m.sock
server=
trap '[ -z "$server" ] || kill -9 "$server" 2>/dev/null || true' EXIT
chown mysql: "$W"
# Else the user of the server would have to be allowed to write where this machine puts temporary files.
export TMPDIR="$W"
mariadb-install-db --no-defaults --user=mysql --datadir="$W/data" --auth-root-authentication-method=normal --skip-test-db >&2
start() {
    mariadbd --no-defaults --user=mysql --datadir="$W/data" --socket="$socket" --skip-networking --innodb-buffer-pool-size=64M \
        --innodb-log-file-size=32M --pid-file="$W/m.pid" --log-error="$W/m.log" --tmpdir="$W" --secure-file-priv= >&2 2>&1 &
    server=$!
    n=0
    until mariadb-admin --no-defaults -u root -S "$socket" ping >/dev/null 2>&1; do
        n=$((n + 1))
        [ $n -lt 600 ] || { cat "$W/m.log" >&2; exit 1; }
        sleep 0.1
    done
}
sql() { mariadb --no-defaults -u root -S "$socket" -N -B -e "$1"; }
bench() { sysbench "$1" --db-driver=mysql --mysql-socket="$socket" --mysql-user=root --mysql-db="$2" --tables=3 --table-size=15000 --rand-seed=7 "$@" >&2; }
start
for engine in innodb aria myisam; do
    sql "create database $engine"
    sysbench oltp_read_write --db-driver=mysql --mysql-socket="$socket" --mysql-user=root --mysql-db=$engine --mysql-storage-engine=$engine --tables=3 --table-size=15000 --rand-seed=7 prepare >&2
    sysbench oltp_read_write --db-driver=mysql --mysql-socket="$socket" --mysql-user=root --mysql-db=$engine --tables=3 --table-size=15000 --rand-seed=7 \
        $([ $engine = innodb ] && echo --threads=4 || echo --threads=1 --skip-trx=on) --time=0 --events=1200 run >&2
    sql "select '$engine', count(*) from $engine.sbtest1; select count(*) from $engine.sbtest3"
done
sql "create table innodb.fixed (a int primary key, b varchar(100), key(b)) engine=innodb; insert into innodb.fixed select seq, md5(seq) from seq_1_to_50000;
    alter table innodb.fixed add c int default 7, algorithm=copy; update innodb.fixed set b = concat(b, a) where a % 3 = 0; delete from innodb.fixed where a % 5 = 0; optimize table innodb.fixed;
    checksum table innodb.fixed extended" | grep checksum -i || true
sql "select count(*), md5(group_concat(b order by a)) from (select * from innodb.fixed limit 500) x"
sql "select * from innodb.fixed into outfile '$W/out.txt'"
wc -l <"$W/out.txt"
md5sum <"$W/out.txt"
sql "create table innodb.loaded like innodb.fixed; load data infile '$W/out.txt' into table innodb.loaded; checksum table innodb.loaded, innodb.fixed"
mariadb-dump --no-defaults -u root -S "$socket" --skip-dump-date innodb fixed >"$W/dump.sql"
md5sum <"$W/dump.sql"
sql "create database again"
mariadb --no-defaults -u root -S "$socket" again <"$W/dump.sql"
sql "checksum table again.fixed"
# Killed under load; then everything is checked.
sysbench oltp_write_only --db-driver=mysql --mysql-socket="$socket" --mysql-user=root --mysql-db=innodb --tables=3 --table-size=15000 --threads=4 --time=30 run >/dev/null 2>&1 &
load=$!
sleep 4
kill -9 "$server"
wait "$server" || true
wait "$load" || true
start
sql "checksum table innodb.fixed, again.fixed; select count(*) from innodb.sbtest2"
mariadb-check --no-defaults -u root -S "$socket" --extended innodb again | sed 's/  */ /'
mariadb-check --no-defaults -u root -S "$socket" --auto-repair aria >&2 || true
mariadb-admin --no-defaults -u root -S "$socket" shutdown
wait "$server" || true
server=
for file in "$W"/data/innodb/*.ibd; do innochecksum "$file" >&2 && echo "$(basename "$file") sound"; done
echo "three engines, a kill, every table checked"
