//! A storage limit for a branch: usage is counted where it is stored, and the limit is enforced before data is accepted.
//!
//! A cache accepts writes long before the filesystem allocates space for them. So a limited branch has two layers that share one
//! [`Account`]:
//!
//! - [`UsageAccounting`], directly over the backend: after every call that may change how much a file or directory takes, it asks
//!   the backend for the new value. So whatever format is between it and the cache, the account is what `du` counts.
//! - [`QuotaLimit`], over the cache: what it lets through has its space, either in the account or promised to what the cache has
//!   not written yet.
//!
//! It assumes that only calls through these layers change the branch. Begin reading with [`Account`].
//!
//! Close to the limit the promises are too large, because a cache does not know which dirty blocks replace others that already
//! have their space. Then [`QuotaLimit`] looks at the file, and has the cache write back what it holds, before it refuses
//! anything.
//!
//! Removed files count as long as somebody holds them, and the layers hear of the last release a moment after it. So
//! [`QuotaLimit`] also waits, for a bounded time, for files that may be about to end.
//!
//! A call beyond the limit fails with `ENOSPC`, as Linux does where a directory tree has a quota (projects of XFS and ext4), and
//! `statfs` shows the limit as the size of the filesystem, as there.

#![forbid(unsafe_code)]

mod account;
mod nodes;
mod quota_limit;
mod usage_accounting;

pub use account::Account;
pub use quota_limit::{Accepted, QuotaLimit};
pub use usage_accounting::UsageAccounting;
