//! Posted writes: the steps of both ends on the words that they share.
//!
//! A *post* is a write whose caller does not wait for the answer. The service allows it for one open file at a time in each of a
//! session's *slots*, by an epoch in the slot's `granted` word. The caller submits the request in an ordinary buffer and sets the
//! buffer's bit in `posted`; the service finds it there. As long as nobody has taken the post, the next write may extend it: its
//! *extent* says how long it is, and the service closes that when it takes the post.
//!
//! ```text
//! caller    extent open; SUBMITTED|POST; bit set; fence; granted, tended?      bytes behind; extent longer, if it is open
//! service   granted 0 or tended 0; fence; bits?      RUNNING; extent closed; serve; bit cleared; DONE|POST
//! ```
//!
//! Two fences decide which side sees the other. Either the caller sees that the grant is gone, and waits for the answer, or the
//! side that revoked it sees the bit. Either the caller sees that nobody tends the slot, and rings, or the last thread that
//! tended it sees the bit.
//!
//! **Invariants.** A bit is set after its buffer says SUBMITTED|POST, so that no true bit is ever taken for a forged one. It is
//! cleared when the post has been served, so that a slot without bits has nothing outstanding, and before the buffer can be
//! borrowed again. Bytes are added by the holder of the buffer, before the extent says so.

use crate::state::{Acquisition, CallerState, Sequence};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use crate::wire::Reply;

/// Slots of a session: open files whose writes may be posted at a time.
pub const POST_SLOTS: usize = 16;

/// Most posts of a slot outstanding.
pub const POSTED_MAX: u32 = 16;

/// Most bytes of one write that is posted.
pub const POST_BYTES_MAX: usize = 64 << 10;

/// With more posts of a slot outstanding its doorbell is rung, also when a thread of the service tends it.
pub const UNRUNG_MAX: u32 = 4;

/// What allows writes of one open file to be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostGrant {
    slot: u32,
    epoch: u32,
}

impl PostGrant {
    /// The grant of a slot; nothing for a slot that does not exist, and for epoch 0.
    #[must_use]
    pub fn new(slot: u32, epoch: u32) -> Option<Self> {
        ((slot as usize) < POST_SLOTS && epoch != 0).then_some(Self { slot, epoch })
    }

    /// What the reply to a write says.
    #[must_use]
    pub fn of_reply(reply: &Reply) -> Option<Self> {
        Self::new(reply.post_slot.checked_sub(1)?, reply.post_epoch)
    }

    /// The slot.
    #[must_use]
    pub fn slot(self) -> u32 {
        self.slot
    }

    /// The slot's epoch, as long as it is not revoked.
    #[must_use]
    pub fn epoch(self) -> u32 {
        self.epoch
    }

    /// In one number, which is never 0.
    #[must_use]
    pub fn bits(self) -> u64 {
        u64::from(self.epoch) << 32 | u64::from(self.slot + 1)
    }

    /// The grant with these bits, if they are one's.
    #[must_use]
    pub fn from_bits(bits: u64) -> Option<Self> {
        Self::new((bits as u32).checked_sub(1)?, (bits >> 32) as u32)
    }
}

/// What a caller sees after it has set the bit of its post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The grant is not revoked: whoever revokes it finds the post, and the caller need not wait.
    pub is_granted: bool,
    /// Whether the slot's doorbell is to be rung.
    pub must_ring: bool,
}

/// The words of one slot.
#[derive(Clone, Copy)]
pub struct SlotWords<'a> {
    granted: &'a AtomicU32,
    tended: &'a AtomicU32,
    posted: &'a AtomicU64,
}

impl<'a> SlotWords<'a> {
    /// The slot with these words.
    #[must_use]
    pub const fn new(granted: &'a AtomicU32, tended: &'a AtomicU32, posted: &'a AtomicU64) -> Self {
        Self { granted, tended, posted }
    }

    /// Whether this epoch's grant is not revoked.
    #[inline]
    #[must_use]
    pub fn is_granted(&self, epoch: u32) -> bool {
        self.granted.load(Ordering::Acquire) == epoch
    }

    /// The buffers whose posts have not been served, a bit for each. What those did that are not among them any more is
    /// visible to this thread.
    #[inline]
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.posted.load(Ordering::Acquire)
    }

    /// The caller: the post in `buffer` is there.
    pub fn publish(&self, buffer: usize, epoch: u32) -> Published {
        let bits = self.posted.fetch_or(1 << buffer, Ordering::AcqRel) | 1 << buffer;
        // The bit before the questions: the other halves are in `revoke` and `tend`.
        fence(Ordering::SeqCst);
        Published {
            is_granted: self.granted.load(Ordering::Relaxed) == epoch,
            must_ring: self.tended.load(Ordering::Relaxed) == 0 || bits.count_ones() > UNRUNG_MAX,
        }
    }

    /// The service: writes of one open file may be posted from now on.
    pub fn grant(&self, epoch: u32) {
        self.granted.store(epoch, Ordering::Release);
    }

    /// The service: no write that begins now is posted. All that were are among those [posted](Self::posted).
    pub fn revoke(&self) {
        self.granted.store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The service: whether a thread looks at the slot without being called. After `false`, what nobody calls for is among
    /// those [posted](Self::posted).
    pub fn tend(&self, tended: bool) {
        self.tended.store(u32::from(tended), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The service: the posts in these buffers have been served, or there were none. What was done before is visible to
    /// whoever finds the bits cleared.
    pub fn clear(&self, buffers: u64) {
        self.posted.fetch_and(!buffers, Ordering::AcqRel);
    }
}

/// The word that tells how long a post is: `[31:0]` bytes, `[62:32]` the buffer's sequence number, `[63]` closed.
#[derive(Clone, Copy)]
pub struct Extent<'a>(&'a AtomicU64);

impl<'a> Extent<'a> {
    const CLOSED: u64 = 1 << 63;

    /// The extent in this word.
    #[must_use]
    pub const fn new(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    const fn open(number: u32, length: u32) -> u64 {
        (number as u64) << 32 | length as u64
    }

    /// The caller, before it submits the post with this number.
    fn begin(&self, number: u32, length: u32) {
        self.0.store(Self::open(number, length), Ordering::Relaxed);
    }

    /// The caller: whether the post with this number is as long as it has made it, and nobody has taken it yet.
    #[must_use]
    pub fn is_open(&self, number: u32, length: u32) -> bool {
        self.0.load(Ordering::Relaxed) == Self::open(number, length)
    }

    /// The caller, who holds the buffer: makes it longer, by bytes that `put` brings to their place. Whether it did: not once
    /// the post was taken.
    pub fn grow(&self, number: u32, from: u32, to: u32, put: impl FnOnce() -> bool) -> bool {
        // Only a buffer that nobody has borrowed since has it open.
        if !self.is_open(number, from) || !put() {
            return false;
        }
        let (old, new) = (Self::open(number, from), Self::open(number, to));
        self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Closes it. How long the post is, the bytes of which are then visible to this thread; nothing when it was closed
    /// before, or is another post's.
    pub fn close(&self, sequence: Sequence) -> Option<u32> {
        let before = self.0.fetch_or(Self::CLOSED, Ordering::AcqRel);
        (before >> 32 == u64::from(sequence.number())).then_some(before as u32)
    }
}

/// The caller: submits what is in a borrowed buffer as a post of so many bytes. Its number, and what comes of it.
pub fn submit(
    words: &SlotWords<'_>,
    (state, extent): (&CallerState<'_>, Extent<'_>),
    (buffer, borrowed): (usize, Sequence),
    epoch: u32,
    length: u32,
) -> (Sequence, Published) {
    extent.begin(borrowed.next().number(), length);
    let submitted = state.submit_post(borrowed);
    (submitted, words.publish(buffer, epoch))
}

/// The caller: takes back what a call of this thread has left in a buffer between submitting it and setting its bit.
/// The number to go on with; nothing when the service has been told of it: then it is served.
pub fn take_back(
    mut slots: impl Iterator<Item = u64>,
    (state, extent): (&CallerState<'_>, Extent<'_>),
    (buffer, post): (usize, Sequence),
) -> Option<Sequence> {
    // A bit that was cleared means that the extent is closed: it is looked at later.
    let is_known = slots.any(|posted| posted >> buffer & 1 == 1);
    (!is_known && extent.close(post).is_some()).then(|| state.take_back(post))
}

/// The service: takes the post in `buffer`, whose bit was found set. Its number, and how long it is, if that can be told.
///
/// Whoever takes a slot's posts has its lock until they are served. A bit that no post has set is cleared; should the buffer
/// then turn out to hold one, somebody did without the lock, and the post is taken all the same.
pub fn take(
    words: &SlotWords<'_>,
    record: &Acquisition,
    (word, extent): (&AtomicU32, Extent<'_>),
    buffer: usize,
) -> Option<(Sequence, Option<u32>)> {
    let acquired = record.acquire_post(word).or_else(|| {
        if record.is_running() {
            return None;
        }
        words.clear(1 << buffer);
        record.acquire_post(word)
    });
    acquired.map(|sequence| (sequence, extent.close(sequence)))
}

/// The service: publishes the reply, written before, to the post in `buffer`; whether its caller waits for it after all and has
/// to be woken.
pub fn finish(
    words: &SlotWords<'_>,
    record: &Acquisition,
    word: &AtomicU32,
    (buffer, sequence): (usize, Sequence),
) -> bool {
    // The bit before the buffer, which the next post may be in as soon as it is DONE.
    words.clear(1 << buffer);
    record.finish(word, sequence)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Memory {
        granted: AtomicU32,
        tended: AtomicU32,
        posted: AtomicU64,
        word: AtomicU32,
        extent: AtomicU64,
        record: Acquisition,
    }

    impl Memory {
        fn words(&self) -> SlotWords<'_> {
            SlotWords::new(&self.granted, &self.tended, &self.posted)
        }

        fn place(&self) -> (CallerState<'_>, Extent<'_>) {
            (CallerState::new(&self.word), Extent::new(&self.extent))
        }

        fn submit(&self, buffer: usize, epoch: u32, length: u32) -> (Sequence, Published) {
            let (state, extent) = self.place();
            let borrowed = state.borrow().expect("free");
            super::submit(&self.words(), (&state, extent), (buffer, borrowed), epoch, length)
        }

        fn take(&self, buffer: usize) -> Option<(Sequence, Option<u32>)> {
            super::take(&self.words(), &self.record, (&self.word, Extent::new(&self.extent)), buffer)
        }

        fn finish(&self, buffer: usize, sequence: Sequence) -> bool {
            super::finish(&self.words(), &self.record, &self.word, (buffer, sequence))
        }
    }

    #[test]
    fn grants_survive_their_bits_and_nothing_else_is_one() {
        for (slot, epoch) in [(0, 1), (15, u32::MAX), (7, 1 << 31)] {
            let grant = PostGrant::new(slot, epoch).expect("a grant");
            assert_eq!((PostGrant::from_bits(grant.bits()), grant.slot(), grant.epoch()), (Some(grant), slot, epoch));
            let reply = Reply { post_slot: slot + 1, post_epoch: epoch, ..Reply::default() };
            assert_eq!(PostGrant::of_reply(&reply), Some(grant));
        }
        for (post_slot, post_epoch) in [(0, 0), (0, 1), (1, 0), (17, 1), (u32::MAX, 1)] {
            assert_eq!(PostGrant::of_reply(&Reply { post_slot, post_epoch, ..Reply::default() }), None);
            assert_eq!(PostGrant::from_bits(u64::from(post_epoch) << 32 | u64::from(post_slot)), None);
        }
    }

    #[test]
    fn a_post_grows_until_it_is_taken_and_leaves_its_buffer_free() {
        let memory = Memory::default();
        memory.words().grant(3);
        memory.words().tend(true);
        for round in 1..4 {
            let (posted, published) = memory.submit(63, 3, 5);
            assert_eq!(published, Published { is_granted: true, must_ring: false });
            let (state, extent) = memory.place();
            assert!(!state.is_free() && memory.words().posted() == 1 << 63);
            let number = posted.number();
            assert_eq!(number, round);
            assert!(extent.grow(number, 5, 9, || true));
            assert!(!extent.grow(number, 5, 9, || panic!("it is longer")) && !extent.grow(number, 9, 12, || false));
            let (taken, length) = memory.take(63).expect("posted");
            assert_eq!((taken, length), (posted, Some(9)));
            assert!(!extent.grow(number, 9, 10, || panic!("it is closed")) && memory.take(63).is_none());
            assert!(!state.is_done(posted) && memory.words().posted() == 1 << 63, "it is being served");
            assert!(!memory.finish(63, taken), "nobody sleeps");
            assert!(state.is_done(posted) && state.is_free() && memory.words().posted() == 0);
        }
    }

    #[test]
    fn who_finds_the_grant_gone_waits_and_is_woken() {
        let memory = Memory::default();
        memory.words().grant(3);
        memory.words().revoke();
        let (posted, published) = memory.submit(1, 3, 5);
        assert_eq!(published, Published { is_granted: false, must_ring: true });
        let (state, _) = memory.place();
        assert!(state.announce_sleep(posted).is_some());
        assert!(memory.record.acquire(&memory.word).is_none(), "a doorbell of the buffer does not call for it");
        assert!(!memory.record.is_due(&memory.word));
        let (taken, _) = memory.take(1).expect("posted");
        assert!(memory.finish(1, taken) && state.is_done(posted));
        state.give_back(posted);
        assert!(state.is_free());
    }

    #[test]
    fn many_outstanding_ring_though_somebody_tends_them() {
        let memory = Memory::default();
        memory.words().tend(true);
        let rings: Vec<bool> = (0..8).map(|buffer| memory.words().publish(buffer, 1).must_ring).collect();
        assert_eq!(rings, [false, false, false, false, true, true, true, true]);
    }

    #[test]
    fn a_bit_without_a_post_is_cleared_and_extents_of_others_tell_no_length() {
        let memory = Memory::default();
        memory.words().publish(0, 1);
        assert!(memory.take(0).is_none() && memory.words().posted() == 0);
        for forged in [0, u64::MAX, 1 << 63 | 1 << 32 | 5, 2 << 32 | 5] {
            let fresh = Memory::default();
            let (posted, _) = fresh.submit(0, 1, 5);
            fresh.extent.store(forged, Ordering::Relaxed);
            assert_eq!(fresh.take(0), Some((posted, None)), "{forged:#x}");
        }
        // A running request keeps a bit that somebody has set for it.
        let (state, _) = memory.place();
        state.submit(state.borrow().expect("free"));
        let running = memory.record.acquire(&memory.word).expect("submitted");
        memory.words().publish(0, 1);
        assert!(memory.take(0).is_none() && memory.words().posted() == 1);
        memory.record.finish(&memory.word, running);
    }

    #[test]
    fn what_was_not_published_is_taken_back_once() {
        let memory = Memory::default();
        let (posted, _) = memory.submit(4, 1, 5);
        let (state, extent) = memory.place();
        let take_back =
            |posted_bits: u64| super::take_back([0, posted_bits].into_iter(), (&state, extent), (4, posted));
        assert_eq!(take_back(memory.words().posted()), None, "the service knows of it");
        let again = take_back(0).expect("taken back");
        assert_eq!(again.next().number(), posted.number());
        state.give_back(again);
        assert_eq!(memory.submit(4, 1, 6).0, posted, "the service waits for this number");
        assert_eq!(memory.take(4), Some((posted, Some(6))));
        assert_eq!(take_back(0), None, "it is being served");
    }
}
