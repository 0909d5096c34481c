//! Why a request of the user-level path was not served, and the reply that says so.

use crate::queue_front::message::DataArea;
use crate::request::Failure;
use crate::walk::WalkError;
use poolfs_ipc::service::DataError;
use poolfs_ipc::wire::{Reply, Status};
use poolfs_libservice::types::Errno;

/// Why a request was not served.
pub(super) enum Refused {
    /// it failed, or the kernel has to do it
    Failure(Failure),
    /// a symbolic link was met on the way of the first path
    Redirect(Vec<u8>),
    /// ... of the second
    RedirectSecond(Vec<u8>),
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::Failure(Failure::Errno(errno))
    }
}

impl From<Failure> for Refused {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

impl From<DataError> for Refused {
    fn from(error: DataError) -> Self {
        match error {
            DataError::OutOfBounds => Errno::EINVAL.into(),
            DataError::Unreadable => Errno::EIO.into(),
            // What was asked of the layers for this changed nothing: who changes something is answered without data.
            DataError::OverBudget => Self::KERNEL,
        }
    }
}

impl From<WalkError> for Refused {
    fn from(error: WalkError) -> Self {
        match error {
            WalkError::Failure(failure) => Self::Failure(failure),
            WalkError::Redirect(path) => Self::Redirect(path),
        }
    }
}

impl Refused {
    /// Leave it to the kernel.
    pub(super) const KERNEL: Refused = Refused::Failure(Failure::UseKernel);

    /// The same, met on the way of the second path.
    pub(super) fn of_second(self) -> Self {
        match self {
            Self::Redirect(path) => Self::RedirectSecond(path),
            other => other,
        }
    }

    pub(super) fn reply(self, area: &dyn DataArea) -> Reply {
        let (status, path) = match self {
            Self::Failure(Failure::Errno(errno)) => {
                return Reply { status: Status::Failed as u32, errno: errno.raw(), ..Reply::default() };
            }
            Self::Failure(Failure::UseKernel) => (Status::UseKernel, Vec::new()),
            Self::Redirect(path) => (Status::Redirect, path),
            Self::RedirectSecond(path) => (Status::RedirectSecond, path),
        };
        match area.put(0, &path) {
            Ok(()) => Reply { status: status as u32, length: path.len() as u64, ..Reply::default() },
            Err(_) => Reply { status: Status::UseKernel as u32, ..Reply::default() },
        }
    }
}
