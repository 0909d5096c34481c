//! The command `status --watch`: what services did in each interval.

use crate::context::Context;
use crate::failure::Result;
use crate::record::PoolRecord;
use crate::status::Found;
use crate::text::{complain_of_state, duration, print, print_json_line, reader_is_gone, size, table};
use poolfs_service_protocol::{InstanceStatus, KindStatus, OperationPath, ServiceStatus};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What [`Found::name`] calls a service that does not answer.
const SILENT: &str = "silent";

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

/// What is remembered of a pool from one interval to the next.
struct Before {
    state: State,
    counted: Option<(Instant, Counts)>,
}

/// How its service was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    name: &'static str,
    /// Another process is another service.
    pid: Option<u32>,
}

/// Print what all pools did, or one, again and again until nobody listens or a signal ends it. On standard error is said when a service
/// comes, ends, or does not answer any more.
pub fn watch(context: &Context, wanted: Option<&str>, seconds: u64) -> Result<()> {
    let mut before: BTreeMap<String, Before> = BTreeMap::new();
    let interval = Duration::from_secs(seconds);
    loop {
        let begun = Instant::now();
        let pools = context.pools()?;
        let records: Vec<PoolRecord> = match wanted {
            Some(name) => vec![pools.peek(name)?.ok_or_else(|| pools.absent(name))?],
            None => pools.peek_all()?,
        };
        let mut now = BTreeMap::new();
        for (record, found) in records.iter().zip(look(context, &records, &before, interval)) {
            let earlier = before.remove(&record.name);
            now.insert(record.name.clone(), tell(context, &record.name, earlier, found)?);
        }
        for (name, _) in before {
            complain_of_state(&name, "removed", "it was removed");
        }
        before = now;
        if reader_is_gone() {
            return Ok(());
        }
        std::thread::sleep(interval.saturating_sub(begun.elapsed()));
    }
}

/// How the services of these pools are: asked at once, and those that were silent before only as long as an interval, so that the others
/// have theirs.
fn look(
    context: &Context,
    records: &[PoolRecord],
    before: &BTreeMap<String, Before>,
    interval: Duration,
) -> Vec<(Found, Instant)> {
    context.patience.renew();
    std::thread::scope(|scope| {
        let look_at = |record: &PoolRecord| {
            let was_silent = before.get(&record.name).is_some_and(|before| before.state.name == SILENT);
            let longest = if was_silent { interval } else { Duration::MAX };
            let found = Found::of(context, record, &mut context.patience.begin_short(longest));
            (found, Instant::now())
        };
        let asked: Vec<_> = records.iter().map(|record| scope.spawn(move || look_at(record))).collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    })
}

/// Print what a pool did since `before`, and how its service is if that is another state.
fn tell(context: &Context, pool: &str, before: Option<Before>, (found, at): (Found, Instant)) -> Result<Before> {
    let pid = if let Found::Running(status) = &found { Some(status.pid) } else { None };
    let state = State { name: found.name(), pid };
    let earlier = before.as_ref().map(|before| before.state);
    if let Some(line) = change(earlier, state, &found) {
        complain_of_state(pool, state.name, &line);
    }
    let Found::Running(status) = found else { return Ok(Before { state, counted: None }) };
    let counted = before.filter(|before| before.state == state).and_then(|before| before.counted);
    if let Some((since, earlier)) = counted {
        show(context, &rates(&status, &earlier, at.duration_since(since)))?;
    }
    Ok(Before { state, counted: Some((at, counts(&status))) })
}

/// What is to be said of a service that was in another state before; at the first look only if it does not run.
fn change(before: Option<State>, now: State, found: &Found) -> Option<String> {
    if before == Some(now) {
        return None;
    }
    let line = match (found, before) {
        (Found::Running(_), None) => return None,
        (Found::Running(status), Some(State { name: SILENT, .. })) => {
            format!("its service (process {}) answers again", status.pid)
        }
        (Found::Running(status), Some(_)) => format!("its service runs (process {})", status.pid),
        (Found::Silent(failure), _) => failure.summary(),
        (Found::Dead, _) => "its service has died; the next mount starts another one".to_owned(),
        (Found::NotRunning, _) => "its service does not run: nothing is mounted".to_owned(),
    };
    Some(line)
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

fn rates(status: &ServiceStatus, earlier: &Counts, took: Duration) -> Interval {
    let seconds = took.as_secs_f64().max(0.001);
    let mut all: Vec<Rate> = each(status)
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
    all.sort_by(|a, b| b.per_second.total_cmp(&a.per_second));
    Interval {
        pool: status.pool.clone(),
        seconds,
        cache_used_bytes: status.cache.used_bytes,
        cache_dirty_bytes: status.cache.dirty_bytes,
        sessions: status.instances.iter().map(|instance| instance.sessions).sum(),
        rates: all,
    }
}

fn show(context: &Context, interval: &Interval) -> Result<()> {
    if context.json {
        return print_json_line(interval);
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
            posted_requests: 0,
            not_posted: BTreeMap::new(),
            waiting: None,
            timed_out: None,
            union: None,
        };
        let cache = CacheStatus::default();
        ServiceStatus {
            pool: "web".into(),
            pid: 1,
            uptime_seconds: 1,
            cache,
            memory: None,
            unresponsive_branches: Vec::new(),
            instances: vec![instance],
        }
    }

    #[test]
    fn what_happened_in_between_is_shown_as_a_rate() {
        let shown = rates(&status(100), &counts(&status(40)), Duration::from_secs(2));
        assert_eq!(shown.rates.len(), 1, "what nobody asked has no line");
        let rate = &shown.rates[0];
        assert_eq!((rate.operation.as_str(), rate.per_second, rate.errors_per_second), ("read", 30.0, 3.0));
        // A service that was started anew counts from nothing.
        assert!(rates(&status(10), &counts(&status(40)), Duration::from_secs(2)).rates.is_empty());
    }

    #[test]
    fn each_change_of_a_service_is_told_once() {
        let silent =
            || Found::Silent(crate::failure::Failure::new("service of pool web (process 1)", "it does not answer", ""));
        let running = |pid| Found::Running(Box::new(ServiceStatus { pid, ..status(1) }));
        let state = |found: &Found| State {
            name: found.name(),
            pid: if let Found::Running(status) = found { Some(status.pid) } else { None },
        };
        let said = |before: Option<&Found>, now: &Found| change(before.map(state), state(now), now);
        assert_eq!(silent().name(), SILENT);
        assert_eq!(said(None, &running(1)), None);
        for (now, part) in [
            (silent(), "(process 1): it does not answer"),
            (Found::Dead, "has died"),
            (Found::NotRunning, "does not run"),
            (running(2), "runs (process 2)"),
        ] {
            let text = said(Some(&running(1)), &now).expect(part);
            assert!(text.contains(part), "{text}");
            assert_eq!(said(Some(&now), &now), None, "{part}");
        }
        assert!(said(None, &Found::Dead).is_some(), "also at the first look");
        assert!(said(Some(&silent()), &running(1)).expect("told").contains("answers again"));
    }
}
