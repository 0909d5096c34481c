//! Edits of a branch, and of the saved state that a dead service has left of it.

use super::sound::Ground;
use super::tree::{self, make_node};
use rustix::fs::{FileType, lstat};
use rustix::mount::MountFlags;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

/// Names that poolfs reads, there or not.
const NAMES: [&str; 16] = [
    "",
    ".poolfs",
    ".poolfs/format",
    ".poolfs/open",
    ".poolfs/work",
    ".poolfs/bitmaps",
    ".poolfs/index",
    ".poolfs/journal-0",
    ".poolfs/journal-1",
    ".poolfs/journal-18446744073709551615",
    ".poolfs/work/w0",
    ".poolfs/index/00000000000000000000000000000000",
    ".poolfs/bitmaps/00000000000000000000000000000000",
    "small",
    "large",
    "directory",
];

/// Attributes that poolfs reads.
const ATTRIBUTES: [&str; 12] = [
    "trusted.poolfs.kept",
    "trusted.poolfs.origin",
    "trusted.poolfs.sketch",
    "trusted.poolfs.bcow",
    "trusted.poolfs.whiteouts",
    "trusted.overlay.opaque",
    "trusted.overlay.redirect",
    "trusted.overlay.metacopy",
    "trusted.overlay.nlink",
    "trusted.overlay.whiteout",
    "trusted.overlay.impure",
    "system.posix_acl_access",
];

/// Attributes with a checksum, and where it is.
const SEALED: [(&str, usize); 3] =
    [("trusted.poolfs.origin", 40), ("trusted.poolfs.sketch", 60), ("trusted.poolfs.bcow", 60)];

/// Sizes of structures in files, and where in them the checksum is: a sector of a bitmap, a record of a journal.
const STRUCTURES: [(usize, usize); 2] = [(512, 28), (40, 36)];

/// Values that an attribute may come to have.
const VALUES: [&[u8]; 12] = [
    b"",
    b"x",
    b"y",
    b"1",
    b"/",
    b"/..",
    b"/../witness",
    b"..",
    b"/made/directory",
    b"/directory",
    b"U+4294967295",
    b"L-5",
];

/// Sizes that a file may come to have.
const SIZES: [u64; 8] = [0, 1, 39, 40, 512, 4096, 1 << 33, i64::MAX as u64];

/// What can be edited: the path of an object, or of one that is not there.
pub(super) struct Target(PathBuf);

impl Target {
    pub(super) fn all(ground: &Ground) -> Vec<Self> {
        let upper = ground.upper();
        let known = NAMES.iter().map(|name| if name.is_empty() { upper.clone() } else { upper.join(name) });
        let there = tree::paths(&upper).into_iter().chain(tree::paths(&ground.state()));
        known.chain(there).map(Self).collect()
    }
}

/// Makes one change.
pub(super) fn edit(ground: &mut Ground, targets: &[Target], edit: &[u8; 16]) {
    let Target(path) = &targets[usize::from(u16::from_le_bytes([edit[0], edit[1]])) % targets.len()];
    let Target(other) = &targets[usize::from(edit[3]) % targets.len()];
    if !ground.is_own(path) || !ground.is_own(other) {
        return;
    }
    let (kind, seal) = (edit[2] % 20, edit[2] & 0x80 == 0);
    let at = usize::from(u16::from_le_bytes([edit[4], edit[5]]));
    let new = &edit[7..7 + usize::from(edit[6] % 10)];
    let attribute = ATTRIBUTES[usize::from(edit[3]) % ATTRIBUTES.len()];
    match kind {
        0..3 => change_file(path, at, new, STRUCTURES[usize::from(edit[15] & 1)], seal),
        3..6 => change_attribute(path, edit[3], at, new, seal),
        6 => tree::set_attribute(path, attribute, VALUES[at % VALUES.len()]),
        7 => tree::set_attribute(path, attribute, &tree::attribute(other, OsStr::new(attribute))),
        8 => keep_elsewhere(ground, at),
        9 => {
            if let Ok(file) = open(path) {
                let _ = file.set_len(SIZES[at % SIZES.len()]);
            }
        }
        _ => replace(ground, path, other, kind, at),
    }
}

fn replace(ground: &mut Ground, path: &Path, other: &Path, kind: u8, at: usize) {
    let outside = ground.outside();
    let is_root = path == ground.upper();
    // What is mounted on a link is where it leads: on the lower branch, for one that says which that is.
    if kind == 18 && !is_root && !path.is_symlink() {
        let directory = outside.join("directory");
        return ground.mount(if at & 1 == 0 { &outside } else { &directory }, path, "", MountFlags::BIND, None);
    }
    if kind == 19 && !path.is_symlink() {
        return (0..at % 500).for_each(|number| drop(fs::write(path.join(format!("n{number}")), "")));
    }
    if is_root || path == ground.state() {
        return;
    }
    let before = path.with_file_name("moved-away");
    let _ = fs::rename(path, &before);
    match kind {
        10 => drop(symlink(outside.join("secret"), path)),
        11 => drop(symlink(if at & 1 == 0 { outside } else { "../../witness/directory".into() }, path)),
        12 => make_node(path, FileType::Fifo, 0),
        13 => make_node(path, FileType::CharacterDevice, [0, rustix::fs::makedev(1, 5)][at & 1]),
        14 => make_node(path, FileType::Socket, 0),
        15 => drop(fs::create_dir_all(path.join("child"))),
        16 => drop(fs::hard_link(other, path)),
        _ => drop(fs::rename(other, path)),
    }
    // What was there stays under another name, or goes.
    if at & 2 != 0 {
        let _ = fs::remove_dir_all(&before).or_else(|_| fs::remove_file(&before));
    }
}

fn is_file(path: &Path) -> bool {
    lstat(path).is_ok_and(|status| FileType::from_raw_mode(status.st_mode) == FileType::RegularFile)
}

fn open(path: &Path) -> std::io::Result<fs::File> {
    if !is_file(path) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    OpenOptions::new().read(true).write(true).open(path)
}

fn change_file(path: &Path, at: usize, new: &[u8], (bytes, sum_at): (usize, usize), seal: bool) {
    let Ok(file) = open(path) else { return };
    let at = at % (4 * bytes);
    let first = at / bytes * bytes;
    let mut structure = vec![0; bytes];
    let mut got = 0;
    while let Ok(count @ 1..) = file.read_at(&mut structure[got..], (first + got) as u64) {
        got += count;
    }
    put(&mut structure, at - first, new);
    if seal {
        set_sum(&mut structure, sum_at);
    }
    let _ = file.write_all_at(&structure, first as u64);
}

/// Of those that an object has.
fn change_attribute(path: &Path, which: u8, at: usize, new: &[u8], seal: bool) {
    let names = tree::attributes(path);
    let Some(name) = names.get(usize::from(which) % names.len().max(1)) else { return };
    let mut value = tree::attribute(path, name);
    let length = value.len().max(1);
    put(&mut value, at % length, new);
    if at & 0x8000 != 0 {
        value.truncate(at % (length + 1));
    }
    if seal && let Some((_, place)) = SEALED.iter().find(|(sealed, _)| name.as_bytes() == sealed.as_bytes()) {
        set_sum(&mut value, *place);
    }
    tree::set_attribute(path, name, &value);
}

/// The mark of a branch as an earlier release made it, with a place that is no service's.
fn keep_elsewhere(ground: &Ground, at: usize) {
    let mark = OsStr::new(ATTRIBUTES[0]);
    let mut value = tree::attribute(&ground.upper(), mark);
    value.resize(16, 5);
    let places = [ground.outside(), ground.upper().join(".poolfs"), ground.state(), ground.run()];
    value.extend_from_slice(places[at % places.len()].as_os_str().as_bytes());
    tree::set_attribute(&ground.upper(), mark, &value);
}

fn put(bytes: &mut [u8], at: usize, new: &[u8]) {
    for (byte, new) in bytes.iter_mut().skip(at).zip(new) {
        *byte = *new;
    }
}

fn set_sum(bytes: &mut [u8], at: usize) {
    if bytes.len() >= at + 4 {
        bytes[at..at + 4].fill(0);
        let sum = crc32c::crc32c(bytes);
        bytes[at..at + 4].copy_from_slice(&sum.to_le_bytes());
    }
}
