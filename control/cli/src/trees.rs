//! The commands `diff`, `commit` and `flatten`: list what differs in a union from its lower branches, make a layer of it, complete files.

use crate::container::with_ended_root;
use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::image_store::{self, with_store};
use crate::images::{self, Bar};
use crate::mount::instance_at;
use crate::record::{InstanceRecord, PoolRecord};
use crate::service;
use crate::signals::Signals;
use crate::text::{complain, count, plain, print, print_json, size};
use crate::waiting;
use poolfs_image::{ImageRecord, ImageStore, Limits};
use poolfs_service_protocol::{Answer, Command, Difference, DifferenceKind, MountSpec, StackSpec};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Calls `act` with the union that a container has, or had, as its root, or that is mounted at a place.
fn with_union<T>(
    context: &Context,
    pool: &str,
    place: &str,
    mut act: impl FnMut(&MountSpec) -> Result<T>,
) -> Result<T> {
    let pools = context.pools()?;
    let record: PoolRecord = pools.peek(pool)?.ok_or_else(|| pools.absent(pool))?;
    let of_container = |instance: &&InstanceRecord| instance.container.as_deref() == Some(place);
    if let Some(instance) = record.instances.iter().find(of_container) {
        return act(&instance.spec);
    }
    if let Some(done) = with_ended_root(context, pool, place, &mut act)? {
        return Ok(done);
    }
    let found = instance_at(context, &record, Path::new(place)).map_err(|failure| match failure.code() {
        Code::NotFound if !place.contains('/') => {
            let cause = format!("pool {pool} has neither a container of that name nor a mount there");
            let remedy = format!("`poolfs ps` lists the containers, `poolfs pool inspect {pool}` what is mounted");
            Failure::not_found(place, cause, remedy)
        }
        _ => failure,
    })?;
    match &found.spec.stack {
        StackSpec::Union { .. } => act(&found.spec),
        StackSpec::Directory { .. } => {
            let remedy =
                "what is mounted with --upper and --lower, and the roots of containers, have branches that differ";
            Err(Failure::new(place, "it is one directory, and no union", remedy))
        }
    }
}

/// Have what programs have mapped and changed reach the service.
fn flush(context: &Context, pool: &str, mount_point: &Path) -> Result<()> {
    let path = mount_point.to_owned();
    let flush = move || Ok(rustix::fs::syncfs(File::open(path)?)?);
    let flushed: std::io::Result<()> = waiting::while_alive(context, pool, mount_point, flush)?;
    flushed.map_err(|error| Failure::file(mount_point, error))
}

/// The command `diff`.
pub fn diff(context: &Context, pool: &str, place: &str, blocks: bool) -> Result<()> {
    with_union(context, pool, place, |union| differences(context, pool, union, blocks))
}

fn differences(context: &Context, pool: &str, union: &MountSpec, blocks: bool) -> Result<()> {
    flush(context, pool, &union.mount_point)?;
    let command = Command::Differences { instance: union.instance.clone(), parts: blocks };
    // The parts of a file may come in several answers.
    let mut last: Option<Difference> = None;
    service::converse(context, pool, &command, |answer| {
        match answer {
            Answer::Difference(difference) => {
                if let Some(whole) = last.replace(difference) {
                    show(context, &whole)?;
                }
            }
            Answer::Parts { parts } => {
                let known = last.as_mut().and_then(|last| last.parts.as_mut());
                known.into_iter().for_each(|known| known.extend(&parts));
            }
            Answer::Done => return Ok(false),
            _ => return Err(service::unexpected(pool)),
        }
        Ok(true)
    })?;
    last.map_or(Ok(()), |last| show(context, &last))
}

fn show(context: &Context, difference: &Difference) -> Result<()> {
    if context.json {
        let line = serde_json::to_string(difference).map_err(|error| Failure::new("diff", error, ""))?;
        return print(&(line + "\n"));
    }
    let letter = match difference.kind {
        DifferenceKind::Added => 'A',
        DifferenceKind::Changed => 'C',
        DifferenceKind::Replaced => 'R',
        DifferenceKind::Removed => 'D',
    };
    let mut text = format!("{letter} {}\n", plain(&difference.path));
    for (offset, length) in difference.parts.iter().flatten() {
        text += &format!("    {offset} {length}\n");
    }
    print(&text)
}

/// The command `commit`.
pub fn commit(context: &Context, pool: &str, place: &str, name: &str) -> Result<()> {
    with_union(context, pool, place, |union| commit_union(context, pool, place, union, name))
}

fn commit_union(context: &Context, pool: &str, place: &str, union: &MountSpec, name: &str) -> Result<()> {
    let StackSpec::Union { lowers, .. } = &union.stack else { return Err(service::unexpected(pool)) };
    let mut bar = Bar::cancelled_by(Signals::catch()?);
    let local = context.images()?;
    let lowest_first: Vec<PathBuf> = lowers.iter().rev().cloned().collect();
    let source = format!("commit:{pool}:{place}");
    let Some(at) = image_store::of_union(&local, union)? else {
        return commit_to(context, pool, union, (&local, name, &source), &lowest_first, &mut bar, Ok);
    };
    // A layer is where those below it are.
    images::refuse_known(&local, name)?;
    let holder = images::holder(context, &local)?;
    with_store(context, &at, |store| {
        let there = |lower: &PathBuf| lower.strip_prefix(&at.directory).map(|layer| store.path().join(layer));
        let lowest_first = lowest_first.iter().filter_map(|lower| there(lower).ok()).collect::<Vec<_>>();
        images::refuse_known_at(store, name, &at)?;
        store.hold_new(name, &holder)?;
        let adopt = |image| Ok(local.adopt(image, at.clone())?);
        let made = commit_to(context, pool, union, (store, name, &source), &lowest_first, &mut bar, adopt);
        // The first error is the one to report.
        made.inspect_err(|_| drop(store.release(name, &holder.id)))
    })
}

/// Make an image of a union in a store, of which `known` makes what is told. The lower branches are directories here, lowest first.
fn commit_to(
    context: &Context,
    pool: &str,
    union: &MountSpec,
    (store, name, source): (&ImageStore, &str, &str),
    lowest_first: &[PathBuf],
    bar: &mut Bar,
    known: impl FnOnce(ImageRecord) -> Result<ImageRecord>,
) -> Result<()> {
    let of_image = |error| Failure::from(error).about(format!("image {name}"));
    let staged = store.stage(name).map_err(of_image)?;
    let base = store.base(lowest_first)?;
    flush(context, pool, &union.mount_point)?;
    let command = Command::Commit { instance: union.instance.clone(), archive: staged.archive() };
    let mut committed = None;
    service::converse(context, pool, &command, |answer| match answer {
        Answer::Committed(done) => {
            committed = Some(done);
            Ok(false)
        }
        _ => Err(service::unexpected(pool)),
    })?;
    let committed = committed.ok_or_else(|| service::unexpected(pool))?;
    let stands_alone = base.is_none();
    let image = staged.finish(base.unwrap_or_default(), source, &Limits::default(), bar).map_err(of_image)?;
    let image = known(image)?;
    if stands_alone {
        complain(
            "poolfs: note: the lower branches are no layers of an image, so the image has only what differs from them",
        );
    }
    if context.json {
        return print_json(&image);
    }
    let layers = count(image.layers.len() as u64, "layer");
    print(&format!(
        "{name}: {} in a new layer of {}, {layers}\n",
        size(committed.bytes),
        count(committed.members, "member")
    ))
}

/// The command `flatten`.
pub fn flatten(context: &Context, pool: &str, place: &str) -> Result<()> {
    with_union(context, pool, place, |union| flatten_union(context, pool, place, union))
}

fn flatten_union(context: &Context, pool: &str, place: &str, union: &MountSpec) -> Result<()> {
    let command = Command::Flatten { instance: union.instance.clone() };
    let mut flattened = None;
    service::converse(context, pool, &command, |answer| match answer {
        Answer::Flattened(done) => {
            flattened = Some(done);
            Ok(false)
        }
        _ => Err(service::unexpected(pool)),
    })?;
    let done = flattened.ok_or_else(|| service::unexpected(pool))?;
    if context.json {
        print_json(&done)?;
    } else {
        print(&format!("{place}: {} completed, {} copied\n", count(done.files, "file"), size(done.bytes)))?;
    }
    for (path, cause) in &done.failures {
        complain(&format!("poolfs: {}: {cause}", plain(path)));
    }
    if done.failed == 0 {
        return Ok(());
    }
    let remedy = "correct what is named above for each, then try again; of files that `poolfs status --json` names as damaged the lower files \
                  have to be brought back, or they have to be removed";
    Err(Failure::new(place, format!("{} could not be completed", count(done.failed, "file")), remedy))
}
