//! The commands on the differences between a union and its lower branches.

use super::{answer, failed, has_hung_up};
use crate::failures::{code_of, text_of};
use crate::instance::Instance;
use crate::layer_archive;
use crate::outside::{Deed, outside};
use crate::service::Service;
use poolfs_libservice::types::{Attributes, FileType, NodeId};
use poolfs_libservice::{Difference, Layered, Relation};
use poolfs_service_protocol::{Answer, Difference as Told, DifferenceKind, FailureCode, Flattened};
use std::cell::{Cell, RefCell};
use std::fs::OpenOptions;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Parts of a file told of at once.
const PARTS: usize = 1000;

/// How often it is looked whether whoever asked still listens.
const LOOK: Duration = Duration::from_millis(100);

/// What keeps a union from being read or written to the end.
fn broken(stream: &UnixStream, error: &poolfs_libservice::Error) -> io::Result<()> {
    failed(stream, code_of(error), text_of(error))
}

/// Has `work` done on the union of an instance, which is told by its second argument whether to go on: not when the instance is to end, or whoever
/// asked has hung up.
fn on_union(
    stream: &UnixStream,
    service: &Service,
    instance: &str,
    work: impl FnOnce(&Arc<dyn Layered>, &dyn Fn() -> bool) -> io::Result<()>,
) -> io::Result<()> {
    let Some(instance) = service.instance(instance) else {
        return failed(stream, FailureCode::NotFound, format!("there is no instance {instance}"));
    };
    let instance: &Instance = &instance;
    let Some(union) = instance.stack.layered() else {
        return failed(stream, FailureCode::Usage, format!("{} is no union", instance.name()));
    };
    let Some(job) = instance.jobs().begin() else {
        return failed(stream, FailureCode::InUse, format!("{} is being unmounted", instance.name()));
    };
    let (looked, gone) = (Cell::new(Instant::now()), Cell::new(false));
    let goes_on = || {
        if looked.get().elapsed() >= LOOK {
            gone.set(has_hung_up(stream).unwrap_or(true));
            looked.set(Instant::now());
        }
        !gone.get() && job.goes_on()
    };
    instance.without_posts(|| work(&union, &goes_on)).unwrap_or_else(|| {
        let cause = "what programs have written last is still on its way to a branch that does not answer";
        failed(stream, FailureCode::File, format!("{}: {cause}; see to that branch, and try again", instance.name()))
    })
}

/// Tells of all differences.
pub(super) fn differences(stream: &UnixStream, service: &Service, instance: &str, parts: bool) -> io::Result<()> {
    on_union(stream, service, instance, |union, goes_on| {
        let unheard = RefCell::new(Ok(()));
        let listed = union.differences(&mut |path, difference| {
            if !goes_on() {
                return Ok(ControlFlow::Break(()));
            }
            if path.is_empty() && !union.root_differs()? {
                return Ok(ControlFlow::Continue(()));
            }
            match tell(stream, &**union, path, difference, parts) {
                Ok(result) => result.map(|()| ControlFlow::Continue(())),
                Err(error) => {
                    *unheard.borrow_mut() = Err(error);
                    Ok(ControlFlow::Break(()))
                }
            }
        });
        unheard.into_inner()?;
        match listed {
            Ok(()) if goes_on() => answer(stream, &Answer::Done),
            Ok(()) => failed(stream, FailureCode::Failed, "it was ended"),
            Err(error) => broken(stream, &error),
        }
    })
}

fn tell(
    stream: &UnixStream,
    union: &dyn Layered,
    path: &[u8],
    difference: Difference<'_>,
    parts: bool,
) -> io::Result<poolfs_libservice::Result<()>> {
    let (kind, object) = match difference {
        Difference::Removed => (DifferenceKind::Removed, None),
        Difference::Object { node, attributes, relation } => {
            let kind = match relation {
                Relation::Added => DifferenceKind::Added,
                Relation::Changed => DifferenceKind::Changed,
                Relation::Replaced => DifferenceKind::Replaced,
            };
            (kind, Some((node, attributes)))
        }
    };
    let file = object.filter(|(_, attributes)| attributes.file_type == FileType::Regular);
    let first = match file.filter(|_| parts) {
        Some((node, _)) => match some_parts(union, node, 0) {
            Ok(first) => Some(first),
            Err(error) => return Ok(Err(error)),
        },
        None => None,
    };
    let told = Told {
        path: format!("/{}", String::from_utf8_lossy(path)),
        path_bytes: std::str::from_utf8(path).is_err().then(|| path.iter().map(|byte| format!("{byte:02x}")).collect()),
        kind,
        file_type: object.map(|(_, attributes)| type_name(attributes).to_owned()),
        size: file.map(|(_, attributes)| attributes.size),
        parts: first.clone(),
    };
    answer(stream, &Answer::Difference(told))?;
    let (Some((node, _)), Some(mut last)) = (file, first) else { return Ok(Ok(())) };
    while last.len() == PARTS {
        let from = last.last().map_or(0, |(offset, length)| offset + length);
        last = match some_parts(union, node, from) {
            Ok(further) => further,
            Err(error) => return Ok(Err(error)),
        };
        answer(stream, &Answer::Parts { parts: last.clone() })?;
    }
    Ok(Ok(()))
}

fn some_parts(union: &dyn Layered, node: NodeId, from: u64) -> poolfs_libservice::Result<Vec<(u64, u64)>> {
    let parts = union.changed_parts(node, from, PARTS)?;
    Ok(parts.into_iter().map(|part| (part.start, part.end - part.start)).collect())
}

fn type_name(attributes: &Attributes) -> &'static str {
    match attributes.file_type {
        FileType::Regular => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::CharDevice => "character-device",
        FileType::BlockDevice => "block-device",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
    }
}

/// Writes the archive of a layer.
pub(super) fn commit(stream: &UnixStream, service: &Service, instance: &str, archive: &Path) -> io::Result<()> {
    on_union(stream, service, instance, |union, goes_on| {
        let place = archive.to_owned();
        let open = move || OpenOptions::new().write(true).create_new(true).mode(0o600).open(place);
        let file = match outside(Deed::Archive, open).flatten() {
            Ok(file) => file,
            Err(error) => {
                return failed(stream, FailureCode::File, format!("{} cannot be made: {error}", archive.display()));
            }
        };
        match layer_archive::write(union, file, service.room_of_job(), goes_on) {
            Ok(done) => answer(stream, &Answer::Committed(done)),
            Err(error) => failed(stream, error.code(), error.to_string()),
        }
    })
}

/// Completes all sketches.
pub(super) fn flatten(stream: &UnixStream, service: &Service, instance: &str) -> io::Result<()> {
    on_union(stream, service, instance, |union, goes_on| match union.flatten(goes_on) {
        Ok(_) if !goes_on() => {
            failed(stream, FailureCode::Failed, "it was ended, and what was completed by then stays so")
        }
        Ok(done) => {
            let failure = |(path, cause): (Vec<u8>, String)| (format!("/{}", String::from_utf8_lossy(&path)), cause);
            let failures = done.failures.into_iter().map(failure).collect();
            let (files, bytes, failed) = (done.files, done.bytes, done.failed);
            answer(stream, &Answer::Flattened(Flattened { files, bytes, failed, failures }))
        }
        Err(error) => broken(stream, &error),
    })
}
