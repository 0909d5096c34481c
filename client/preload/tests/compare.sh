#!/bin/sh
# Runs the programs of this folder three times, on a directory of this machine, on a poolfs mount through FUSE, and on the
# mount through the preload library, and compares what they print. Everything happens in a mount namespace of its own.
# usage: compare.sh SERVICE LIBRARY      (poolfs-service and libpoolfs_preload.so, absolute)
set -eu
if [ "${COMPARE_INSIDE:-}" != yes ]; then
    COMPARE_INSIDE=yes exec unshare --mount --pid --fork --kill-child --mount-proc --propagation private "$0" "$@"
fi
service=$1 library=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'umount "$work"; rmdir "$work"' EXIT
mount -t tmpfs compare "$work"
mkdir -p "$work/plain" "$work/backing" "$work/mount"
# All of /run: a mount on /run/poolfs would go when somebody outside removes that directory.
mount -t tmpfs compare /run
mkdir /run/poolfs
chmod 755 "$work" "$work/backing"

printf '{"pool":"compare","cpus":[0],"cache_bytes":67108864,"control_socket":"%s","socket_directory":"/run/poolfs"}' \
    /run/poolfs/control.sock | "$service" 2>"$work/log" &
server=$!
python3 - "$work" <<'PYTHON'
import ctypes, json, os, socket, struct, sys, time
work = sys.argv[1]
control = socket.socket(socket.AF_UNIX)
for _ in range(100):
    try:
        control.connect("/run/poolfs/control.sock")
        break
    except OSError:
        time.sleep(0.05)
mount = {"command": "mount", "instance": "compare-1", "mount_point": work + "/mount", "devices": True, "is_root": False,
         "stack": {"kind": "directory", "directory": work + "/backing"}}
# A branch is sent as a private mount: open_tree(OPEN_TREE_CLONE | O_CLOEXEC), mount_setattr(nosuid, nodev, noatime, nosymfollow, private).
call = ctypes.CDLL(None, use_errno=True).syscall
branch = call(428, -100, (work + "/backing").encode(), 1 | os.O_CLOEXEC)
attributes = struct.pack("QQQQ", 0x200016, 0x70, 1 << 18, 0)
if branch < 0 or call(442, branch, b"", 0x1000, attributes, len(attributes)) != 0:
    sys.exit("no private mount: " + os.strerror(ctypes.get_errno()))
socket.send_fds(control, [(json.dumps(mount) + "\n").encode()], [branch])
answer = json.loads(control.makefile().readline())
sys.exit(None if answer["answer"] == "done" else str(answer))
PYTHON

failed=0
for program in families sharing jumps interrupted; do
    cc -Wall -Wextra -Werror -O1 -o "$work/$program" "$here/$program.c" -lpthread
    for way in plain fuse library; do
        directory=$work/mount/$way-$program
        [ $way = plain ] && directory=$work/plain/$program
        mkdir -m 755 "$directory"
        if [ $way = library ]; then
            LD_PRELOAD=$library POOLFS_TRACE=$work/trace "$work/$program" "$directory" >"$work/$way.$program"
        else
            "$work/$program" "$directory" >"$work/$way.$program"
        fi || { echo "$program ended with $? ($way)"; failed=1; }
    done
    for way in fuse library; do
        diff "$work/plain.$program" "$work/$way.$program" || { echo "$program differs ($way)"; failed=1; }
    done
done
# How many calls a program must have had served by the library at least, by request or directly, so that it says something about it.
at_least() {
    served=$(awk -v "program=$1" '
        $3 == program {
            count = 0
            for (i = 4; i <= NF; i++)
                if (split($i, part, "=") == 2 && (part[1] == "library" || part[1] == "direct")) count += part[2]
            if (count > most) most = count
        }
        END { print most + 0 }' "$work/trace")
    [ "$served" -ge "$2" ] || { echo "only $served calls by the library in $1"; failed=1; }
}
# Calls left by jumps cost sessions, and each time there is a next one: most calls go by request all the same.
mostly() {
    counts=$(sed -n "s/.* $1 library=\([0-9]*\) fuse=\([0-9]*\).*/\1 \2/p" "$work/trace")
    [ "${counts% *}" -gt "${counts#* }" ] || { echo "in $1 by library and FUSE: $counts"; failed=1; }
}
mostly jumps
at_least sharing 10000
at_least jumps 3000
at_least interrupted 9000
at_least families 100
kill $server && wait $server || true
[ $failed = 0 ] && echo "same by FUSE and by library ($served calls)"
exit $failed
