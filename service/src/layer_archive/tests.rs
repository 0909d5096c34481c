//! Tests of archives of layers: what they take of the memory and of the disk.

use super::*;
use poolfs_libservice::Memory;
use poolfs_libservice::types::{Name, SetAttributes, XattrFlags};
use poolfs_union::{Union, UnionConfig};
use rustix::fs::{Mode, OFlags, fstatvfs, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

const MIB: u64 = 1 << 20;

/// So much, and not more.
struct Bounded {
    left: AtomicU64,
}

impl Headroom for Bounded {
    fn add(&self, amount: u64) -> bool {
        let less = |left: u64| left.checked_sub(amount);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn force(&self, _: u64) {
        unreachable!("it is asked");
    }

    fn subtract(&self, amount: u64) {
        self.left.fetch_add(amount, Ordering::Relaxed);
    }
}

fn bounded(left: u64) -> Arc<Bounded> {
    Arc::new(Bounded { left: AtomicU64::new(left) })
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

fn union_over(upper: Arc<Memory>) -> Arc<dyn Layered> {
    Union::open(UnionConfig::new(upper, Vec::new())).expect("the union opens")
}

fn write_to(union: &Arc<dyn Layered>, archive: File, room: &Arc<Bounded>) -> Result<Committed, ArchiveError> {
    write(union, archive, Arc::clone(room) as Arc<dyn Headroom>, &|| true)
}

#[test]
fn times_are_decimal_numbers() {
    for (time, text) in [
        ((5, 0), "5"),
        ((5, 20), "5.000000020"),
        ((0, 1), "0.000000001"),
        ((-5, 0), "-5"),
        ((-5, 999_999_999), "-4.000000001"),
        ((-1, 500_000_000), "-0.500000000"),
    ] {
        assert_eq!(decimal(time.0, time.1), text);
    }
}

/// Files with two names each, far below the root: what is kept of them is not their number by their depth, and there is a bound to it.
#[test]
fn files_with_several_names_are_charged_and_bounded() {
    const FILES: u64 = 300;
    const DEPTH: usize = 40;
    let upper = Memory::new();
    let mut path = String::new();
    let mut at = NodeId::ROOT;
    for _ in 0..DEPTH {
        let part = "d".repeat(250);
        at = upper.mkdir(ROOT, at, name(&part), 0o755).expect("made").node;
        path += &(part + "/");
    }
    for file in 0..FILES {
        let made = upper.mknod(ROOT, at, name(&format!("a{file}")), FileType::Regular, 0o600, 0).expect("made");
        let _ = upper.link(ROOT, made.node, at, name(&format!("b{file}"))).expect("linked");
    }
    let union = union_over(upper);
    let room = bounded(100 << 10);
    let mut archive = tempfile::tempfile().expect("a file");
    let done = write_to(&union, archive.try_clone().expect("the same"), &room).expect("there is room");
    assert_eq!(done.members, 1 + DEPTH as u64 + 2 * FILES);
    assert_eq!(room.left.load(Ordering::Relaxed), 100 << 10, "all is given back");
    std::io::Seek::rewind(&mut archive).expect("a file");
    let mut links = 0;
    for entry in tar::Archive::new(archive).entries().expect("an archive") {
        let entry = entry.expect("an entry");
        if let Some(target) = entry.link_name_bytes() {
            let own = entry.path_bytes();
            let file = own.strip_prefix(format!("{path}b").as_bytes()).expect("the second name");
            assert_eq!(*target, [path.as_bytes(), b"a", file].concat());
            links += 1;
        }
    }
    assert_eq!(links, FILES);

    let room = bounded(30 << 10);
    let error = write_to(&union, tempfile::tempfile().expect("a file"), &room).expect_err("there is no room");
    assert_eq!(error.code(), FailureCode::File);
    let text = error.to_string();
    assert!(text.contains("too many files with several names") && text.contains("; "), "{text}");
    assert_eq!(room.left.load(Ordering::Relaxed), 30 << 10, "all is given back");
}

#[test]
fn extended_attributes_of_a_member_are_bounded() {
    const VALUE: usize = 60_000;
    let upper = Memory::new();
    let file = upper.mknod(ROOT, NodeId::ROOT, name("f"), FileType::Regular, 0o600, 0).expect("made").node;
    let union = union_over(Arc::clone(&upper));
    let room = bounded(1 << 20);
    let commit = || write_to(&union, tempfile::tempfile().expect("a file"), &room);
    for attribute in 0..=ATTRIBUTES_BYTES_MAX / VALUE {
        let _ = commit().expect("there are few");
        let name = format!("user.{attribute}");
        upper.setxattr(ROOT, file, name.as_bytes(), &[b'x'; VALUE], XattrFlags::empty()).expect("set");
    }
    let error = commit().expect_err("too many");
    assert_eq!(error.code(), FailureCode::File);
    assert!(error.to_string().starts_with("/f has more than"), "{error}");
}

/// A filesystem of this size, which is mounted nowhere.
fn small_disk(bytes: u64) -> OwnedFd {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).expect("tmpfs");
    fsconfig_set_string(context.as_fd(), c"size", bytes.to_string()).expect("a size");
    fsconfig_create(context.as_fd()).expect("made");
    fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).expect("mounted")
}

/// A file of zeros costs whoever makes it nothing, and is as large as it says in an archive.
#[test]
fn an_archive_leaves_the_last_of_its_disk_to_others() {
    let upper = Memory::new();
    let file = upper.mknod(ROOT, NodeId::ROOT, name("f"), FileType::Regular, 0o600, 0).expect("made").node;
    let size = SetAttributes { size: Some(1 << 40), ..SetAttributes::default() };
    let _ = upper.setattr(ROOT, file, &size, None).expect("set");
    let union = union_over(upper);
    let disk = small_disk(40 * MIB);
    let create = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let archive = openat(&disk, "layer.tar", create, Mode::RUSR).expect("a file");
    let error = write_to(&union, archive.into(), &bounded(0)).expect_err("there is no room");
    assert_eq!(error.code(), FailureCode::NoSpace);
    let text = error.to_string();
    assert!(text.contains("bytes to others; make room"), "{text}");
    let left = fstatvfs(&disk).expect("it is asked");
    let left_bytes = left.f_bavail * left.f_frsize;
    assert!((2 * MIB..4 * MIB).contains(&left_bytes), "{left_bytes} bytes are left");
}
