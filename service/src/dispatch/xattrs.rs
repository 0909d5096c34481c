//! Dispatch of requests on extended attributes and access lists.

use super::privileges::{CAPABILITY, credentials_of};
use super::{Served, leave_foreign};
use crate::access::{XattrUse, strips_set_group_id, xattr_rule};
use crate::instance::Instance;
use crate::request::{Context, Reply};
use poolfs_libservice::Durability;
use poolfs_libservice::types::limits::{NAME_MAX, XATTR_VALUE_MAX};
use poolfs_libservice::types::{Caller, Errno, FileType, NodeId, OpenFlags, SetAttributes, XattrFlags};

const SET_GROUP_ID: u32 = 0o2000;
const ACCESS_LIST: &[u8] = b"system.posix_acl_access";

impl Instance {
    fn check_xattr(&self, context: &Context<'_>, node: NodeId, name: &[u8], wanted: XattrUse) -> Served<()> {
        if name.is_empty() || name.len() > NAME_MAX || name.contains(&0) {
            return Err(Errno::ERANGE.into());
        }
        if let Some(credentials) = context.credentials {
            let object = self.layer().getattr(&context.caller, node)?;
            if wanted == XattrUse::Set {
                leave_foreign(context, &object)?;
            }
            let mask = xattr_rule(credentials, &object, name, wanted)?;
            self.check_object(context, node, &object, mask)?;
        }
        Ok(())
    }

    pub(super) fn get_xattr(&self, context: &Context<'_>, node: NodeId, name: &[u8]) -> Served {
        self.check_xattr(context, node, name, XattrUse::Get)?;
        // The kernel asks for it before most writes.
        if name == CAPABILITY && self.is_unprivileged(node) {
            return Err(Errno::ENODATA.into());
        }
        Ok(Reply::Bytes(self.layer().getxattr(&context.caller, node, name)?))
    }

    /// `trusted.` names are shown to administrators only. The kernel leaves that to the filesystem.
    pub(super) fn list_xattr(&self, context: &Context<'_>, node: NodeId) -> Served {
        use crate::access::Capability::SystemAdmin;
        let mut names = self.layer().listxattr(&context.caller, node)?;
        if names.iter().any(|name| name.starts_with(b"trusted.")) && !credentials_of(context).capable(SystemAdmin) {
            names.retain(|name| !name.starts_with(b"trusted."));
        }
        Ok(Reply::Names(names))
    }

    pub(super) fn set_xattr(
        &self,
        context: &Context<'_>,
        node: NodeId,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> Served {
        self.check_xattr(context, node, name, XattrUse::Set)?;
        if value.len() > XATTR_VALUE_MAX {
            return Err(Errno::E2BIG.into());
        }
        if name == CAPABILITY {
            self.settle(context, node)?;
        }
        let _exclusive = (name == ACCESS_LIST).then(|| self.rights.lock(node));
        let set = self.layer().setxattr(&context.caller, node, name, value, flags);
        if name == CAPABILITY || name == ACCESS_LIST {
            self.nodes.privileges_changed(node);
        }
        set?;
        if name == ACCESS_LIST {
            self.strip_set_group_id(context, node)?;
        }
        Ok(Reply::Done)
    }

    /// Brings a file's content to its branch, before it gets capabilities: the branch's filesystem takes them away from what is
    /// written later.
    fn settle(&self, context: &Context<'_>, node: NodeId) -> Served<()> {
        if self.layer().getattr(&context.caller, node)?.file_type != FileType::Regular {
            return Ok(());
        }
        let handle = self.layer().open(&context.caller, node, OpenFlags::READ_ONLY)?;
        let settled = self.layer().fsync(&context.caller, handle, Durability::Data);
        self.layer().release(handle);
        Ok(settled?)
    }

    /// A change of the access list is a change of the mode: who is not in the file's group loses its set-group-id bit. Under
    /// the node's lock.
    fn strip_set_group_id(&self, context: &Context<'_>, node: NodeId) -> Served<()> {
        let object = self.layer().getattr(&context.caller, node)?;
        if object.permissions & SET_GROUP_ID != 0 && strips_set_group_id(&credentials_of(context), &object, object.gid)
        {
            let permissions = Some(object.permissions & !SET_GROUP_ID);
            let changes = SetAttributes { permissions, ..SetAttributes::default() };
            self.layer().setattr(&Caller::ROOT, node, &changes, None)?;
        }
        Ok(())
    }

    pub(super) fn remove_xattr(&self, context: &Context<'_>, node: NodeId, name: &[u8]) -> Served {
        self.check_xattr(context, node, name, XattrUse::Set)?;
        self.layer().removexattr(&context.caller, node, name)?;
        Ok(Reply::Done)
    }
}
