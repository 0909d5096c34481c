//! Between the FUSE library's types and ours.

use fuser::{FileAttr, FileType as FuseType, INodeNo, TimeOrNow};
use poolfs_libservice::types::{Attributes, Errno, FileType, Name, SetTime, Timestamp};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub(super) fn errno(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw())
}

pub(super) fn name(name: &OsStr) -> Result<Name<'_>, Errno> {
    Name::new(name.as_bytes())
}

pub(super) fn file_type(file_type: FileType) -> FuseType {
    match file_type {
        FileType::Regular => FuseType::RegularFile,
        FileType::Directory => FuseType::Directory,
        FileType::Symlink => FuseType::Symlink,
        FileType::CharDevice => FuseType::CharDevice,
        FileType::BlockDevice => FuseType::BlockDevice,
        FileType::Fifo => FuseType::NamedPipe,
        FileType::Socket => FuseType::Socket,
    }
}

/// The attributes as `number` (the library makes node id and inode number of it).
pub(super) fn attributes(number: u64, attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: to_system(attributes.accessed),
        mtime: to_system(attributes.modified),
        ctime: to_system(attributes.changed),
        crtime: UNIX_EPOCH,
        kind: file_type(attributes.file_type),
        perm: (attributes.permissions & 0o7777) as u16,
        nlink: attributes.links,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.device,
        blksize: 4096,
        flags: 0,
    }
}

/// A time the clock cannot hold becomes 1970: it can only come from a damaged backend.
fn to_system(time: Timestamp) -> SystemTime {
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 { UNIX_EPOCH.checked_sub(seconds) } else { UNIX_EPOCH.checked_add(seconds) };
    whole.and_then(|whole| whole.checked_add(Duration::from_nanos(time.nanoseconds.into()))).unwrap_or(UNIX_EPOCH)
}

/// The kernel's time behind what the library made of it. Before 1970 the library *subtracts* the nanoseconds, which the
/// kernel means to be added; taking both apart again gives the kernel's numbers.
fn from_system(time: SystemTime) -> Timestamp {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => {
            Timestamp { seconds: i64::try_from(after.as_secs()).unwrap_or(i64::MAX), nanoseconds: after.subsec_nanos() }
        }
        Err(before) => Timestamp {
            seconds: i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |seconds| -seconds),
            nanoseconds: before.duration().subsec_nanos(),
        },
    }
}

pub(super) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(from_system(time)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_their_fraction() {
        let time = Timestamp { seconds: -2, nanoseconds: 250_000_000 };
        assert_eq!(to_system(time), UNIX_EPOCH - Duration::from_millis(1750));
        let as_the_library_has_it = UNIX_EPOCH - Duration::new(2, 250_000_000);
        assert_eq!(from_system(as_the_library_has_it), time);
        assert_eq!(
            to_system(Timestamp { seconds: i64::MIN, nanoseconds: 0 }),
            to_system(Timestamp { seconds: i64::MIN, nanoseconds: 0 })
        );
        let late = Timestamp { seconds: 4_000_000_000, nanoseconds: 999_999_999 };
        assert_eq!(from_system(to_system(late)), late);
    }
}
