//! Sessions, request buffers and request queues: how an application's process and a filesystem service talk.
//!
//! The peer is never trusted. Shared memory is a hint; what counts is kept where only one side can write.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

pub mod wire;
