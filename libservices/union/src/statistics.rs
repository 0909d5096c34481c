//! The statistics of a union.

use crate::Union;
use crate::sync::lock;
use poolfs_types::{FileType, NodeId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Most damaged sketches that are remembered by name.
const DAMAGED_MAX: usize = 1024;

/// A sketch that answers `EIO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file, relative to the union's root.
    pub path: String,
    /// What is wrong with it.
    pub cause: String,
}

/// What a union has done since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Files copied up as sketches (or, when they were to be truncated or were empty, as empty files).
    pub sketches: u64,
    /// Blocks of 4096 bytes that moved to the upper branch because they were written.
    pub blocks_moved: u64,
    /// Blocks of which a part had to be copied from below.
    pub blocks_copied: u64,
    /// Blocks written in part whose rest is still to be copied from below.
    pub blocks_in_transit: u64,
    /// Files written for the first time that are still to be copied up.
    pub copy_ups_deferred: u64,
    /// Directories, links and special files copied up.
    pub objects_copied: u64,
    /// Sketches that answer `EIO`, at most 1024.
    pub damaged: Vec<Damage>,
    /// Nodes in memory.
    pub nodes: u64,
    /// Open handles.
    pub handles: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    sketches: AtomicU64,
    blocks_moved: AtomicU64,
    blocks_copied: AtomicU64,
    objects_copied: AtomicU64,
    settled: AtomicU64,
    damaged: Mutex<BTreeMap<NodeId, Arc<str>>>,
}

impl Counters {
    pub fn copied_up(&self, file_type: FileType) {
        let counter = if file_type == FileType::Regular { &self.sketches } else { &self.objects_copied };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub fn moved(&self, moved: u64, copied: u64) {
        self.blocks_moved.fetch_add(moved, Ordering::Relaxed);
        self.blocks_copied.fetch_add(copied, Ordering::Relaxed);
    }

    /// Something that waited was brought further towards the disk.
    pub fn settled(&self) {
        self.settled.fetch_add(1, Ordering::Relaxed);
    }

    /// Remembers a damaged node; whether it is a new one, which then has to be pinned.
    pub fn damage(&self, node: NodeId, cause: &Arc<str>) -> bool {
        let mut damaged = lock(&self.damaged);
        if damaged.len() >= DAMAGED_MAX || damaged.contains_key(&node) {
            return false;
        }
        damaged.insert(node, cause.clone());
        true
    }
}

impl Union {
    /// How often something was brought further towards the disk that waited for it: a sketch, a file to be copied up, blocks in transit. Whoever waits
    /// for a sync sees by that how it goes on.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.statistics.settled.load(Ordering::Relaxed)
    }

    /// Whether so few scattered blocks have moved that a write to any file is far from being refused with ENOMEM.
    #[must_use]
    pub fn knows_few_places(&self) -> bool {
        self.sectors.are_few()
    }

    /// What the union has done since it was opened, and which files it cannot read.
    #[must_use]
    pub fn statistics(&self) -> Statistics {
        let counters = &self.statistics;
        let known: Vec<_> = lock(&counters.damaged).iter().map(|(id, cause)| (*id, cause.clone())).collect();
        let damaged = known
            .into_iter()
            .filter_map(|(id, cause)| {
                let node = self.nodes.get(id)?;
                // The path takes the same lock, which nobody may hold twice.
                let removed = node.read().removed;
                (!removed).then(|| Damage { path: node.path(), cause: cause.to_string() })
            })
            .collect();
        Statistics {
            sketches: counters.sketches.load(Ordering::Relaxed),
            blocks_moved: counters.blocks_moved.load(Ordering::Relaxed),
            blocks_copied: counters.blocks_copied.load(Ordering::Relaxed),
            blocks_in_transit: self.copies.len() as u64,
            copy_ups_deferred: self.deferred.len() as u64,
            objects_copied: counters.objects_copied.load(Ordering::Relaxed),
            damaged,
            nodes: self.nodes.len() as u64,
            handles: self.handles.len() as u64,
        }
    }
}
