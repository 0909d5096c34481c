//! Detects an upper branch that was copied without its extended attributes: such a copy shows zeros and removed files.
//!
//! An empty file in the work directory states that two attributes are there, one on itself and one on the branch's root. A copy
//! made without attributes contains that file, too, which shows that the attributes are missing. The attribute on the root states
//! the same of the work directory. A mark counts only if all that it vouches for was on disk before it: until then the file has
//! another name, and the root's attribute another value.

use crate::format::DIRECTORY;
use crate::marks;
use crate::sync::lock;
use crate::upper_names::{find, first_names};
use poolfs_libservice::{Branch, Durability, Held, Opened, Result};
use poolfs_types::{Caller, Errno, FileType, Name, NodeId, OpenFlags, RenameFlags};
use std::sync::Mutex;

/// Of the file, and of the branch's root.
pub(crate) const ATTRIBUTE: &[u8] = b"trusted.poolfs.attributed";
/// The file, when its attributes are on the disk.
pub(crate) const FILE: &[u8] = b"attributed";
/// The file until then.
const PENDING: &[u8] = b"attributed.new";
/// The root's attribute as long as the work directory may be gone after a crash.
const BEGUN: &[u8] = b"begun";
/// And from then on.
const DURABLE: &[u8] = b"durable";
const ROOT: &Caller = &Caller::ROOT;

/// What to do about a copy, after what is wrong with it.
const REMEDY: &str = "copy it once more from where it was, as root, with `cp -a`, `tar --xattrs --xattrs-include='*'` (to pack and to unpack) or \
                      `rsync -aHX`, all of it, .poolfs included";

/// The attribute of a node; nothing where it has none.
fn value(upper: &Branch, node: NodeId) -> Result<Option<Vec<u8>>> {
    match upper.getxattr(ROOT, node, ATTRIBUTE) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(None),
        Err(error) => Err(error),
    }
}

/// What was left behind when the branch was copied, as far as its marks tell, and what to do; `top` is its work directory.
pub(crate) fn left_behind(upper: &Branch, top: Option<&Held>) -> Result<Option<String>> {
    let Some(top) = top else {
        // A directory that was emptied is a new branch.
        let is_used = value(upper, NodeId::ROOT)?.is_some_and(|value| value == DURABLE);
        if !is_used || first_names(upper, NodeId::ROOT, 1)?.is_empty() {
            return Ok(None);
        }
        let attribute = ATTRIBUTE.escape_ascii();
        return Ok(Some(format!(
            "it was copied without its .poolfs, or that was removed: files that were written in part cannot be read; {REMEDY}, or, if nothing of a union is in \
             it any more, take its attribute {attribute} away with `setfattr -x`"
        )));
    };
    let Some((file, _)) = find(upper, top.node(), FILE)? else { return Ok(None) };
    if value(upper, file.node())?.is_some() && value(upper, NodeId::ROOT)?.is_some() {
        return Ok(None);
    }
    Ok(Some(format!(
        "the branch was copied without its extended attributes, all or some: files that were written in part would read as zeros, and removed files come back; \
         {REMEDY}"
    )))
}

/// Whether it can be told of the branch that it has its attributes.
fn is_marked(upper: &Branch, top: &Held) -> Result<bool> {
    Ok(find(upper, top.node(), FILE)?.is_some())
}

/// Marks of a branch that are to be believed when they are on the disk.
#[derive(Default)]
pub(crate) struct Pending(Mutex<Option<Held>>);

impl Pending {
    /// Marks a branch that has none; `is_whole`: nothing of what is in it can have been left behind before. Where there is no way to do so it stays without.
    pub fn begin(upper: &Branch, top: &Held, is_whole: bool) -> Result<Self> {
        let before = find(upper, top.node(), PENDING)?;
        if is_marked(upper, top)? || (before.is_none() && !is_whole) {
            return Ok(Self::default());
        }
        match begin(upper, top, before.map(|(held, _)| held)) {
            Ok(held) => Ok(Self(Mutex::new(Some(held)))),
            Err(error) if error == Errno::EIO => Err(error),
            Err(error) => {
                tracing::warn!(%error, "a copy of the upper branch without its extended attributes will not be noticed");
                Ok(Self::default())
            }
        }
    }

    /// Makes the file's attribute durable; that of the root comes with the root.
    pub fn sync(&self, upper: &Branch) -> Result<()> {
        let pending = lock(&self.0);
        let Some(held) = &*pending else { return Ok(()) };
        let file = Opened::file(upper, ROOT, held.node(), OpenFlags::READ_ONLY)?;
        upper.fsync(ROOT, file.id(), Durability::All)
    }

    /// The marks are durable, and so is the work directory: from here on they are believed.
    pub fn end(&self, upper: &Branch, top: &Held) {
        let mut pending = lock(&self.0);
        if pending.is_none() {
            return;
        }
        let ended = (|| {
            let (from, to) = (Name::new(PENDING)?, Name::new(FILE)?);
            marks::set(&**upper, NodeId::ROOT, ATTRIBUTE, DURABLE)?;
            upper.rename(ROOT, top.node(), from, top.node(), to, RenameFlags::empty())
        })();
        match ended {
            Ok(()) => *pending = None,
            Err(error) => tracing::warn!(%error, "the marks of the upper branch are not to be believed yet"),
        }
    }
}

fn begin(upper: &Branch, top: &Held, before: Option<Held>) -> Result<Held> {
    let held = match before {
        Some(held) => held,
        None => {
            let entry = upper.mknod(ROOT, top.node(), Name::new(PENDING)?, FileType::Regular, 0o600, 0)?;
            Held::new(upper, entry.node)
        }
    };
    marks::set(&**upper, held.node(), ATTRIBUTE, b"")?;
    marks::set(&**upper, NodeId::ROOT, ATTRIBUTE, BEGUN)?;
    Ok(held)
}

/// The path of the file that marks a branch.
pub(crate) fn path() -> Vec<u8> {
    [DIRECTORY, b"/", FILE].concat()
}
