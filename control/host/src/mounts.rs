//! The mount table of this mount namespace.

use crate::{Host, Result};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The filesystem type of every poolfs mount.
const POOLFS_TYPE: &str = "fuse.poolfs";
/// What the source of a poolfs mount begins with; the instance's name follows.
const SOURCE_PREFIX: &str = "poolfs:";

/// One line of `/proc/self/mountinfo`, as far as it matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// The mount's number.
    pub id: u64,
    /// The number of the mount that it is on.
    pub parent: u64,
    /// The filesystem's device, as the kernel writes it: equal where it is the same filesystem.
    pub device: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// The directory of the filesystem that is mounted there.
    pub root: PathBuf,
    /// The filesystem's type.
    pub kind: String,
    /// The source.
    pub source: String,
    /// Options of the filesystem itself.
    pub super_options: String,
}

impl MountEntry {
    /// The poolfs instance that is mounted here.
    #[must_use]
    pub fn instance(&self) -> Option<&str> {
        if self.kind == POOLFS_TYPE { self.source.strip_prefix(SOURCE_PREFIX) } else { None }
    }

    /// The options of the filesystem itself, one by one.
    pub fn options(&self) -> impl Iterator<Item = &str> {
        self.super_options.split(',')
    }
}

/// The mount table now.
pub fn mount_table(host: &dyn Host) -> Result<Vec<MountEntry>> {
    Ok(parse_mount_table(&host.read_text(Path::new("/proc/self/mountinfo"))?))
}

/// The mounts of one instance, the last mounted first.
#[must_use]
pub fn pool_mounts<'a>(table: &'a [MountEntry], instance: &str) -> Vec<&'a MountEntry> {
    table.iter().rev().filter(|entry| entry.instance() == Some(instance)).collect()
}

/// Understand the text of `/proc/self/mountinfo`; lines that are not understood are left out.
#[must_use]
pub fn parse_mount_table(text: &str) -> Vec<MountEntry> {
    text.lines().filter_map(parse_line).collect()
}

/// What is mounted over a mount, in its place: whoever unmounts by that path unmounts this.
#[must_use]
pub fn mounted_over<'a>(table: &'a [MountEntry], entry: &MountEntry) -> Option<&'a MountEntry> {
    table
        .iter()
        .find(|other| other.parent == entry.id && other.id != entry.id && other.mount_point == entry.mount_point)
}

/// What others have mounted inside a mount of an instance, at any depth: it goes with that mount when this is detached. Mounts of the instance itself are none.
#[must_use]
pub fn mounted_inside<'a>(table: &'a [MountEntry], entry: &MountEntry) -> Vec<&'a MountEntry> {
    let mut reached = vec![entry.id];
    let mut at = 0;
    while let Some(&parent) = reached.get(at) {
        let on_it = table.iter().filter(|other| other.parent == parent).map(|other| other.id);
        let new: Vec<u64> = on_it.filter(|id| !reached.contains(id)).collect();
        reached.extend(new);
        at += 1;
    }
    let is_others = |other: &&MountEntry| reached[1..].contains(&other.id) && other.instance() != entry.instance();
    table.iter().filter(is_others).collect()
}

fn parse_line(line: &str) -> Option<MountEntry> {
    let (front, back) = line.split_once(" - ")?;
    let mut front = front.split(' ');
    let (id, parent) = (front.next()?.parse().ok()?, front.next()?.parse().ok()?);
    let (device, root, mount_point) = (front.next()?, front.next()?, front.next()?);
    let mut back = back.split(' ');
    Some(MountEntry {
        id,
        parent,
        device: device.to_owned(),
        mount_point: unescape_path(mount_point),
        root: unescape_path(root),
        kind: back.next()?.to_owned(),
        source: unescape_path(back.next()?).to_string_lossy().into_owned(),
        super_options: back.next().unwrap_or_default().to_owned(),
    })
}

/// The kernel writes blanks, line ends and backslashes as three octal digits.
fn unescape_path(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let value =
            octal.and_then(|digits| std::str::from_utf8(digits).ok()).and_then(|d| u8::from_str_radix(d, 8).ok());
        match value {
            Some(byte) => {
                plain.push(byte);
                at += 4;
            }
            None => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "22 27 0:21 / /proc rw,relatime - proc proc rw\n\
        90 27 0:40 / /mnt/a\\040b rw,nosuid shared:1 master:2 - fuse.poolfs poolfs:web-1 rw,user_id=0\n\
        broken line\n\
        91 90 0:40 /sub /mnt/c rw - fuse.poolfs poolfs:web-1 rw\n";

    #[test]
    fn poolfs_mounts_are_found_with_their_instance() {
        let table = parse_mount_table(TABLE);
        assert_eq!(table.len(), 3);
        assert_eq!(table[0].instance(), None);
        assert_eq!(table[1].mount_point, Path::new("/mnt/a b"));
        assert_eq!((table[2].device.as_str(), table[2].root.as_path()), ("0:40", Path::new("/sub")));
        let found = pool_mounts(&table, "web-1");
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].mount_point, Path::new("/mnt/c"));
        assert!(pool_mounts(&table, "web-2").is_empty());
        assert_eq!(table.iter().map(|entry| entry.id).collect::<Vec<_>>(), [22, 90, 91]);
    }

    #[test]
    fn what_lies_over_a_mount_is_what_is_on_it_in_its_place() {
        let table = parse_mount_table(
            "90 27 0:40 / /m rw - fuse.poolfs poolfs:web-1 rw\n\
             91 90 0:41 / /m/below rw - tmpfs below rw\n\
             92 90 0:42 / /m rw - tmpfs over rw\n\
             93 27 0:43 / /n rw - tmpfs beside rw\n",
        );
        assert_eq!(mounted_over(&table, &table[0]).map(|over| over.source.as_str()), Some("over"));
        assert!(table[1..].iter().all(|entry| mounted_over(&table, entry).is_none()));
    }

    #[test]
    fn what_is_mounted_inside_is_found_at_any_depth() {
        let table = parse_mount_table(
            "93 91 0:43 / /m/a/deep rw - tmpfs deep rw\n\
             90 27 0:40 / /m rw - fuse.poolfs poolfs:web-1 rw\n\
             91 90 0:40 /a /m/a rw - fuse.poolfs poolfs:web-1 rw\n\
             92 90 0:41 / /m/b rw - fuse.poolfs poolfs:web-2 rw\n\
             94 27 0:43 / /m-beside rw - tmpfs beside rw\n",
        );
        let inside = |at: usize| mounted_inside(&table, &table[at]).iter().map(|other| other.id).collect::<Vec<_>>();
        assert_eq!((inside(1), inside(2), inside(3)), (vec![93, 92], vec![93], vec![]));
    }

    #[test]
    fn a_backslash_without_digits_stays() {
        assert_eq!(unescape_path("/a\\x\\134"), Path::new("/a\\x\\"));
    }
}
