//! The tracer: its listeners, and the measurement of one request.

use super::clock::{Running, Times, now_ns};
use super::summary::Summary;
use crate::request::Kind;
use crate::sync::lock;
use poolfs_service_protocol::{KindTimes, Layer, OperationPath, Span, TraceSpec};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tracing::field::Empty;
use tracing::span::EnteredSpan;
use tracing::{Level, trace_span};

/// Most who listen at once.
const WATCHES_MAX: usize = 8;

/// Most requests that wait to be told of, for each who listens.
const SPANS_MAX: usize = 1024;

/// A longer time in the queue than this nobody believes a caller.
const QUEUE_NS_MAX: u64 = 3_600_000_000_000;

/// What is told of a request that is no operation of a [`Kind`].
const OTHER: &str = "other";

/// What a front knows of a request before it serves it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The instance's name.
    pub instance: &'a str,
    /// Which way it came.
    pub path: OperationPath,
    /// Who asks.
    pub process: u32,
    /// When the caller says it was submitted (`CLOCK_MONOTONIC`, nanoseconds); 0: it does not.
    pub submitted_ns: u64,
    /// The kind, if it is known already; else the first that is dispatched counts.
    pub kind: Option<Kind>,
}

struct Watcher {
    spec: TraceSpec,
    spans: SyncSender<Span>,
    requests: AtomicU64,
    lost: AtomicU64,
    summary: Mutex<Summary>,
}

impl Watcher {
    fn hear(&self, of: &Finished<'_>) {
        if of.total_ns() < self.spec.slower_ns {
            return;
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        if self.spec.summary {
            let mut summary = lock(&self.summary);
            summary.record(of.asked.path, of.operation, of.queue_ns, &of.times);
        } else if let Err(TrySendError::Full(_)) = self.spans.try_send(of.span()) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// All who want to hear of requests.
#[derive(Default)]
pub struct Tracer {
    on: AtomicBool,
    watchers: RwLock<Vec<Arc<Watcher>>>,
}

impl Tracer {
    /// Whether somebody listens.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Listens from now on; nothing when too many do.
    #[must_use]
    pub fn watch(self: &Arc<Self>, spec: TraceSpec) -> Option<Watch> {
        let (sender, spans) = sync_channel(SPANS_MAX);
        let (requests, lost, summary) = Default::default();
        let watcher = Arc::new(Watcher { spec, spans: sender, requests, lost, summary });
        let mut watchers = self.change();
        if watchers.len() >= WATCHES_MAX {
            return None;
        }
        watchers.push(Arc::clone(&watcher));
        self.on.store(true, Ordering::Relaxed);
        drop(watchers);
        Some(Watch { tracer: Arc::clone(self), watcher, spans })
    }

    fn change(&self) -> RwLockWriteGuard<'_, Vec<Arc<Watcher>>> {
        self.watchers.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn watchers(&self) -> RwLockReadGuard<'_, Vec<Arc<Watcher>>> {
        self.watchers.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to measure a request that this thread serves, if anybody wants to know: who listens, or the log, by a span of the
    /// target `poolfs::request` at the level `trace`.
    #[must_use]
    pub fn begin<'t>(&'t self, asked: Asked<'t>) -> Option<Measured<'t>> {
        if !self.is_on() && !tracing::enabled!(target: "poolfs::request", Level::TRACE) {
            return None;
        }
        let now = now_ns();
        let clock = Running::start(now, asked.kind)?;
        let plausible = |waited: &u64| asked.submitted_ns > 0 && *waited <= QUEUE_NS_MAX;
        let queue_ns = now.checked_sub(asked.submitted_ns).filter(plausible);
        let path = path_name(asked.path);
        let log = trace_span!(
            target: "poolfs::request", "request", instance = asked.instance, path, process = asked.process, operation = Empty,
            outcome = Empty, queue_ns, service_ns = Empty, front_ns = Empty, access_ns = Empty, kernel_ns = Empty,
            union_ns = Empty, cache_ns = Empty, local_ns = Empty, ceph_ns = Empty,
        );
        Some(Measured {
            tracer: self,
            asked,
            queue_ns,
            clock: Some(clock),
            counted: Default::default(),
            log: log.entered(),
        })
    }
}

fn path_name(path: OperationPath) -> &'static str {
    match path {
        OperationPath::Library => "library",
        OperationPath::Fuse => "fuse",
    }
}

/// A request that is being measured.
pub struct Measured<'t> {
    tracer: &'t Tracer,
    asked: Asked<'t>,
    queue_ns: Option<u64>,
    clock: Option<Running>,
    counted: (Times, Option<Kind>),
    log: EnteredSpan,
}

struct Finished<'t> {
    asked: Asked<'t>,
    operation: &'static str,
    outcome: &'static str,
    queue_ns: Option<u64>,
    times: Times,
}

impl Measured<'_> {
    /// The answer is made: its handing over is not counted, in which the caller goes on, perhaps in the place of this thread.
    pub fn stop(&mut self) {
        if let Some(clock) = self.clock.take() {
            self.counted = clock.stop();
        }
    }

    /// The request was answered by this.
    pub fn end(mut self, outcome: &'static str) {
        self.stop();
        let Self { tracer, asked, queue_ns, counted: (times, kind), log, .. } = self;
        let operation = kind.map_or(OTHER, |kind| Kind::NAMES[kind as usize]);
        let finished = Finished { asked, operation, outcome, queue_ns, times };
        if !log.is_disabled() {
            log.record("operation", operation).record("outcome", outcome).record("service_ns", finished.service_ns());
            for (name, layer) in LOG_FIELDS.iter().zip(Layer::ALL) {
                log.record(*name, times[layer as usize]);
            }
        }
        tracer.watchers().iter().for_each(|watcher| watcher.hear(&finished));
    }
}

const LOG_FIELDS: [&str; Layer::COUNT] =
    ["front_ns", "access_ns", "kernel_ns", "union_ns", "cache_ns", "local_ns", "ceph_ns"];

impl Finished<'_> {
    fn service_ns(&self) -> u64 {
        self.times.iter().sum()
    }

    fn total_ns(&self) -> u64 {
        self.queue_ns.unwrap_or(0) + self.service_ns()
    }

    fn span(&self) -> Span {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let layers = Layer::ALL.into_iter().map(|layer| (layer, self.times[layer as usize]));
        Span {
            unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
            instance: self.asked.instance.to_owned(),
            operation: self.operation.to_owned(),
            path: self.asked.path,
            process: self.asked.process,
            program: None,
            outcome: self.outcome.to_owned(),
            queue_ns: self.queue_ns,
            service_ns: self.service_ns(),
            layers: layers.filter(|(_, time)| *time > 0).collect(),
        }
    }
}

/// Somebody listens, until this is dropped.
pub struct Watch {
    tracer: Arc<Tracer>,
    watcher: Arc<Watcher>,
    spans: Receiver<Span>,
}

impl Watch {
    /// The next request, if one comes within `limit`. Its [`Span::program`] is not known yet.
    #[must_use]
    pub fn next(&self, limit: Duration) -> Option<Span> {
        // This value itself keeps the other end: it fails for the time alone.
        self.spans.recv_timeout(limit).ok()
    }

    /// Requests so far, and how many of them there was no room for.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.watcher.requests.load(Ordering::Relaxed), self.watcher.lost.load(Ordering::Relaxed))
    }

    /// All requests so far by kind, when asked for.
    #[must_use]
    pub fn summary(&self) -> Vec<KindTimes> {
        lock(&self.watcher.summary).report()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut watchers = self.tracer.change();
        watchers.retain(|watcher| !Arc::ptr_eq(watcher, &self.watcher));
        self.tracer.on.store(!watchers.is_empty(), Ordering::Relaxed);
    }
}
