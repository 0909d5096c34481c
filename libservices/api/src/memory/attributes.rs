//! Attributes, extended attributes and access control lists of the reference.

use super::state::{Body, Inode, State, now};
use crate::acl::Acl;
use crate::{Result, fail};
use poolfs_types::limits::{FILE_SIZE_MAX, XATTR_VALUE_MAX};
use poolfs_types::{
    Attributes, Caller, Errno, FileType, HandleId, NodeId, SetAttributes, SetTime, Timestamp, XattrFlags,
};

const ACCESS_ACL: &[u8] = b"system.posix_acl_access";
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// Most bytes of an extended attribute's name.
const XATTR_NAME_MAX: usize = 255;

/// Most extended attributes of one object.
const XATTRS_MAX: usize = 4096;

impl State {
    pub(super) fn setattr(
        &mut self,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let file_type = self.inode(node)?.attributes.file_type;
        if let Some(size) = changes.size {
            if let Some(handle) = handle
                && self.writable(handle)?.inode != node.0
            {
                return fail(Errno::EBADF);
            }
            match file_type {
                FileType::Regular if size <= FILE_SIZE_MAX => {}
                FileType::Regular => return fail(Errno::EFBIG),
                FileType::Directory => return fail(Errno::EISDIR),
                _ => return fail(Errno::EINVAL),
            }
        }
        if changes.permissions.is_some() && file_type == FileType::Symlink {
            return fail(Errno::EOPNOTSUPP);
        }
        if let Some(size) = changes.size {
            self.change_content(node.0, |content| content.truncate(size))?;
            self.inode_mut(node)?.touch_content();
        }
        let inode = self.inode_mut(node)?;
        if *changes != SetAttributes::default() {
            inode.apply(changes);
        }
        Ok(inode.shown_attributes())
    }

    /// Gives a new object its access lists by its parent's default list or, without one, takes the umask away.
    pub(super) fn inherit_acl(&mut self, caller: &Caller, parent: NodeId, inode: u64) -> Result<()> {
        let default = self.inode(parent)?.default_acl.clone();
        let inode = self.any_inode_mut(inode)?;
        let permissions = inode.attributes.permissions;
        match default {
            None => inode.attributes.permissions = permissions & !(caller.umask & 0o777),
            Some(default) => {
                let (access, permissions) = default.inherited(permissions);
                inode.access_acl = access;
                inode.attributes.permissions = permissions;
                if inode.attributes.is_directory() {
                    inode.default_acl = Some(default);
                }
            }
        }
        Ok(())
    }

    pub(super) fn getxattr(&self, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let inode = self.inode(node)?;
        let value = match inode.namespace(name)? {
            Namespace::AccessAcl => inode.access_acl.as_ref().map(Acl::to_value),
            Namespace::DefaultAcl => inode.default_acl.as_ref().map(Acl::to_value),
            Namespace::Plain => inode.xattrs.get(name).cloned(),
            Namespace::Closed => None,
        };
        value.ok_or_else(|| Errno::ENODATA.into())
    }

    pub(super) fn setxattr(&mut self, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        if value.len() > XATTR_VALUE_MAX {
            return fail(Errno::E2BIG);
        }
        let inode = self.inode_mut(node)?;
        match inode.namespace(name)? {
            Namespace::AccessAcl => inode.set_access_acl(Acl::parse(value)?),
            Namespace::DefaultAcl => {
                let acl = Acl::parse(value)?;
                if acl.is_some() && !inode.attributes.is_directory() {
                    return fail(Errno::EACCES);
                }
                inode.default_acl = acl;
            }
            Namespace::Closed => return fail(Errno::EPERM),
            Namespace::Plain => {
                let exists = inode.xattrs.contains_key(name);
                if exists && flags.contains(XattrFlags::CREATE) {
                    return fail(Errno::EEXIST);
                }
                if !exists && flags.contains(XattrFlags::REPLACE) {
                    return fail(Errno::ENODATA);
                }
                if !exists && inode.xattrs.len() >= XATTRS_MAX {
                    return fail(Errno::ENOSPC);
                }
                inode.xattrs.insert(name.to_vec(), value.to_vec());
            }
        }
        inode.touch_attributes();
        Ok(())
    }

    pub(super) fn listxattr(&self, node: NodeId) -> Result<Vec<Vec<u8>>> {
        let inode = self.inode(node)?;
        let mut names: Vec<Vec<u8>> = inode.xattrs.keys().cloned().collect();
        names.extend(inode.access_acl.is_some().then(|| ACCESS_ACL.to_vec()));
        names.extend(inode.default_acl.is_some().then(|| DEFAULT_ACL.to_vec()));
        Ok(names)
    }

    pub(super) fn removexattr(&mut self, node: NodeId, name: &[u8]) -> Result<()> {
        let inode = self.inode_mut(node)?;
        match inode.namespace(name)? {
            Namespace::AccessAcl => inode.access_acl = None,
            Namespace::DefaultAcl => inode.default_acl = None,
            Namespace::Closed => return fail(Errno::EPERM),
            Namespace::Plain => {
                if inode.xattrs.remove(name).is_none() {
                    return fail(Errno::ENODATA);
                }
            }
        }
        inode.touch_attributes();
        Ok(())
    }
}

/// What kind of attribute a name is on a given object.
enum Namespace {
    AccessAcl,
    DefaultAcl,
    Plain,
    /// `user.` on what is neither file nor directory: never there, and not to be made.
    Closed,
}

impl Inode {
    fn namespace(&self, name: &[u8]) -> Result<Namespace> {
        if name.is_empty() || name.len() > XATTR_NAME_MAX {
            return fail(Errno::ERANGE);
        }
        let is_link = matches!(self.body, Body::Symlink(_));
        match name {
            ACCESS_ACL | DEFAULT_ACL if is_link => return fail(Errno::EOPNOTSUPP),
            ACCESS_ACL => return Ok(Namespace::AccessAcl),
            DEFAULT_ACL => return Ok(Namespace::DefaultAcl),
            _ => {}
        }
        let prefixes: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
        let Some(prefix) = prefixes.iter().find(|&&prefix| name.starts_with(prefix)) else {
            return fail(Errno::EOPNOTSUPP);
        };
        if name.len() == prefix.len() {
            return fail(Errno::EINVAL);
        }
        let open = matches!(self.body, Body::File(_) | Body::Directory(_)) || *prefix != b"user.";
        Ok(if open { Namespace::Plain } else { Namespace::Closed })
    }

    fn set_access_acl(&mut self, acl: Option<Acl>) {
        self.access_acl = acl;
        if let Some(acl) = &self.access_acl {
            let (mode, equivalent) = acl.equivalent_mode();
            self.attributes.permissions = (self.attributes.permissions & !0o777) | mode;
            if equivalent {
                self.access_acl = None;
            }
        }
    }

    /// Everything but the size.
    fn apply(&mut self, changes: &SetAttributes) {
        let attributes = &mut self.attributes;
        attributes.uid = changes.uid.unwrap_or(attributes.uid);
        attributes.gid = changes.gid.unwrap_or(attributes.gid);
        if let Some(permissions) = changes.permissions {
            attributes.permissions = permissions & 0o7777;
            self.access_acl = self.access_acl.take().map(|acl| acl.after_chmod(permissions));
        }
        if let Some(accessed) = changes.accessed {
            attributes.accessed = resolved(accessed);
        }
        if let Some(modified) = changes.modified {
            attributes.modified = resolved(modified);
        }
        self.touch_attributes();
    }
}

fn resolved(time: SetTime) -> Timestamp {
    match time {
        SetTime::Now => now(),
        SetTime::At(time) => time,
    }
}
