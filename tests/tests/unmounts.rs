//! Unmounts that are not recorded: commands that are killed half way, and `umount(8)`. The next command finds the actual state.

use poolfs_tests::{Outcome, Pool, isolated, name_of, run, shell};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Tries at killing an unmount, and how much further each has come: by the time that it ran itself, whatever else the machine does.
const TRIES: u32 = 48;
const FURTHER: Duration = Duration::from_micros(100);

/// A union that is mounted by hand.
struct Union {
    pool: Pool,
    at: PathBuf,
    upper: PathBuf,
    lower: PathBuf,
}

impl Union {
    fn make(folder: &Path) -> Self {
        let [at, upper, lower] = ["mnt", "upper", "lower"].map(|name| folder.join(name));
        for path in [&at, &upper, &lower] {
            fs::create_dir(path).expect("a folder");
        }
        Self { pool: Pool::create(folder, "16M"), at, upper, lower }
    }

    fn try_mount(&self) -> Outcome {
        let mut command = self.pool.command();
        command.args(["mount", self.pool.name()]).arg(&self.at).arg("--upper").arg(&self.upper);
        run(command.arg("--lower").arg(&self.lower))
    }

    fn mount(&self) {
        let _ = self.try_mount().expect("mount");
    }

    fn umount(&self) -> Outcome {
        run(&mut self.umount_command())
    }

    fn umount_command(&self) -> Command {
        let mut command = self.pool.command();
        command.args(["umount", self.pool.name()]).arg(&self.at);
        command
    }

    fn is_mounted(&self) -> bool {
        let table = fs::read_to_string("/proc/self/mounts").expect("readable");
        table.lines().any(|line| line.split(' ').nth(1) == self.at.to_str())
    }

    fn write(&self, name: &str) {
        fs::write(self.at.join(name), name).expect("written");
    }

    fn check(&self, name: &str) {
        assert_eq!(fs::read_to_string(self.upper.join(name)).expect("flushed"), name);
    }

    /// Has the pool's service carry out a command, as a command line does that is killed when it has the answer.
    fn order(&self, line: &str) {
        let socket = format!("/run/poolfs/{}.control", self.pool.name());
        let mut stream = UnixStream::connect(socket).expect("it listens");
        writeln!(stream, "{line}").expect("sent");
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).expect("an answer");
        assert!(answer.contains("done"), "{answer}");
    }

    fn instance(&self) -> String {
        let status = self.pool.status();
        let all = status["service"]["instances"].as_array().unwrap_or_else(|| panic!("{status}"));
        let own = all.iter().find(|one| one["mount_point"] == self.at.to_str().expect("text"));
        own.and_then(|own| own["instance"].as_str()).unwrap_or_else(|| panic!("{status}")).to_owned()
    }

    fn descriptors_and_threads(&self) -> (usize, usize) {
        let count = |what: &str| fs::read_dir(format!("/proc/{}/{what}", self.pool.service_pid())).map(Iterator::count);
        (count("fd").expect("it runs"), count("task").expect("it runs"))
    }
}

/// How long a process was on a processor; all of it when it has ended.
fn ran(child: &Child) -> Duration {
    let text = fs::read_to_string(format!("/proc/{}/schedstat", child.id())).unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|number| number.parse().ok());
    nanoseconds.map_or(Duration::MAX, Duration::from_nanos)
}

#[test]
fn an_upper_branch_is_free_after_an_unmount_that_was_killed_at_any_moment() {
    isolated("an_upper_branch_is_free_after_an_unmount_that_was_killed_at_any_moment", |folder| {
        let union = Union::make(folder);
        union.mount();
        let (mut unnoted, mut mounted) = (0, 0);
        for attempt in 0..TRIES {
            let name = format!("f{attempt}");
            union.write(&name);
            let mut child = union.umount_command().stderr(Stdio::null()).spawn().expect("poolfs starts");
            while ran(&child) < FURTHER * attempt && child.try_wait().expect("ours").is_none() {
                std::thread::yield_now();
            }
            child.kill().expect("ours");
            child.wait().expect("ours");
            // Without a mount it is free, whatever the record says.
            let deadline = Instant::now() + Duration::from_secs(30);
            loop {
                let outcome = union.try_mount();
                if outcome.code == 0 {
                    unnoted += 1;
                    break;
                }
                let is_mounted = ["is mounted there", "it is the upper branch of"];
                assert!(is_mounted.iter().any(|part| outcome.err.contains(part)), "attempt {attempt}: {outcome:?}");
                if union.is_mounted() {
                    // The kill came before the unmount, or while the service was at it.
                    mounted += 1;
                    let ended = union.umount();
                    assert!(
                        ended.code == 0 || ended.err.contains("has no mount there"),
                        "attempt {attempt}: {ended:?}"
                    );
                    union.mount();
                    break;
                }
                assert!(Instant::now() < deadline, "attempt {attempt}: {outcome:?}");
            }
            union.check(&name);
        }
        println!("killed {TRIES} unmounts: {mounted} before the service was through, {unnoted} after it");
        let _ = union.umount().expect("umount");
    });
}

#[test]
fn an_unmount_that_was_killed_at_any_step_is_made_good() {
    isolated("an_unmount_that_was_killed_at_any_step_is_made_good", |folder| {
        let union = Union::make(folder);
        // Another mount keeps the service, or none.
        for with_other in [false, true] {
            let (other, data) = (folder.join("other"), folder.join("data"));
            fs::create_dir_all(&data).expect("a folder");
            let other = with_other.then(|| union.pool.mount_directory(&other, &data));
            // Carried out, and not noted.
            for next in ["mount", "umount", "pool ls", "other pool"] {
                union.mount();
                union.write(next);
                let instance = union.instance();
                union.order(&format!(r#"{{"command":"unmount","instance":"{instance}","ending":"orderly"}}"#));
                union.check(next);
                match next {
                    "mount" => {
                        union.mount();
                        let _ = union.umount().expect("umount");
                    }
                    "umount" => {
                        let outcome = union.umount();
                        assert!(outcome.code != 0 && outcome.err.contains("has no mount there"), "{outcome:?}");
                    }
                    "pool ls" => {
                        let pools = union.pool.poolfs(&["pool", "ls", "--json"]).expect("pool ls");
                        assert!(!pools.contains(&instance), "{pools}");
                    }
                    _ => {
                        let pool = Pool::named(folder, &format!("{}-2", union.pool.name()), "16M");
                        let [at, upper, lower] = [&union.at, &union.upper, &union.lower].map(|path| path.as_path());
                        let _ = pool.mount_union(at, upper, &[lower]).unmount().expect("umount");
                    }
                }
                assert!(!union.at.join(next).exists());
            }
            drop(other);
        }
        // Noted, and the service not ended: nobody would do that ever after.
        union.mount();
        let record = folder.join(format!("state/pools/{}/pool.json", union.pool.name()));
        let text = fs::read_to_string(&record).expect("readable");
        let instance = union.instance();
        union.order(&format!(r#"{{"command":"unmount","instance":"{instance}","ending":"orderly"}}"#));
        let mut json: serde_json::Value = serde_json::from_str(&text).expect("a record");
        json["instances"] = serde_json::json!([]);
        fs::write(&record, json.to_string()).expect("written");
        let _ = union.pool.poolfs(&["exec", union.pool.name(), "--", "true"]).expect("exec");
        assert!(union.pool.poolfs(&["pool", "ls"]).expect("pool ls").contains("not running"));
    });
}

#[test]
fn a_mount_that_somebody_unmounts_by_hand_is_forgotten() {
    isolated("a_mount_that_somebody_unmounts_by_hand_is_forgotten", |folder| {
        let union = Union::make(folder);
        let data = folder.join("data");
        fs::create_dir(&data).expect("a folder");
        let other = union.pool.mount_directory(&folder.join("other"), &data);
        let umount = |options: &str| shell(&format!("umount {options} {}", union.at.display())).expect("umount(8)");
        union.mount();
        let _ = union.umount().expect("umount");
        let before = union.descriptors_and_threads();
        for round in 0..10 {
            let name = format!("f{round}");
            union.mount();
            union.write(&name);
            let _ = umount("");
            // At once, at the same place.
            union.mount();
            union.check(&name);
            let _ = umount("");
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                let now = union.descriptors_and_threads();
                if now.0 <= before.0 && now.1 <= before.1 {
                    break;
                }
                assert!(Instant::now() < deadline, "{before:?} became {now:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
            let listed = union.pool.poolfs(&["pool", "inspect", union.pool.name()]).expect("pool inspect");
            assert!(!listed.contains(union.at.to_str().expect("text")), "{listed}");
        }
        // As long as another mount namespace has it, it is in use, and told to be.
        union.mount();
        let mut elsewhere = Command::new("unshare");
        elsewhere.args(["--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]);
        let mut elsewhere = elsewhere.stdout(Stdio::piped()).spawn().expect("unshare (package util-linux) runs");
        let mut line = String::new();
        BufReader::new(elsewhere.stdout.take().expect("piped")).read_line(&mut line).expect("it is there");
        let _ = umount("");
        let refused = union.try_mount();
        assert!(refused.code != 0 && refused.err.contains("upper branch"), "{refused:?}");
        elsewhere.kill().expect("ours");
        elsewhere.wait().expect("ours");
        union.mount();
        let _ = union.umount().expect("umount");
        drop(other);
        assert!(union.pool.poolfs(&["pool", "ls"]).expect("pool ls").contains("not running"));
    });
}

/// A program in a mount namespace of its own, which has a file of the union open and mapped and does what it is told.
struct Elsewhere(Child);

impl Elsewhere {
    fn start(union: &Union) -> Self {
        let program = "import mmap, sys\n\
            file = open(sys.argv[1], 'r+b')\n\
            pages = mmap.mmap(file.fileno(), 4096)\n\
            print('ready', flush=True)\n\
            for line in sys.stdin:\n    \
                pages[:len(line) - 1] = line[:-1].encode()\n    \
                print('stored', flush=True)\n";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "python3", "-c", program]).arg(union.at.join("mapped"));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut elsewhere = Self(child);
        elsewhere.expect("ready");
        elsewhere
    }

    fn expect(&mut self, word: &str) {
        let mut line = String::new();
        let out = self.0.stdout.as_mut().expect("piped");
        while !line.ends_with('\n') {
            let mut byte = [0];
            std::io::Read::read_exact(out, &mut byte).expect("it lives");
            line.push(byte[0].into());
        }
        assert_eq!(line.trim(), word);
    }

    fn store(&mut self, text: &str) {
        writeln!(self.0.stdin.as_mut().expect("piped"), "{text}").expect("it lives");
        self.expect("stored");
    }

    fn end(&mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("ours").success());
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn who_has_files_open_in_another_mount_namespace_keeps_them_until_he_lets_go() {
    isolated("who_has_files_open_in_another_mount_namespace_keeps_them_until_he_lets_go", |folder| {
        let union = Union::make(folder);
        union.mount();
        fs::write(union.at.join("mapped"), [b'.'; 4096]).expect("written");
        let mut elsewhere = Elsewhere::start(&union);
        elsewhere.store("before");
        let refused = union.umount();
        assert!(refused.code != 0 && refused.err.contains("another mount namespace"), "{refused:?}");
        assert!(refused.err.contains(&format!("used by: {} (python3)", elsewhere.0.id())), "{refused:?}");
        assert!(refused.err.contains("the mount ends by itself then"), "{refused:?}");
        elsewhere.store("meanwhile");
        // It is the pool's as before.
        assert_eq!(union.pool.status()["service"]["instances"].as_array().map(Vec::len), Some(1));
        let other = folder.join("other");
        fs::create_dir(&other).expect("a folder");
        let mut command = union.pool.command();
        command.args(["mount", union.pool.name()]).arg(&other).arg("--dir").arg(&union.upper);
        assert!(run(&mut command).code != 0, "its branch is in use");
        elsewhere.store("at last");
        elsewhere.end();
        // By itself, or by the next command, which says so.
        let ended = union.umount();
        assert!(ended.code == 0 || ended.err.contains("has no mount there"), "{ended:?}");
        poolfs_tests::wait_until("it ends", || union.umount().err.contains("has no mount there"));
        assert!(fs::read(union.upper.join("mapped")).expect("flushed").starts_with(b"at lastle"));
    });
}

#[test]
fn who_has_a_mount_in_another_mount_namespace_is_named() {
    isolated("who_has_a_mount_in_another_mount_namespace_is_named", |folder| {
        let union = Union::make(folder);
        let [data, other] = ["data", "other"].map(|name| folder.join(name));
        for path in [&data, &other] {
            fs::create_dir(path).expect("a folder");
        }
        let check = || run(&mut union.pool.line("fsck @upper --lower @lower"));
        for is_last in [false, true] {
            union.mount();
            let kept = (!is_last).then(|| union.pool.mount_directory(&other, &data));
            union.write("f");
            let mut elsewhere = Command::new("unshare");
            elsewhere.args(["--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600 >/dev/null"]);
            let mut elsewhere = elsewhere.stdout(Stdio::piped()).spawn().expect("it starts");
            let mut line = String::new();
            BufReader::new(elsewhere.stdout.take().expect("piped")).read_line(&mut line).expect("it begins");
            let ended = union.umount();
            let who = ["sh", "sleep"].map(|name| format!("{} ({name})", elsewhere.id()));
            assert!(ended.code == 0 && who.iter().any(|who| ended.err.contains(who)), "{ended:?}");
            let upper = union.upper.display();
            assert!(ended.err.contains(&format!("its upper branch {upper} is not closed")), "{ended:?}");
            assert_eq!(ended.err.contains("the pool's service has ended"), is_last, "{ended:?}");
            union.check("f");
            // A service that ends may come to close it after all: then it is clean.
            let is_closed = check().code == 0;
            assert!(is_last || !is_closed);
            elsewhere.kill().and_then(|()| elsewhere.wait()).expect("ours");
            if is_last {
                union.mount();
                assert_eq!(union.umount().err, "");
            }
            poolfs_tests::wait_until("its branch is closed", || check().code == 0);
            drop(kept);
        }
    });
}

#[test]
fn who_uses_a_mount_is_named() {
    isolated("who_uses_a_mount_is_named", |folder| {
        let union = Union::make(folder);
        union.mount();
        union.write("f");
        let user = |script: &str, place: &Path| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(place).stdout(Stdio::piped());
            let mut child = command.env("F", union.at.join("f")).spawn().expect("sh");
            let mut line = String::new();
            BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it begins");
            child
        };
        let mut all = [
            (user("echo; exec sleep 600 >/dev/null", &union.at), "works in it"),
            (user("exec 3<$F; echo; exec sleep 600 >/dev/null", Path::new("/")), "has files of it open"),
        ];
        let refused = union.umount();
        assert!(refused.code != 0 && refused.err.contains("used by: "), "{refused:?}");
        assert!(refused.err.contains("; then `poolfs umount"), "it is still there: {refused:?}");
        for (child, how) in &all {
            let (pid, err) = (child.id(), &refused.err);
            assert!([("sh"), ("sleep")].iter().any(|name| err.contains(&format!("{pid} ({name}) {how}"))), "{err}");
        }
        for (child, _) in &mut all {
            child.kill().and_then(|()| child.wait()).expect("ours");
        }
        let _ = union.umount().expect("umount");
    });
}

#[test]
fn who_uses_a_mount_that_is_gone_from_its_place_is_named() {
    isolated("who_uses_a_mount_that_is_gone_from_its_place_is_named", |folder| {
        let union = Union::make(folder);
        let ends = || poolfs_tests::wait_until("it ends", || union.umount().err.contains("has no mount there"));
        // A process of this mount namespace.
        union.mount();
        union.write("f");
        let held = fs::File::open(union.at.join("f")).expect("there");
        let mut child = Command::new("sleep").arg("600").stdin(held).spawn().expect("sleep");
        let _ = shell(&format!("umount -l {}", union.at.display())).expect("unmounted");
        let refused = union.umount();
        let who = format!("used by: {} (sleep) has files of it open", child.id());
        assert!(refused.code != 0 && refused.err.contains(&who), "{refused:?}");
        assert!(refused.err.contains("the mount ends by itself then"), "{refused:?}");
        child.kill().and_then(|()| child.wait()).expect("ours");
        ends();
        // Another pool, which has it as a lower branch.
        union.mount();
        let other = Pool::named(folder, &format!("{}-2", union.pool.name()), "16M");
        let [top, clone] = ["top", "clone"].map(|name| folder.join(name));
        fs::create_dir(&top).expect("a folder");
        let mount = other.mount_union(&clone, &top, &[&union.at]);
        let refused = union.umount();
        let who = format!("used by: the pool {} (process {})", other.name(), other.service_pid());
        assert!(refused.code != 0 && refused.err.contains(&who), "{refused:?}");
        drop(mount);
        ends();
    });
}

#[test]
fn where_dead_mounts_were_is_said() {
    isolated("where_dead_mounts_were_is_said", |folder| {
        let union = Union::make(folder);
        union.mount();
        union.pool.kill_service();
        let [data, other] = ["data", "other"].map(|name| folder.join(name));
        for path in [&data, &other] {
            fs::create_dir(path).expect("a folder");
        }
        let mounted = run(&mut union.pool.line("mount POOL @other --dir @data"));
        let wanted = format!("1 dead mount was detached: {}\n", union.at.display());
        assert!(mounted.code == 0 && mounted.err.contains(&wanted), "{mounted:?}");
        drop(union.pool.mounted(&other));
    });
}

#[test]
fn what_is_mounted_over_a_union_stays() {
    isolated("what_is_mounted_over_a_union_stays", |folder| {
        let union = Union::make(folder);
        let over = |what: &str| {
            let _ = shell(&format!("mount -t tmpfs {what} {}", union.at.display())).expect("mounted");
            fs::write(union.at.join("precious"), what).expect("written");
        };
        let check = |what: &str| assert_eq!(fs::read_to_string(union.at.join("precious")).expect("it stays"), what);
        let take_away = || {
            let _ = shell(&format!("umount {}", union.at.display())).expect("unmounted");
        };
        union.mount();
        union.write("below");
        over("first");
        for force in [&[][..], &["--force"]] {
            let refused = run(union.umount_command().args(force));
            assert!(refused.code != 0 && refused.err.contains("is mounted over it, a tmpfs\n"), "{refused:?}");
            assert!(!refused.err.contains("all the same") && !refused.err.contains("--force"), "{refused:?}");
            check("first");
        }
        take_away();
        assert_eq!(fs::read_to_string(union.at.join("below")).expect("it is mounted"), "below");
        // Somebody has unmounted it, and mounted something else in its place.
        take_away();
        over("second");
        let ended = union.umount();
        assert!(ended.code == 0 || ended.err.contains("has no mount there"), "{ended:?}");
        check("second");
        take_away();
        // The service dies below it.
        union.mount();
        over("third");
        union.pool.kill_service();
        let _ = union.umount();
        check("third");
        take_away();
        let _ = shell(&format!("umount {}", union.at.display()));
        union.check("below");
    });
}

#[test]
fn what_is_mounted_inside_a_union_stays() {
    isolated("what_is_mounted_inside_a_union_stays", |folder| {
        let union = Union::make(folder);
        union.mount();
        union.write("below");
        let inside = union.at.join("sub");
        fs::create_dir(&inside).expect("a folder");
        let _ = shell(&format!("mount -t tmpfs none {}", inside.display())).expect("mounted");
        fs::write(inside.join("precious"), "kept").expect("written");
        for force in [&[][..], &["--force"]] {
            let refused = run(union.umount_command().args(force));
            let wanted = format!("is mounted inside it, a tmpfs at {}\n", inside.display());
            assert!(refused.code != 0 && refused.err.contains(&wanted), "{refused:?}");
            assert!(!refused.err.contains("all the same") && !refused.err.contains("--force"), "{refused:?}");
            assert_eq!(fs::read_to_string(inside.join("precious")).expect("it stays"), "kept");
            assert!(union.is_mounted());
        }
        let _ = shell(&format!("umount {}", inside.display())).expect("unmounted");
        let _ = union.umount().expect("umount");
        union.check("below");
    });
}

#[test]
fn of_two_pools_that_mount_at_one_place_at_once_one_does() {
    isolated("of_two_pools_that_mount_at_one_place_at_once_one_does", |folder| {
        let at = folder.join("mnt");
        fs::create_dir(&at).expect("a folder");
        let pools = ["a", "b"].map(|name| {
            let place = folder.join(name);
            fs::create_dir_all(place.join("dir")).expect("a folder");
            fs::write(place.join("dir").join("whose"), name).expect("written");
            (Pool::named(folder, &format!("{}-{name}", name_of(folder)), "16M"), place.join("dir"))
        });
        for _ in 0..8 {
            let started: Vec<Child> = pools
                .iter()
                .map(|(pool, directory)| {
                    let mut command = pool.command();
                    command.args(["mount", pool.name()]).arg(&at).arg("--dir").arg(directory);
                    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("poolfs starts")
                })
                .collect();
            let mounted: Vec<bool> =
                started.into_iter().map(|mut child| child.wait().expect("ours").success()).collect();
            let first = mounted.iter().position(|&mounted| mounted).expect("who comes first mounts");
            assert_eq!(mounted.iter().filter(|&&mounted| mounted).count(), 1, "{mounted:?}");
            assert_eq!(fs::read_to_string(at.join("whose")).expect("read"), ["a", "b"][first]);
            let _ = run(pools[first].0.command().args(["umount", pools[first].0.name()]).arg(&at)).expect("unmounted");
        }
    });
}

/// Directories of the control groups that a process is in, where they are mounted as usual.
fn groups_of(pid: i32) -> Vec<PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it lives");
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let mounted = Path::new("/sys/fs/cgroup").join(controllers.trim_start_matches("name="));
        Some(mounted.join(path.trim_start_matches('/')))
    };
    text.lines().filter_map(group).filter(|group| group.ends_with("service")).collect()
}

#[test]
fn a_control_group_that_the_kernel_does_not_let_go_of_goes_later() {
    isolated("a_control_group_that_the_kernel_does_not_let_go_of_goes_later", |folder| {
        for name in ["mnt", "data"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        let pool = Pool::create(folder, "16M");
        let _ = pool.line("mount POOL @mnt --dir @data").status().expect("mount");
        let groups = groups_of(pool.service_pid());
        assert!(!groups.is_empty() && groups.iter().all(|group| group.is_dir()), "{groups:?}");
        // As what has ended may be for a while.
        let mut sleeper = Command::new("sleep").arg("600").spawn().expect("sleep runs");
        for group in &groups {
            fs::write(group.join("cgroup.procs"), sleeper.id().to_string()).expect("moved");
        }
        let unmounted = run(&mut pool.line("umount POOL @mnt"));
        assert!(unmounted.code == 0 && unmounted.err.contains("stay for now"), "{unmounted:?}");
        let removed = run(&mut pool.line("pool rm POOL"));
        assert!(removed.code != 0, "nobody would remove them: {removed:?}");
        sleeper.kill().expect("ours");
        sleeper.wait().expect("ours");
        // Which succeeds.
        drop(pool);
        assert!(groups.iter().all(|group| !group.exists()), "{groups:?}");
    });
}
