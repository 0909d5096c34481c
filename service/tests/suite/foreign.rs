//! Tests of upper branches that came from elsewhere: whatever is on them, nothing outside is read, changed or removed for them.

use poolfs_libservice::Durability;
use poolfs_libservice::types::{Caller, Name, NodeId, OpenFlags};
use poolfs_service::Instance;
use poolfs_service::stack::StackBuilder;
use poolfs_service::stack::check::check;
use poolfs_service::stack::crash_state::sweep;
use poolfs_service_protocol::{CheckSpec, MountSpec, StackSpec, Storage, UpperFormat, kept_directory};
use rustix::fs::XattrFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::fs::{self, DirBuilder};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const ROOT: Caller = Caller::ROOT;
const MARK: &str = "trusted.poolfs.kept";
const CONTENT: &[u8] = &[b'x'; 100_000];
const SECRET: &[u8] = b"root:only for who may read it";

fn attribute(path: &Path) -> Vec<u8> {
    let mut value = vec![0; 4096];
    let count = rustix::fs::getxattr(path, MARK, &mut value).expect("marked");
    value.truncate(count);
    value
}

fn mark(path: &Path, value: &[u8]) {
    rustix::fs::setxattr(path, MARK, value, XattrFlags::empty()).expect("marked");
}

fn union_over(builder: &StackBuilder, upper: &Path) -> Arc<Instance> {
    let lower = upper.with_extension("lower");
    fs::create_dir_all(&lower).expect("a folder");
    fs::create_dir_all(upper).expect("a folder");
    let stack = StackSpec::union(upper, vec![lower]);
    let layers = builder.build(&stack).expect("usable");
    Instance::new(
        MountSpec { devices: true, suid: true, is_root: true, ..MountSpec::new("foreign", upper, stack) },
        layers,
    )
}

fn write(union: &Instance, text: &str, content: &[u8]) {
    let (layer, name) = (union.layer(), Name::new(text.as_bytes()).expect("a name"));
    let (entry, handle) = layer.create(&ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).expect("room");
    layer.write(&ROOT, handle, 0, content).expect("room");
    layer.release(handle);
    layer.forget(entry.node, 1);
}

fn read(union: &Instance, text: &str) -> Vec<u8> {
    let (layer, name) = (union.layer(), Name::new(text.as_bytes()).expect("a name"));
    let entry = layer.lookup(&ROOT, NodeId::ROOT, name).expect("there");
    let handle = layer.open(&ROOT, entry.node, OpenFlags::READ_ONLY).expect("opened");
    let mut content = vec![0; entry.attributes.size as usize];
    let count = layer.read(&ROOT, handle, 0, &mut content).expect("read");
    content.truncate(count);
    layer.release(handle);
    layer.forget(entry.node, 1);
    content
}

/// A folder with the places of services in it, and what one left that died.
struct Host(TempDir);

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn builder(&self, pool: &str) -> StackBuilder {
        let run = self.path("run");
        let builder = StackBuilder::new(4 << 20, Some(kept_directory(&run, pool))).expect("a cache");
        builder.with_states_of(&run).expect("its own")
    }

    /// A service of the pool writes a file in the branch, and dies: its state is copied, so that the copy has no living owner.
    fn die(&self, pool: &str, upper: &str) -> (PathBuf, Vec<u8>) {
        let (builder, upper) = (self.builder(pool), self.path(upper));
        let union = union_over(&builder, &upper);
        write(&union, "f", CONTENT);
        let value = attribute(&upper);
        let place = kept_directory(&self.path("run"), pool).join("1");
        let copies = self.path("copies");
        fs::create_dir(&copies).expect("a folder");
        copy_files(&place, &copies);
        drop((union, builder));
        // What the orderly end has brought to disk is gone as well.
        fs::write(upper.join("f"), "").expect("emptied");
        let at = kept_directory(&self.path("run"), pool).join("7");
        DirBuilder::new().mode(0o700).recursive(true).create(&at).expect("made");
        let options = c"mode=0700";
        mount("poolfs-memory", &at, "tmpfs", MountFlags::NODEV, options).expect("a tmpfs");
        copy_files(&copies, &at);
        fs::remove_dir_all(copies).expect("removed");
        mark(&upper, &value);
        (at, value)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for pool in fs::read_dir(self.path("run")).into_iter().flatten().flatten() {
            let _ = unmount(pool.path().join("7"), UnmountFlags::DETACH);
        }
    }
}

fn copy_files(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("there") {
        let name = entry.expect("listed").file_name();
        fs::copy(from.join(&name), to.join(&name)).expect("copied");
    }
}

#[test]
fn what_a_dead_service_kept_is_brought_to_the_disk_of_its_branch_by_any_pool() {
    let host = Host::new();
    let (at, _) = host.die("first", "upper");
    let builder = host.builder("second");
    let union = union_over(&builder, &host.path("upper"));
    assert_eq!(read(&union, "f"), CONTENT);
    assert!(!at.exists(), "what was left is given up");
}

#[test]
fn a_copied_mark_takes_nothing_of_the_branch_it_was_copied_from() {
    let host = Host::new();
    let (at, value) = host.die("first", "upper");
    for foreign in ["foreign", "again"] {
        fs::create_dir(host.path(foreign)).expect("a folder");
        fs::write(host.path(foreign).join("f"), "its own").expect("a file");
        mark(&host.path(foreign), &value);
        let builder = host.builder("second");
        let union = union_over(&builder, &host.path(foreign));
        assert_eq!(read(&union, "f"), b"its own");
        assert_ne!(attribute(&host.path(foreign)), value, "it has a mark of its own now");
    }
    assert!(at.join("ledger").exists());
    let kept = sweep(&kept_directory(&host.path("run"), "first")).expect("swept");
    assert!(kept.len() == 1 && kept[0].0 == host.path("upper"), "it still waits: {kept:?}");
    let builder = host.builder("second");
    assert_eq!(read(&union_over(&builder, &host.path("upper")), "f"), CONTENT);
}

#[test]
fn what_another_release_kept_is_neither_used_nor_lost() {
    let host = Host::new();
    let (at, value) = host.die("first", "upper");
    let noted = fs::read_dir(&at).expect("there").map(|entry| entry.expect("listed").path());
    let noted = noted.filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"branch-")));
    noted.for_each(|path| fs::write(path, host.path("upper").as_os_str().as_bytes()).expect("written"));
    mark(&host.path("upper"), &[&value, at.as_os_str().as_bytes()].concat());
    let builder = host.builder("second");
    let stack = StackSpec::union(host.path("upper"), Vec::new());
    let refused = builder.build(&stack).map(drop).expect_err("refused").to_string();
    assert!(refused.contains("another release") && refused.contains("gives it up"), "{refused}");
    assert_eq!(sweep(&kept_directory(&host.path("run"), "first")).expect("swept"), []);
    assert!(at.join("ledger").exists());
}

#[test]
fn a_place_that_others_could_have_made_is_not_looked_into() {
    let host = Host::new();
    let (at, value) = host.die("first", "upper");
    let run = host.path("run");
    // A directory of the same content that is no tmpfs, one that a link leads to, one that others can enter.
    let elsewhere = host.path("elsewhere");
    fs::create_dir_all(elsewhere.join("7")).expect("made");
    copy_files(&at, &elsewhere.join("7"));
    symlink(&elsewhere, run.join("linked.memory")).expect("a link");
    let plain = run.join("plain.memory");
    DirBuilder::new().mode(0o700).recursive(true).create(plain.join("1")).expect("made");
    copy_files(&at, &plain.join("1"));
    fs::set_permissions(run.join("first.memory"), fs::Permissions::from_mode(0o755)).expect("set");
    mark(&host.path("upper"), &value);
    let builder = host.builder("second");
    assert_eq!(read(&union_over(&builder, &host.path("upper")), "f"), b"");
    assert!(at.join("ledger").exists() && elsewhere.join("7/ledger").exists() && plain.join("1/ledger").exists());
    fs::set_permissions(&run, fs::Permissions::from_mode(0o777)).expect("set");
    let refused = StackBuilder::new(4 << 20, None).expect("a cache").with_states_of(&run);
    assert!(refused.is_err_and(|error| error.to_string().contains("others may change it")));
}

#[test]
fn a_mark_names_no_directory_of_the_host() {
    let host = Host::new();
    let [upper, elsewhere, secret] = ["upper", "elsewhere", "secret"].map(|name| host.path(name));
    fs::write(&secret, SECRET).expect("a file");
    let builder = host.builder("p");
    let union = union_over(&builder, &upper);
    write(&union, "f", CONTENT);
    let state = kept_directory(&host.path("run"), "p").join("1");
    fs::create_dir(&elsewhere).expect("a folder");
    let mut replaced = 0;
    for entry in fs::read_dir(&state).expect("there") {
        let name = entry.expect("listed").file_name();
        if name == "ledger" || name.as_bytes().starts_with(b"branch-") {
            fs::copy(state.join(&name), elsewhere.join(&name)).expect("copied");
        } else {
            symlink(&secret, elsewhere.join(&name)).expect("a link");
            replaced += 1;
        }
    }
    assert!(replaced > 0, "nothing is kept: the test shows nothing");
    let key = attribute(&upper)[..16].to_vec();
    drop((union, builder));
    mark(&upper, &[&key, elsewhere.as_os_str().as_bytes()].concat());
    let names = || fs::read_dir(&elsewhere).expect("there").count();
    let before = names();
    let builder = host.builder("p");
    let union = union_over(&builder, &upper);
    assert_eq!(read(&union, "f"), CONTENT);
    assert_eq!(names(), before, "a directory that is not the service's own lost files");
    assert_eq!(fs::read(&secret).expect("there"), SECRET);
}

/// A branch in memory, where files may have any size.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").expect("a folder in memory")
}

#[test]
fn a_check_of_a_file_of_any_size_ends() {
    let folder = in_memory();
    let [upper, lower] = ["upper", "lower"].map(|name| folder.path().join(name));
    for path in [&upper, &lower] {
        fs::create_dir(path).expect("made");
    }
    fs::write(lower.join("f"), CONTENT).expect("a file");
    let storage = Storage { format: UpperFormat::BcowSpace, size_bytes: None };
    let stack = StackSpec::Union { upper: upper.clone(), lowers: vec![lower], storage, immutable_lowers: false };
    let builder = StackBuilder::new(4 << 20, None).expect("a cache");
    let layer = builder.build(&stack).expect("usable").layer();
    let entry = layer.lookup(&ROOT, NodeId::ROOT, Name::new(b"f").expect("a name")).expect("there");
    let handle = layer.open(&ROOT, entry.node, OpenFlags::READ_WRITE).expect("opened");
    layer.write(&ROOT, handle, 50_000, b"changed").expect("room");
    layer.fsync(&ROOT, handle, Durability::All).expect("room");
    layer.release(handle);
    layer.forget(entry.node, 1);
    drop((layer, builder));
    let file = fs::OpenOptions::new().write(true).open(upper.join("f")).expect("there");
    file.set_len(i64::MAX as u64).expect("a size");
    let socket_directory = folder.path().join("run");
    let spec = CheckSpec { upper, lowers: Vec::new(), repair: false, socket_directory, ceph: None };
    let (ended, end) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(check(&spec, &mut |_| {}).map(|summary| summary.compact_files)));
    let checked = end.recv_timeout(Duration::from_secs(60)).expect("it does not come to an end");
    assert_eq!(checked.expect("checked"), 1);
}

/// What is kept of a branch that is not at its path any more, after `change` to the host's folder; whether its memory stays.
fn kept_after(host: &Host, change: impl FnOnce()) -> bool {
    let (at, _) = host.die("first", "disk/upper");
    change();
    let kept = sweep(&kept_directory(&host.path("run"), "first")).expect("swept");
    assert_eq!(kept.len(), usize::from(at.join("ledger").exists()), "{kept:?}");
    kept.len() == 1
}

#[test]
fn what_was_kept_waits_for_a_branch_that_was_moved() {
    for is_replaced in [false, true] {
        let host = Host::new();
        fs::create_dir(host.path("disk")).expect("a folder");
        let [upper, moved] = ["disk/upper", "disk/moved"].map(|name| host.path(name));
        assert!(kept_after(&host, || fs::rename(&upper, &moved).expect("moved")), "it was only moved");
        if is_replaced {
            fs::create_dir(&upper).expect("a folder");
            fs::write(upper.join("f"), "its own").expect("a file");
            let builder = host.builder("second");
            assert_eq!(read(&union_over(&builder, &upper), "f"), b"its own");
            let kept = sweep(&kept_directory(&host.path("run"), "first")).expect("swept");
            assert_eq!(kept.len(), 1, "another one is at its path");
        }
        let builder = host.builder("second");
        assert_eq!(read(&union_over(&builder, &moved), "f"), CONTENT);
    }
}

#[test]
fn what_was_kept_waits_for_a_branch_whose_disk_is_mounted_elsewhere() {
    let host = Host::new();
    let [disk, elsewhere] = ["disk", "elsewhere"].map(|name| host.path(name));
    for place in [&disk, &elsewhere] {
        fs::create_dir(place).expect("a folder");
    }
    mount("poolfs-test-disk", &disk, "tmpfs", MountFlags::NODEV, c"").expect("a tmpfs");
    let is_kept = kept_after(&host, || {
        rustix::mount::mount_bind(&disk, &elsewhere).expect("mounted");
        unmount(&disk, UnmountFlags::DETACH).expect("unmounted");
    });
    let builder = host.builder("second");
    let found = is_kept.then(|| read(&union_over(&builder, &elsewhere.join("upper")), "f"));
    drop(builder);
    unmount(&elsewhere, UnmountFlags::DETACH).expect("unmounted");
    assert_eq!(found.as_deref(), Some(CONTENT));
}

#[test]
fn nothing_is_kept_of_a_branch_that_was_removed() {
    let host = Host::new();
    fs::create_dir(host.path("disk")).expect("a folder");
    let removed = || fs::remove_dir_all(host.path("disk")).expect("removed");
    assert!(!kept_after(&host, removed), "it is gone");
}
