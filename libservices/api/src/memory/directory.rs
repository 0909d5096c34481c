//! The names of one directory, with listing cookies that stay valid across insertions and removals.

use std::collections::BTreeMap;

/// What a name leads to.
#[derive(Clone, Copy, Debug)]
struct Slot {
    cookie: u64,
    inode: u64,
}

/// Names and their cookies. A name keeps its cookie as long as it exists, whatever it leads to.
#[derive(Debug)]
pub(super) struct Directory {
    /// The directory above; the root is its own.
    pub(super) parent: u64,
    names: BTreeMap<Box<[u8]>, Slot>,
    order: BTreeMap<u64, Box<[u8]>>,
    last_cookie: u64,
}

impl Directory {
    pub(super) fn new(parent: u64) -> Self {
        Self { parent, names: BTreeMap::new(), order: BTreeMap::new(), last_cookie: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub(super) fn get(&self, name: &[u8]) -> Option<u64> {
        self.names.get(name).map(|slot| slot.inode)
    }

    /// Makes `name` lead to `inode`, whether or not it exists.
    pub(super) fn set(&mut self, name: &[u8], inode: u64) {
        if let Some(slot) = self.names.get_mut(name) {
            slot.inode = inode;
            return;
        }
        self.last_cookie += 1;
        self.names.insert(name.into(), Slot { cookie: self.last_cookie, inode });
        self.order.insert(self.last_cookie, name.into());
    }

    pub(super) fn remove(&mut self, name: &[u8]) {
        if let Some(slot) = self.names.remove(name) {
            self.order.remove(&slot.cookie);
        }
    }

    /// Names, cookies and inodes after `cookie`.
    pub(super) fn after(&self, cookie: u64) -> impl Iterator<Item = (&[u8], u64, u64)> {
        let rest = cookie.checked_add(1).map(|first| self.order.range(first..));
        rest.into_iter().flatten().map(|(&cookie, name)| (&**name, cookie, self.names[name].inode))
    }
}
