//! The table of held objects, with the usage that is counted for each.

use crate::account::{Account, tree_bytes};
use hashbrown::HashMap;
use poolfs_libservice::Branch;
use poolfs_types::limits::{BLOCK_SIZE, XATTR_VALUE_MAX};
use poolfs_types::{Attributes, Caller, Errno, HandleId, NodeId};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shards of each table; a power of two.
const SHARDS: usize = 16;

/// Backends hold room ready behind the end of files that grow (XFS: from 64 KiB to as much again as the file has), and take it back later. So
/// much and more behind the end is not counted, unless it was asked for.
const READY_BYTES: u64 = 60 << 10;

/// The unit of [`Attributes::blocks`].
const SECTOR_BYTES: u64 = 512;

#[derive(Debug, Default)]
struct Counted {
    /// references and handles
    held: u64,
    bytes: u64,
    /// where the room ends that was asked for beyond the size
    asked_for: u64,
}

pub(crate) struct Nodes {
    counted: Vec<Mutex<HashMap<NodeId, Counted>>>,
    handles: Vec<Mutex<HashMap<HandleId, NodeId>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In memory, what each name of an object takes, with the object itself: an inode and an entry of a directory of Linux take less.
const NAME_BYTES: u64 = 2048;
/// The same of an extended attribute beside its name and its value.
const ATTRIBUTE_BYTES: u64 = 128;
/// Most bytes of a list of names that Linux gives (`XATTR_LIST_MAX`): of an object that has more nobody knows what they are.
const LIST_BYTES_MAX: usize = 64 << 10;

/// Whether one more attribute of this name leaves the list of names one that can be read. So it is, too, where the object has the attribute.
pub(crate) fn lists_one_more(below: &Branch, node: NodeId, name: &[u8]) -> bool {
    let listed = below.listxattr(&Caller::ROOT, node);
    listed.is_ok_and(|listed| {
        let bytes: usize = listed.iter().map(|known| known.len() + 1).sum();
        bytes + name.len() < LIST_BYTES_MAX || listed.iter().any(|known| known == name)
    })
}

/// What an attribute takes in memory.
pub(crate) fn attribute_bytes(name: &[u8], value: usize) -> u64 {
    (name.len() + value) as u64 + ATTRIBUTE_BYTES
}

/// What an object takes. Attributes that cannot be looked at, by somebody else's doing, take what was `known` of the object.
pub(crate) fn taken(
    account: &Account,
    below: &Branch,
    node: NodeId,
    attributes: &Attributes,
    asked_for: u64,
    known: u64,
) -> u64 {
    if !account.is_in_memory() {
        return blocks_taken(attributes, asked_for);
    }
    // Such a filesystem holds nothing ready.
    let blocks = attributes.blocks.saturating_mul(SECTOR_BYTES);
    let names = if attributes.is_directory() { 1 } else { u64::from(attributes.links).max(1) };
    let own =
        blocks.saturating_add(tree_bytes(blocks, attributes.size)).saturating_add(names.saturating_mul(NAME_BYTES));
    match below.listxattr(&Caller::ROOT, node) {
        Ok(listed) => {
            let of_each = listed.iter().map(|name| match below.getxattr(&Caller::ROOT, node, name) {
                Ok(value) => attribute_bytes(name, value.len()),
                // It has been removed meanwhile, which is measured next.
                Err(error) if error == Errno::ENODATA => 0,
                Err(_) => attribute_bytes(name, XATTR_VALUE_MAX),
            });
            own.saturating_add(of_each.sum())
        }
        // What has ended meanwhile has none.
        Err(error) if error == Errno::ESTALE => own,
        Err(_) => own.saturating_add(LIST_BYTES_MAX as u64).max(known),
    }
}

fn blocks_taken(attributes: &Attributes, asked_for: u64) -> u64 {
    let bytes = attributes.blocks.saturating_mul(SECTOR_BYTES);
    let needed = attributes.size.max(asked_for).checked_next_multiple_of(BLOCK_SIZE as u64).unwrap_or(u64::MAX);
    if attributes.is_directory() || bytes.saturating_sub(needed) < READY_BYTES { bytes } else { needed }
}

impl Counted {
    fn measure(&mut self, account: &Account, below: &Branch, node: NodeId, attributes: &Attributes) {
        let after = taken(account, below, node, attributes, self.asked_for, self.bytes);
        account.settle(self.bytes, after);
        self.bytes = after;
    }
}

impl Nodes {
    /// A table in which the root, which takes so much, is held for good.
    pub fn new(root: u64) -> Self {
        let nodes = Nodes {
            counted: (0..SHARDS).map(|_| Mutex::default()).collect(),
            handles: (0..SHARDS).map(|_| Mutex::default()).collect(),
        };
        let counted = Counted { held: 1, bytes: root, asked_for: 0 };
        lock(nodes.shard(NodeId::ROOT)).insert(NodeId::ROOT, counted);
        nodes
    }

    fn shard(&self, node: NodeId) -> &Mutex<HashMap<NodeId, Counted>> {
        &self.counted[node.0 as usize % SHARDS]
    }

    fn of_handle(&self, handle: HandleId) -> &Mutex<HashMap<HandleId, NodeId>> {
        &self.handles[handle.0 as usize % SHARDS]
    }

    /// The layers above have got a reference or a handle on `node`, which is in the account.
    pub fn hold(&self, below: &Branch, account: &Account, node: NodeId) {
        let mut shard = lock(self.shard(node));
        let counted = shard.entry(node).or_default();
        counted.held += 1;
        // What nobody held is as the account has it: only calls of holders change it.
        if counted.held == 1
            && let Ok(attributes) = below.getattr(&Caller::ROOT, node)
        {
            counted.bytes = taken(account, below, node, &attributes, 0, 0);
        }
    }

    /// The layers above have got a reference on an object that was made with these attributes.
    pub fn hold_new(&self, below: &Branch, account: &Account, node: NodeId, attributes: &Attributes) {
        let mut shard = lock(self.shard(node));
        let counted = shard.entry(node).or_default();
        counted.held += 1;
        let bytes = taken(account, below, node, attributes, 0, 0);
        account.settle(0, bytes);
        // Others may have found it by its name before: they took it for counted.
        if counted.held == 1 {
            counted.bytes = bytes;
        }
    }

    /// They have given `count` of them back, or are about to. What then has neither name nor holder is counted no more.
    pub fn let_go(&self, below: &Branch, account: &Account, node: NodeId, count: u64) {
        let mut shard = lock(self.shard(node));
        let Some(counted) = shard.get_mut(&node).filter(|_| node != NodeId::ROOT) else { return };
        counted.held = counted.held.saturating_sub(count);
        if counted.held > 0 {
            return;
        }
        match below.getattr(&Caller::ROOT, node) {
            Ok(attributes) if attributes.links > 0 => counted.measure(account, below, node, &attributes),
            Ok(_) => account.settle(counted.bytes, 0),
            Err(error) if error == Errno::ESTALE => account.settle(counted.bytes, 0),
            // It is still there, for all that is known.
            Err(_) => {}
        }
        shard.remove(&node);
    }

    /// What `node` takes may have changed.
    pub fn measure(&self, below: &Branch, account: &Account, node: NodeId) {
        let mut shard = lock(self.shard(node));
        if let Some(counted) = shard.get_mut(&node)
            && let Ok(attributes) = below.getattr(&Caller::ROOT, node)
        {
            counted.measure(account, below, node, &attributes);
        }
    }

    /// Room up to `end` was asked for.
    pub fn ask_for(&self, node: NodeId, end: u64) {
        if let Some(counted) = lock(self.shard(node)).get_mut(&node) {
            counted.asked_for = counted.asked_for.max(end);
        }
    }

    /// Notes the file of a handle.
    pub fn opened(&self, handle: HandleId, node: NodeId) {
        lock(self.of_handle(handle)).insert(handle, node);
    }

    /// The file of a handle.
    pub fn file(&self, handle: HandleId) -> Option<NodeId> {
        lock(self.of_handle(handle)).get(&handle).copied()
    }

    /// Forgets a handle; returns its file.
    pub fn closed(&self, handle: HandleId) -> Option<NodeId> {
        lock(self.of_handle(handle)).remove(&handle)
    }
}
