//! A limit for what a branch stores: counted where it is stored, enforced before data is accepted.
//!
//! A cache accepts writes long before the filesystem gives them room. So a limited branch has two layers that share one
//! [`Account`]:
//!
//! - [`Measured`], directly over the backend: after every call that may change how much a file or directory takes, it asks the backend
//!   how much that is now. So whatever format stands between it and the cache, the account is what `du` counts.
//! - [`Limited`], over the cache: what it lets through has its room, in the account or promised to what the cache has not written yet.
//!
//! Close to the limit the promises are too large, because a cache does not know which dirty blocks replace others that have their
//! room. Then [`Limited`] looks at the file, and has the cache write what it holds, before it refuses anything.
//!
//! Removed files count as long as somebody holds them, and who held them last has let them go a moment before the layers hear of it. So
//! [`Limited`] also waits for those that may be about to end, for a bounded time.
//!
//! What is refused is refused with `ENOSPC`, as Linux does where a directory tree has a quota (projects of XFS and ext4), and `statfs`
//! shows the limit as the size of the filesystem, as there.

#![forbid(unsafe_code)]

mod account;
mod limited;
mod measured;
mod nodes;

pub use account::Account;
pub use limited::{Accepted, Limited};
pub use measured::Measured;
