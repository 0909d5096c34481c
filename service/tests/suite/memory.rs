//! Tests of a service in a small memory control group: whatever its clients keep or have it keep, it survives, and other
//! instances go on.

mod held;

use crate::harness::{Running, eventually, isolated, make};
use crate::queue::{connect, handle, read};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::{Operation, Request, Status};
use poolfs_service_protocol::{MemoryStatus, StackSpec};
use rustix::pipe::{SpliceFlags, fcntl_setpipe_size, pipe, splice};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

const CACHE_BYTES: u64 = 64 << 20;
/// What the command line gives to a service with such a cache.
const LIMIT_BYTES: u64 = CACHE_BYTES / 8 * 9 + (128 << 20);
const PIECE: usize = 128 << 10;

/// A memory control group.
struct Group {
    place: PathBuf,
    is_old: bool,
}

impl Group {
    /// One of the name of the test's folder: processes of tests have numbers of namespaces of their own.
    ///
    /// Without one there is nothing to be seen here: a machine that limits no memory does not pass these tests, as it does not run pools.
    fn make(folder: &Path, limit: u64) -> Self {
        let name = folder.file_name().expect("a name");
        let [old, new] = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(Path::new);
        let is_old = old.join("memory.limit_in_bytes").exists();
        if !is_old {
            // As the command line does it; what the root hands down already is handed down once.
            let control = OpenOptions::new().write(true).open(new.join("cgroup.subtree_control"));
            let handed_down = control.and_then(|control| control.write_all_at(b"+memory", 0));
            handed_down.expect("control groups of memory, of version 1 or 2, in /sys/fs/cgroup: these tests need them");
        }
        let place = if is_old { old } else { new }.join(name);
        fs::create_dir(&place).expect("no other of the name");
        let group = Self { place, is_old };
        group.limit(limit);
        group
    }

    fn limit(&self, bytes: u64) {
        // The kernel may need several attempts to drop what it caches of branches.
        let file = self.file("memory.limit_in_bytes", "memory.max");
        eventually("the group takes the limit", || fs::write(&file, bytes.to_string()).is_ok());
    }

    fn file(&self, old: &str, new: &str) -> PathBuf {
        self.place.join(if self.is_old { old } else { new })
    }

    fn usage(&self) -> u64 {
        let text = fs::read_to_string(self.file("memory.usage_in_bytes", "memory.current")).expect("readable");
        text.trim().parse().expect("a number")
    }

    /// Of the usage, what the kernel cannot drop: not what it knows of names of branches, either.
    fn kept(&self) -> u64 {
        let text = fs::read_to_string(self.place.join("memory.stat")).expect("readable");
        let droppable = ["inactive_file ", "active_file ", "slab_reclaimable "];
        let bytes = |line: &str| droppable.iter().find_map(|name| line.strip_prefix(name)?.parse::<u64>().ok());
        let of_kernel = fs::read_to_string(self.place.join("memory.kmem.usage_in_bytes")).unwrap_or_default();
        let of_kernel: u64 = of_kernel.trim().parse().unwrap_or(0);
        self.usage().saturating_sub(text.lines().filter_map(bytes).sum()).saturating_sub(of_kernel)
    }

    /// What is left when the kernel has dropped what it can.
    fn usage_at_least(&self) -> u64 {
        // It may say that it could not drop as much as it was asked to.
        let _ = fs::write(self.file("memory.force_empty", "memory.reclaim"), LIMIT_BYTES.to_string());
        self.usage()
    }

    /// How many processes of it the kernel has killed.
    fn kills(&self) -> u64 {
        let text = fs::read_to_string(self.file("memory.oom_control", "memory.events")).expect("readable");
        let killed = |line: &str| line.strip_prefix("oom_kill ")?.parse().ok();
        text.lines().find_map(killed).expect("counted")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for _ in 0..500 {
            if fs::remove_dir(&self.place).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn mebibytes(bytes: u64) -> u64 {
    bytes >> 20
}

/// What every instance must be able to do.
fn goes_on(at: &Path) {
    let made = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(at.join("own"));
    let file = made.expect("a file of its own");
    file.write_all_at(&[7; 300_000], 0).expect("written");
    file.sync_all().expect("synced");
    let mut bytes = vec![0; 300_000];
    file.read_exact_at(&mut bytes, 0).expect("read");
    assert!(bytes == [7; 300_000]);
    assert_eq!(fs::read_dir(at).expect("listed").count(), fs::read_dir(at).expect("again").count());
}

type Pipes = Vec<[OwnedFd; 2]>;

/// Puts pages of a file into pipes, of which more are made; how many bytes.
fn keep(file: &impl AsFd, offset: usize, length: usize, pipes: &mut Pipes) -> u64 {
    let (mut at, end) = (offset as u64, (offset + length) as u64);
    let mut is_new = false;
    while at < end {
        let (flags, left) = (SpliceFlags::NONBLOCK, (end - at) as usize);
        let moved = pipes.last().map(|[_, writer]| splice(file, Some(&mut at), writer, None, left, flags));
        match moved {
            Some(Ok(0)) => break,
            Some(Ok(_)) => is_new = false,
            _ => {
                assert!(!is_new, "an empty pipe takes nothing");
                let (reader, writer) = pipe().expect("a pipe");
                fcntl_setpipe_size(&writer, 1 << 20).expect("as every user may");
                pipes.push([reader, writer]);
                is_new = true;
            }
        }
    }
    at - offset as u64
}

fn allow_many_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    setrlimit(Resource::Nofile, raised).expect("everybody may");
}

/// A client that keeps pages of segments in pipes.
struct Keeper {
    connection: Connection,
    path: PathBuf,
    file: File,
    handle: u64,
    length: usize,
    segment: Option<OwnedFd>,
    pipes: Pipes,
    granted: u64,
    kept: u64,
}

impl Keeper {
    fn new(folder: &Path, instance: &str, path: &Path) -> Self {
        // Two for each MiB that it keeps.
        allow_many_descriptors();
        let file = File::open(path).expect("there");
        let connection = connect(folder, instance);
        let (handle, length) = (handle(&file, &connection), file.metadata().expect("stat").len() as usize);
        Self {
            connection,
            path: path.to_owned(),
            file,
            handle,
            length,
            segment: None,
            pipes: Vec::new(),
            granted: 0,
            kept: 0,
        }
    }

    /// Asks for the segment; whether there is one.
    fn ask(&mut self) -> bool {
        let request = Request { operation: Operation::Segment as u32, handle: self.handle, ..Request::default() };
        let reply = self.connection.call(&request, &[], &mut []).expect("a reply");
        if reply.status != Status::Done as u32 {
            return false;
        }
        // SAFETY: the connection's own, which lives longer.
        let socket = unsafe { BorrowedFd::borrow_raw(self.connection.socket_number()) };
        let (_, [_, data, _]) = poolfs_ipc::handshake::receive_grant(socket).expect("a grant");
        self.segment = data;
        self.granted += 1;
        true
    }

    /// Puts pages of the segment into pipes.
    fn keep(&mut self, offset: usize, length: usize) {
        let Some(segment) = &self.segment else { return };
        self.kept += keep(segment, offset, length, &mut self.pipes);
    }

    fn let_go(&mut self) {
        self.segment = None;
        self.pipes.clear();
    }

    /// Opens the file anew, reads all of it, and keeps what comes.
    fn round(&mut self, expected: &[u8]) {
        self.file = File::open(&self.path).expect("there");
        self.handle = handle(&self.file, &self.connection);
        self.ask();
        for offset in (0..self.length).step_by(PIECE) {
            let length = PIECE.min(self.length - offset);
            let bytes = read(&self.connection, self.handle, offset as u64, length);
            assert!(bytes == expected[offset..offset + length], "at {offset}");
            self.keep(offset, length);
        }
    }
}

fn content(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at >> 12) as u8 ^ (at >> 20) as u8 ^ seed | 1).collect()
}

/// Two mounts over one lower branch, of which the second has a file of its own.
fn neighbours(service: &Running, folder: &Path, lower: &Path) -> [PathBuf; 2] {
    let mounted = ["hostile", "other"].map(|name| {
        let upper = make(&folder.join(format!("upper-{name}")));
        service.mount(name, StackSpec::union(upper, vec![lower.to_owned()]))
    });
    fs::write(mounted[1].join("short"), content(5, 1 << 20)).expect("written");
    mounted
}

#[test]
fn pages_of_segments_that_clients_keep() {
    isolated("memory::pages_of_segments_that_clients_keep", |folder| {
        const LONG: usize = 100 << 20;
        let group = Group::make(folder, LIMIT_BYTES);
        let long = content(3, LONG);
        let lower = make(&folder.join("lower"));
        fs::write(lower.join("long"), &long).expect("written");
        let log = folder.join("log");
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let [hostile, other] = neighbours(&service, folder, &lower);
        let before = group.kept();
        let mut keeper = Keeper::new(folder, "hostile", &hostile.join("long"));
        for round in 0..8 {
            keeper.round(&long);
            goes_on(&other);
            println!(
                "round {round}: {} MiB spliced, {} grants, {} of {} MiB kept",
                mebibytes(keeper.kept),
                keeper.granted,
                mebibytes(group.kept()),
                mebibytes(LIMIT_BYTES)
            );
        }
        let (most, said) = (group.kept(), fs::read_to_string(&log).expect("a log"));
        assert_eq!(group.kills(), 0, "{said}");
        assert!(most < LIMIT_BYTES, "{most}");
        println!("{} MiB before, {} MiB while it keeps them: {said}", mebibytes(before), mebibytes(most));
        assert!(!keeper.ask(), "it is given segments though it keeps what was taken away");
        let mut reader = Keeper::new(folder, "other", &other.join("short"));
        // What was given before it was known what becomes of it may be so much that there is none left to give.
        let is_short = || service.status().memory.is_some_and(|memory| memory.state == "short");
        eventually("who keeps nothing is given segments while there are any", || reader.ask() || is_short());
        let memory = memory_of(&service);
        assert_eq!((memory.limit_bytes, memory.instances_without_segments), (LIMIT_BYTES, 1), "{memory:?}");
        keeper.let_go();
        eventually("who keeps nothing is given segments", || reader.ask());
        eventually("it is given segments again when it has let go", || keeper.ask());
        eventually("there is plenty again", || service.status().memory.is_some_and(|memory| memory.state == "plenty"));
        assert_eq!(service.status().cache.allowed_bytes, CACHE_BYTES);
        println!("{} MiB when it has let go", mebibytes(group.kept()));
    });
}

const PROGRAM_BYTES: usize = 4 << 20;
/// Of these, all together have more bytes than the service's group may have.
const PROGRAMS: usize = 60;

/// Opens programs one after the other, keeps all their pages in pipes, and closes them, until it is found to keep them. `between`: what it does after each.
fn keeps_programs(service: &Running, at: &Path, mut between: impl FnMut()) -> Pipes {
    allow_many_descriptors();
    let mut pipes = Pipes::new();
    for number in 0..PROGRAMS {
        let mut file = None;
        // As long as there is no room for it, the kernel caches it itself.
        eventually("the kernel is given a program, or nobody is given any", || {
            // All who have it open have it in the same way.
            drop(file.take());
            let before = opened_programs(service);
            file = Some(File::open(at.join(format!("program-{number}"))).expect("there"));
            let memory = memory_of(service);
            opened_programs(service) > before || memory.instances_without_segments > 0 || memory.state != "plenty"
        });
        if memory_of(service).instances_without_segments > 0 {
            break;
        }
        keep(&file.expect("opened"), 0, PROGRAM_BYTES, &mut pipes);
        between();
    }
    pipes
}

/// What is known of the service's memory, once it was looked at.
fn memory_of(service: &Running) -> MemoryStatus {
    let mut found = None;
    eventually("the memory is watched", || {
        found = service.status().memory;
        found.is_some()
    });
    found.expect("it was there")
}

/// How often a program was opened so that the kernel reads it by itself.
fn opened_programs(service: &Running) -> u64 {
    let programs = service.status().instances.into_iter().map(|instance| instance.programs);
    programs.map(|programs| programs.expect("this kernel maps programs from the cache").opens).sum()
}

/// Whether the kernel is given a program that is opened.
fn is_given(service: &Running, program: &Path) -> bool {
    let before = opened_programs(service);
    assert_eq!(fs::read(program).expect("readable").len(), PROGRAM_BYTES);
    opened_programs(service) > before
}

/// One who keeps pages of programs is found whatever it does `between`, and a neighbour notices nothing.
fn pages_of_programs(folder: &Path, between: impl Fn(&Path)) {
    let group = Group::make(folder, LIMIT_BYTES);
    let lower = make(&folder.join("lower"));
    for number in 0..PROGRAMS {
        let mut program = content(number as u8, PROGRAM_BYTES);
        program[..4].copy_from_slice(b"\x7fELF");
        fs::write(lower.join(format!("program-{number}")), program).expect("written");
    }
    fs::write(lower.join("large"), content(11, CACHE_BYTES as usize)).expect("written");
    let log = folder.join("log");
    let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
    let [hostile, other] = neighbours(&service, folder, &lower);
    let mut neighbour = Keeper::new(folder, "other", &other.join("short"));
    assert!(neighbour.ask(), "there is plenty");
    let before = group.kept();
    let pipes = keeps_programs(&service, &hostile, || {
        between(&hostile);
        goes_on(&other);
    });
    let (most, said) = (group.kept(), fs::read_to_string(&log).expect("a log"));
    println!("{} MiB before, {} MiB with {} pipes: {said}", mebibytes(before), mebibytes(most), pipes.len());
    let memory = memory_of(&service);
    assert_eq!((memory.instances_without_segments, memory.segments_kept_total), (1, 1), "{memory:?}");
    assert_eq!((memory.shortages_total, group.kills()), (0, 0), "{memory:?}");
    assert!(neighbour.ask(), "a neighbour has lost its segments");
    assert!(
        !is_given(&service, &hostile.join("program-59")),
        "it is given programs though it keeps what was taken away"
    );
    eventually("another one is given programs", || is_given(&service, &other.join("program-59")));
    drop(pipes);
    eventually("it is given programs again when it has let go", || is_given(&service, &hostile.join("program-58")));
    assert_eq!(memory_of(&service).instances_without_segments, 0);
}

#[test]
fn pages_of_programs_that_somebody_keeps() {
    isolated("memory::pages_of_programs_that_somebody_keeps", |folder| pages_of_programs(folder, |_| {}));
}

/// When it is looked who keeps them, nothing of them is cached any more.
#[test]
fn pages_of_programs_that_somebody_keeps_when_the_cache_has_dropped_them() {
    isolated("memory::pages_of_programs_that_somebody_keeps_when_the_cache_has_dropped_them", |folder| {
        pages_of_programs(folder, |at| {
            let large = File::open(at.join("large")).expect("there");
            rustix::fs::fadvise(&large, 0, None, rustix::fs::Advice::DontNeed).expect("asked for");
            let mut bytes = vec![0; 1 << 20];
            (0..CACHE_BYTES).step_by(1 << 20).for_each(|at| large.read_exact_at(&mut bytes, at).expect("readable"));
        });
    });
}

#[test]
fn a_cache_that_no_longer_fits() {
    isolated("memory::a_cache_that_no_longer_fits", |folder| {
        const SMALL_BYTES: u64 = 78 << 20;
        let group = Group::make(folder, LIMIT_BYTES);
        let log = folder.join("log");
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = make(&folder.join("lower"));
        let [one, other] = mounted_with_full_cache(&service, folder, &[lower], ["one", "other"]);
        let mut reader = Keeper::new(folder, "one", &one.join("full"));
        assert!(reader.ask(), "there is plenty");
        let before = group.kept();
        group.limit(SMALL_BYTES);
        let memory = || memory_of(&service);
        eventually("it is seen", || memory().limit_bytes == SMALL_BYTES && memory().shortages_total > 0);
        eventually("it has recovered", || memory().state == "reduced");
        let allowed = service.status().cache.allowed_bytes;
        println!("{} MiB before, {} MiB in {} MiB", mebibytes(before), mebibytes(group.kept()), mebibytes(SMALL_BYTES));
        assert!(allowed < CACHE_BYTES && group.kept() < before, "{allowed}");
        goes_on(&other);
        assert_eq!(fs::read(other.join("full")).expect("read"), content(9, CACHE_BYTES as usize));
        assert!(service.status().cache.used_bytes <= allowed + CACHE_BYTES / 4, "{:?}", service.status().cache);
        eventually("segments are given again", || reader.ask());
        group.limit(LIMIT_BYTES);
        eventually("there is plenty again", || memory().state == "plenty");
        assert_eq!(service.status().cache.allowed_bytes, CACHE_BYTES);
        assert_eq!(group.kills(), 0, "{}", fs::read_to_string(&log).expect("a log"));
    });
}

/// Single bytes far apart: to find one block of a memory file the kernel takes up to a node on each level of a tree, which is memory as well.
#[test]
fn blocks_far_from_each_other() {
    isolated("memory::blocks_far_from_each_other", |folder| {
        const FILES: u64 = 5;
        const DISTANCE: u64 = (1 << 30) + (16 << 20);
        /// Within what is cached of a file.
        const LENGTH: u64 = 1 << 42;
        let group = Group::make(folder, LIMIT_BYTES);
        let log = folder.join("log");
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let [hostile, other] = neighbours(&service, folder, &make(&folder.join("lower")));
        goes_on(&other);
        let before = group.usage_at_least();
        let names: Vec<_> = (0..FILES).map(|number| hostile.join(format!("sparse-{number}"))).collect();
        for name in &names {
            let file = File::create(name).expect("made");
            (0..LENGTH)
                .step_by(DISTANCE as usize)
                .for_each(|at| assert_eq!(file.write_at(b"x", at).expect("written"), 1));
            file.sync_all().expect("synced");
            goes_on(&other);
        }
        let full = group.usage_at_least();
        let cache = service.status().cache;
        println!(
            "{} MiB before, {} MiB then, of which the cache counts {}",
            mebibytes(before),
            mebibytes(full),
            mebibytes(cache.used_bytes)
        );
        assert!(cache.used_bytes > CACHE_BYTES / 2, "{cache:?}");
        assert!(full - before < cache.used_bytes + CACHE_BYTES / 8, "{before} bytes before, {full} then: {cache:?}");
        assert_eq!(group.kills(), 0, "{}", fs::read_to_string(&log).expect("a log"));
        // All of it is given back.
        names.iter().for_each(|name| fs::remove_file(name).expect("there"));
        eventually("nothing is counted for files that are gone", || {
            service.status().cache.used_bytes < CACHE_BYTES / 8
        });
    });
}

/// Instances over one lower branch, with a cache that is full.
fn mounted_with_full_cache<const N: usize>(
    service: &Running,
    folder: &Path,
    lowers: &[PathBuf],
    names: [&str; N],
) -> [PathBuf; N] {
    let full = lowers[0].join("full");
    fs::write(&full, content(9, CACHE_BYTES as usize)).expect("written");
    let mounted = names.map(|name| {
        let upper = make(&folder.join(format!("upper-{name}")));
        service.mount(name, StackSpec::union(upper, lowers.to_vec()))
    });
    assert_eq!(fs::read(mounted[0].join("full")).expect("read").len() as u64, CACHE_BYTES);
    mounted
}

const INSTANCES: [&str; 5] = ["one", "two", "three", "four", "other"];

/// Nobody has to have such a directory on a disk.
fn tmpfs(place: &Path) -> PathBuf {
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("memory", make(place), "tmpfs", flags, c"mode=0755,nr_inodes=0").expect("root");
    place.to_owned()
}

fn long_name(number: usize) -> String {
    format!("{number:0>250}")
}

#[test]
fn names_that_kernels_keep() {
    isolated("memory::names_that_kernels_keep", |folder| {
        let group = Group::make(folder, LIMIT_BYTES);
        let log = folder.join("log");
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = tmpfs(&folder.join("lower"));
        let [hostile @ .., other] = mounted_with_full_cache(&service, folder, &[lower], INSTANCES);
        let before = group.kept();
        for at in &hostile {
            for number in 0..140_000 {
                let error = fs::metadata(at.join(long_name(number))).expect_err("there is none");
                assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
            }
            goes_on(&other);
            println!("{} MiB before, {} MiB with names", mebibytes(before), mebibytes(group.kept()));
        }
        assert_eq!(group.kills(), 0, "{}", fs::read_to_string(&log).expect("a log"));
        assert!(group.kept() < before + (40 << 20), "names are not bounded together");
        assert_eq!(service.status().instances.len(), INSTANCES.len());
    });
}

#[test]
fn listings_of_open_directories() {
    isolated("memory::listings_of_open_directories", |folder| {
        const NAMES: usize = 50_000;
        let group = Group::make(folder, LIMIT_BYTES);
        let lowers = ["lower", "below"].map(|name| tmpfs(&folder.join(name)));
        lowers.iter().for_each(|lower| drop(make(&lower.join("dir"))));
        (0..NAMES).for_each(|number| drop(File::create(lowers[0].join("dir").join(long_name(number))).expect("made")));
        fs::write(lowers[1].join("dir/below"), b"").expect("written");
        let log = folder.join("log");
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let [hostile @ .., other] = mounted_with_full_cache(&service, folder, &lowers, INSTANCES);
        let before = group.kept();
        let mut listings = Vec::new();
        for at in &hostile {
            for _ in 0..2 {
                let listed = fs::read_dir(at.join("dir"))
                    .and_then(|mut listing| listing.next().expect("something").map(|_| listing));
                match listed {
                    Ok(listing) => listings.push(listing),
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOMEM)),
                }
            }
            goes_on(&other);
            println!(
                "{} MiB before, {} MiB with {} listings",
                mebibytes(before),
                mebibytes(group.kept()),
                listings.len()
            );
        }
        assert_eq!(group.kills(), 0, "{}", fs::read_to_string(&log).expect("a log"));
        assert!(group.kept() < before + (90 << 20), "listings are not bounded together");
        assert!(!listings.is_empty());
        drop(listings);
        assert_eq!(fs::read_dir(other.join("dir")).expect("opened").filter(Result::is_ok).count(), NAMES + 1);
        assert_eq!(service.status().instances.len(), INSTANCES.len());
    });
}

#[test]
fn large_requests_of_many_mounts_at_once() {
    isolated("memory::large_requests_of_many_mounts_at_once", |folder| {
        const MOUNTS: usize = 64;
        const WRITERS: usize = 8;
        const MEBIBYTE: usize = 1 << 20;
        let group = Group::make(folder, LIMIT_BYTES);
        let log = folder.join("log");
        let service = Running::start_in(folder, CACHE_BYTES, &log, &group.place);
        let lower = make(&folder.join("lower"));
        let mount = |number: usize| {
            let upper = make(&folder.join(format!("upper-{number}")));
            service.mount(&format!("mount-{number}"), StackSpec::union(upper, vec![lower.clone()]))
        };
        let mounted: Vec<_> = (0..MOUNTS).map(mount).collect();
        let before = group.kept();
        let bytes = content(1, MEBIBYTE);
        // As a program without the library does it: each request has a thread's buffer to itself.
        let write = |at: &Path, writer: usize| -> std::io::Result<()> {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
            let path = at.join(format!("large-{writer}"));
            let file = options.open(&path)?;
            for _ in 0..3 {
                (0..4).try_for_each(|piece| file.write_all_at(&bytes, (piece * MEBIBYTE) as u64))?;
                let mut head = vec![0; 256 << 10];
                file.read_exact_at(&mut head, 3 * MEBIBYTE as u64)?;
                assert!(head == bytes[..head.len()]);
            }
            fs::remove_file(&path)
        };
        let failures = std::thread::scope(|scope| {
            let all = mounted.iter().flat_map(|at| (0..WRITERS).map(move |writer| (at, writer)));
            let writers: Vec<_> = all.map(|(at, writer)| scope.spawn(move || write(at, writer))).collect();
            let outcomes = writers.into_iter().map(|writer| writer.join().expect("what was written is read"));
            outcomes.filter_map(Result::err).collect::<Vec<_>>()
        });
        let said = fs::read_to_string(&log).expect("a log");
        assert_eq!(group.kills(), 0, "{failures:?} {said}");
        assert!(failures.is_empty(), "{failures:?} {said}");
        mounted.iter().for_each(|at| goes_on(at));
        let kept = [before, group.kept()].map(mebibytes);
        println!("{} MiB before, {} MiB after", kept[0], kept[1]);
        eventually("there is plenty again", || service.status().memory.is_some_and(|memory| memory.state == "plenty"));
        assert_eq!(service.status().instances.len(), MOUNTS);
    });
}
