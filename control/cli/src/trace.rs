//! The command `trace`: where single requests of a pool spend their time.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::record::PoolRecord;
use crate::service;
use crate::signals::Signals;
use crate::text::{complain, count, duration, print, print_json, print_json_line, print_table, reader_is_gone, table};
use poolfs_service_protocol::{KindTimes, Layer, OperationPath, Percentiles, Span, TraceSpec};
use serde::Serialize;

/// How long a summary takes unless something else is asked for, seconds.
const SUMMARY_SECONDS: u32 = 10;

/// What `--summary --json` prints.
#[derive(Serialize)]
struct Summary<'a> {
    pool: &'a str,
    requests: u64,
    kinds: Vec<KindTimes>,
}

/// Print requests as they end, or percentiles of all.
pub fn trace(context: &Context, pool: &str, spec: TraceSpec) -> Result<()> {
    let pools = context.pools()?;
    let record: PoolRecord = pools.peek(pool)?.ok_or_else(|| pools.absent(pool))?;
    match record.service_alive(&*context.host) {
        Some(true) => {}
        alive => {
            let cause = match alive {
                Some(_) => "its service has died, and serves nothing",
                None => "its service is not running: nothing is mounted",
            };
            let remedy = format!(
                "mount something in it, which starts its service, and trace that: `poolfs mount {pool} MOUNTPOINT --dir DIR`"
            );
            return Err(Failure::not_found(format!("pool {pool}"), cause, remedy));
        }
    }
    let seconds = if spec.summary { spec.seconds.or(Some(SUMMARY_SECONDS)) } else { spec.seconds };
    let spec = TraceSpec { seconds, ..spec };
    // Being asked to end is how it ends: what it has come to is said then.
    let _signals = Signals::catch()?;
    let traced = service::trace(context, &record.name, spec, |span| {
        if let Some(span) = span {
            show(context, &span)?;
        }
        Ok(!reader_is_gone())
    })?;
    // Nobody reads any more.
    let Some(traced) = traced else { return Ok(()) };
    if traced.lost > 0 {
        let (lost, of) = (traced.lost, count(traced.requests, "request"));
        complain(&format!("poolfs: {lost} of {of} came too fast to be told of; --slower or --summary show all"));
    }
    match (spec.summary, context.json) {
        (false, _) => Ok(()),
        (true, true) => print_json(&Summary { pool, requests: traced.requests, kinds: traced.summary }),
        (true, false) => summary(&traced.summary),
    }
}

fn show(context: &Context, span: &Span) -> Result<()> {
    if context.json {
        return print_json_line(span);
    }
    print(&line(span))
}

fn path_name(path: OperationPath) -> &'static str {
    match path {
        OperationPath::Library => "library",
        OperationPath::Fuse => "FUSE",
    }
}

fn line(span: &Span) -> String {
    let of_day = span.unix_ms % 86_400_000;
    let (hours, minutes, seconds) = (of_day / 3_600_000, of_day / 60_000 % 60, of_day % 60_000);
    let queue = span.queue_ns.map_or_else(|| "-".to_owned(), duration);
    let total = duration(span.queue_ns.unwrap_or(0) + span.service_ns);
    let layers = span.layers.iter().map(|(layer, time)| format!(" {} {}", layer.name(), duration(*time)));
    format!(
        "{hours:02}:{minutes:02}:{:02}.{:03}Z {} {} {} by {} {}: {}, {total}: queue {queue},{}\n",
        seconds / 1000,
        seconds % 1000,
        span.instance,
        span.operation,
        path_name(span.path),
        span.program.as_deref().unwrap_or("process"),
        span.process,
        span.outcome,
        layers.collect::<Vec<_>>().join(","),
    )
}

fn summary(kinds: &[KindTimes]) -> Result<()> {
    if kinds.is_empty() {
        return print("nothing was asked\n");
    }
    let layers = Layer::ALL.map(|layer| format!("{} p50/p99", layer.name()));
    let headings = ["operation", "path", "count", "queue p50/p99"].into_iter().chain(layers.iter().map(String::as_str));
    let headings: Vec<&str> = headings.chain(["served p50/p99"]).collect();
    let mut rows = table(&headings);
    for kind in kinds {
        let mut cells = vec![kind.operation.clone(), path_name(kind.path).to_owned(), kind.count.to_string()];
        cells.push(percentiles(kind.queue.as_ref()));
        cells.extend(Layer::ALL.iter().map(|layer| percentiles(kind.layers.get(layer))));
        cells.push(percentiles(Some(&kind.service)));
        rows.add_row(cells);
    }
    print_table(&rows)
}

/// Both percentiles; a time that is none is shown as `-`.
fn percentiles(times: Option<&Percentiles>) -> String {
    // The lowest bucket ends at 1 ns: nobody was there.
    let one = |time: u64| if time <= 1 { "-".to_owned() } else { duration(time) };
    times.map_or_else(|| "-".to_owned(), |times| format!("{} / {}", one(times.p50_ns), one(times.p99_ns)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_line_says_where_the_time_went() {
        let span = Span {
            unix_ms: 86_400_000 * 20_000 + 3_723_045,
            instance: "web-1".into(),
            operation: "sync".into(),
            path: OperationPath::Library,
            process: 42,
            program: Some("postgres".into()),
            outcome: "done".into(),
            queue_ns: Some(4_000),
            service_ns: 14_000_000,
            layers: BTreeMap::from([(Layer::Cache, 1_000_000), (Layer::Local, 13_000_000)]),
        };
        let text = "01:02:03.045Z web-1 sync library by postgres 42: done, 14.0 ms: queue 4.0 us, cache 1.0 ms, local 13.0 ms\n";
        assert_eq!(line(&span), text);
        let unknown = Span { queue_ns: None, program: None, path: OperationPath::Fuse, ..span };
        assert!(line(&unknown).contains("sync FUSE by process 42: done, 14.0 ms: queue -,"), "{}", line(&unknown));
    }

    #[test]
    fn a_layer_nobody_came_to_has_no_time() {
        assert_eq!(percentiles(None), "-");
        assert_eq!(percentiles(Some(&Percentiles { p50_ns: 1, p99_ns: 2047 })), "- / 2.0 us");
    }
}
