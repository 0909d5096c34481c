//! The front driver: decides for each file operation of a program whether poolfs serves it inside the process or the kernel does.
//!
//! The C names are in the crates `preload` and `capi`, which both call the functions of [`calls`]: begin there. Each finds out whether a
//! call concerns a filesystem instance, serves it when it does and can be, by a request or from shared memory, and makes the same system
//! call otherwise. Descriptors are real ones of the instance's FUSE mount; the library *adopts* them ([`files`]), and names files by path
//! where a mount table says that the path leads into an instance ([`paths`], [`mounts`]). Sessions are made when first needed, are not
//! inherited at fork, and end at every change of rights ([`session`], [`rights`], [`state`]).
//!
//! **Assumptions.** The kernel's answer is right for every file, including those of an instance. Whatever is unusual here, costs time or
//! cannot be decided without waiting goes to the kernel. Every function may run inside a signal handler, in a `vfork` child and before libc
//! is initialised.
//!
//! **Architecture invariants.** No libc function is called but `__errno_location` (by the names, not here), the plain memory functions, and
//! what may be missing: `getauxval`, `pthread_setcanceltype`, `environ`, `__libc_single_threaded`. No allocation, no lock, no thread-local
//! storage. What is recorded of a descriptor is verified at each use, or guaranteed by a word that the service revokes before it is no
//! longer true. All state is one mapping that fork wipes. All tables are bounded, and a full one means the kernel.
#![cfg_attr(not(test), no_std)]

mod cached_clock;
pub mod calls;
mod descriptor_path;
pub mod descriptors;
pub mod errno;
pub mod files;
pub mod instance_name;
mod kernel_size;
pub mod life;
mod limits;
mod mapping_slots;
pub mod memory;
pub mod mounts;
mod off;
pub mod outcome;
pub mod pages;
pub mod paths;
pub mod process;
pub mod raw;
pub mod rights;
mod segments;
pub mod session;
pub mod signals;
pub mod state;
pub mod trace;
mod window;
