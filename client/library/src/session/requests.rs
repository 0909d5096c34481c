//! Requests of a session: a buffer is borrowed, the request submitted, the reply interpreted.

use super::{Session, open};
use crate::off;
use crate::outcome::{Refusal, Served};
use crate::process;
use crate::signals::SignalsHeld;
use crate::trace::{self, Reason};
use core::sync::atomic::Ordering;
use poolfs_ipc::wire::{Operation, Reply, Request, Status};
use poolfs_ipc::{Borrowed, CallError};
use poolfs_types::Errno;

impl Session<'_> {
    /// A request buffer.
    ///
    /// # Errors
    /// [`Refusal::Kernel`] when there is none.
    pub fn borrow(&self) -> Served<Borrowed<'_>> {
        self.connection().borrow(self.began.frame).map_err(|error| {
            if error == CallError::Dead {
                self.end();
            }
            Refusal::left(Reason::NoBuffer)
        })
    }

    /// Submits a request and sorts its reply: done and redirected ones come back.
    ///
    /// # Errors
    /// The refusal, or what the service answers.
    pub fn execute(&self, borrowed: &mut Borrowed<'_>, request: &Request) -> Served<Reply> {
        self.answered(borrowed.execute(request), request.operation)
    }

    /// Sorts what came of a request.
    ///
    /// # Errors
    /// The refusal, or what the service answered.
    pub(super) fn answered(&self, answer: Result<Reply, CallError>, operation: u32) -> Served<Reply> {
        let reply = answer.map_err(|error| match error {
            CallError::Dead => self.lost(operation),
            CallError::TimedOut => Refusal::Failed(Errno::EIO),
            CallError::Ended => {
                self.give_up();
                Refusal::left(Reason::NoSession)
            }
            CallError::NoSession | CallError::Busy => Refusal::Kernel,
        })?;
        sorted(operation, reply)
    }

    /// The service has found that this process is not what it was, by a change of which the library has learnt nothing: from now on only the kernel
    /// knows what it may do, and what its paths lead to. The service of this session has told the kernel of all that was done by it.
    #[cold]
    pub(super) fn give_up(&self) {
        self.end();
        // Another session may be found to be over meanwhile, by this call or another thread: whoever began goes on. Until then the library stays
        // on for descriptors, because the kernel does not know the sizes yet; names are the kernel's from here on.
        if self.all.is_given_up.swap(true, Ordering::SeqCst) {
            return;
        }
        // Nobody would go on where a jump left this, or where a handler forked.
        let _held = SignalsHeld::hold();
        // Of what was open before, nobody vouches for anything from here on.
        process::note_fork();
        self.all.share_patiently(self.began);
        off::switch_off();
        // Calls that had begun before that may have opened something since.
        process::note_fork();
        self.all.share_patiently(self.began);
        self.all.end_all();
    }

    /// The session was lost while a request waited. When the service lives, something took the socket away from us (the
    /// program closed its number); what changes nothing can then be asked again, of the kernel: unless writes may have been lost.
    #[cold]
    pub(super) fn lost(&self, operation: u32) -> Refusal {
        let has_posts = self.has_any_posts();
        self.end();
        let repeatable = Operation::from_number(operation).is_some_and(|operation| {
            use Operation::{GetXattr, ListXattr, Read, Seek, Stat};
            matches!(operation, GetXattr | ListXattr | Read | Seek | Stat)
        });
        if !repeatable || has_posts {
            return Refusal::Failed(Errno::EIO);
        }
        let _held = SignalsHeld::hold();
        match open(self.name()) {
            // One that takes its time lives.
            Ok(_) | Err(Errno::ETIMEDOUT | Errno::EAGAIN) => Refusal::Kernel,
            Err(_) => Refusal::Failed(Errno::EIO),
        }
    }
}

/// What a reply to an operation means: done and redirected ones come back.
pub(super) fn sorted(operation: u32, reply: Reply) -> Served<Reply> {
    let status = Status::from_number(reply.status);
    if status != Some(Status::UseKernel) {
        trace::library(operation);
    }
    match status {
        Some(Status::Done | Status::Redirect | Status::RedirectSecond) => Ok(reply),
        Some(Status::UseKernel) => Err(Refusal::left(Reason::Service)),
        Some(Status::Failed) => Err(Refusal::Failed(Errno::from_raw(reply.errno))),
        Some(Status::Ended) | None => Err(Refusal::Failed(Errno::EIO)),
    }
}
