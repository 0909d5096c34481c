//! Names of directories of the upper branch.

use poolfs_libservice::{Branch, Held, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId};
use std::ops::ControlFlow;

const ROOT: &Caller = &Caller::ROOT;

/// A listed name with its type.
pub(crate) type Listed = (Vec<u8>, FileType);

/// All names of a directory of the upper branch.
pub(crate) fn list(upper: &Branch, node: NodeId) -> Result<Vec<Listed>> {
    first_names(upper, node, usize::MAX)
}

/// The first names of a directory of the upper branch.
pub(crate) fn first_names(upper: &Branch, node: NodeId, most: usize) -> Result<Vec<Listed>> {
    let directory = Opened::directory(upper, node)?;
    let mut names = Vec::new();
    upper.readdir(ROOT, directory.id(), 0, &mut |entry| {
        names.push((entry.name.as_bytes().to_vec(), entry.file_type));
        if names.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(names)
}

/// Visits all names of a directory of the upper branch.
pub(crate) fn each_name(upper: &Branch, node: NodeId, visit: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let directory = Opened::directory(upper, node)?;
    let mut visited = Ok(());
    upper.readdir(ROOT, directory.id(), 0, &mut |entry| {
        visited = visit(entry.name.as_bytes());
        if visited.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    visited
}

/// What a name leads to.
pub(crate) fn find(upper: &Branch, parent: NodeId, name: &[u8]) -> Result<Option<(Held, Attributes)>> {
    match upper.lookup(ROOT, parent, Name::new(name)?) {
        Ok(entry) => Ok(Some((Held::new(upper, entry.node), entry.attributes))),
        Err(error) if error == Errno::ENOENT => Ok(None),
        Err(error) => Err(error),
    }
}
