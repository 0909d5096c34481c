//! Serves one request, from its message to its reply.

use crate::instance::Instance;
use crate::queue_front::message::{DataArea, Message};
use crate::queue_front::operations::Call;
use crate::queue_front::refused::Refused;
use crate::queue_front::session::SessionState;
use crate::queue_front::view::Shown;
use crate::request::Context;
use poolfs_ipc::area::DATA_BYTES;
use poolfs_ipc::wire::{Operation, Reply, Request, RequestFlags};
use poolfs_libservice::types::Errno;

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
    attempt(instance, session, (request, area, None), scratch).unwrap_or_else(|refused| refused.reply(area))
}

/// Serves a write that nobody waits for, as [`serve`]; `least`: with the rights of nobody. `scratch` is as long as what is written, or
/// longer: a longer request is refused.
pub(super) fn serve_post(
    instance: &Instance,
    (session, least): (&SessionState, bool),
    request: &Request,
    area: &dyn DataArea,
    scratch: &mut [u8],
) -> Reply {
    attempt(instance, session, (request, area, Some(least)), scratch).unwrap_or_else(|refused| refused.reply(area))
}

fn attempt(
    instance: &Instance,
    session: &SessionState,
    (request, area, posted): (&Request, &dyn DataArea, Option<bool>),
    scratch: &mut [u8],
) -> Result<Reply, Refused> {
    let message = Message::check(request, area.bytes().min(scratch.len()))?;
    let is_posted = posted.is_some();
    if is_posted && message.operation != Operation::Write {
        return Err(Errno::EINVAL.into());
    }
    if message.operation == Operation::Echo {
        return Ok(Reply { value: request.offset, ..Reply::default() });
    }
    // The kernel knows by which mount a file was opened, and what it says of one that cannot be written.
    let shown = session.shown();
    let is_refused = shown
        .as_ref()
        .is_some_and(|shown| shown.is_read_only() || shown.is_read_only_somewhere() && message.goes_by_descriptor());
    // What is posted goes by a descriptor that was opened for writing, when that could be.
    if is_refused && message.changes() && !is_posted {
        return Err(Refused::KERNEL);
    }
    let input = &mut scratch[..message.input_bytes()];
    area.get(0, input)?;
    let by_real_ids = message.operation == Operation::Access && message.flags.contains(RequestFlags::REAL_IDS);
    let credentials = match (posted, by_real_ids) {
        (Some(true), _) => session.least_credentials(),
        (_, true) => session.real_credentials(),
        (_, false) => session.credentials(),
    };
    let asked_ms = Some(request.submitted_ns / 1_000_000).filter(|&asked| asked > 0);
    let context = Context {
        mounted: shown.as_deref().map(Shown::mount_points),
        is_posted,
        asked_ms,
        ..Context::library(credentials, request.umask)
    };
    let call = Call { instance, session, message: &message, area, context };
    call.serve(scratch)
}
