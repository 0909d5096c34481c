//! Loom models of posted writes: the caller's steps, and those of the service thread that takes the posts.
//!
//! A byte is a word, a write is one byte, and the file is what was served. Buffers have space for two bytes. The hold on a
//! buffer, which is the caller's own memory, is the one part that is modelled separately.

use super::check;
use crate::posts::{self, Extent, Published, SlotWords};
use crate::state::{Acquisition, CallerState, Left, Sequence, withdraw};
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

const EPOCH: u32 = 9;
const ROOM: u32 = 2;

/// What an ordinary request has in its buffer's bytes.
const ORDINARY: u32 = 100;

#[derive(Default)]
struct Buffer {
    word: AtomicU32,
    extent: AtomicU64,
    number: AtomicU32,
    bytes: [AtomicU32; ROOM as usize],
    reply: AtomicU32,
    record: Acquisition,
    owner: AtomicBool,
}

impl Buffer {
    fn extent(&self) -> Extent<'_> {
        Extent::new(&self.extent)
    }

    fn state(&self) -> CallerState<'_> {
        CallerState::new(&self.word)
    }

    fn hold(&self) -> bool {
        self.owner.compare_exchange(false, true, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    fn let_go(&self) {
        self.owner.store(false, Ordering::Release);
    }

    fn put(&self, at: u32, byte: u32) {
        self.bytes[at as usize].store(byte, Ordering::Relaxed);
    }

    fn get(&self, length: u32) -> Vec<u32> {
        self.bytes[..length as usize].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }
}

/// A slot, its session's buffers, and the file.
struct Slot {
    granted: AtomicU32,
    tended: AtomicU32,
    posted: AtomicU64,
    buffers: Vec<Buffer>,
    file: Mutex<Vec<u32>>,
}

impl Slot {
    fn new(buffers: usize) -> Arc<Self> {
        Arc::new(Self {
            granted: AtomicU32::new(EPOCH),
            tended: AtomicU32::new(1),
            posted: AtomicU64::new(0),
            buffers: (0..buffers).map(|_| Buffer::default()).collect(),
            file: Mutex::new(Vec::new()),
        })
    }

    fn words(&self) -> SlotWords<'_> {
        SlotWords::new(&self.granted, &self.tended, &self.posted)
    }

    fn file(&self) -> Vec<u32> {
        self.file.lock().expect("not poisoned").clone()
    }

    /// The service: takes and serves what is posted, under the slot's lock. What is in the file then.
    fn take(&self) -> Vec<u32> {
        let mut file = self.file.lock().expect("not poisoned");
        let words = self.words();
        let posted = words.posted();
        let mut taken = Vec::new();
        for (index, buffer) in self.buffers.iter().enumerate().filter(|(index, _)| posted >> index & 1 == 1) {
            let place = (&buffer.word, buffer.extent());
            if let Some((sequence, length)) = posts::take(&words, &buffer.record, place, index) {
                let number = buffer.number.load(Ordering::Relaxed);
                taken.push((number, index, sequence, length.expect("the caller's own post")));
            }
        }
        taken.sort_unstable_by_key(|(number, ..)| *number);
        for (_, index, sequence, length) in taken {
            let buffer = &self.buffers[index];
            file.extend(buffer.get(length));
            buffer.reply.store(length, Ordering::Relaxed);
            posts::finish(&words, &buffer.record, &buffer.word, (index, sequence));
        }
        file.clone()
    }

    /// The service, called by a buffer's doorbell: serves the ordinary request in it. Its byte.
    fn serve(&self, index: usize) -> Option<u32> {
        let buffer = &self.buffers[index];
        let sequence = buffer.record.acquire(&buffer.word)?;
        let bytes = buffer.get(ROOM);
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "somebody has written into a request: {bytes:?}");
        let byte = bytes[0];
        buffer.record.finish(&buffer.word, sequence);
        Some(byte)
    }

    /// The caller: borrows a buffer.
    fn borrow(&self) -> Option<(usize, Sequence)> {
        self.buffers.iter().enumerate().find_map(|(index, buffer)| {
            let state = buffer.state();
            if !state.is_free() || !buffer.hold() {
                return None;
            }
            let borrowed = state.borrow();
            if borrowed.is_none() {
                buffer.let_go();
            }
            Some((index, borrowed?))
        })
    }

    /// An ordinary request in a buffer that another thread borrows, if it can.
    fn request(&self) -> Option<(usize, Sequence)> {
        let (index, borrowed) = self.borrow()?;
        (0..ROOM).for_each(|at| self.buffers[index].put(at, ORDINARY));
        Some((index, self.buffers[index].state().submit(borrowed)))
    }
}

/// What became of a write.
enum Outcome {
    Posted { must_ring: bool },
    Unanswered(usize, Sequence),
    NotPosted,
}

/// The one who posts.
struct Poster {
    slot: Arc<Slot>,
    number: u32,
    latest: Option<(usize, u32, u32)>,
}

impl Poster {
    fn new(slot: &Arc<Slot>) -> Self {
        Self { slot: Arc::clone(slot), number: 0, latest: None }
    }

    fn write(&mut self, byte: u32) -> Outcome {
        if !self.slot.words().is_granted(EPOCH) {
            return Outcome::NotPosted;
        }
        if self.grow(byte) { Outcome::Posted { must_ring: false } } else { self.begin(byte) }
    }

    fn grow(&mut self, byte: u32) -> bool {
        let Some((index, number, length)) = self.latest else { return false };
        let buffer = &self.slot.buffers[index];
        if length == ROOM || !buffer.extent().is_open(number, length) || !buffer.hold() {
            return false;
        }
        let grown = buffer.extent().grow(number, length, length + 1, || {
            buffer.put(length, byte);
            true
        });
        buffer.let_go();
        if grown {
            self.latest = Some((index, number, length + 1));
        }
        grown
    }

    fn begin(&mut self, byte: u32) -> Outcome {
        self.latest = None;
        let Some((index, borrowed)) = self.slot.borrow() else { return Outcome::NotPosted };
        let buffer = &self.slot.buffers[index];
        buffer.put(0, byte);
        self.number += 1;
        buffer.number.store(self.number, Ordering::Relaxed);
        let (words, place) = (self.slot.words(), (&buffer.state(), buffer.extent()));
        let (sequence, published) = posts::submit(&words, place, (index, borrowed), EPOCH, 1);
        let Published { is_granted, must_ring } = published;
        if !is_granted {
            return Outcome::Unanswered(index, sequence);
        }
        self.latest = Some((index, sequence.number(), 1));
        buffer.let_go();
        Outcome::Posted { must_ring }
    }

    /// Writes; who has to wait for the answer calls the service. Whether it was posted, answered or not.
    fn write_or_wait(&mut self, byte: u32) -> bool {
        match self.write(byte) {
            Outcome::Posted { .. } => true,
            Outcome::NotPosted => false,
            Outcome::Unanswered(index, sequence) => {
                let buffer = &self.slot.buffers[index];
                self.slot.take();
                assert!(buffer.state().is_done(sequence), "nobody has found what its caller waits for");
                assert_eq!(buffer.reply.load(Ordering::Relaxed), 1);
                buffer.state().give_back(sequence);
                buffer.let_go();
                true
            }
        }
    }
}

fn up_to(last: u32) -> Vec<u32> {
    (1..=last).collect()
}

#[test]
fn loom_posts_that_returned_before_a_take_are_in_it_once_whole_and_in_order() {
    check(3, || {
        let slot = Slot::new(2);
        let returned = Arc::new(AtomicU32::new(0));
        let (mut poster, own) = (Poster::new(&slot), Arc::clone(&returned));
        let caller = thread::spawn(move || {
            for byte in 1..=3 {
                assert!(matches!(poster.write(byte), Outcome::Posted { .. }));
                own.store(byte, Ordering::Release);
            }
        });
        let before = returned.load(Ordering::Acquire);
        let file = slot.take();
        assert!(file.len() >= before as usize, "{file:?}, and {before} had returned");
        assert_eq!(file, up_to(file.len() as u32));
        caller.join().expect("caller");
        assert_eq!(slot.take(), up_to(3));
        assert_eq!(slot.words().posted(), 0);
    });
}

#[test]
fn loom_posts_of_a_slot_without_bits_are_all_in_the_file() {
    check(3, || {
        let slot = Slot::new(1);
        let mut poster = Poster::new(&slot);
        assert!(matches!(poster.write(1), Outcome::Posted { .. }));
        let other = Arc::clone(&slot);
        let content = Arc::new(AtomicU32::new(0));
        let served = Arc::clone(&content);
        let service = thread::spawn(move || {
            let mut file = other.file.lock().expect("not poisoned");
            let (words, buffer) = (other.words(), &other.buffers[0]);
            let place = (&buffer.word, buffer.extent());
            let (sequence, length) = posts::take(&words, &buffer.record, place, 0).expect("posted");
            file.extend(buffer.get(length.expect("its own")));
            served.store(file.len() as u32, Ordering::Relaxed);
            posts::finish(&words, &buffer.record, &buffer.word, (0, sequence));
        });
        let grown = poster.grow(2);
        if slot.words().posted() == 0 {
            assert_eq!(content.load(Ordering::Relaxed), 1 + u32::from(grown), "read without a request");
        }
        service.join().expect("service");
    });
}

#[test]
fn loom_posts_are_found_by_who_revokes_the_grant_or_wait_for_their_answer() {
    check(3, || {
        let slot = Slot::new(2);
        let mut poster = Poster::new(&slot);
        let caller = thread::spawn(move || [1, 2].map(|byte| poster.write_or_wait(byte)));
        let words = slot.words();
        words.revoke();
        slot.take();
        let happened = caller.join().expect("caller");
        let expected: Vec<u32> = (1..).zip(happened).filter(|(_, happened)| *happened).map(|(byte, _)| byte).collect();
        assert_eq!(slot.file(), expected, "nobody takes anything any more");
    });
}

#[test]
fn loom_posts_that_do_not_ring_are_seen_by_who_tended_last() {
    check(3, || {
        let slot = Slot::new(2);
        let mut poster = Poster::new(&slot);
        let caller = thread::spawn(move || {
            [1, 2].map(|byte| matches!(poster.write(byte), Outcome::Posted { must_ring: true })).contains(&true)
        });
        let words = slot.words();
        words.tend(false);
        if words.posted() != 0 {
            slot.take();
        }
        let has_rung = caller.join().expect("caller");
        let file = slot.file();
        // A second byte may be behind the first one's post that somebody was called for, or has seen.
        assert!(has_rung || file == up_to(2), "{file:?}");
    });
}

#[test]
fn loom_posts_are_acquired_by_no_doorbell_of_their_buffer_and_leave_it_whole_to_the_next() {
    check(2, || {
        let slot = Slot::new(1);
        let mut poster = Poster::new(&slot);
        assert!(matches!(poster.write(1), Outcome::Posted { .. }));
        let service = thread::spawn({
            let slot = Arc::clone(&slot);
            move || {
                // Forged, or rung again: what it finds is an ordinary request if anything.
                let early = slot.serve(0);
                slot.take();
                (early, slot.serve(0))
            }
        });
        let borrower = thread::spawn({
            let slot = Arc::clone(&slot);
            move || slot.request()
        });
        let grown = poster.grow(2);
        let (early, late) = service.join().expect("service");
        let requested = borrower.join().expect("borrower");
        assert_eq!(early, None, "the post was not served by then");
        let served = late.or_else(|| slot.serve(0));
        assert_eq!(served, requested.map(|_| ORDINARY));
        assert_eq!(slot.file(), up_to(1 + u32::from(grown)));
        assert!(requested.is_none_or(|(index, sequence)| slot.buffers[index].state().is_done(sequence)));
    });
}

#[test]
fn loom_posts_of_two_threads_are_served_once() {
    check(2, || {
        let slot = Slot::new(2);
        let poster = Arc::new(Mutex::new(Poster::new(&slot)));
        let write = |byte: u32| {
            let poster = Arc::clone(&poster);
            move || poster.try_lock().is_ok_and(|mut poster| matches!(poster.write(byte), Outcome::Posted { .. }))
        };
        let other = thread::spawn(write(2));
        let service = thread::spawn({
            let slot = Arc::clone(&slot);
            move || drop(slot.take())
        });
        let first = write(1)();
        let second = other.join().expect("other");
        service.join().expect("service");
        let mut file = slot.take();
        file.sort_unstable();
        let expected: Vec<u32> =
            [(1, first), (2, second)].into_iter().filter(|(_, done)| *done).map(|(n, _)| n).collect();
        assert_eq!(file, expected);
    });
}

/// Where a caller stops, for ever or because a handler has left the call by a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stop {
    Borrowed,
    Submitted,
    Published,
    BytesBehind,
    Grown,
}

const STOPS: [Stop; 5] = [Stop::Borrowed, Stop::Submitted, Stop::Published, Stop::BytesBehind, Stop::Grown];

/// Writes one byte and then another one, as far as that; holds the buffer then.
fn write_until(slot: &Slot, stop: Stop) {
    let (index, borrowed) = slot.borrow().expect("free");
    let buffer = &slot.buffers[index];
    buffer.put(0, 1);
    buffer.number.store(1, Ordering::Relaxed);
    let (words, place) = (slot.words(), (&buffer.state(), buffer.extent()));
    match stop {
        Stop::Borrowed => return,
        Stop::Submitted => {
            // All but the last step of `submit`: on memory of its own for that.
            let (elsewhere, zero) = (AtomicU64::new(0), AtomicU32::new(0));
            let unseen = SlotWords::new(&zero, &zero, &elsewhere);
            posts::submit(&unseen, place, (index, borrowed), EPOCH, 1);
            return;
        }
        _ => {}
    }
    let (sequence, published) = posts::submit(&words, place, (index, borrowed), EPOCH, 1);
    assert!(published.is_granted);
    let number = sequence.number();
    match stop {
        Stop::BytesBehind => assert!(!buffer.extent().grow(number, 1, 2, || {
            buffer.put(1, 2);
            false
        })),
        Stop::Grown => {
            buffer.extent().grow(number, 1, 2, || {
                buffer.put(1, 2);
                true
            });
        }
        _ => {}
    }
}

/// What the thread's next call does with the buffer that it has left: the number to go on with.
fn recover(slot: &Slot) -> Option<Sequence> {
    let buffer = &slot.buffers[0];
    match buffer.state().recover() {
        Left::Nothing(left) => Some(left),
        Left::Request => panic!("it was a post"),
        Left::Post(post) => {
            let left =
                posts::take_back(std::iter::once(slot.words().posted()), (&buffer.state(), buffer.extent()), (0, post));
            if left.is_none() {
                buffer.let_go();
            }
            left
        }
    }
}

#[test]
fn loom_posts_of_who_dies_at_any_step_are_served_as_far_as_they_were_told() {
    for stop in STOPS {
        check(3, move || {
            let slot = Slot::new(1);
            let caller = thread::spawn({
                let slot = Arc::clone(&slot);
                move || write_until(&slot, stop)
            });
            let file = slot.take();
            assert_eq!(file, up_to(file.len() as u32));
            caller.join().expect("caller");
            let file = slot.take();
            assert_eq!(file, up_to(file.len() as u32));
            match stop {
                Stop::Borrowed | Stop::Submitted => assert!(file.is_empty(), "nobody was told"),
                Stop::Published | Stop::BytesBehind => assert_eq!(file, [1]),
                Stop::Grown => assert!(file.starts_with(&[1])),
            }
            assert_eq!(slot.words().posted(), 0);
        });
    }
}

#[test]
fn loom_posts_that_a_call_has_left_happen_or_not_and_their_buffer_is_used_again() {
    for stop in STOPS {
        check(3, move || {
            let slot = Slot::new(1);
            let service = thread::spawn({
                let slot = Arc::clone(&slot);
                move || slot.take()
            });
            write_until(&slot, stop);
            let taken_back = recover(&slot);
            if let Some(left) = taken_back {
                slot.buffers[0].state().give_back(left);
                slot.buffers[0].let_go();
            }
            assert!(stop > Stop::Submitted || taken_back.is_some(), "nobody would ever take it");
            service.join().expect("service");
            slot.take();
            let mut poster = Poster::new(&slot);
            poster.number = 1;
            assert!(matches!(poster.write(7), Outcome::Posted { .. }), "the buffer is free again");
            let mut file = slot.take();
            assert_eq!(file.pop(), Some(7));
            let happened = u32::from(stop > Stop::Submitted);
            assert!(file == up_to(happened) || stop == Stop::Grown && file == up_to(2), "{file:?}");
            // And once more, by whoever waits for an answer.
            let (index, sequence) = slot.request().expect("free");
            assert_eq!(slot.serve(index), Some(ORDINARY));
            assert!(slot.buffers[index].state().is_done(sequence));
        });
    }
}

#[test]
fn loom_posts_of_a_session_that_ends_were_served_or_not_posted() {
    check(3, || {
        let slot = Slot::new(1);
        let mut poster = Poster::new(&slot);
        let service = thread::spawn({
            let slot = Arc::clone(&slot);
            move || {
                slot.words().revoke();
                let file = slot.take();
                let buffer = &slot.buffers[0];
                withdraw(&buffer.word);
                // The memory is given back: it reads as zeros.
                buffer.reply.store(0, Ordering::Relaxed);
                buffer.extent.store(0, Ordering::Relaxed);
                slot.posted.store(0, Ordering::Relaxed);
                file
            }
        });
        let mut posted = 0;
        let mut unclear = None;
        for byte in 1..=2 {
            match poster.write(byte) {
                Outcome::Posted { .. } => posted = byte,
                Outcome::NotPosted => break,
                Outcome::Unanswered(index, sequence) => {
                    unclear = Some(byte);
                    let buffer = &slot.buffers[index];
                    if buffer.state().is_done(sequence) {
                        let reply = buffer.reply.load(Ordering::Relaxed);
                        assert!(reply == 1 || !buffer.state().is_still_done(sequence));
                    }
                    break;
                }
            }
        }
        let file = service.join().expect("service");
        assert!(
            file == up_to(posted) || unclear == Some(posted + 1) && file == up_to(posted + 1),
            "{file:?}, {posted}"
        );
    });
}
