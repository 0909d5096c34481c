//! How a file becomes a compact file, and the marks of one: its record, and overlayfs' `metacopy` mark.

use crate::Bcow;
use crate::file::{new_record, store_record};
use crate::format::{ATTRIBUTE, Record};
use crate::nodes::{Content, Node};
use poolfs_libservice::{Result, fail};
use poolfs_types::{Caller, Errno, NodeId, XattrFlags};
use std::sync::atomic::Ordering;

const ROOT: &Caller = &Caller::ROOT;

/// overlayfs' mark of a file that has no content of its own: that of the layers above, and for files of the format ours, so that overlayfs
/// never shows their tables.
pub(crate) const METACOPY: &[u8] = b"trusted.overlay.metacopy";

impl Bcow {
    /// A file that was just made is of the format, where all are. One that cannot be is stored as it is.
    pub(crate) fn made(&self, node: &Node, is_new: bool) {
        if is_new && self.all_files {
            let mut content = node.write();
            if content.is_formatted() {
                return;
            }
            // Whoever has found its name already may have written.
            let is_empty = self.below.getattr(ROOT, node.id).map(|attributes| attributes.size == 0);
            if let Err(error) = is_empty.and_then(|is_empty| Ok(is_empty && self.format(node, &mut content, 0)?)) {
                tracing::debug!(node = node.id.0, %error, "a new file is stored as it is");
            }
        }
    }

    /// The root says from here on that there are files of the format; whether it can.
    fn mark(&self) -> Result<bool> {
        if !self.is_marked.load(Ordering::Acquire) {
            match self.below.setxattr(ROOT, NodeId::ROOT, ATTRIBUTE, b"1", XattrFlags::empty()) {
                // A layer without such attributes has plain files only.
                Err(error) if error == Errno::EOPNOTSUPP => return Ok(false),
                marked => marked?,
            }
            self.is_marked.store(true, Ordering::Release);
        }
        Ok(true)
    }

    /// Makes an empty file one of the format; whether that can be.
    pub(crate) fn format(&self, node: &Node, content: &mut Content, size: u64) -> Result<bool> {
        let Some(layout) = self.layout else { return Ok(false) };
        if !self.mark()? {
            return Ok(false);
        }
        let mut tag = [0; 8];
        let _ = rustix::rand::getrandom(&mut tag, rustix::rand::GetRandomFlags::empty());
        let is_metacopy = match self.below.getxattr(ROOT, node.id, METACOPY) {
            Ok(_) => true,
            Err(error) if error == Errno::ENODATA => false,
            Err(error) => return Err(error),
        };
        let record = new_record(layout, size, u64::from_le_bytes(tag), is_metacopy)?;
        if !is_metacopy {
            self.below.setxattr(ROOT, node.id, METACOPY, b"", XattrFlags::empty())?;
        }
        store_record(&self.below, node.id, &record)?;
        *content = Content::Stored(record);
        Ok(true)
    }

    /// Changes overlayfs' mark of a file of the format, as the layers above see it.
    pub(crate) fn set_metacopy(&self, node: &Node, value: bool) -> Result<()> {
        let mut content = node.write();
        let file = content.open(&self.below, node.id, false, &self.bound)?;
        if file.record.is_metacopy == value {
            return if value { Ok(()) } else { fail(Errno::ENODATA) };
        }
        file.record.is_metacopy = value;
        let record = Record { is_metacopy: value, ..file.stored.clone() };
        file.store(record)
    }
}
