//! Lower branches: looking up one name in one of them, and finding the lower file that an origin names.

use crate::Lower;
use crate::format::{Cause, Origin};
use crate::lower_path::LowerPath;
use poolfs_libservice::{Held, Result};
use poolfs_types::{Attributes, Caller, Errno, Name, NodeId};
use std::sync::Arc;

/// A node of a lower branch and where it was found.
#[derive(Clone)]
pub(crate) struct LowerNode {
    /// index of the branch, 0 the topmost
    pub layer: usize,
    pub held: Arc<Held>,
    /// from the branch's root, without a leading slash
    pub path: LowerPath,
}

/// One name of one lower directory. What is there but too deep is answered `ENAMETOOLONG`.
pub(crate) fn lower_entry(
    lowers: &[Lower],
    layer: usize,
    directory: &Held,
    path: &LowerPath,
    name: &[u8],
) -> Result<Option<(LowerNode, Attributes)>> {
    let branch = &lowers[layer].layer;
    if path.is_empty() && name == crate::format::DIRECTORY {
        return Ok(None);
    }
    let Ok(checked) = Name::new(name) else { return Ok(None) };
    match branch.lookup(&Caller::ROOT, directory.node(), checked) {
        Ok(entry) => {
            let held = Arc::new(Held::new(branch, entry.node));
            Ok(Some((LowerNode { layer, held, path: path.child(name)? }, entry.attributes)))
        }
        Err(error) if error == Errno::ENOENT || error == Errno::ENOTDIR => Ok(None),
        Err(error) => Err(error),
    }
}

/// The lower file an origin names, with its attributes; the cause when it is not the one that was copied up. `root`: the path of the branches' roots.
pub(crate) fn lower_of(
    lowers: &[Lower],
    root: &LowerPath,
    origin: &Origin,
) -> Result<std::result::Result<(LowerNode, Attributes), Cause>> {
    let shown = origin.path.escape_ascii();
    let Some(layer) = lowers.iter().position(|lower| lower.layer_id == origin.layer_id) else {
        return Ok(Err(format!("its lower layer {} is not part of the union", origin.layer_id)));
    };
    let gone = || format!("its lower file \"{shown}\" of layer {} is gone", origin.layer_id);
    let mut held = Arc::new(Held::new(&lowers[layer].layer, NodeId::ROOT));
    let mut path = root.clone();
    let mut reached = None;
    for part in origin.path.split(|&byte| byte == b'/') {
        let Some((node, attributes)) = lower_entry(lowers, layer, &held, &path, part)? else {
            return Ok(Err(gone()));
        };
        (held, path) = (node.held.clone(), node.path.clone());
        reached = Some((node, attributes));
    }
    Ok(match reached {
        None => Err(gone()),
        Some((_, attributes)) if attributes.size != origin.size || attributes.modified != origin.modified => {
            Err(format!("its lower file \"{shown}\" of layer {} has changed", origin.layer_id))
        }
        Some(found) => Ok(found),
    })
}
