//! The life of a layer's nodes: how they come into its table, who refers to them, and when they go.

use crate::core::Core;
use crate::file_lists::FileLists;
use crate::idle::Layer;
use crate::ledger::Recorder;
use crate::node::Node;
use crate::pool::Pool;
use crate::sync::{lock, read, write};
use poolfs_libservice::{Entry, Libservice};
use poolfs_types::{Attributes, FileType, NodeId, Timestamp};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Idle nodes looked at when one becomes idle and there are too many, in its own layer and in another one of the pool.
const TRIM_STEPS: usize = 4;

impl Core<Node> {
    /// That of a layer of which only the root is known.
    pub(crate) fn new(
        pool: &Arc<Pool>,
        lists: &Arc<FileLists<Node>>,
        below: Arc<dyn Libservice>,
        recorder: Option<Recorder>,
    ) -> Arc<Self> {
        let core = Self::empty(Arc::clone(pool), Arc::clone(lists), below, recorder);
        let root = Node::new(&core, NodeId::ROOT, unknown_directory(), true);
        write(core.shard(NodeId::ROOT)).insert(NodeId::ROOT, root);
        let layer = Arc::downgrade(&core);
        core.pool.idle.add(layer);
        core
    }

    /// A node with one more reference for the layer above.
    pub(crate) fn reference(&self, id: NodeId) -> Option<Arc<Node>> {
        let shard = read(self.shard(id));
        let node = shard.get(&id)?;
        node.refs.fetch_add(1, Ordering::AcqRel);
        Some(Arc::clone(node))
    }

    /// The node of an entry that the layer below returned (and whose reference this layer now owns), with one reference
    /// for the layer above. When something has outdated answers since `removals`, the entry may be older than what a node that left wrote.
    pub(crate) fn adopt(self: &Arc<Self>, entry: &Entry, removals: u64) -> Arc<Node> {
        let mut shard = write(self.shard(entry.node));
        let node = shard
            .entry(entry.node)
            .or_insert_with(|| Node::new(self, entry.node, entry.attributes, removals != self.removals()));
        node.below_refs.fetch_add(1, Ordering::AcqRel);
        node.refs.fetch_add(1, Ordering::AcqRel);
        Arc::clone(node)
    }

    /// Gives back references of the layer above.
    pub(crate) fn forget(&self, id: NodeId, count: u64) {
        let node = {
            let shard = read(self.shard(id));
            let Some(node) = shard.get(&id) else { return };
            let less = |refs: u64| Some(refs.saturating_sub(count));
            let before = node.refs.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
            if before.is_ok_and(|refs| refs > count) {
                return;
            }
            Arc::clone(node)
        };
        self.reconsider(&node);
    }

    /// Something gave up a node: drop it if it has no name, else remember that it is idle.
    pub(crate) fn reconsider(&self, node: &Arc<Node>) {
        if node.id == NodeId::ROOT || node.refs.load(Ordering::Acquire) > 0 || node.in_use() {
            return;
        }
        if read(&node.state).orphan {
            self.remove(node);
        } else if !node.idle.swap(true, Ordering::AcqRel) {
            let count = self.push_idle(node.id);
            if count > self.pool.config.idle_nodes_max {
                self.trim(TRIM_STEPS);
                // Layers in which nothing happens give way too.
                if let Some(other) = self.pool.idle.next() {
                    other.trim(TRIM_STEPS);
                }
            }
        }
    }

    /// Takes a node that nobody refers to out of the table and gives its references back below.
    fn remove(&self, node: &Arc<Node>) {
        {
            let mut shard = write(self.shard(node.id));
            let current = shard.get(&node.id).is_some_and(|current| Arc::ptr_eq(current, node));
            // A reference may have been taken, or bytes written, since the caller looked.
            let kept = {
                let state = read(&node.state);
                state.is_unsettled() && !state.orphan
            };
            if !current || kept || !node.try_kill() {
                return;
            }
            shard.remove(&node.id);
            self.removals.fetch_add(1, Ordering::AcqRel);
        }
        self.end(node);
    }

    /// Drops the content of a node that nobody finds any more, and lets it go below.
    fn end(&self, node: &Arc<Node>) {
        node.taking_away(|| node.drop_content());
        self.below.forget(node.id, node.below_refs.load(Ordering::Acquire));
        if std::mem::take(&mut write(&node.state).is_leaving) {
            self.leaving.leave();
        }
    }

    /// Drops every idle, clean node.
    pub(crate) fn trim_all(&self) {
        self.trim(self.idle_nodes());
    }

    /// Drops all nodes: the layer is ending.
    pub(crate) fn clear(&self) {
        while self.pop_idle().is_some() {}
        for shard in &self.shards {
            let nodes = std::mem::take(&mut *write(shard));
            for node in nodes.into_values() {
                node.kill();
                // A write-back under way needs the content to its end.
                let _flush = lock(&node.flush);
                self.end(&node);
            }
        }
    }

    /// The files of this layer that are dirty or not stored below, oldest first.
    pub(crate) fn dirty_files(self: &Arc<Self>) -> Vec<Arc<Node>> {
        self.lists.dirty_files(usize::MAX, |node| Arc::ptr_eq(&node.core, self))
    }
}

impl Layer for Core<Node> {
    fn trim(&self, steps: usize) {
        for _ in 0..steps {
            let Some(id) = self.pop_idle() else { return };
            let Some(node) = self.get(id) else { continue };
            node.idle.store(false, Ordering::Release);
            if node.refs.load(Ordering::Acquire) > 0 || node.in_use() {
                continue;
            }
            if read(&node.state).is_unsettled() {
                self.pool.hurry();
                if !node.idle.swap(true, Ordering::AcqRel) {
                    self.push_idle(id);
                }
            } else {
                self.remove(&node);
            }
        }
    }

    fn give_up_answers(&self) {
        if self.answers.used() > 0 {
            self.nodes().iter().for_each(|node| write(&node.state).give_up_answers());
        }
    }
}

fn unknown_directory() -> Attributes {
    let never = Timestamp::default();
    Attributes {
        inode: 1,
        file_type: FileType::Directory,
        permissions: 0,
        links: 2,
        uid: 0,
        gid: 0,
        device: 0,
        size: 0,
        blocks: 0,
        accessed: never,
        modified: never,
        changed: never,
        change: 0,
    }
}
