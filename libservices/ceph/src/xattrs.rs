//! Extended attributes, POSIX ACLs included.

use crate::client::Answer;
use crate::layer::Ceph;
use crate::nodes::Node;
use poolfs_libservice::{Acl, Result, fail};
use poolfs_types::limits::XATTR_VALUE_MAX;
use poolfs_types::{Errno, FileType, NodeId, XattrFlags};
use std::ffi::{CStr, CString};

/// Most bytes of one attribute's name (Linux's XATTR_NAME_MAX).
const NAME_BYTES_MAX: usize = 255;

/// Most bytes of the list of names (Linux's XATTR_LIST_MAX).
const LIST_BYTES_MAX: usize = 65536;

/// Bytes tried first; most values and lists are shorter.
const FIRST_BYTES: usize = 512;

/// By names like this clients of CephFS ask for, and set, what the cluster does with a file: layouts and quotas.
const OF_CLUSTER: &[u8] = b"ceph.";

const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
const DEFAULT_LIST: &[u8] = b"system.posix_acl_default";

fn checked(name: &[u8]) -> Result<CString> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return fail(Errno::ERANGE);
    }
    CString::new(name).or_else(|_| fail(Errno::EINVAL))
}

/// Calls `fill` with a short buffer, then with the longest allowed, and returns what it filled.
fn filled(bytes_max: usize, fill: impl Fn(&mut [u8]) -> Answer<usize>) -> Answer<Vec<u8>> {
    let mut buffer = vec![0; FIRST_BYTES];
    let length = match fill(&mut buffer) {
        Err(Errno::ERANGE) => {
            buffer.resize(bytes_max, 0);
            fill(&mut buffer)?
        }
        result => result?,
    };
    if length > buffer.len() {
        return Err(Errno::EIO);
    }
    buffer.truncate(length);
    Ok(buffer)
}

/// Whether an attribute of this name may be there.
fn fits(node: &Node, name: &CStr) -> bool {
    let has_users = matches!(node.file_type, FileType::Regular | FileType::Directory);
    has_users || !name.to_bytes().starts_with(b"user.")
}

/// Refuses names of no namespace, and of nothing in one, and those of access lists where there are none.
fn check_namespace(node: &Node, name: &CStr) -> Result<()> {
    let name = name.to_bytes();
    let namespaces = [b"user.".as_slice(), b"trusted.", b"security.", OF_CLUSTER];
    if namespaces.contains(&name) {
        return fail(Errno::EINVAL);
    }
    let is_known = namespaces.iter().any(|known| name.starts_with(known));
    let is_list = name == ACCESS_LIST || name == DEFAULT_LIST;
    if is_known || is_list && node.file_type != FileType::Symlink { Ok(()) } else { fail(Errno::EOPNOTSUPP) }
}

/// Refuses an access list that Linux would refuse.
fn check_list(node: &Node, name: &CStr, value: &[u8]) -> Result<()> {
    match name.to_bytes() {
        ACCESS_LIST => Acl::parse(value).map(drop),
        DEFAULT_LIST if Acl::parse(value)?.is_some() && node.file_type != FileType::Directory => fail(Errno::EACCES),
        _ => Ok(()),
    }
}

impl Ceph {
    pub(crate) fn xattr(&self, id: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let node = self.nodes.get(id)?;
        let name = checked(name)?;
        check_namespace(&node, &name)?;
        if !fits(&node, &name) {
            return fail(Errno::ENODATA);
        }
        let value = filled(XATTR_VALUE_MAX, |value| node.inode.xattr(&name, value));
        value.map_err(|errno| self.fault("reading an extended attribute", errno))
    }

    pub(crate) fn set_xattr(&self, id: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let node = self.nodes.get(id)?;
        let name = checked(name)?;
        if value.len() > XATTR_VALUE_MAX {
            return fail(Errno::E2BIG);
        }
        self.changeable(&node)?;
        check_namespace(&node, &name)?;
        if name.to_bytes().starts_with(OF_CLUSTER) {
            return fail(Errno::EOPNOTSUPP);
        }
        if !fits(&node, &name) {
            return fail(Errno::EPERM);
        }
        check_list(&node, &name, value)?;
        if self.says_no_more(&node, &name, value)? {
            return Ok(());
        }
        let set = node.inode.set_xattr(&name, value, flags.bits() as libc::c_int);
        set.map_err(|errno| self.fault("setting an extended attribute", errno))
    }

    /// Whether it is an access list that says what the mode says, of a file that has none: to set it is no change on Linux.
    fn says_no_more(&self, node: &Node, name: &CStr, value: &[u8]) -> Result<bool> {
        let list = if name.to_bytes() == ACCESS_LIST { Acl::parse(value)? } else { None };
        let Some((mode, true)) = list.map(|list| list.equivalent_mode()) else { return Ok(false) };
        let found = node.inode.attributes().map_err(|errno| self.fault("reading attributes", errno))?;
        let has_none = matches!(node.inode.xattr(name, &mut [0; FIRST_BYTES]), Err(Errno::ENODATA));
        Ok(has_none && u32::from(found.mode) & 0o777 == mode)
    }

    pub(crate) fn xattr_names(&self, id: NodeId) -> Result<Vec<Vec<u8>>> {
        let node = self.nodes.get(id)?;
        let list = filled(LIST_BYTES_MAX, |list| node.inode.xattr_names(list));
        let list = list.map_err(|errno| self.fault("listing extended attributes", errno))?;
        let names = list.split(|&byte| byte == 0);
        Ok(names.filter(|name| !name.is_empty() && !name.starts_with(OF_CLUSTER)).map(<[u8]>::to_vec).collect())
    }

    pub(crate) fn remove_xattr(&self, id: NodeId, name: &[u8]) -> Result<()> {
        let node = self.nodes.get(id)?;
        let name = checked(name)?;
        self.changeable(&node)?;
        check_namespace(&node, &name)?;
        if name.to_bytes().starts_with(OF_CLUSTER) {
            return fail(Errno::EOPNOTSUPP);
        }
        if !fits(&node, &name) {
            return fail(Errno::EPERM);
        }
        match node.inode.remove_xattr(&name) {
            // Removing an ACL that does not exist succeeds.
            Err(Errno::ENODATA) if [ACCESS_LIST, DEFAULT_LIST].contains(&name.to_bytes()) => Ok(()),
            removed => removed.map_err(|errno| self.fault("removing an extended attribute", errno)),
        }
    }
}
