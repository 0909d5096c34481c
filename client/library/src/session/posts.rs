//! Posted writes of a session, and what a dead service leaves of them.

use super::requests::sorted;
use super::{GENERATION, Session, Sessions, Slot};
use crate::descriptors::Adopted;
use crate::memory::UserMemory;
use crate::outcome::Served;
use core::sync::atomic::Ordering;
use poolfs_ipc::posts::{POST_SLOTS, PostGrant};
use poolfs_ipc::wire::Operation;
use poolfs_ipc::{CallError, Connection, PostAt, Posting};

const _: () = assert!((POST_SLOTS as u32) <= GENERATION.ilog2());

impl Sessions {
    /// Whether a service has died, or let go of the session, with writes to an adopted file on the way that were posted by this grant.
    #[cold]
    pub fn have_lost(&self, file: &Adopted, grant: PostGrant) -> bool {
        let lost = self.slots.get(file.instance as usize).map_or(0, |slot| slot.lost.load(Ordering::SeqCst));
        lost / GENERATION == file.generation && lost >> grant.slot() & 1 == 1
    }
}

impl Slot {
    /// Notes which slots' posts are lost, if the session's service is gone. By a user of the session, or when there is none.
    pub(super) fn note_lost(&self, connection: &Connection, generation: u64) {
        let posts = posts_of(connection);
        if posts == 0 || (connection.is_usable() && connection.is_connected()) {
            return;
        }
        let note = |before: u64| {
            let others = if before / GENERATION == generation { before } else { 0 };
            Some(generation * GENERATION | others | posts)
        };
        self.lost.fetch_update(Ordering::SeqCst, Ordering::Relaxed, note).ok();
    }
}

/// The slots by which posts are on the way, a bit for each.
fn posts_of(connection: &Connection) -> u64 {
    if connection.is_inherited() {
        return 0;
    }
    (0..POST_SLOTS as u32).filter(|&slot| connection.has_posts(slot)).fold(0, |posts, slot| posts | 1 << slot)
}

impl Session<'_> {
    /// Whether a grant holds.
    #[inline]
    pub fn may_post(&self, grant: PostGrant) -> bool {
        self.connection().may_post(grant)
    }

    /// Whether writes that were posted by a grant may be on the way.
    #[inline]
    pub fn has_posts(&self, grant: PostGrant) -> bool {
        self.connection().has_posts(grant.slot())
    }

    pub(super) fn has_any_posts(&self) -> bool {
        posts_of(self.connection()) != 0
    }

    /// Posts a write of `source`.
    ///
    /// # Errors
    /// The refusal, or what the service answers when it had to be waited for.
    pub fn post(&self, grant: PostGrant, handle: u64, at: PostAt, source: UserMemory) -> Served<Posting> {
        if !source.is_readable() {
            return Ok(Posting::NotPosted);
        }
        let (start, length) = (source.address() as *const u8, source.length());
        // SAFETY: the application's own memory, readable for this call.
        let posting = unsafe { self.connection().post(self.frame, grant, handle, at, start, length) };
        const WRITE: u32 = Operation::Write as u32;
        match posting {
            Ok(Posting::Answered(reply)) => sorted(WRITE, reply).map(Posting::Answered),
            Ok(posting) => Ok(posting),
            Err(CallError::Dead) => Err(self.lost(WRITE)),
            Err(CallError::NoSession | CallError::Busy) => Ok(Posting::NotPosted),
        }
    }
}
