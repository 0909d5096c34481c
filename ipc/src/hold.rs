//! Lock-free ownership of a resource by one call at a time, with recovery from calls that were left by `siglongjmp`.
//!
//! A signal handler may leave the call that it interrupted by `siglongjmp`, and then nobody gives back what that call held. But a
//! stack grows downwards: code that runs on the same stack, at the place of the interrupted call or above it, has left that call
//! behind.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// One call: its place on the calling thread's stack, as high as, or higher than, all that is called from where it was taken,
/// and the time, which tells it from a later call at the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    place: usize,
    time: u64,
}

impl Frame {
    /// The caller's.
    #[inline(always)]
    #[must_use]
    pub fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let place: usize;
            // SAFETY: copies the stack pointer to a register.
            unsafe {
                core::arch::asm!("mov {}, rsp", out(reg) place, options(nomem, nostack, preserves_flags));
            }
            // SAFETY: every x86-64 processor has the counter.
            let time = unsafe { core::arch::x86_64::_rdtsc() };
            Self { place, time }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            static CALLS: AtomicU64 = AtomicU64::new(0);
            let local = 0_u8;
            Self { place: core::ptr::from_ref(&local).addr(), time: CALLS.fetch_add(1, Ordering::Relaxed) }
        }
    }
}

/// A number that tells the calling thread from all other threads of the process; never 0.
pub(crate) fn thread_token() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let token: usize;
        // SAFETY: on x86-64 Linux the thread pointer's first word points to itself, for every libc; reading it has no effect.
        unsafe { core::arch::asm!("mov {}, fs:[0]", out(reg) token, options(nostack, readonly, preserves_flags)) };
        token | 1
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        rustix::thread::gettid().as_raw_nonzero().get() as usize
    }
}

/// The hold of one call on something. All zeros: free.
///
/// Thread and place change in one step: a handler may leave a call between any two instructions, and what it has by then tells
/// whose it was. The place of a free one says nothing, nor does the time until it is stored: it is an older call's.
#[derive(Debug, Default)]
#[repr(C, align(16))]
pub struct Hold {
    thread: AtomicUsize,
    place: AtomicUsize,
    time: AtomicU64,
}

impl Hold {
    /// A free one.
    #[must_use]
    pub const fn new() -> Self {
        Self { thread: AtomicUsize::new(0), place: AtomicUsize::new(0), time: AtomicU64::new(0) }
    }

    /// Takes it for a call whose frame is `frame`, when it is free. Sequentially consistent, as [`Hold::is_free`] is: of one
    /// who takes it and then looks at a word, and one who changes the word and then looks here, one sees the other.
    pub fn take(&self, frame: Frame) -> bool {
        let place = self.place.load(Ordering::Relaxed);
        self.thread.load(Ordering::Relaxed) == 0 && self.change((0, place), frame)
    }

    /// Takes it when it is free, or was held by a call that this thread has left.
    pub fn take_or_recover(&self, frame: Frame) -> bool {
        self.take(frame) || self.recover(frame)
    }

    /// Takes what a call had that this thread [has left](Hold::is_left).
    pub fn recover(&self, frame: Frame) -> bool {
        let place = self.place.load(Ordering::Relaxed);
        // A handler that comes now may find the same, and be done with it when this goes on.
        self.is_left(frame) && self.change((thread_token(), place), frame)
    }

    /// To the calling thread and the place of `frame`, from what was seen of it.
    fn change(&self, seen: (usize, usize), frame: Frame) -> bool {
        let changed = self.exchange(seen, (thread_token(), frame.place));
        if changed {
            self.time.store(frame.time, Ordering::Relaxed);
        }
        changed
    }

    /// Compares thread and place with `old` and replaces them by `new`, in one sequentially consistent step.
    #[cfg(target_arch = "x86_64")]
    fn exchange(&self, old: (usize, usize), new: (usize, usize)) -> bool {
        let equal: usize;
        // SAFETY: the pair is the first 16 bytes of a structure aligned to as many, and changed by atomics alone; every x86-64
        // processor that Linux still starts on has the instruction. rbx, which the compiler keeps for itself, is put back.
        unsafe {
            core::arch::asm!(
                "xchg {low}, rbx",
                "lock cmpxchg16b [rdi]",
                "mov rbx, {low}",
                "sete cl",
                "movzx ecx, cl",
                low = inout(reg) new.0 => _,
                inout("rcx") new.1 => equal,
                inout("rax") old.0 => _,
                inout("rdx") old.1 => _,
                in("rdi") core::ptr::from_ref(self),
                options(nostack),
            );
        }
        equal != 0
    }

    /// In two steps: a call that is left between them has, for those who look, the place of an older one.
    #[cfg(not(target_arch = "x86_64"))]
    fn exchange(&self, old: (usize, usize), new: (usize, usize)) -> bool {
        let changed = self.thread.compare_exchange(old.0, new.0, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if changed {
            self.place.store(new.1, Ordering::Relaxed);
        }
        changed
    }

    /// Gives it back.
    pub fn give_back(&self) {
        self.thread.store(0, Ordering::Release);
    }

    /// Whether nobody holds it.
    pub fn is_free(&self) -> bool {
        self.thread.load(Ordering::SeqCst) == 0
    }

    /// Whether a call of the calling thread holds it.
    pub fn is_own(&self) -> bool {
        self.thread.load(Ordering::Relaxed) == thread_token()
    }

    /// Whether a call of this thread holds it that is over: the thread is at `frame` now. One system call when it is its own.
    pub fn is_left(&self, frame: Frame) -> bool {
        let held = Frame { place: self.place.load(Ordering::Relaxed), time: self.time.load(Ordering::Relaxed) };
        self.is_own() && was_left(held, frame)
    }
}

/// Whether the call `held` is over when the thread is in the call `now`.
fn was_left(held: Frame, now: Frame) -> bool {
    if held.time == now.time {
        return false;
    }
    match alternate_stack() {
        // On the handlers' own stack nothing can be told of the other.
        Some(stack) if stack.contains(&now.place) => false,
        // A call on the handlers' stack, when that is not in use.
        Some(stack) if stack.contains(&held.place) => true,
        Some(_) => held.place <= now.place,
        None => false,
    }
}

/// The stack set aside for signal handlers (empty: none); nothing when it cannot be told.
fn alternate_stack() -> Option<core::ops::Range<usize>> {
    #[repr(C)]
    struct Stack {
        start: usize,
        flags: i32,
        length: usize,
    }
    const ON_STACK: i32 = 1;
    let mut stack = Stack { start: 0, flags: 0, length: 0 };
    #[cfg(target_arch = "x86_64")]
    {
        const SIGALTSTACK: usize = 131;
        let result: isize;
        // SAFETY: the kernel writes one `stack_t` to `stack`; the instruction clobbers rcx, r11 and rax.
        unsafe {
            core::arch::asm!(
                "syscall",
                inlateout("rax") SIGALTSTACK => result,
                in("rdi") 0_usize,
                in("rsi") &raw mut stack,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        if result != 0 {
            return None;
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    return None;
    if stack.flags & ON_STACK != 0 {
        // Also a stack that is taken out of use while it is used (SS_AUTODISARM) is one.
        return Some(0..usize::MAX);
    }
    Some(stack.start..stack.start.saturating_add(stack.length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn deeper<T>(run: impl FnOnce(Frame) -> T) -> T {
        let room = [1_u8; 4096];
        std::hint::black_box(&room);
        let result = run(Frame::here());
        std::hint::black_box(&room);
        result
    }

    #[test]
    fn what_a_deeper_call_left_is_recovered_and_what_an_outer_one_holds_is_not() {
        let hold = Hold::new();
        let outer = Frame::here();
        assert!(hold.take(outer));
        assert!(!deeper(|inner| hold.take_or_recover(inner)), "an interrupted call holds it");
        assert!(hold.is_own() && !hold.is_free());
        hold.give_back();
        assert!(deeper(|inner| hold.take(inner)));
        assert!(!std::thread::scope(|scope| {
            scope.spawn(|| hold.take_or_recover(Frame::here())).join().expect("another thread")
        }));
        assert!(hold.take_or_recover(outer), "the call that had it is over");
        assert!(!deeper(|inner| hold.take_or_recover(inner)), "it is held again");
        hold.give_back();
        assert!(hold.is_free());
    }

    #[test]
    fn one_call_may_hold_several() {
        let (first, second) = (Hold::new(), Hold::new());
        let frame = Frame::here();
        assert!(first.take(frame) && second.take(frame));
        assert!(!first.take_or_recover(frame) && !second.take_or_recover(frame));
    }

    #[test]
    fn a_call_that_comes_again_recovers_what_it_left() {
        let hold = Hold::new();
        for _ in 0..3 {
            assert!(deeper(|frame| hold.take_or_recover(frame)));
        }
    }
}
