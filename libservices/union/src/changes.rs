//! The times of change that users see: of an upper object its own, unless the union's own work has moved it.
//!
//! A copy-up, a mark, the rest of a block or a link in the index change objects of the upper branch, and users have changed nothing. What
//! such work left there is noted with the time to show for it, and counts for as long as the object's time is that one.

use crate::node::lock;
use hashbrown::HashMap;
use poolfs_types::Timestamp;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Mutex;

/// The time that the union's own work left on an upper object, and the one to show for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unseen {
    left: Timestamp,
    shown: Timestamp,
}

/// The time of change of one object.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    unseen: Mutex<Option<Unseen>>,
}

impl Changed {
    /// That of an object of which `unseen` was noted before.
    pub fn new(unseen: Option<Unseen>) -> Self {
        Changed { unseen: Mutex::new(unseen) }
    }

    /// What was noted.
    pub fn unseen(&self) -> Option<Unseen> {
        *lock(&self.unseen)
    }

    /// The time of the last change that a user made, where the object of the branch says `raw`.
    pub fn shown(&self, raw: Timestamp) -> Timestamp {
        self.unseen().filter(|unseen| unseen.left == raw).map_or(raw, |unseen| unseen.shown)
    }

    /// Says that what changed the object from `before` to `after` was no user's doing.
    pub fn hide(&self, before: Timestamp, after: Timestamp) {
        self.show(after, self.shown(before));
    }

    /// Has `shown` shown while the object of the branch says `raw`.
    pub fn show(&self, raw: Timestamp, shown: Timestamp) {
        *lock(&self.unseen) = (raw != shown).then_some(Unseen { left: raw, shown });
    }

    /// Says that a user has changed the object. Its time may still be the one that was hidden: clocks of filesystems stand still
    /// for some milliseconds.
    pub fn see(&self) {
        *lock(&self.unseen) = None;
    }
}

/// The time of a change that is made now.
pub(crate) fn now() -> Timestamp {
    let now = clock_gettime(ClockId::Realtime);
    Timestamp { seconds: now.tv_sec, nanoseconds: u32::try_from(now.tv_nsec).unwrap_or(0) }
}

/// Most entries of each half of [`Forgotten`].
const FORGOTTEN_MAX: usize = 1 << 14;

/// What was noted of objects that nobody refers to just now, by their inode numbers: the last some ten thousand of them.
#[derive(Default)]
pub(crate) struct Forgotten {
    young: HashMap<u64, Unseen>,
    old: HashMap<u64, Unseen>,
}

impl Forgotten {
    pub fn put(&mut self, inode: u64, unseen: Unseen) {
        if self.young.len() >= FORGOTTEN_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(inode, unseen);
    }

    pub fn take(&mut self, inode: u64) -> Option<Unseen> {
        let old = self.old.remove(&inode);
        self.young.remove(&inode).or(old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp { seconds, nanoseconds: 0 }
    }

    #[test]
    fn what_the_union_changes_is_not_shown_and_what_users_change_is() {
        let changed = Changed::default();
        assert_eq!(changed.shown(at(1)), at(1));
        changed.hide(at(1), at(2));
        changed.hide(at(2), at(3));
        assert_eq!([changed.shown(at(3)), changed.shown(at(4))], [at(1), at(4)]);
        // A user and the union changed it in turn.
        changed.hide(at(4), at(5));
        assert_eq!(changed.shown(at(5)), at(4));
        changed.see();
        assert_eq!(changed.shown(at(5)), at(5));
        let again = Changed::new(Some(Unseen { left: at(9), shown: at(8) }));
        assert_eq!(again.shown(at(9)), at(8));
    }

    #[test]
    fn what_is_forgotten_is_bounded_and_found_again() {
        let mut forgotten = Forgotten::default();
        let unseen = |seconds| Unseen { left: at(seconds), shown: at(0) };
        for inode in 0..4 * FORGOTTEN_MAX as u64 {
            forgotten.put(inode, unseen(inode as i64));
            forgotten.put(inode, unseen(inode as i64 + 1));
        }
        assert!(forgotten.young.len() + forgotten.old.len() <= 2 * FORGOTTEN_MAX);
        let last = 4 * FORGOTTEN_MAX as u64 - 1;
        assert_eq!(forgotten.take(last), Some(unseen(last as i64 + 1)));
        assert_eq!(forgotten.take(last), None);
        assert_eq!(forgotten.take(0), None);
    }
}
