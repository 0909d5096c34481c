//! Commands that are killed half way, and concurrent commands: the state stays consistent, and nothing is left behind for good.

use poolfs_tests::{Outcome, Pool, import_small, isolated, run};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Moments at which a command is killed.
const MOMENTS: u32 = 12;

struct Place<'a> {
    pool: Pool,
    folder: &'a Path,
}

impl<'a> Place<'a> {
    fn make(folder: &'a Path) -> Self {
        let pool = Pool::create(folder, "16M").patient();
        import_small(&pool, folder, "small", &[], |_| {});
        for name in ["data", "mnt", "root"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        fs::write(folder.join("root/file"), vec![1; 3 << 20]).expect("a file");
        Self { pool, folder }
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// Runs a command of one line; `POOL` and `@NAME` in it stand for the pool and for a path in the test's folder.
    fn poolfs(&self, line: &str) -> Outcome {
        run(&mut self.command(line))
    }

    fn command(&self, line: &str) -> Command {
        self.pool.line(line)
    }

    /// Kills a command after a while; it may have ended before.
    fn kill_after(&self, line: &str, while_: Duration) {
        let mut command = self.command(line);
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("poolfs starts");
        std::thread::sleep(while_);
        child.kill().expect("ours");
        child.wait().expect("ours");
    }

    /// Kills `line` at many moments of its life. `before` prepares each time, `after` are the commands that clean up: each may
    /// say that there is nothing to do, but then nothing must be there.
    fn kill_at_every_moment(&self, before: &[&str], line: &str, after: &[&str]) {
        let prepare = || before.iter().for_each(|line| drop(self.poolfs(line).expect(line)));
        prepare();
        let begun = Instant::now();
        // A container that runs on is killed when it certainly runs.
        if !line.contains("sleep") {
            let _ = self.poolfs(line);
        }
        let whole = if line.contains("sleep") { Duration::from_millis(700) } else { begun.elapsed() };
        self.clean(line, after);
        for moment in 0..MOMENTS {
            prepare();
            self.kill_after(line, whole * moment / MOMENTS);
            self.clean(&format!("{line} (killed at {moment}/{MOMENTS} of {whole:?})"), after);
        }
    }

    fn clean(&self, what: &str, after: &[&str]) {
        for line in after {
            let mut outcome = self.poolfs(line);
            let deadline = Instant::now() + Duration::from_secs(10);
            while outcome.err.contains("only just being started") && Instant::now() < deadline {
                outcome = self.poolfs(line);
            }
            let absent = ["there is no such", "has no mount there", "image other: it does not exist"];
            let fine = outcome.code == 0 || absent.iter().any(|part| outcome.err.contains(part));
            assert!(fine, "after {what}: {line}: {}\n{}", outcome.err, self.pool.service_log());
        }
        let mounts = fs::read_to_string("/proc/self/mounts").expect("readable");
        let own = self.folder.to_str().expect("text");
        let left: Vec<&str> = mounts.lines().filter(|line| line.contains(own)).collect();
        assert!(left.is_empty(), "after {what}: {left:?}");
        assert_eq!(self.poolfs("ps --json").expect("ps").trim(), "[]", "after {what}");
    }

    /// Nothing is left but the pool and the image.
    fn check_state(&self) {
        let _ = self.poolfs("run POOL small --rm -- /bin/sh -c :").expect("the next container");
        let _ = self.poolfs("image import last dir:@root").expect("the next import");
        let _ = self.poolfs("image rm last").expect("image rm");
        let _ = self.poolfs("pool create last").expect("the next pool");
        let _ = self.poolfs("pool rm last").expect("pool rm");
        let names = |path: &str| {
            let listed = fs::read_dir(self.folder.join("state").join(path)).expect("readable");
            let all = listed.map(|entry| entry.expect("readable").file_name().into_string().expect("text"));
            let mut names: Vec<_> = all.filter(|name| !matches!(name.as_str(), ".lock" | ".reserve")).collect();
            names.sort();
            names
        };
        assert_eq!(names("pools"), [self.pool.name()]);
        assert_eq!(names("containers"), [""; 0]);
        assert_eq!(names("images"), ["small.json"]);
        assert_eq!(names("layers").len(), 1, "{:?}", names("layers"));
        let run: Vec<_> = fs::read_dir("/run/poolfs").into_iter().flatten().flatten().map(|e| e.path()).collect();
        assert!(run.is_empty(), "{run:?}");
    }
}

#[test]
fn a_killed_run_leaves_what_the_next_commands_take_away() {
    isolated("a_killed_run_leaves_what_the_next_commands_take_away", |folder| {
        let place = Place::make(folder);
        place.kill_at_every_moment(&[], "run POOL small --name c -- /bin/sleep 60", &["ps", "stop c --time 0", "rm c"]);
        place.kill_at_every_moment(&[], "run POOL small --name c --rm -- /bin/sh -c :", &["stop c --time 0", "rm c"]);
        place.kill_at_every_moment(&[], "run POOL small --name c -d -- /bin/sleep 60", &["stop c --time 0", "rm c"]);
        let detached = ["run POOL small --name c -d -- /bin/sleep 60"];
        place.kill_at_every_moment(&detached, "stop c --time 0", &["stop c --time 0", "rm c"]);
        let ended = ["run POOL small --name c -- /bin/sh -c :"];
        place.kill_at_every_moment(&ended, "rm c", &["rm c"]);
        place.check_state();
    });
}

#[test]
fn a_killed_mount_or_import_leaves_what_the_next_commands_take_away() {
    isolated("a_killed_mount_or_import_leaves_what_the_next_commands_take_away", |folder| {
        let place = Place::make(folder);
        let mount = "mount POOL @mnt --dir @data";
        place.kill_at_every_moment(&[], mount, &["umount POOL @mnt"]);
        place.kill_at_every_moment(&[mount], "umount POOL @mnt", &["umount POOL @mnt"]);
        let exec = "exec --mount at=@mnt,dir=@data -- /bin/sh -c :";
        place.kill_at_every_moment(&[], exec, &["exec -- /bin/sh -c :"]);
        place.kill_at_every_moment(&[], "image import other dir:@root", &["image rm other"]);
        place.kill_at_every_moment(&["image import other dir:@root"], "image rm other", &["image rm other"]);
        place.kill_at_every_moment(&[], "pool create other", &["pool rm other"]);
        place.kill_at_every_moment(&["pool create other"], "pool rm other", &["pool rm other"]);
        place.check_state();
    });
}

#[test]
fn commands_at_once_do_not_disturb_each_other() {
    isolated("commands_at_once_do_not_disturb_each_other", |folder| {
        let place = &Place::make(folder);
        let (made, removed) = (std::sync::atomic::AtomicU32::new(0), std::sync::atomic::AtomicU32::new(0));
        let count = |counter: &std::sync::atomic::AtomicU32, line: &str| {
            counter.fetch_add(u32::from(place.poolfs(line).code == 0), std::sync::atomic::Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for number in 0..3 {
                let all = [
                    format!("run POOL small --rm --name c{number} -- /bin/sh -c :"),
                    format!("pool create own{number}"),
                    format!("mount own{number} @at{number} --dir @data{number}"),
                    format!("image import i{number} dir:@root"),
                    format!("run own{number} small --name d{number} -d -- /bin/sleep 60"),
                    "status".to_owned(),
                    format!("stop d{number} --time 0"),
                    format!("rm d{number}"),
                    format!("image rm i{number}"),
                    format!("umount own{number} @at{number}"),
                    format!("pool rm own{number}"),
                ];
                for name in ["at", "data"] {
                    fs::create_dir(folder.join(format!("{name}{number}"))).expect("a folder");
                }
                scope.spawn(move || {
                    for round in 0..3 {
                        for line in &all {
                            let outcome = place.poolfs(line);
                            let log = || place.pool.service_log();
                            assert_eq!(outcome.code, 0, "round {round}: {line}: {}\n{}", outcome.err, log());
                        }
                    }
                });
                // The same name, by all at once: one makes it, one removes it.
                scope.spawn(|| {
                    for _ in 0..5 {
                        count(&made, "pool create contested");
                        count(&removed, "pool rm contested");
                    }
                });
            }
        });
        count(&removed, "pool rm contested");
        assert_eq!(made.into_inner(), removed.into_inner());
        place.check_state();
    });
}

/// A program of this name that is a shell script.
fn script(path: &Path, lines: &str) {
    fs::write(path, format!("#!/bin/sh\n{lines}\n")).expect("a file");
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
}

#[test]
fn a_runtime_that_fails_half_way_is_told_of_and_leaves_nothing() {
    isolated("a_runtime_that_fails_half_way_is_told_of_and_leaves_nothing", |folder| {
        let place = Place::make(folder);
        let runc = run(Command::new("sh").args(["-c", "command -v runc"])).expect("runc").trim().to_owned();
        fs::create_dir(folder.join("bin")).expect("a folder");
        let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").expect("a path"));
        // Its arguments begin with --root DIR; delete and kill are done as ever.
        let others = format!("case \"$*\" in *' run '*) ;; *) exec {runc} \"$@\" ;; esac");
        for (fails, part) in [
            ("exit 3", "did not say why"),
            ("kill -KILL $$", "signal: 9"),
            ("echo noise >&2; exit 0", "did not say why"),
            (&format!("({runc} \"$@\" & echo $! > {0}; wait); exit 1", folder.join("pid").display()), ""),
        ] {
            script(&folder.join("bin/runc"), &format!("{others}\n{fails}"));
            for line in ["run POOL small --name c -- /bin/sh -c :", "run POOL small --name c -d -- /bin/sh -c :"] {
                let outcome = run(place.command(line).env("PATH", &path));
                if part.is_empty() {
                    continue;
                }
                assert!(outcome.code == 125 && outcome.err.contains(part), "{fails}: {line}: {outcome:?}");
                assert_eq!(place.poolfs("ps --json").expect("ps").trim(), "[]", "{fails}: {line}");
            }
            place.clean(fails, &["rm c"]);
        }
        place.check_state();
    });
}

#[test]
fn a_service_that_dies_at_its_start_is_told_of_and_leaves_nothing() {
    isolated("a_service_that_dies_at_its_start_is_told_of_and_leaves_nothing", |folder| {
        let place = Place::make(folder);
        let bin = folder.join("bin");
        fs::create_dir(&bin).expect("a folder");
        fs::copy(poolfs_tests::program("poolfs"), bin.join("poolfs")).expect("a copy");
        fs::copy(poolfs_tests::program("libpoolfs_preload.so"), bin.join("libpoolfs_preload.so")).expect("a copy");
        for (fails, part) in
            [("echo broken >&2; exit 3", "broken"), ("kill -KILL $$", "signal: 9"), ("exit 0", "at once")]
        {
            script(&bin.join("poolfs-service"), fails);
            for line in [
                "mount POOL @mnt --dir @data",
                "run POOL small --name c -- /bin/sh -c :",
                "run POOL small --name c -d -- /bin/sh -c :",
                "exec --mount at=@mnt,dir=@data -- /bin/sh -c :",
            ] {
                let whole = place.command(line);
                let outcome = run(Command::new(bin.join("poolfs")).args(whole.get_args()));
                assert!(outcome.code != 0 && outcome.err.contains(part), "{fails}: {line}: {outcome:?}");
                assert_eq!(place.poolfs("ps --json").expect("ps").trim(), "[]", "{fails}: {line}");
                assert!(place.poolfs("pool ls").expect("pool ls").contains("not running"), "{fails}: {line}");
            }
        }
        place.check_state();
    });
}

#[test]
fn a_directory_of_sockets_without_room_is_told_of() {
    isolated("a_directory_of_sockets_without_room_is_told_of", |folder| {
        let place = Place::make(folder);
        let _ = poolfs_tests::shell("mount -t tmpfs -o nr_inodes=1 tmpfs /run/poolfs").expect("a full /run/poolfs");
        for line in ["mount POOL @mnt --dir @data", "run POOL small --name c -- /bin/sh -c :"] {
            let outcome = place.poolfs(line);
            assert!(outcome.code != 0 && outcome.err.contains("/run/poolfs"), "{line}: {outcome:?}");
            assert!(outcome.err.contains("No space left"), "{line}: {outcome:?}");
            place.clean(line, &["rm c"]);
        }
        let _ = poolfs_tests::shell("umount /run/poolfs").expect("room again");
        place.check_state();
    });
}

#[test]
fn odd_names_work_or_are_refused() {
    isolated("odd_names_work_or_are_refused", |folder| {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        let place = Place::make(folder);
        let pool = place.pool.name();
        for name in
            ["two words", "line\nend", "back\\slash", "-dash", "\u{e4}\u{1f41f}", "tab\t", "%s", "a:b,c=d", "quote'\""]
        {
            let (at, data) = (folder.join(name), folder.join(format!("data of {name}")));
            fs::create_dir(&at).expect("a folder");
            fs::create_dir(&data).expect("a folder");
            let poolfs = |arguments: &[&OsStr]| run(place.pool.command().args(arguments));
            let mount = ["mount", pool].map(OsStr::new);
            let mounted = poolfs(&[&mount[..], &[at.as_os_str(), OsStr::new("--dir"), data.as_os_str()]].concat());
            let _ = mounted.expect(name);
            fs::write(at.join("file"), name).expect("written");
            let read =
                place.pool.command().args(["exec", pool, "--", "cat"]).arg(at.join("file")).output().expect("exec");
            assert_eq!(String::from_utf8_lossy(&read.stdout), name);
            let status = place.poolfs("status POOL").expect("status");
            assert!(!status.contains('\t'), "what steers terminals is escaped: {status:?}");
            let _ = poolfs(&[&["umount", pool].map(OsStr::new)[..], &[at.as_os_str()]].concat()).expect(name);
            assert_eq!(fs::read_to_string(data.join("file")).expect("flushed"), name);
        }
        let strange = folder.join(OsStr::from_bytes(b"\xff"));
        fs::create_dir(&strange).expect("a folder");
        let refused =
            run(place.pool.command().args(["mount", pool]).arg(&strange).args(["--dir", &place.path("data")]));
        assert!(refused.code != 0 && refused.err.contains("UTF-8"), "{refused:?}");
        assert!(place.poolfs("pool ls").expect("pool ls").contains("not running"), "nothing of it stays");
        for line in [
            "pool create .",
            "pool create ../x",
            "run POOL small --name -x",
            "run POOL small --name a/b",
            "image import .. dir:/",
        ] {
            let refused = place.poolfs(line);
            assert!(refused.code != 0 && !refused.err.is_empty(), "{line}: {refused:?}");
        }
        place.check_state();
    });
}
