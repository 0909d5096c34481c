//! Writes an image layer from a union's differences: a tar archive with whiteout names, as in the OCI image specification
//! (`layer.md`).

mod disk;
mod first_paths;
#[cfg(test)]
mod tests;

use crate::failures::{code_of, text_of};
use disk::SparingFile;
use first_paths::FirstPaths;
use poolfs_libservice::types::{Attributes, Caller, FileType, NodeId, OpenFlags, Timestamp};
use poolfs_libservice::{Difference, Headroom, Layered, Libservice, Opened, Relation};
use poolfs_service_protocol::{Committed, FailureCode};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use tar::{Builder, EntryType, Header};

const ROOT: &Caller = &Caller::ROOT;

/// What names begin with that hide others, and the one that hides all of a directory.
const WHITEOUT_PREFIX: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Bytes written at once.
const WRITE_BYTES: usize = 1 << 20;

/// Most bytes of the extended attributes of a member, which are in memory at once. An import accepts no more.
const ATTRIBUTES_BYTES_MAX: usize = 1 << 20;

/// The largest number that a header has room for; larger ones stand in an extension.
const HEADER_ID_MAX: u32 = 0o777_7777;

/// Why there is no archive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error("/{path} cannot be read: {cause}")]
    Member { path: String, cause: poolfs_libservice::Error },
    #[error("/{path} has a name beginning with .wh., which hides another name in a layer; rename it")]
    Hides { path: String },
    #[error(
        "/{path} has more than {ATTRIBUTES_BYTES_MAX} bytes of extended attributes, too many for a layer; remove some"
    )]
    Attributes { path: String },
    #[error("the archive cannot be written: {0}")]
    Archive(#[from] io::Error),
    #[error("the union cannot be listed: {}", text_of(.0))]
    Listing(poolfs_libservice::Error),
    #[error(
        "/{path}: there are too many files with several names, or they are too deep in it, and the pool's memory has no room for more than \
         {count}; remove some names, or use a pool with more cache"
    )]
    Linked { count: usize, path: String },
    #[error("it was ended")]
    Ended,
}

impl ArchiveError {
    /// What kind of failure it is.
    pub fn code(&self) -> FailureCode {
        match self {
            Self::Member { cause, .. } | Self::Listing(cause) => code_of(cause),
            Self::Archive(error) if error.kind() == io::ErrorKind::StorageFull => FailureCode::NoSpace,
            Self::Archive(_) | Self::Hides { .. } | Self::Attributes { .. } | Self::Linked { .. } => FailureCode::File,
            Self::Ended => FailureCode::Failed,
        }
    }
}

/// Writes the archive of what differs now: as long as this takes, whoever wants to change the union waits. What is kept of it meanwhile is taken
/// of `room`. `goes_on` is asked often, and ends it.
pub(crate) fn write(
    union: &Arc<dyn Layered>,
    archive: File,
    room: Arc<dyn Headroom>,
    goes_on: &dyn Fn() -> bool,
) -> Result<Committed, ArchiveError> {
    let _held = union.hold_changes();
    let layer: Arc<dyn Libservice> = union.clone();
    let mut writer = Writer {
        layer,
        builder: Builder::new(BufWriter::with_capacity(WRITE_BYTES, SparingFile::new(archive))),
        linked: FirstPaths::new(room),
        done: Committed::default(),
        goes_on,
    };
    let mut failed = None;
    let listed = union.differences(&mut |path, difference| match writer.difference(path, difference) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) => {
            failed = Some(error);
            Ok(ControlFlow::Break(()))
        }
    });
    failed.map_or(Ok(()), Err)?;
    listed.map_err(ArchiveError::Listing)?;
    writer.builder.into_inner()?.flush()?;
    Ok(writer.done)
}

struct Writer<'a> {
    layer: Arc<dyn Libservice>,
    builder: Builder<BufWriter<SparingFile>>,
    linked: FirstPaths,
    done: Committed,
    goes_on: &'a dyn Fn() -> bool,
}

impl Writer<'_> {
    fn difference(&mut self, path: &[u8], difference: Difference<'_>) -> Result<(), ArchiveError> {
        if !(self.goes_on)() {
            return Err(ArchiveError::Ended);
        }
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        if name.starts_with(WHITEOUT_PREFIX) {
            return Err(ArchiveError::Hides { path: shown(path) });
        }
        self.done.members += 1;
        match difference {
            Difference::Removed => {
                let parent = &path[..path.len() - name.len()];
                self.empty(&[parent, WHITEOUT_PREFIX, name].concat())
            }
            Difference::Object { node, attributes, relation } => {
                self.object(path, node, attributes)?;
                if attributes.is_directory() && relation == Relation::Replaced {
                    self.empty(&[path, b"/", OPAQUE].concat())?;
                }
                Ok(())
            }
        }
    }

    /// A name whose being there is all that it says.
    fn empty(&mut self, path: &[u8]) -> Result<(), ArchiveError> {
        let mut header = empty_header(0o600);
        header.set_entry_type(EntryType::Regular);
        self.append(header, path, None, Vec::new(), io::empty())
    }

    fn object(&mut self, path: &[u8], node: NodeId, attributes: &Attributes) -> Result<(), ArchiveError> {
        let failed = |cause| ArchiveError::Member { path: shown(path), cause };
        let mut header = empty_header(attributes.permissions);
        let mut extensions = owner(&mut header, attributes);
        if attributes.links > 1 && !attributes.is_directory() {
            if let Some(first) = self.linked.get(attributes.inode) {
                header.set_entry_type(EntryType::Link);
                return self.append(header, path, Some(&first), Vec::new(), io::empty());
            }
            self.linked.insert(attributes.inode, path)?;
        }
        let mut attributes_bytes = 0;
        for name in self.layer.listxattr(ROOT, node).map_err(failed)? {
            // PAX has no keywords of other names.
            let Ok(text) = std::str::from_utf8(&name) else { continue };
            let value = self.layer.getxattr(ROOT, node, &name).map_err(failed)?;
            attributes_bytes += name.len() + value.len();
            if attributes_bytes > ATTRIBUTES_BYTES_MAX {
                return Err(ArchiveError::Attributes { path: shown(path) });
            }
            extensions.push((format!("SCHILY.xattr.{text}"), value));
        }
        match attributes.file_type {
            FileType::Regular => {
                header.set_entry_type(EntryType::Regular);
                header.set_size(attributes.size);
                let file = Opened::file(&self.layer, ROOT, node, OpenFlags::READ_ONLY).map_err(failed)?;
                let goes_on = self.goes_on;
                let reader = Content { file, offset: 0, end: attributes.size, goes_on };
                self.done.bytes += attributes.size;
                return self.append(header, path, None, extensions, reader);
            }
            FileType::Directory => header.set_entry_type(EntryType::Directory),
            FileType::Symlink => {
                let target = self.layer.readlink(ROOT, node).map_err(failed)?;
                header.set_entry_type(EntryType::Symlink);
                return self.append(header, path, Some(&target), extensions, io::empty());
            }
            FileType::CharDevice | FileType::BlockDevice => {
                let is_block = attributes.file_type == FileType::BlockDevice;
                header.set_entry_type(if is_block { EntryType::Block } else { EntryType::Char });
                let device = attributes.device;
                header.set_device_major(device >> 8 & 0xfff)?;
                header.set_device_minor(device & 0xff | device >> 12 & 0xf_ff00)?;
            }
            FileType::Fifo => header.set_entry_type(EntryType::Fifo),
            // It is nothing without the process that listens.
            FileType::Socket => return Ok(()),
        }
        self.append(header, path, None, extensions, io::empty())
    }

    fn append(
        &mut self,
        mut header: Header,
        path: &[u8],
        target: Option<&[u8]>,
        mut extensions: Vec<(String, Vec<u8>)>,
        content: impl Read,
    ) -> Result<(), ArchiveError> {
        let as_path = |bytes: &[u8]| Path::new(OsStr::from_bytes(bytes)).to_path_buf();
        let own = if path.is_empty() { &b"."[..] } else { path };
        if header.set_path(as_path(own)).is_err() {
            extensions.push(("path".to_owned(), path.to_vec()));
            header.set_path("named-by-its-extension")?;
        }
        if let Some(target) = target
            && header.set_link_name_literal(target).is_err()
        {
            extensions.push(("linkpath".to_owned(), target.to_vec()));
            header.set_link_name_literal("named-by-its-extension")?;
        }
        header.set_cksum();
        let extensions = extensions.iter().map(|(keyword, value)| (keyword.as_str(), value.as_slice()));
        self.builder.append_pax_extensions(extensions)?;
        let appended = self.builder.append(&header, content);
        appended.map_err(|error| if (self.goes_on)() { error.into() } else { ArchiveError::Ended })
    }
}

/// A header of something without content.
fn empty_header(permissions: u32) -> Header {
    let mut header = Header::new_ustar();
    header.set_mode(permissions);
    header.set_size(0);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Whose it is, and of when; what the header has no room for is returned.
fn owner(header: &mut Header, attributes: &Attributes) -> Vec<(String, Vec<u8>)> {
    let Timestamp { seconds, nanoseconds } = attributes.modified;
    let mut extensions = vec![("mtime".to_owned(), decimal(seconds, nanoseconds).into_bytes())];
    header.set_mtime(u64::try_from(seconds).unwrap_or(0).min(u64::from(u32::MAX)));
    for (id, keyword) in [(attributes.uid, "uid"), (attributes.gid, "gid")] {
        let in_header = if id > HEADER_ID_MAX { 0 } else { id };
        if keyword == "uid" {
            header.set_uid(in_header.into())
        } else {
            header.set_gid(in_header.into())
        }
        if id > HEADER_ID_MAX {
            extensions.push((keyword.to_owned(), id.to_string().into_bytes()));
        }
    }
    extensions
}

/// A time as PAX has it: a decimal number of seconds.
fn decimal(seconds: i64, nanoseconds: u32) -> String {
    match (seconds, nanoseconds) {
        (_, 0) => seconds.to_string(),
        (0.., _) => format!("{seconds}.{nanoseconds:09}"),
        _ => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
    }
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// The content of a file, of which nobody changes the size.
struct Content<'a> {
    file: Opened,
    offset: u64,
    end: u64,
    goes_on: &'a dyn Fn() -> bool,
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !(self.goes_on)() {
            return Err(io::Error::other("it was ended"));
        }
        let count = (self.end - self.offset).min(buffer.len() as u64) as usize;
        let failed = |error: poolfs_libservice::Error| io::Error::other(format!("a file cannot be read: {error}"));
        let read = self.file.read_full(self.offset, &mut buffer[..count]).map_err(failed)?;
        if read < count {
            return Err(io::Error::other("a file is shorter than it was said to be"));
        }
        self.offset += read as u64;
        Ok(read)
    }
}
