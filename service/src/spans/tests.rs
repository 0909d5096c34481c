//! Tests of what is measured, and that the measuring layer changes nothing.

use super::clock::enter;
use super::{Asked, Timed, Tracer, note};
use crate::request::Kind;
use poolfs_libservice::types::{Caller, NodeId};
use poolfs_libservice::{Libservice, Memory, conformance};
use poolfs_service_protocol::{Layer, OperationPath, TraceSpec};
use std::sync::Arc;
use std::time::{Duration, Instant};

const ALL: TraceSpec = TraceSpec { slower_ns: 0, seconds: None, summary: false };
const SUMMARY: TraceSpec = TraceSpec { summary: true, ..ALL };
const AT_ONCE: Duration = Duration::ZERO;
const MOMENT: Duration = Duration::from_millis(5);

fn asked(kind: Option<Kind>) -> Asked<'static> {
    Asked { instance: "i", path: OperationPath::Library, process: 7, submitted_ns: 0, kind }
}

fn measured_memory() -> Arc<dyn Libservice> {
    Timed::over(Layer::Cache, Timed::over(Layer::Local, Memory::new()))
}

#[test]
fn a_measured_layer_is_the_layer_whether_anybody_measures_or_not() {
    conformance::run(&measured_memory);
    let tracer = Arc::new(Tracer::default());
    let _watch = tracer.watch(SUMMARY).expect("room");
    let measured = tracer.begin(asked(None)).expect("somebody listens");
    conformance::run(&measured_memory);
    measured.end("done");
}

#[test]
fn every_layer_is_counted_without_those_below() {
    let tracer = Arc::new(Tracer::default());
    let watch = tracer.watch(ALL).expect("room");
    let begun = Instant::now();
    let mut measured = tracer.begin(asked(None)).expect("somebody listens");
    note(Kind::Sync);
    note(Kind::Stat);
    {
        let _cache = enter(Layer::Cache);
        let _local = enter(Layer::Local);
        std::thread::sleep(MOMENT);
    }
    measured.stop();
    // The answer is handed over.
    std::thread::sleep(20 * MOMENT);
    measured.end("ENOENT");
    let whole = begun.elapsed();
    let span = watch.next(AT_ONCE).expect("told");
    // Also what is counted in two layers would be missing here.
    assert!(whole.as_nanos() - u128::from(span.service_ns) >= 20 * MOMENT.as_nanos(), "{span:?} of {whole:?}");
    assert_eq!((&*span.operation, &*span.outcome, span.process), ("sync", "ENOENT", 7));
    assert_eq!(span.layers.keys().copied().collect::<Vec<_>>(), [Layer::Front, Layer::Cache, Layer::Local]);
    assert_eq!(span.layers.values().sum::<u64>(), span.service_ns);
    assert!(u128::from(span.layers[&Layer::Local]) >= MOMENT.as_nanos(), "{span:?}");
}

#[test]
fn entries_of_a_listing_are_used_in_the_time_of_the_layer_above() {
    let tracer = Arc::new(Tracer::default());
    let watch = tracer.watch(ALL).expect("room");
    let layer = measured_memory();
    let caller = Caller::ROOT;
    let name = poolfs_libservice::types::Name::new(b"d").expect("a name");
    layer.mkdir(&caller, NodeId::ROOT, name, 0o755).expect("room");
    let handle = layer.opendir(&caller, NodeId::ROOT).expect("a directory");
    let measured = tracer.begin(asked(Some(Kind::List))).expect("somebody listens");
    let mut visit = |_: poolfs_libservice::DirectoryEntry<'_>| {
        std::thread::sleep(MOMENT);
        std::ops::ControlFlow::Continue(())
    };
    layer.readdir(&caller, handle, 0, &mut visit).expect("listed");
    measured.end("done");
    let span = watch.next(AT_ONCE).expect("told");
    assert!(u128::from(span.layers[&Layer::Front]) >= MOMENT.as_nanos(), "{span:?}");
}

#[test]
fn nothing_is_measured_for_nobody_and_only_what_is_slow_is_told() {
    let tracer = Arc::new(Tracer::default());
    assert!(tracer.begin(asked(None)).is_none());
    let slow = tracer.watch(TraceSpec { slower_ns: 3_000_000, ..ALL }).expect("room");
    for pause in [Duration::ZERO, MOMENT] {
        let measured = tracer.begin(asked(Some(Kind::Read))).expect("somebody listens");
        assert!(tracer.begin(asked(None)).is_none(), "one request at a time on a thread");
        std::thread::sleep(pause);
        measured.end("done");
    }
    assert!(slow.next(AT_ONCE).is_some_and(|span| u128::from(span.service_ns) >= MOMENT.as_nanos()));
    assert!(slow.next(AT_ONCE).is_none() || slow.counts().0 == 2, "a fast one was told of");
    drop(slow);
    assert!(tracer.begin(asked(None)).is_none(), "it goes on for nobody");
}

#[test]
fn a_measurement_that_is_given_up_does_not_hinder_the_next() {
    let tracer = Arc::new(Tracer::default());
    let watch = tracer.watch(ALL).expect("room");
    drop(tracer.begin(asked(None)).expect("somebody listens"));
    assert!(watch.next(AT_ONCE).is_none());
    tracer.begin(asked(None)).expect("the thread is free again").end("done");
    assert_eq!(watch.next(AT_ONCE).expect("told").operation, "other");
}

#[test]
fn a_callers_word_about_its_wait_is_taken_only_when_it_can_be_true() {
    let tracer = Arc::new(Tracer::default());
    let watch = tracer.watch(ALL).expect("room");
    let now = super::clock::now_ns();
    for (submitted_ns, expected) in [(0, false), (now, true), (u64::MAX, false), (1, now < 3_600_000_000_000)] {
        let asked = Asked { submitted_ns, ..asked(None) };
        tracer.begin(asked).expect("somebody listens").end("done");
        let span = watch.next(AT_ONCE).expect("told");
        assert_eq!(span.queue_ns.is_some(), expected, "{submitted_ns}: {span:?}");
    }
}

#[test]
fn who_does_not_read_loses_the_rest_and_is_told_how_much() {
    let tracer = Arc::new(Tracer::default());
    let watch = tracer.watch(ALL).expect("room");
    let summary = tracer.watch(SUMMARY).expect("room");
    for _ in 0..1500 {
        tracer.begin(asked(Some(Kind::Read))).expect("somebody listens").end("done");
    }
    assert_eq!(watch.counts(), (1500, 1500 - 1024));
    assert_eq!(summary.counts(), (1500, 0));
    let rows = summary.summary();
    assert_eq!((rows.len(), &*rows[0].operation, rows[0].count, rows[0].queue), (1, "read", 1500, None));
    let more: Vec<_> = std::iter::from_fn(|| tracer.watch(ALL)).collect();
    assert_eq!(more.len(), 6, "listeners are bounded");
}
