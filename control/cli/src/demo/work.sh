# What each container of the demonstration does. One line beginning with @@ tells of every step; the end waits for a line
# of input, so that the containers are still there when their services are asked.
failed=0
step() {
    name=$1
    echo "@@begin $name"
    if "$name" >/tmp/step.log 2>&1; then
        echo "@@end $(tail -n 1 /tmp/step.log)"
    else
        failed=$((failed + 1))
        tail -n 12 /tmp/step.log | sed 's/^/@@log /'
        echo "@@fail $name"
    fi
}

sqlite() {
    python3 - <<'PYTHON'
import os, sqlite3
path = "/root/demo.db"
c = sqlite3.connect(path)
c.execute("create table t(k integer primary key, v text)")
for start in range(0, 20000, 1000):
    with c:
        c.executemany("insert into t values(?, ?)", ((n, "value %d" % n) for n in range(start, start + 1000)))
with c:
    c.execute("update t set v = upper(v) where k % 3 = 0")
check = c.execute("pragma integrity_check").fetchone()[0]
rows = c.execute("select count(*) from t where v like 'VALUE%'").fetchone()[0]
c.close()
assert check == "ok" and rows == 20000, (check, rows)
print("20 transactions of 1000 rows, integrity %s, %d KiB" % (check, os.path.getsize(path) // 1024))
PYTHON
}

git() {
    mkdir -p /root/repository && cd /root/repository &&
        cp -r /usr/lib/python3*/json /usr/lib/python3*/email /usr/lib/python3*/asyncio . &&
        command git init -q && command git add . &&
        command git -c user.name=demo -c user.email=demo@localhost commit -qm first &&
        command git gc -q && command git fsck --strict --no-progress &&
        echo "$(command git ls-files | wc -l) files committed, packed and checked"
}

compiler() {
    cat >/root/primes.c <<'C'
#include <stdio.h>
#include <string.h>
static char sieve[2000000];
int main(void)
{
    int count = 0;
    FILE *out = fopen("/root/primes.txt", "w");
    if (!out)
        return 1;
    memset(sieve, 1, sizeof sieve);
    for (long n = 2; n < (long)sizeof sieve; n++) {
        if (!sieve[n])
            continue;
        count++;
        fprintf(out, "%ld\n", n);
        for (long m = n * n; m < (long)sizeof sieve; m += n)
            sieve[m] = 0;
    }
    if (fclose(out))
        return 1;
    printf("compiled and run: %d primes written\n", count);
    return count == 148933 ? 0 : 1;
}
C
    gcc -O2 -Wall -o /root/primes /root/primes.c && /root/primes &&
        test "$(wc -l </root/primes.txt)" = 148933 && /root/primes
}

apt() {
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends tree &&
        tree -d -L 1 /usr >/dev/null && echo "installed $(tree --version | cut -d' ' -f1-2)"
}

bytes() {
    python3 - <<'PYTHON'
import glob, os
path = max(glob.glob("/usr/lib/*-linux-gnu/libc.a"), key=os.path.getsize)
size = os.path.getsize(path)
places = [size * n // 20 for n in range(1, 20, 2)]
f = os.open(path, os.O_RDWR)
old = [os.pread(f, 1, at)[0] for at in places]
for at, value in zip(places, old):
    os.pwrite(f, bytes([value ^ 255]), at)
os.fsync(f)
os.close(f)
with open(path, "rb") as again:
    content = again.read()
assert len(content) == size and [content[at] ^ 255 for at in places] == old
print("%d bytes changed across %s of %d KiB" % (len(places), path, size // 1024))
PYTHON
}

for name in sqlite git compiler apt bytes; do
    step "$name"
done
echo "@@done $failed"
read -r _
exit "$failed"
