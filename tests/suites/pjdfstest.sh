# about: pjdfstest, every system call of POSIX on files, 398 cases
# packages: fuse-overlayfs
# version: "$PWD"/target/tools/bin/pjdfstest --version | cut -d' ' -f2
# limit: 900
# targets: overlayfs fuse-overlayfs
cat >pjdfstest.toml <<'X'
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.05
allow_remount = false
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
X
mkdir cases
# It fails when a case does; which ones is what is compared.
"$WORKSPACE/target/tools/bin/pjdfstest" -c "$W/pjdfstest.toml" -p "$W/cases" -s /dev/shm >all 2>err || true
cat all err >&2
# Skipped where libc does not know the most links of a file, which it does by the filesystem's type: on ext4, not by FUSE.
grep -v '^link::link_count_max ' all >counted
awk '$NF == "FAILED" { print "FAILED", $1 }' counted | sort
awk '$NF == "ok" { ok++ } $NF == "FAILED" { failed++ } END { print ok + 0 " passed, " failed + 0 " failed"; exit ok < 300 }' counted
