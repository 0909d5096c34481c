//! The nodes and names that a request uses or changes.

use super::Request;
use poolfs_libservice::types::{Name, NodeId, OpenFlags};

impl Request<'_> {
    /// The nodes it names whose attributes it may change.
    #[must_use]
    pub fn changes(&self) -> [Option<NodeId>; 2] {
        match *self {
            Request::Change { node, .. } | Request::SetXattr { node, .. } | Request::RemoveXattr { node, .. } => {
                [Some(node), None]
            }
            Request::Open { node, flags } if flags.contains(OpenFlags::TRUNCATE) => [Some(node), None],
            Request::Write { file, .. } | Request::Allocate { file, .. } | Request::CopyRange { target: file, .. } => {
                [Some(file.node()), None]
            }
            Request::Link { node, parent, .. } => [Some(node), Some(parent)],
            Request::Rename { parent, new_parent, .. } => [Some(parent), Some(new_parent)],
            Request::Create { parent, .. }
            | Request::MakeNode { parent, .. }
            | Request::MakeDirectory { parent, .. }
            | Request::SymbolicLink { parent, .. }
            | Request::Unlink { parent, .. }
            | Request::RemoveDirectory { parent, .. } => [Some(parent), None],
            _ => [None, None],
        }
    }

    /// The nodes whose content or attributes it asks for, changes, or gives a name.
    #[must_use]
    pub fn files(&self) -> [Option<NodeId>; 2] {
        match *self {
            Request::Stat { node }
            | Request::Change { node, .. }
            | Request::Open { node, .. }
            | Request::Link { node, .. }
            | Request::GetXattr { node, .. }
            | Request::ListXattr { node }
            | Request::SetXattr { node, .. }
            | Request::RemoveXattr { node, .. } => [Some(node), None],
            Request::Read { file, .. }
            | Request::Write { file, .. }
            | Request::Allocate { file, .. }
            | Request::Seek { file, .. }
            | Request::Sync { file, .. }
            | Request::Flush { file } => [Some(file.node()), None],
            Request::CopyRange { source, target, .. } => [Some(source.node()), Some(target.node())],
            _ => [None, None],
        }
    }

    /// The names by which it asks for what [`Request::files`] tells of others.
    #[must_use]
    pub fn names(&self) -> [Option<(NodeId, Name<'_>)>; 2] {
        match *self {
            Request::Lookup { parent, name } => [Some((parent, name)), None],
            Request::Rename { parent, name, new_parent, new_name, .. } => {
                [Some((parent, name)), Some((new_parent, new_name))]
            }
            _ => [None, None],
        }
    }

    /// Whether it stores what earlier requests have brought.
    #[must_use]
    pub fn makes_durable(&self) -> bool {
        matches!(self, Request::Sync { .. } | Request::SyncAll | Request::Flush { .. })
    }
}
