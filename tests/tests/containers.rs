//! A real image in real containers: `image import`, `run`, `ps`, `logs`, `stop`, `rm`.

use poolfs_tests::{Pool, isolated, workspace};
use std::path::Path;
use std::time::{Duration, Instant};

/// A pool with the Debian image of `make run` imported as `debian`.
fn pool_with_image(folder: &Path) -> Pool {
    let tar = workspace().join(".poolfs-demo/root.tar");
    assert!(tar.exists(), "{} is missing: run `make test`, which makes it", tar.display());
    let pool = Pool::create(folder, "256M");
    let _ = pool.poolfs(&["image", "import", "debian", &format!("tar:{}", tar.display())]).expect("import");
    pool
}

#[test]
fn a_container_runs_real_programs_and_passes_on_how_they_end() {
    isolated("a_container_runs_real_programs_and_passes_on_how_they_end", |folder| {
        let pool = pool_with_image(folder);
        let run = |more: &[&str], script: &str| {
            let mut arguments = vec!["run", pool.name(), "debian", "--rm"];
            arguments.extend_from_slice(more);
            arguments.extend_from_slice(&["--", "/bin/sh", "-c", script]);
            pool.poolfs(&arguments)
        };
        let out = run(&[], "cat /etc/debian_version; id -u; echo $$; ls / | tr '\\n' ' '").expect("a container");
        assert!(out.lines().nth(1) == Some("0") && out.contains("proc"), "{out}");
        assert_eq!(run(&[], "exit 7").code, 7, "the exit code");
        // io_uring_setup, _enter and _register: work that the library does not see.
        let io_uring = "import ctypes; c = ctypes.CDLL(None, use_errno=True); \
                        print([(c.syscall(n, 0, 0, 0, 0, 0, 0), ctypes.get_errno()) for n in (425, 426, 427)])";
        let refused = run(&[], &format!("python3 -c '{io_uring}'")).expect("python");
        assert_eq!(refused.trim(), "[(-1, 1), (-1, 1), (-1, 1)]", "EPERM for each");
        // The kernel shields the first process of a container from its own signals, so a child gets one.
        assert_eq!(run(&[], "sh -c 'kill -TERM $$'; exit $?").code, 143, "a signal as the shell reports it");
        assert!(run(&["--env", "A=b c"], "echo \"$A\"").expect("env").contains("b c"));
        let sqlite = "import sqlite3; c = sqlite3.connect('/root/a.db'); c.execute('create table t(x)'); \
                      c.executemany('insert into t values(?)', [(i,) for i in range(1000)]); c.commit(); \
                      print(c.execute('pragma integrity_check').fetchone(), c.execute('select sum(x) from t').fetchone())";
        for mode in [&[][..], &["--legacy"][..]] {
            let out = run(mode, &format!("python3 -c \"{sqlite}\"")).expect("sqlite");
            assert!(out.contains("('ok',) (499500,)"), "{mode:?}: {out}");
            let out =
                run(mode, "cd /root && echo 'int main(void) { return 42; }' > a.c && gcc a.c -o a && ./a; echo $?")
                    .expect("gcc");
            assert_eq!(out.trim(), "42", "{mode:?}");
            let out = run(
                mode,
                "cd /root && git init -q r && cd r && echo x > f && git add f && git -c user.name=a -c user.email=a@b \
                commit -qm one && git fsck && git log --oneline | wc -l",
            )
            .expect("git");
            assert_eq!(out.trim(), "1", "{mode:?}");
        }
    });
}

#[test]
fn a_detached_container_is_listed_logged_stopped_and_removed() {
    isolated("a_detached_container_is_listed_logged_stopped_and_removed", |folder| {
        let pool = pool_with_image(folder);
        let name = "sleeper";
        let script =
            "echo started; echo kept > /root/file; trap 'echo stopping; exit 3' TERM; while :; do sleep 0.1; done";
        let _ = pool
            .poolfs(&["run", pool.name(), "debian", "--name", name, "-d", "--", "/bin/sh", "-c", script])
            .expect("run -d");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !pool.poolfs(&["logs", name]).expect("logs").contains("started") {
            assert!(Instant::now() < deadline, "the container does not start");
            std::thread::park_timeout(Duration::from_millis(50));
        }
        assert!(pool.poolfs(&["ps"]).expect("ps").contains(name));
        let twice = pool.poolfs(&["run", pool.name(), "debian", "--name", name, "--", "/bin/true"]);
        assert!(twice.code != 0 && twice.err.contains(name), "a name is used once: {twice:?}");
        assert_ne!(pool.poolfs(&["rm", name]).code, 0, "a running container is not removed");
        assert_ne!(pool.poolfs(&["pool", "rm", pool.name()]).code, 0, "a pool in use is not removed");
        let _ = pool.poolfs(&["stop", name]).expect("stop");
        assert!(pool.poolfs(&["logs", name]).expect("logs").contains("stopping"));
        let listed = pool.poolfs(&["ps", "--json"]).expect("ps");
        assert!(listed.contains("\"exit_code\":3") || listed.contains("\"exit_code\": 3"), "{listed}");
        let _ = pool.poolfs(&["rm", name]).expect("rm");
        assert!(!pool.poolfs(&["ps", "--json"]).expect("ps").contains(name));
        let _ = pool.poolfs(&["image", "rm", "debian"]).expect("image rm");
    });
}

#[test]
fn mistakes_are_answered_by_name_cause_and_remedy() {
    isolated("mistakes_are_answered_by_name_cause_and_remedy", |folder| {
        let pool = Pool::create(folder, "64M");
        for (arguments, named) in [
            (vec!["pool", "create", pool.name()], pool.name()),
            (vec!["pool", "inspect", "absent"], "absent"),
            (vec!["mount", pool.name(), "/nowhere/at/all", "--dir", "/tmp"], "/nowhere/at/all"),
            (vec!["mount", "absent", "/tmp", "--dir", "/tmp"], "absent"),
            (vec!["image", "import", "x", "tar:/nowhere.tar"], "/nowhere.tar"),
            (vec!["image", "import", "x", "zip:/tmp"], "zip:/tmp"),
            (vec!["run", pool.name(), "absent", "--", "true"], "absent"),
            (vec!["logs", "absent"], "absent"),
            (vec!["umount", pool.name(), "/tmp"], "/tmp"),
        ] {
            let outcome = pool.poolfs(&arguments);
            assert_ne!(outcome.code, 0, "{arguments:?} succeeded");
            assert!(outcome.err.contains(named), "{arguments:?} does not name {named}: {}", outcome.err);
        }
    });
}
