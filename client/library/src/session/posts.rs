//! Posted writes of a session, and the record of those that were lost with their service.

use super::requests::sorted;
use super::{GENERATION, Session, Sessions, Slot};
use crate::descriptors::Adopted;
use crate::memory::UserMemory;
use crate::outcome::{Refusal, Served};
use core::sync::atomic::Ordering;
use poolfs_ipc::posts::{POST_SLOTS, PostGrant};
use poolfs_ipc::wire::Operation;
use poolfs_ipc::{CallError, Connection, PostAt, Posting};
use poolfs_types::Errno;

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
        self.lose(generation, posts);
    }

    /// Notes that what was posted by some slots of a session, a bit for each, is lost.
    fn lose(&self, generation: u64, posts: u64) {
        let note = |before: u64| {
            let others = if before / GENERATION == generation { before } else { generation * GENERATION };
            Some(others | posts)
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

    /// Whether the service is gone, or has let go of the session, which has ended then.
    #[cold]
    pub fn is_lost(&self) -> bool {
        let is_lost = !(self.connection().is_usable() && self.connection().is_connected());
        if is_lost {
            self.end();
        }
        is_lost
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
        let posting = unsafe { self.connection().post(self.began.frame, grant, handle, at, start, length) };
        const WRITE: u32 = Operation::Write as u32;
        match posting {
            Ok(Posting::Answered(reply)) => sorted(WRITE, reply).map(Posting::Answered),
            Ok(posting) => Ok(posting),
            // A call that this thread left by a jump keeps the session from being used: nothing happened.
            Err(CallError::Dead) if !self.is_lost() => {
                self.end();
                Ok(Posting::NotPosted)
            }
            Err(CallError::Dead) => Err(self.lost(WRITE)),
            Err(CallError::Ended) => {
                self.give_up();
                Ok(Posting::NotPosted)
            }
            Err(CallError::TimedOut) => Err(Refusal::Failed(Errno::EIO)),
            Err(CallError::NoSession | CallError::Busy) => Ok(Posting::NotPosted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    #[test]
    fn what_is_lost_is_known_of_the_last_session_that_lost_something() {
        // SAFETY: all zeros are no sessions.
        let sessions: Box<Sessions> = unsafe { Box::new_zeroed().assume_init() };
        let file = |generation| Adopted {
            handle: 7,
            generation,
            inode: 42,
            mount: 3,
            flags: 2,
            instance: 1,
            mode: 0o100_644,
            announces_closing: true,
        };
        let lost = |generation, slot| {
            let grant = PostGrant::new(slot, 1).expect("a grant");
            sessions.have_lost(&file(generation), grant)
        };
        assert!(!lost(0, 0) && !lost(5, 0));
        sessions.slots[1].lose(5, 1 << 3);
        sessions.slots[1].lose(5, 1 << 15);
        assert!(lost(5, 3) && lost(5, 15) && !lost(5, 4) && !lost(4, 3));
        sessions.slots[1].lose(6, 1);
        assert!(lost(6, 0) && !lost(6, 3) && !lost(5, 3));
        assert!(!sessions.have_lost(&Adopted { instance: 0, ..file(6) }, PostGrant::new(0, 1).expect("a grant")));
    }
}
