//! A branch whose filesystem does not respond: everything that does not use it goes on, and the mount can be given up.

use poolfs_tests::{Foreign, Outcome, Pool, Stepper, Way, compile, is_mounted, isolated, run_within, wait_until};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest that a command takes which waits for nobody but as long as its limit says: a machine may be busy.
const COMMAND_MAX: Duration = Duration::from_secs(120);

fn poolfs(pool: &Pool, line: &str) -> Outcome {
    run_within(&mut pool.line(line), COMMAND_MAX)
}

/// A foreign filesystem, a pool, and what to mount.
fn places(folder: &Path) -> (Foreign, Pool) {
    let foreign = Foreign::mount(folder);
    for name in ["mnt", "lower", "data", "more"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    foreign.make_upper();
    (foreign, Pool::create(folder, "16M"))
}

/// The same with a mount over a branch of that filesystem, which does not answer any more, with something that was written.
fn hung(folder: &Path) -> (Foreign, Pool) {
    let (foreign, pool) = places(folder);
    let _ = poolfs(&pool, "mount POOL @mnt --upper @foreign/upper --lower @lower").expect("mount");
    let mut file = fs::File::create(folder.join("mnt/f")).expect("made");
    file.write_all(&[7]).expect("written");
    foreign.stop_at_once();
    // Nothing of this is below, however long it takes until somebody looks.
    file.write_all(&vec![7; (1 << 20) - 1]).expect("written");
    (foreign, pool)
}

/// A command to the service itself, and the connection on which it answers.
fn send(pool: &Pool, command: &str) -> UnixStream {
    let mut stream = UnixStream::connect(format!("/run/poolfs/{}.control", pool.name())).expect("it listens");
    stream.set_read_timeout(Some(COMMAND_MAX)).expect("set");
    // One connection too many is closed at once.
    let _ = writeln!(stream, "{command}");
    stream
}

/// How many threads of the service have a name that begins so and are in this system call, or in any.
fn threads(service: i32, name: &str, call: Option<i64>) -> usize {
    let tasks = fs::read_dir(format!("/proc/{service}/task")).expect("it lives").flatten();
    let told = |task: &fs::DirEntry, what: &str| fs::read_to_string(task.path().join(what)).unwrap_or_default();
    let is_in = |task: &fs::DirEntry, call: i64| told(task, "syscall").split(' ').next() == Some(&call.to_string());
    let fits = |task: &fs::DirEntry| told(task, "comm").starts_with(name) && call.is_none_or(|call| is_in(task, call));
    tasks.filter(fits).count()
}

fn answer(stream: UnixStream) -> String {
    let mut line = String::new();
    let _ = BufReader::new(stream).read_line(&mut line);
    line
}

/// The first instance of a pool.
fn instance(pool: &Pool) -> String {
    let status = pool.status();
    status["service"]["instances"][0]["instance"].as_str().unwrap_or_else(|| panic!("{status}")).to_owned()
}

#[test]
fn a_branch_that_does_not_answer_holds_up_nobody_else_and_can_be_given_up() {
    isolated("a_branch_that_does_not_answer_holds_up_nobody_else_and_can_be_given_up", |folder| {
        let foreign = Foreign::mount(folder);
        for name in ["mnt", "lower", "data", "more", "third", "rest"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        foreign.make_upper();
        let pool = Pool::create(folder, "16M");
        let _ = poolfs(&pool, "mount POOL @mnt --upper @foreign/upper --lower @lower").expect("mount");
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "mount POOL @third --dir @rest").expect("mount");
        fs::write(folder.join("more/g"), vec![8; 1 << 20]).expect("written");
        let mut file = fs::File::create(folder.join("mnt/f")).expect("made");
        file.write_all(&[7]).expect("written");
        foreign.stop_at_once();
        file.write_all(&vec![7; (1 << 20) - 1]).expect("written");
        drop(file);
        let mut waiting = pool.line("umount POOL @mnt").stderr(Stdio::null()).spawn().expect("poolfs starts");
        let _ = poolfs(&pool, "umount POOL @more").expect("it is another one's branch");
        assert_eq!(fs::read(folder.join("data/g")).expect("flushed"), vec![8; 1 << 20]);
        let _ = poolfs(&pool, "exec POOL -- true").expect("exec");
        assert!(waiting.try_wait().expect("ours").is_none(), "its branch does not answer");
        let forced = poolfs(&pool, "umount POOL @mnt --force --wait 2");
        assert!(forced.code == 0 && forced.err.contains("unmounted all the same"), "{forced:?}");
        assert!(!fs::read_to_string("/proc/self/mounts").expect("readable").contains("/mnt "));
        let _ = poolfs(&pool, "exec POOL -- true").expect("exec");
        foreign.resume();
        waiting.wait().expect("ours");
        let _ = poolfs(&pool, "umount POOL @third").expect("umount");
    });
}

#[test]
fn a_mount_that_was_taken_away_and_whose_branch_does_not_answer_holds_up_nobody() {
    isolated("a_mount_that_was_taken_away_and_whose_branch_does_not_answer_holds_up_nobody", |folder| {
        let (foreign, pool) = hung(folder);
        // The program would look at the root first.
        unmount(folder.join("mnt"), UnmountFlags::empty()).expect("unmounted");
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
        let _ = poolfs(&pool, "status POOL").expect("status");
        foreign.resume();
        // Nothing is lost: it ends when its branch has taken what was written.
        let mut again = || poolfs(&pool, "mount POOL @mnt --upper @foreign/upper --lower @lower").code == 0;
        wait_until("its branch is free", &mut again);
        assert_eq!(fs::read(folder.join("foreign-upper/upper/f")).expect("flushed"), vec![7; 1 << 20]);
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn the_last_mount_of_a_pool_can_be_given_up_and_its_service_ends() {
    isolated("the_last_mount_of_a_pool_can_be_given_up_and_its_service_ends", |folder| {
        let (_foreign, pool) = hung(folder);
        let service = pool.service_pid();
        let forced = poolfs(&pool, "umount POOL @mnt --force --wait 2");
        assert!(forced.code == 0 && forced.err.contains("unmounted all the same"), "{forced:?}");
        assert!(!is_mounted(&folder.join("mnt")) && !Path::new(&format!("/proc/{service}")).exists());
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("another service");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

#[test]
fn what_is_thrown_away_waits_for_no_branch() {
    isolated("what_is_thrown_away_waits_for_no_branch", |folder| {
        let (_foreign, pool) = hung(folder);
        let command = format!(r#"{{"command":"unmount","instance":"{}","ending":"discarded"}}"#, instance(&pool));
        let answer = answer(send(&pool, &command));
        assert!(answer.contains("done"), "{answer}");
        assert!(!is_mounted(&folder.join("mnt")));
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

#[test]
fn an_unmount_in_order_gives_up_before_long_and_leaves_everything() {
    isolated("an_unmount_in_order_gives_up_before_long_and_leaves_everything", |folder| {
        let (foreign, pool) = hung(folder);
        // As by whoever has flushed before, and has the pool's lock now.
        let command = format!(r#"{{"command":"unmount","instance":"{}","ending":"orderly"}}"#, instance(&pool));
        let answer = answer(send(&pool, &command));
        assert!(answer.contains("its branch does not answer") && answer.contains("the mount stays"), "{answer}");
        assert!(is_mounted(&folder.join("mnt")));
        foreign.resume();
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
        assert_eq!(fs::read(folder.join("foreign-upper/upper/f")).expect("flushed"), vec![7; 1 << 20]);
    });
}

#[test]
fn flushes_that_nobody_waits_for_any_more_keep_no_connections() {
    isolated("flushes_that_nobody_waits_for_any_more_keep_no_connections", |folder| {
        let (foreign, pool) = hung(folder);
        let service = pool.service_pid();
        let command = format!(r#"{{"command":"flush","instance":"{}"}}"#, instance(&pool));
        // All that a service has.
        let waiting: Vec<_> = (0..32).map(|_| send(&pool, &command)).collect();
        wait_until("they wait", || threads(service, "control", Some(libc::SYS_futex)) >= 30);
        drop(waiting);
        wait_until("there are connections", || answer(send(&pool, r#"{"command":"ping"}"#)).contains("done"));
        foreign.resume();
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn a_command_that_is_interrupted_while_its_mount_is_flushed_leaves_that_to_the_user() {
    isolated("a_command_that_is_interrupted_while_its_mount_is_flushed_leaves_that_to_the_user", |folder| {
        let (foreign, pool) = places(folder);
        let (at, upper, lower) = (folder.join("mnt"), folder.join("foreign/upper"), folder.join("lower"));
        let spec = format!("at={},upper={},lower={}", at.display(), upper.display(), lower.display());
        let script =
            format!("exec 3> {}/f; printf x >&3; kill -STOP {}; printf %01048575d 0 >&3", at.display(), foreign.pid());
        let mut command = pool.command();
        command.args(["exec", pool.name(), "--mount", &spec, "--", "/bin/sh", "-c", &script]);
        let mut waiting = command.stderr(Stdio::null()).spawn().expect("poolfs starts");
        // It has answered once before its branch is looked at again.
        wait_until("it flushes", || {
            let status = pool.status();
            let pid = status["service"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
            pid.is_some_and(|pid| threads(pid, "last-flush", None) > 0)
        });
        let pid = Pid::from_raw(i32::try_from(waiting.id()).expect("a number")).expect("a number");
        kill_process(pid, Signal::INT).expect("ours");
        wait_until("it ends", || waiting.try_wait().expect("ours").is_some());
        assert!(is_mounted(&at));
        let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("nobody has the pool's lock");
        foreign.resume();
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
        assert_eq!(fs::metadata(folder.join("foreign-upper/upper/f")).expect("flushed").len(), 1 << 20);
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

/// Bytes of the files that are there before, each of another value than what is written.
const OLD_BYTES: usize = 1 << 20;

/// What a program posts while the branch does not answer: less than may be on the way of a file, and of a session.
const HUNG_WRITES: usize = 12;

/// How long a command that gives up a branch takes at most, whatever else the machine does. It waits for a flush, for writes that are being taken, and for threads, each for
/// some seconds.
const GIVE_UP_MAX: Duration = Duration::from_secs(300);

/// A file below, and what has to be in it.
struct Written {
    name: String,
    content: Vec<u8>,
}

/// A program that writes files of a branch without waiting for the answers.
struct Writer {
    program: Stepper,
    files: Vec<Written>,
}

/// The program that a command has started.
fn child_of(command: u32) -> u32 {
    let children = format!("/proc/{command}/task/{command}/children");
    let mut pid = None;
    wait_until("it is started", || {
        let text = fs::read_to_string(&children).expect("poolfs exec runs");
        pid = text.split_whitespace().next().and_then(|word| word.parse().ok());
        pid.is_some()
    });
    pid.expect("a number")
}

impl Writer {
    /// One whose writes to all these files are posted from here on, and of which nothing is on the way.
    fn start(folder: &Path, pool: &Pool, names: &[String]) -> Self {
        let program = Stepper::start(pool, &folder.join("steps"), Way::Library);
        let mut writer = Self { program, files: Vec::new() };
        let at = |name: &String| folder.join("mnt").join(name).display().to_string();
        for (number, name) in names.iter().enumerate() {
            assert_eq!(writer.program.step(&format!("open {} {}", at(name), libc::O_RDWR)), Ok(0));
            assert_eq!(writer.program.step(&format!("swap {number}")), Ok(0));
            writer.files.push(Written { name: name.clone(), content: vec![b'.'; OLD_BYTES] });
        }
        let (pid, mut left) = (writer.pid(), (0..names.len()).collect::<Vec<_>>());
        wait_until("its writes are posted", || {
            left.iter().for_each(|&number| writer.write(number, 0, 10, b'a'));
            let posted = posted_files(pool, pid);
            left = (0..names.len()).filter(|&number| !posted.contains(&at(&names[number]))).collect();
            left.is_empty()
        });
        writer
    }

    /// The program that `poolfs exec` has started.
    fn pid(&self) -> u32 {
        child_of(self.program.pid())
    }

    fn write(&mut self, file: usize, offset: usize, length: usize, byte: u8) {
        let (taken, write) = (format!("swap {file}"), format!("pwrite {offset} {length} {byte}"));
        for (step, value) in [(&taken, 0), (&write, length), (&taken, 0)] {
            assert_eq!(self.program.step(step), Ok(value as u64), "{step}");
        }
        self.files[file].content[offset..offset + length].fill(byte);
    }

    /// Returns from writes each of which needs a block of the branch. Each goes partly where one before has written: in another order they come to something else.
    fn write_what_the_branch_has_to_answer_for(&mut self) {
        let files = self.files.len();
        for (file, round) in (0..HUNG_WRITES).map(|number| (number % files, number / files)) {
            let place = OLD_BYTES / 2 + (round % 3) * (OLD_BYTES / 8);
            self.write(file, place + 100 * round, 1000, b'A' + round as u8);
        }
    }

    /// Begins a step with the first file, of which is told when it has ended.
    fn begin(mut self, step: String) -> (Receiver<Result<u64, i32>>, Vec<Written>, JoinHandle<Stepper>) {
        assert_eq!(self.program.step("swap 0"), Ok(0));
        self.begin_alone(step)
    }

    /// The same with the file that is open.
    fn begin_alone(mut self, step: String) -> (Receiver<Result<u64, i32>>, Vec<Written>, JoinHandle<Stepper>) {
        let (send, ended) = channel();
        let program = std::thread::spawn(move || {
            let _ = send.send(self.program.step(&step));
            self.program
        });
        (ended, self.files, program)
    }
}

/// The files of a process to which writes are posted, as `poolfs why` says. It looks at their attributes first, so that nothing is on the way then.
fn posted_files(pool: &Pool, pid: u32) -> Vec<String> {
    let text = poolfs(pool, &format!("why {pid} --json")).expect("why");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let descriptors = answer["descriptors"].as_array().expect("descriptors").iter();
    let posted = descriptors.filter(|descriptor| descriptor["writes"]["go_by"] == "posted");
    posted.filter_map(|descriptor| Some(descriptor["file"].as_str()?.to_owned())).collect()
}

/// Programs that post writes to so many files each, which a pool has mounted from a foreign filesystem, and read nothing of but their beginnings; that filesystem, which does not
/// answer any more; and another file of the mount, by [`other`]. The pool has mounted another directory besides.
fn posting(folder: &Path, programs: usize, files: usize) -> (Foreign, Pool, Vec<Writer>, fs::File) {
    let below = folder.join("foreign-upper/branch");
    fs::create_dir_all(&below).expect("a folder");
    let names: Vec<String> = (0..programs * files).map(|number| format!("f{number}")).collect();
    names.iter().for_each(|name| fs::write(below.join(name), vec![b'.'; OLD_BYTES]).expect("room"));
    fs::write(below.join("other"), b"other").expect("room");
    let (foreign, pool) = places(folder);
    let _ = poolfs(&pool, "mount POOL @mnt --dir @foreign/branch").expect("mount");
    let _ = poolfs(&pool, "mount POOL @more --dir @data").expect("mount");
    let _ = compile(folder, "steps", false);
    let writers = names.chunks(files).map(|names| Writer::start(folder, &pool, names)).collect();
    let other = other(folder);
    foreign.stop();
    (foreign, pool, writers, other)
}

/// A file of the mount whose content is in the cache, and for which the kernel asks each time that it is read.
fn other(folder: &Path) -> fs::File {
    let other = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(folder.join("mnt/other"));
    let other = other.expect("it is there");
    read_other(&other);
    other
}

/// Waits as long as whoever asks for something of the instance waits for a branch that does not answer.
fn read_other(other: &fs::File) {
    let mut bytes = [0; 5];
    other.read_exact_at(&mut bytes, 0).expect("readable");
    assert_eq!(&bytes, b"other");
}

/// Another mount of the pool goes on, with posts of its own.
fn others_go_on(folder: &Path, pool: &Pool) {
    let mut program = Stepper::start(pool, &folder.join("steps"), Way::Library);
    let file = folder.join("more/g").display().to_string();
    assert_eq!(program.step(&format!("open {file} {}", libc::O_RDWR | libc::O_CREAT)), Ok(0));
    for offset in 0..20 {
        assert_eq!(program.step(&format!("pwrite {offset} 1 {}", b'a' + offset)), Ok(1));
    }
    assert_eq!(program.step("sync"), Ok(0));
    assert_eq!(fs::read(folder.join("data/g")).expect("synced"), (b'a'..b'a' + 20).collect::<Vec<_>>());
    assert_eq!(program.step("close"), Ok(0));
    fs::remove_file(folder.join("more/g")).expect("removed");
}

/// That there is in a file what has to be, or where that begins to differ.
fn check(place: &Path, file: &Written) {
    let found = fs::read(place.join(&file.name)).expect("readable");
    let differs = found.iter().zip(&file.content).position(|(found, expected)| found != expected);
    let at = differs.map(|at| (at, found[at], file.content[at]));
    assert!(
        at.is_none() && found.len() == file.content.len(),
        "{place:?}, {}: {} bytes, {at:?}",
        file.name,
        found.len()
    );
}

fn posted_writes_are_there_after_their_branch_goes_on(folder: &Path, step: &'static str) {
    let (at, below) = (folder.join("mnt"), folder.join("foreign-upper/branch"));
    let (foreign, pool, mut writers, other) = posting(folder, 1, 1);
    let mut writer = writers.remove(0);
    writer.write_what_the_branch_has_to_answer_for();
    // Writes have rung for the service: one thread waits for the branch, and none for that thread. What has nothing to do waits for several words at once.
    let service = pool.service_pid();
    wait_until("threads can serve others", || threads(service, "serve-", Some(libc::SYS_futex)) == 0);
    let pid = writer.pid();
    let (ended, files, program) = writer.begin(step.to_owned());
    wait_until("it waits", || waits_for_its_step(pid));
    others_go_on(folder, &pool);
    // Nobody else waits for the branch any longer.
    read_other(&other);
    assert!(ended.try_recv().is_err(), "{step} is done, and the branch has had nothing of it");
    foreign.resume();
    assert_eq!(ended.recv().expect("an answer"), Ok(0), "{step}");
    if step == "sync" {
        check(&below, &files[0]);
    }
    check(&at, &files[0]);
    drop((program.join().expect("it answers"), other));
    let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    check(&below, &files[0]);
    let _ = poolfs(&pool, "umount POOL @more").expect("umount");
}

/// Whether a program of steps waits for the answer of one.
fn waits_for_its_step(pid: u32) -> bool {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).expect("it lives");
    // For the next step it waits in a read of its standard input.
    call != "running\n" && !call.starts_with("0 0x0 ")
}

/// A step with a file, to which a write was posted that has to wait for the branch, and one behind it that makes it longer: it comes after both, also when others do not wait for them any more.
fn a_step_comes_after_what_was_posted(
    folder: &Path,
    step: impl Fn(&Path) -> String,
    value: u64,
    change: impl Fn(&mut Written),
) {
    const LONGER: usize = 1000;
    let (at, below) = (folder.join("mnt"), folder.join("foreign-upper/branch"));
    let (foreign, pool, mut writers, other) = posting(folder, 1, 1);
    let mut writer = writers.remove(0);
    writer.write(0, OLD_BYTES / 2, 1000, b'A');
    writer.files[0].content.resize(OLD_BYTES + LONGER, 0);
    writer.write(0, OLD_BYTES, LONGER, b'B');
    let pid = writer.pid();
    // Whoever has to do with another file has waited for it long enough.
    read_other(&other);
    let (ended, mut files, program) = writer.begin(step(&at));
    let mut answer = None;
    wait_until("it waits, or does not", || {
        answer = ended.try_recv().ok();
        answer.is_some() || waits_for_its_step(pid)
    });
    read_other(&other);
    answer = answer.or_else(|| ended.try_recv().ok());
    assert_eq!(answer, None, "it did not wait for what was posted before");
    foreign.resume();
    assert_eq!(ended.recv().expect("an answer"), Ok(value));
    change(&mut files[0]);
    check(&at, &files[0]);
    drop((program.join().expect("it answers"), other));
    let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    check(&below, &files[0]);
    let _ = poolfs(&pool, "umount POOL @more").expect("umount");
}

#[test]
fn the_size_of_a_file_is_that_behind_its_posted_writes_however_long_they_take() {
    isolated("the_size_of_a_file_is_that_behind_its_posted_writes_however_long_they_take", |folder| {
        a_step_comes_after_what_was_posted(folder, |_| "size".to_owned(), OLD_BYTES as u64 + 1000, |_| {});
    });
}

#[test]
fn a_write_by_request_comes_after_those_that_were_posted_however_long_they_take() {
    isolated("a_write_by_request_comes_after_those_that_were_posted_however_long_they_take", |folder| {
        const LENGTH: usize = 100_000;
        let step = |_: &Path| format!("pwrite {} {LENGTH} {}", OLD_BYTES - LENGTH / 2, b'C');
        let change = |file: &mut Written| {
            file.content.resize(OLD_BYTES + LENGTH / 2, 0);
            file.content[OLD_BYTES - LENGTH / 2..].fill(b'C');
        };
        a_step_comes_after_what_was_posted(folder, step, LENGTH as u64, change);
    });
}

#[test]
fn a_truncation_comes_after_what_was_posted_however_long_it_takes() {
    isolated("a_truncation_comes_after_what_was_posted_however_long_it_takes", |folder| {
        let step = |_: &Path| format!("truncate {}", OLD_BYTES - 1);
        a_step_comes_after_what_was_posted(folder, step, 0, |file| file.content.truncate(OLD_BYTES - 1));
    });
}

#[test]
fn a_file_gets_another_name_after_what_was_posted_however_long_it_takes() {
    isolated("a_file_gets_another_name_after_what_was_posted_however_long_it_takes", |folder| {
        let step = |at: &Path| format!("rename {0}/f0 {0}/new", at.display());
        a_step_comes_after_what_was_posted(folder, step, 0, |file| file.name = "new".to_owned());
    });
}

#[test]
fn a_sync_waits_for_what_was_posted_while_the_branch_did_not_answer() {
    isolated("a_sync_waits_for_what_was_posted_while_the_branch_did_not_answer", |folder| {
        posted_writes_are_there_after_their_branch_goes_on(folder, "sync");
    });
}

#[test]
fn a_close_waits_for_what_was_posted_while_the_branch_did_not_answer() {
    isolated("a_close_waits_for_what_was_posted_while_the_branch_did_not_answer", |folder| {
        posted_writes_are_there_after_their_branch_goes_on(folder, "close");
    });
}

#[test]
fn what_was_posted_by_who_was_killed_is_there_after_the_branch_goes_on() {
    isolated("what_was_posted_by_who_was_killed_is_there_after_the_branch_goes_on", |folder| {
        let (at, below) = (folder.join("mnt"), folder.join("foreign-upper/branch"));
        let (foreign, pool, mut writers, other) = posting(folder, 2, 1);
        for writer in &mut writers {
            writer.write_what_the_branch_has_to_answer_for();
            let pid = Pid::from_raw(i32::try_from(writer.pid()).expect("a number")).expect("a number");
            kill_process(pid, Signal::KILL).expect("ours");
        }
        read_other(&other);
        drop(other);
        others_go_on(folder, &pool);
        foreign.resume();
        // With its stepper the program has ended, and closed its file.
        let files: Vec<Written> = writers.into_iter().flat_map(|writer| writer.files).collect();
        files.iter().for_each(|file| check(&at, file));
        let _ = poolfs(&pool, "umount POOL @mnt").expect("nobody has it open");
        files.iter().for_each(|file| check(&below, file));
        let _ = poolfs(&pool, "umount POOL @more").expect("umount");
    });
}

/// Gives a mount up to which programs have posted that the branch has to answer for.
fn posted_writes_are_given_up(folder: &Path, programs: usize, files: usize) {
    let (foreign, pool, mut writers, other) = posting(folder, programs, files);
    drop(other);
    writers.iter_mut().for_each(Writer::write_what_the_branch_has_to_answer_for);
    let forced = run_within(&mut pool.line("umount POOL @mnt --force --wait 2"), GIVE_UP_MAX);
    assert!(forced.code == 0, "{forced:?}");
    assert!(forced.err.contains("unmounted all the same") && forced.err.contains("is lost"), "{forced:?}");
    assert!(!is_mounted(&folder.join("mnt")));
    // Whatever changes what is mounted goes on, too.
    others_go_on(folder, &pool);
    for name in ["third", "rest"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    let _ = poolfs(&pool, "mount POOL @third --dir @rest").expect("mount");
    let _ = poolfs(&pool, "umount POOL @third").expect("umount");
    // Who wrote is told when he asks whether it is stored.
    let told: Vec<_> = writers.into_iter().map(|writer| writer.begin("sync".to_owned())).collect();
    foreign.resume();
    for (ended, _, program) in told {
        let outcome = ended.recv().expect("an answer");
        assert!(outcome.is_err(), "what was given up is said to be stored");
        drop(program.join().expect("it answers"));
    }
    let mut again = || poolfs(&pool, "mount POOL @mnt --dir @foreign/branch").code == 0;
    wait_until("its branch is free", &mut again);
    let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    let _ = poolfs(&pool, "umount POOL @more").expect("umount");
}

#[test]
fn a_mount_with_posted_writes_whose_branch_does_not_answer_can_be_given_up() {
    isolated("a_mount_with_posted_writes_whose_branch_does_not_answer_can_be_given_up", |folder| {
        posted_writes_are_given_up(folder, 1, 2);
    });
}

#[test]
fn a_mount_can_be_given_up_to_which_more_is_posted_than_the_service_has_threads_to_take() {
    isolated("a_mount_can_be_given_up_to_which_more_is_posted_than_the_service_has_threads_to_take", |folder| {
        posted_writes_are_given_up(folder, 3, 12);
    });
}

#[test]
fn what_is_known_of_a_process_is_told_while_a_branch_holds_what_it_has_open() {
    isolated("what_is_known_of_a_process_is_told_while_a_branch_holds_what_it_has_open", |folder| {
        let (foreign, pool) = places(folder);
        fs::create_dir(folder.join("foreign/below")).expect("a folder");
        fs::write(folder.join("foreign/below/f"), [7; 100]).expect("written");
        let _ = poolfs(&pool, "mount POOL @mnt --upper @data --lower @foreign/below").expect("mount");
        let (at, program) = (folder.join("mnt/f"), compile(folder, "steps", false));
        let mut programs = [(); 2].map(|()| Stepper::start(&pool, &program, Way::Library));
        for program in &mut programs {
            assert_eq!(program.step(&format!("open {} {}", at.display(), libc::O_RDWR)), Ok(0));
            assert!(program.step("size").is_ok_and(|size| size == 100));
        }
        foreign.stop();
        let [holding, asked] = programs;
        let (ended, _, holding) = Writer { program: holding, files: Vec::new() }.begin_alone("truncate 50".to_owned());
        wait_until("the branch has not answered", || {
            pool.status()["service"]["unresponsive_branches"].as_array().is_some_and(|branches| !branches.is_empty())
        });
        let pid = child_of(asked.pid());
        let told = poolfs(&pool, &format!("why {pid} --json --wait 5")).expect("why");
        let told: Value = serde_json::from_str(&told).expect("JSON");
        assert!(told.to_string().contains(at.to_str().expect("UTF-8")), "{told}");
        foreign.resume();
        assert_eq!(ended.recv().expect("it ends"), Ok(0));
        drop((asked, holding.join().expect("it ends")));
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}

#[test]
fn status_names_an_unresponsive_branch_and_the_requests_that_wait_for_it() {
    isolated("status_names_an_unresponsive_branch_and_the_requests_that_wait_for_it", |folder| {
        let (foreign, pool) = hung(folder);
        let at = folder.join("mnt/f");
        let syncing = std::thread::spawn(move || fs::File::open(at).expect("opened").sync_all());
        let upper = folder.join("foreign/upper");
        wait_until("it is named", || {
            let status = pool.status();
            let (service, instance) = (&status["service"], &status["service"]["instances"][0]);
            let branch = &service["unresponsive_branches"][0];
            let waits =
                |waiting: &Value| waiting["calls"].as_u64() > Some(0) && waiting["longest_ms"].as_u64() > Some(1000);
            branch["path"].as_str() == upper.to_str() && waits(&branch["waiting"]) && waits(&instance["waiting"])
        });
        let text = poolfs(&pool, "status POOL").expect("status");
        let named = format!("branch {}: no answer to ", upper.display());
        assert!(text.contains(&named) && text.contains("    waiting: "), "{text}");
        assert!(!text.contains("lower:"), "the other branch has nothing to answer: {text}");
        foreign.resume();
        syncing.join().expect("it ends").expect("synced");
        wait_until("nothing waits", || {
            let status = pool.status();
            let service = &status["service"];
            service["unresponsive_branches"].as_array().is_some_and(Vec::is_empty)
                && service["instances"][0]["waiting"].is_null()
        });
        let _ = poolfs(&pool, "umount POOL @mnt").expect("umount");
    });
}
