//! The user-level page and metadata cache over any layer.
//!
//! One [`CachePool`] per service owns the memory: a budget that is a hard bound, a tmpfs that is mounted nowhere, and
//! the threads that write back and read ahead. One [`Cache`] per branch stands on it, shared by all instances that use
//! the branch, so that a file's bytes live once.
//!
//! **Assumption.** Nobody but this layer changes the layer below (the mode called `private`). Names, absent names,
//! attributes and content are therefore kept without an age and dropped only for lack of room.
//!
//! **What is lasting and what is not.** Everything here may be lost at any moment except dirty content and the
//! modification time that belongs to it; both go below within the expire time, or when a file is synced. Changes of names
//! and attributes, truncations and punched holes go below at once.
//!
//! **Content before names.** Names must not come before the content that they put in another's place, or a power cut between the two would
//! leave neither the old file nor the new. So a rename over a name, an exchange and a link write the file's dirty blocks below first, before
//! they lock a directory; and a file that was truncated to nothing goes below when it is closed. A rename that replaces nothing does not
//! wait: it takes nothing away. A failed write-back fails the call, which then changes no name.
//!
//! **Reading** copies under a lock of the file that readers share, and no other lock is waited for. What is missing
//! is read from below in pieces of up to 1 MiB, by one thread at a time for the same blocks, and sequential readers are
//! read ahead of by threads of the pool. Blocks of zeros take no memory.
//!
//! **Writing** reads a block from below only when a part of it is overwritten. When the layer below is nearly full,
//! when too much is dirty and cannot be written back, or when there is no memory, writes go through, so that the writer
//! sees the error. What was accepted before stays dirty and readable and is tried again; each handle that was open hears of
//! the failure once.
//!
//! **Times.** A file shows the time of the write, not of the write-back: the modification time is set below after the
//! data. The change time cannot be set; after a node has left the cache it may be seen to have moved by up to the
//! write-back's delay.
//!
//! **Clients** may read what is cached without asking ([`poolfs_ipc::segment`]): a file that they ask for has a map in the tmpfs,
//! which shows what of its segment is there. The kernel may map **programs** by itself, of a layer in which nothing is changed:
//! such a file is there as a whole, and stays ([`poolfs_libservice::Libservice::text`]), up to a quarter of the memory. So is what
//! processes are given to map ([`poolfs_libservice::Libservice::lend`]), of the same layers and within the same quarter.
//!
//! **Architecture invariant**: no call below is made while a file's state is locked, and no descriptor, handle below or
//! thread is held per cached file.

#![forbid(unsafe_code)]

mod answers;
mod attributes;
mod blocks;
mod budget;
mod buffer;
mod cache;
mod carried;
mod config;
mod content;
mod core;
mod deferred;
mod handles;
mod huge;
mod idle;
mod layer;
mod leaving;
mod ledger;
mod loans;
mod map_pages;
mod moves;
mod names;
mod node;
mod pins;
mod pool;
mod ranges;
mod read;
mod read_ahead;
mod remains;
mod segments;
mod shortage;
mod state_directory;
mod sync;
mod text;
mod view;
mod write;
mod write_back;

pub use cache::Cache;
pub use config::{CacheConfig, CacheError, CacheStatistics, LIMIT_BYTES_MIN};
pub use ledger::BranchKey;
pub use pool::{CacheMemory, CachePool};
pub use remains::{Remains, Salvaged, Waiting};
pub use segments::SharedNotice;
pub use state_directory::{StateDirectory, open_private};
