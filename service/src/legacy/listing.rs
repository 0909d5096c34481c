//! Directory listings: what the layers deliver is gathered first and answered afterwards, because a listing with
//! attributes looks every name up, which must not happen while a layer lists.

use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::request::{Context, Failure, Reply, Request};
use poolfs_libservice::Entry;
use poolfs_libservice::types::{Errno, FileType, Name, NodeId};
use std::ops::ControlFlow;

/// Most entries of one answer.
const ENTRIES_MAX: usize = 1024;

/// One gathered name. Cookies 1 and 2 are those of `.` and `..`, the layers' ones follow behind [`COOKIES`].
pub(super) struct Listed {
    pub(super) name: Vec<u8>,
    pub(super) inode: u64,
    pub(super) file_type: FileType,
    pub(super) cookie: u64,
}

/// What is added to a layer's cookie: `.` and `..` come first.
const COOKIES: u64 = 2;

impl Listed {
    pub(super) fn is_dot(&self) -> bool {
        self.name == b"." || self.name == b".."
    }
}

/// The entries after `cookie`, with at most about `bytes` bytes of names and headers of `header` bytes each.
pub(super) fn gather(
    instance: &Instance,
    context: &Context<'_>,
    file: &OpenFile,
    cookie: u64,
    room: (usize, usize),
) -> Result<Vec<Listed>, Failure> {
    let (bytes, header) = room;
    let mut listed = Vec::new();
    if cookie < COOKIES {
        let own = match instance.dispatch(context, Request::Stat { node: file.node() })? {
            Reply::Attributes(attributes) => attributes.inode,
            _ => return Err(Errno::EIO.into()),
        };
        // The parent's number is not known here; the kernel never shows it of a mount's root, and programs that need it
        // stat "..".
        for (name, at) in [(b".".to_vec(), 1), (b"..".to_vec(), 2)] {
            if cookie < at {
                listed.push(Listed { name, inode: own, file_type: FileType::Directory, cookie: at });
            }
        }
    }
    let mut left = bytes;
    let mut visit = |entry: poolfs_libservice::DirectoryEntry<'_>| {
        let size = (header + entry.name.as_bytes().len()).next_multiple_of(8);
        if size > left || listed.len() >= ENTRIES_MAX {
            return ControlFlow::Break(());
        }
        left -= size;
        listed.push(Listed {
            name: entry.name.as_bytes().to_vec(),
            inode: entry.inode,
            file_type: entry.file_type,
            cookie: entry.cookie.saturating_add(COOKIES),
        });
        ControlFlow::Continue(())
    };
    let from = cookie.saturating_sub(COOKIES);
    instance.dispatch(context, Request::List { file, cookie: from, visit: &mut visit })?;
    Ok(listed)
}

/// Looks a listed name up; nothing when it has gone meanwhile.
pub(super) fn look_up(instance: &Instance, context: &Context<'_>, parent: NodeId, listed: &Listed) -> Option<Entry> {
    let name = Name::new(&listed.name).ok()?;
    match instance.dispatch(context, Request::Lookup { parent, name }) {
        Ok(Reply::Entry(entry)) => Some(entry),
        _ => None,
    }
}
