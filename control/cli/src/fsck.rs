//! The command `fsck`: checks an upper branch that is mounted nowhere. The service's program does the check, in a process of its own.

use crate::branches;
use crate::ceph::CephArguments;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::inherited::with_used_variables;
use crate::mount::{branch, file_to_read};
use crate::text::{complain, count, plain, print};
use poolfs_service_protocol::{
    CHECK_LINE_BYTES_MAX, CheckFinding, CheckLine, CheckOutcome, CheckSpec, CheckSummary, FailureCode, StackSpec,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Exit statuses, those of fsck(8).
const CLEAN: u8 = 0;
const REPAIRED: u8 = 1;
const LEFT: u8 = 4;
pub const NOT_CHECKED: u8 = 8;

/// The problem whose presence makes a mount repair what can be repaired.
const UNCLEAN_END: &str = "unclean-end";

/// The command `fsck`.
pub fn fsck(context: &Context, upper: &Path, lowers: &[PathBuf], repair: bool, ceph: &CephArguments) -> Result<u8> {
    check(context, upper, lowers, repair, ceph).map_err(|failure| failure.with_status(NOT_CHECKED))
}

fn check(context: &Context, upper: &Path, lowers: &[PathBuf], repair: bool, ceph: &CephArguments) -> Result<u8> {
    let lowers = lowers.iter().map(|lower| branch(context, lower)).collect::<Result<Vec<_>>>()?;
    let found = branch(context, upper)?;
    let ceph = ceph.access(&[&StackSpec::union(&found, lowers.clone())], |path| file_to_read(context, path))?;
    branches::refuse_check(context, &found, ceph.as_ref())?;
    let spec = CheckSpec { upper: found, lowers, repair, socket_directory: context.run.clone(), ceph };
    let failed = |cause: &dyn std::fmt::Display| Failure::new(upper.display().to_string(), cause, "");
    let mut child = with_used_variables(&mut Command::new(context.service_program()?))
        .arg("check")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(if context.json { Stdio::piped() } else { Stdio::inherit() })
        .spawn()
        .map_err(|error| failed(&error))?;
    let job = serde_json::to_vec(&spec).map_err(|error| failed(&error))?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&job).map_err(|error| failed(&error))?;
    }
    // What it logs is not for programs as it is.
    let log = child.stderr.take().map(|errors| std::thread::spawn(move || pass_on(errors)));
    let mut output = BufReader::new(child.stdout.take().ok_or_else(|| failed(&"it has no output"))?);
    let (mut summary, mut is_unclean) = (None, false);
    loop {
        let mut line = Vec::new();
        let count = (&mut output).take(CHECK_LINE_BYTES_MAX).read_until(b'\n', &mut line);
        if count.map_err(|error| failed(&error))? == 0 {
            break;
        }
        match serde_json::from_slice(&line).map_err(|error| failed(&error))? {
            CheckLine::Finding(finding) => {
                is_unclean |= finding.problem == UNCLEAN_END;
                show(context, &finding)?;
            }
            CheckLine::Summary(done) => summary = Some(done),
            CheckLine::Failed { code, message } => {
                let (message, told) = message.rsplit_once("; ").unwrap_or((&message, ""));
                let remedy = match code {
                    _ if !told.is_empty() => told,
                    FailureCode::InUse => "unmount it first: a branch that is mounted cannot be checked",
                    FailureCode::NoSpace => "make room on its disk for what is repaired",
                    _ => "correct that, and check again",
                };
                return Err(Failure::new(upper.display().to_string(), message, remedy).with_code(code.into()));
            }
        }
    }
    let status = child.wait().map_err(|error| failed(&error))?;
    // All of it before what this says itself.
    let _ = log.map(std::thread::JoinHandle::join);
    let Some(summary) = summary.filter(|_| status.success()) else {
        return Err(failed(&format!("the check did not come to its end ({status})")));
    };
    conclude(context, upper, &summary, is_unclean)?;
    Ok(match summary {
        CheckSummary { damaged: 0, repairable: 0, repaired: 0, .. } => CLEAN,
        CheckSummary { damaged: 0, repairable: 0, .. } => REPAIRED,
        _ => LEFT,
    })
}

/// Say what the check logs, line by line.
fn pass_on(errors: impl Read) {
    let mut errors = BufReader::new(errors);
    let mut line = Vec::new();
    while matches!((&mut errors).take(CHECK_LINE_BYTES_MAX).read_until(b'\n', &mut line), Ok(count) if count > 0) {
        complain(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
}

fn show(context: &Context, finding: &CheckFinding) -> Result<()> {
    if context.json {
        return print_line(finding);
    }
    let outcome = match finding.outcome {
        CheckOutcome::Damage => "damaged",
        CheckOutcome::Repairable => "repairable",
        CheckOutcome::Repaired => "repaired",
    };
    let path = if finding.path.is_empty() { "." } else { &finding.path };
    print(&format!("{outcome}: {}: {} ({})\n", plain(path), plain(&finding.cause), finding.problem))
}

fn conclude(context: &Context, upper: &Path, summary: &CheckSummary, is_unclean: bool) -> Result<()> {
    if context.json {
        return print_line(summary);
    }
    let place = plain(&upper.display().to_string());
    if !summary.is_upper {
        return print(&format!("{place}: nothing of poolfs is here\n"));
    }
    let CheckSummary { objects, sketches, compact_files, damaged, repairable, repaired, untold, .. } = *summary;
    let looked_at = format!(
        "{}, {} with blocks in lower branches, {}",
        count(objects, "object"),
        count(sketches, "file"),
        count(compact_files, "compact file")
    );
    let found = match (damaged, repairable, repaired) {
        (0, 0, 0) => "clean".to_owned(),
        _ => format!("{damaged} damaged, {repairable} repairable, {repaired} repaired"),
    };
    let untold = if untold > 0 { format!("; {untold} of them not shown") } else { String::new() };
    print(&format!("{place}: {found}{untold} ({looked_at})\n"))?;
    if repairable > 0 {
        // A mount looks at nothing after a clean end.
        let next_mount = if is_unclean { ", and by the next mount" } else { "" };
        print(&format!("what is repairable is repaired by --repair{next_mount}\n"))?;
    }
    Ok(())
}

fn print_line(value: &impl serde::Serialize) -> Result<()> {
    let line = serde_json::to_string(value).map_err(|error| Failure::new("fsck", error, ""))?;
    print(&(line + "\n"))
}
