//! Compact storage of sparse files: BAOverlay's copy-on-write format (BCoW) as a layer, for backends without holes and for upper
//! branches that should grow only with what is written.
//!
//! It assumes that nobody else uses files of the format in the layer below. Begin reading with [`Bcow`], then `format.rs` (what
//! is stored), `file.rs` (one file in memory) and `flush.rs` (the order in which it reaches the disk).
//!
//! **What it does.** A [`Bcow`] passes everything on to the layer below, except the content of files of the format (*compact
//! files*). Their content consists of *units*. A unit is appended to the file below when it is written for the first time, and
//! found by a *block table*: either the only one, or one of many that a root finds. The record of a file with few units says
//! where they are, without a table. An empty file becomes compact when it is extended by some blocks: that is how a sketch
//! begins. All other files are stored as they are. Both kinds exist in one tree.
//!
//! **Two forms** (the paper's section 4.3). [`Layout::Performance`]: one table of a block, with units that are larger in larger
//! files. [`Layout::Space`]: units of one block, and as many tables as there are regions with data. A file that outgrows its
//! table gets a root.
//!
//! **Lasting state.** The file below, and a record in its attribute `trusted.poolfs.bcow`; docs/formats.md draws both. In memory
//! are the record, the tables in use, and whatever of them is ahead of the disk. A crash of the machine loses only what no fsync
//! has promised. For a crash of the process alone, the layer above keeps what was written until [`Libservice::store_deferred`]
//! has stored its places.
//!
//! **Order.** A table or a record names a unit only when its data is on disk. A freed unit is reused only when nothing on disk
//! names it. What was cut off by a truncation stays cut off: the record says so before a byte of it goes, and its limit is lifted
//! when the places on disk agree.
//!
//! **Memory.** The tables of one file and of all files are bounded. Stored tables are dropped and read again; a writer has the
//! others stored first. The roots of all files are bounded as well, and go with the file's place in memory.
//!
//! **Lock order.** First the lock held while room is made for tables; then a node's flush lock, then its content; the tables of
//! nodes and handles last, and only for moments.

#![forbid(unsafe_code)]

pub mod check;
mod content;
mod decoding;
mod file;
mod flush;
mod format;
mod formatting;
mod inline;
mod layer;
mod nodes;
mod table;

use file::Bound;
use flush::Stop;
use format::{ENTRIES, UNIT_SHIFT_MAX, UNIT_SHIFT_MIN};
use nodes::{Node, Nodes, Open, lock};
use poolfs_libservice::{Branch, Finding, Libservice, Outcome, Result, Tally};
use poolfs_types::{Caller, Errno, HandleId, NodeId};
use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most findings of one opening that are logged one by one.
const LOGGED_MAX: u64 = 100;

/// Which of the two forms a new file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// one table, units as large as that takes
    Performance,
    /// units of one block
    Space,
    /// the first for files of up to so many bytes, the second for larger ones
    BySize(u64),
}

impl Layout {
    fn unit_shift(self, size: u64) -> u32 {
        let grown = || {
            let fits = |shift: &u32| (ENTRIES as u64) << shift >= size;
            (UNIT_SHIFT_MIN..UNIT_SHIFT_MAX).find(fits).unwrap_or(UNIT_SHIFT_MAX)
        };
        match self {
            Layout::Performance => grown(),
            Layout::BySize(most) if size <= most => grown(),
            Layout::Space | Layout::BySize(_) => {
                let fits = |shift: &u32| format::reach_max(*shift) >= size;
                (UNIT_SHIFT_MIN..UNIT_SHIFT_MAX).find(fits).unwrap_or(UNIT_SHIFT_MAX)
            }
        }
    }
}

/// What the layer is made of.
pub struct BcowConfig {
    /// Where files are stored.
    pub below: Branch,
    /// The form of new files; nothing: no new file is of the format, and those that are stay so.
    pub layout: Option<Layout>,
    /// Whether every new file is of the format, also one that grows from its begin to its end: where holes take room.
    pub all_files: bool,
    /// How often tables that nobody syncs are brought to disk. Zero: only by sync, fsync and at the end.
    pub flush_interval: Duration,
    /// Most files whose tables may wait for that; beyond it, a writer brings the oldest to disk itself.
    pub dirty_files_max: usize,
    /// Most tables of one file in memory, of about 2 KiB each; beyond it, those on disk go, and a writer brings the others there first.
    pub file_tables_max: usize,
    /// The same of all files.
    pub tables_max: usize,
    /// Most tables of roots, one for each 1 GiB in units of one block, of all files; beyond it, files at rest are as if they had not
    /// been used yet. That of a file being looked at is in memory in any case, so that there may be more while many are.
    pub root_tables_max: usize,
}

impl BcowConfig {
    /// The usual settings: one table for files of up to 16 MiB, every 5 seconds, 4096 files, 1024 tables of a file (2 GiB in units of one
    /// block), 4096 of all, and 8192 of roots.
    #[must_use]
    pub fn new(below: Branch) -> Self {
        BcowConfig {
            below,
            layout: Some(Layout::BySize(16 << 20)),
            all_files: false,
            flush_interval: Duration::from_secs(5),
            dirty_files_max: 4096,
            file_tables_max: 1024,
            tables_max: 4096,
            root_tables_max: 8192,
        }
    }
}

/// The layer.
pub struct Bcow {
    own: Weak<Bcow>,
    below: Branch,
    layout: Option<Layout>,
    all_files: bool,
    /// The root says that there are files of the format.
    is_marked: AtomicBool,
    nodes: Nodes,
    handles: RwLock<hashbrown::HashMap<HandleId, Arc<Open>>>,
    /// the nodes with something to bring to disk, longest waiting first
    dirty: Mutex<VecDeque<Arc<Node>>>,
    dirty_files_max: usize,
    /// how many tables are in memory
    bound: Arc<Bound>,
    /// held by whoever makes room for tables of all files; taken before any lock of a node
    dropping: Mutex<()>,
    flush_interval: Duration,
    stop: Arc<Stop>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Bcow {
    /// The layer over `config.below`, of which nobody else uses files of the format.
    #[must_use]
    pub fn new(config: BcowConfig) -> Arc<Self> {
        let BcowConfig { below, layout, all_files, flush_interval, dirty_files_max, .. } = config;
        let bound = Bound::new(config.file_tables_max, config.tables_max, config.root_tables_max);
        Arc::new_cyclic(|own| Bcow {
            own: own.clone(),
            below,
            layout,
            all_files,
            is_marked: AtomicBool::new(false),
            nodes: Nodes::default(),
            handles: RwLock::default(),
            dirty: Mutex::default(),
            dirty_files_max: dirty_files_max.max(1),
            bound,
            dropping: Mutex::default(),
            flush_interval,
            stop: Arc::default(),
            thread: Mutex::default(),
        })
    }

    /// Whether there may be files of the format in the layer below.
    ///
    /// # Errors
    /// What that layer answers.
    pub fn is_used(below: &Branch) -> Result<bool> {
        match below.getxattr(&Caller::ROOT, NodeId::ROOT, format::ATTRIBUTE) {
            Ok(_) => Ok(true),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// How many tables of files are in memory, without roots.
    #[must_use]
    pub fn tables_in_memory(&self) -> usize {
        self.bound.count()
    }

    /// How many tables of roots.
    #[must_use]
    pub fn root_tables_in_memory(&self) -> usize {
        self.bound.root_count()
    }

    /// Looks at every file of the layer after a crash, and repairs what [`Bcow::check`] does; each thing is logged. How many were repaired.
    /// What is damaged stays so, and is told of when it is used.
    ///
    /// # Errors
    /// As [`Bcow::check`].
    pub fn repair_all(&self) -> Result<u64> {
        let mut told = 0;
        let checked = self.check(true, true, &mut |finding| {
            told += 1;
            let Finding { path, problem, cause, outcome } = finding;
            let problem = problem.name();
            match outcome {
                _ if told > LOGGED_MAX => {}
                Outcome::Repaired => tracing::warn!(path, problem, cause, "repaired after an unclean end"),
                Outcome::Damage | Outcome::Repairable => tracing::error!(path, problem, cause, "a file is damaged"),
            }
        })?;
        let Tally { repaired, damaged, .. } = checked.tally;
        if told > LOGGED_MAX {
            tracing::warn!(repaired, damaged, "more was found than is logged; `poolfs fsck` tells of all");
        }
        Ok(repaired)
    }

    /// Looks at every table of a file after a crash, and mends sectors that were cut while they were written; how many. The file is on disk
    /// again when this returns. Files that are not of the format need nothing.
    ///
    /// # Errors
    /// `EIO` for damage that no crash does; what the layer below answers.
    pub fn repair(&self, node: NodeId) -> Result<u64> {
        let node = self.nodes.get(&self.below, node)?;
        let mended = {
            let mut content = node.write();
            if !content.is_formatted() {
                return Ok(0);
            }
            content.open(&self.below, node.id, true, &self.bound)?.read_all()?
        };
        self.flush(&node)?;
        Ok(mended)
    }

    /// Ends the layer's thread.
    pub fn end_thread(&self) {
        self.stop.stop();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a bcow layer panicked");
        }
    }
}

impl Drop for Bcow {
    fn drop(&mut self) {
        self.end_thread();
        if let Err(error) = self.sync() {
            tracing::error!(%error, "tables of files could not be brought to disk");
        }
    }
}
