"""Processes that share one WAL database: accounts whose sum never changes, two writers killed in the middle of it all."""
import os, random, signal, sqlite3, sys, time

path = sys.argv[1]
ACCOUNTS, WRITERS, READERS, ROUNDS = 200, 4, 2, 250


def connect():
    db = sqlite3.connect(path, timeout=120, isolation_level=None)
    db.execute("pragma synchronous=normal")
    return db


def transfer(db, numbers, who):
    a, b = numbers.sample(range(ACCOUNTS), 2)
    db.execute("begin immediate")
    db.execute("update accounts set amount = amount - 1 where id = ?", (a,))
    db.execute("update accounts set amount = amount + 1 where id = ?", (b,))
    db.execute("insert into log(who) values(?)", (who,))
    db.execute("commit")


def writer(who, rounds):
    db, numbers = connect(), random.Random(who)
    for n in range(rounds):
        transfer(db, numbers, who)
        if n % 100 == 99:
            db.execute("pragma wal_checkpoint(passive)")


def reader():
    db = connect()
    for _ in range(ROUNDS):
        sums = db.execute("select sum(amount), count(*) from accounts").fetchone()
        assert sums == (ACCOUNTS * 100, ACCOUNTS), sums
        time.sleep(0.002)


def child(body, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            body(*arguments)
        except BaseException as error:
            print(f"{body.__name__}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


db = connect()
print(db.execute("pragma journal_mode=wal").fetchone()[0])
db.execute("create table accounts(id integer primary key, amount integer)")
db.execute("create table log(n integer primary key, who integer)")
db.executemany("insert into accounts values(?, 100)", [(i,) for i in range(ACCOUNTS)])
db.close()
honest = [child(writer, who, ROUNDS) for who in range(WRITERS)] + [child(reader) for _ in range(READERS)]
doomed = [child(writer, who, 1_000_000) for who in (100, 101)]
time.sleep(1.5)
for pid in doomed:
    os.kill(pid, signal.SIGKILL)
ends = [os.waitpid(pid, 0)[1] for pid in honest]
killed = [os.WTERMSIG(os.waitpid(pid, 0)[1]) for pid in doomed]
db = connect()
print("ends", ends, "killed by", killed)
print("sum", db.execute("select sum(amount), count(*) from accounts").fetchone())
print("log", db.execute("select who, count(*) from log where who < 100 group by who order by who").fetchall())
print("the killed wrote", db.execute("select count(*) > 0 from log where who >= 100").fetchone()[0])
