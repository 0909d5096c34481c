//! Loom models of the queue, of the buffers' states and of reads without a request: every interleaving, up to a bound of
//! preemptions.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p poolfs-ipc --release --lib loom`

mod posts;
mod segments;

use crate::queue::{Doorbell, DoorbellQueue, QueueWords, RelaxedQueue};
use crate::state::{Acquisition, CallerState, withdraw};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// Runs `model` over all schedules with up to `preemptions` preemptions (LOOM_MAX_PREEMPTIONS overrides it).
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.check(model);
}

/// The kernel's futex: looks at the word and goes to sleep in one step against wake-ups. Waits without a limit, so that a
/// lost wake-up is a deadlock, which loom reports.
#[derive(Default)]
struct ModelFutex {
    bucket: Mutex<()>,
    wakes: Condvar,
}

impl ModelFutex {
    fn wait(&self, word: &AtomicU32, expected: u32) {
        let bucket = self.bucket.lock().expect("not poisoned");
        if word.load(Ordering::SeqCst) == expected {
            drop(self.wakes.wait(bucket).expect("not poisoned"));
        }
    }

    fn wake_one(&self) {
        let _bucket = self.bucket.lock().expect("not poisoned");
        self.wakes.notify_one();
    }

    fn wake_all(&self) {
        let _bucket = self.bucket.lock().expect("not poisoned");
        self.wakes.notify_all();
    }
}

/// What the consumers of a queue do, as the service keeps it.
#[derive(Default)]
struct Consumers {
    asleep: u32,
    searching: u32,
}

impl Consumers {
    fn to_wake(&self) -> u32 {
        if self.searching > 0 { 0 } else { self.asleep }
    }
}

/// A queue with its private record of consumers.
struct Shared {
    words: [AtomicU32; 7],
    slots: Vec<AtomicU64>,
    consumers: Mutex<Consumers>,
    futex: ModelFutex,
    space: ModelFutex,
}

impl Shared {
    fn new(slots: usize) -> Arc<Self> {
        Arc::new(Self {
            words: std::array::from_fn(|_| AtomicU32::new(0)),
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            consumers: Mutex::new(Consumers::default()),
            futex: ModelFutex::default(),
            space: ModelFutex::default(),
        })
    }

    fn queue(&self) -> RelaxedQueue<'_> {
        let [head, tail, events, sleepers, space, space_sleepers, stamps] = &self.words;
        RelaxedQueue::new(QueueWords { head, tail, events, sleepers, space, space_sleepers, stamps }, &self.slots)
    }

    fn publish(&self, buffer: u16) {
        let queue = self.queue();
        loop {
            match queue.publish(Doorbell { session: 1, buffer, again: false }) {
                Ok(true) => {
                    queue.ring();
                    return self.futex.wake_one();
                }
                Ok(false) => return,
                Err(_) => {
                    let seen = queue.announce_full();
                    if self.slots.iter().all(|slot| slot.load(Ordering::Relaxed) != 0) {
                        self.space.wait(queue.space(), seen);
                    }
                    queue.end_full();
                }
            }
        }
    }

    fn take(&self) -> Option<u16> {
        let queue = self.queue();
        let bell = queue.take(&mut 0)?;
        if queue.must_wake_producers() {
            self.space.wake_all();
        }
        Some(bell.buffer)
    }

    fn take_or_sleep(&self) -> u16 {
        loop {
            if let Some(buffer) = self.take() {
                return buffer;
            }
            let queue = self.queue();
            let seen = {
                let mut consumers = self.consumers.lock().expect("not poisoned");
                consumers.asleep += 1;
                queue.announce_sleep(consumers.to_wake())
            };
            if queue.is_empty() {
                self.futex.wait(queue.events(), seen);
            }
            let mut consumers = self.consumers.lock().expect("not poisoned");
            consumers.asleep -= 1;
            queue.end_sleep(consumers.to_wake());
        }
    }

    fn begin_search(&self) {
        let mut consumers = self.consumers.lock().expect("not poisoned");
        consumers.searching += 1;
        self.queue().end_sleep(0);
    }

    fn end_search(&self) {
        let queue = self.queue();
        let mut consumers = self.consumers.lock().expect("not poisoned");
        consumers.searching -= 1;
        let to_wake = consumers.to_wake();
        queue.announce_sleep(to_wake);
        drop(consumers);
        if to_wake > 0 && !queue.is_empty() {
            queue.ring();
            self.futex.wake_one();
        }
    }
}

#[test]
fn loom_queue_loses_no_doorbell_and_no_wake_up() {
    check(3, || {
        let shared = Shared::new(2);
        let other = Arc::clone(&shared);
        let producer = thread::spawn(move || other.publish(1));
        assert_eq!(shared.take_or_sleep(), 1);
        producer.join().expect("producer");
        assert_eq!(shared.take(), None);
    });
}

#[test]
fn loom_queue_of_two_producers_gives_each_doorbell_once() {
    check(2, || {
        let shared = Shared::new(2);
        let producers = [1, 2].map(|buffer| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.publish(buffer))
        });
        let mut taken = [shared.take_or_sleep(), shared.take_or_sleep()];
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
        producers.into_iter().for_each(|producer| producer.join().expect("producer"));
        assert_eq!(shared.take(), None);
    });
}

#[test]
fn loom_queue_of_two_consumers_gives_each_doorbell_once() {
    check(2, || {
        let shared = Shared::new(2);
        let other = Arc::clone(&shared);
        let consumer = thread::spawn(move || other.take_or_sleep());
        shared.publish(1);
        shared.publish(2);
        let mut taken = [shared.take_or_sleep(), consumer.join().expect("consumer")];
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
    });
}

#[test]
fn loom_queue_that_is_full_makes_producers_sleep_and_wakes_them() {
    check(2, || {
        let shared = Shared::new(2);
        shared.publish(1);
        shared.publish(2);
        let other = Arc::clone(&shared);
        let producer = thread::spawn(move || other.publish(3));
        let mut taken = [shared.take_or_sleep(), shared.take_or_sleep(), shared.take_or_sleep()];
        taken.sort_unstable();
        assert_eq!(taken, [1, 2, 3]);
        producer.join().expect("producer");
    });
}

#[test]
fn loom_queue_of_a_searcher_that_turns_away_leaves_its_doorbells_to_the_sleepers() {
    check(2, || {
        let shared = Shared::new(2);
        let consumer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.take_or_sleep()
        });
        let producer = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.publish(1)
        });
        shared.begin_search();
        shared.end_search();
        assert_eq!(consumer.join().expect("consumer"), 1);
        producer.join().expect("producer");
    });
}

/// A buffer: the shared word, request and reply as plain words, the service's record, and how often a request ran.
#[derive(Default)]
struct Buffer {
    word: AtomicU32,
    request: AtomicU32,
    reply: AtomicU32,
    record: Acquisition,
    runs: AtomicU32,
    futex: ModelFutex,
}

impl Buffer {
    /// What a service thread does on a doorbell.
    fn serve(&self) -> bool {
        let Some(sequence) = self.record.acquire(&self.word) else { return false };
        self.runs.fetch_add(1, Ordering::Relaxed);
        self.reply.store(self.request.load(Ordering::Relaxed) + 100, Ordering::Relaxed);
        if self.record.finish(&self.word, sequence) {
            self.futex.wake_all();
        }
        true
    }

    fn submit(&self, request: u32) -> crate::state::Sequence {
        let state = CallerState::new(&self.word);
        let borrowed = state.borrow().expect("free");
        self.request.store(request, Ordering::Relaxed);
        state.submit(borrowed)
    }

    fn await_reply(&self, submitted: crate::state::Sequence) -> u32 {
        let state = CallerState::new(&self.word);
        while !state.is_done(submitted) {
            if let Some(expected) = state.announce_sleep(submitted) {
                self.futex.wait(&self.word, expected);
            }
        }
        let reply = self.reply.load(Ordering::Relaxed);
        state.give_back(submitted);
        reply
    }
}

#[test]
fn loom_buffer_reply_is_visible_and_no_wake_up_is_lost() {
    check(3, || {
        let buffer = Arc::new(Buffer::default());
        let submitted = buffer.submit(5);
        let other = Arc::clone(&buffer);
        let service = thread::spawn(move || assert!(other.serve()));
        assert_eq!(buffer.await_reply(submitted), 105);
        service.join().expect("service");
    });
}

#[test]
fn loom_buffer_forged_doorbells_run_nothing_twice() {
    check(3, || {
        let buffer = Arc::new(Buffer::default());
        let forged = [(); 2].map(|()| {
            let buffer = Arc::clone(&buffer);
            thread::spawn(move || buffer.serve())
        });
        let submitted = buffer.submit(5);
        // The true doorbell: whoever came first, the request is served, once.
        let own = buffer.serve();
        let others: u32 = forged.into_iter().map(|thread| u32::from(thread.join().expect("service"))).sum();
        assert_eq!(others + u32::from(own), 1);
        assert_eq!(buffer.runs.load(Ordering::Relaxed), 1);
        assert_eq!(buffer.await_reply(submitted), 105);
    });
}

#[test]
fn loom_buffer_next_request_never_finds_its_buffer_still_running() {
    check(3, || {
        let buffer = Arc::new(Buffer::default());
        let first = buffer.submit(1);
        let other = Arc::clone(&buffer);
        let service = thread::spawn(move || assert!(other.serve()));
        assert_eq!(buffer.await_reply(first), 101);
        let second = buffer.submit(2);
        assert!(buffer.serve(), "its doorbell would have been thrown away");
        assert_eq!(buffer.await_reply(second), 102);
        service.join().expect("service");
    });
}

#[test]
fn loom_buffer_of_a_caller_that_has_not_waited_is_used_again_only_after_its_request() {
    check(3, || {
        let buffer = Arc::new(Buffer::default());
        let _ = buffer.submit(1);
        let other = Arc::clone(&buffer);
        let service = thread::spawn(move || assert!(other.serve()));
        let state = CallerState::new(&buffer.word);
        if let Some(sequence) = state.borrow_served() {
            buffer.request.store(2, Ordering::Relaxed);
            let second = state.submit(sequence);
            assert!(buffer.serve(), "its doorbell would have been thrown away");
            assert_eq!(buffer.await_reply(second), 102);
        }
        service.join().expect("service");
    });
}

#[test]
fn loom_buffer_reply_that_is_withdrawn_is_not_mistaken_for_one() {
    check(3, || {
        let buffer = Arc::new(Buffer::default());
        let submitted = buffer.submit(5);
        let other = Arc::clone(&buffer);
        let service = thread::spawn(move || {
            assert!(other.serve());
            withdraw(&other.word);
            // The memory is given back: it reads as zeros.
            other.reply.store(0, Ordering::Relaxed);
        });
        let state = CallerState::new(&buffer.word);
        while !state.is_done(submitted) {
            if state.announce_sleep(submitted).is_none() && !state.is_done(submitted) {
                return service.join().expect("service");
            }
            thread::yield_now();
        }
        let reply = buffer.reply.load(Ordering::Relaxed);
        assert!(reply == 105 || !state.is_still_done(submitted));
        service.join().expect("service");
    });
}

#[test]
fn loom_buffer_is_borrowed_by_one() {
    check(3, || {
        let word = Arc::new(AtomicU32::new(0));
        let other = Arc::clone(&word);
        let rival = thread::spawn(move || CallerState::new(&other).borrow().is_some());
        let own = CallerState::new(&word).borrow().is_some();
        assert!(own != rival.join().expect("rival"));
    });
}
