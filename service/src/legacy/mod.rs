//! The legacy path: kernel VFS, FUSE, service. The kernel caches pages; names and attributes it asks for each time.
//!
//! ```text
//! device -> incoming (bytes into types) -> front (calls into requests) -> Instance::dispatch
//! device <- answer   (bytes again)      <- front (replies into answers)
//! ```
//!
//! Where the kernel offers it, `rings` takes the place of `device` for all that is answered: FUSE over io_uring. References that
//! are given back and signals come, and notifications go, by `/dev/fuse` in any case.
//!
//! [`session`](self) has the threads that do this, [`LegacyMount`] the mount they serve. The kernel's `linux/fuse.h` is the
//! specification of the protocol; what is used of it stands in `abi.rs`, what is agreed on at the start in `handshake.rs`.
//!
//! What the rest of the service sees is small: [`LegacyMount`], and the kernel's caches behind
//! [`KernelCache`](crate::KernelCache).

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
pub use mount::{LegacyMount, MountError, detach_dead};
pub use session::OnEnd;
