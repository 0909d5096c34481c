//! A union filesystem layer: one writable branch above any number of read-only ones, with copy-up of blocks instead of files.
//!
//! **Assumptions.** Lower branches do not change while they are part of a union. A lower file that did is noticed by size and
//! time when its sketch is opened, and answers `EIO`. One union at a time uses an upper branch.
//!
//! **Where to begin.** `node.rs` and `resolve.rs` (how a name becomes a node), `copyup.rs` and `sketch.rs` (how a lower file
//! becomes a sketch), `data.rs` (how blocks are read and moved), `durable.rs` (the order in which they reach the disk).
//!
//! **What it does.** A [`Union`] shows the merged directories of its branches. The first change of a lower regular file makes a
//! *sketch*: an upper file of the same size and attributes without content. From then on each block of 4096 bytes is either in
//! the lower file or, once it has been written, in the upper one; a bitmap says which. Opening copies nothing.
//!
//! **Lasting state.** Everything in the upper branch, as docs/formats.md draws it. In memory are the node table, the bitmaps of
//! sketches in use, and the bits that are ahead of the disk. A crash of the machine loses only what no fsync has promised. The
//! death of the process alone loses nothing if there is a journal.
//!
//! **Order.** Bits reach the disk after the data of their blocks, names of the copy-up before the fsync that needs them returns.
//! Every change of names is one rename of the upper branch, or a sequence in which every intermediate state is an allowed result.
//! The content of a file that replaces another is in the upper branch before its name is.
//!
//! **Lock order.** The lock of changes (shared by all that change what is shown, exclusive for a consistent view of everything),
//! the lock of the paths of files whose copy-up is deferred, the namespace lock (shared by lookups, exclusive for changes of
//! names and copy-ups), a node's flush lock, a node's state, the journal, the tables of nodes and handles. Reads and writes of
//! file content take a node's state only.

#![forbid(unsafe_code)]

mod ahead;
mod attributed;
mod attributes;
mod background;
mod bitmap;
mod branch;
mod changes;
pub mod check;
mod content_first;
mod copyup;
mod data;
mod deferred;
mod differences;
mod durable;
mod exchange;
mod exchange_note;
mod first_write;
mod flatten;
mod format;
mod handles;
mod in_transit;
mod inode;
mod journal;
mod journal_records;
mod layer;
mod links;
mod listing;
mod lower_path;
mod marks;
mod move_ahead;
mod names;
mod needed;
mod node;
mod owners;
mod pending_names;
mod pinned;
mod place;
mod rename;
mod replay;
mod resolve;
mod sketch;
mod sketch_files;
mod statistics;
mod sync;
mod temporary;
mod transit;
mod upper_names;
mod waiting;
mod walks;
mod work;

pub use statistics::{Damage, Statistics};

use branch::LowerNode;
use deferred::Deferred;
use journal::Journal;
use lower_path::LowerPath;
use node::{Content, NewNode, Nodes, State};
use poolfs_libservice::{Branch, Error, Headroom, Held, Libservice, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, NodeId};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

/// Most lower branches of one union.
pub const LOWERS_MAX: usize = 500;

/// Most bytes of a layer id.
pub const LAYER_ID_MAX: usize = 255;

/// A read-only branch.
pub struct Lower {
    /// What names the layer for good, whatever union it is part of: a digest, or the absolute path of a directory.
    pub layer_id: String,
    /// The layer. Nothing is ever changed in it.
    pub layer: Arc<dyn Libservice>,
    /// Whether it is a union itself: a device 0/0 that it shows is one, and no whiteout.
    pub is_union: bool,
}

impl Lower {
    /// Whether an object of it is a whiteout. Its node must be held by the caller.
    fn is_whiteout(&self, node: NodeId, attributes: &Attributes) -> Result<bool> {
        Ok(!self.is_union && marks::is_lower_whiteout(&*self.layer, node, attributes)?)
    }
}

/// What a union is made of.
pub struct UnionConfig {
    /// The writable branch.
    pub upper: Arc<dyn Libservice>,
    /// The same layer, with the same nodes, for what the union has to store to keep what was accepted and to end in order, where `upper` may refuse
    /// it for lack of room; nothing: `upper`.
    pub unlimited_upper: Option<Arc<dyn Libservice>>,
    /// The read-only branches, topmost first.
    pub lowers: Vec<Lower>,
    /// How often bitmaps of sketches that nobody syncs are brought to disk. Zero: only by sync, fsync and at the end.
    pub flush_interval: Duration,
    /// Most sketches whose bitmap may wait for that; beyond it, a writer brings the oldest one to disk itself.
    pub dirty_sketches_max: usize,
    /// Most blocks that may be in transit: written in part, the rest not copied from below yet. Fewer where the journal is short. Zero: every such
    /// write copies at once.
    pub transit_blocks_max: usize,
    /// Most files that may have been written for the first time without having been copied up yet. Zero: every first write copies up at once.
    pub deferred_copy_ups_max: usize,
    /// Most bytes of a generation of the journal, by which what is accepted outlives the process; there may be two, and each twice as long for a moment. Only over a layer that keeps back what is on hold, and
    /// whose content outlives the process. Zero: there is no journal.
    pub journal_bytes: u64,
    /// Most bytes that the listings of open directories may hold together; only those of several branches hold any.
    pub listings_bytes_max: u64,
    /// Where those bytes are counted with others of the process; nothing: nowhere.
    pub listings_room: Option<Arc<dyn Headroom>>,
    /// Where long paths of lower branches are counted, which nodes keep, without being refused; nothing: nowhere.
    pub paths_room: Option<Arc<dyn Headroom>>,
}

impl UnionConfig {
    /// A union of these branches with the usual settings: 5 seconds, 4096 sketches, 16384 blocks, 1024 files, no journal, 64 MiB.
    #[must_use]
    pub fn new(upper: Arc<dyn Libservice>, lowers: Vec<Lower>) -> Self {
        UnionConfig {
            upper,
            unlimited_upper: None,
            lowers,
            flush_interval: Duration::from_secs(5),
            dirty_sketches_max: 4096,
            transit_blocks_max: 16384,
            deferred_copy_ups_max: 1024,
            journal_bytes: 0,
            listings_bytes_max: 64 << 20,
            listings_room: None,
            paths_room: None,
        }
    }
}

/// The union of one writable and many read-only branches.
pub struct Union {
    own: Weak<Union>,
    upper: Branch,
    lowers: Vec<Lower>,
    /// the path of their roots
    lower_root: LowerPath,
    work: work::Work,
    needed: needed::Needed,
    /// set when it is opened, if anything does
    waiting: OnceLock<waiting::Waiting>,
    /// records whose bytes were not on disk when it was opened
    behind: OnceLock<Opened>,
    nodes: Nodes,
    handles: handles::Handles,
    /// shared by whoever changes what is shown, for as long as that takes; owned by whoever has to see one state of all
    changing: RwLock<()>,
    namespace: RwLock<()>,
    dirty: durable::Dirty,
    dirty_sketches_max: usize,
    /// of bitmaps, in memory
    sectors: Arc<bitmap::Sectors>,
    statistics: Arc<statistics::Counters>,
    listings: Arc<listing::Memory>,
    calls: Arc<durable::Calls>,
    journal: Arc<Journal>,
    copies: Arc<transit::Copies>,
    deferred: Arc<Deferred>,
    /// zero: never
    flush_interval: Duration,
    background: background::Background,
}

impl Union {
    /// Opens the union: makes or checks the work directory, repairs what an unclean end left, as [`check::Check`] does, and makes good what a
    /// journal says.
    ///
    /// # Errors
    /// `EINVAL` for unusable layer ids, `EROFS` for an upper branch that refuses changes, `EIO` for one written by another release, or copied in part; else
    /// what the branches answer.
    pub fn open(config: UnionConfig) -> Result<Arc<Self>> {
        check_layers(&config.lowers)?;
        if config.upper.read_only() {
            return Err(Error::new(Errno::EROFS, "the upper branch of a union has to be writable"));
        }
        let upper = config.unlimited_upper.as_ref().unwrap_or(&config.upper);
        let (mut work, unclean) = work::Work::open(upper)?;
        if unclean {
            check::repair_after_unclean_end(upper)?;
        }
        work.find_owners(config.paths_room.as_deref())?;
        let union = Self::assemble(config, work)?;
        union.replay()?;
        Ok(union)
    }

    /// Opens the union for reading, as its last use has left it: nothing of it is ever changed, and whatever would is answered `EROFS`. It
    /// may be a lower branch of any number of others.
    ///
    /// # Errors
    /// `EINVAL` for unusable layer ids and an upper branch that can be written, `EBUSY` for an upper branch that is open or did not end in good order, `EIO` for one that was written by
    /// another release, or is none; else what the branches answer.
    pub fn open_frozen(config: UnionConfig) -> Result<Arc<Self>> {
        check_layers(&config.lowers)?;
        if !config.upper.read_only() {
            return Err(Error::new(Errno::EINVAL, "the upper branch of a frozen union has to be read-only"));
        }
        let work = work::Work::open_frozen(&config.upper)?;
        Self::assemble(config, work)
    }

    fn assemble(config: UnionConfig, work: work::Work) -> Result<Arc<Self>> {
        let UnionConfig { upper, lowers, flush_interval, dirty_sketches_max, .. } = config;
        let deferred = Arc::new(Deferred::new(config.deferred_copy_ups_max));
        let UnionConfig { transit_blocks_max, journal_bytes, listings_bytes_max, listings_room, .. } = config;
        let lower_root = LowerPath::root(config.paths_room);
        let nodes = Nodes::new(root(&upper, &lowers, &lower_root)?);
        let needed = needed::Needed::read(&work.upper, &work.top, &lowers)?;
        let calls = Arc::new(durable::Calls::default());
        let statistics = Arc::new(statistics::Counters::default());
        let journal = Arc::new(Journal::new(&work.upper, journal_bytes)?);
        let transit_blocks_max = transit_blocks_max.min(Journal::transit_blocks_max(journal_bytes));
        let copies = Arc::new(transit::Copies::new(&upper, &statistics, transit_blocks_max, &journal));
        Ok(Arc::new_cyclic(|own| Union {
            own: own.clone(),
            upper,
            lowers,
            lower_root,
            work,
            needed,
            waiting: OnceLock::new(),
            behind: OnceLock::new(),
            nodes,
            handles: handles::Handles::default(),
            changing: RwLock::new(()),
            namespace: RwLock::new(()),
            dirty: durable::Dirty::default(),
            dirty_sketches_max: dirty_sketches_max.max(1),
            sectors: Arc::default(),
            statistics,
            listings: Arc::new(listing::Memory::new(listings_bytes_max, listings_room)),
            calls,
            journal,
            copies,
            deferred,
            flush_interval,
            background: background::Background::default(),
        }))
    }

    /// Ends the threads of the union, which may refer to it: from here on it ends with its owner's last reference. What is
    /// not on disk then is brought there by sync, fsync and the end.
    pub fn end_threads(&self) {
        self.calls.end();
        self.copies.stop();
        self.deferred.stop();
        self.background.join();
    }

    /// The layers that files of the upper branch need, or needed once, as far as it is noted there, and that are not among the lower branches: what
    /// of these files is in a layer answers `EIO`.
    #[must_use]
    pub fn missing_layers(&self) -> &[String] {
        self.needed.missing()
    }

    /// Where nodes are counted that nobody refers to any more and that stay, because others need them; they are not refused there. Set once.
    pub fn set_pinned_room(&self, room: Arc<dyn Headroom>) {
        self.nodes.set_pinned_room(room);
    }

    fn names(&self) -> RwLockReadGuard<'_, ()> {
        self.namespace.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn names_mut(&self) -> RwLockWriteGuard<'_, ()> {
        self.namespace.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Union {
    fn drop(&mut self) {
        self.end_threads();
        if self.work.is_frozen() {
            return;
        }
        let ended = self
            .sync()
            .and_then(|()| self.store_behind())
            .and_then(|()| self.journal.end_all())
            .and_then(|()| self.work.close());
        if let Err(error) = ended {
            tracing::error!(%error, "the union did not end cleanly; orphans are swept when it is opened again");
        }
    }
}

/// Whether the last union over this upper branch has ended in good order, or there was none.
///
/// # Errors
/// What the branch answers.
pub fn has_ended_cleanly(upper: &Arc<dyn Libservice>) -> Result<bool> {
    work::has_ended_cleanly(upper)
}

/// Whether a directory was the upper branch of a union, so that only a union can tell what it shows.
///
/// # Errors
/// `EIO` for one that was written by another release; what the branch answers.
pub fn was_upper(branch: &Arc<dyn Libservice>) -> Result<bool> {
    work::was_upper(branch)
}

fn check_layers(lowers: &[Lower]) -> Result<()> {
    if lowers.len() > LOWERS_MAX {
        return Err(Error::new(Errno::EINVAL, format!("a union has at most {LOWERS_MAX} lower branches")));
    }
    for (at, lower) in lowers.iter().enumerate() {
        let id = &lower.layer_id;
        if id.is_empty() || id.len() > LAYER_ID_MAX || id.contains('\0') {
            return Err(Error::new(Errno::EINVAL, format!("\"{}\" cannot be a layer id", id.escape_default())));
        }
        if lowers[..at].iter().any(|other| other.layer_id == *id) {
            return Err(Error::new(Errno::EINVAL, format!("two lower branches have the layer id {id}")));
        }
    }
    Ok(())
}

/// The root directory: the roots of all branches.
fn root(upper: &Branch, lowers: &[Lower], path: &LowerPath) -> Result<NewNode> {
    let marks = marks::Marks::read(&**upper, NodeId::ROOT)?;
    let attributes = upper.getattr(&Caller::ROOT, NodeId::ROOT)?;
    let mut merged = Vec::new();
    for (layer, lower) in lowers.iter().enumerate().filter(|_| !marks.opaque) {
        let held = Arc::new(Held::new(&lower.layer, NodeId::ROOT));
        merged.push(LowerNode { layer, held, path: path.clone() });
        if marks::Marks::read(&*lower.layer, NodeId::ROOT)?.opaque {
            break;
        }
    }
    Ok(NewNode {
        inode: inode::shown(inode::UPPER, attributes.inode),
        file_type: FileType::Directory,
        state: State {
            upper: Some(Arc::new(Held::new(upper, NodeId::ROOT))),
            lowers: merged,
            names: Vec::new(),
            removed: false,
            content: Content::Plain,
            first_write: None,
            is_copied_up_now: false,
            index_links: None,
            origin: false,
            lower_path: Some(path.clone()),
            whiteouts: marks.whiteouts,
            impure: marks.impure,
            subdirectories: None,
        },
    })
}
