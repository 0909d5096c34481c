//! Counts and service times of the requests of one instance.

use crate::request::Kind;
use poolfs_service_protocol::{Histogram, KindStatus, OperationPath};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

struct Counter {
    count: AtomicU64,
    errors: AtomicU64,
    times: [AtomicU64; Histogram::BUCKETS],
}

impl Counter {
    const fn new() -> Self {
        Self {
            count: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            times: [const { AtomicU64::new(0) }; Histogram::BUCKETS],
        }
    }
}

/// What an instance served, by path and kind.
pub struct Statistics {
    counters: Box<[[Counter; Kind::COUNT]; 2]>,
}

impl Default for Statistics {
    fn default() -> Self {
        Self { counters: Box::new([const { [const { Counter::new() }; Kind::COUNT] }; 2]) }
    }
}

fn row(path: OperationPath) -> usize {
    match path {
        OperationPath::Library => 0,
        OperationPath::Fuse => 1,
    }
}

impl Statistics {
    /// Counts one request.
    pub fn record(&self, path: OperationPath, kind: Kind, took: Duration, failed: bool) {
        let counter = &self.counters[row(path)][kind as usize];
        counter.count.fetch_add(1, Relaxed);
        if failed {
            counter.errors.fetch_add(1, Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counter.times[Histogram::bucket(nanoseconds)].fetch_add(1, Relaxed);
    }

    /// Requests of one kind on one path.
    #[must_use]
    pub fn count(&self, path: OperationPath, kind: Kind) -> u64 {
        self.counters[row(path)][kind as usize].count.load(Relaxed)
    }

    /// Everything that was served at least once.
    #[must_use]
    pub fn report(&self) -> BTreeMap<OperationPath, BTreeMap<String, KindStatus>> {
        [OperationPath::Library, OperationPath::Fuse]
            .into_iter()
            .map(|path| {
                let kinds = self.counters[row(path)].iter().zip(Kind::NAMES).filter_map(|(counter, name)| {
                    let count = counter.count.load(Relaxed);
                    let histogram = Histogram(std::array::from_fn(|n| counter.times[n].load(Relaxed)));
                    (count > 0).then(|| {
                        let errors = counter.errors.load(Relaxed);
                        let (p50_ns, p99_ns) = (histogram.percentile(50), histogram.percentile(99));
                        (name.to_owned(), KindStatus { count, errors, p50_ns, p99_ns })
                    })
                });
                (path, kinds.collect())
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_what_was_recorded_and_nothing_else() {
        let statistics = Statistics::default();
        statistics.record(OperationPath::Fuse, Kind::Read, Duration::from_nanos(1000), false);
        statistics.record(OperationPath::Fuse, Kind::Read, Duration::ZERO, true);
        statistics.record(OperationPath::Fuse, Kind::Statfs, Duration::from_secs(1 << 40), false);
        let report = statistics.report();
        assert!(report[&OperationPath::Library].is_empty());
        let read = &report[&OperationPath::Fuse]["read"];
        assert_eq!((read.count, read.errors), (2, 1));
        assert_eq!(read.p99_ns, 1023);
        assert_eq!(report[&OperationPath::Fuse].len(), 2);
        assert_eq!(statistics.count(OperationPath::Fuse, Kind::Read), 2);
    }
}
