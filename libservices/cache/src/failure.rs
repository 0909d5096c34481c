//! The error of a cache whose own memory fails.

use poolfs_libservice::Error;
use poolfs_types::Errno;
use std::io;

/// The answer to whoever needed that memory.
pub(crate) fn cache_failure(error: &io::Error) -> Error {
    Error::new(Errno::EIO, format!("the cache's memory failed: {error}"))
}
