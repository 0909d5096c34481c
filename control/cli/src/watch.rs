//! `status --watch`: what services did in each interval.

use crate::context::Context;
use crate::failure::Result;
use crate::record::PoolRecord;
use crate::service;
use crate::text::{duration, print, print_json, reader_is_gone, size, table};
use poolfs_service_protocol::{InstanceStatus, KindStatus, OperationPath, ServiceStatus};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Operations of one kind on one path so far: those served, and those that failed.
type Counts = BTreeMap<(String, OperationPath, String), (u64, u64)>;

/// One line of an interval.
#[derive(Debug, PartialEq, Serialize)]
struct Rate {
    instance: String,
    operation: String,
    path: OperationPath,
    per_second: f64,
    errors_per_second: f64,
    /// Of all since the service's start.
    p50_ns: u64,
    p99_ns: u64,
}

/// What one pool did in an interval.
#[derive(Serialize)]
struct Interval {
    pool: String,
    seconds: f64,
    cache_used_bytes: u64,
    cache_dirty_bytes: u64,
    sessions: u64,
    rates: Vec<Rate>,
}

/// Print what all pools did, or one, again and again until nobody listens or a signal ends it.
pub fn watch(context: &Context, wanted: Option<&str>, seconds: u64) -> Result<()> {
    let mut before: BTreeMap<String, (Instant, Counts)> = BTreeMap::new();
    loop {
        let pools = context.pools()?;
        let records: Vec<PoolRecord> = match wanted {
            Some(name) => vec![pools.peek(name)?.ok_or_else(|| pools.absent(name))?],
            None => pools.peek_all()?,
        };
        let mut now = BTreeMap::new();
        for record in records {
            // A service that is not there or silent has no line; it is there again when it answers.
            let Ok(status) = service::status(context, &record.name) else { continue };
            let (at, counts) = (Instant::now(), counts(&status));
            if let Some((since, earlier)) = before.get(&record.name) {
                show(context, &interval(&status, earlier, at.duration_since(*since)))?;
            }
            now.insert(record.name, (at, counts));
        }
        before = now;
        if reader_is_gone() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(seconds));
    }
}

fn each(status: &ServiceStatus) -> impl Iterator<Item = (&InstanceStatus, OperationPath, &String, &KindStatus)> {
    status.instances.iter().flat_map(|instance| {
        let paths = instance.operations.iter();
        paths.flat_map(move |(path, kinds)| kinds.iter().map(move |(kind, counted)| (instance, *path, kind, counted)))
    })
}

fn counts(status: &ServiceStatus) -> Counts {
    each(status)
        .map(|(instance, path, kind, counted)| {
            ((instance.instance.clone(), path, kind.clone()), (counted.count, counted.errors))
        })
        .collect()
}

fn interval(status: &ServiceStatus, earlier: &Counts, took: Duration) -> Interval {
    let seconds = took.as_secs_f64().max(0.001);
    let mut rates: Vec<Rate> = each(status)
        .filter_map(|(instance, path, kind, counted)| {
            let (count, errors) =
                earlier.get(&(instance.instance.clone(), path, kind.clone())).copied().unwrap_or_default();
            let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
            (counted.count > count).then(|| Rate {
                instance: instance.instance.clone(),
                operation: kind.clone(),
                path,
                per_second: rate(counted.count, count),
                errors_per_second: rate(counted.errors, errors),
                p50_ns: counted.p50_ns,
                p99_ns: counted.p99_ns,
            })
        })
        .collect();
    rates.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
    Interval {
        pool: status.pool.clone(),
        seconds,
        cache_used_bytes: status.cache.used_bytes,
        cache_dirty_bytes: status.cache.dirty_bytes,
        sessions: status.instances.iter().map(|instance| instance.sessions).sum(),
        rates,
    }
}

fn show(context: &Context, interval: &Interval) -> Result<()> {
    if context.json {
        return print_json(interval);
    }
    let (used, dirty) = (size(interval.cache_used_bytes), size(interval.cache_dirty_bytes));
    let mut text = format!(
        "pool {}: {:.1} s, {} sessions, cache {used}, dirty {dirty}\n",
        interval.pool, interval.seconds, interval.sessions
    );
    let mut rows = table(&["instance", "operation", "path", "per second", "errors", "p50 so far", "p99 so far"]);
    for rate in &interval.rates {
        let path = if rate.path == OperationPath::Library { "library" } else { "FUSE" };
        let (per_second, errors) = (format!("{:.1}", rate.per_second), format!("{:.1}", rate.errors_per_second));
        let (p50, p99) = (duration(rate.p50_ns), duration(rate.p99_ns));
        rows.add_row([rate.instance.as_str(), &rate.operation, path, &per_second, &errors, &p50, &p99]);
    }
    if interval.rates.is_empty() {
        text += "  nothing was asked\n";
    } else {
        rows.to_string().lines().for_each(|line| text += &format!("  {}\n", line.trim_end()));
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_service_protocol::{CacheStatus, ReadCounts, Transport};

    fn status(reads: u64) -> ServiceStatus {
        let read = KindStatus { count: reads, errors: reads / 10, p50_ns: 1023, p99_ns: 2047 };
        let kinds = BTreeMap::from([("read".to_owned(), read), ("write".to_owned(), KindStatus::default())]);
        let instance = InstanceStatus {
            instance: "web-1".into(),
            mount_point: "/mnt".into(),
            transport: Transport::IoUring,
            sessions: 2,
            sessions_refused: BTreeMap::new(),
            handles: 0,
            nodes: 0,
            kernel_cached_bytes: 0,
            operations: BTreeMap::from([(OperationPath::Library, kinds)]),
            reads: ReadCounts::default(),
            programs: None,
            not_direct: BTreeMap::new(),
            union: None,
        };
        let cache = CacheStatus::default();
        ServiceStatus { pool: "web".into(), pid: 1, uptime_seconds: 1, cache, instances: vec![instance] }
    }

    #[test]
    fn what_happened_in_between_is_shown_as_a_rate() {
        let shown = interval(&status(100), &counts(&status(40)), Duration::from_secs(2));
        assert_eq!(shown.rates.len(), 1, "what nobody asked has no line");
        let rate = &shown.rates[0];
        assert_eq!((rate.operation.as_str(), rate.per_second, rate.errors_per_second), ("read", 30.0, 3.0));
        // A service that was started anew counts from nothing.
        assert!(interval(&status(10), &counts(&status(40)), Duration::from_secs(2)).rates.is_empty());
    }
}
