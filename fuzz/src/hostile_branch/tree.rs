//! Directory trees: copies with all metadata, and snapshots that show a change.

use rustix::fs::{
    AtFlags, FileType, Mode, Stat, Timespec, Timestamps, XattrFlags, lgetxattr, llistxattr, lsetxattr, lstat, utimensat,
};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Bytes of a file that a picture looks at: files of any size have holes.
const PICTURED_MAX: u64 = 4 << 20;

/// Inodes of a tree that was copied, and of its copy.
pub(super) type Inodes = HashMap<u64, u64>;

/// The names of the attributes of an object.
pub(super) fn attributes(path: &Path) -> Vec<OsString> {
    let mut list = vec![0; 8192];
    let count = llistxattr(path, &mut list).unwrap_or(0);
    let names = list[..count].split(|&byte| byte == 0).filter(|name| !name.is_empty());
    names.map(|name| std::ffi::OsStr::from_bytes(name).to_owned()).collect()
}

pub(super) fn attribute(path: &Path, name: &std::ffi::OsStr) -> Vec<u8> {
    let mut value = vec![0; 65_536];
    let count = lgetxattr(path, name, &mut value).unwrap_or(0);
    value.truncate(count);
    value
}

pub(super) fn set_attribute(path: &Path, name: impl AsRef<Path>, value: &[u8]) {
    let _ = lsetxattr(path, name.as_ref(), value, XattrFlags::empty());
}

/// All paths below a directory, in order.
pub(super) fn paths(top: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut to_come = vec![top.to_owned()];
    while let Some(directory) = to_come.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                to_come.push(path.clone());
            }
            found.push(path);
        }
    }
    found.sort();
    found
}

fn times(status: &Stat) -> Timestamps {
    let time = |seconds: i64, nanoseconds: u64| Timespec { tv_sec: seconds, tv_nsec: nanoseconds as i64 };
    Timestamps {
        last_access: time(status.st_atime as i64, status.st_atime_nsec as u64),
        last_modification: time(status.st_mtime as i64, status.st_mtime_nsec as u64),
    }
}

fn copy_content(from: &Path, to: &Path, size: u64) {
    let (mut source, mut target) = (File::open(from).expect("opened"), File::create(to).expect("made"));
    target.set_len(size).expect("sized");
    let mut buffer = vec![0; 64 << 10];
    let mut at = 0;
    while let Ok(data) = rustix::fs::seek(&source, rustix::fs::SeekFrom::Data(at)) {
        source.seek(SeekFrom::Start(data)).expect("there");
        target.seek(SeekFrom::Start(data)).expect("there");
        let count = source.read(&mut buffer).expect("read");
        if count == 0 {
            break;
        }
        target.write_all(&buffer[..count]).expect("room");
        at = data + count as u64;
    }
}

/// Copies a tree with attributes, links, holes and times.
pub(super) fn copy(from: &Path, to: &Path) -> Inodes {
    let mut inodes = Inodes::new();
    let mut made: HashMap<u64, PathBuf> = HashMap::new();
    fs::create_dir_all(to).expect("made");
    let all = [vec![from.to_owned()], paths(from)].concat();
    for path in &all {
        let copy = to.join(path.strip_prefix(from).expect("below it"));
        let status = lstat(path).expect("there");
        let file_type = FileType::from_raw_mode(status.st_mode);
        if let Some(other) = made.get(&status.st_ino).filter(|_| file_type != FileType::Directory) {
            fs::hard_link(other, &copy).expect("linked");
            continue;
        }
        match file_type {
            FileType::Directory => fs::create_dir_all(&copy).expect("made"),
            FileType::RegularFile => copy_content(path, &copy, status.st_size as u64),
            FileType::Symlink => symlink(fs::read_link(path).expect("read"), &copy).expect("made"),
            other => make_node(&copy, other, status.st_rdev),
        }
        for name in attributes(path) {
            set_attribute(&copy, &name, &attribute(path, &name));
        }
        if file_type != FileType::Symlink {
            fs::set_permissions(&copy, fs::Permissions::from_mode(status.st_mode & 0o7777)).expect("set");
        }
        made.insert(status.st_ino, copy.clone());
        inodes.insert(status.st_ino, lstat(&copy).expect("there").st_ino);
    }
    for path in all.iter().rev() {
        let copy = to.join(path.strip_prefix(from).expect("below it"));
        let times = times(&lstat(path).expect("there"));
        utimensat(rustix::fs::CWD, &copy, &times, AtFlags::SYMLINK_NOFOLLOW).expect("set");
    }
    inodes
}

pub(super) fn make_node(path: &Path, file_type: FileType, device: u64) {
    let _ = rustix::fs::mknodat(rustix::fs::CWD, path, file_type, Mode::RUSR | Mode::WUSR, device);
}

/// What a tree looks like.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Picture(BTreeMap<PathBuf, (u64, u64, u64, i64, u64, u64)>);

impl Picture {
    pub(super) fn of(top: &Path) -> Self {
        let all = [vec![top.to_owned()], paths(top)].concat();
        Self(all.into_iter().filter_map(|path| Some((path.clone(), pictured(&path)?))).collect())
    }
}

fn pictured(path: &Path) -> Option<(u64, u64, u64, i64, u64, u64)> {
    let status = lstat(path).ok()?;
    let mut hasher = DefaultHasher::new();
    for name in attributes(path) {
        (attribute(path, &name), name).hash(&mut hasher);
    }
    match FileType::from_raw_mode(status.st_mode) {
        FileType::RegularFile => {
            let mut content = Vec::new();
            let file = File::open(path).ok()?;
            let _ = file.take(PICTURED_MAX).read_to_end(&mut content);
            content.hash(&mut hasher);
        }
        FileType::Symlink => fs::read_link(path).ok()?.hash(&mut hasher),
        _ => {}
    }
    let modified = status.st_mtime as i64;
    Some((
        status.st_ino,
        u64::from(status.st_mode),
        status.st_size as u64,
        modified,
        status.st_nlink as u64,
        hasher.finish(),
    ))
}
