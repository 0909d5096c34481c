//! Tests of programs that the kernel maps from the cache: one copy for all, correct to the last byte whatever happens to the file
//! meanwhile.

use crate::harness::{Running, isolated, make};
use poolfs_service_protocol::{Answer, InstanceStatus, ProgramStatus, StackSpec};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const WAIT_MAX: Duration = Duration::from_secs(10);

/// What looks like a program, and no two pages of it alike.
fn program(seed: u8, bytes: usize) -> Vec<u8> {
    let mut content: Vec<u8> = (0..bytes).map(|at| (at / PAGE) as u8 ^ (at % 251) as u8 ^ seed).collect();
    content[..4].copy_from_slice(b"\x7fELF");
    content
}

/// All of a file, mapped to be read.
struct Map {
    base: *mut u8,
    length: usize,
}

impl Map {
    fn new(file: &File, length: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::PRIVATE, file, 0) };
        Self { base: base.expect("mapped").cast(), length }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: mapped for as long, and nobody of this test shortens what is mapped.
        (0..self.length).map(|at| unsafe { self.base.add(at).read_volatile() }).collect()
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { munmap(self.base.cast(), self.length).expect("mapped") };
    }
}

struct Scene {
    service: Running,
    lower: PathBuf,
    folder: PathBuf,
}

impl Scene {
    fn new(folder: &Path, cache_bytes: u64) -> Self {
        let lower = make(&folder.join("lower"));
        Self { service: Running::start_with(folder, cache_bytes), lower, folder: folder.to_owned() }
    }

    /// A file below, which is as old as an image's.
    fn put(&self, name: &str, content: &[u8]) {
        let path = self.lower.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, content).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("changed");
    }

    fn mount(&self, name: &str) -> PathBuf {
        let upper = make(&self.folder.join(format!("upper-{name}")));
        self.service.mount(name, StackSpec::union(upper, vec![self.lower.clone()]))
    }

    fn instance(&self, name: &str) -> InstanceStatus {
        let status = self.service.status();
        status.instances.into_iter().find(|instance| instance.instance == name).expect("mounted")
    }

    fn programs(&self, name: &str) -> ProgramStatus {
        self.instance(name).programs.expect("this kernel maps programs from the cache")
    }

    fn wait_for(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + WAIT_MAX;
        while !condition(self) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.service.status());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn content(path: &Path) -> Vec<u8> {
    fs::read(path).expect("readable")
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

fn writer(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).open(path)
}

/// A program of the mount that runs until its standard input ends.
fn start(path: &Path) -> Child {
    let mut child =
        Command::new(path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a program like any other");
    // It runs for sure when it has said something.
    child.stdin.as_mut().expect("a pipe").write_all(b"x").expect("it reads");
    child.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("it writes");
    child
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    assert!(child.wait().expect("ours").success(), "it ran to its end");
}

#[test]
fn containers_that_run_the_same_program_have_one_copy_of_it() {
    isolated("programs::containers_that_run_the_same_program_have_one_copy_of_it", |folder| {
        let scene = Scene::new(folder, 64 << 20);
        scene.put("cat", &content(Path::new("/bin/cat")));
        scene.put("text", b"#!/bin/sh\n");
        let length = fs::metadata("/bin/cat").expect("there").len().next_multiple_of(PAGE as u64);
        let mounts = ["a", "b"].map(|name| scene.mount(name));
        let children = mounts.each_ref().map(|at| start(&at.join("cat")));
        for name in ["a", "b"] {
            let instance = scene.instance(name);
            assert_eq!(instance.reads.kernel, 0, "the service is not asked for its pages");
            let programs = instance.programs.expect("this kernel maps programs from the cache");
            assert_eq!((programs.files, programs.bytes), (1, length));
            assert!(programs.opens > 0);
        }
        assert_eq!(scene.service.status().cache.pinned_bytes, length, "once for both");
        assert_eq!(content(&mounts[0].join("cat")), content(Path::new("/bin/cat")));
        assert_eq!(content(&mounts[0].join("text")), b"#!/bin/sh\n");
        assert_eq!(scene.programs("a").files, 1, "what is no program is cached by the kernel as ever");
        children.into_iter().for_each(end);
        for name in ["a", "b"] {
            assert_eq!(scene.service.unmount(name), Answer::Done);
        }
        assert_eq!(scene.service.status().cache.pinned_bytes, 0);
    });
}

#[test]
fn a_program_that_runs_is_busy_and_can_be_replaced() {
    isolated("programs::a_program_that_runs_is_busy_and_can_be_replaced", |folder| {
        let scene = Scene::new(folder, 64 << 20);
        let cat = content(Path::new("/bin/cat"));
        scene.put("cat", &cat);
        let at = scene.mount("a");
        let path = at.join("cat");
        let inode = fs::metadata(&path).expect("there").ino();
        let running = start(&path);
        assert_eq!(errno(writer(&path)), Some(libc::ETXTBSY));
        assert_eq!(errno(OpenOptions::new().write(true).truncate(true).open(&path)), Some(libc::ETXTBSY));
        fs::write(at.join("new"), b"another").expect("written");
        fs::rename(at.join("new"), &path).expect("renamed");
        assert_eq!(content(&path), b"another");
        assert_ne!(fs::metadata(&path).expect("there").ino(), inode);
        end(running);
        scene.wait_for("nobody runs it any more", |scene| scene.programs("a").files == 0);
        assert_eq!(content(&scene.lower.join("cat")), cat);
    });
}

#[test]
fn who_has_a_program_open_goes_on_with_it_when_it_is_changed() {
    isolated("programs::who_has_a_program_open_goes_on_with_it_when_it_is_changed", |folder| {
        let scene = Scene::new(folder, 64 << 20);
        let old = program(1, 9 * PAGE + 123);
        scene.put("tool", &old);
        scene.put("other", &old);
        fs::hard_link(scene.lower.join("tool"), scene.lower.join("link")).expect("linked");
        let at = scene.mount("a");
        let [path, link] = ["tool", "link"].map(|name| at.join(name));
        let open = File::open(&path).expect("opened");
        let map = Map::new(&open, old.len());
        assert_eq!(scene.programs("a").files, 1);
        let before = [&path, &link].map(|path| fs::metadata(path).expect("there").ino());

        let file = writer(&path).expect("the name is looked up again");
        file.write_all_at(b"new", 5 * PAGE as u64).expect("written");
        let mut new = old.clone();
        new[5 * PAGE..5 * PAGE + 3].copy_from_slice(b"new");
        assert_eq!((content(&path), content(&link)), (new.clone(), new.clone()), "by all its names");
        assert_eq!([&path, &link].map(|path| fs::metadata(path).expect("there").ino()), before);
        let mut seen = vec![0; old.len()];
        open.read_exact_at(&mut seen, 0).expect("read");
        assert!(seen == old && map.bytes() == old, "what was open is what it was");
        let again = format!("/proc/self/fd/{}", open.as_raw_fd());
        assert_eq!(errno(writer(Path::new(&again))), Some(libc::ETXTBSY));
        assert_eq!(content(Path::new(&again)), old);

        let third = File::open(at.join("other")).expect("opened");
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
        rustix::fs::open(at.join("other"), flags, rustix::fs::Mode::empty()).expect("truncated, as on any disk");
        assert_eq!(content(&at.join("other")), b"");
        third.read_exact_at(&mut seen, 0).expect("read");
        assert!(seen == old, "what was open is what it was");
        drop(third);

        file.set_len(100).expect("truncated");
        fs::set_permissions(&link, fs::Permissions::from_mode(0o711)).expect("changed");
        for metadata in [fs::metadata(&path), fs::metadata(&link), open.metadata()] {
            let metadata = metadata.expect("there");
            assert_eq!((metadata.size(), metadata.mode() & 0o777), (100, 0o711));
        }
        assert_eq!(map.bytes(), old);
        drop((open, map, file));
        scene.wait_for("it is given back", |scene| {
            // The kernel forgets what it has no use for when it is asked to, or by itself.
            let _ = fs::write("/proc/sys/vm/drop_caches", "2");
            scene.programs("a").files == 0
        });
        assert_eq!(content(&scene.lower.join("tool")), old);
    });
}

#[test]
fn a_mapping_outlives_the_first_change_of_a_program_that_nobody_has_open() {
    isolated("programs::a_mapping_outlives_the_first_change_of_a_program_that_nobody_has_open", |folder| {
        let scene = Scene::new(folder, 8 << 20);
        let old = program(2, 40 * PAGE + 1);
        scene.put("library", &old);
        let truncated = program(3, 30 * PAGE);
        scene.put("second", &truncated);
        let at = scene.mount("a");
        let path = at.join("library");
        let map = Map::new(&File::open(&path).expect("opened"), old.len());
        scene.wait_for("it is closed", |scene| scene.instance("a").handles == 0);
        let file = writer(&path).expect("opened");
        file.write_all_at(&[7; PAGE], 0).expect("written");
        fs::write(at.join("filler"), vec![1; 12 << 20]).expect("written");
        assert_eq!(content(&at.join("filler")).len(), 12 << 20);
        assert!(map.bytes() == old, "also when all else was evicted");
        assert_eq!(content(&path)[..PAGE], [7; PAGE]);
        drop(file);
        assert_eq!(content(&path)[PAGE..], old[PAGE..]);
        let second = at.join("second");
        let map = Map::new(&File::open(&second).expect("opened"), truncated.len());
        nix::unistd::truncate(&second, 10).expect("truncated");
        assert_eq!((content(&second).len(), map.bytes()), (10, truncated));
    });
}

#[test]
fn what_is_mounted_on_a_program_stays_when_it_is_changed() {
    isolated("programs::what_is_mounted_on_a_program_stays_when_it_is_changed", |folder| {
        let scene = Scene::new(folder, 64 << 20);
        let old = program(4, 3 * PAGE);
        for name in ["dir/tool", "dir/free", "place"] {
            scene.put(name, &old);
        }
        let at = scene.mount("a");
        let [tool, free, place] = ["dir/tool", "dir/free", "place"].map(|name| at.join(name));
        fs::write(folder.join("over"), "over").expect("written");
        // One mount on the program, and the program itself somewhere else, both where this process does not see them.
        let script = "mount --bind \"$1\" \"$2\" && mount --bind \"$3\" \"$4\" && echo ready && read -r go && cat \"$2\"; \
                      echo x 2>/dev/null > \"$4\" || echo busy";
        let mut other = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-c", script, "sh"])
            .args([&folder.join("over"), &tool, &free, &place])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("util-linux");
        let mut said = other.stdout.take().expect("a pipe");
        said.read_exact(&mut [0; 6]).expect("ready");
        let open = [&tool, &free].map(|path| File::open(path).expect("opened"));
        assert_eq!(scene.programs("a").files, 2);
        assert_eq!(errno(writer(&tool)), Some(libc::ETXTBSY), "another number would take the mount away");
        assert_eq!(errno(nix::unistd::truncate(&tool, 1).map_err(std::io::Error::from)), Some(libc::ETXTBSY));
        other.stdin.take().expect("a pipe").write_all(b"go\n").expect("it waits");
        let mut rest = String::new();
        said.read_to_string(&mut rest).expect("text");
        assert_eq!(rest, "overbusy\n", "and who changes it where it is mounted cannot look its name up");
        assert!(other.wait().expect("ours").success());
        drop(open);
        writer(&tool).expect("nobody has it open any more").write_all(b"new").expect("written");
        assert_eq!(content(&tool)[..3], *b"new");
        assert_eq!(
            (content(&scene.lower.join("dir/tool")), content(&free), content(&place)),
            (old.clone(), old.clone(), old)
        );
    });
}

#[test]
fn there_is_room_for_new_programs_when_others_are_used_no_more() {
    isolated("programs::there_is_room_for_new_programs_when_others_are_used_no_more", |folder| {
        const EACH: usize = 100 * PAGE;
        let scene = Scene::new(folder, 4 << 20);
        let all: Vec<Vec<u8>> = (0..7).map(|number| program(number, EACH)).collect();
        all.iter().enumerate().for_each(|(number, bytes)| scene.put(&format!("{number}"), bytes));
        let at = scene.mount("a");
        let open = |number: usize| File::open(at.join(number.to_string())).expect("opened");
        let held = [open(0), open(1)];
        assert_eq!(scene.programs("a").files, 2);
        let more = [open(2), open(3)];
        assert_eq!(scene.programs("a").files, 2, "a quarter of the cache");
        for (number, file) in held.iter().chain(&more).enumerate() {
            let mut seen = vec![0; EACH];
            file.read_exact_at(&mut seen, 0).expect("read");
            assert!(seen == all[number], "read the one way or the other");
        }
        let map = Map::new(&held[0], EACH);
        drop((held, more));
        for (number, bytes) in all.iter().enumerate().skip(4) {
            // Each is refused at most until the kernel has forgotten one that is used no more.
            scene.wait_for("no room", |scene| {
                let before = scene.programs("a").opens;
                assert_eq!(content(&at.join(number.to_string())), *bytes);
                scene.programs("a").opens > before
            });
            assert!(scene.service.status().cache.pinned_bytes <= 1 << 20);
        }
        assert!(map.bytes() == all[0], "mapped all the time");
    });
}

#[test]
fn programs_run_on_when_their_service_is_killed_and_all_is_given_back() {
    isolated("programs::programs_run_on_when_their_service_is_killed_and_all_is_given_back", |folder| {
        let mut scene = Scene::new(folder, 64 << 20);
        let bytes = program(9, 50 * PAGE);
        scene.put("tool", &bytes);
        let at = scene.mount("a");
        let open = File::open(at.join("tool")).expect("opened");
        let map = Map::new(&open, bytes.len());
        scene.service.kill();
        let mut seen = vec![0; bytes.len()];
        open.read_exact_at(&mut seen, 0).expect("the kernel reads by itself");
        assert!(seen == bytes && map.bytes() == bytes);
        scene.service = Running::start(folder);
        let at = scene.mount("a");
        assert_eq!(content(&at.join("tool")), bytes);
        assert!(map.bytes() == bytes);
        drop((open, map));
        assert_eq!(scene.service.unmount("a"), Answer::Done);
        let last = scene.service.status();
        assert_eq!((last.cache.pinned_bytes, last.instances.len()), (0, 0));
    });
}
