//! The vocabulary both ends share: ids, attributes, errors, flags and limits. No std, no policy, no system calls.
//!
//! Every other crate stands on this one. What is here is plain data: a type that needs to ask somebody something
//! belongs elsewhere.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;

mod attributes;
mod errno;
mod flags;
#[cfg(feature = "alloc")]
mod id_map;
mod ids;
pub mod limits;
mod name;

pub use attributes::{Attributes, Caller, FileSystemStatistics, FileType, SetAttributes, SetTime, Timestamp};
pub use errno::Errno;
pub use flags::{AccessMode, AllocateMode, OpenFlags, RenameFlags, SeekTo, XattrFlags};
#[cfg(feature = "alloc")]
pub use id_map::{IdMap, IdMapError, IdRange};
pub use ids::{HandleId, NO_ID, NodeId, OVERFLOW_ID};
pub use name::Name;
