//! Operations on attributes, extended attributes and the whole filesystem.

use super::operations::{Answer, Call, PERMISSION_BITS, done};
use super::refused::Refused;
use crate::request::{Reply as Outcome, Request};
use poolfs_ipc::wire::{WireStatfs, WireTime};
use poolfs_libservice::types::{Errno, SetAttributes, SetTime, Timestamp, XattrFlags};
use zerocopy::IntoBytes;

const UTIME_NOW: u32 = 0x3fff_ffff;
const UTIME_OMIT: u32 = 0x3fff_fffe;

impl Call<'_> {
    pub(super) fn change_mode(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        if object.is_symlink() {
            return Err(Refused::KERNEL);
        }
        let permissions = Some(self.message.request.mode & PERMISSION_BITS);
        self.change(&object, SetAttributes { permissions, ..SetAttributes::default() })
    }

    pub(super) fn set_times(&self, path: &[u8]) -> Answer {
        let [accessed, modified] = self.message.request.times;
        let changes =
            SetAttributes { accessed: new_time(accessed)?, modified: new_time(modified)?, ..SetAttributes::default() };
        if changes == SetAttributes::default() {
            return done();
        }
        let object = self.object(path, self.follows())?;
        self.change(&object, changes)
    }

    pub(super) fn get_xattr(&self, path: &[u8], name: &[u8]) -> Answer {
        // Ids of the host are in such values, which the kernel has to translate.
        if kernel_keeps(name) && self.session.credentials().user_namespace.is_some() {
            return Err(Refused::KERNEL);
        }
        let object = self.object(path, self.follows())?;
        match self.dispatch(Request::GetXattr { node: object.node(), name })? {
            Outcome::Bytes(value) => self.bring(&value, self.message.request.length),
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn list_xattr(&self, path: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        match self.dispatch(Request::ListXattr { node: object.node() })? {
            Outcome::Names(names) => {
                let list: Vec<u8> = names.iter().flat_map(|name| name.iter().copied().chain([0])).collect();
                self.bring(&list, self.message.request.length)
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn set_xattr(&self, path: &[u8], name: &[u8], value: &[u8]) -> Answer {
        if kernel_keeps(name) {
            return Err(Refused::KERNEL);
        }
        let flags = XattrFlags::from_bits(self.message.request.mode).ok_or(Errno::EINVAL)?;
        let object = self.object(path, self.follows())?;
        self.dispatch(Request::SetXattr { node: object.node(), name, value, flags })?;
        done()
    }

    pub(super) fn remove_xattr(&self, path: &[u8], name: &[u8]) -> Answer {
        if kernel_keeps(name) {
            return Err(Refused::KERNEL);
        }
        let object = self.object(path, self.follows())?;
        self.dispatch(Request::RemoveXattr { node: object.node(), name })?;
        done()
    }

    pub(super) fn statfs(&self, path: &[u8]) -> Answer {
        let object = self.object(path, true)?;
        let Outcome::Statistics(found) = self.dispatch(Request::Statfs { node: object.node() })? else {
            return Err(Errno::EIO.into());
        };
        let statfs = WireStatfs {
            blocks: found.blocks,
            blocks_free: found.blocks_free,
            blocks_available: found.blocks_available,
            files: found.files,
            files_free: found.files_free,
            block_size: found.block_size,
            name_max: found.name_max,
        };
        self.bring(statfs.as_bytes(), u64::MAX)
    }
}

/// Access lists are cached by the kernel, and in the application's user namespace; file capabilities are rewritten by it.
fn kernel_keeps(name: &[u8]) -> bool {
    name.starts_with(b"system.") || name.starts_with(b"security.")
}

fn new_time(time: WireTime) -> Result<Option<SetTime>, Errno> {
    match time.nanoseconds {
        UTIME_NOW => Ok(Some(SetTime::Now)),
        UTIME_OMIT => Ok(None),
        nanoseconds @ 0..=999_999_999 => Ok(Some(SetTime::At(Timestamp { seconds: time.seconds, nanoseconds }))),
        _ => Err(Errno::EINVAL),
    }
}
