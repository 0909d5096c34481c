//! The vocabulary that clients and service share: ids, attributes, errors, flags and limits. No std, no policy, no system calls.
//!
//! Every other crate depends on this one. It contains plain data only: a type that has to ask somebody something belongs
//! elsewhere. Begin reading with [`Attributes`] and [`NodeId`].
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
