//! The initial tree of every program.

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Timespec, Timestamps, Uid, XattrFlags};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

/// Modification and access times of all of it, seconds: one that no program sets.
const TIME_S: i64 = 1_234_567_890;

/// Makes the tree in `root`, which exists; two trees differ in nothing that is compared.
///
/// # Panics
/// When the disk says no.
pub fn plant(root: &Path) {
    let folder = |name: &str, owner: u32, mode: u32| {
        let path = root.join(name);
        fs::create_dir_all(&path).expect("a folder");
        rustix::fs::chown(&path, Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner))).expect("an owner");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
    };
    let file = |name: &str, size: usize, owner: u32, mode: u32| {
        let path = root.join(name);
        let content: Vec<u8> = (0..size).map(|i| (i >> 8) as u8 ^ (i * 7) as u8 ^ mode as u8).collect();
        fs::write(&path, content).expect("a file");
        rustix::fs::chown(&path, Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner))).expect("an owner");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
    };
    folder("", 1000, 0o777);
    folder("d", 1000, 0o2775);
    folder("e", 0, 0o1777);
    folder("e/d", 2000, 0o755);
    file("a", 5_000, 1000, 0o666);
    file("b", 70_001, 0, 0o644);
    file("d/a", 20_480, 2000, 0o664);
    file("d/f", 300, 1000, 0o6755);
    file("e/a", 0, 2000, 0o640);
    file("e/d/b", 9_000, 1000, 0o600);
    fs::hard_link(root.join("b"), root.join("d/b")).expect("a link");
    symlink("d", root.join("l")).expect("a link");
    symlink("../a", root.join("e/b")).expect("a link");
    rustix::fs::mknodat(CWD, root.join("p"), FileType::Fifo, Mode::from_raw_mode(0o622), 0).expect("a pipe");
    let none = XattrFlags::empty();
    rustix::fs::setxattr(root.join("a"), "user.a", b"value", none).expect("an attribute");
    rustix::fs::setxattr(root.join("d"), "user.b", b"other", none).expect("an attribute");
    let time = Timespec { tv_sec: TIME_S, tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    for name in ["a", "b", "d/a", "d/f", "e/a", "e/d/b", "l", "e/b", "p", "e/d", "d", "e", ""] {
        rustix::fs::utimensat(CWD, root.join(name), &times, AtFlags::SYMLINK_NOFOLLOW).expect("times");
    }
}
