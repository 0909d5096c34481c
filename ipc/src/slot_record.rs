//! What the caller's end notes of a slot of posted writes: which call posts in it, and what was posted there last.

use crate::hold::Hold;
use crate::posts::PostGrant;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use poolfs_types::limits::CACHED_SIZE_MAX;

/// Where the bytes of a write go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PostAt {
    /// Behind the file's end, wherever that is by then.
    End,
    /// To this offset.
    Offset(u64),
}

impl PostAt {
    /// Whether what goes there continues `length` bytes at `self`.
    pub(crate) fn is_continued_by(self, next: Self, length: u64) -> bool {
        match (self, next) {
            (Self::End, Self::End) => true,
            (Self::Offset(start), Self::Offset(offset)) => start.checked_add(length) == Some(offset),
            _ => false,
        }
    }

    /// Whether a write of so many bytes there ends where only the branch knows whether a file may be that long: the writer is
    /// to hear it. For the end of a file the service sees to that.
    pub(crate) fn is_far(self, length: usize) -> bool {
        match self {
            Self::End => false,
            Self::Offset(offset) => offset.checked_add(length as u64).is_none_or(|end| end > CACHED_SIZE_MAX),
        }
    }
}

/// What was posted last in a slot, as long as it may be made longer.
pub(crate) struct Latest {
    pub grant: PostGrant,
    pub handle: u64,
    pub at: PostAt,
    pub buffer: usize,
    pub number: u32,
    pub length: u32,
}

/// Who posts in a slot, and what was posted there last. All zeros: nobody, and nothing was posted.
#[derive(Default)]
pub(crate) struct SlotRecord {
    pub hold: Hold,
    /// Number of the latest post.
    number: AtomicU64,
    /// That of the latest post's grant; 0: there is none that may be made longer. What follows is that post's.
    grant: AtomicU64,
    handle: AtomicU64,
    offset: AtomicU64,
    buffer: AtomicU32,
    appends: AtomicU32,
    sequence: AtomicU32,
    length: AtomicU32,
}

impl SlotRecord {
    /// Whether no call posts here.
    pub fn is_free(&self) -> bool {
        self.hold.is_free()
    }

    /// The number of a new post. One call at a time asks.
    pub fn next_number(&self) -> u64 {
        let number = self.number.load(Ordering::Relaxed).wrapping_add(1);
        self.number.store(number, Ordering::Relaxed);
        number
    }

    pub fn latest(&self) -> Option<Latest> {
        let offset = self.offset.load(Ordering::Relaxed);
        Some(Latest {
            grant: PostGrant::from_bits(self.grant.load(Ordering::Relaxed))?,
            handle: self.handle.load(Ordering::Relaxed),
            at: if self.appends.load(Ordering::Relaxed) == 1 { PostAt::End } else { PostAt::Offset(offset) },
            buffer: self.buffer.load(Ordering::Relaxed) as usize,
            number: self.sequence.load(Ordering::Relaxed),
            length: self.length.load(Ordering::Relaxed),
        })
    }

    pub fn set_latest(&self, latest: &Latest) {
        let (appends, offset) = match latest.at {
            PostAt::End => (1, 0),
            PostAt::Offset(offset) => (0, offset),
        };
        self.handle.store(latest.handle, Ordering::Relaxed);
        self.appends.store(appends, Ordering::Relaxed);
        self.offset.store(offset, Ordering::Relaxed);
        self.buffer.store(latest.buffer as u32, Ordering::Relaxed);
        self.sequence.store(latest.number, Ordering::Relaxed);
        self.length.store(latest.length, Ordering::Relaxed);
        self.grant.store(latest.grant.bits(), Ordering::Relaxed);
    }

    /// What was posted last has so many bytes now.
    pub fn lengthen(&self, length: u32) {
        self.length.store(length, Ordering::Relaxed);
    }

    /// What was posted last stays as long as it is.
    pub fn forget_latest(&self) {
        self.grant.store(0, Ordering::Relaxed);
    }
}
