//! Containers with a user namespace: the owners of files inside, on the disk, and for others.

use poolfs_tests::{Outcome, Pool, Way, import_small, isolated};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MAP: &str = "0:100000:65536";
const TOOLS: [&str; 11] =
    ["chmod", "chown", "cp", "getfacl", "getfattr", "id", "mkdir", "setfacl", "setfattr", "setpriv", "stat"];
/// `cap_dac_override=ep`, without a root of its own.
const CAPABILITY: &str = "0x0100000202000000000000000000000000000000";

fn pool_with_image(folder: &Path) -> Pool {
    let pool = Pool::create(folder, "64M").patient();
    let tools = TOOLS.map(|tool| Path::new("/usr/bin").join(tool));
    let tools: Vec<&Path> = tools.iter().map(PathBuf::as_path).collect();
    import_small(&pool, folder, "small", &tools, |root| {
        fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).expect("ours");
        for (name, owner, mode) in [("of-root", 0, 0o600), ("of-33", 33, 0o640), ("of-far", 70_000, 0o666)] {
            fs::write(root.join(name), "of the image\n").expect("a file");
            chown(root.join(name), Some(owner), Some(owner)).expect("ours");
            fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).expect("ours");
        }
    });
    pool
}

fn run_command(pool: &Pool, options: &[&str], script: &str) -> Command {
    let mut all = pool.command();
    all.args(["run", pool.name(), "small"]).args(options).args(["--", "/bin/sh", "-euc", script]);
    all
}

fn run(pool: &Pool, options: &[&str], script: &str) -> Outcome {
    poolfs_tests::run(&mut run_command(pool, options, script))
}

fn stored(path: &Path) -> (u32, u32) {
    let found = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (found.uid(), found.gid())
}

fn wait_for_log(pool: &Pool, container: &str, text: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let log = pool.poolfs(&["logs", container]).expect("logs");
        if log.contains(text) {
            return log;
        }
        assert!(Instant::now() < deadline, "{text} does not come: {log}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a container's root and its users do, and see of it; every line is said by `say`.
const STORY: &str = r#"
    owner() { stat -c "%n %u:%g" "$@"; }
    refused() { "$@" 2>/tmp/why && echo "not refused: $*"; while read -r line; do echo "${line##*: }"; done < /tmp/why; }
    as_33() { setpriv --reuid=33 --regid=33 --clear-groups "$@"; }
    id -u
    owner / /of-root /of-33 /of-far
    echo x > /mine; mkdir /dir; owner /mine /dir
    chown 33:34 /mine; owner /mine
    refused chown 65536 /mine
    refused chown 0 /of-far
    refused chmod 600 /of-far
    refused cat /of-far > /tmp/far; owner /of-far
    echo more >> /of-root; owner /of-root
    as_33 sh -c 'echo y > /tmp/by-33; exec cat /of-33'; owner /tmp/by-33
    refused as_33 cat /of-root
    refused as_33 chown 0 /tmp/by-33
    cp /of-root /listed; chmod 600 /listed; setfacl -m u:33:r,g:44:rw /listed
    getfacl -ncp /listed
    as_33 cat /listed
    refused setfacl -m u:65536:r /listed
    cp /bin/id /bin/root-id; chmod 4755 /bin/root-id; as_33 /bin/root-id -u
    cp /bin/cat /bin/any-cat; setfattr -n security.capability -v CAPABILITY /bin/any-cat
    getfattr --only-values -n security.capability /bin/any-cat > /tmp/value; stat -c %s /tmp/value
    as_33 /bin/any-cat /of-root
"#;

const TOLD: &str = "0
/ 0:0
/of-root 0:0
/of-33 33:33
/of-far 65534:65534
/mine 0:0
/dir 0:0
/mine 33:34
Invalid argument
Value too large for defined data type
Value too large for defined data type
/of-far 65534:65534
/of-root 0:0
of the image
/tmp/by-33 33:33
Permission denied
Operation not permitted
user::rw-
user:33:r--
group::---
group:44:rw-
mask::rw-
other::---

of the image
more
Invalid argument
0
20
of the image
more
";

#[test]
fn stored_owners_are_the_containers_by_both_paths() {
    isolated("stored_owners_are_the_containers_by_both_paths", |folder| {
        let pool = pool_with_image(folder);
        let story = STORY.replace("CAPABILITY", CAPABILITY);
        for (name, options) in [("library", &[][..]), ("kernel", &["--legacy"])] {
            let options = [&["--userns", MAP, "--name", name], options].concat();
            let told = run(&pool, &options, &story).expect("a container");
            assert_eq!(told, TOLD, "{name}");
            let upper = folder.join("state/containers").join(name).join("upper");
            for (file, owner) in
                [("mine", (33, 34)), ("dir", (0, 0)), ("tmp/by-33", (33, 33)), ("of-root", (0, 0)), ("listed", (0, 0))]
            {
                assert_eq!(stored(&upper.join(file)), owner, "{name}: {file}");
            }
            let list =
                poolfs_tests::run(Command::new("getfacl").arg("-ncp").arg(upper.join("listed"))).expect("a list");
            assert!(list.contains("user:33:r--") && list.contains("group:44:rw-"), "{name}: {list}");
            let mut value = Command::new("getfattr");
            value.args(["--absolute-names", "-e", "hex", "-n", "security.capability"]).arg(upper.join("bin/any-cat"));
            let value = poolfs_tests::run(&mut value).expect("capabilities");
            assert!(value.contains(&format!("={CAPABILITY}\n")), "{name}: {value}");
            let _ = pool.poolfs(&["rm", name]).expect("rm");
        }
    });
}

#[test]
fn containers_of_one_image_see_their_own_root_and_nobody_else_gets_in() {
    isolated("containers_of_one_image_see_their_own_root_and_nobody_else_gets_in", |folder| {
        let pool = pool_with_image(folder);
        let maps = [("one", &["0:100000:65536"][..], 100_000), ("two", &["0:200000:1000", "70000:7:1"], 200_000)];
        let script = "stat -c '%u:%g' /of-root /of-far; cat /proc/self/uid_map; echo x > /own; chmod 644 /own; echo said > /dev/stdout
            echo >> /etc/hosts; echo ready; sleep 300";
        for (name, map, _) in maps {
            let ranges: Vec<&str> = map.iter().flat_map(|range| ["--userns", range]).collect();
            let options = [&["-d", "--name", name], &ranges[..]].concat();
            let _ = run(&pool, &options, script).expect("run -d");
        }
        let containers = folder.join("state/containers");
        for ((name, _, host), far) in maps.into_iter().zip(["65534:65534", "70000:70000"]) {
            let log = wait_for_log(&pool, name, "ready");
            assert!(log.starts_with(&format!("0:0\n{far}\n")) && log.contains("said"), "{name}: {log}");
            assert!(log.contains(&host.to_string()), "{name}: {log}");
            assert_eq!(stored(&containers.join(name).join("rootfs/own")), (host, host), "to the host's root");
            assert_eq!(stored(&containers.join(name).join("upper/own")), (0, 0));
        }
        assert_eq!(stored(&containers.join("two/rootfs/of-far")), (7, 7));
        assert!(pool.operations(Way::Library) > 0, "{}", pool.status());
        let listed = pool.poolfs(&["ps", "--json"]).expect("ps");
        let shown = pool.poolfs(&["pool", "inspect", pool.name(), "--json"]).expect("inspect");
        for text in [listed, shown] {
            let text: String = text.split_whitespace().collect();
            assert!(text.contains("[\"0:200000:1000\",\"70000:7:1\"]") && text.contains(MAP), "{text}");
        }
        // A process of the host that is somebody in the map, and is not in the container.
        let process = fs::read_to_string(containers.join("one/bundle/pid")).expect("it runs");
        let ways = "import os, socket, sys
os.setgroups([]); os.setgid(100000); os.setuid(100000)
def way(path, go):
    try: print(path, 'lets in', go(path))
    except PermissionError: print('refused')
for path in sys.argv[2:]: way(path, lambda path: open(path).read())
way(sys.argv[1], lambda path: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path))
print(sum(len(names) + len(files) for at, names, files in os.walk('/run/poolfs/roots') if at != '/run/poolfs/roots'))";
        let mut host = Command::new("python3");
        host.args(["-c", ways]).arg(format!("/run/poolfs/containers/{}-1.sock", pool.name()));
        host.args([containers.join("one/rootfs/own"), containers.join("one/upper/own")]);
        host.arg(format!("/proc/{}/root/own", process.trim()));
        assert_eq!(poolfs_tests::run(&mut host).expect("python3"), "refused\nrefused\nrefused\nrefused\n0\n");

        for (name, ..) in maps {
            let _ = pool.poolfs(&["stop", name, "--time", "0"]).expect("stop");
            let _ = pool.poolfs(&["rm", name]).expect("rm");
        }
        assert!(!Path::new("/run/poolfs").exists(), "nothing is left");
    });
}

#[test]
fn whatever_a_container_can_do_it_can_with_a_user_namespace() {
    isolated("whatever_a_container_can_do_it_can_with_a_user_namespace", |folder| {
        let pool = pool_with_image(folder);
        // One id is enough, although terminals have a group elsewhere.
        let least = &["--rm", "--userns", "0:100000:1"][..];
        assert_eq!(run(&pool, least, "exit 77").code, 77);
        let script = "ls /sys/class /dev/null /dev/pts/ptmx /proc/sys/kernel > /dev/null; cat /etc/hostname
            ! echo x > /sys/kernel/mm/ksm/run; ! echo x > /proc/sys/kernel/hostname; stat -fc %T /proc /sys";
        let told = run(&pool, &[least, &["--name", "here"]].concat(), script).expect("a container");
        assert_eq!(told, "here\nproc\nsysfs\n");
        for way in [&[][..], &["--legacy"]] {
            let options = [&["--rm", "-i", "--userns", MAP], way].concat();
            let mut command = run_command(&pool, &options, "cat");
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
            std::io::Write::write_all(&mut child.stdin.take().expect("piped"), b"one\n").expect("it reads");
            assert_eq!(child.wait_with_output().expect("ended").stdout, b"one\n");
        }
        let hungry = "head -c 300000000 /dev/zero | tail -n 1 > /dev/null";
        assert_eq!(run(&pool, &["--rm", "--userns", MAP, "--memory", "40M"], hungry).code, 137);
        // A terminal that nobody is at gets its size while the program begins.
        let terminal = "trap 'echo ended; exit 3' TERM; test -t 0
            while [ \"$(stty size)\" = '0 0' ]; do sleep 0.05; done; stty size; echo to > /dev/tty
            while :; do sleep 0.05; done";
        let _ = run(&pool, &["-d", "-t", "--name", "desk", "--userns", MAP], terminal).expect("run -d -t");
        let log = wait_for_log(&pool, "desk", "to");
        assert!(log.contains("24 80"), "{log}");
        let _ = pool.poolfs(&["stop", "desk"]).expect("stop");
        assert!(pool.poolfs(&["logs", "desk"]).expect("logs").contains("ended"));
        assert!(pool.poolfs(&["ps"]).expect("ps").contains("ended (3)"));
        let _ = pool.poolfs(&["rm", "desk"]).expect("rm");

        for (ranges, part) in [
            (&["1:100000:65536"][..], "root"),
            (&["0:100000:10", "10:100009:1"], "overlap"),
            (&["0:4294967295:1"], "last id"),
            (&["0:100000"], "INSIDE:HOST:COUNT"),
        ] {
            let options: Vec<&str> = ranges.iter().flat_map(|range| ["--userns", range]).collect();
            let refused = run(&pool, &options, "true");
            assert!(refused.code != 0 && refused.err.contains(part), "{ranges:?}: {refused:?}");
        }
        assert_eq!(pool.poolfs(&["ps", "--json"]).expect("ps").trim(), "[]", "what was refused leaves nothing");
    });
}
