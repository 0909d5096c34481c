//! The state machine of one request buffer: the shared state word, and the service's own record beside it.
//!
//! ```text
//! shared word   [1:0] FREE 0, BORROWED 1, SUBMITTED 2, DONE 3   [2] a caller sleeps on the word   [3] POST   [31:4] sequence number
//!
//! caller:   FREE n -> BORROWED n -> SUBMITTED n+1 ............ DONE n+1 -> FREE n+1
//! a post:   FREE n -> BORROWED n -> SUBMITTED|POST n+1 ....... DONE|POST n+1, which is FREE n+1 for who borrows next
//! service:                          IDLE n -> RUNNING n+1 -> IDLE n+1        (private: only the service can write it)
//! ```
//!
//! The shared word is a hint. The service runs a request only after its own record went from `IDLE n` to `RUNNING n+1` in one
//! compare-and-swap, so a forged, repeated or late doorbell runs nothing twice. POST tells a request whose caller does not wait
//! ([`crate::posts`]) from one that a doorbell calls for: each is acquired in its own way only.

use crate::sync::{AtomicU32, Ordering, fence};

const FREE: u32 = 0;
const BORROWED: u32 = 1;
const SUBMITTED: u32 = 2;
const DONE: u32 = 3;
const STATE_MASK: u32 = 3;
const WAITING: u32 = 4;
const POST: u32 = 8;
const SEQUENCE_SHIFT: u32 = 4;
const SEQUENCE_MASK: u32 = u32::MAX >> SEQUENCE_SHIFT;

/// The number of one call on one buffer, and whether it is a post; the number wraps at 2^28.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    number: u32,
    is_post: bool,
}

impl Sequence {
    fn new(number: u32) -> Self {
        Self { number: number & SEQUENCE_MASK, is_post: false }
    }

    /// The number of the request in a buffer with this state word.
    fn of(word: u32) -> Self {
        Self { number: word >> SEQUENCE_SHIFT, is_post: word & POST != 0 }
    }

    pub(crate) fn next(self) -> Self {
        Self::new(self.number.wrapping_add(1))
    }

    fn previous(self) -> Self {
        Self::new(self.number.wrapping_sub(1))
    }

    fn plain(self) -> Self {
        Self { is_post: false, ..self }
    }

    fn as_post(self) -> Self {
        Self { is_post: true, ..self }
    }

    fn with(self, state: u32) -> u32 {
        (self.number << SEQUENCE_SHIFT) | if self.is_post { POST } else { 0 } | state
    }

    /// The bare number, as the extent of a post has it.
    pub(crate) fn number(self) -> u32 {
        self.number
    }
}

/// What a call that was left by a jump has in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// Nothing that anybody looks at: the buffer is borrowed again, and this is the number to go on with.
    Nothing(Sequence),
    /// A request that is under way.
    Request,
    /// A post with this number.
    Post(Sequence),
}

/// The caller's view of a buffer's state word.
pub struct CallerState<'a>(&'a AtomicU32);

impl<'a> CallerState<'a> {
    /// The view of `word`.
    pub fn new(word: &'a AtomicU32) -> Self {
        Self(word)
    }

    /// Whether it can be borrowed at this moment.
    pub fn is_free(&self) -> bool {
        Self::can_be_borrowed(self.0.load(Ordering::Relaxed))
    }

    /// Nobody waits for the answer to a post: served, it leaves its buffer free.
    fn can_be_borrowed(word: u32) -> bool {
        word & STATE_MASK == FREE || word & (STATE_MASK | POST) == DONE | POST
    }

    /// FREE to BORROWED, by the caller that wins.
    pub fn borrow(&self) -> Option<Sequence> {
        let word = self.0.load(Ordering::Relaxed);
        if !Self::can_be_borrowed(word) {
            return None;
        }
        let sequence = Sequence::of(word).plain();
        self.0
            .compare_exchange(word, sequence.with(BORROWED), Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| sequence)
    }

    /// Whether a request has been served. If nobody holds the buffer, its caller has gone without waiting for the reply.
    pub fn is_served(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STATE_MASK == DONE
    }

    /// DONE to BORROWED, for who holds the buffer and has not submitted what was served: the number to go on with.
    pub fn borrow_served(&self) -> Option<Sequence> {
        let word = self.0.load(Ordering::Relaxed);
        let sequence = Sequence::of(word).plain();
        let is_served = word & STATE_MASK == DONE;
        let borrows =
            || self.0.compare_exchange(word, sequence.with(BORROWED), Ordering::Acquire, Ordering::Relaxed).is_ok();
        (is_served && borrows()).then_some(sequence)
    }

    /// What the caller that held the buffer left behind.
    pub fn recover(&self) -> Left {
        let word = self.0.load(Ordering::Acquire);
        if word & STATE_MASK == SUBMITTED {
            return if word & POST != 0 { Left::Post(Sequence::of(word)) } else { Left::Request };
        }
        let sequence = Sequence::of(word).plain();
        self.0.store(sequence.with(BORROWED), Ordering::Relaxed);
        Left::Nothing(sequence)
    }

    /// A post that the service was never told of, SUBMITTED to BORROWED: the number to go on with.
    pub fn take_back(&self, post: Sequence) -> Sequence {
        let sequence = post.previous();
        self.0.store(sequence.with(BORROWED), Ordering::Relaxed);
        sequence
    }

    /// BORROWED to SUBMITTED: publishes the request. Returns the number the reply will carry.
    pub fn submit(&self, borrowed: Sequence) -> Sequence {
        let sequence = borrowed.next();
        self.0.store(sequence.with(SUBMITTED), Ordering::Release);
        sequence
    }

    /// BORROWED to SUBMITTED|POST, which no doorbell of the buffer calls for. Returns the post's number.
    pub fn submit_post(&self, borrowed: Sequence) -> Sequence {
        let sequence = borrowed.next().as_post();
        self.0.store(sequence.with(SUBMITTED), Ordering::Release);
        sequence
    }

    /// Whether the reply to `submitted` is there; if so it is visible to this thread.
    pub fn is_done(&self, submitted: Sequence) -> bool {
        self.0.load(Ordering::Acquire) & !WAITING == submitted.with(DONE)
    }

    /// Whether what was read of the reply to `submitted` is it: the service has not withdrawn the memory meanwhile.
    pub fn is_still_done(&self, submitted: Sequence) -> bool {
        // What was read before the word, and the word before it was withdrawn.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) & !WAITING == submitted.with(DONE)
    }

    /// Says that the caller is about to sleep: the value to sleep on, or nothing when it need not (the reply is there, or the
    /// buffer was withdrawn).
    pub fn announce_sleep(&self, submitted: Sequence) -> Option<u32> {
        let before = submitted.with(SUBMITTED);
        match self.0.compare_exchange(before, before | WAITING, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(before | WAITING),
            Err(now) if now == before | WAITING => Some(now),
            Err(_) => None,
        }
    }

    /// Back to FREE, keeping the number.
    pub fn give_back(&self, last: Sequence) {
        self.0.store(last.plain().with(FREE), Ordering::Release);
    }
}

/// The service's last word on a buffer whose memory it is about to give back: no reply is there any more.
pub fn withdraw(word: &AtomicU32) {
    word.store(FREE, Ordering::Relaxed);
    // The word before the memory: the other half is in `is_still_done`.
    fence(Ordering::Release);
}

const RUNNING: u32 = 1;

/// The service's private record of one buffer.
#[derive(Debug)]
pub struct Acquisition(AtomicU32);

impl Default for Acquisition {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Acquisition {
    /// The number after the last one served, unless a request is being served.
    fn next(record: u32) -> Option<Sequence> {
        (record & RUNNING == 0).then(|| Sequence::new(record >> 1).next())
    }

    /// Acquires the buffer whose shared state is `word`, when that is SUBMITTED with the number after the last one served.
    /// The request is then visible to this thread. Whatever the word holds otherwise, a post too, nothing changes.
    pub fn acquire(&self, word: &AtomicU32) -> Option<Sequence> {
        let record = self.0.load(Ordering::Acquire);
        self.run(record, word, Self::next(record)?)
    }

    /// As [`Acquisition::acquire`], when it is SUBMITTED|POST.
    pub fn acquire_post(&self, word: &AtomicU32) -> Option<Sequence> {
        let record = self.0.load(Ordering::Acquire);
        self.run(record, word, Self::next(record)?.as_post())
    }

    fn run(&self, record: u32, word: &AtomicU32, next: Sequence) -> Option<Sequence> {
        if word.load(Ordering::Acquire) & !WAITING != next.with(SUBMITTED) {
            return None;
        }
        self.0
            .compare_exchange(record, (next.number << 1) | RUNNING, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| next)
    }

    /// Whether `word` holds a request that was not acquired yet, other than a post.
    pub fn is_due(&self, word: &AtomicU32) -> bool {
        let next = Self::next(self.0.load(Ordering::Acquire));
        next.is_some_and(|next| word.load(Ordering::Relaxed) & !WAITING == next.with(SUBMITTED))
    }

    /// Whether a request, or a post, is being served.
    pub fn is_running(&self) -> bool {
        self.0.load(Ordering::Acquire) & RUNNING != 0
    }

    /// Publishes the reply written before; returns whether the caller has to be woken.
    ///
    /// The record is IDLE before the word says DONE, so that a next request never finds its buffer still running.
    pub fn finish(&self, word: &AtomicU32, sequence: Sequence) -> bool {
        self.0.store(sequence.number << 1, Ordering::Release);
        word.swap(sequence.with(DONE), Ordering::AcqRel) & WAITING != 0
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_call_goes_round_and_its_doorbell_runs_nothing_twice() {
        let word = AtomicU32::new(0);
        let caller = CallerState::new(&word);
        let record = Acquisition::default();
        for _ in 0..3 {
            let borrowed = caller.borrow().expect("free");
            assert!(caller.borrow().is_none(), "borrowed twice");
            assert!(record.acquire(&word).is_none(), "not submitted");
            let submitted = caller.submit(borrowed);
            let running = record.acquire(&word).expect("submitted");
            assert!(record.acquire(&word).is_none(), "acquired twice");
            assert!(!caller.is_done(submitted));
            assert!(caller.announce_sleep(submitted).is_some());
            assert!(record.finish(&word, running), "the sleeper is to be woken");
            assert!(record.acquire(&word).is_none(), "served twice");
            assert!(caller.is_done(submitted));
            assert!(caller.announce_sleep(submitted).is_none());
            caller.give_back(submitted);
        }
    }

    #[test]
    fn no_scribble_on_the_word_runs_an_old_request_again() {
        let record = Acquisition::default();
        let word = AtomicU32::new(Sequence::new(1).with(SUBMITTED));
        let first = record.acquire(&word).expect("the first request");
        record.finish(&word, first);
        for scribble in
            [0, 1, 1 << 4 | SUBMITTED, 3 << 4 | SUBMITTED, u32::MAX, 2 << 4 | DONE, 2 << 4 | POST | SUBMITTED]
        {
            word.store(scribble, Ordering::Relaxed);
            assert!(record.acquire(&word).is_none(), "{scribble:#x}");
        }
        word.store(Sequence::new(2).with(SUBMITTED) | WAITING, Ordering::Relaxed);
        assert!(record.acquire(&word).is_some());
    }

    #[test]
    fn a_withdrawn_buffer_is_neither_done_nor_slept_on() {
        let word = AtomicU32::new(0);
        let caller = CallerState::new(&word);
        let submitted = caller.submit(caller.borrow().expect("free"));
        let record = Acquisition::default();
        let running = record.acquire(&word).expect("submitted");
        record.finish(&word, running);
        assert!(caller.is_done(submitted) && caller.is_still_done(submitted));
        withdraw(&word);
        assert!(!caller.is_done(submitted) && !caller.is_still_done(submitted));
        assert!(caller.announce_sleep(submitted).is_none());
    }

    #[test]
    fn a_buffer_whose_caller_has_gone_is_borrowed_again_once_its_request_is_served() {
        let word = AtomicU32::new(0);
        let caller = CallerState::new(&word);
        let record = Acquisition::default();
        let submitted = caller.submit(caller.borrow().expect("free"));
        assert!(caller.announce_sleep(submitted).is_some());
        let running = record.acquire(&word).expect("submitted");
        assert!(!caller.is_free() && !caller.is_served() && caller.borrow_served().is_none());
        record.finish(&word, running);
        assert!(!caller.is_free() && caller.is_served() && caller.borrow().is_none());
        let next = caller.submit(caller.borrow_served().expect("served"));
        assert_eq!(next, submitted.next());
        assert!(caller.borrow_served().is_none() && record.acquire(&word).is_some());
    }

    #[test]
    fn numbers_wrap() {
        let word = AtomicU32::new(Sequence::new(SEQUENCE_MASK).with(FREE));
        let caller = CallerState::new(&word);
        let submitted = caller.submit(caller.borrow().expect("free"));
        assert_eq!(submitted, Sequence::new(0));
        assert_eq!(submitted.as_post().previous(), Sequence::new(SEQUENCE_MASK));
    }
}
