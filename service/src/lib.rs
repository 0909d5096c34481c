//! The filesystem service: one process per pool that serves the pool's filesystem instances.
//!
//! It assumes Linux, and root rights when it starts. Begin reading with [`Request`], then [`Instance::dispatch`], then [`stack`]
//! for the layers and [`service`] for how instances begin and end.
//!
//! A request arrives at one of two fronts, is turned into the one request type ([`Request`]), and is served by one function
//! ([`Instance::dispatch`]) down the instance's stack of layers:
//!
//! ```text
//! FUSE (the kernel)           \
//!                              Request -> Instance::dispatch -> union -> cache -> local
//! queue front (shared memory) /            |
//!                                          access, set-id bits, handles, nodes, statistics, notifications
//! ```
//!
//! **Invariants.** Only [`stack`] names concrete layers. Nothing behind a front trusts a peer's bytes. There is one permission
//! function ([`access`]). Handlers of FUSE requests never wait for a notification to the kernel; requests of the user-level path
//! that change what the kernel may cache answer only after the kernel was told. There is no async runtime, and every table and
//! queue has a bound.
//!
//! Nothing here is lasting state: what fsync promised is in the layers' backends, and a new service mounts it again.

#![forbid(unsafe_code)]

pub mod access;
mod bare_threads;
pub mod confinement;
pub mod control;
mod cpus;
mod dispatch;
mod ends;
mod exclusion;
pub mod failures;
mod flushes;
pub mod fuse;
pub mod guard;
mod handles;
mod in_doubt;
mod in_flight;
mod instance;
mod jobs;
mod last_flush;
mod layer_archive;
pub mod leases;
pub mod memory;
mod mount_table;
mod mounted;
mod nodes;
mod notify;
mod outside;
mod page_expiry;
mod passthrough;
pub mod pool_memory;
pub mod process;
pub mod queue_front;
mod request;
pub mod service;
pub mod shares;
pub mod spans;
pub mod stack;
mod statistics;
mod sync;
mod transfers;
mod underway;
mod walk;

pub use handles::{HANDLES_MAX, HandleTable, OpenFile};
pub use instance::{Adopter, Instance};
pub use nodes::content::KernelView;
pub use nodes::held::{NAMES_HELD_MAX, NameView, Rest};
pub use nodes::passthrough::TextCounts;
pub use nodes::privileges::Privileges;
pub use nodes::{NodeTable, ROOT_NUMBER};
pub use notify::{DirectoryJob, Job, KernelCache, NameChange, NameJob, Notifications};
pub use request::{Context, Failure, Kind, Reply, Request, WriteMode};
pub use statistics::Statistics;
pub use walk::{Found, Held, Place, WalkError};
