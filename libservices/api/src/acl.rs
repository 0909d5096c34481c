//! POSIX access control lists, in the form of `system.posix_acl_*` and by the rules of Linux's `fs/posix_acl.c`.

use crate::{Result, fail};
use poolfs_types::Errno;

const VERSION: u32 = 2;
const USER_OBJECT: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJECT: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
const UNDEFINED_ID: u32 = u32::MAX;

/// One entry: for whom, and what they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    permissions: u16,
    id: u32,
}

/// A valid list, ordered as Linux demands it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<AclEntry>);

impl Acl {
    /// Reads the value of the attribute; `None` for a list without entries, which stands for no list.
    /// # Errors
    /// `EINVAL` for what is no list, `EOPNOTSUPP` for another version of the form.
    pub fn parse(value: &[u8]) -> Result<Option<Self>> {
        let Some((version, rest)) = value.split_first_chunk::<4>() else { return fail(Errno::EINVAL) };
        if u32::from_le_bytes(*version) != VERSION {
            return fail(Errno::EOPNOTSUPP);
        }
        let (chunks, remainder) = rest.as_chunks::<8>();
        if !remainder.is_empty() {
            return fail(Errno::EINVAL);
        }
        let entries: Vec<AclEntry> = chunks.iter().map(AclEntry::parse).collect();
        if entries.is_empty() {
            return Ok(None);
        }
        if is_valid(&entries) { Ok(Some(Self(entries))) } else { fail(Errno::EINVAL) }
    }

    /// The value of the attribute.
    pub(crate) fn to_value(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            value.extend_from_slice(&entry.tag.to_le_bytes());
            value.extend_from_slice(&entry.permissions.to_le_bytes());
            value.extend_from_slice(&entry.id.to_le_bytes());
        }
        value
    }

    /// The nine permission bits this list stands for, and whether they say all of it.
    #[must_use]
    pub fn equivalent_mode(&self) -> (u32, bool) {
        let mut mode = 0;
        let mut equivalent = true;
        for entry in &self.0 {
            let permissions = u32::from(entry.permissions);
            match entry.tag {
                USER_OBJECT => mode |= permissions << 6,
                GROUP_OBJECT => mode |= permissions << 3,
                OTHER => mode |= permissions,
                MASK => {
                    mode = (mode & !0o070) | (permissions << 3);
                    equivalent = false;
                }
                _ => equivalent = false,
            }
        }
        (mode, equivalent)
    }

    /// This list after `chmod` to `mode`.
    pub(crate) fn after_chmod(&self, mode: u32) -> Self {
        let mut list = self.clone();
        let group_class = list.group_class_tag();
        for entry in &mut list.0 {
            let class = entry.class_shift(group_class);
            if let Some(shift) = class {
                entry.permissions = (mode >> shift & 7) as u16;
            }
        }
        list
    }

    /// What a new object inherits from this default list when `mode` was asked for: its access list, if the mode
    /// alone does not say it, and its permission bits.
    pub(crate) fn inherited(&self, mode: u32) -> (Option<Self>, u32) {
        let mut list = self.clone();
        let group_class = list.group_class_tag();
        let mut granted = 0;
        for entry in &mut list.0 {
            if let Some(shift) = entry.class_shift(group_class) {
                entry.permissions &= (mode >> shift & 7) as u16;
                granted |= u32::from(entry.permissions) << shift;
            }
        }
        let (_, equivalent) = list.equivalent_mode();
        ((!equivalent).then_some(list), (mode & !0o777) | granted)
    }

    /// The entry that the group bits of the mode show: the mask where there is one.
    fn group_class_tag(&self) -> u16 {
        if self.0.iter().any(|entry| entry.tag == MASK) { MASK } else { GROUP_OBJECT }
    }
}

impl AclEntry {
    fn parse(bytes: &[u8; 8]) -> Self {
        let tag = u16::from_le_bytes([bytes[0], bytes[1]]);
        let id = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        Self {
            tag,
            permissions: u16::from_le_bytes([bytes[2], bytes[3]]),
            id: if tag == USER || tag == GROUP { id } else { UNDEFINED_ID },
        }
    }

    /// Which bits of the mode this entry shows up in.
    fn class_shift(&self, group_class: u16) -> Option<u32> {
        match self.tag {
            USER_OBJECT => Some(6),
            OTHER => Some(0),
            tag if tag == group_class => Some(3),
            _ => None,
        }
    }
}

/// Linux's `posix_acl_valid`: owner, named users, owning group, named groups, mask, others, in this order.
fn is_valid(entries: &[AclEntry]) -> bool {
    let count = |tag| entries.iter().filter(|entry| entry.tag == tag).count();
    let named = count(USER) + count(GROUP) > 0;
    let known = [USER_OBJECT, USER, GROUP_OBJECT, GROUP, MASK, OTHER];
    entries.is_sorted_by_key(|entry| entry.tag)
        && entries.iter().all(|entry| known.contains(&entry.tag) && entry.permissions <= 7)
        && entries.iter().all(|entry| !matches!(entry.tag, USER | GROUP) || entry.id != UNDEFINED_ID)
        && count(USER_OBJECT) == 1
        && count(GROUP_OBJECT) == 1
        && count(OTHER) == 1
        && count(MASK) <= 1
        && (!named || count(MASK) == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(u16, u16, u32)]) -> Acl {
        Acl(entries.iter().map(|&(tag, permissions, id)| AclEntry { tag, permissions, id }).collect())
    }

    #[test]
    fn a_value_survives_the_round_trip() {
        let acl = list(&[
            (USER_OBJECT, 7, UNDEFINED_ID),
            (USER, 6, 1000),
            (GROUP_OBJECT, 5, UNDEFINED_ID),
            (MASK, 7, UNDEFINED_ID),
            (OTHER, 0, UNDEFINED_ID),
        ]);
        assert_eq!(Acl::parse(&acl.to_value()).unwrap(), Some(acl));
    }

    #[test]
    fn refuses_what_linux_refuses() {
        let without_mask = list(&[(USER_OBJECT, 7, UNDEFINED_ID), (USER, 6, 1), (GROUP_OBJECT, 5, 0), (OTHER, 0, 0)]);
        assert_eq!(Acl::parse(&without_mask.to_value()).unwrap_err(), Errno::EINVAL);
        assert_eq!(Acl::parse(&[2, 0, 0]).unwrap_err(), Errno::EINVAL);
        assert_eq!(Acl::parse(&[1, 0, 0, 0]).unwrap_err(), Errno::EOPNOTSUPP);
        assert_eq!(Acl::parse(&[2, 0, 0, 0]).unwrap(), None);
    }

    #[test]
    fn the_mask_takes_the_group_bits() {
        let acl = list(&[(USER_OBJECT, 7, 0), (USER, 7, 1000), (GROUP_OBJECT, 5, 0), (MASK, 7, 0), (OTHER, 5, 0)]);
        let (access, mode) = acl.inherited(0o100_640);
        assert_eq!(mode, 0o100_640);
        let access = access.unwrap();
        assert_eq!(access.equivalent_mode(), (0o640, false));
        assert_eq!(access.0[2].permissions, 5, "the owning group's own entry stays");
        assert_eq!(acl.after_chmod(0o711).equivalent_mode(), (0o711, false));
    }
}
