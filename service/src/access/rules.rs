//! Linux's permission rules.

use super::{Acl, Capability, Credentials};
use poolfs_libservice::types::{Attributes, Errno, FileType};

/// Execute or search, in an access mask.
pub const EXECUTE: u32 = 1;
/// Write, in an access mask.
pub const WRITE: u32 = 2;
/// Read, in an access mask.
pub const READ: u32 = 4;

const STICKY: u32 = 0o1000;
const SET_GROUP_ID: u32 = 0o2000;

/// Whether the object may be read, written, executed (searched): `mask` of [`READ`], [`WRITE`], [`EXECUTE`]. `acl` is
/// asked only when it can matter and answers the access list, if the object has one.
///
/// # Errors
/// `EACCES`.
pub fn may_access(
    credentials: &Credentials,
    object: &Attributes,
    mask: u32,
    acl: impl FnOnce() -> Result<Option<Acl>, Errno>,
) -> Result<(), Errno> {
    let mask = mask & (READ | WRITE | EXECUTE);
    if mask & WRITE != 0 && object.is_foreign() {
        // Whose it is could not be written back: Linux has nobody change it.
        return Err(Errno::EACCES);
    }
    if by_mode(credentials, object, mask, acl)? {
        return Ok(());
    }
    let capable = |capability| credentials.capable_for(capability, object);
    let overridden = if object.is_directory() {
        (mask & WRITE == 0 && capable(Capability::DacReadSearch)) || capable(Capability::DacOverride)
    } else {
        let executable = object.permissions & 0o111 != 0;
        (mask == READ && capable(Capability::DacReadSearch))
            || ((mask & EXECUTE == 0 || executable) && capable(Capability::DacOverride))
    };
    if overridden { Ok(()) } else { Err(Errno::EACCES) }
}

fn by_mode(
    credentials: &Credentials,
    object: &Attributes,
    mask: u32,
    acl: impl FnOnce() -> Result<Option<Acl>, Errno>,
) -> Result<bool, Errno> {
    let mode = object.permissions;
    if credentials.uid == object.uid {
        return Ok((mode >> 6) & mask == mask);
    }
    // With a list the group bits are its mask: when they are all clear no list can grant anything.
    if mode & 0o070 != 0
        && object.file_type != FileType::Symlink
        && let Some(list) = acl()?
    {
        return Ok(list.allows(credentials, object, mask).unwrap_or(false));
    }
    let bits = if credentials.in_group(object.gid) { mode >> 3 } else { mode };
    Ok(bits & mask == mask)
}

/// Whether the caller may act as the object's owner (chmod, utimes, ACLs).
///
/// # Errors
/// `EPERM`.
pub fn may_own(credentials: &Credentials, object: &Attributes) -> Result<(), Errno> {
    if credentials.uid == object.uid || credentials.capable_for(Capability::FileOwner, object) {
        Ok(())
    } else {
        Err(Errno::EPERM)
    }
}

/// Whether only owners may remove names from the directory (`S_ISVTX`).
#[must_use]
pub fn is_sticky(directory: &Attributes) -> bool {
    directory.permissions & STICKY != 0
}

/// Whether the host restricts hard links (`fs.protected_hardlinks`), as the kernel would ask at this moment.
#[must_use]
pub fn host_protects_hard_links() -> bool {
    std::fs::read("/proc/sys/fs/protected_hardlinks").is_ok_and(|value| value.starts_with(b"1"))
}

/// Whether another name for this file gives nobody anything, as far as type and set-id bits tell.
#[must_use]
pub fn is_harmless_link_source(object: &Attributes) -> bool {
    let set_group_id = SET_GROUP_ID | 0o010;
    object.file_type == FileType::Regular
        && object.permissions & 0o4000 == 0
        && object.permissions & set_group_id != set_group_id
}

/// Whether a change of mode, ACL or creation by this caller loses the set-group-id bit for a file of group `gid`.
#[must_use]
pub fn strips_set_group_id(credentials: &Credentials, object: &Attributes, gid: u32) -> bool {
    let object = Attributes { gid, ..*object };
    !credentials.in_group(gid) && !credentials.capable_for(Capability::FileSetId, &object)
}

/// What is wanted of an extended attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrUse {
    /// its value
    Get,
    /// another value, or none
    Set,
}

/// What an extended attribute asks for besides its own checks: an access mask on the object (0: nothing).
///
/// # Errors
/// `EPERM`, or `ENODATA` where Linux hides that the attribute could be there; `EOPNOTSUPP` for an unknown one of the system's.
pub fn xattr_rule(credentials: &Credentials, object: &Attributes, name: &[u8], wanted: XattrUse) -> Result<u32, Errno> {
    let refused = if wanted == XattrUse::Get { Errno::ENODATA } else { Errno::EPERM };
    if name.starts_with(b"trusted.") {
        return if credentials.capable(Capability::SystemAdmin) { Ok(0) } else { Err(refused) };
    }
    if name.starts_with(b"security.") {
        let needed = if name == b"security.capability" {
            credentials.capable_for(Capability::SetFileCapabilities, object)
        } else {
            credentials.capable(Capability::SystemAdmin)
        };
        return if wanted == XattrUse::Get || needed { Ok(0) } else { Err(Errno::EPERM) };
    }
    if name == b"system.posix_acl_access" || name == b"system.posix_acl_default" {
        if object.file_type == FileType::Symlink {
            return Err(Errno::EOPNOTSUPP);
        }
        if wanted == XattrUse::Set {
            may_own(credentials, object)?;
        }
        return Ok(0);
    }
    if name.starts_with(b"system.") {
        return Err(Errno::EOPNOTSUPP);
    }
    let mask = if wanted == XattrUse::Get { READ } else { WRITE };
    if !name.starts_with(b"user.") {
        // Nobody knows it, which is told to those who might set it.
        return Ok(mask);
    }
    if !matches!(object.file_type, FileType::Regular | FileType::Directory) {
        return Err(refused);
    }
    if wanted == XattrUse::Set && object.is_directory() && is_sticky(object) {
        may_own(credentials, object)?;
    }
    Ok(mask)
}

/// The mode without the bits that writing, truncating or a change of owner takes away, or `None` when there are none. A
/// set-group-id bit without group execution stays for members of the group (it means something else there).
#[must_use]
pub fn without_set_id(object: &Attributes, keeps_plain_set_group_id: bool) -> Option<u32> {
    let mut permissions = object.permissions & !0o4000;
    if permissions & 0o010 != 0 || !keeps_plain_set_group_id {
        permissions &= !SET_GROUP_ID;
    }
    (permissions != object.permissions).then_some(permissions)
}
