//! Read-ahead: detects sequential readers, decides how far ahead to read, and hands that to the threads that do it.

use crate::sync::lock;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};

/// What a reader that starts looks like it will want.
const WINDOW_FIRST: u64 = 128 << 10;
/// Requests waiting; more are dropped, since they are only guesses.
const QUEUE_MAX: usize = 64;

#[derive(Default)]
struct Progress {
    /// where the next read starts if the reader is sequential
    next: u64,
    window: u64,
    /// where reading ahead has got to; 0 while everything was found in the cache
    ahead: u64,
}

/// How one open file is read.
#[derive(Default)]
pub(crate) struct Reader(Mutex<Progress>);

impl Reader {
    /// Notes a read; returns how much to fetch at once if its bytes are missing, and what to fetch behind the reader's
    /// back.
    ///
    /// What one sequential reader asks for does not all arrive, or not in its order: what is cached may be read without a request, and the kernel's
    /// own read-ahead has several requests on their way.
    pub(crate) fn advance(&self, offset: u64, length: u64, window_max: u64) -> (u64, Option<Range<u64>>) {
        let mut progress = lock(&self.0);
        let known = progress.next.saturating_sub(length.saturating_mul(2))
            ..=progress.ahead.max(progress.next.saturating_add(length));
        if progress.window > 0 && known.contains(&offset) {
            progress.next = progress.next.max(offset.saturating_add(length));
        } else {
            let window = if offset == progress.next { WINDOW_FIRST.min(window_max) } else { 0 };
            *progress = Progress { next: offset.saturating_add(length), window, ahead: 0 };
        }
        let window = progress.window;
        if window == 0 || progress.ahead == 0 || progress.next.saturating_add(window / 2) < progress.ahead {
            return (window, None);
        }
        progress.window = (window * 2).min(window_max);
        let start = progress.ahead.max(progress.next);
        progress.ahead = start.saturating_add(progress.window);
        (window, Some(start..progress.ahead))
    }

    /// Notes that something up to `end` had to be fetched.
    pub(crate) fn fetched(&self, end: u64) {
        let mut progress = lock(&self.0);
        if progress.window > 0 {
            progress.ahead = progress.ahead.max(end);
        }
    }
}

/// A range, cut at multiples of `step`.
fn steps(bytes: Range<u64>, step: u64) -> impl Iterator<Item = Range<u64>> {
    let mut start = bytes.start;
    std::iter::from_fn(move || {
        let end = (start / step + 1).saturating_mul(step).min(bytes.end);
        let cut = start..end;
        start = end;
        (!cut.is_empty()).then_some(cut)
    })
}

struct Request<N> {
    node: Weak<N>,
    bytes: Range<u64>,
}

struct Queue<N> {
    requests: VecDeque<Request<N>>,
    stop: bool,
}

/// What is to be read ahead, of whatever nodes.
pub(crate) struct ReadAheadQueue<N> {
    queue: Mutex<Queue<N>>,
    wake: Condvar,
}

impl<N> Default for ReadAheadQueue<N> {
    fn default() -> Self {
        Self { queue: Mutex::new(Queue { requests: VecDeque::new(), stop: false }), wake: Condvar::new() }
    }
}

impl<N> ReadAheadQueue<N> {
    /// Has `bytes` read in pieces of `step` bytes, several at a time: a disk is faster so.
    pub(crate) fn submit(&self, node: &Arc<N>, bytes: Range<u64>, step: u64) {
        let mut queue = lock(&self.queue);
        let room = QUEUE_MAX - queue.requests.len().min(QUEUE_MAX);
        for bytes in steps(bytes, step).take(room) {
            queue.requests.push_back(Request { node: Arc::downgrade(node), bytes });
            self.wake.notify_one();
        }
    }

    pub(crate) fn stop(&self) {
        lock(&self.queue).stop = true;
        self.wake.notify_all();
    }

    /// A thread's life: it has `read` read what is to be read ahead, one piece after the other.
    pub(crate) fn work(&self, read: impl Fn(&Arc<N>, Range<u64>)) {
        loop {
            let mut queue = lock(&self.queue);
            let request = loop {
                if queue.stop {
                    return;
                }
                match queue.requests.pop_front() {
                    Some(request) => break request,
                    None => queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(queue);
            if let Some(node) = request.node.upgrade() {
                read(&node, request.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_readers_get_growing_windows_and_random_ones_none() {
        let reader = Reader::default();
        let (window, ahead) = reader.advance(0, 4096, 1 << 20);
        assert_eq!((window, ahead), (WINDOW_FIRST, None));
        reader.fetched(WINDOW_FIRST);
        let mut reached = WINDOW_FIRST;
        let mut widest = 0;
        for n in 1..1000 {
            if let (_, Some(range)) = reader.advance(n * 4096, 4096, 1 << 20) {
                assert_eq!(range.start, reached);
                reached = range.end;
                widest = widest.max(range.end - range.start);
            }
            assert!(reached >= (n + 1) * 4096, "the reader is never ahead");
        }
        assert_eq!(widest, 1 << 20);
        assert_eq!(reader.advance(77, 4096, 1 << 20), (0, None));
    }

    #[test]
    fn a_reader_stays_sequential_whatever_arrives_late_or_not_at_all() {
        let reader = Reader::default();
        reader.advance(0, 4096, 1 << 20);
        reader.fetched(WINDOW_FIRST);
        let (_, ahead) = reader.advance(WINDOW_FIRST, 4096, 1 << 20);
        let ahead = ahead.expect("of what lies between, nothing was asked for").end;
        let (window, next) = reader.advance(ahead, 4096, 1 << 20);
        assert!(window > WINDOW_FIRST && next.is_some());
        let swapped = ahead + 8192;
        assert!(reader.advance(swapped, 4096, 1 << 20).0 > 0, "the second of two requests");
        assert!(reader.advance(swapped - 4096, 4096, 1 << 20).0 > 0, "the first of them");
        assert_eq!(reader.advance(swapped - 4 * 4096, 4096, 1 << 20).0, 0, "one that was there before");
    }

    #[test]
    fn what_is_read_ahead_is_cut_where_steps_end() {
        assert!(steps(5000..20_000, 8192).eq([5000..8192, 8192..16_384, 16_384..20_000]));
        assert_eq!(steps(8192..16_384, 8192).count(), 1);
        assert_eq!(steps(7..7, 8192).count(), 0);
    }

    #[test]
    fn fully_cached_files_are_not_read_ahead() {
        let reader = Reader::default();
        for n in 0..100 {
            assert_eq!(reader.advance(n * 4096, 4096, 1 << 20).1, None);
        }
    }
}
