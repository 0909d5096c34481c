//! Traces: what a service reports of single requests while somebody asks for it.

use crate::status::{Histogram, OperationPath};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Where a request spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layer {
    /// taking the request and answering it, with the copies of its data
    Front,
    /// walking the path, permissions, and waiting for others that change the same names or rights
    Access,
    /// telling the kernel what it must not remember any more
    Kernel,
    /// the union of branches
    Union,
    /// the cache, with waiting for those who already fetch or write the same blocks
    Cache,
    /// the directory below: the host's filesystem and disk
    Local,
    /// the cluster below: Ceph
    Ceph,
}

impl Layer {
    /// How many there are.
    pub const COUNT: usize = 7;

    /// All, from the top down.
    pub const ALL: [Layer; Self::COUNT] =
        [Self::Front, Self::Access, Self::Kernel, Self::Union, Self::Cache, Self::Local, Self::Ceph];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Front => "front",
            Self::Access => "access",
            Self::Kernel => "kernel",
            Self::Union => "union",
            Self::Cache => "cache",
            Self::Local => "local",
            Self::Ceph => "ceph",
        }
    }
}

/// Which requests somebody wants to hear of, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceSpec {
    /// Only those that took at least so long, their time in the queue included.
    pub slower_ns: u64,
    /// For how long; nothing: until whoever asked hangs up.
    pub seconds: Option<u32>,
    /// No single requests, but percentiles of all at the end.
    pub summary: bool,
}

/// One request that was served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// When it was answered, milliseconds since 1970.
    pub unix_ms: u64,
    /// The instance.
    pub instance: String,
    /// The kind of operation, as in the status; `other` for what is none of these.
    pub operation: String,
    /// Which way it came.
    pub path: OperationPath,
    /// Who asked, as the service numbers processes: of the kernel's requests the thread, 0 when it asked for itself.
    pub process: u32,
    /// What that process calls itself, when it still is there.
    pub program: Option<String>,
    /// `done`, the name of an errno, `left to the kernel`, or `symbolic link` when the caller has to go on with its target.
    pub outcome: String,
    /// How long it waited to be served, nanoseconds, by the caller's word; nothing when the caller did not say. How long the
    /// kernel's requests waited nobody knows.
    pub queue_ns: Option<u64>,
    /// How long it was served, nanoseconds.
    pub service_ns: u64,
    /// The time in each layer without those below it, nanoseconds; layers it did not come to are missing.
    pub layers: BTreeMap<Layer, u64>,
}

/// Percentiles of times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median, nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, nanoseconds.
    pub p99_ns: u64,
}

impl From<&Histogram> for Percentiles {
    fn from(histogram: &Histogram) -> Self {
        Self { p50_ns: histogram.percentile(50), p99_ns: histogram.percentile(99) }
    }
}

/// All requests of one kind on one path in the time of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindTimes {
    /// The kind of operation.
    pub operation: String,
    /// Which way they came.
    pub path: OperationPath,
    /// How many.
    pub count: u64,
    /// In the queue, of those that said how long; nothing when none did.
    pub queue: Option<Percentiles>,
    /// From taking to answering.
    pub service: Percentiles,
    /// In each layer without those below it, of all requests: who did not come there took no time there. Layers none came to are
    /// missing.
    pub layers: BTreeMap<Layer, Percentiles>,
}
