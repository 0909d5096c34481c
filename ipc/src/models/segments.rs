//! Loom models of segments, leases and notices: the service's changes against concurrent readers.

use super::check;
use crate::notice::{Edition, Notice};
use crate::segment::{self, Place};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// A block of a segment, its word, and the size of the file.
#[derive(Default)]
struct Block {
    word: AtomicU32,
    bytes: [AtomicU32; 2],
    size: AtomicU32,
}

impl Block {
    /// The service brings the block in.
    fn fill(&self, content: u32) {
        self.bytes.iter().for_each(|byte| byte.store(content, Ordering::Relaxed));
        segment::publish(&self.word, Place::Resident);
    }

    /// The service takes it out: holes are zeros.
    fn evict(&self) {
        segment::retract(&self.word);
        segment::retracted();
        self.bytes.iter().for_each(|byte| byte.store(0, Ordering::Relaxed));
        segment::publish(&self.word, Place::Absent);
    }

    /// A client reads; nothing: it asks.
    fn read(&self) -> Option<[u32; 2]> {
        let before = segment::look(&self.word)?;
        let bytes = [0, 1].map(|at: usize| if before.is_zero() { 0 } else { self.bytes[at].load(Ordering::Relaxed) });
        segment::copied();
        segment::is_unchanged(&self.word, before).then_some(bytes)
    }
}

#[test]
fn loom_segment_reads_of_a_block_that_leaves_and_comes_back_are_whole() {
    check(3, || {
        let block = Arc::new(Block::default());
        block.fill(7);
        let other = Arc::clone(&block);
        let service = thread::spawn(move || {
            other.evict();
            other.fill(8);
        });
        if let Some(bytes) = block.read() {
            assert!(bytes == [7, 7] || bytes == [8, 8], "{bytes:?}");
        }
        service.join().expect("service");
        assert_eq!(block.read(), Some([8, 8]));
    });
}

#[test]
fn loom_segment_a_block_of_zeros_that_is_written_is_old_or_new() {
    check(3, || {
        let block = Arc::new(Block::default());
        segment::publish(&block.word, Place::Zero);
        let other = Arc::clone(&block);
        let service = thread::spawn(move || other.fill(8));
        let bytes = block.read();
        assert!(matches!(bytes, None | Some([0, 0] | [8, 8])), "{bytes:?}");
        service.join().expect("service");
    });
}

#[test]
fn loom_segment_who_sees_the_size_sees_what_was_appended() {
    check(3, || {
        let block = Arc::new(Block::default());
        let other = Arc::clone(&block);
        let service = thread::spawn(move || {
            other.fill(8);
            other.size.store(1, Ordering::Release);
        });
        if block.size.load(Ordering::Acquire) == 1 {
            assert_eq!(block.read(), Some([8, 8]));
        }
        service.join().expect("service");
    });
}

#[test]
fn loom_segment_nothing_is_read_after_the_lease_that_was_revoked_before() {
    check(3, || {
        let (block, lease) = (Arc::new(Block::default()), Arc::new(AtomicU32::new(1)));
        block.fill(7);
        let moved = Arc::new(AtomicU32::new(7));
        let (others, elsewhere) = (Arc::clone(&lease), Arc::clone(&moved));
        // The content comes to be elsewhere, and is changed there.
        let service = thread::spawn(move || {
            others.fetch_add(1, Ordering::SeqCst);
            segment::retracted();
            elsewhere.store(8, Ordering::Release);
        });
        let changed = moved.load(Ordering::Acquire) == 8;
        if lease.load(Ordering::Acquire) == 1 {
            let bytes = block.read();
            segment::copied();
            if bytes.is_some() && lease.load(Ordering::Relaxed) == 1 {
                assert!(!changed, "the old content was read after the new one was there");
            }
        }
        service.join().expect("service");
    });
}

#[test]
fn loom_segment_what_was_cut_off_does_not_come_back_when_the_file_grows_again() {
    const BOTH: u32 = 2;
    check(3, || {
        let (block, told) = (Arc::new(Block::default()), Arc::new(AtomicU32::new(0)));
        block.fill(7);
        block.size.store(BOTH, Ordering::Release);
        let (others, answered) = (Arc::clone(&block), Arc::clone(&told));
        let service = thread::spawn(move || {
            // The end is cut off within the block.
            segment::retract(&others.word);
            segment::retracted();
            others.bytes[1].store(0, Ordering::Relaxed);
            segment::publish(&others.word, Place::Resident);
            others.size.store(1, Ordering::Release);
            answered.store(1, Ordering::Release);
            others.size.store(BOTH, Ordering::Release);
        });
        let is_cut = told.load(Ordering::Acquire) == 1;
        let size = block.size.load(Ordering::Acquire);
        if let Some([first, last]) = block.read() {
            assert_eq!(first, 7);
            assert!(last == 0 || (last == 7 && !is_cut), "{last} at size {size}");
        }
        service.join().expect("service");
        assert_eq!((block.size.load(Ordering::Acquire), block.read()), (BOTH, Some([7, 0])));
    });
}

#[test]
fn loom_closings_a_number_is_not_taken_for_what_it_was_before_it_was_closed() {
    const FILE: u32 = 1;
    const OTHER: u32 = 2;
    check(3, || {
        let number = Arc::new(AtomicU32::new(FILE));
        let (closings, reopened) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (table, counted, told) = (Arc::clone(&number), Arc::clone(&closings), Arc::clone(&reopened));
        // The kernel frees the number, has the service count that, and only then the closing is done.
        let closer = thread::spawn(move || {
            table.store(0, Ordering::Release);
            counted.fetch_add(1, Ordering::SeqCst);
            table.store(OTHER, Ordering::Release);
            told.store(1, Ordering::Release);
        });
        // The witness is taken before the look.
        let witness = closings.load(Ordering::Acquire);
        let is_verified = number.load(Ordering::Acquire) == FILE;
        // A later call, of a program that knows what the number stands for now.
        let is_reopened = reopened.load(Ordering::Acquire) == 1;
        if is_verified && closings.load(Ordering::Acquire) == witness {
            assert!(!is_reopened, "the file was read that the number stood for before");
        }
        closer.join().expect("closer");
    });
}

/// A notice of what a file is, which is kept elsewhere, and the writer's record of its changes.
struct Noted {
    file: AtomicU64,
    sequence: AtomicU64,
    words: [AtomicU64; 2],
    edition: Mutex<Edition>,
}

impl Noted {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            file: AtomicU64::new(1),
            sequence: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            edition: Mutex::default(),
        })
    }

    fn notice(&self) -> Notice<'_, 2> {
        Notice::new(&self.sequence, &self.words)
    }

    /// A thread of the service serves a look, and notes what it found.
    fn publish(&self) {
        let Some(version) = self.edition.lock().expect("not poisoned").version() else { return };
        let found = self.file.load(Ordering::Acquire);
        let edition = self.edition.lock().expect("not poisoned");
        if edition.still_is(version) {
            self.notice().publish([found; 2]);
        }
    }

    /// Another one serves a change.
    fn change(&self, to: u64) {
        self.edited(Edition::begin_change);
        self.file.store(to, Ordering::Release);
        self.edited(Edition::end_change);
    }

    fn edited(&self, edit: impl FnOnce(&mut Edition)) {
        let mut edition = self.edition.lock().expect("not poisoned");
        edit(&mut edition);
        self.notice().retract();
    }
}

#[test]
fn loom_notice_nobody_finds_what_was_before_a_change_that_is_done() {
    check(3, || {
        let (noted, answered) = (Noted::new(), Arc::new(AtomicU32::new(0)));
        let (others, told) = (Arc::clone(&noted), Arc::clone(&answered));
        let changer = thread::spawn(move || {
            others.change(2);
            told.store(1, Ordering::Release);
        });
        let others = Arc::clone(&noted);
        let publisher = thread::spawn(move || others.publish());
        let was_answered = answered.load(Ordering::Acquire) == 1;
        let newest = noted.file.load(Ordering::Acquire);
        if let Some([one, other]) = noted.notice().read() {
            assert_eq!(one, other, "half of it");
            assert!(one == 2 || !was_answered, "what was before");
            assert!(one >= newest, "older than what was there for others to see");
        }
        changer.join().expect("changer");
        publisher.join().expect("publisher");
    });
}

#[test]
fn loom_notice_is_read_whole_or_not_at_all() {
    check(3, || {
        let noted = Noted::new();
        noted.publish();
        let others = Arc::clone(&noted);
        let service = thread::spawn(move || {
            others.change(2);
            others.publish();
        });
        if let Some([one, other]) = noted.notice().read() {
            assert_eq!(one, other, "half of each");
        }
        service.join().expect("service");
        assert_eq!(noted.notice().read(), Some([2, 2]));
    });
}
