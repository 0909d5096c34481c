//! How an attempt to serve a call by the user-level path ends.

use crate::trace::{self, Reason};
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

impl Refusal {
    /// A call is left to the kernel, for a reason that is counted.
    #[inline]
    #[must_use]
    pub fn left(reason: Reason) -> Self {
        trace::left(reason);
        Self::Kernel
    }
}

/// What a served call returns.
pub type Served<T> = Result<T, Refusal>;

/// What a transfer returns that is refused when so many bytes are done. A failure ends it there. What is left to the kernel is done
/// there from the beginning, the same bytes at the same places: nobody gets less of a file than there is.
pub fn refused_at(done: usize, refusal: Refusal) -> Served<usize> {
    match refusal {
        Refusal::Failed(_) if done > 0 => Ok(done),
        _ => Err(refusal),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_to_the_kernel_is_not_cut_short() {
        let failed = Refusal::Failed(Errno::EIO);
        assert_eq!((refused_at(0, failed), refused_at(5, failed)), (Err(failed), Ok(5)));
        for left in [Refusal::Kernel, Refusal::Foreign] {
            assert_eq!((refused_at(0, left), refused_at(5, left)), (Err(left), Err(left)));
        }
    }
}
