//! Which clients are granted to post: those that write small pieces one after the other to a file that nobody else uses.

use super::granted::Granted;
use super::obstacle::{obstacle, strain_of};
use super::{Posts, is_too_long};
use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::queue_front::session::SessionState;
use crate::request::Context;
use poolfs_ipc::posts::POST_BYTES_MAX;
use poolfs_ipc::service::Session;
use poolfs_ipc::wire::{Operation, Reply, Request, Status};
use poolfs_service_protocol::NotPosted;
use std::sync::{Arc, PoisonError};

/// Most files of an instance whose writes may be posted at a time.
const GRANTS_MAX: usize = 64;

/// The small write of a file, counted from its opening, from which on the next ones may be posted.
const GRANT_AT_WRITE: u32 = 2;

impl Posts {
    /// After a write by request: whether the next ones may be posted. The reply says so.
    pub(in crate::queue_front) fn consider(
        self: &Arc<Self>,
        session: &Arc<Session<SessionState>>,
        request: &Request,
        reply: &mut Reply,
    ) {
        let is_small = reply.status == Status::Done as u32 && (1..=POST_BYTES_MAX as u64).contains(&reply.length);
        if Operation::from_number(request.operation) != Some(Operation::Write) || !is_small {
            return;
        }
        let (Some(file), Some(instance)) = (session.content().file(request.handle), self.instance.upgrade()) else {
            return;
        };
        let is_granted = instance.nodes().is_posting(file.node());
        if is_granted || !file.count_small_write(GRANT_AT_WRITE) {
            return;
        }
        let granted =
            if is_too_long(&file, reply) { Err(NotPosted::Limit) } else { self.grant(&instance, session, &file) };
        match granted {
            Ok(granted) => (reply.post_slot, reply.post_epoch) = granted,
            Err(cause) => self.refuse(&file, cause),
        }
    }

    fn grant(
        self: &Arc<Self>,
        instance: &Instance,
        session: &Arc<Session<SessionState>>,
        file: &Arc<OpenFile>,
    ) -> Result<(u32, u32), NotPosted> {
        obstacle(instance, file).or_else(|| strain_of(&instance.stack)).map_or(Ok(()), Err)?;
        self.find_room(instance)?;
        if self.grants.read().unwrap_or_else(PoisonError::into_inner).len() >= GRANTS_MAX {
            return Err(NotPosted::Limit);
        }
        let slot = session.content().take_post_slot().ok_or(NotPosted::Limit)?;
        let give_up = |cause| {
            session.content().give_post_slot(slot);
            Err(cause)
        };
        // From here on the kernel is given nothing to keep; then it drops what it has.
        if !instance.nodes().begin_posting(file.node()) {
            return give_up(NotPosted::Shared);
        }
        drop(
            instance
                .change_attributes(&Context::library(session.content().credentials(), 0), [Some(file.node()), None]),
        );
        file.note_not_posted(None);
        let granted = Granted::new(session, file, slot);
        let epoch = session.content().next_post_epoch();
        {
            let mut grants = self.grants.write().unwrap_or_else(PoisonError::into_inner);
            if grants.len() >= GRANTS_MAX || self.is_refusing() || !self.start_tender() {
                drop(grants);
                instance.nodes().end_posting(file.node());
                return give_up(NotPosted::Limit);
            }
            grants.push(Arc::clone(&granted));
            instance.count_posting(grants.len());
        }
        let is_granted = granted.begin(epoch);
        // Who came meanwhile has not found the grant.
        if !is_granted
            || !instance.nodes().may_post(file.node())
            || !file.is_unshared()
            || session.has_ended()
            || self.is_refusing()
        {
            self.end(&granted, None, None);
            return Err(NotPosted::Shared);
        }
        self.tender.tend(&granted);
        Ok((slot as u32 + 1, epoch))
    }
}
