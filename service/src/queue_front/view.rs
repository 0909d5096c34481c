//! What a client's process sees of the instance by the kernel, and what it therefore may do by request.
//!
//! A mount namespace can show the instance read-only, in part, below other mounts, or not at all, and that binds its processes. Its
//! mounts stand in `/proc/PID/mountinfo` of the client. Where the instance is not mounted as a whole in a place that a path leads to, there is no
//! session; where all such mounts are read-only, the session changes nothing; and names on which something is mounted are left
//! to the kernel, with all that is behind them.
//!
//! The kernel tells when mounts of a namespace have changed. Then the table is read again, with the session's next look at
//! its client's rights; a session that was made for another view ends.

use crate::instance::Instance;
use crate::mount_table::MountTable;
use hashbrown::HashMap;
use poolfs_libservice::types::{Errno, NodeId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tracing::debug;

/// Most bytes of a mount table: some 6,000 mounts. Who has more uses the kernel.
const TABLE_BYTES_MAX: u64 = 1 << 20;

/// Most names of an instance on which one namespace may have something mounted.
const MOUNTED_MAX: usize = 4096;

/// What a mount table says of the instance.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    is_read_only: bool,
    /// The paths on which something is mounted, from the instance's root on.
    mounted: BTreeSet<Vec<u8>>,
}

impl Seen {
    /// Nothing when the instance is not there as a whole.
    fn of(table: &[u8], device: [u32; 2]) -> Option<Self> {
        let device = format!("{}:{}", device[0], device[1]);
        let table = MountTable::parse(table);
        let is_own = |device: &[u8], own: &str| device == own.as_bytes();
        let own = table.mounts().iter().filter(|mount| is_own(mount.device, &device) && mount.root == b"/");
        let mut whole = own.filter(|mount| table.is_reachable(mount)).peekable();
        whole.peek()?;
        let is_read_only = whole.all(|mount| mount.is_read_only);
        let mounted: BTreeSet<_> =
            table.mounted_on(|mount| is_own(mount.device, &device)).take(MOUNTED_MAX + 1).collect();
        (mounted.len() <= MOUNTED_MAX).then_some(Self { is_read_only, mounted })
    }
}

/// Names on which something is mounted. The directories they are in are held.
pub struct MountPoints {
    instance: Weak<Instance>,
    names: HashMap<NodeId, HashSet<Box<[u8]>>>,
    held: Vec<NodeId>,
}

impl fmt::Debug for MountPoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountPoints").field("names", &self.names).finish_non_exhaustive()
    }
}

impl MountPoints {
    fn of(instance: &Arc<Instance>, paths: &BTreeSet<Vec<u8>>) -> Result<Self, Errno> {
        let mut points = Self { instance: Arc::downgrade(instance), names: HashMap::new(), held: Vec::new() };
        for path in paths {
            // One that covers all of a mount hides that one, and is on no name.
            let Some(at) = path.iter().rposition(|&byte| byte == b'/') else { continue };
            let (directory, name) = (&path[..at], &path[at + 1..]);
            match instance.hold_path(directory, &mut points.held) {
                Ok(node) => {
                    points.names.entry(node).or_default().insert(name.into());
                }
                // It was removed meanwhile, and with it what was mounted there.
                Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(points)
    }

    /// Whether something is mounted on a name of a directory.
    #[must_use]
    pub fn has(&self, directory: NodeId, name: &[u8]) -> bool {
        !self.names.is_empty() && self.names.get(&directory).is_some_and(|names| names.contains(name))
    }
}

impl Drop for MountPoints {
    fn drop(&mut self) {
        if let Some(instance) = self.instance.upgrade() {
            self.held.iter().for_each(|&node| instance.layer().forget(node, 1));
        }
    }
}

/// What a client sees of the instance.
pub(super) struct View {
    device: [u32; 2],
    seen: Seen,
    points: MountPoints,
    /// Of the namespace that the client was in when its session was made.
    table: Mutex<File>,
}

impl View {
    /// That of a process. `device` is the number of the instance's mounts.
    ///
    /// # Errors
    /// `ESRCH` when it is gone, `EACCES` when the instance is not mounted as a whole where it could reach it, `E2BIG` when its mounts are too
    /// many to look at, and those of the layers.
    pub(super) fn of(process: u32, device: [u32; 2], instance: &Arc<Instance>) -> Result<Self, Errno> {
        let mut table = File::open(format!("/proc/{process}/mountinfo")).map_err(|_| Errno::ESRCH)?;
        let text = read(&mut table)?;
        let seen = Seen::of(&text, device).ok_or(Errno::EACCES)?;
        let points = MountPoints::of(instance, &seen.mounted)?;
        Ok(Self { device, seen, points, table: Mutex::new(table) })
    }

    /// Whether it is allowed to change nothing.
    pub(super) fn is_read_only(&self) -> bool {
        self.seen.is_read_only
    }

    /// The names that are left to the kernel.
    pub(super) fn mount_points(&self) -> &MountPoints {
        &self.points
    }

    /// Whether the client still sees that.
    pub(super) fn is_current(&self) -> bool {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut polled = [PollFd::new(&*table, PollFlags::PRI)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // What was not told is asked again the next time.
        if !poll(&mut polled, Some(&at_once)).is_ok_and(|changed| changed > 0) {
            return true;
        }
        let is_same = table.rewind().map_err(errno_of).and_then(|()| read(&mut table));
        let is_same = is_same.is_ok_and(|text| Seen::of(&text, self.device).as_ref() == Some(&self.seen));
        if !is_same {
            debug!("a client's mounts have changed: its session ends");
        }
        is_same
    }
}

fn errno_of(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn read(table: &mut File) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    let length = table.take(TABLE_BYTES_MAX + 1).read_to_end(&mut text).map_err(errno_of)?;
    if length as u64 > TABLE_BYTES_MAX { Err(Errno::E2BIG) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "1 0 8:1 / / rw - ext4 disk rw\n";

    fn seen(mounts: &str) -> Option<Seen> {
        Seen::of(format!("{ROOT}{mounts}").as_bytes(), [0, 9])
    }

    #[test]
    fn only_who_has_the_whole_instance_sees_it() {
        let whole = Seen { is_read_only: false, mounted: BTreeSet::new() };
        assert_eq!(seen("2 1 0:9 / /a rw - fuse.poolfs poolfs:x rw\n"), Some(whole));
        assert_eq!(seen(""), None);
        assert_eq!(seen("2 1 0:8 / /a rw - fuse.poolfs poolfs:x rw\n"), None, "another that has its name");
        assert_eq!(seen("2 1 0:9 /usr /a rw - fuse.poolfs poolfs:x rw\n"), None);
        assert_eq!(seen("2 1 0:9 / /a/b rw - fuse.poolfs poolfs:x rw\n3 1 0:7 / /a rw - tmpfs t rw\n"), None);
    }

    #[test]
    fn one_mount_that_can_be_written_is_enough() {
        let read_only = |mounts: &str| seen(mounts).map(|seen| seen.is_read_only);
        let both = "2 1 0:9 / /a ro,nosuid - t s rw\n3 1 0:9 / /b rw - t s rw\n";
        assert_eq!(read_only("2 1 0:9 / /a ro,nosuid - t s rw\n"), Some(true));
        assert_eq!(read_only(both), Some(false));
        assert_eq!(read_only(&format!("{both}4 3 0:7 / /b rw - tmpfs t rw\n")), Some(true), "it is covered");
    }

    #[test]
    fn what_is_mounted_in_it_is_known_up_to_a_bound() {
        let with = |count: usize| {
            let on = |number: usize| format!("{} 2 0:7 / /a/{number} rw - tmpfs t rw\n", number + 10);
            seen(&format!("2 1 0:9 / /a rw - t s rw\n{}", (0..count).map(on).collect::<String>()))
        };
        assert_eq!(with(2).map(|seen| seen.mounted), Some([b"/0".to_vec(), b"/1".to_vec()].into()));
        assert!(with(MOUNTED_MAX).is_some() && with(MOUNTED_MAX + 1).is_none());
    }
}
