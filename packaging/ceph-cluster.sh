#!/bin/bash
# A Ceph cluster for tests and trials in one folder, on this machine's loopback unless told otherwise: one monitor, one OSD, one metadata server, no systemd.
#   ceph-cluster.sh create FOLDER      make it and start it; FOLDER must not exist
#   ceph-cluster.sh start FOLDER [osd|mds]  start its daemons again, or one of them
#   ceph-cluster.sh stop FOLDER        end them
#   ceph-cluster.sh kill FOLDER [osd|mds]   end them as a power cut would, or one of them
#   ceph-cluster.sh quota FOLDER DIRECTORY BYTES   limit what a directory of its filesystem stores; it is made
#   ceph-cluster.sh snapshot FOLDER DIRECTORY NAME  make a snapshot of a directory
#   ceph-cluster.sh evict FOLDER       end the sessions of all clients, which may do nothing any more then
#   ceph-cluster.sh destroy FOLDER     kill them and remove the folder
# Clients take FOLDER/ceph.conf, which names the key of client.admin.
# Environment of create: STORE=memstore (the default) or bluestore, SIZE of a bluestore (8G), ADDRESS of its daemons (127.0.0.1), PORT of the
# monitor (0: a free one), MANAGER=yes: with a manager daemon (package ceph-mgr), as real clusters have one. Without it the cluster does not say how
# much room it has.
# `make ceph` installs the Debian packages that it needs.
set -eu
command=${1:?create, start, stop, kill, quota, snapshot, evict or destroy}
folder=$(realpath -m "${2:?the folder of the cluster}")
store=${STORE:-memstore}
address=${ADDRESS:-127.0.0.1}
size=$(numfmt --from=iec "${SIZE:-8G}")
export CEPH_CONF=$folder/ceph.conf CEPH_ARGS=
unset TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES

fail() {
    echo "ceph-cluster: $*; its logs are in $folder/log" >&2
    exit 1
}

# A monitor has its port in its map for good. The others take ports near it.
free_port() {
    /usr/bin/python3 -c 'import socket; s = socket.socket(); s.bind(("'"$address"'", 0)); print(s.getsockname()[1])'
}

configure() {
    local port=${PORT:-0}
    [ "$port" != 0 ] || port=$(free_port)
    cat >"$folder/ceph.conf" <<C
[global]
fsid = $(cat /proc/sys/kernel/random/uuid)
mon host = [v2:$address:$port]
public addr = $address
public network = $address/32
cluster network = $address/32
ms bind ipv4 = true
ms bind ipv6 = false
ms bind msgr1 = false
ms bind msgr2 = true
ms async op threads = 1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = $folder/keys/\$name
run dir = $folder/run
admin socket = $folder/run/\$name.\$pid.socket
log file = $folder/log/\$name
mon cluster log to file = false
crash dir = $folder/crash
log to stderr = false
err to stderr = true
debug mon = 0/0
debug paxos = 0/0
debug ms = 0/0
debug rocksdb = 0/0
debug bluestore = 0/0
debug bluefs = 0/0
debug bdev = 0/0
debug osd = 0/0
debug mds = 0/0
debug client = 0/0
debug auth = 0/0
debug monc = 0/0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[mon]
mon data = $folder/mon
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon warn on insecure global id reclaim allowed = false
mon data avail crit = 1
mon data avail warn = 2
mon max pg per osd = 1000
mon osd nearfull ratio = 0.95
mon osd backfillfull ratio = 0.96
mon osd full ratio = 0.97
paxos propose interval = 0.05
paxos min wait = 0.01
mon tick interval = 1
mon osd adjust heartbeat grace = false
mon osd min down reporters = 1
[osd]
osd data = $folder/osd
osd objectstore = $store
osd max pg log entries = 500
osd min pg log entries = 100
osd memory target = 939524096
osd op num shards = 2
osd op num threads per shard = 1
osd fast shutdown = $([ "$store" = memstore ] && echo false || echo true)
osd numa auto affinity = false
memstore device bytes = 4294967296
bluestore block size = $size
bdev aio poll ms = 10
bluestore cache autotune = false
bluestore cache size = 134217728
bluestore fsck on mount = false
[mds]
mds data = $folder/mds
mds cache memory limit = 268435456
mds beacon interval = 1
mds beacon grace = 60
mds reconnect timeout = 5
[mgr]
mgr data = $folder/mgr
mgr stats period = 1
[client]
keyring = $folder/keys/\$name
log file = $folder/log/\$name
admin socket = $folder/run/\$name.\$pid.\$cctid.socket
C
}

# All keys are made here and come with the monitor's first map.
make_keys() {
    /usr/bin/python3 - "$folder/keys" <<'P'
import base64, os, struct, sys, time

folder = sys.argv[1]
rights = {
    "mon.": {"mon": "allow *"},
    "client.admin": {"mon": "allow *", "osd": "allow *", "mds": "allow *"},
    "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
    "mgr.a": {"mon": "allow profile mgr", "osd": "allow *", "mds": "allow *"},
    "mds.a": {"mon": "allow profile mds", "osd": "allow *", "mds": "allow *"},
}
os.umask(0o077)
everybody = ""
for name, allowed in rights.items():
    key = base64.b64encode(struct.pack("<hiih", 1, int(time.time()), 0, 16) + os.urandom(16)).decode()
    own = "[%s]\n\tkey = %s\n" % (name, key)
    everybody += own + "".join('\tcaps %s = "%s"\n' % of for of in allowed.items())
    with open("%s/%s" % (folder, "mon.a" if name == "mon." else name), "w") as file:
        file.write(own)
with open(folder + "/everybody", "w") as file:
    file.write(everybody)
P
}

launch() { # kind id
    setsid "/usr/bin/ceph-$1" -f -i "$2" </dev/null >>"$folder/log/$1.out" 2>&1 &
    echo $! >"$folder/run/$1"
}

# What the monitor is asked: one connection for all of it.
ask() {
    /usr/bin/python3 - "$folder" "$@" <<'P' || fail "the monitor did not do: $*"
import json, os, rados, sys, time

folder, *what = sys.argv[1:]
cluster = rados.Rados(conffile=folder + "/ceph.conf", name="client.admin")
cluster.connect(timeout=60)


def command(prefix, **arguments):
    code, out, error = cluster.mon_command(json.dumps(dict(prefix=prefix, format="json", **arguments)), b"", 60)
    if code:
        sys.exit("%s: %s (%d)" % (prefix, error, code))
    return json.loads(out) if out.strip() else None


# After a kill the maps still have the old daemons for a while: they count only once they are other ones.
def renewed(kind, found):
    place = "%s/run/last-%s" % (folder, kind)
    last = open(place).read() if os.path.exists(place) else ""
    if found is None or str(found) == last:
        return False
    with open(place, "w") as file:
        file.write(str(found))
    return True


def osd():
    up = [one["up_from"] for one in command("osd dump")["osds"] if one["osd"] == 0 and one["up"]]
    return renewed("osd", up[0] if up else None)


def mds():
    infos = [one for fs in command("fs dump")["filesystems"] for one in fs["mdsmap"]["info"].values()]
    active = [one["gid"] for one in infos if one["state"] == "up:active"]
    return renewed("mds", active[0] if active else None)


# It serves once the cluster says how much room the data has.
def mgr():
    return any(one["name"] == "data" and one["stats"]["max_avail"] for one in command("df")["pools"])


def runs(kind):
    pid = open("%s/run/%s" % (folder, kind)).read().strip()
    try:
        return open("/proc/%s/stat" % pid).read().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def wait(what):
    end = time.monotonic() + 120
    while not what():
        if not runs(what.__name__):
            sys.exit("%s ended:\n%s" % (what.__name__, open("%s/log/%s.out" % (folder, what.__name__)).read()[-1000:]))
        if time.monotonic() > end:
            sys.exit("%s did not start" % what.__name__)
        time.sleep(0.02)


if what[0] == "register":
    command("osd new", uuid=what[1], id=0)
elif what[0] == "pools":
    command("osd pool create", pool="data", pg_num=8)
    command("osd pool create", pool="metadata", pg_num=4)
    command("fs new", fs_name="cephfs", metadata="metadata", data="data")
elif what[0] == "osd":
    wait(osd)
elif what[0] == "mds":
    wait(mds)
elif what[0] == "mgr":
    wait(mgr)
cluster.shutdown()
P
}

# What a client does that may do everything.
client() { # quota or snapshot, directory, argument
    /usr/bin/python3 - "$folder/ceph.conf" "$@" <<'P' || fail "no $1"
import ctypes, sys

configuration, what, directory, argument = (argument.encode() for argument in sys.argv[1:])
cephfs, mount = ctypes.CDLL("libcephfs.so.2"), ctypes.c_void_p()


def call(name, *arguments):
    code = cephfs[name](*arguments)
    if code < 0:
        sys.exit("%s: %d" % (name, code))


call("ceph_create", ctypes.byref(mount), None)
call("ceph_conf_read_file", mount, configuration)
call("ceph_mount", mount, b"/")
if what == b"quota":
    call("ceph_mkdirs", mount, directory, 0o755)
    call("ceph_setxattr", mount, directory, b"ceph.quota.max_bytes", argument, ctypes.c_size_t(len(argument)), 0)
else:
    call("ceph_mkdir", mount, directory + b"/.snap/" + argument, 0o755)
call("ceph_unmount", mount)
P
}

# Whether a daemon runs: one that has ended is a zombie until somebody waits for it. While others of its threads end, its first one is
# a zombie already, and its files are open and locked.
runs() {
    local state threads
    read -r state 2>/dev/null < <(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) || return 1
    [ "${state%% *}" = Z ] || return 0
    threads=("/proc/$1/task"/*)
    [ ${#threads[@]} -gt 1 ]
}

end() { # kind signal
    local pid
    pid=$(cat "$folder/run/$1" 2>/dev/null) || return 0
    if [ "$(readlink "/proc/$pid/exe")" = "/usr/bin/ceph-$1" ]; then
        kill "-$2" "$pid"
        for _ in $(seq 500); do
            runs "$pid" || break
            sleep 0.02
        done
        if runs "$pid"; then
            kill -9 "$pid"
            while runs "$pid"; do sleep 0.02; done
        fi
    fi
    rm -f "$folder/run/$1"
}

# Only where it was asked for.
manager() {
    [ ! -d "$folder/mgr" ] || "$@"
}

start() {
    launch mon a
    manager launch mgr a
    launch osd 0
    ask osd
    launch mds a
    ask mds
    manager ask mgr
}

case $command in
create)
    [ ! -e "$folder" ] || fail "$folder exists"
    (umask 077 && mkdir -p "$folder"/{run,log,crash,keys,mon,osd,mds})
    [ "${MANAGER:-no}" = no ] || mkdir "$folder/mgr"
    configure
    make_keys
    cp "$folder/keys/osd.0" "$folder/osd/keyring"
    monitor=$(sed -n 's/^mon host = //p' "$folder/ceph.conf")
    fsid=$(sed -n 's/^fsid = //p' "$folder/ceph.conf")
    monmaptool --create --fsid "$fsid" --addv a "$monitor" "$folder/monmap" >"$folder/log/monmaptool.out" 2>&1 || fail "no map of monitors"
    osd=$(cat /proc/sys/kernel/random/uuid)
    ceph-osd -i 0 --mkfs --osd-uuid "$osd" --no-mon-config --monmap "$folder/monmap" >"$folder/log/osd-mkfs.out" 2>&1 &
    making=$!
    ceph-mon --mkfs -i a --monmap "$folder/monmap" --keyring "$folder/keys/everybody" >"$folder/log/mon-mkfs.out" 2>&1 || fail "no monitor"
    launch mon a
    ask register "$osd"
    wait "$making" || fail "no OSD"
    launch osd 0
    manager launch mgr a
    ask pools
    ask osd
    launch mds a
    ask mds
    manager ask mgr
    ;;
start)
    case ${3:-all} in
    all) start ;;
    osd) launch osd 0 && ask osd ;;
    mds) launch mds a && ask mds ;;
    *) fail "${3} is no daemon of its own: osd or mds" ;;
    esac
    ;;
stop) for kind in mgr mds osd mon; do end "$kind" TERM; done ;;
kill) for kind in ${3:-mgr mds osd mon}; do end "$kind" KILL; done ;;
quota) client quota "${3:?the directory}" "${4:?how many bytes}" ;;
snapshot) client snapshot "${3:?the directory}" "${4:?its name}" ;;
evict)
    ceph tell mds.0 session ls 2>"$folder/log/evict.out" |
        /usr/bin/python3 -c 'import json, sys; print(*(session["id"] for session in json.load(sys.stdin)), sep="\n")' |
        while read -r client; do
            ceph tell mds.0 session evict "id=$client" </dev/null >>"$folder/log/evict.out" 2>&1 || fail "client $client keeps its session"
        done
    ;;
destroy)
    for kind in mgr mds osd mon; do end "$kind" KILL; done
    if [ -f "$folder/ceph.conf" ] && [ -d "$folder/mon" ]; then rm -rf "$folder"; fi
    ;;
*) fail "$command is none of create, start, stop, kill, quota, snapshot, evict and destroy" ;;
esac
