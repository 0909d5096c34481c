//! One request, from its message to its reply.

use crate::instance::Instance;
use crate::queue_front::message::{DataArea, Message};
use crate::queue_front::operations::Call;
use crate::queue_front::session::SessionState;
use crate::request::{Context, Failure};
use crate::walk::Astray;
use poolfs_ipc::area::DATA_BYTES;
use poolfs_ipc::service::DataError;
use poolfs_ipc::wire::{Operation, Reply, Request, RequestFlags, Status};
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
            // What was asked of the layers for this changed nothing: who changes something is answered without data.
            DataError::OverBudget => Self::KERNEL,
        }
    }
}

impl From<Astray> for Refused {
    fn from(astray: Astray) -> Self {
        match astray {
            Astray::Failure(failure) => Self::Failure(failure),
            Astray::Redirect(path) => Self::Redirect(path),
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

    fn reply(self, area: &dyn DataArea) -> Reply {
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

/// Serves `request` of a session for `instance`. `scratch` is the calling thread's own, at least [`DATA_BYTES`] long:
/// what the client sent is copied there before anything looks at it.
pub fn serve(
    instance: &Instance,
    session: &SessionState,
    request: &Request,
    area: &dyn DataArea,
    scratch: &mut [u8],
) -> Reply {
    debug_assert!(scratch.len() >= DATA_BYTES);
    instance.settle_posts();
    attempt(instance, session, (request, area, false), scratch).unwrap_or_else(|refused| refused.reply(area))
}

/// Serves a write that nobody waits for, as [`serve`].
pub(super) fn serve_post(
    instance: &Instance,
    session: &SessionState,
    request: &Request,
    area: &dyn DataArea,
    scratch: &mut [u8],
) -> Reply {
    attempt(instance, session, (request, area, true), scratch).unwrap_or_else(|refused| refused.reply(area))
}

fn attempt(
    instance: &Instance,
    session: &SessionState,
    (request, area, is_posted): (&Request, &dyn DataArea, bool),
    scratch: &mut [u8],
) -> Result<Reply, Refused> {
    let message = Message::check(request, area.bytes().min(scratch.len()))?;
    if is_posted && message.operation != Operation::Write {
        return Err(Errno::EINVAL.into());
    }
    if message.operation == Operation::Echo {
        return Ok(Reply { value: request.offset, ..Reply::default() });
    }
    // The kernel knows by which mount a file was opened, and what it says of one that cannot be written.
    let is_refused = session.is_read_only() || session.is_read_only_somewhere() && message.goes_by_descriptor();
    if is_refused && message.changes() {
        return Err(Refused::KERNEL);
    }
    let input = &mut scratch[..message.input_bytes()];
    area.get(0, input)?;
    let by_real_ids = message.operation == Operation::Access && message.flags.contains(RequestFlags::REAL_IDS);
    let credentials = if by_real_ids { session.real_credentials() } else { session.credentials() };
    let context =
        Context { mounted: session.mount_points(), is_posted, ..Context::library(credentials, request.umask) };
    let call = Call { instance, session, message: &message, area, context };
    call.serve(scratch)
}
