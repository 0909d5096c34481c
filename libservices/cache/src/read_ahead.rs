//! Reading ahead of sequential readers: who is one, how far, and the threads that do it.

use crate::blocks::{block_of, blocks_for};
use crate::node::Node;
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
    pub(crate) fn advance(&self, offset: u64, length: u64, window_max: u64) -> (u64, Option<Range<u64>>) {
        let mut progress = lock(&self.0);
        if offset != progress.next {
            *progress = Progress::default();
        } else if progress.window == 0 {
            progress.window = WINDOW_FIRST.min(window_max);
        }
        progress.next = offset.saturating_add(length);
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

struct Request {
    node: Weak<Node>,
    bytes: Range<u64>,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<Request>,
    stop: bool,
}

/// What is to be read ahead.
#[derive(Default)]
pub(crate) struct ReadAheadQueue {
    queue: Mutex<Queue>,
    wake: Condvar,
}

impl ReadAheadQueue {
    pub(crate) fn submit(&self, node: &Arc<Node>, bytes: Range<u64>) {
        let mut queue = lock(&self.queue);
        if queue.requests.len() < QUEUE_MAX {
            queue.requests.push_back(Request { node: Arc::downgrade(node), bytes });
            self.wake.notify_one();
        }
    }

    pub(crate) fn stop(&self) {
        lock(&self.queue).stop = true;
        self.wake.notify_all();
    }

    /// A thread's life.
    pub(crate) fn work(&self) {
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
            let Some(node) = request.node.upgrade() else { continue };
            let Ok(node) = node.begin_use() else { continue };
            // A failure here is no one's yet: the reader meets it again when it gets there.
            let _ = node.0.read_ahead(block_of(request.bytes.start)..blocks_for(request.bytes.end));
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
    fn fully_cached_files_are_not_read_ahead() {
        let reader = Reader::default();
        for n in 0..100 {
            assert_eq!(reader.advance(n * 4096, 4096, 1 << 20).1, None);
        }
    }
}
