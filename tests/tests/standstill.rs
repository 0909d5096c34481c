//! A service or another command that is stopped: a command that waits for it reports that within its limit, and what was begun is completed
//! later.

use poolfs_tests::{Pool, compile, import_small, isolated, run_within, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The limit that commands are given, and the longest that one takes which waits for several things: a machine may be busy.
const LIMIT: &str = "1";
const COMMAND_MAX: Duration = Duration::from_secs(60);

fn number(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).expect("a number")).expect("a number")
}

fn pool(folder: &Path) -> Pool {
    for name in ["mnt", "upper", "lower", "data", "more"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    let pool = Pool::create(folder, "16M");
    import_small(&pool, folder, "small", &[], |_| {});
    pool
}

/// Whether a process has a handler of its own for a signal.
fn catches(child: &Child, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("not waited for");
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(str::trim);
    let caught = caught.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    caught.is_some_and(|caught| caught & (1 << (signal.as_raw() - 1)) != 0)
}

#[test]
fn every_command_ends_when_the_service_stands_still() {
    isolated("every_command_ends_when_the_service_stands_still", |folder| {
        let pool = pool(folder);
        let poolfs = |line: &str| run_within(&mut pool.line(line), COMMAND_MAX);
        let _ = poolfs("mount POOL @mnt --upper @upper --lower @lower").expect("mount");
        let _ = poolfs("run POOL small --name c -d -- /bin/sleep 600").expect("run -d");
        fs::write(folder.join("mnt/f"), "f").expect("written");
        let before = poolfs("pool inspect POOL --json").expect("pool inspect");
        let service = pool.service_pid();
        let _ = poolfs("mount POOL @more --dir @data").expect("mount");
        let taken = Command::new("umount").arg(folder.join("more")).status().expect("umount");
        assert!(taken.success());
        kill_process(Pid::from_raw(service).expect("a process"), Signal::STOP).expect("ours");
        // Which mounts there are still nobody can tell, but no command has left anything.
        let listed = poolfs(&format!("pool ls --wait {LIMIT}"));
        assert_eq!((listed.code, listed.err.as_str()), (0, ""));
        let failed = poolfs(&format!("umount POOL @mnt --json --wait {LIMIT}"));
        let told: serde_json::Value = serde_json::from_str(&failed.err).expect("nothing but JSON");
        assert_eq!(told["error"]["code"], "no-answer", "{told}");
        let silent = poolfs(&format!("status POOL --json --wait {LIMIT}")).expect("status says how it is");
        let silent: serde_json::Value = serde_json::from_str(&silent).expect("JSON");
        assert_eq!(silent["state"], "silent");
        let told = |field: &str| silent[field].as_str().unwrap_or_default().contains("kill -CONT");
        assert!(told("remedy") && !told("cause"), "{silent}");
        for line in [
            "mount POOL @more --dir @data",
            "mount POOL @mnt --dir @data",
            "umount POOL @mnt",
            "umount POOL @mnt --force",
            "diff POOL @mnt",
            "flatten POOL @mnt",
            "commit POOL @mnt image",
            "trace POOL --seconds 3",
            "exec POOL --mount at=@more,dir=@data -- true",
            "run POOL small --name d --rm -- /bin/true",
            "run POOL small --name e -d --rm -- /bin/true",
            "stop c --time 0",
        ] {
            let outcome = poolfs(
                &format!("{line} --wait {LIMIT}").replace(" -- ", " --wait 1 -- ").replace("true --wait 1", "true"),
            );
            assert_ne!(outcome.code, 0, "{line}: {outcome:?}");
            let names_it = outcome.err.contains(&format!("process {service}")) && outcome.err.contains("it is stopped");
            let names_mount = outcome.err.contains("its filesystem does not answer");
            assert!(names_it || names_mount, "{line}: {outcome:?}");
            assert!(outcome.err.contains("remedy"), "{line}: {outcome:?}");
        }
        // What could not be mounted is neither a container nor a mount.
        let containers = poolfs("ps --json").expect("ps");
        assert!(!containers.contains("\"d\"") && !containers.contains("\"e\""), "{containers}");
        let inspected = poolfs("pool inspect POOL --json").expect("pool inspect");
        assert!(!inspected.contains("mounter"), "{inspected}");
        let inspected = poolfs("pool inspect POOL").expect("pool inspect");
        assert!(inspected.contains("\nfailed "), "{inspected}");
        for line in ["ps", "logs c", "pool ls", "pool inspect POOL", "image ls", "why 1"] {
            let _ = poolfs(&format!("{line} --wait {LIMIT}")).expect(line);
        }
        kill_process(Pid::from_raw(service).expect("a process"), Signal::CONT).expect("ours");

        // Nothing that was given up comes from behind, and nothing is lost.
        assert_eq!(fs::read(folder.join("mnt/f")).expect("it answers again"), b"f");
        for name in ["d", "e"] {
            let _ = poolfs(&format!("rm {name}"));
        }
        let _ = poolfs("stop c --time 0").expect("stop");
        let _ = poolfs("rm c").expect("rm");
        let _ = poolfs("exec POOL -- true").expect("exec");
        let instances = |text: &str| {
            let record: serde_json::Value = serde_json::from_str(text).expect("JSON");
            let all = record["instances"].as_array().expect("a list").iter();
            all.filter(|known| known["container"].is_null()).cloned().collect::<Vec<_>>()
        };
        let after = poolfs("pool inspect POOL --json").expect("pool inspect");
        assert_eq!(instances(&after), instances(&before));
        assert_eq!(instances(&after).len(), 1, "{after}");
        let served = pool.status();
        assert_eq!(served["service"]["instances"].as_array().map(Vec::len), Some(1), "{served}");
        assert_eq!(poolfs("ps --json").expect("ps").trim(), "[]");
        let _ = poolfs("umount POOL @mnt").expect("umount");
        assert_eq!(fs::read(folder.join("upper/f")).expect("flushed"), b"f");
    });
}

#[test]
fn why_shows_what_it_can_of_a_process_whose_service_stands_still() {
    isolated("why_shows_what_it_can_of_a_process_whose_service_stands_still", |folder| {
        let pool = pool(folder);
        let _ =
            run_within(&mut pool.line("mount POOL @mnt --upper @upper --lower @lower"), COMMAND_MAX).expect("mount");
        // What it has open is of the mount, and so is its program.
        let [file, program] = ["f", "sleep"].map(|name| folder.join("mnt").join(name));
        fs::copy("/bin/sleep", &program).expect("copied");
        let open = fs::File::create(&file).expect("created");
        let mut child = Command::new(&program).arg("600").stdin(open).spawn().expect("it starts");
        wait_until("it is that program", || {
            fs::read_link(format!("/proc/{}/exe", child.id())).is_ok_and(|exe| exe == program)
        });
        let service = pool.service_pid();
        kill_process(Pid::from_raw(service).expect("a process"), Signal::STOP).expect("ours");
        let line = format!("why {} --json --wait {LIMIT}", child.id());
        let outcome = run_within(&mut pool.line(&line), COMMAND_MAX);
        let names_it = outcome.err.contains(&format!("process {service}")) && outcome.err.contains("it is stopped");
        assert!(names_it && outcome.err.contains("is not shown"), "{outcome:?}");
        let told: serde_json::Value = serde_json::from_str(&outcome.expect("why")).expect("JSON");
        let descriptors = told["descriptors"].as_array().expect("a list");
        let input = descriptors.iter().find(|one| one["fd"] == 0).unwrap_or_else(|| panic!("{told}"));
        assert_eq!(input["file"], file.to_str().expect("text"), "{told}");
        assert_eq!(input["goes_by"], "fuse", "{told}");
        assert!(input["instance"].is_string(), "{told}");
        kill_process(Pid::from_raw(service).expect("a process"), Signal::CONT).expect("ours");
        child.kill().and_then(|()| child.wait()).expect("ours");
        let _ = run_within(&mut pool.line("umount POOL @mnt"), COMMAND_MAX).expect("umount");
    });
}

#[test]
fn a_command_that_waits_can_be_asked_to_end() {
    isolated("a_command_that_waits_can_be_asked_to_end", |folder| {
        let pool = pool(folder);
        let _ = pool.line("mount POOL @mnt --dir @data").status().expect("mount");
        let service = Pid::from_raw(pool.service_pid()).expect("a process");
        kill_process(service, Signal::STOP).expect("ours");
        for line in [
            "run POOL small --name c --rm -- /bin/true",
            "run POOL small --name d --rm -d -- /bin/true",
            "exec POOL --mount at=@more,dir=@upper -- true",
        ] {
            for (turn, signal) in [Signal::TERM, Signal::INT].into_iter().enumerate() {
                // What the first leaves has its name as long as the service stands still.
                let line = &line.replace("--name ", &format!("--name {turn}"));
                let mut waiting = pool.line(&format!("--wait 600 {line}"));
                let mut child = waiting.stderr(Stdio::piped()).spawn().expect("poolfs starts");
                // Before it catches signals they would end it. From then on one is enough, whatever it waits for and cleans up.
                wait_until(line, || catches(&child, signal));
                kill_process(number(child.id()), signal).expect("ours");
                let mut status = None;
                wait_until(line, || {
                    status = child.try_wait().expect("ours");
                    status.is_some()
                });
                let mut said = String::new();
                let _ = child.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
                assert_eq!(status.and_then(|status| status.code()), Some(130), "{line}: {status:?}: {said}");
            }
        }
        kill_process(service, Signal::CONT).expect("ours");
        for name in ["0c", "1c", "0d", "1d"] {
            let _ = run_within(&mut pool.line(&format!("rm {name}")), COMMAND_MAX);
        }
        let left = run_within(&mut pool.line("ps --json"), COMMAND_MAX).expect("ps");
        assert_eq!(left.trim(), "[]");
        let _ = run_within(&mut pool.line("umount POOL @mnt"), COMMAND_MAX).expect("umount");
    });
}

#[test]
fn a_stopped_command_that_works_on_a_pool_is_named() {
    isolated("a_stopped_command_that_works_on_a_pool_is_named", |folder| {
        let pool = pool(folder);
        let record = folder.join("state/pools").join(pool.name());
        // As a command does it.
        let script = "import fcntl, os, sys, time; lock = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(lock, fcntl.LOCK_EX); print(flush=True); time.sleep(600)";
        let mut other = Command::new("python3");
        other.args(["-c", script]).arg(&record).stdout(Stdio::piped());
        let mut other = other.spawn().expect("python3 starts");
        let mut line = String::new();
        BufReader::new(other.stdout.take().expect("piped")).read_line(&mut line).expect("it has the lock");
        kill_process(number(other.id()), Signal::STOP).expect("ours");
        let mount = format!("mount POOL @mnt --dir @data --wait {LIMIT}");
        let outcome = run_within(&mut pool.line(&mount), COMMAND_MAX);
        assert_ne!(outcome.code, 0, "{outcome:?}");
        assert!(outcome.err.contains(&format!("process {} (", other.id())), "{outcome:?}");
        assert!(outcome.err.contains("python3 -c import fcntl"), "{outcome:?}");
        assert!(outcome.err.contains(&format!("kill -CONT {}", other.id())), "{outcome:?}");
        // One that only takes its time is waited for.
        kill_process(number(other.id()), Signal::CONT).expect("ours");
        let mount = "mount POOL @mnt --dir @data --wait 5";
        let mut waiting = pool.line(mount).stderr(Stdio::piped()).spawn().expect("poolfs starts");
        let mut errors = BufReader::new(waiting.stderr.take().expect("piped"));
        line.clear();
        errors.read_line(&mut line).expect("it says for whom it waits");
        assert!(line.contains(&format!("waiting for process {}", other.id())), "{line}");
        other.kill().expect("ours");
        other.wait().expect("ours");
        assert!(waiting.wait().expect("ours").success());
        let _ = run_within(&mut pool.line("umount POOL @mnt"), COMMAND_MAX).expect("umount");
    });
}

#[test]
fn the_third_interrupt_ends_a_container_that_ignores_them() {
    isolated("the_third_interrupt_ends_a_container_that_ignores_them", |folder| {
        let pool = pool(folder);
        let mut run = pool.command();
        run.args(["run", pool.name(), "small", "--name", "c", "--", "/bin/sh", "-c"]);
        run.arg("trap 'echo interrupted' INT; trap '' TERM; echo ready; while :; do sleep 0.05; done");
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("poolfs starts");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut expect = |wanted: &str| {
            let mut line = String::new();
            output.read_line(&mut line).expect("readable");
            assert_eq!(line.trim(), wanted);
        };
        expect("ready");
        for _ in 0..2 {
            kill_process(number(child.id()), Signal::INT).expect("ours");
            expect("interrupted");
        }
        let mut said = BufReader::new(child.stderr.take().expect("piped"));
        for wanted in ["asked 2 times more", "asked once more"] {
            let mut line = String::new();
            said.read_line(&mut line).expect("readable");
            assert!(line.contains(wanted), "{wanted}: {line}");
        }
        kill_process(number(child.id()), Signal::INT).expect("ours");
        assert_eq!(child.wait().expect("ours").code(), Some(137));
        let listed = pool.poolfs(&["ps"]).expect("ps");
        assert!(listed.contains("ended (137)"), "{listed}");
        let _ = pool.poolfs(&["rm", "c"]).expect("rm");
    });
}

#[test]
fn a_container_with_an_init_process_ends_when_it_is_asked_to() {
    isolated("a_container_with_an_init_process_ends_when_it_is_asked_to", |folder| {
        let pool = pool(folder);
        let run = |options: &[&str], command: &[&str]| {
            let all = [&["run", pool.name()], options, &["--"], command].concat();
            run_within(pool.command().args(all), COMMAND_MAX)
        };
        // The kernel shields the first process of a container from what it does not handle.
        let _ = run(&["small", "--init", "-d", "--name", "c"], &["/bin/sleep", "600"]).expect("run -d");
        let _ = run_within(&mut pool.line("stop c --time 600"), COMMAND_MAX).expect("stop");
        assert!(pool.poolfs(&["ps"]).expect("ps").contains("ended (143)"));
        let _ = pool.poolfs(&["rm", "c"]).expect("rm");
        // Who is left behind is reaped.
        let script = "echo $$; sh -c 'sleep 0.2 & echo $! > /tmp/pid'; read pid < /tmp/pid
            while [ -e /proc/$pid ]; do sleep 0.02; done; echo reaped; exit 7";
        for way in [&[][..], &["--legacy"], &["--userns", "0:100000:65536"]] {
            let outcome = run(&[&["small", "--init", "--rm"], way].concat(), &["/bin/sh", "-c", script]);
            assert_eq!(outcome.code, 7, "{way:?}: {outcome:?}");
            assert!(outcome.out.ends_with("reaped\n") && !outcome.out.starts_with("1\n"), "{way:?}: {outcome:?}");
        }
        assert_eq!(run(&["small", "--init", "--rm"], &["/bin/absent"]).code, 127);
        // An image without a libc.
        let program = compile(folder, "steps", true);
        let root = folder.join("root");
        fs::create_dir(&root).expect("a folder");
        fs::copy(&program, root.join("program")).expect("copied");
        let _ = pool.poolfs(&["image", "import", "bare", &format!("dir:{}", root.display())]).expect("import");
        let _ = run(&["bare", "--init", "--rm"], &["/program"]).expect("it ends with its input");
        // Nothing of it is in what the container wrote.
        let _ = run(&["small", "--init", "--name", "d"], &["/bin/sh", "-c", ":"]).expect("run");
        let changed = pool.poolfs(&["diff", pool.name(), "d"]).expect("diff");
        assert!(!changed.contains("poolfs-init"), "{changed}");
        let _ = pool.poolfs(&["rm", "d"]).expect("rm");
    });
}

#[test]
fn a_container_without_a_root_is_not_shown_as_running() {
    isolated("a_container_without_a_root_is_not_shown_as_running", |folder| {
        let pool = pool(folder);
        let _ =
            pool.poolfs(&["run", pool.name(), "small", "--name", "c", "-d", "--", "/bin/sleep", "600"]).expect("run");
        let status = || {
            let text = pool.poolfs(&["ps", "--json"]).expect("ps");
            let all: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            let told = |key: &str| all[0][key].as_str().unwrap_or_else(|| panic!("{text}")).to_owned();
            // The text shows the same, and programs have a word for it.
            let (status, shown) = (told("status"), pool.poolfs(&["ps"]).expect("ps"));
            assert!(shown.contains(&status), "{status} in {shown}");
            assert!(status.starts_with(&told("state")), "{text}");
            status
        };
        assert_eq!(status(), "running");
        // It needs its root no more for what it does.
        let pid = fs::read_to_string(folder.join("state/containers/c/bundle/pid")).expect("it was started");
        // Its state alone does not tell: who waits for a page of its program sleeps as well.
        wait_until("it sleeps", || {
            let call = fs::read_to_string(format!("/proc/{pid}/syscall")).expect("it runs");
            call.split(' ').next() == Some(&libc::SYS_clock_nanosleep.to_string())
        });
        pool.kill_service();
        assert!(status().starts_with("dead"), "{}", status());
        // Neither when another service has taken its place.
        let mount = pool.mount_directory(&folder.join("mnt"), &folder.join("data"));
        assert!(status().starts_with("dead"), "{}", status());
        let _ = pool.poolfs(&["stop", "c", "--time", "0"]).expect("stop");
        assert!(status().starts_with("ended"), "{}", status());
        let _ = pool.poolfs(&["rm", "c"]).expect("rm");
        drop(mount);
    });
}
