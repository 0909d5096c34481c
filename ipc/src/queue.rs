//! The relaxed concurrent queue of doorbells (after Kappes and Anastasiadis): order is given up for concurrency.
//!
//! A fetch-and-add on `tail` or `head` only distributes threads over the slots; the second stage completes concurrently and
//! possibly out of order. A slot is one word, 0 when free, so that one compare-and-swap completes an operation and no slot is
//! ever half-written, whichever process dies where. Tickets are not binding: a thread that finds its own slot in the wrong state
//! goes on to the next, and a consumer that found nothing gives its ticket back.
//!
//! The shared words are not trusted. Indices are masked at each use; a doorbell is checked by the consumer that takes it. The
//! count of sleepers decides only whether a producer makes a system call, and is corrected by every consumer that goes to sleep.
//! Every sleep is bounded.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// Why the service is to look: a request buffer of a session, or posts of one of its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// The session's number in its instance.
    pub session: u32,
    /// The buffer's number in the session; with the highest bit a [slot of posts](Doorbell::of_posts).
    pub buffer: u16,
    /// Rung again after a long wait: the service looks at all buffers of the session.
    pub again: bool,
}

impl Doorbell {
    const VALID: u64 = 1 << 63;
    const AGAIN: u64 = 1 << 62;
    const POSTS: u16 = 1 << 15;

    /// The doorbell of the posts of a slot.
    #[must_use]
    pub fn of_posts(session: u32, slot: u16) -> Self {
        Self { session, buffer: Self::POSTS | slot, again: false }
    }

    /// The slot whose doorbell it is, as whoever rang says; nothing if it is a buffer's.
    #[must_use]
    pub fn posts_slot(self) -> Option<usize> {
        (self.buffer & Self::POSTS != 0).then_some(usize::from(self.buffer & !Self::POSTS))
    }

    /// The doorbell as a slot holds it; never 0.
    pub fn encode(self) -> u64 {
        let again = if self.again { Self::AGAIN } else { 0 };
        Self::VALID | again | u64::from(self.session) << 16 | u64::from(self.buffer)
    }

    /// The doorbell in a slot, if it is one.
    pub fn decode(word: u64) -> Option<Self> {
        let reserved = (word & !(Self::VALID | Self::AGAIN)) >> 48 != 0;
        (word & Self::VALID != 0 && !reserved).then_some(Self {
            session: (word >> 16) as u32,
            buffer: word as u16,
            again: word & Self::AGAIN != 0,
        })
    }
}

/// The queue has no free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A queue of doorbells between processes that do not trust each other.
///
/// Sleeping is left to the caller: [`announce_sleep`](Self::announce_sleep), look once more, sleep on
/// [`events`](Self::events) while it holds what was announced, [`end_sleep`](Self::end_sleep), scan again.
pub trait DoorbellQueue {
    /// Puts a doorbell into a free slot; returns whether a consumer may sleep and [`ring`](Self::ring) is due.
    ///
    /// # Errors
    /// [`Full`].
    fn publish(&self, doorbell: Doorbell) -> Result<bool, Full>;

    /// Advances the event count, after which sleepers have to be woken by the futex.
    fn ring(&self) -> &AtomicU32;

    /// Takes some doorbell. Words that are none are thrown away and counted.
    fn take(&self, rejected: &mut u64) -> Option<Doorbell>;

    /// Whether no slot holds a doorbell at this moment.
    fn is_empty(&self) -> bool;

    /// Doorbells in the queue at this moment, at most `limit`.
    fn backlog(&self, limit: usize) -> usize;

    /// The word consumers sleep on.
    fn events(&self) -> &AtomicU32;

    /// Says that `sleepers` consumers, this one among them, sleep or are about to; returns the event count to sleep on.
    /// The number is the service's own, so that whatever was scribbled there is put right each time.
    fn announce_sleep(&self, sleepers: u32) -> u32;

    /// Says that this consumer is awake and `sleepers` others are not.
    fn end_sleep(&self, sleepers: u32);
}

/// The words of a [`RelaxedQueue`] that are not slots.
pub struct QueueWords<'a> {
    /// Consumers' tickets.
    pub head: &'a AtomicU32,
    /// Producers' tickets.
    pub tail: &'a AtomicU32,
    /// The event count consumers sleep on.
    pub events: &'a AtomicU32,
    /// Consumers that sleep or are about to.
    pub sleepers: &'a AtomicU32,
    /// The event count producers sleep on when the queue is full.
    pub space: &'a AtomicU32,
    /// Producers that sleep or are about to.
    pub space_sleepers: &'a AtomicU32,
    /// Not 0 while the service wants requests to say when they were submitted.
    pub stamps: &'a AtomicU32,
}

/// The relaxed concurrent queue over words in shared memory.
pub struct RelaxedQueue<'a> {
    words: QueueWords<'a>,
    slots: &'a [AtomicU64],
}

/// Neighbouring tickets go to different cache lines: slots in one line.
const SLOTS_PER_LINE: usize = 8;

impl<'a> RelaxedQueue<'a> {
    /// A queue over these words; the number of slots is a power of two, at least 2.
    pub fn new(words: QueueWords<'a>, slots: &'a [AtomicU64]) -> Self {
        assert!(slots.len().is_power_of_two() && slots.len() >= 2);
        Self { words, slots }
    }

    fn slot(&self, ticket: u32) -> &AtomicU64 {
        let index = ticket as usize & (self.slots.len() - 1);
        // Both powers of two, so that nothing is divided: this runs for every slot of every scan.
        let line_bits = self.slots.len().trailing_zeros().saturating_sub(SLOTS_PER_LINE.trailing_zeros());
        if line_bits == 0 {
            return &self.slots[index];
        }
        let lines = 1 << line_bits;
        &self.slots[(index & (lines - 1)) * SLOTS_PER_LINE + (index >> line_bits)]
    }

    /// Says that this producer is about to sleep for space; returns the event count to sleep on.
    pub fn announce_full(&self) -> u32 {
        let seen = self.words.space.load(Ordering::Acquire);
        self.words.space_sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        seen
    }

    /// Takes [`announce_full`](Self::announce_full) back.
    pub fn end_full(&self) {
        self.words.space_sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// The word producers sleep on.
    pub fn space(&self) -> &AtomicU32 {
        self.words.space
    }

    /// Whether producers may sleep for space, after a doorbell was taken; [`space`](Self::space) has then advanced.
    pub fn must_wake_producers(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.words.space_sleepers.load(Ordering::Relaxed) == 0 {
            return false;
        }
        self.words.space.fetch_add(1, Ordering::Release);
        true
    }

    /// Says whether requests are to say when they were submitted.
    pub fn want_stamps(&self, wanted: bool) {
        self.words.stamps.store(u32::from(wanted), Ordering::Relaxed);
    }

    /// Whether the request about to be submitted is to say when.
    pub fn wants_stamps(&self) -> bool {
        self.words.stamps.load(Ordering::Relaxed) != 0
    }
}

impl DoorbellQueue for RelaxedQueue<'_> {
    fn publish(&self, doorbell: Doorbell) -> Result<bool, Full> {
        let ticket = self.words.tail.fetch_add(1, Ordering::Relaxed);
        for step in 0..self.slots.len() as u32 {
            let slot = self.slot(ticket.wrapping_add(step));
            if slot.load(Ordering::Relaxed) == 0
                && slot.compare_exchange(0, doorbell.encode(), Ordering::Release, Ordering::Relaxed).is_ok()
            {
                if step > 0 {
                    self.words.tail.fetch_add(step, Ordering::Relaxed);
                }
                // The doorbell before the question who sleeps: the other half is in `announce_sleep`.
                fence(Ordering::SeqCst);
                return Ok(self.words.sleepers.load(Ordering::Relaxed) != 0);
            }
        }
        Err(Full)
    }

    fn ring(&self) -> &AtomicU32 {
        self.words.events.fetch_add(1, Ordering::Release);
        self.words.events
    }

    fn take(&self, rejected: &mut u64) -> Option<Doorbell> {
        if self.is_empty() {
            return None;
        }
        let ticket = self.words.head.fetch_add(1, Ordering::Relaxed);
        for step in 0..self.slots.len() as u32 {
            let slot = self.slot(ticket.wrapping_add(step));
            if slot.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let word = slot.swap(0, Ordering::Acquire);
            if word == 0 {
                continue;
            }
            let Some(doorbell) = Doorbell::decode(word) else {
                *rejected += 1;
                continue;
            };
            if step > 0 {
                self.words.head.fetch_add(step, Ordering::Relaxed);
            }
            return Some(doorbell);
        }
        self.words.head.fetch_sub(1, Ordering::Relaxed);
        None
    }

    fn is_empty(&self) -> bool {
        // Where the next one is expected, then all in the order of memory, which is the cheapest.
        self.slot(self.words.head.load(Ordering::Relaxed)).load(Ordering::Relaxed) == 0
            && self.slots.iter().all(|slot| slot.load(Ordering::Relaxed) == 0)
    }

    fn backlog(&self, limit: usize) -> usize {
        let start = self.words.head.load(Ordering::Relaxed);
        (0..self.slots.len() as u32)
            .filter(|&step| self.slot(start.wrapping_add(step)).load(Ordering::Relaxed) != 0)
            .take(limit)
            .count()
    }

    fn events(&self) -> &AtomicU32 {
        self.words.events
    }

    fn announce_sleep(&self, sleepers: u32) -> u32 {
        let seen = self.words.events.load(Ordering::Acquire);
        self.words.sleepers.store(sleepers, Ordering::Relaxed);
        // The announcement before the last look at the slots: the other half is in `publish`.
        fence(Ordering::SeqCst);
        seen
    }

    fn end_sleep(&self, sleepers: u32) {
        self.words.sleepers.store(sleepers, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    struct Memory {
        words: [AtomicU32; 7],
        slots: Vec<AtomicU64>,
    }

    impl Memory {
        fn new(slots: usize) -> Self {
            Self { words: Default::default(), slots: (0..slots).map(|_| AtomicU64::new(0)).collect() }
        }

        fn queue(&self) -> RelaxedQueue<'_> {
            let [head, tail, events, sleepers, space, space_sleepers, stamps] = &self.words;
            RelaxedQueue::new(QueueWords { head, tail, events, sleepers, space, space_sleepers, stamps }, &self.slots)
        }
    }

    fn bell(n: u16) -> Doorbell {
        Doorbell { session: u32::from(n) << 8, buffer: n, again: n % 2 == 1 }
    }

    #[test]
    fn doorbells_survive_their_word() {
        for n in [0, 1, 77, u16::MAX] {
            assert_eq!(Doorbell::decode(bell(n).encode()), Some(bell(n)));
            assert_eq!(bell(n).posts_slot(), (n == u16::MAX).then_some(0x7FFF));
        }
        let posts = Doorbell::of_posts(7, 15);
        assert_eq!(Doorbell::decode(posts.encode()).map(|bell| (bell, bell.posts_slot())), Some((posts, Some(15))));
        for word in [0, 1, 1 << 62, 1 << 63 | 1 << 48, u64::MAX] {
            assert_eq!(Doorbell::decode(word), None, "{word:#x}");
        }
    }

    #[test]
    fn what_goes_in_comes_out_once_and_full_is_said() {
        for slots in [2, 16, 64] {
            let memory = Memory::new(slots);
            let queue = memory.queue();
            let mut rejected = 0;
            for round in 0..5 {
                for n in 0..slots as u16 {
                    assert_eq!(queue.publish(bell(n)), Ok(false));
                }
                assert_eq!(queue.publish(bell(0)), Err(Full));
                assert_eq!(queue.backlog(usize::MAX), slots);
                let mut out: Vec<_> =
                    std::iter::from_fn(|| queue.take(&mut rejected)).map(|bell| bell.buffer).collect();
                out.sort_unstable();
                assert_eq!(out, (0..slots as u16).collect::<Vec<_>>(), "round {round}");
            }
            assert_eq!(rejected, 0);
        }
    }

    #[test]
    fn scribbled_words_cost_nothing_but_themselves() {
        let memory = Memory::new(16);
        let queue = memory.queue();
        let mut rejected = 0;
        for (head, tail) in [(u32::MAX, 3), (77, u32::MAX - 1), (0, 0)] {
            memory.words[0].store(head, Ordering::Relaxed);
            memory.words[1].store(tail, Ordering::Relaxed);
            memory.slots[5].store(42, Ordering::Relaxed);
            queue.publish(bell(9)).expect("room");
            assert_eq!(queue.take(&mut rejected), Some(bell(9)));
            assert_eq!(queue.take(&mut rejected), None);
            assert!(memory.slots.iter().all(|slot| slot.load(Ordering::Relaxed) == 0));
        }
        assert_eq!(rejected, 3);
    }

    #[test]
    fn producers_are_told_of_sleepers_and_a_scribbled_count_is_put_right() {
        let memory = Memory::new(4);
        let queue = memory.queue();
        assert_eq!(queue.publish(bell(1)), Ok(false));
        let seen = queue.announce_sleep(1);
        assert_eq!(queue.publish(bell(2)), Ok(true));
        assert_eq!(queue.ring().load(Ordering::Relaxed), seen + 1);
        memory.words[3].store(0, Ordering::Relaxed);
        assert_eq!(queue.publish(bell(3)), Ok(false), "the scribbled count hides the sleeper");
        queue.announce_sleep(2);
        assert_eq!(queue.publish(bell(4)), Ok(true));
        queue.take(&mut 0);
        queue.end_sleep(0);
        assert_eq!(queue.publish(bell(5)), Ok(false));
    }
}
