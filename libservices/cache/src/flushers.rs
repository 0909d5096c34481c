//! Which flusher is at work in which layer, and since when: a branch that does not answer takes some of them, and the others go on.
//!
//! ```text
//! free = all flushers - those that one call has kept for OVERDUE or longer
//!
//! as many as a pool has threads for write-back are in one layer at most
//! while free is below that number, further ones are started: so each layer that does not answer costs that number, up to FLUSHERS_MAX in all
//! while free is above it, who is free ends
//! ```

use crate::sync::lock;
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// From so long on a call of a flusher counts as one that is not answered.
const OVERDUE: Duration = Duration::from_secs(1);
/// Most flushers of a pool.
const FLUSHERS_MAX: usize = 128;

/// A flusher's place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlusherId(u64);

#[derive(Clone, Copy)]
struct Work {
    layer: usize,
    since: Instant,
}

impl Work {
    fn is_overdue(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= OVERDUE
    }
}

#[derive(Default)]
struct Table {
    last: u64,
    flushers: HashMap<FlusherId, Option<Work>>,
    /// The layers that store what is deferred just now.
    storing: HashSet<usize>,
}

impl Table {
    fn overdue(&self, now: Instant) -> impl Iterator<Item = &Work> {
        self.flushers.values().flatten().filter(move |work| work.is_overdue(now))
    }

    fn free(&self, now: Instant) -> usize {
        self.flushers.len() - self.overdue(now).count()
    }
}

/// The flushers of a pool.
pub(crate) struct Flushers {
    /// How many are to be free.
    wanted: usize,
    table: Mutex<Table>,
}

impl Flushers {
    pub fn new(wanted: usize) -> Self {
        Self { wanted, table: Mutex::default() }
    }

    /// The places of those that are to be started now.
    pub fn missing(&self, now: Instant) -> Vec<FlusherId> {
        let mut table = lock(&self.table);
        let count = self.wanted.saturating_sub(table.free(now));
        let count = count.min(FLUSHERS_MAX.max(self.wanted).saturating_sub(table.flushers.len()));
        let new = |_| {
            table.last += 1;
            let id = FlusherId(table.last);
            table.flushers.insert(id, None);
            id
        };
        (0..count).map(new).collect()
    }

    /// Gives a place back.
    pub fn leave(&self, id: FlusherId) {
        lock(&self.table).flushers.remove(&id);
    }

    /// Gives a place back, if enough others are free.
    pub fn leaves_as_surplus(&self, id: FlusherId, now: Instant) -> bool {
        let mut table = lock(&self.table);
        let is_surplus = table.free(now) > self.wanted;
        if is_surplus {
            table.flushers.remove(&id);
        }
        is_surplus
    }

    /// Works in a layer, unless there are enough already.
    pub fn within(&self, id: FlusherId, layer: usize, work: impl FnOnce()) {
        {
            let mut table = lock(&self.table);
            if table.flushers.values().flatten().filter(|work| work.layer == layer).count() >= self.wanted {
                return;
            }
            table.flushers.insert(id, Some(Work { layer, since: Instant::now() }));
        }
        work();
        lock(&self.table).flushers.insert(id, None);
    }

    /// Whether this is the only flusher that stores what is deferred in a layer, until it says that it does no more.
    pub fn begin_storing(&self, layer: usize) -> bool {
        lock(&self.table).storing.insert(layer)
    }

    pub fn end_storing(&self, layer: usize) {
        lock(&self.table).storing.remove(&layer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_kept_is_replaced_and_who_is_too_many_ends() {
        let (flushers, start) = (Flushers::new(2), Instant::now());
        let first = flushers.missing(start);
        assert_eq!((first.len(), flushers.missing(start).len()), (2, 0));
        let keep = |id: FlusherId, layer, since| {
            lock(&flushers.table).flushers.insert(id, Some(Work { layer, since }));
        };
        keep(first[0], 7, start);
        assert!(flushers.missing(start + OVERDUE / 2).is_empty(), "it may be about to be answered");
        let late = start + OVERDUE;
        let second = flushers.missing(late);
        assert_eq!(second.len(), 1);
        keep(second[0], 7, start);
        keep(first[1], 8, start);
        let mut done = Vec::new();
        let third = flushers.missing(late);
        assert_eq!(third.len(), 2);
        // As many as that are in the one, however short a time, and not in the other.
        [7, 8, 9].into_iter().for_each(|layer| flushers.within(third[0], layer, || done.push(layer)));
        assert_eq!(done, [8, 9]);
        assert!(!flushers.leaves_as_surplus(third[0], late));
        lock(&flushers.table).flushers.insert(first[0], None);
        assert!(flushers.leaves_as_surplus(third[0], late) && !flushers.leaves_as_surplus(third[1], late));
    }

    #[test]
    fn many_layers_that_do_not_answer_leave_those_that_are_wanted() {
        let (flushers, start) = (Flushers::new(2), Instant::now());
        for layer in 0..FLUSHERS_MAX / 2 - 1 {
            let since = start.checked_sub(OVERDUE).unwrap_or(start);
            for id in flushers.missing(start) {
                let mut is_in = false;
                flushers.within(id, layer, || is_in = true);
                assert!(is_in);
                lock(&flushers.table).flushers.insert(id, Some(Work { layer, since }));
            }
        }
        assert_eq!(flushers.missing(start).len(), 2);
    }

    #[test]
    fn there_are_never_too_many() {
        let (flushers, start) = (Flushers::new(2), Instant::now());
        for round in 0..100 {
            for id in flushers.missing(start) {
                let since = start.checked_sub(OVERDUE).unwrap_or(start);
                lock(&flushers.table).flushers.insert(id, Some(Work { layer: round, since }));
            }
        }
        assert_eq!(lock(&flushers.table).flushers.len(), FLUSHERS_MAX);
    }
}
