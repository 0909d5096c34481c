//! Change times (ctime) as users see them: hides the changes that a layer's own work makes to objects of the layer below.
//!
//! A copy-up, a mark or a table update changes objects below although no user has changed anything. The layer notes the change
//! time that its own work has left there, together with the time to show instead. The note applies as long as the object still
//! has that change time.

use poolfs_types::Timestamp;
use std::sync::{Mutex, PoisonError};

/// The time that a layer's own work left on an object of the layer below, and the one to show for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unseen {
    left: Timestamp,
    shown: Timestamp,
}

/// The time of change of one object.
#[derive(Debug, Default)]
pub struct Changed {
    unseen: Mutex<Option<Unseen>>,
}

impl Changed {
    /// That of an object of which `unseen` was noted before.
    #[must_use]
    pub fn new(unseen: Option<Unseen>) -> Self {
        Changed { unseen: Mutex::new(unseen) }
    }

    /// What was noted.
    #[must_use]
    pub fn unseen(&self) -> Option<Unseen> {
        *self.unseen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of the last change that a user made, where the object of the branch says `raw`.
    #[must_use]
    pub fn shown(&self, raw: Timestamp) -> Timestamp {
        self.unseen().filter(|unseen| unseen.left == raw).map_or(raw, |unseen| unseen.shown)
    }

    /// Says that what changed the object from `before` to `after` was no user's doing.
    pub fn hide(&self, before: Timestamp, after: Timestamp) {
        self.show(after, self.shown(before));
    }

    /// Has `shown` shown while the object of the branch says `raw`.
    pub fn show(&self, raw: Timestamp, shown: Timestamp) {
        *self.unseen.lock().unwrap_or_else(PoisonError::into_inner) =
            (raw != shown).then_some(Unseen { left: raw, shown });
    }

    /// Says that a user has changed the object. Its time may still be the one that was hidden: clocks of filesystems stand still
    /// for some milliseconds.
    pub fn see(&self) {
        *self.unseen.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp { seconds, nanoseconds: 0 }
    }

    #[test]
    fn what_a_layer_changes_is_not_shown_and_what_users_change_is() {
        let changed = Changed::default();
        assert_eq!(changed.shown(at(1)), at(1));
        changed.hide(at(1), at(2));
        changed.hide(at(2), at(3));
        assert_eq!([changed.shown(at(3)), changed.shown(at(4))], [at(1), at(4)]);
        // A user and the layer changed it in turn.
        changed.hide(at(4), at(5));
        assert_eq!(changed.shown(at(5)), at(4));
        changed.see();
        assert_eq!(changed.shown(at(5)), at(5));
        let again = Changed::new(Some(Unseen { left: at(9), shown: at(8) }));
        assert_eq!(again.shown(at(9)), at(8));
    }
}
