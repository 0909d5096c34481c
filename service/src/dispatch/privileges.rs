//! Removal of set-id bits and file capabilities by a write, a truncation or a change of owner.

use super::Served;
use crate::access::{Capability, Credentials, strips_set_group_id, without_set_id};
use crate::instance::Instance;
use crate::request::Context;
use poolfs_libservice::Entry;
use poolfs_libservice::types::{Attributes, Caller, Errno, FileType, NodeId, SetAttributes};
use std::borrow::Cow;

/// The attribute that holds a program's capabilities.
pub(super) const CAPABILITY: &[u8] = b"security.capability";

const SET_ID: u32 = 0o6000;

/// Who writes: somebody with credentials, or the kernel on somebody's behalf.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Writer {
    /// the credentials decide, or those of the calling thread
    Caller,
    /// the kernel says whether set-id bits go
    Kernel {
        /// they go
        kill_set_id: bool,
    },
}

/// The credentials behind a request. For FUSE requests they are looked up, which is slow and only done for files that
/// have something to lose; a thread that is gone or unknown counts as having neither groups nor capabilities.
pub(super) fn credentials_of<'a>(context: &Context<'a>) -> Cow<'a, Credentials> {
    match context.credentials {
        Some(credentials) => Cow::Borrowed(credentials),
        None => Cow::Owned(Credentials::of_thread(context.thread).unwrap_or_else(|| Credentials {
            uid: context.caller.uid,
            gid: context.caller.gid,
            groups: Vec::new(),
            capabilities: 0,
            user_namespace: None,
        })),
    }
}

impl Instance {
    /// Whether the node is known to have neither set-id bits nor capabilities.
    pub(super) fn is_unprivileged(&self, node: NodeId) -> bool {
        // Another instance over the same directory changes them without telling this one.
        self.nodes.privileges(node).none && self.stack.is_private()
    }

    /// A file was made: nobody looks whether it has set-id bits or capabilities before its first write. `seen` is from before it.
    pub(super) fn note_made(&self, made: &Entry, seen: u64) {
        if made.attributes.permissions & SET_ID == 0 {
            self.nodes.note_made_unprivileged(made.node, seen);
        }
    }

    /// Before the content of `node` changes: what its writer may not keep goes.
    pub(super) fn drop_privileges(&self, context: &Context<'_>, node: NodeId, writer: Writer) -> Served<()> {
        if self.is_unprivileged(node) {
            return Ok(());
        }
        let known = self.nodes.privileges(node);
        let object = self.layer().getattr(&context.caller, node)?;
        if object.file_type != FileType::Regular {
            return Ok(());
        }
        let capability = self.drop_capability(node)?;
        if object.permissions & SET_ID == 0 {
            if !capability {
                self.nodes.note_unprivileged(node, known);
            }
            return Ok(());
        }
        let _exclusive = self.rights.lock(node);
        self.drop_set_id(context, node, writer)
    }

    /// The same of set-id bits alone, under the node's lock.
    pub(super) fn drop_set_id(&self, context: &Context<'_>, node: NodeId, writer: Writer) -> Served<()> {
        let object = self.layer().getattr(&context.caller, node)?;
        if object.file_type != FileType::Regular || object.permissions & SET_ID == 0 {
            return Ok(());
        }
        let credentials = credentials_of(context);
        let keeps = match writer {
            Writer::Kernel { kill_set_id } => !kill_set_id,
            Writer::Caller => credentials.capable_for(Capability::FileSetId, &object),
        };
        if !keeps && let Some(permissions) = remaining_mode(&credentials, &object) {
            let changes = SetAttributes { permissions: Some(permissions), ..SetAttributes::default() };
            self.layer().setattr(&Caller::ROOT, node, &changes, None)?;
        }
        Ok(())
    }

    /// Takes away a file's capabilities; whether it had some.
    pub(super) fn drop_capability(&self, node: NodeId) -> Served<bool> {
        match self.layer().getxattr(&Caller::ROOT, node, CAPABILITY) {
            Ok(_) => match self.layer().removexattr(&Caller::ROOT, node, CAPABILITY) {
                Ok(()) => Ok(true),
                Err(error) if error.errno() == Errno::ENODATA => Ok(false),
                Err(error) => Err(error.into()),
            },
            Err(error) if matches!(error.errno(), Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// The mode that is left when set-id bits are taken away, if anything is.
pub(super) fn remaining_mode(credentials: &Credentials, object: &Attributes) -> Option<u32> {
    without_set_id(object, !strips_set_group_id(credentials, object, object.gid))
}
