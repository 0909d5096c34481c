//! Lives of the library's state. Each process that finds it empty begins another one, and a call knows in which it began.

use core::sync::atomic::{AtomicU32, Ordering};
use poolfs_ipc::hold::Frame;

const NONE: u32 = 0;
const BEGINNING: u32 = 1;
const FIRST: u32 = 2;

/// The number of the next life. Not in memory that is wiped at fork: a child counts on from its parent's.
static NEXT: AtomicU32 = AtomicU32::new(FIRST);

/// Which life it is, if any. Zeros are none.
#[repr(transparent)]
pub struct Life(AtomicU32);

/// Whose turn it is to begin a life.
pub enum Turn {
    /// The caller's, who says when it has ([`Life::has_begun`]).
    Own,
    /// A thread's, or that of the code which this signal handler has interrupted.
    Others,
    /// Nobody's: it has begun.
    Nobodys,
}

impl Life {
    /// Whose turn it is to begin one.
    pub fn begin(&self) -> Turn {
        match self.0.compare_exchange(NONE, BEGINNING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Turn::Own,
            Err(BEGINNING) => Turn::Others,
            Err(_) => Turn::Nobodys,
        }
    }

    /// It has begun.
    pub fn has_begun(&self) {
        self.0.store(NEXT.fetch_add(1, Ordering::Relaxed), Ordering::Release);
    }

    /// Whether there is one.
    #[inline]
    pub fn is_there(&self) -> bool {
        self.0.load(Ordering::Acquire) >= FIRST
    }

    /// It has ended: calls that began in it are the kernel's.
    pub fn end(&self) {
        self.0.store(NONE, Ordering::Release);
    }
}

/// Where a call began, on the stack and in which life.
#[derive(Clone, Copy)]
pub struct Began {
    /// The call's place on the stack.
    pub frame: Frame,
    life: &'static Life,
    number: u32,
}

impl Began {
    /// The call with this place on the stack begins; nothing when there is no life.
    #[inline(always)]
    #[must_use]
    pub fn now(frame: Frame, life: &'static Life) -> Option<Self> {
        let number = life.0.load(Ordering::Acquire);
        (number >= FIRST).then_some(Self { frame, life, number })
    }

    /// Whether the life is the one in which the call began. In the child of a handler that forked it is not: the call goes on there with
    /// what it read of its parent's, and is the kernel's.
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        self.life.0.load(Ordering::Acquire) == self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_current_in_the_life_in_which_it_began() {
        static LIFE: Life = Life(AtomicU32::new(NONE));
        assert!(Began::now(Frame::here(), &LIFE).is_none() && !LIFE.is_there());
        assert!(matches!(LIFE.begin(), Turn::Own) && matches!(LIFE.begin(), Turn::Others));
        assert!(Began::now(Frame::here(), &LIFE).is_none());
        LIFE.has_begun();
        let call = Began::now(Frame::here(), &LIFE).expect("a life");
        assert!(call.is_current() && matches!(LIFE.begin(), Turn::Nobodys));
        LIFE.end();
        assert!(!call.is_current() && matches!(LIFE.begin(), Turn::Own));
        LIFE.has_begun();
        assert!(!call.is_current(), "another life");
    }
}
