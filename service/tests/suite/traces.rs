//! Tests of traces by the control socket: they end with their listener, and their number is bounded.

use crate::bare::eventually;
use crate::harness::{Running, isolated};
use crate::queue::connect;
use poolfs_ipc::wire::{Operation, Request};
use poolfs_service_protocol::{Answer, Command as Order, Layer, OperationPath, Span, TraceSpec};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const ALL: TraceSpec = TraceSpec { slower_ns: 0, seconds: None, summary: false };

fn ask(service: &Running, spec: TraceSpec) -> BufReader<UnixStream> {
    let mut stream = UnixStream::connect(service.control_socket()).expect("the service listens");
    writeln!(stream, "{}", serde_json::to_string(&Order::Trace(spec)).expect("serializable")).expect("sent");
    BufReader::new(stream)
}

fn next(trace: &mut BufReader<UnixStream>) -> Answer {
    let mut line = String::new();
    trace.read_line(&mut line).expect("an answer");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

fn next_by_library(trace: &mut BufReader<UnixStream>, operation: &str) -> Span {
    loop {
        match next(trace) {
            Answer::Span(span) if span.path == OperationPath::Library && span.operation == operation => return *span,
            Answer::Span(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Looks at names until the trace, which begins a moment after it was asked for, tells of one.
fn begun(at: &Path, trace: &mut BufReader<UnixStream>) {
    trace.get_ref().set_read_timeout(Some(std::time::Duration::from_millis(20))).expect("a time");
    let mut round = 0;
    eventually("it begins", || {
        round += 1;
        let _ = std::fs::metadata(at.join(format!("absent-{round}")));
        trace.fill_buf().is_ok_and(|bytes| !bytes.is_empty())
    });
    trace.get_ref().set_read_timeout(None).expect("a time");
}

#[test]
fn requests_are_told_of_with_their_caller_their_outcome_and_their_layers() {
    isolated("traces::requests_are_told_of_with_their_caller_their_outcome_and_their_layers", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let connection = connect(folder, "one");
        let mut trace = ask(&service, ALL);
        begun(&at, &mut trace);
        let call = |operation: Operation, path: &str, submitted_ns: u64| {
            let path_length = path.len() as u32;
            let request =
                Request { operation: operation as u32, path_length, submitted_ns, mode: 0o755, ..Request::default() };
            connection.call(&request, &[path.as_bytes()], &mut []).expect("a reply");
        };
        call(Operation::MakeDirectory, "made", 0);
        let made = next_by_library(&mut trace, "mkdir");
        assert_eq!((&*made.instance, made.process, &*made.outcome), ("one", std::process::id(), "done"));
        let layers: Vec<Layer> = made.layers.keys().copied().collect();
        assert!(
            [Layer::Front, Layer::Access, Layer::Cache, Layer::Local].iter().all(|one| layers.contains(one)),
            "{made:?}"
        );
        assert!(!layers.contains(&Layer::Union), "there is none: {made:?}");
        assert!(made.queue_ns.is_some_and(|queue| queue > 0), "{made:?}");
        // What fails on the way, before anything is dispatched.
        call(Operation::Stat, "absent/name", 0);
        assert_eq!(next_by_library(&mut trace, "stat").outcome, "ENOENT");
        call(Operation::Stat, "../name", 0);
        assert_eq!(next_by_library(&mut trace, "stat").outcome, "left to the kernel");
    });
}

#[test]
fn a_trace_ends_with_its_time_or_with_who_asked_for_it() {
    isolated("traces::a_trace_ends_with_its_time_or_with_who_asked_for_it", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let mut all: Vec<_> = (0..8).map(|_| ask(&service, ALL)).collect();
        all.iter_mut().for_each(|trace| begun(&at, trace));
        assert!(
            matches!(next(&mut ask(&service, ALL)), Answer::Failed { message, .. } if message.contains("too many"))
        );
        drop(all);
        // Who has hung up is noticed, and makes room.
        let brief = TraceSpec { seconds: Some(1), summary: true, ..ALL };
        let mut told = None;
        eventually("there is room", || {
            let mut trace = ask(&service, brief);
            // Until it is answered, so that there is something to sum up.
            trace.get_ref().set_read_timeout(Some(std::time::Duration::from_millis(10))).expect("a time");
            while !trace.fill_buf().is_ok_and(|bytes| !bytes.is_empty()) {
                let _ = std::fs::metadata(at.join("absent")).is_ok() || std::fs::create_dir(at.join("d")).is_ok();
                let _ = std::fs::remove_dir(at.join("d"));
            }
            told = Some(next(&mut trace)).filter(|told| matches!(told, Answer::Traced { .. }));
            told.is_some()
        });
        let Some(Answer::Traced { lost: 0, summary, requests }) = told else { panic!("{told:?}") };
        let made = summary.iter().find(|kind| kind.operation == "mkdir").expect("some were made");
        assert!(made.count > 0 && made.count < requests && made.queue.is_none(), "{made:?}");
        assert!(made.layers.contains_key(&Layer::Local) && made.service.p50_ns <= made.service.p99_ns, "{made:?}");
    });
}
