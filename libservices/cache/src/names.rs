//! The name cache: what a name leads to, absent names included. The number of entries is bounded; entries not used recently are
//! evicted first.

use poolfs_types::{Name, NodeId};
use quick_cache::Equivalent;
use quick_cache::sync::Cache as Recent;
use std::hash::{Hash, Hasher};

struct Key {
    parent: NodeId,
    name: Box<[u8]>,
}

struct KeyRef<'a> {
    parent: NodeId,
    name: &'a [u8],
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        KeyRef { parent: self.parent, name: &self.name }.hash(state);
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.parent == other.parent && self.name == other.name
    }
}

impl Eq for Key {}

impl Hash for KeyRef<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.parent.hash(state);
        self.name.hash(state);
    }
}

impl Equivalent<Key> for KeyRef<'_> {
    fn equivalent(&self, key: &Key) -> bool {
        self.parent == key.parent && self.name == &*key.name
    }
}

/// What is known of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    Present(NodeId),
    Absent,
}

/// What is known of names, each with the epoch of its directory in which that is so.
pub(crate) struct Names(Recent<Key, (Known, u64)>);

impl Names {
    pub(crate) fn new(names_max: usize) -> Self {
        Self(Recent::new(names_max.max(1)))
    }

    pub(crate) fn get(&self, parent: NodeId, name: Name<'_>, epoch: u64) -> Option<Known> {
        let (known, at) = self.0.get(&KeyRef { parent, name: name.as_bytes() })?;
        (at == epoch).then_some(known)
    }

    pub(crate) fn set(&self, parent: NodeId, name: Name<'_>, known: Known, epoch: u64) {
        self.0.insert(Key { parent, name: name.as_bytes().into() }, (known, epoch));
    }

    pub(crate) fn forget(&self, parent: NodeId, name: Name<'_>) {
        self.0.remove(&KeyRef { parent, name: name.as_bytes() });
    }

    pub(crate) fn clear(&self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_parent_and_bytes() {
        let names = Names::new(100);
        let name = Name::new(b"a").unwrap();
        names.set(NodeId(1), name, Known::Present(NodeId(7)), 0);
        names.set(NodeId(2), name, Known::Absent, 3);
        assert_eq!(names.get(NodeId(1), name, 0), Some(Known::Present(NodeId(7))));
        assert_eq!(names.get(NodeId(2), name, 3), Some(Known::Absent));
        assert_eq!(names.get(NodeId(2), name, 4), None);
        names.forget(NodeId(1), name);
        assert_eq!(names.get(NodeId(1), name, 0), None);
    }

    #[test]
    fn names_are_bounded() {
        let names = Names::new(64);
        for n in 0..10_000 {
            let text = format!("name{n}");
            names.set(NodeId(1), Name::new(text.as_bytes()).unwrap(), Known::Absent, 0);
        }
        assert!(names.0.len() <= 128);
    }
}
