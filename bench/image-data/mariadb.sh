# packages: mariadb-server sysbench
# MariaDB on data of the image: 24 tables of 100,000 rows; the first 60 seconds.
seconds=60
start() {
    mariadbd --no-defaults --user=root --datadir="$W/data" --socket="$S/mariadb.sock" --pid-file="$S/mariadb.pid" \
        --skip-networking >"$S/mariadb.log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        ! mariadb-admin --no-defaults --user=root --socket="$S/mariadb.sock" ping >/dev/null 2>&1 || return 0
        sleep 0.1
    done
    cat "$S/mariadb.log" >&2
    return 1
}
stop() {
    mariadb-admin --no-defaults --user=root --socket="$S/mariadb.sock" shutdown
    wait "$server"
}
bench() {
    sysbench oltp_read_write --db-driver=mysql --mysql-socket="$S/mariadb.sock" --mysql-user=root --tables=24 --table-size=100000 "$@"
}
if [ "${1:-}" = prepare ]; then
    mariadb-install-db --no-defaults --user=root --datadir="$W/data" --auth-root-authentication-method=normal >"$S/install.log"
    start
    mariadb --no-defaults --user=root --socket="$S/mariadb.sock" -e "create database sbtest"
    bench --threads=2 prepare >"$S/prepare.log"
    stop
    exit
fi
start
bench --threads=4 --time=$seconds run >"$S/run.log"
stop
events=$(awk '/total number of events:/ { print $NF }' "$S/run.log")
printf 'MariaDB, one transaction of sysbench in the first %d s\t%d\n' $seconds $((seconds * 1000000000 / events))
