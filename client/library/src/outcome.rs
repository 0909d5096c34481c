//! How an attempt to serve a call by the user-level path ends.

use crate::trace;
use poolfs_types::Errno;

/// Why a call is not served by the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It has nothing to do with an instance: the kernel's.
    Foreign,
    /// It concerns an instance, and nothing has happened: the kernel does it right.
    Kernel,
    /// It was served, and failed.
    Failed(Errno),
}

/// What a served call returns.
pub type Served<T> = Result<T, Refusal>;

/// The result in the kernel's convention: of the library, or of `kernel` when that is to do it.
#[inline]
pub fn finish(served: Served<usize>, kernel: impl FnOnce() -> isize) -> isize {
    match served {
        Ok(result) => result as isize,
        Err(Refusal::Failed(errno)) => -(errno.raw() as isize),
        Err(Refusal::Kernel) => {
            trace::kernel();
            kernel()
        }
        Err(Refusal::Foreign) => kernel(),
    }
}
