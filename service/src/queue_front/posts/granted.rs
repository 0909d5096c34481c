//! A grant: the right to post writes of one open file, and the thread that takes its posts.

use crate::handles::OpenFile;
use crate::queue_front::session::SessionState;
use crate::sync::lock;
use poolfs_ipc::service::Session;
use poolfs_libservice::PageBuffer;
use poolfs_libservice::types::Errno;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// What may be posted of one open file.
pub(in crate::queue_front) struct Granted {
    pub session: Arc<Session<SessionState>>,
    pub file: Arc<OpenFile>,
    pub slot: usize,
    state: Mutex<GrantState>,
    /// Somebody has taken what was posted, or does not come back.
    taken: Condvar,
}

#[derive(Default)]
struct GrantState {
    ended: bool,
    /// The client posts no more, though what it has posted may still be taken.
    is_revoked: bool,
    /// Somebody takes what was posted; the rest of this is with him.
    is_busy: bool,
    /// He has not come back for long: who need not does not wait for him any more.
    is_stuck: bool,
    /// A doorbell has come since: somebody has to look once more.
    is_rung: bool,
    taking: Taking,
}

/// What is with whoever takes posts.
#[derive(Default)]
pub(in crate::queue_front) struct Taking {
    /// Why a post failed: what was posted after it is not applied.
    pub failed: Option<Errno>,
    pub scratch: PageBuffer,
}

impl Granted {
    pub fn new(session: &Arc<Session<SessionState>>, file: &Arc<OpenFile>, slot: usize) -> Arc<Self> {
        let (session, file) = (Arc::clone(session), Arc::clone(file));
        Arc::new(Self { session, file, slot, state: Mutex::default(), taken: Condvar::new() })
    }

    pub fn is_of(&self, session: &Arc<Session<SessionState>>, slot: usize) -> bool {
        self.slot == slot && Arc::ptr_eq(&self.session, session)
    }

    /// Waits until nobody else takes what was posted, until then if it is not for ever; nothing when the grant has ended, or somebody who takes it does not come back.
    pub fn begin_taking(&self, give_up: Option<Instant>) -> Option<Taking> {
        let mut state = lock(&self.state);
        while state.is_busy {
            let Some(give_up) = give_up else {
                state = self.taken.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = give_up.saturating_duration_since(Instant::now());
            if state.is_stuck || left.is_zero() {
                state.is_stuck = true;
                self.taken.notify_all();
                return None;
            }
            state = self.taken.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.ended {
            return None;
        }
        state.is_busy = true;
        Some(std::mem::take(&mut state.taking))
    }

    /// The same for a doorbell, of which there may be many: nothing also while somebody else takes what was posted, who then learns by
    /// [`Granted::was_rung`] that there may be more.
    pub fn begin_taking_or_leave(&self) -> Option<Taking> {
        let mut state = lock(&self.state);
        if state.is_busy || state.ended {
            state.is_rung = true;
            return None;
        }
        state.is_busy = true;
        Some(std::mem::take(&mut state.taking))
    }

    /// Whether a doorbell has come, and left, since this was asked last.
    pub fn was_rung(&self) -> bool {
        std::mem::take(&mut lock(&self.state).is_rung)
    }

    /// Lets the next one take, or none any more.
    pub fn end_taking(&self, taking: Taking, ends: bool) {
        let mut state = lock(&self.state);
        (state.taking, state.is_busy, state.is_stuck) = (taking, false, false);
        self.taken.notify_all();
        state.ended |= ends;
    }

    /// Lets the client post, unless the grant has ended already.
    pub fn begin(&self, epoch: u32) -> bool {
        let state = lock(&self.state);
        !state.ended && !state.is_busy && self.session.grant_posts(self.slot, epoch)
    }

    /// The client posts no more, from the next write on. The slot of a grant that has ended may be another's.
    pub fn revoke(&self) {
        let mut state = lock(&self.state);
        state.is_revoked = true;
        if !state.ended {
            self.session.revoke_posts(self.slot);
        }
    }

    /// Whether the client posts no more.
    pub fn is_revoked(&self) -> bool {
        lock(&self.state).is_revoked
    }

    /// Whether something that was posted may not have been taken. A client may say so for ever.
    pub fn may_have_posts(&self) -> bool {
        let state = lock(&self.state);
        !state.ended && (state.is_busy || self.session.has_posts(self.slot))
    }

    /// Whether somebody takes what was posted, and does not come back.
    pub fn is_stuck(&self) -> bool {
        lock(&self.state).is_stuck
    }

    /// Gives memory back that is only of use while something comes.
    pub fn rest(&self) {
        lock(&self.state).taking.scratch = PageBuffer::default();
    }
}
