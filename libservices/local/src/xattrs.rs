//! Extended attributes of every namespace, POSIX ACLs included.

use crate::backing::Backing;
use crate::error::backend;
use crate::local::Local;
use crate::sys;
use poolfs_libservice::{Result, fail};
use poolfs_types::limits::XATTR_VALUE_MAX;
use poolfs_types::{Errno, NodeId, XattrFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno as Raw;
use rustix::path::DecInt;
use std::ffi::CString;

/// Most bytes of one attribute's name (Linux's XATTR_NAME_MAX).
const NAME_BYTES_MAX: usize = 255;

/// Most bytes of the list of names (Linux's XATTR_LIST_MAX).
const LIST_BYTES_MAX: usize = 65536;

/// Bytes tried first; most values and lists are shorter.
const FIRST_BYTES: usize = 512;

/// What xfs lists beside `system.posix_acl_access` and `system.posix_acl_default`: the same lists once more, in a form of its
/// own. Whoever copied both would write each list twice.
const OTHER_FORMS: [&[u8]; 2] = [b"trusted.SGI_ACL_FILE", b"trusted.SGI_ACL_DEFAULT"];

fn checked(name: &[u8]) -> Result<CString> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return fail(Errno::ERANGE);
    }
    CString::new(name).or_else(|_| fail(Errno::EINVAL))
}

/// Calls `fill` with a short buffer, then with the longest allowed, and returns what it filled.
fn filled(bytes_max: usize, fill: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut buffer = vec![0; FIRST_BYTES];
    let length = match fill(&mut buffer) {
        Err(Raw::RANGE) => {
            buffer.resize(bytes_max, 0);
            fill(&mut buffer)?
        }
        result => result?,
    };
    buffer.truncate(length);
    Ok(buffer)
}

/// The path that older kernels, without the `xattrat` calls, find a descriptor's file by.
fn path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", DecInt::from_fd(fd).as_str())
}

/// Whether the kernel is so old that extended attributes are reached by links of `/proc`, which must be followed then.
#[must_use]
pub fn needs_links_of_proc() -> bool {
    matches!(sys::listxattrat(rustix::fs::CWD, c".", &mut []), Err(Raw::NOSYS))
}

impl Backing {
    fn xattr(&self, fd: &OwnedFd, name: &CString) -> rustix::io::Result<Vec<u8>> {
        let number = DecInt::from_fd(fd);
        filled(XATTR_VALUE_MAX, |value| match sys::getxattrat(self.proc(), number.as_c_str(), name, value) {
            Err(Raw::NOSYS) => rustix::fs::getxattr(path(fd), name.as_c_str(), value),
            result => result,
        })
    }

    fn xattr_names(&self, fd: &OwnedFd) -> rustix::io::Result<Vec<u8>> {
        let number = DecInt::from_fd(fd);
        filled(LIST_BYTES_MAX, |list| match sys::listxattrat(self.proc(), number.as_c_str(), list) {
            Err(Raw::NOSYS) => rustix::fs::listxattr(path(fd), list),
            result => result,
        })
    }
}

impl Local {
    pub(crate) fn xattr(&self, id: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let node = self.nodes.get(id)?;
        let name = checked(name)?;
        let descriptor = self.nodes.descriptor(&node)?;
        self.backing.xattr(&descriptor, &name).map_err(|raw| backend("reading an extended attribute", raw))
    }

    pub(crate) fn set_xattr(&self, id: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        let node = self.nodes.get(id)?;
        let name = checked(name)?;
        if value.len() > XATTR_VALUE_MAX {
            return fail(Errno::E2BIG);
        }
        self.changeable()?;
        let descriptor = self.nodes.descriptor(&node)?;
        let number = DecInt::from_fd(descriptor.as_fd());
        let set = || match sys::setxattrat(self.backing.proc(), number.as_c_str(), &name, value, flags.bits()) {
            Err(Raw::NOSYS) => {
                let flags = rustix::fs::XattrFlags::from_bits_retain(flags.bits());
                rustix::fs::setxattr(path(&descriptor), name.as_c_str(), value, flags)
            }
            result => result,
        };
        self.backing.spend(set).map_err(|raw| backend("setting an extended attribute", raw))
    }

    pub(crate) fn xattr_names(&self, id: NodeId) -> Result<Vec<Vec<u8>>> {
        let node = self.nodes.get(id)?;
        let descriptor = self.nodes.descriptor(&node)?;
        let list = self.backing.xattr_names(&descriptor).map_err(|raw| backend("listing extended attributes", raw))?;
        let names = list.split(|&byte| byte == 0);
        Ok(names.filter(|name| !name.is_empty() && !OTHER_FORMS.contains(name)).map(<[u8]>::to_vec).collect())
    }

    pub(crate) fn remove_xattr(&self, id: NodeId, name: &[u8]) -> Result<()> {
        let node = self.nodes.get(id)?;
        let name = checked(name)?;
        self.changeable()?;
        let descriptor = self.nodes.descriptor(&node)?;
        let number = DecInt::from_fd(descriptor.as_fd());
        let result = match sys::removexattrat(self.backing.proc(), number.as_c_str(), &name) {
            Err(Raw::NOSYS) => rustix::fs::removexattr(path(&descriptor), name.as_c_str()),
            result => result,
        };
        result.map_err(|raw| backend("removing an extended attribute", raw))
    }
}
