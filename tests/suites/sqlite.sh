# about: sqlite by SQL in every journal mode, with and without mmap; eight processes on one WAL database, two of them killed
# packages: sqlite3 python3
# version: sqlite3 --version | cut -d' ' -f1
# limit: 600
for mode in delete truncate persist wal; do
    for map in 0 268435456; do
        db=$W/$mode-$map.db
        sqlite3 "$db" "pragma journal_mode=$mode; pragma mmap_size=$map;" >/dev/null
        sqlite3 "$db" <<X
pragma mmap_size=$map;
create table t1(a integer, b integer, c text);
create table t2(a integer primary key, b integer unique, c text);
begin; with recursive n(x) as (select 1 union all select x + 1 from n where x < 60000)
insert into t1 select x, x * 7919 % 60013, hex(x * 104729) from n; commit;
begin; insert into t2 select a, b, c from t1; commit;
create index i1 on t1(b); create index i2 on t1(c);
select count(*), avg(b), sum(length(c)) from t1 where b between 1000 and 9000;
select count(*) from t1 where c like '%AB%';
select a, b from t1 order by c limit 3;
begin; update t1 set b = b * 2 where a % 3 = 0; update t2 set c = c || 'x' where b < 30000; commit;
delete from t1 where c > 'C'; insert into t1 select * from t2 where a < 5000; delete from t2 where a % 7 = 0;
select count(*), sum(a), sum(b) from t1; select count(*), sum(length(c)) from t2;
savepoint s; delete from t2; rollback to s; release s; select count(*) from t2;
vacuum; reindex; analyze; pragma integrity_check;
create virtual table f using fts5(x); insert into f select c from t2 limit 5000; select count(*) from f where f match '36*';
X
        # Many small transactions: one journal and one fsync each.
        for i in $(seq 150); do echo "insert into t1 values($i, $i, 'small'); select count(*) from t1 where c = 'small';"; done |
            sqlite3 "$db" | tail -n 1
        sqlite3 "$db" '.dump' | md5sum
        sqlite3 "$db" "vacuum into '$W/copy-$mode-$map.db'"
        sqlite3 "$W/copy-$mode-$map.db" 'pragma integrity_check;' '.dump' | md5sum
    done
done
/usr/bin/python3 "$SUITES/sqlite-processes.py" "$W/shared.db"
sqlite3 "$W/shared.db" 'pragma integrity_check; select journal_mode from pragma_journal_mode;'
echo "16 databases and a shared one"
