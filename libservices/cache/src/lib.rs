//! A user-level page and metadata cache over any layer.
//!
//! **Assumption.** Nobody but this layer changes the layer below, unless that says otherwise
//! ([`poolfs_libservice::Libservice::attach`], `coherence.rs`). Names, absent names, attributes and content are therefore cached without an
//! expiry time, and dropped only for lack of room.
//!
//! **Structure.** One [`CachePool`] per service owns the memory: a budget, a private tmpfs, and the threads
//! that write back and read ahead. One [`Cache`] per branch uses it, shared by all instances that use the branch, so that a
//! file's bytes are in memory once. Begin reading with `cache.rs` (the layer), `node.rs` (one file and its locks) and
//! `node_state.rs` (what is cached of it), then `read.rs`, `write.rs` and `write_back.rs`. What all files share (`pool.rs`, `core.rs`,
//! `file_lists.rs`) is below them, and is generic over what they are where it holds them; `node_table.rs` and `background.rs`, above them,
//! say what is done with them.
//!
//! **Lasting state.** Everything here may be lost at any moment except dirty content and the modification time that belongs to
//! it; both go below within the expire time, or when a file is synced. What of it outlives the process is in `ledger.rs`. Changes
//! of names and attributes, truncations and punched holes go below at once.
//!
//! **Content before names.** A change of names that puts content in the place of other content must not reach the disk before
//! that content: after a power cut between the two, neither the old file nor the new would be left. So a rename over a name, an
//! exchange and a link first write the file's dirty blocks below, before they lock a directory. A file that was truncated to
//! nothing and written again goes below when it is closed. A rename that replaces nothing does not wait: it takes nothing away. A
//! failed write-back fails the call, which then changes no name.
//!
//! **Reading** copies under a lock of the file that readers share, and waits for no other lock. Missing blocks are read from
//! below in pieces of up to 1 MiB, by one thread at a time for the same blocks. Threads of the pool read ahead of sequential
//! readers. Blocks of zeros take no memory.
//!
//! **Writing** reads a block from below only if a part of it is overwritten. When the layer below is nearly full, when too much
//! is dirty and cannot be written back, or when there is no memory, writes go through, so that the writer sees the error. Data
//! accepted before stays dirty and readable, and its write-back is retried; each handle that was open is told of the failure
//! once.
//!
//! **Times.** A file shows the time of the write, not of the write-back: the modification time is set below after the data. The
//! change time cannot be set; after a node has left the cache, it may be seen to have moved by up to the write-back's delay.
//!
//! **Clients** may read cached content without a request ([`poolfs_ipc::segment`]): a file that they ask for has a map in the
//! tmpfs, which says which blocks of its segment are there. The kernel may map **programs** by itself, from a layer in which
//! nothing changes: such a file is cached as a whole, and stays ([`poolfs_libservice::SharedContent::text`]), up to a quarter of the
//! memory. The same holds for files that processes are given to map ([`poolfs_libservice::SharedContent::lend`]), of the same layers
//! and within the same quarter.
//!
//! **Architecture invariant**: no call below is made while a file's state is locked, and no descriptor, handle below or thread is
//! held per cached file.

#![forbid(unsafe_code)]

mod answers;
mod attributes;
mod background;
mod blocks;
mod budget;
mod buffer;
mod cache;
mod cache_pool;
mod carried;
mod client_reads;
mod coherence;
mod config;
mod content;
mod core;
mod crash_recovery;
mod deferred;
mod failure;
mod file_lists;
mod flushers;
mod handles;
mod huge;
mod idle;
mod layer;
mod leaving;
mod ledger;
mod limits;
mod map_pages;
mod mmap_exports;
mod moves;
mod names;
mod node;
mod node_state;
mod node_table;
mod node_use;
mod page_tree;
mod pins;
mod pool;
mod ranges;
mod read;
mod read_ahead;
mod segments;
mod shortage;
mod state_directory;
mod sync;
mod text;
mod version;
mod view;
mod weighing;
mod write;
mod write_back;

pub use self::core::Usage;
pub use cache::Cache;
pub use cache_pool::{CacheMemory, CachePool};
pub use config::{CacheConfig, CacheError, CacheStatistics, LIMIT_BYTES_MIN};
pub use crash_recovery::{CrashRecovery, Salvaged, Waiting};
pub use segments::SharedNotice;
pub use state_directory::{BranchKey, StateDirectory, open_private};
