//! Translation of extended attributes that contain ids: POSIX access lists and file capabilities.
//!
//! A value of an unknown form passes unchanged: it names nobody, and the layers below know which values they accept.

use poolfs_types::{Errno, IdMap, NO_ID};
use std::borrow::Cow;

const ACCESS_LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
const CAPABILITY: &[u8] = b"security.capability";

/// The value as it is shown, of the one that is stored.
pub fn shown(map: &IdMap, name: &[u8], stored: Vec<u8>) -> Vec<u8> {
    if ACCESS_LISTS.contains(&name) {
        return translate_list(&stored, |id| Ok(map.host(id))).unwrap_or(stored);
    }
    match Capability::parse(name, &stored) {
        // Without a counterpart it is nobody's root that the capabilities are for: the kernel gives them to nobody.
        Some(capability) => capability.of_root(map.host(capability.root).unwrap_or(NO_ID)),
        None => stored,
    }
}

/// The value as it is stored, of the one that is set.
///
/// # Errors
/// `EINVAL` when it names somebody whom the map does not have.
pub fn stored<'v>(map: &IdMap, name: &[u8], value: &'v [u8]) -> Result<Cow<'v, [u8]>, Errno> {
    let inside = |id| map.inside(id).ok_or(Errno::EINVAL);
    if ACCESS_LISTS.contains(&name) {
        return Ok(translate_list(value, |id| inside(id).map(Some))?.into());
    }
    match Capability::parse(name, value) {
        Some(capability) => Ok(capability.of_root(inside(capability.root)?).into()),
        None => Ok(value.into()),
    }
}

/// Bytes of a list's version, of an entry; an entry is a tag (2 bytes), permissions (2 bytes), an id.
const VERSION_BYTES: usize = 4;
const ENTRY_BYTES: usize = 8;
/// The tags of entries that name somebody.
const NAMED: [[u8; 2]; 2] = [[0x02, 0], [0x08, 0]];

/// The list with other ids; an entry whose id has none is left out.
fn translate_list(list: &[u8], other: impl Fn(u32) -> Result<Option<u32>, Errno>) -> Result<Vec<u8>, Errno> {
    let Some((version, entries)) = list.split_first_chunk::<VERSION_BYTES>() else { return Ok(list.to_vec()) };
    let (entries, rest) = entries.as_chunks::<ENTRY_BYTES>();
    let mut translated = version.to_vec();
    for &[tag, tag_high, permissions, permissions_high, ref id @ ..] in entries {
        let mut id = u32::from_le_bytes([id[0], id[1], id[2], id[3]]);
        if NAMED.contains(&[tag, tag_high]) {
            match other(id)? {
                Some(other) => id = other,
                None => continue,
            }
        }
        translated.extend([tag, tag_high, permissions, permissions_high]);
        translated.extend(id.to_le_bytes());
    }
    translated.extend(rest);
    Ok(translated)
}

/// `struct vfs_cap_data` of the versions the kernel writes: 2, for the root of whoever mounts the filesystem, and 3, which
/// names a root.
struct Capability<'v> {
    /// What is the same in both: version and flags, then the sets.
    common: &'v [u8; COMMON_BYTES],
    /// For whose programs: the root of this user namespace.
    root: u32,
}

const COMMON_BYTES: usize = 20;
const VERSION_2: u8 = 2;
const VERSION_3: u8 = 3;

impl<'v> Capability<'v> {
    fn parse(name: &[u8], value: &'v [u8]) -> Option<Self> {
        if name != CAPABILITY {
            return None;
        }
        let (common, rest) = value.split_first_chunk::<COMMON_BYTES>()?;
        // The highest byte of the first word.
        let root = match (common[3], rest) {
            (VERSION_2, []) => 0,
            (VERSION_3, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
            _ => return None,
        };
        Some(Self { common, root })
    }

    /// The same for the programs of another root, in the oldest version that can say so.
    fn of_root(&self, root: u32) -> Vec<u8> {
        let mut value = self.common.to_vec();
        value[3] = if root == 0 { VERSION_2 } else { VERSION_3 };
        if root != 0 {
            value.extend(root.to_le_bytes());
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_types::IdRange;

    fn map() -> IdMap {
        IdMap::new([IdRange { inside: 0, host: 100_000, count: 1000 }]).expect("a map")
    }

    fn list(entries: &[(u16, u32)]) -> Vec<u8> {
        let entry = |&(tag, id): &(u16, u32)| [&tag.to_le_bytes()[..], &[6, 0], &id.to_le_bytes()].concat();
        [2u32.to_le_bytes().to_vec(), entries.iter().flat_map(entry).collect()].concat()
    }

    #[test]
    fn lists_name_the_hosts_ids_outside_and_the_containers_on_the_disk() {
        for name in ACCESS_LISTS {
            let inside = list(&[(1, NO_ID), (2, 33), (4, NO_ID), (8, 5), (16, NO_ID), (32, NO_ID)]);
            let outside = list(&[(1, NO_ID), (2, 100_033), (4, NO_ID), (8, 100_005), (16, NO_ID), (32, NO_ID)]);
            assert_eq!(shown(&map(), name, inside.clone()), outside);
            assert_eq!(stored(&map(), name, &outside).expect("mapped"), inside);
        }
    }

    #[test]
    fn who_is_not_in_the_map_is_in_no_list() {
        let name = ACCESS_LISTS[0];
        let inside = list(&[(1, NO_ID), (2, 33), (2, 1000), (4, NO_ID), (8, 70_000), (16, NO_ID), (32, NO_ID)]);
        let outside = list(&[(1, NO_ID), (2, 100_033), (4, NO_ID), (16, NO_ID), (32, NO_ID)]);
        assert_eq!(shown(&map(), name, inside), outside);
        for entry in [(2, 33), (8, 0), (2, 101_000), (2, NO_ID)] {
            assert_eq!(stored(&map(), name, &list(&[entry])), Err(Errno::EINVAL), "{entry:?}");
        }
    }

    #[test]
    fn capabilities_are_for_programs_of_the_containers_root() {
        let version_2 = [&[1, 0, 0, 2][..], &[7; 16]].concat();
        let version_3 = |root: u32| [&[1, 0, 0, 3][..], &[7; 16], &root.to_le_bytes()].concat();
        assert_eq!(shown(&map(), CAPABILITY, version_2.clone()), version_3(100_000));
        assert_eq!(shown(&map(), CAPABILITY, version_3(5)), version_3(100_005));
        assert_eq!(shown(&map(), CAPABILITY, version_3(1000)), version_3(NO_ID), "nobody's");
        assert_eq!(stored(&map(), CAPABILITY, &version_3(100_000)).expect("mapped"), version_2);
        assert_eq!(stored(&map(), CAPABILITY, &version_3(100_005)).expect("mapped"), version_3(5));
        for of_others in [version_2.clone(), version_3(0), version_3(99_999)] {
            assert_eq!(stored(&map(), CAPABILITY, &of_others), Err(Errno::EINVAL));
        }
        let all = IdMap::new([IdRange { inside: 0, host: 0, count: NO_ID }]).expect("a map");
        assert_eq!(shown(&all, CAPABILITY, version_2.clone()), version_2);
    }

    #[test]
    fn other_values_are_left_alone() {
        let odd = [&list(&[(2, 33)])[..], &[1, 2, 3]].concat();
        assert_eq!(stored(&map(), b"user.x", &odd).expect("not looked at"), odd);
        assert_eq!(shown(&map(), b"user.x", odd.clone()), odd);
        for value in [&[][..], &[2], &[1, 0, 0, 2], &[0; 20], &[3; 25]] {
            for name in [ACCESS_LISTS[0], CAPABILITY] {
                assert_eq!(shown(&map(), name, value.to_vec()), value);
            }
        }
        assert_eq!(shown(&map(), ACCESS_LISTS[0], odd)[..4], [2, 0, 0, 0]);
    }
}
