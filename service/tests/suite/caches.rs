//! Coherence tests of the kernel's cached names and attributes: it asks for nothing twice, and never shows an outdated one.

use crate::harness::{Running, isolated, make};
use crate::queue::{connect, handle, write};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::{Operation, Reply, Request, Status, WireTime};
use poolfs_service_protocol::{OperationPath, StackSpec};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Requests of the kernel so far, by kind.
fn asked(service: &Running) -> BTreeMap<String, u64> {
    let status = service.status();
    let mut counts = BTreeMap::new();
    for instance in &status.instances {
        for (kind, count) in instance.operations.get(&OperationPath::Fuse).into_iter().flatten() {
            *counts.entry(kind.clone()).or_default() += count.count;
        }
    }
    counts
}

/// What the kernel asks for while `work` is done.
pub fn requests(service: &Running, work: impl FnOnce()) -> Vec<(String, u64)> {
    let before = asked(service);
    work();
    let new = |(kind, count): (String, u64)| {
        let count = count - before.get(&kind).copied().unwrap_or(0);
        (count > 0 && kind != "forget").then_some((kind, count))
    };
    asked(service).into_iter().filter_map(new).collect()
}

/// The user-level path by paths.
pub struct Library(pub Connection);

impl Library {
    fn ask(&self, request: Request, first: &str, second: &str) -> Reply {
        let request = Request { path_length: first.len() as u32, second_length: second.len() as u32, ..request };
        self.0.call(&request, &[first.as_bytes(), second.as_bytes()], &mut []).expect("a reply")
    }

    fn done(&self, request: Request, first: &str, second: &str) -> Reply {
        let reply = self.ask(request, first, second);
        assert_eq!((reply.status, reply.errno), (Status::Done as u32, 0), "{request:?} {first} {second}");
        reply
    }

    pub fn simple(&self, operation: Operation, first: &str, second: &str) {
        self.done(Request { operation: operation as u32, ..Request::default() }, first, second);
    }

    pub fn mode(&self, operation: Operation, path: &str, mode: u32) {
        self.done(Request { operation: operation as u32, mode, ..Request::default() }, path, "");
    }

    fn truncate(&self, path: &str, offset: u64) {
        self.done(Request { operation: Operation::Truncate as u32, offset, ..Request::default() }, path, "");
    }

    fn set_modified(&self, path: &str, seconds: i64) {
        let times =
            [WireTime { nanoseconds: 0x3fff_fffe, ..WireTime::default() }, WireTime { seconds, ..WireTime::default() }];
        self.done(Request { operation: Operation::SetTimes as u32, times, ..Request::default() }, path, "");
    }

    /// What stands there, without links being followed.
    fn stat(&self, path: &str) -> Option<[i64; 9]> {
        let request = Request { operation: Operation::Stat as u32, flags: 1, ..Request::default() };
        let reply = self.ask(request, path, "");
        if reply.status == Status::Failed as u32 {
            assert_eq!(reply.errno, libc::ENOENT, "{path}");
            return None;
        }
        assert_eq!(reply.status, Status::Done as u32, "{path}");
        let a = reply.attributes;
        Some([
            a.inode as i64,
            a.size as i64,
            a.mode.into(),
            a.links.into(),
            a.uid.into(),
            a.seconds[1],
            a.nanoseconds[1].into(),
            a.seconds[2],
            a.nanoseconds[2].into(),
        ])
    }
}

/// The same by the kernel.
fn stat(path: &Path) -> Option<[i64; 9]> {
    match fs::symlink_metadata(path) {
        Ok(a) => Some([
            a.ino() as i64,
            a.size() as i64,
            a.mode().into(),
            a.nlink() as i64,
            a.uid().into(),
            a.mtime(),
            a.mtime_nsec(),
            a.ctime(),
            a.ctime_nsec(),
        ]),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound, "{path:?}");
            None
        }
    }
}

/// A mount with `dir/f`, `dir/other` and `f2`, twice: of a directory and of a union.
pub fn mounts(folder: &Path, service: &Running) -> Vec<(String, PathBuf)> {
    let [plain, upper, lower] = ["plain", "upper", "lower"].map(|name| make(&folder.join(name)));
    for root in [&plain, &lower] {
        make(&root.join("dir"));
        for file in ["dir/f", "dir/other", "f2"] {
            fs::write(root.join(file), b"content").expect("write");
        }
    }
    let stacks = [StackSpec::directory(plain), StackSpec::union(upper, vec![lower])];
    let names = ["plain", "union"];
    names.into_iter().zip(stacks).map(|(name, stack)| (name.to_owned(), service.mount(name, stack))).collect()
}

#[test]
fn a_warm_stat_asks_for_nothing_and_a_warm_open_once() {
    isolated("caches::a_warm_stat_asks_for_nothing_and_a_warm_open_once", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let (file, missing) = (at.join("dir/f"), at.join("dir/missing"));
            let look = || {
                let found = (fs::metadata(&file).is_ok(), fs::metadata(&missing).is_err());
                assert_eq!(found, (true, true));
            };
            let cold = requests(&service, look);
            assert!(cold.iter().any(|(kind, _)| kind == "lookup"), "{name}: {cold:?}");
            assert_eq!(requests(&service, || (0..10).for_each(|_| look())), [], "{name}");
            let opened = requests(&service, || drop(fs::metadata(&file).and(File::open(&file).map(std::mem::forget))));
            assert_eq!(opened, [("open".to_owned(), 1)], "{name}");
            fs::write(at.join("dir/new"), b"made by the kernel").expect("write");
            fs::metadata(at.join("dir/new")).expect("stat");
            let again = requests(&service, || assert!(at.join("dir/new").exists()));
            assert_eq!(again, [], "{name}");
        }
    });
}

#[test]
fn every_kind_of_change_by_requests_is_seen_by_the_kernel_at_once() {
    isolated("caches::every_kind_of_change_by_requests_is_seen_by_the_kernel_at_once", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            let seen = ["dir", "dir/f", "dir/other", "dir/new", "dir/link", "dir/sym", "dir/sub", "dir/fifo", "f2"];
            let check = |what: &str| {
                for path in seen {
                    let mut found = [stat(&at.join(path)), library.stat(path)];
                    if path == "dir" && name == "union" {
                        // A directory that gets its upper one has been changed then, which nobody is told of.
                        found.iter_mut().flatten().for_each(|found| found[7..].fill(0));
                    }
                    assert_eq!(found[0], found[1], "{name}: {path} after {what}");
                }
            };
            let step = |what: &str, change: &dyn Fn()| {
                // Twice: the kernel has it all after the first.
                check(what);
                check(what);
                change();
                check(what);
            };
            step("a change of mode", &|| library.mode(Operation::ChangeMode, "dir/f", 0o600));
            step("a change of owner by the kernel", &|| chown(at.join("dir/f"), Some(7), None).expect("root"));
            step("a change of times", &|| library.set_modified("dir/f", 12_345));
            step("a change of a directory's times", &|| library.set_modified("dir", 54_321));
            step("a truncation", &|| library.truncate("dir/f", 3));
            step("an extension", &|| library.truncate("dir/f", 30_000));
            step("a link", &|| library.simple(Operation::Link, "dir/f", "dir/link"));
            step("a change by another name", &|| library.mode(Operation::ChangeMode, "dir/link", 0o640));
            step("a symbolic link", &|| library.simple(Operation::SymbolicLink, "dir/sym", "f"));
            step("a directory", &|| library.mode(Operation::MakeDirectory, "dir/sub", 0o755));
            step("a fifo", &|| library.mode(Operation::MakeNode, "dir/fifo", 0o010_644));
            step("a file", &|| library.mode(Operation::MakeNode, "dir/new", 0o100_644));
            step("a move", &|| library.simple(Operation::Rename, "dir/link", "dir/sub/link"));
            step("a move back over another", &|| library.simple(Operation::Rename, "dir/sub/link", "dir/other"));
            step("an exchange", &|| {
                let operation = Operation::Rename as u32;
                library.done(Request { operation, mode: 2, ..Request::default() }, "dir/other", "f2");
            });
            step("a removal", &|| library.simple(Operation::Unlink, "dir/f", ""));
            step("the removal of a symbolic link", &|| library.simple(Operation::Unlink, "dir/sym", ""));
            step("an attribute", &|| {
                let request = Request { operation: Operation::SetXattr as u32, third_length: 1, ..Request::default() };
                let request = Request { path_length: 2, second_length: 6, ..request };
                let reply = library.0.call(&request, &[b"f2", b"user.x", b"v"], &mut []).expect("a reply");
                assert_eq!(reply.status, Status::Done as u32);
            });
            let file = OpenOptions::new().read(true).write(true).open(at.join("f2")).expect("open");
            let adopted = handle(&file, &library.0);
            for size in [5u64, 100, 70_000] {
                step("a write", &|| assert_eq!(write(&library.0, adopted, 0, &vec![1; size as usize]).length, size));
            }
            let allocate = Request { operation: Operation::Allocate as u32, handle: adopted, ..Request::default() };
            step("an allocation", &|| {
                library.0.call(&Request { length: 100_000, ..allocate }, &[], &mut []).expect("a reply");
            });
        }
    });
}

#[test]
fn a_program_that_runs_is_not_truncated_by_who_tries_to_open_it() {
    isolated("caches::a_program_that_runs_is_not_truncated_by_who_tries_to_open_it", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let program = at.join("program");
        let size = fs::copy("/bin/sleep", &program).expect("coreutils");
        let mut running = Command::new(&program).arg("60").spawn().expect("a program");
        let opened = rustix::fs::open(&program, OFlags::RDONLY | OFlags::TRUNC, Mode::empty());
        running.kill().expect("ours");
        running.wait().expect("ours");
        assert_eq!(opened.err(), Some(rustix::io::Errno::TXTBSY));
        assert_eq!(fs::metadata(&program).expect("stat").len(), size);
    });
}

/// A small deterministic generator (Marsaglia's xorshift64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

const NAMES: [&str; 12] = ["a", "b", "c", "d", "x/a", "x/b", "x/c", "x/d", "y/a", "y/b", "y/c", "y/d"];

/// One random change of names or attributes by requests; it may fail.
fn by_library(dice: &mut Dice, library: &Library) -> String {
    let [one, other] = [NAMES[dice.below(NAMES.len())], NAMES[dice.below(NAMES.len())]];
    let request = |operation: Operation, mode| Request { operation: operation as u32, mode, ..Request::default() };
    let (request, second) = match dice.below(10) {
        0 => (request(Operation::MakeNode, 0o100_644), ""),
        1 | 2 => (request(Operation::Unlink, 0), ""),
        3 | 4 => (request(Operation::Rename, [0, 0, 1, 2][dice.below(4)]), other),
        5 => (request(Operation::Link, 0), other),
        6 => (request(Operation::SymbolicLink, 0), "c"),
        7 => (request(Operation::ChangeMode, [0o644, 0o600, 0o755, 0o4711][dice.below(4)]), ""),
        8 => (Request { offset: dice.below(9000) as u64, ..request(Operation::Truncate, 0) }, ""),
        _ => (request(Operation::MakeDirectory, 0o755), ""),
    };
    let reply = library.ask(request, one, second);
    format!("library {} {:o} {one} {second}: {} {}", request.operation, request.mode, reply.status, reply.errno)
}

/// The same by the kernel.
fn by_kernel(dice: &mut Dice, at: &Path) -> String {
    let [one, other] = [NAMES[dice.below(NAMES.len())], NAMES[dice.below(NAMES.len())]];
    let (from, to) = (at.join(one), at.join(other));
    let kind = dice.below(10);
    let done = match kind {
        0 => OpenOptions::new().write(true).create_new(true).open(&from).map(drop),
        1 | 2 => fs::remove_file(&from),
        3 | 4 => fs::rename(&from, &to),
        5 => fs::hard_link(&from, &to),
        6 => symlink("c", &from),
        7 => fs::set_permissions(&from, fs::Permissions::from_mode([0o644, 0o600, 0o755, 0o4711][dice.below(4)])),
        8 => OpenOptions::new().write(true).create(true).truncate(true).open(&from).map(drop),
        _ => fs::create_dir(&from).and_then(|()| fs::remove_dir(&from)),
    };
    format!("kernel {kind} {one} {other}: {:?}", done.map_err(|error| error.raw_os_error()))
}

#[test]
fn ten_thousand_random_changes_by_both_paths_are_all_seen_at_once() {
    isolated("caches::ten_thousand_random_changes_by_both_paths_are_all_seen_at_once", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            ["x", "y"].into_iter().for_each(|name| fs::create_dir(at.join(name)).expect("mkdir"));
            let library = Library(connect(folder, &name));
            let mut dice = Dice(0xc0ffee);
            for round in 0..10_000 {
                let step = match dice.below(2) {
                    0 => by_library(&mut dice, &library),
                    _ => by_kernel(&mut dice, &at),
                };
                for path in NAMES.iter().chain(&["x", "y"]) {
                    assert_eq!(stat(&at.join(path)), library.stat(path), "{name}: {path}, round {round}: {step}");
                }
                if library.stat("a").is_some_and(|a| a[2] & 0o170_000 == 0o040_000) {
                    fs::remove_dir(at.join("a")).expect("made by a request");
                }
            }
        }
    });
}

/// Ends the watchers also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// What `look` sees is not less than `least`. The kernel takes its old attributes for new ones for a moment, while it puts new
/// ones into place: it clears its mark first and takes no lock against readers. So one look may be old, and no two in a row.
fn sees(what: &str, least: u64, look: impl Fn() -> u64) {
    let seen = look();
    if seen < least {
        // On a virtual machine the processor that is putting them into place may have been taken away.
        thread::sleep(Duration::from_millis(5));
        let again = look();
        assert!(again >= least, "{what}: {seen} and then {again} after {least}");
    }
}

#[test]
fn watchers_never_see_less_than_what_had_been_answered() {
    isolated("caches::watchers_never_see_less_than_what_had_been_answered", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            let (stop, sizes, directories) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(2));
            library.truncate("dir/f", 0);
            make(&at.join("many"));
            let watch = || {
                let mut looks = 0u64;
                while !stop.load(Ordering::Acquire) {
                    let (least, links) = (sizes.load(Ordering::Acquire), directories.load(Ordering::Acquire));
                    sees("size", least, || fs::metadata(at.join("dir/f")).expect("always there").len());
                    sees("directories", links, || fs::metadata(at.join("many")).expect("always there").nlink());
                    let made = links - 2;
                    let newest = at.join(format!("many/{}", made.saturating_sub(1)));
                    assert!(made == 0 || newest.exists(), "{newest:?}");
                    // The kernel remembers that it is not there yet.
                    let _ = fs::metadata(at.join(format!("many/{made}")));
                    looks += 1;
                }
                looks
            };
            thread::scope(|scope| {
                let watchers: Vec<_> = (0..3).map(|_| scope.spawn(watch)).collect();
                let end = Stop(&stop);
                for round in 1..=1500u64 {
                    let directory = format!("many/{}", round - 1);
                    match round % 4 {
                        0 => library.truncate("dir/f", round),
                        1 => {
                            library.mode(Operation::MakeNode, "new", 0o100_644);
                            library.truncate("new", round);
                            library.simple(Operation::Rename, "new", "dir/f");
                        }
                        2 => {
                            OpenOptions::new()
                                .write(true)
                                .open(at.join("dir/f"))
                                .expect("open")
                                .set_len(round)
                                .expect("truncate");
                        }
                        _ => {
                            library.mode(Operation::MakeNode, "new", 0o100_644);
                            library.truncate("new", round);
                            fs::rename(at.join("new"), at.join("dir/f")).expect("rename");
                        }
                    }
                    sizes.store(round, Ordering::Release);
                    if round % 2 == 0 {
                        fs::create_dir(at.join(&directory)).expect("mkdir");
                    } else {
                        library.mode(Operation::MakeDirectory, &directory, 0o755);
                    }
                    directories.store(round + 2, Ordering::Release);
                }
                drop(end);
                assert!(watchers.into_iter().map(|watcher| watcher.join().expect("nothing old")).sum::<u64>() > 0);
            });
        }
    });
}

#[test]
fn what_is_mounted_on_a_name_survives_whatever_happens_around_it() {
    isolated("caches::what_is_mounted_on_a_name_survives_whatever_happens_around_it", |folder| {
        let service = Running::start(folder);
        let elsewhere = make(&folder.join("elsewhere"));
        fs::write(elsewhere.join("f"), b"mounted").expect("write");
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            make(&at.join("dir/sub"));
            for (source, target) in [("elsewhere/f", "dir/f"), ("elsewhere", "dir/sub")] {
                rustix::mount::mount_bind(folder.join(source), at.join(target)).expect("root");
            }
            let check = || {
                assert_eq!(fs::read(at.join("dir/f")).expect("read"), b"mounted");
                assert_eq!(fs::read(at.join("dir/sub/f")).expect("read"), b"mounted");
                // The kernel has everything of the directory.
                assert_eq!((stat(&at.join("dir")).is_some(), stat(&at.join("dir/new")).is_some()), (true, false));
            };
            let steps: [&dyn Fn(); 9] = [
                &|| library.truncate("dir/f", 9),
                &|| library.mode(Operation::ChangeMode, "dir/f", 0o600),
                &|| library.mode(Operation::ChangeMode, "dir/sub", 0o700),
                &|| library.mode(Operation::ChangeMode, "dir", 0o711),
                &|| library.simple(Operation::Link, "dir/f", "dir/link"),
                &|| library.simple(Operation::Rename, "dir/link", "dir/other"),
                &|| library.mode(Operation::MakeNode, "dir/new", 0o100_644),
                &|| library.simple(Operation::Rename, "dir/new", "dir/other"),
                &|| library.simple(Operation::Unlink, "dir/other", ""),
            ];
            for step in steps {
                if stat(&at.join("dir/new")).is_none() {
                    check();
                }
                step();
            }
            check();
            // Two names of one file: a rename does nothing, and takes nothing away.
            library.simple(Operation::Link, "dir/f", "dir/link");
            assert!(stat(&at.join("dir/link")).is_some());
            library.simple(Operation::Rename, "dir/link", "dir/f");
            check();
            for target in ["dir/f", "dir/sub"] {
                rustix::mount::unmount(at.join(target), rustix::mount::UnmountFlags::empty()).expect("still mounted");
            }
        }
    });
}

#[test]
fn two_instances_on_one_directory_show_the_same() {
    isolated("caches::two_instances_on_one_directory_show_the_same", |folder| {
        let service = Running::start(folder);
        let (one, directory) = service.mount_directory("one");
        make(&one.join("dir"));
        fs::write(one.join("dir/f"), b"content").expect("write");
        let names = ["dir", "dir/f", "dir/g", "dir/h"];
        let look = |at: &Path| names.map(|name| stat(&at.join(name)));
        assert_eq!(look(&one), look(&one));
        assert_eq!(requests(&service, || assert!(look(&one)[3].is_none())), [], "warm");
        // Whatever the first has kept while it was alone, it shows what the second changes from now on.
        let two = service.mount("two", StackSpec::directory(directory));
        let by_two = Library(connect(folder, "two"));
        let same = |what: &str| {
            assert_eq!((look(&one), look(&one)), (look(&two), look(&two)), "{what}");
            assert_eq!(look(&one), names.map(|name| by_two.stat(name)), "{what}");
        };
        same("nothing");
        fs::write(two.join("dir/g"), b"new").expect("write");
        same("a file");
        by_two.simple(Operation::Rename, "dir/g", "dir/h");
        same("a move");
        by_two.truncate("dir/f", 1);
        same("a truncation");
        fs::rename(one.join("dir/h"), one.join("dir/f")).expect("rename");
        same("a replacement");
        by_two.simple(Operation::Unlink, "dir/f", "");
        same("a removal");
        fs::set_permissions(two.join("dir"), fs::Permissions::from_mode(0o700)).expect("chmod");
        same("a change of mode");
    });
}
