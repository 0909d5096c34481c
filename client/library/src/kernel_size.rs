//! The size of a file that the kernel goes by without asking: in mappings, splices and its own appends.

use crate::raw;
use linux_raw_sys::general as sys;

/// How often the kernel is asked. Each time somebody else must have changed the file at that very moment.
const ASKED_MAX: usize = 1000;

/// Has the kernel ask the service for the size of an open file of ours, and go by the answer; the size.
///
/// The kernel refuses an answer that crosses a notification of the file, and goes on with the size that it knew: then it is asked again.
/// When it has changed attributes itself, it takes the size that comes with the answer whatever has come since. It has the inode locked until
/// then, so that is waited for, by a seek for data behind every end: it takes the lock, and moves nothing.
pub fn refresh(descriptor: i32) -> Option<u64> {
    if raw::open_flags(descriptor).is_ok_and(|flags| flags & sys::O_ACCMODE != sys::O_RDONLY) {
        raw::seek(descriptor, i64::MAX, sys::SEEK_DATA).ok();
    }
    let mut size = None;
    for _ in 0..ASKED_MAX {
        // A failure is the kernel's to report in the call that goes by the size.
        let found = raw::statx(descriptor, c"", sys::AT_EMPTY_PATH | sys::AT_STATX_FORCE_SYNC).ok()?;
        size = Some(found.stx_size);
        if is_known(descriptor, found.stx_size) {
            break;
        }
    }
    size
}

/// Whether the kernel goes by this size, or cannot tell.
fn is_known(descriptor: i32, size: u64) -> bool {
    let (Ok(offset), Ok(left)) = (raw::seek(descriptor, 0, sys::SEEK_CUR), raw::readable_bytes(descriptor)) else {
        return true;
    };
    offset.wrapping_add(u64::from(left)) as u32 == size as u32
}
