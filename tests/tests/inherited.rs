//! What processes of poolfs inherit from the caller of the command that started them: only what they were given on purpose.

use poolfs_tests::{Pool, Way, import_small, isolated, run, wait_until};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Run with the descriptors 8, a directory of the host, the first argument, and 9, a lock in it.
const WITH_DESCRIPTORS: &str = "exec 8<\"$1\" 9>>\"$1/lock\"; shift; flock 9; exec \"$@\"";
/// What a user has in the environment that concerns nobody else.
const SECRET: (&str, &str) = ("PASSWORD", "secret");

/// A directory of somebody who has descriptors in it.
fn directory_of_somebody(folder: &Path) -> PathBuf {
    let directory = folder.join("somebody");
    fs::create_dir(&directory).expect("a folder");
    directory
}

/// The command as run by somebody with descriptors and an environment of his own.
fn as_of_somebody(command: &Command, directory: &Path) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-euc", WITH_DESCRIPTORS, "sh"]).arg(directory).arg(command.get_program()).args(command.get_args());
    shell.envs([SECRET, ("LISTEN_FDS", "2"), ("LISTEN_PID", "1"), ("POOLFS_LOG", "info")]);
    shell
}

/// What the descriptors of a process are open on.
fn open_in(process: &Path) -> Vec<PathBuf> {
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok()).collect()
}

/// The processes that have a file open: in the namespace of this test are no others than those it started.
fn who_has(file: &Path) -> Vec<String> {
    let processes = fs::read_dir("/proc").expect("listed").flatten().map(|entry| entry.path());
    let having = processes.filter(|process| open_in(process).iter().any(|open| open == file));
    having.map(|process| fs::read_to_string(process.join("cmdline")).unwrap_or_default().replace('\0', " ")).collect()
}

/// The command has ended, and nobody has any of these descriptors.
fn all_is_let_go(directory: &Path) {
    let lock = directory.join("lock");
    assert_eq!(who_has(&lock), [""; 0]);
    assert_eq!(who_has(directory), [""; 0]);
    let file = File::open(lock).expect("there");
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("the lock is free");
}

fn variables(pid: i32) -> BTreeSet<String> {
    let text = fs::read(format!("/proc/{pid}/environ")).expect("it runs");
    let variables = text.split(|byte| *byte == 0).filter(|variable| !variable.is_empty());
    let name = |variable: &[u8]| String::from_utf8_lossy(variable).split('=').next().unwrap_or_default().to_owned();
    // The C library cuts its own to pieces.
    variables.map(name).filter(|name| !name.starts_with("glibc.")).collect()
}

fn has_only_what_is_used(pid: i32) {
    let used = ["GLIBC_TUNABLES", "PATH", "POOLFS_LOG", "RUST_BACKTRACE"].map(str::to_owned).into();
    let all = variables(pid);
    assert!(all.is_subset(&used), "{all:?}");
    assert!(all.contains("PATH") && all.contains("POOLFS_LOG"), "{all:?}");
}

fn pool_with_image(folder: &Path) -> Pool {
    let pool = Pool::create(folder, "64M");
    import_small(&pool, folder, "small", &[], |_| {});
    pool
}

#[test]
fn a_service_has_nothing_of_whoever_started_it() {
    isolated("a_service_has_nothing_of_whoever_started_it", |folder| {
        let pool = Pool::create(folder, "16M");
        let somebody = directory_of_somebody(folder);
        for name in ["mnt", "data"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        let mut mount = as_of_somebody(&pool.line("mount POOL @mnt --dir @data"), &somebody);
        let _ = run(&mut mount).expect("mount");
        let _mounted = pool.mounted(&folder.join("mnt"));
        all_is_let_go(&somebody);
        has_only_what_is_used(pool.service_pid());
    });
}

#[test]
fn a_detached_container_has_nothing_of_whoever_started_it() {
    isolated("a_detached_container_has_nothing_of_whoever_started_it", |folder| {
        let pool = pool_with_image(folder);
        let somebody = directory_of_somebody(folder);
        let script = "echo \"<${PASSWORD-}> <$LISTENED> ${LISTEN_FDS-none} ${NOTIFY_SOCKET-none}\"; exec sleep 600";
        let run_detached = pool.line("run POOL small -d --name web --env LISTENED -- /bin/sh -c");
        let mut run_detached = as_of_somebody(&run_detached, &somebody);
        // With the socket of a service manager the runtime would wait for a message of the container, also when that has ended.
        run_detached.envs([("LISTENED", "to"), ("NOTIFY_SOCKET", "/run/notify")]);
        let _ = run(run_detached.arg(script)).expect("run -d");
        all_is_let_go(&somebody);
        let listed: serde_json::Value =
            serde_json::from_str(&pool.poolfs(&["ps", "--json"]).expect("ps")).expect("what it prints");
        let monitor = listed[0]["monitor"]["pid"].as_i64().unwrap_or_else(|| panic!("no monitor in {listed}"));
        for pid in [i32::try_from(monitor).expect("a process"), pool.service_pid()] {
            has_only_what_is_used(pid);
        }
        // What it was given it has.
        wait_until("the log", || pool.poolfs(&["logs", "web"]).expect("logs").contains("<> <to> none none"));
        let _ = pool.poolfs(&["stop", "--time", "0", "web"]).expect("stop");
        let _ = pool.poolfs(&["rm", "web"]).expect("rm");
    });
}

/// Starts a command, with a pipe at its input.
fn start(mut command: Command) -> Child {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started")
}

#[test]
fn a_container_has_its_input_and_output_only() {
    isolated("a_container_has_its_input_and_output_only", |folder| {
        let pool = pool_with_image(folder);
        let somebody = directory_of_somebody(folder);
        // Of `ls` the fourth is the directory itself.
        let script =
            "read line; echo \"read $line\"; ls /proc/self/fd; echo \"${LISTEN_FDS-none}\"; echo said >&2; exit 7";
        let mut run_it = pool.line("run POOL small --rm -i --name web -- /bin/sh -c");
        let child = start(as_of_somebody(run_it.arg(script), &somebody));
        wait_until("the container", || pool.poolfs(&["ps"]).expect("ps").contains("running"));
        let having = who_has(&somebody.join("lock"));
        assert!(having.len() == 1 && having[0].contains(" run "), "{having:?}");
        child.stdin.as_ref().expect("piped").write_all(b"this\n").expect("written");
        let output = child.wait_with_output().expect("ended");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.replace('\n', " "), "read this 0 1 2 3 none ");
        assert!(String::from_utf8_lossy(&output.stderr).contains("said"), "{output:?}");
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        all_is_let_go(&somebody);
    });
}

#[test]
fn what_exec_runs_has_the_descriptors_of_whoever_runs_it_and_nobody_else() {
    isolated("what_exec_runs_has_the_descriptors_of_whoever_runs_it_and_nobody_else", |folder| {
        let pool = Pool::create(folder, "16M");
        let somebody = directory_of_somebody(folder);
        let lock = somebody.join("lock");
        for name in ["kept", "mnt", "data"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        fs::write(folder.join("data/file"), "on the mount\n").expect("a file");
        let at = |name: &str| folder.join(name).display().to_string();
        for way in [Way::Library, Way::Fuse] {
            let mut command = pool.command();
            command.arg("exec").args((way == Way::Fuse).then_some("--fuse"));
            command.args([pool.name(), "--mount", &format!("at={},dir={}", at("mnt"), at("data")), "--", "sh", "-euc"]);
            // The lock is the caller's, and so is the environment.
            let script = "ls -d /proc/self/fd/8/lock; echo \"$PASSWORD\"; echo locked >&9; read line; echo \"$line\"";
            command.arg(script);
            let child = start(as_of_somebody(&command, &somebody));
            wait_until("the program", || fs::read_to_string(&lock).is_ok_and(|text| text == "locked\n"));
            let having = who_has(&lock);
            let is_of_service = |line: &String| line.contains("poolfs-service");
            assert!(having.len() >= 2 && !having.iter().any(is_of_service), "{way}: {having:?}");
            child.stdin.as_ref().expect("piped").write_all(b"input\n").expect("written");
            let output = child.wait_with_output().expect("ended");
            let said = String::from_utf8_lossy(&output.stdout);
            assert_eq!(said, "/proc/self/fd/8/lock\nsecret\ninput\n", "{way}: {output:?}");
            all_is_let_go(&somebody);
            fs::remove_file(&lock).expect("removed");
        }
        // A file of a mount, opened by a shell that knows nothing of poolfs.
        let mounted = pool.mount_directory(&folder.join("kept"), &folder.join("data"));
        let line = format!("exec \"$@\" 3<{}/file", at("kept"));
        let mut shell = Command::new("sh");
        let command = pool.line("exec POOL -- sh -c");
        shell.args(["-euc", &line, "sh"]).arg(command.get_program()).args(command.get_args());
        assert_eq!(run(shell.arg("cat <&3")).expect("exec"), "on the mount\n");
        drop(mounted);
    });
}
