//! The front driver: what a program's file operations become in its own process.
//!
//! The C names are elsewhere (`preload`, `capi`); here is what they all do, in [`calls`]: decide whether a call concerns
//! a filesystem instance, serve it by a request when it does and can be, and make the same system call otherwise.
//! Descriptors are real ones of the instance's FUSE mount; the library *adopts* them ([`files`]), and names files by path
//! where a mount table says that the path leads into an instance ([`paths`], [`mounts`]). Sessions are made when first
//! needed and die at fork and at every change of rights ([`session`], [`rights`], [`state`]).
//!
//! **Assumptions.** The kernel's answer is right for every file, also an instance's: whatever is unusual here, costs time
//! or cannot be told without waiting goes there. Every function may run inside a signal handler, in a `vfork` child and
//! before libc is initialised.
//!
//! **Architecture invariants.** No libc function is called but `__errno_location` (by the names, not here), the plain memory
//! functions, and what may be missing: `getauxval`, `pthread_setcanceltype`, `environ`, `__libc_single_threaded`. No allocation, no lock,
//! no thread-local storage. What is remembered of a descriptor is verified at each use, or vouched for by a word that the service takes back
//! before it is no longer true. All state is one mapping that fork wipes. All tables are bounded, and a full one means the kernel.
#![cfg_attr(not(test), no_std)]

pub mod calls;
pub mod descriptors;
pub mod errno;
pub mod files;
pub mod instance_name;
mod kernel_size;
pub mod memory;
pub mod mounts;
pub mod outcome;
pub mod pages;
pub mod paths;
pub mod process;
pub mod raw;
pub mod rights;
mod rooms;
mod segments;
pub mod session;
pub mod signals;
pub mod state;
pub mod trace;
mod turns;
mod window;
