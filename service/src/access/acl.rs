//! POSIX access control lists in the form of `system.posix_acl_access`.

use super::Credentials;
use poolfs_libservice::types::{Attributes, Errno};

const VERSION: u32 = 2;
const ENTRY_BYTES: usize = 8;

/// Whom an entry speaks of; values of `ACL_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AclTag {
    /// the owner
    UserObject,
    /// this user
    User(u32),
    /// the file's group
    GroupObject,
    /// this group
    Group(u32),
    /// the most that named users and all groups may
    Mask,
    /// everybody else
    Other,
}

/// One entry: who, and the rwx bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AclEntry {
    /// who
    pub tag: AclTag,
    /// R 4, W 2, X 1
    pub permissions: u32,
}

/// A whole list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

impl Acl {
    /// The list in an attribute's value.
    ///
    /// # Errors
    /// `EINVAL` (or `EOPNOTSUPP` for another version) when it is malformed: then nobody is let through by it.
    pub fn parse(value: &[u8]) -> Result<Self, Errno> {
        let (version, entries) = value.split_first_chunk::<4>().ok_or(Errno::EINVAL)?;
        if u32::from_le_bytes(*version) != VERSION {
            return Err(Errno::EOPNOTSUPP);
        }
        if entries.len() % ENTRY_BYTES != 0 {
            return Err(Errno::EINVAL);
        }
        let entry = |bytes: &[u8]| {
            let id = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            let permissions = u32::from(u16::from_le_bytes([bytes[2], bytes[3]]));
            let tag = match u16::from_le_bytes([bytes[0], bytes[1]]) {
                0x01 => AclTag::UserObject,
                0x02 => AclTag::User(id),
                0x04 => AclTag::GroupObject,
                0x08 => AclTag::Group(id),
                0x10 => AclTag::Mask,
                0x20 => AclTag::Other,
                _ => return Err(Errno::EINVAL),
            };
            if permissions > 7 { Err(Errno::EINVAL) } else { Ok(AclEntry { tag, permissions }) }
        };
        entries.chunks_exact(ENTRY_BYTES).map(entry).collect::<Result<_, _>>().map(Self)
    }

    /// A list that lets nobody do anything.
    #[must_use]
    pub fn for_nobody() -> Self {
        Self(Vec::new())
    }

    /// Whether the list lets somebody who is not the owner do `want`; `None` when it says nothing (a malformed list).
    #[must_use]
    pub fn allows(&self, credentials: &Credentials, object: &Attributes, want: u32) -> Option<bool> {
        let grants = |entry: &AclEntry| entry.permissions & want == want;
        let mask = || self.0.iter().find(|entry| entry.tag == AclTag::Mask).is_none_or(grants);
        let mut in_some_group = false;
        for entry in &self.0 {
            match entry.tag {
                AclTag::UserObject if credentials.uid == object.uid => return Some(grants(entry)),
                AclTag::User(uid) if credentials.uid == uid => return Some(grants(entry) && mask()),
                AclTag::GroupObject if credentials.in_group(object.gid) => {
                    in_some_group = true;
                    if grants(entry) {
                        return Some(mask());
                    }
                }
                AclTag::Group(gid) if credentials.in_group(gid) => {
                    in_some_group = true;
                    if grants(entry) {
                        return Some(mask());
                    }
                }
                AclTag::Other => return Some(!in_some_group && grants(entry)),
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
pub(super) fn encode(entries: &[AclEntry]) -> Vec<u8> {
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for entry in entries {
        let (tag, id): (u16, u32) = match entry.tag {
            AclTag::UserObject => (1, u32::MAX),
            AclTag::User(id) => (2, id),
            AclTag::GroupObject => (4, u32::MAX),
            AclTag::Group(id) => (8, id),
            AclTag::Mask => (16, u32::MAX),
            AclTag::Other => (32, u32::MAX),
        };
        bytes.extend(tag.to_le_bytes());
        bytes.extend((entry.permissions as u16).to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_lists_are_refused() {
        assert_eq!(Acl::parse(b""), Err(Errno::EINVAL));
        assert_eq!(Acl::parse(&[3, 0, 0, 0]), Err(Errno::EOPNOTSUPP));
        assert_eq!(Acl::parse(&[2, 0, 0, 0, 1]), Err(Errno::EINVAL));
        assert_eq!(Acl::parse(&[2, 0, 0, 0, 3, 0, 7, 0, 0, 0, 0, 0]), Err(Errno::EINVAL));
        assert_eq!(Acl::parse(&[2, 0, 0, 0, 1, 0, 8, 0, 0, 0, 0, 0]), Err(Errno::EINVAL));
    }

    #[test]
    fn what_is_encoded_is_parsed() {
        let entries = vec![
            AclEntry { tag: AclTag::UserObject, permissions: 6 },
            AclEntry { tag: AclTag::User(1000), permissions: 4 },
            AclEntry { tag: AclTag::GroupObject, permissions: 4 },
            AclEntry { tag: AclTag::Mask, permissions: 4 },
            AclEntry { tag: AclTag::Other, permissions: 0 },
        ];
        assert_eq!(Acl::parse(&encode(&entries)), Ok(Acl(entries)));
    }
}
