//! The count of pinned nodes: they have no references, and stay because another node needs them, such as the directories of a
//! file's further names.
//!
//! The kernel has forgotten these nodes, so they are not among those counted for it. But a container that links a file into many
//! directories, and holds it, has as many of them as it likes.

use poolfs_libservice::Headroom;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Fewer more or less than were told are not told.
const STEP: u64 = 64;

/// From so many on no file remembers a further name.
const MANY: u64 = 8192;

/// How many there are, and who is told.
#[derive(Default)]
pub(crate) struct Pinned {
    now: AtomicU64,
    told: AtomicU64,
    telling: Mutex<()>,
    room: OnceLock<Arc<dyn Headroom>>,
}

impl Pinned {
    /// Whether a node was one of them before it changed, and is one now. Under the lock of the nodes; then, without it, [`Pinned::tell`].
    pub fn change(&self, before: bool, after: bool) {
        match (before, after) {
            (false, true) => _ = self.now.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.now.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
    }

    /// Whether there are so many that nothing is remembered for which there would be more, if it can be found again.
    pub fn are_many(&self) -> bool {
        self.now.load(Ordering::Relaxed) >= MANY
    }

    /// Where they are counted from now on, without being refused. Set once.
    pub fn set_room(&self, room: Arc<dyn Headroom>) {
        let _ = self.room.set(room);
        self.tell();
    }

    /// Tells how many there are, if that has changed much. Not under the lock of the nodes: other layers may do something for it.
    pub fn tell(&self) {
        let Some(room) = self.room.get() else { return };
        if self.now.load(Ordering::Relaxed).abs_diff(self.told.load(Ordering::Relaxed)) < STEP {
            return;
        }
        let _one_at_a_time = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now.load(Ordering::Relaxed);
        let told = self.told.swap(now, Ordering::Relaxed);
        if now > told {
            room.force(now - told);
        } else if now < told {
            room.subtract(told - now);
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(room) = self.room.get() {
            room.subtract(self.told.load(Ordering::Relaxed));
        }
    }
}
