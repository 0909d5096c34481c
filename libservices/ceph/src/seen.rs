//! What libcephfs tells of an inode, as the layer's attributes.

use crate::functions::Statx;
use libc::timespec;
use poolfs_libservice::{Error, Result};
use poolfs_types::{Attributes, Errno, FileType, Timestamp};

/// `CEPH_NOSNAP`: what is in no snapshot.
const NO_SNAPSHOT: u64 = u64::MAX - 1;

/// What is known of an inode.
pub(crate) struct Seen {
    pub attributes: Attributes,
    pub is_snapshot: bool,
}

fn timestamp(time: timespec) -> Timestamp {
    Timestamp { seconds: time.tv_sec, nanoseconds: time.tv_nsec.clamp(0, 999_999_999) as u32 }
}

/// Linux's 32-bit encoding of a device number, of which libcephfs has the C library's.
fn device(raw: u64) -> u32 {
    let (major, minor) = (libc::major(raw), libc::minor(raw));
    minor & 0xff | (major & 0xfff) << 8 | (minor & 0xfff00) << 12
}

/// The C library's encoding of it.
pub(crate) fn decoded_device(device: u32) -> u64 {
    libc::makedev(device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00)
}

/// The inode number that is shown. A file has one number in all snapshots: there each has another one, which no file that is in none can have.
pub(crate) fn shown_inode(found: &Statx) -> u64 {
    if found.device == NO_SNAPSHOT {
        return found.inode;
    }
    found.inode.wrapping_add(found.device.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1 << 63
}

/// What `found` says.
///
/// # Errors
/// `EIO` for a type that is none.
pub(crate) fn of(found: &Statx) -> Result<Seen> {
    let mode = u32::from(found.mode);
    let Some(file_type) = FileType::from_mode(mode) else {
        return Err(Error::new(
            Errno::EIO,
            format!("CephFS: inode {} has the mode {mode:o}, which is no file's", found.inode),
        ));
    };
    let attributes = Attributes {
        inode: shown_inode(found),
        file_type,
        permissions: mode & 0o7777,
        links: found.links,
        uid: found.uid,
        gid: found.gid,
        device: if file_type.is_device() { device(found.of_device) } else { 0 },
        size: found.size,
        blocks: found.blocks,
        accessed: timestamp(found.accessed),
        modified: timestamp(found.modified),
        changed: timestamp(found.changed),
        change: found.version,
    };
    Ok(Seen { attributes, is_snapshot: found.device != NO_SNAPSHOT })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_survive_both_ways() {
        for number in [0, 0x103, 0x811, u32::MAX] {
            assert_eq!(device(decoded_device(number)), number);
        }
    }
}
