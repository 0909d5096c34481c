# packages: sqlite3
# The cases of SQLite's own speedtest1, in small.
awk '
function word(n) { return sprintf("%x %x", n * 7919 % 1048573, n * 104729 % 999983) }
BEGIN {
    for (n = 1; n <= 400; n++) {
        if (n == 1) print "create table z1(a integer, b integer, c text);"
        printf "insert into z1 values(%d, %d, \"%s\");\n", n, n * 7919 % 60013, word(n)
    }
    print "begin; create table z2(a integer primary key, b integer unique, c text);"
    for (n = 1; n <= 20000; n++) printf "insert into z2 values(%d, %d, \"%s\");\n", n * 7919 % 60013, n, word(n)
    print "commit;"
    for (n = 1; n <= 60; n++) printf "select count(*), avg(b), sum(length(c)) from z2 where b between %d and %d;\n", n * 200, n * 200 + 1000
    for (n = 1; n <= 20; n++) printf "select count(*), avg(b) from z2 where c like \"%%%x%%\";\n", n * 17
    print "begin; create index i1 on z2(c); create index i2 on z1(b); commit;"
    print "begin;"
    for (n = 1; n <= 5000; n++) printf "select a from z2 where b = %d;\n", n * 31 % 20000
    for (n = 1; n <= 5000; n++) printf "update z2 set c = \"%s\" where b = %d;\n", word(n + 1), n * 37 % 20000
    print "commit;"
    for (n = 1; n <= 200; n++) printf "update z1 set c = \"%s\" where a = %d;\n", word(n), n
    print "vacuum; begin; delete from z2 where b % 3 = 0; insert into z2 select a + 100000, b + 100000, c from z2; commit;"
    print "select count(*), sum(b) from z2 join z1 using (b); pragma integrity_check; drop table z2; drop table z1;"
}' >"$S/sqlite.sql"
for mode in delete wal; do
    sqlite3 "$W/$mode.db" "pragma journal_mode=$mode" >/dev/null
    begun=$(date +%s%N)
    sqlite3 "$W/$mode.db" <"$S/sqlite.sql" >"$S/sqlite.out"
    ended=$(date +%s%N)
    grep -qx ok "$S/sqlite.out"
    printf 'SQLite, a statement of speedtest1, journal_mode %s\t%d\n' "$mode" $(((ended - begun) / $(tr -cd ';' <"$S/sqlite.sql" | wc -c)))
done
