//! Isolation: a container reaches nothing of others, in the same pool or another, and a child nothing of its parent's session.

use poolfs_tests::{Outcome, Pool, Way, compile, import_small, isolated};
use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const SECRET: &str = "nobody-elses";

/// A container that has written a file and stays.
struct Running<'a> {
    pool: &'a Pool,
    name: &'static str,
    child: Child,
}

impl<'a> Running<'a> {
    fn start(pool: &'a Pool, folder: &Path, name: &'static str) -> Self {
        let mut command = pool.command();
        let script =
            format!("echo {SECRET}-{name} > /secret; cat /secret; trap 'exit 0' TERM; while sleep 0.2; do :; done");
        command.args(["run", pool.name(), "small", "--name", name, "--", "/bin/sh", "-c", &script]);
        let said = folder.join(format!("said-{name}"));
        let child = command.stdout(fs::File::create(&said).expect("a file")).stdin(Stdio::null()).spawn();
        let running = Self { pool, name, child: child.expect("it starts") };
        let deadline = Instant::now() + Duration::from_secs(60);
        while fs::read_to_string(&said).expect("readable").trim() != format!("{SECRET}-{name}") {
            assert!(Instant::now() < deadline, "the container {name} does not start");
            std::thread::park_timeout(Duration::from_millis(20));
        }
        running
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = self.pool.poolfs(&["stop", self.name]).expect("stop");
            self.child.wait().expect("ours");
            let _ = self.pool.poolfs(&["rm", self.name]).expect("rm");
        }
    }
}

/// The sockets of all instances, as the host has them.
fn sockets() -> Vec<String> {
    let listed = fs::read_dir("/run/poolfs/containers").expect("containers run");
    listed.map(|entry| entry.expect("readable").path().display().to_string()).collect()
}

#[test]
fn a_container_finds_nothing_of_another_in_its_pool_or_in_others() {
    isolated("a_container_finds_nothing_of_another_in_its_pool_or_in_others", |folder| {
        let other_folder = folder.join("other");
        fs::create_dir(&other_folder).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let other = Pool::named(&other_folder, &format!("{}-2", pool.name()), "64M");
        for (pool, folder) in [(&pool, folder), (&other, &*other_folder)] {
            import_small(pool, folder, "small", &[], |_| {});
        }
        let neighbours =
            [Running::start(&pool, folder, "same-pool"), Running::start(&other, &other_folder, "other-pool")];
        let all = sockets();
        assert_eq!(all.len(), neighbours.len(), "{all:?}");
        let inside = |script: &str| -> Outcome {
            pool.poolfs(&["run", pool.name(), "small", "--rm", "--", "/bin/sh", "-c", script])
        };
        // Its own socket and the library are all there is.
        let listed = inside("ls /run/poolfs").expect("ls");
        let names: Vec<&str> = listed.split_whitespace().collect();
        assert_eq!(names.iter().filter(|name| name.ends_with(".sock")).count(), 1, "{listed}");
        assert!(all.iter().all(|socket| !names.iter().any(|name| socket.ends_with(name))), "{listed} of {all:?}");
        // What the host has where the others are is not there, by any way out that a container has.
        let roots = ["", "/proc/1/root", "/proc/self/root", "/proc/self/cwd", "/..", "/proc/1/cwd"];
        let state = [folder.join("state"), other_folder.join("state")].map(|path| path.display().to_string());
        let paths = roots.iter().flat_map(|root| all.iter().chain(&state).map(move |path| format!("{root}{path}")));
        let paths: Vec<String> = paths.collect();
        let tried = inside(&format!("for path in {}; do ls -d $path && echo; done; ls -d /bin/sh", paths.join(" ")));
        assert_eq!(tried.out, "/bin/sh\n", "{tried:?}");
        // No process but its own, so that there are no descriptors of others to be opened.
        let processes = inside("ls -d /proc/[0-9]*").expect("ls");
        assert!(processes.split_whitespace().count() <= 3, "{processes}");
        // No mount but its own.
        let table = inside("cat /proc/self/mountinfo").expect("readable");
        assert_eq!(table.lines().filter(|line| line.contains("fuse.poolfs")).count(), 1, "{table}");
        let searched = inside(
            "for f in /* /*/* /proc/1/* /dev/*; do case $f in /proc/*mem|/dev/*) ;; *) \
            [ -f $f ] && head -c 100000 $f 2>/dev/null;; esac; done; true",
        );
        assert!(!searched.out.contains(&format!("{SECRET}-")), "the content of a neighbour's file");
        drop(neighbours);
    });
}

#[test]
fn a_child_that_is_forked_while_a_session_is_made_has_nothing_of_it() {
    isolated("a_child_that_is_forked_while_a_session_is_made_has_nothing_of_it", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        fs::write(directory.join("file"), "x").expect("a file");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let program = compile(folder, "heir", false);
        let script = format!("{} {}/file {}", program.display(), at.display(), pool.service_pid());
        let said = pool.shell(Way::Library, &script).expect("heir");
        assert_eq!(said, "while it is made: a socket\nchild 0\n");
        drop(mount);
    });
}
