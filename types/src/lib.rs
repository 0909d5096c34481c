//! The vocabulary both ends share: ids, attributes, errors, flags and limits. No std, no policy, no system calls.
//!
//! Every other crate stands on this one. What is here is plain data: a type that needs to ask somebody something
//! belongs elsewhere.
#![no_std]
#![forbid(unsafe_code)]

mod attributes;
mod errno;
mod flags;
mod ids;
pub mod limits;
mod name;

pub use attributes::{Attributes, Caller, FileSystemStatistics, FileType, SetAttributes, SetTime, Timestamp};
pub use errno::Errno;
pub use flags::{AccessMode, AllocateMode, OpenFlags, RenameFlags, SeekTo, XattrFlags};
pub use ids::{HandleId, NodeId};
pub use name::Name;
