//! Shared-memory IPC between an application's process and a filesystem service: sessions, request buffers and request queues.
//!
//! It assumes Linux and a peer on the same machine that may be hostile. Without the feature `std` the crate has the caller's end
//! only.
//!
//! A session is made over the instance's socket ([`handshake`], [`wire`]). It gives the client its *request buffers*, and the
//! instance's *request queues*, all sealed memory files ([`memory`], laid out in [`area`]). A call borrows a buffer, writes the
//! request, and puts a doorbell into the queue of its core group ([`Borrowed`], [`queue`]). A service thread takes the
//! doorbell, acquires the buffer in a table of its own ([`state`]), copies the request out, serves it and publishes the reply.
//! Begin reading with [`state`], then [`queue`], [`connection`] and [`Borrowed`].
//!
//! **Architecture invariants.** The peer is never trusted: shared memory is a hint, and what counts is kept where only one side
//! can write. No Rust reference is made to shared memory except to atomics. Every wait is bounded. The caller's end allocates
//! nothing, locks nothing, and calls no libc function, so that it works inside any libc call and any signal handler.
#![cfg_attr(not(any(feature = "std", test)), no_std)]
#![warn(clippy::missing_errors_doc)]

#[cfg(not(loom))]
pub mod area;
#[cfg(not(loom))]
mod borrowed;
#[cfg(not(loom))]
pub mod connection;
pub mod copy;
#[cfg(not(loom))]
pub mod futex;
#[cfg(not(loom))]
pub mod handshake;
#[cfg(not(loom))]
pub mod hold;
#[cfg(not(loom))]
pub mod memory;
pub mod notice;
#[cfg(not(loom))]
mod post_slots;
#[cfg(not(loom))]
mod poster;
pub mod posts;
pub mod queue;
pub mod segment;
#[cfg(all(feature = "std", not(loom)))]
pub mod service;
#[cfg(not(loom))]
mod slot_record;
pub mod spin;
pub mod state;
pub mod sync;
pub mod wire;
#[cfg(not(loom))]
pub mod words;

#[cfg(not(loom))]
pub use borrowed::Borrowed;
#[cfg(not(loom))]
pub use connection::{CallError, Connection, OWN_DESCRIPTOR_MIN};
#[cfg(not(loom))]
pub use post_slots::PostSlots;
#[cfg(not(loom))]
pub use poster::Posting;
#[cfg(not(loom))]
pub use slot_record::PostAt;

#[cfg(all(test, loom))]
mod models;
