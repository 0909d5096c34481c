//! Operations on names: creating, linking, renaming, removing, reading links.

use super::operations::{Answer, Call, PERMISSION_BITS, done};
use super::refused::Refused;
use crate::access;
use crate::request::{Reply as Outcome, Request};
use poolfs_ipc::wire::Operation;
use poolfs_libservice::types::{Errno, FileType, RenameFlags};

impl Call<'_> {
    /// `mkdir`, `mknod`, `symlink`.
    pub(super) fn make(&self, path: &[u8], target: &[u8]) -> Answer {
        let request = &self.message.request;
        let (_start, place) = self.place(request.directory, path)?;
        let (parent, name, permissions) = (place.parent.node(), place.name, request.mode & PERMISSION_BITS);
        let made = match self.message.operation {
            Operation::MakeDirectory => Request::MakeDirectory { parent, name, permissions },
            Operation::SymbolicLink => Request::SymbolicLink { parent, name, target },
            _ => {
                let file_type = made_type(request.mode)?;
                Request::MakeNode { parent, name, file_type, permissions, device: request.device }
            }
        };
        match self.dispatch(made)? {
            Outcome::Entry(entry) => {
                self.forget(&entry);
                Ok(self.with_attributes(&entry.attributes))
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn unlink(&self, path: &[u8]) -> Answer {
        let (_start, place) = self.place(self.message.request.directory, path)?;
        self.dispatch(Request::Unlink { parent: place.parent.node(), name: place.name })?;
        done()
    }

    pub(super) fn rename(&self, path: &[u8], second: &[u8]) -> Answer {
        let request = &self.message.request;
        let flags = RenameFlags::from_bits(request.mode).ok_or(Errno::EINVAL)?;
        if flags.contains(RenameFlags::EXCHANGE) && flags != RenameFlags::EXCHANGE {
            // Asked before anything else is looked at.
            return Err(Errno::EINVAL.into());
        }
        let (_start, from) = self.place(request.directory, path)?;
        let (_start, to) = self.place(request.second_directory, second).map_err(Refused::of_second)?;
        self.dispatch(Request::Rename {
            parent: from.parent.node(),
            name: from.name,
            new_parent: to.parent.node(),
            new_name: to.name,
            flags,
        })?;
        done()
    }

    pub(super) fn link(&self, path: &[u8], second: &[u8]) -> Answer {
        let object = self.object(path, self.follows())?;
        // A host may forbid links to others' files (fs.protected_hardlinks): its kernel decides.
        let attributes = self.attributes(&object)?;
        if self.context.credentials.is_some_and(|credentials| access::may_own(credentials, &attributes).is_err()) {
            return Err(Refused::KERNEL);
        }
        let (_start, place) = self.place(self.message.request.second_directory, second).map_err(Refused::of_second)?;
        let linked = Request::Link { node: object.node(), parent: place.parent.node(), name: place.name };
        match self.dispatch(linked)? {
            Outcome::Entry(entry) => {
                self.forget(&entry);
                Ok(self.with_attributes(&entry.attributes))
            }
            _ => Err(Errno::EIO.into()),
        }
    }

    pub(super) fn read_link(&self, path: &[u8]) -> Answer {
        let object = self.object(path, false)?;
        match self.dispatch(Request::ReadLink { node: object.node() })? {
            Outcome::Bytes(target) => self.bring(&target, u64::MAX),
            _ => Err(Errno::EIO.into()),
        }
    }
}

/// The type in a `mknod` mode; none means a regular file.
fn made_type(mode: u32) -> Result<FileType, Errno> {
    if mode & 0o170_000 == 0 {
        return Ok(FileType::Regular);
    }
    match FileType::from_mode(mode) {
        Some(FileType::Directory) => Err(Errno::EPERM),
        Some(FileType::Symlink) | None => Err(Errno::EINVAL),
        Some(file_type) => Ok(file_type),
    }
}
