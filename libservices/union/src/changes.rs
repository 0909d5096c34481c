//! The clock of the union, and the change times that the union's own work has moved, kept for objects without references.

use hashbrown::HashMap;
use poolfs_libservice::Unseen;
use poolfs_types::Timestamp;
use rustix::time::{ClockId, clock_gettime};

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
    use poolfs_libservice::Changed;

    fn at(seconds: i64) -> Timestamp {
        Timestamp { seconds, nanoseconds: 0 }
    }

    #[test]
    fn what_is_forgotten_is_bounded_and_found_again() {
        let mut forgotten = Forgotten::default();
        let unseen = |seconds| {
            let changed = Changed::default();
            changed.show(at(seconds), at(-1));
            changed.unseen().expect("noted")
        };
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
