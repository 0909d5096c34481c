//! The command `trace`: reports requests as they are served.

use super::{answer, failed, has_hung_up};
use crate::service::Service;
use poolfs_service_protocol::{Answer, FailureCode, OperationPath, Span, TraceSpec};
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How often it is looked whether anybody listens still.
const LOOK: Duration = Duration::from_millis(250);

/// Tells until the time is over or whoever asked hangs up.
pub(super) fn tell(stream: &UnixStream, service: &Service, spec: TraceSpec) -> io::Result<()> {
    let Some(watch) = service.tracer().watch(spec) else {
        return failed(stream, FailureCode::InUse, "too many traces at once; end one of them");
    };
    service.want_stamps();
    let told = tell_until(stream, spec.seconds, |limit| watch.next(limit));
    let (summary, (requests, lost)) = (watch.summary(), watch.counts());
    drop(watch);
    service.want_stamps();
    told?;
    answer(stream, &Answer::Traced { requests, lost, summary })
}

fn tell_until(stream: &UnixStream, seconds: Option<u32>, next: impl Fn(Duration) -> Option<Span>) -> io::Result<()> {
    let end = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds.into()));
    while !has_hung_up(stream)? {
        let left = end.map_or(LOOK, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Ok(());
        }
        if let Some(span) = next(left.min(LOOK)) {
            answer(stream, &Answer::Span(Box::new(with_program(span))))?;
        }
    }
    Ok(())
}

/// Of the kernel's requests only the thread is known, and its process is what people look for.
fn with_program(span: Span) -> Span {
    let read = |what: &str| fs::read_to_string(format!("/proc/{}/{what}", span.process)).ok();
    let program = read("comm").map(|name| name.trim_end().to_owned());
    let of_kernel = span.path == OperationPath::Fuse;
    let process = of_kernel.then(|| read("status")).flatten().and_then(|status| process_of(&status));
    Span { program, process: process.unwrap_or(span.process), ..span }
}

fn process_of(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}
