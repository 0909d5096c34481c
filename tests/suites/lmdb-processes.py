"""Processes that share one LMDB environment. Writers are killed only inside a transaction: elsewhere a kill stops LMDB itself."""
import lmdb, os, random, signal, sys, time

path, writemap = sys.argv[1], sys.argv[2] == "1"
ACCOUNTS, WRITERS, READERS, ROUNDS, KILLS = 300, 4, 3, 300, 4


def connect():
    return lmdb.open(path, map_size=64 << 20, max_dbs=4, writemap=writemap, sync=False, metasync=False, max_readers=32)


def number(n):
    return b"%012d" % n


def move(txn, numbers, accounts):
    a, b = numbers.sample(range(ACCOUNTS), 2)
    for which, change in ((a, -1), (b, 1)):
        txn.put(number(which), number(int(txn.get(number(which), db=accounts)) + change), db=accounts)


def writer(who):
    env, numbers = connect(), random.Random(who)
    accounts, log = env.open_db(b"accounts"), env.open_db(b"log")
    for n in range(ROUNDS):
        with env.begin(write=True) as txn:
            move(txn, numbers, accounts)
            txn.put(b"%d-%06d" % (who, n), b"x" * numbers.randrange(1, 9000), db=log)
            if n >= 100:
                txn.delete(b"%d-%06d" % (who, n - 100), db=log)
        if n % 50 == 0:
            env.sync(True)


def reader():
    env = connect()
    accounts = env.open_db(b"accounts", create=False)
    for _ in range(ROUNDS):
        with env.begin() as txn:
            values = [int(value) for _, value in txn.cursor(db=accounts)]
        assert (len(values), sum(values)) == (ACCOUNTS, ACCOUNTS * 100), (len(values), sum(values))
        time.sleep(0.001)


def doomed():
    env, numbers = connect(), random.Random(7)
    accounts, log = env.open_db(b"accounts"), env.open_db(b"log")
    txn = env.begin(write=True)
    for n in range(50):
        move(txn, numbers, accounts)
        txn.put(b"doomed-%06d" % n, b"y" * 5000, db=log)
    os.kill(os.getpid(), signal.SIGKILL)


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


env = connect()
accounts, log = env.open_db(b"accounts"), env.open_db(b"log")
with env.begin(write=True) as txn:
    for n in range(ACCOUNTS):
        txn.put(number(n), number(100), db=accounts)
env.close()
children = [child(writer, who) for who in range(WRITERS)] + [child(reader) for _ in range(READERS)]
for _ in range(KILLS):
    print("killed by", os.WTERMSIG(os.waitpid(child(doomed), 0)[1]))
    time.sleep(0.05)
print("ends", [os.waitpid(pid, 0)[1] for pid in children])
env = connect()
accounts, log = env.open_db(b"accounts", create=False), env.open_db(b"log", create=False)
with env.begin() as txn:
    values = [int(value) for _, value in txn.cursor(db=accounts)]
    keys = [key for key, _ in txn.cursor(db=log)]
print("accounts", len(values), sum(values), "log", len(keys), sum(key.startswith(b"doomed") for key in keys))
