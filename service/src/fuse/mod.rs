//! The kernel's path (the papers' legacy path): VFS, FUSE, service. The kernel caches pages, names and attributes; `nodes` notes what it may keep.
//!
//! ```text
//! device -> incoming (bytes into types) -> front (calls into requests) -> Instance::dispatch
//! device <- answer   (bytes again)      <- front (replies into answers)
//! ```
//!
//! Where the kernel offers it, `rings` takes the place of `device` for all requests that are answered: FUSE over io_uring.
//! Returned references and signals still come by `/dev/fuse`, and notifications go by it.
//!
//! [`session`](self) has the threads that do this, [`FuseMount`] the mount they serve. The kernel's `linux/fuse.h` is the
//! specification of the protocol; the part of it that is used is in `abi.rs`, what is agreed on at the start in `handshake.rs`.
//!
//! The rest of the service uses only [`FuseMount`], and the kernel's caches behind [`KernelCache`](crate::KernelCache).

mod abi;
mod answer;
mod device;
mod following;
mod front;
mod handshake;
mod incoming;
mod interrupts;
mod listing;
mod mount;
mod readers;
mod rings;
mod session;

pub use answer::{Answer, Given};
pub use front::Front;
pub use incoming::{Call, FileOperation, Forgets, Malformed, Message, NodeOperation, Offer, Operation};
pub use mount::{FuseMount, MountError, detach_dead};
pub use session::OnEnd;
