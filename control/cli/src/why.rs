//! The command `why`: which path the file operations of a process take, descriptor by descriptor, and why.

mod facts;
mod verdict;
mod writes;

use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::record::PoolRecord;
use crate::text::{complain, print, print_json, table};
use crate::{service, waiting};
use facts::ProcessFacts;
use poolfs_service_protocol::{ClientStatus, NotDirect, ReadCounts};
use serde::Serialize;
use std::path::Path;
use verdict::{Verdict, Way, adopted_file, descriptor_verdict, is_passed_through, process_verdict};
use writes::{WriteWay, Writes, writes};

/// What `why --json` prints.
#[derive(Serialize)]
struct Answer {
    pid: u32,
    program: String,
    /// Of paths: calls that name a file.
    paths: Verdict,
    descriptors: Vec<DescriptorAnswer>,
}

/// One descriptor.
#[derive(Serialize)]
struct DescriptorAnswer {
    fd: u32,
    file: String,
    instance: Option<String>,
    #[serde(flatten)]
    verdict: Verdict,
    /// How it was read, if it was adopted.
    reads: Option<ReadCounts>,
    /// The kernel maps and reads it from the cache by itself, and nobody counts how often.
    passthrough: bool,
    /// Why it is not read without requests, if somebody asked for that and may not.
    not_direct: Option<NotDirect>,
    /// How it is written, if it can be.
    writes: Option<Writes>,
}

/// Print which way each descriptor of a process takes, or one.
pub fn why(context: &Context, pid: u32, fd: Option<u32>) -> Result<()> {
    // Its memory may be held by somebody who waits for a service.
    let read = waiting::within(context, &Path::new("/proc").join(pid.to_string()), move || {
        ProcessFacts::read(Path::new("/proc"), pid)
    });
    let facts =
        read.map_err(|failure| failure.of(format!("process {pid}")))?.map_err(|error| unreadable(pid, &error))?;
    let clients = clients(context, pid, &facts.instances)?;
    let descriptors = facts
        .descriptors
        .iter()
        .filter(|descriptor| fd.is_none_or(|wanted| wanted == descriptor.fd))
        .map(|descriptor| (descriptor, adopted_file(descriptor, &clients)))
        .map(|(descriptor, adopted)| (descriptor, adopted, descriptor_verdict(&facts, descriptor, &clients)))
        .map(|(descriptor, adopted, verdict)| DescriptorAnswer {
            reads: adopted.map(|file| file.reads),
            passthrough: is_passed_through(descriptor, &clients),
            not_direct: adopted.and_then(|file| file.not_direct),
            fd: descriptor.fd,
            file: descriptor.file.clone(),
            instance: descriptor.instance.clone(),
            writes: writes(&facts, descriptor, &verdict, adopted),
            verdict,
        })
        .collect::<Vec<_>>();
    if let (Some(fd), true) = (fd, descriptors.is_empty()) {
        let remedy = format!("`poolfs why {pid}` lists those it has");
        return Err(Failure::not_found(format!("descriptor {fd} of process {pid}"), "it is not open", remedy));
    }
    let paths = process_verdict(&facts, &clients);
    let answer = Answer { pid, program: facts.program, paths, descriptors };
    if context.json { print_json(&answer) } else { print(&readable(&answer)) }
}

fn unreadable(pid: u32, error: &std::io::Error) -> Failure {
    let process = format!("process {pid}");
    if error.kind() == std::io::ErrorKind::PermissionDenied {
        let cause = format!("it may not be looked at: {error}");
        let remedy = "run poolfs as root of the host, with all capabilities; without them nobody looks at who has more rights, \
                      or lives in a user namespace of its own";
        return Failure::new(process, cause, remedy).with_code(Code::Host);
    }
    // Or it ended while it was read.
    Failure::not_found(process, "there is no such process", "check the number")
}

/// What the services of all pools know of a process that lives where these instances are mounted. Those that do not answer know nothing, which is said
/// where they have one of these.
fn clients(context: &Context, pid: u32, instances: &[String]) -> Result<Vec<ClientStatus>> {
    let records: Vec<PoolRecord> = context.pools()?.peek_all()?;
    let mut all = Vec::new();
    for record in records.iter().filter(|record| record.service_alive(&*context.host) == Some(true)) {
        match service::client(context, &record.name, pid) {
            Ok(known) => all.extend(known),
            Err(failure) if failure.code() == Code::Interrupted => return Err(failure),
            Err(failure) if record.instances.iter().any(|known| instances.contains(&known.spec.instance)) => {
                complain(&format!("poolfs: what it knows of process {pid} is not shown: {failure}"));
            }
            Err(_) => {}
        }
    }
    Ok(all)
}

fn readable(answer: &Answer) -> String {
    let Answer { pid, program, paths, descriptors } = answer;
    let mut text =
        format!("process {pid} ({program}): calls that name a file go by {}: {}\n", paths.way, paths.because);
    let mut rows = table(&["fd", "goes by", "because", "reads", "writes", "file"]);
    for descriptor in descriptors {
        let Verdict { way, because } = &descriptor.verdict;
        let counted = descriptor
            .reads
            .map(|reads| format!("{} direct, {} by request, {} by FUSE", reads.direct, reads.library, reads.kernel));
        let passthrough = descriptor.passthrough.then(|| "passthrough".to_owned());
        let reads: Vec<String> = counted.into_iter().chain(passthrough).collect();
        let reads = if reads.is_empty() { "-".to_owned() } else { reads.join(", ") };
        let because = match descriptor.not_direct {
            Some(cause) => format!("{because}; not without a request: {}", cause.text()),
            None => because.clone(),
        };
        let writes = descriptor.writes.as_ref().map_or_else(|| "-".to_owned(), Writes::text);
        rows.add_row([&descriptor.fd.to_string(), &way.to_string(), &because, &reads, &writes, &descriptor.file]);
    }
    if !descriptors.is_empty() {
        rows.to_string().lines().for_each(|line| text += &format!("{}\n", line.trim_end()));
    }
    if descriptors.iter().any(|descriptor| descriptor.verdict.way == Way::Library) {
        text += "the start of a program goes by FUSE, and so do mappings, but for private ones of files of a lower branch\n";
    }
    let is_posted =
        |descriptor: &DescriptorAnswer| descriptor.writes.as_ref().is_some_and(|writes| writes.way == WriteWay::Posted);
    if descriptors.iter().any(is_posted) {
        text += "of what may be posted the library has some wait all the same; only the program's report says which (POOLFS_REPORT, unposted)\n";
    }
    text
}
