//! The comparison of attributes: when those of the layer and of the reference count as equal.

use crate::types::{Attributes, FileType, Timestamp};
use std::collections::HashMap;

/// Times that programs set lie before this second, those of the clock after it.
pub(super) const EXPLICIT_BEFORE: i64 = 1_000_000_000;

/// Which inode number of the subject stands for which of the reference.
#[derive(Default)]
pub(super) struct Inodes(HashMap<u64, u64>);

impl Inodes {
    /// An object keeps its inode number. (The reference uses no number twice.)
    pub(super) fn check(&mut self, subject: u64, reference: u64) -> Result<(), String> {
        let known = *self.0.entry(reference).or_insert(subject);
        if known == subject { Ok(()) } else { Err(format!("the inode number was {known} and is {subject}")) }
    }
}

/// What is wrong with the attributes of the subject, if anything.
pub(super) fn disagreement(subject: &Attributes, reference: &Attributes) -> Option<String> {
    let shown = |attributes: &Attributes| {
        let sized = if attributes.is_directory() { (0, 0) } else { (attributes.links, attributes.size) };
        let owner = if is_whiteout(attributes) { (0, 0) } else { (attributes.uid, attributes.gid) };
        (attributes.file_type, attributes.permissions, attributes.device, owner, sized)
    };
    if shown(subject) != shown(reference) {
        return Some(format!("{}, the reference: {}", text(subject), text(reference)));
    }
    if !same_time(subject.modified, reference.modified) {
        return Some(format!("modified {:?}, the reference: {:?}", subject.modified, reference.modified));
    }
    None
}

/// What a rename may leave behind: its owner and access lists are the backend's business.
pub(super) fn is_whiteout(attributes: &Attributes) -> bool {
    attributes.file_type == FileType::CharDevice && attributes.device == 0
}

/// Explicit times are equal, others only both no explicit ones.
fn same_time(subject: Timestamp, reference: Timestamp) -> bool {
    if reference.seconds < EXPLICIT_BEFORE { subject == reference } else { subject.seconds >= EXPLICIT_BEFORE }
}

fn text(attributes: &Attributes) -> String {
    format!(
        "{:?} {:o} {}:{} links {} size {} device {:#x}",
        attributes.file_type,
        attributes.permissions,
        attributes.uid,
        attributes.gid,
        attributes.links,
        attributes.size,
        attributes.device
    )
}
