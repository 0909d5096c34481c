//! Conflicts between uses of a directory, in all pools.
//!
//! Uses that would destroy each other's data are refused. A limit of an upper branch that a mount does not keep is reported.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::places::{self, Found, Relation, Whereabouts};
use crate::record::{InstanceRecord, PoolRecord};
use crate::service;
use crate::text::{complain, pasted, size};
use poolfs_service_protocol::{Branch, CephAccess, Coherence, Place, StackSpec};
use rustix::fs::XattrFlags;
use std::path::Path;

/// The attribute of an upper branch that holds the limit it was last mounted with, bytes in decimal digits.
const LIMIT_ATTRIBUTE: &str = "trusted.poolfs.limit";
/// Most digits of it.
const LIMIT_DIGITS_MAX: usize = 20;

/// What a directory is for in a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Mounted by itself.
    Alone,
    /// Mounted by itself, by several who know of each other.
    Shared,
    /// The upper branch of a union.
    Upper,
    /// A lower branch of unions.
    Lower,
}

impl Use {
    /// Whether services of two pools may use the same directory, or one inside the other, in these ways: each has a cache of its own.
    fn goes_with(self, other: Use) -> bool {
        matches!((self, other), (Use::Lower | Use::Shared, Use::Lower | Use::Shared))
    }

    fn described(self) -> &'static str {
        match self {
            Use::Alone | Use::Shared => "what is mounted",
            Use::Upper => "the upper branch of what is mounted",
            Use::Lower => "a lower branch of what is mounted",
        }
    }
}

fn uses(stack: &StackSpec) -> Vec<Used<'_>> {
    match stack {
        StackSpec::Directory { directory, coherence: Coherence::Exclusive, .. } => vec![(Use::Alone, directory)],
        StackSpec::Directory { directory, .. } => vec![(Use::Shared, directory)],
        StackSpec::Union { upper, lowers, .. } => {
            let lowers = lowers.iter().map(|lower| (Use::Lower, lower.as_path()));
            std::iter::once((Use::Upper, upper.as_path())).chain(lowers).collect()
        }
    }
}

/// A directory, and what it is for.
type Used<'a> = (Use, &'a Path);

/// Two directories of two mounts that exclude each other.
struct Conflict<'a> {
    wanted: Used<'a>,
    used: Use,
    relation: Relation,
}

/// How a wanted directory lies to one in use. One that was mounted by a release that noted nothing of it is known by its path only.
fn relation(wanted: (&Path, &Found), used: (&Path, Option<&Whereabouts>)) -> Option<Relation> {
    let ((path, found), (other, noted)) = (wanted, used);
    match noted {
        Some(noted) => found.relation(noted),
        None if path == other => Some(Relation::Same),
        None => (path.starts_with(other) || other.starts_with(path)).then_some(Relation::Nested),
    }
}

/// Whether one is a store of images, and the other a layer in it.
fn is_layer_of(store: Used<'_>, layer: Used<'_>) -> bool {
    store.0 == Use::Alone && layer.0 == Use::Lower && layer.1.parent().and_then(Path::parent) == Some(store.1)
}

/// The first two directories of two mounts that exclude each other. Within a pool the service keeps equal ones apart, but for two unions over one upper
/// branch; it has one cache, so lower branches may lie in each other, and nothing else.
fn conflict<'a>(
    (wanted, found): (&'a InstanceRecord, &[Found]),
    used: &InstanceRecord,
    is_own_pool: bool,
) -> Option<Conflict<'a>> {
    let are_store_and_layer = |one: Used<'_>, other: Used<'_>| {
        (wanted.is_store && is_layer_of(one, other)) || (used.is_store && is_layer_of(other, one))
    };
    let excludes = |wanted: Use, used: Use, relation| match (is_own_pool, relation) {
        (false, _) => !wanted.goes_with(used),
        (true, Relation::Same) => (wanted, used) == (Use::Upper, Use::Upper),
        (true, Relation::Nested) => (wanted, used) != (Use::Lower, Use::Lower),
    };
    for (wanted, found) in uses(&wanted.spec.stack).into_iter().zip(found) {
        for (at, (other, path)) in uses(&used.spec.stack).into_iter().enumerate() {
            if are_store_and_layer(wanted, (other, path)) {
                continue;
            }
            let relation = relation((wanted.1, found), (path, used.places.get(at)));
            if let Some(relation) = relation.filter(|&relation| excludes(wanted.0, other, relation)) {
                return Some(Conflict { wanted, used: other, relation });
            }
        }
    }
    None
}

/// Refuse directories of one mount that are or contain one another, or that the pool itself serves.
pub fn refuse_overlaps(own: &PoolRecord, stack: &StackSpec, found: &[Found]) -> Result<()> {
    let paths: Vec<&Path> = uses(stack).into_iter().map(|(_, path)| path).collect();
    for (at, (path, one)) in paths.iter().zip(found).enumerate() {
        let by = own.instances.iter().find(|instance| Some(&instance.spec.instance) == one.served_by());
        if let Some(by) = by {
            let cause = "it is served by this pool itself";
            let remedy = match by.spec.stack {
                StackSpec::Directory { .. } => "name the directory behind it",
                // What it shows is in no directory.
                StackSpec::Union { .. } => "use it where it is; a bind mount shows a part of a union at another place",
            };
            return Err(Failure::usage(path.display().to_string(), cause, remedy));
        }
        for (other, noted) in paths.iter().zip(found).skip(at + 1) {
            if one.relation(&noted.whereabouts()).is_some() {
                let cause = format!("it overlaps the branch {}", other.display());
                let remedy = "use directories apart from each other";
                return Err(Failure::usage(path.display().to_string(), cause, remedy));
            }
        }
    }
    Ok(())
}

/// Refuse to serve what another pool serves by way of its mount: each of both pools has a cache of its own, and what one writes the other does not see, and overwrites.
/// What is shared, or only read, is served all the same.
pub fn refuse_served(context: &Context, own: &PoolRecord, stack: &StackSpec, found: &[Found]) -> Result<()> {
    for ((wanted, path), one) in uses(stack).into_iter().zip(found) {
        let Some(instance) = one.served_by().filter(|_| matches!(wanted, Use::Alone | Use::Upper)) else {
            continue;
        };
        let by = match place_of(context, instance)? {
            Some((pool, _)) => format!("pool {}", pool.name),
            None => "a pool of another state directory".to_owned(),
        };
        let cause = format!(
            "it lies on a mount of {by} (instance {instance}): neither pool sees what the other writes, and each overwrites it"
        );
        let remedy = match wanted {
            Use::Upper => "use an --upper on a filesystem that no pool serves".to_owned(),
            _ => format!(
                "use the directory through that mount, or one that no pool serves; --shared in pool {} (in exec, shared=yes) allows it: then what one writes, \
                 the other may not see for long, or overwrite",
                own.name
            ),
        };
        return Err(Failure::in_use(path.display().to_string(), cause, remedy));
    }
    Ok(())
}

/// The pool that has an instance in its record, and that record.
fn place_of(context: &Context, instance: &str) -> Result<Option<(PoolRecord, InstanceRecord)>> {
    let pools: Vec<PoolRecord> = context.pools()?.peek_all()?;
    let known = pools.into_iter().find_map(|pool| {
        let known = pool.instances.iter().find(|known| known.spec.instance == instance).cloned();
        known.map(|known| (pool, known))
    });
    Ok(known)
}

/// Refuse what another mount excludes. The one that is to be made is in the record already: so of two that are made at once at least one sees the other.
pub fn refuse_conflicts(context: &Context, own: &PoolRecord, wanted: &InstanceRecord, found: &[Found]) -> Result<()> {
    let others: Vec<PoolRecord> = context.pools()?.peek_all()?;
    let pools = others.iter().filter(|pool| pool.name != own.name).chain([own]);
    for pool in pools.filter(|pool| pool.service_alive(&*context.host) == Some(true)) {
        for used in pool.instances.iter().filter(|used| used.spec.instance != wanted.spec.instance) {
            let is_own = pool.name == own.name;
            let Some(conflict) = conflict((wanted, found), used, is_own) else { continue };
            if !is_in_use(context, pool, used)? {
                continue;
            }
            let (name, place) = (&pool.name, used.spec.mount_point.display());
            let Conflict { wanted: (wanted, path), used, relation } = conflict;
            let is_same = if relation == Relation::Same { "it is" } else { "it contains, or lies in," };
            let cause = format!("{is_same} {} at {place} by pool {name}", used.described());
            let remedy = match (wanted, used) {
                (Use::Upper, Use::Upper) => "unmount that first, or use another --upper",
                (Use::Alone, Use::Lower) | (Use::Lower, Use::Alone) if !is_own => {
                    "unmount that first, or mount the directory with --shared if nobody writes there"
                }
                (Use::Alone | Use::Shared, Use::Alone | Use::Shared) if !is_own && !Place::of(path).is_directory() => {
                    "mount both in one pool, or both with --consistency close-to-open or strict"
                }
                (Use::Alone | Use::Shared, Use::Alone | Use::Shared) if !is_own => {
                    "mount both in one pool, or both with --shared: then what one writes, the other may not see for long, or \
                     overwrite"
                }
                _ => "unmount that first, or use another directory",
            };
            return Err(Failure::in_use(path.display().to_string(), cause, remedy));
        }
    }
    Ok(())
}

/// Refuse to check what is served, and an upper branch that lies in what is written now, or contains it. What is mounted and no
/// pool knows of, the check finds by a lock.
pub fn refuse_check(context: &Context, upper: &Path, ceph: Option<&CephAccess>) -> Result<()> {
    let (found, _) = places::find(context, vec![Branch { name: upper, read_only: true }], ceph)?;
    if let Some(instance) = found.first().and_then(Found::served_by) {
        return Err(served_check(context, upper, instance)?);
    }
    let pools: Vec<PoolRecord> = context.pools()?.peek_all()?;
    for pool in pools.iter().filter(|pool| pool.service_alive(&*context.host) == Some(true)) {
        for used in &pool.instances {
            let written =
                uses(&used.spec.stack).into_iter().zip(&used.places).filter(|((way, _), _)| *way != Use::Lower);
            let mut relations = written.filter_map(|(_, noted)| found.iter().find_map(|found| found.relation(noted)));
            let Some(relation) = relations.next() else { continue };
            if is_in_use(context, pool, used)? {
                let (name, place) = (&pool.name, used.spec.mount_point.display());
                let cause = match relation {
                    Relation::Same => format!("pool {name} has it mounted at {place}"),
                    Relation::Nested => {
                        format!("it contains, or lies in, what is written by way of {place} by pool {name}")
                    }
                };
                let remedy =
                    format!("unmount that first with `poolfs umount {name} {}`", pasted(&used.spec.mount_point));
                return Err(Failure::in_use(upper.display().to_string(), cause, remedy));
            }
        }
    }
    Ok(())
}

/// The failure that what is to be checked is a mount, or lies on one.
fn served_check(context: &Context, path: &Path, instance: &str) -> Result<Failure> {
    let known = place_of(context, instance)?;
    let (cause, remedy) = match &known {
        Some((pool, known)) => {
            let place = &known.spec.mount_point;
            let what = if path == place { "it is the mount" } else { "it lies on the mount" };
            let remedy = match &known.spec.stack {
                StackSpec::Union { upper, .. } => format!(
                    "unmount it with `poolfs umount {} {}`, and check its upper branch with `poolfs fsck {}`",
                    pool.name,
                    pasted(place),
                    pasted(upper)
                ),
                _ => "it is a directory, and no union: check an upper branch".to_owned(),
            };
            (format!("{what} of the instance {instance} of pool {}, and no branch", pool.name), remedy)
        }
        None => (
            format!(
                "it is a mount of the instance {instance} of a pool of another state directory, or lies on it, and is no branch"
            ),
            "check the upper branch of that, after it is unmounted".to_owned(),
        ),
    };
    Ok(Failure::usage(path.display().to_string(), cause, remedy))
}

/// Whether an instance in the record of a pool is about to be mounted, or the service has it, as that says itself: a command that was killed may not
/// have taken note of an unmount, nor does `umount(8)`.
fn is_in_use(context: &Context, pool: &PoolRecord, instance: &InstanceRecord) -> Result<bool> {
    let is_served = |served: Vec<String>| served.contains(&instance.spec.instance);
    Ok(instance.is_being_mounted(&*context.host) || service::instances(context, &pool.name).map(is_served)?)
}

/// After a mount: note the limit of its upper branch there, and say so if it had one that is not kept.
pub fn note_limit(stack: &StackSpec, found: &[Found]) {
    let found = found.first().and_then(Found::on_host);
    let (StackSpec::Union { upper, storage, .. }, Some(found)) = (stack, found) else { return };
    let place = found.place().path_of_descriptor();
    let before = noted_limit(&place);
    // Where there are no attributes, nothing can be told later.
    let _ = match storage.size_bytes {
        Some(bytes) => rustix::fs::setxattr(&place, LIMIT_ATTRIBUTE, bytes.to_string().as_bytes(), XattrFlags::empty()),
        None if before.is_some() => rustix::fs::removexattr(&place, LIMIT_ATTRIBUTE),
        None => Ok(()),
    };
    if let (Some(bytes), None) = (before, storage.size_bytes) {
        complain(&format!(
            "poolfs: {} had a limit of {} when it was mounted last, and has none now: --upper-size {bytes} keeps it",
            upper.display(),
            size(bytes)
        ));
    }
}

fn noted_limit(upper: &Path) -> Option<u64> {
    let mut digits = [0; LIMIT_DIGITS_MAX];
    let length = rustix::fs::getxattr(upper, LIMIT_ATTRIBUTE, &mut digits).ok()?;
    std::str::from_utf8(digits.get(..length)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::ProcessRecord;
    use crate::unmount::has_suspects;
    use poolfs_host::LinuxHost;
    use poolfs_service_protocol::MountSpec;

    #[test]
    fn what_would_overwrite_each_other_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().canonicalize().expect("a path");
        let mut context = Context::for_test(&root, poolfs_host::RecordingHost::new());
        context.host = Box::new(LinuxHost);
        for name in ["a/b", "ab", "l/x", "u/v", "m", "v", "s/layers/x"] {
            std::fs::create_dir_all(root.join(name)).expect("folders");
        }
        let alone = |path: &str| StackSpec::directory(root.join(path));
        let shared = |path: &str| StackSpec::Directory {
            directory: root.join(path),
            coherence: Coherence::Uncoordinated,
            size_bytes: None,
        };
        let union = |upper: &str, lower: &str| StackSpec::union(root.join(upper), vec![root.join(lower)]);
        let instance = |stack: &StackSpec, places, is_store| {
            let spec = MountSpec::new("x-1", "/mnt", stack.clone());
            InstanceRecord { spec, owner: None, container: None, mounter: None, places, device: None, is_store }
        };
        let exclude_one = |wanted: (&StackSpec, bool), used: (&StackSpec, bool), is_own_pool, is_noted: bool| {
            let find = |stack: &StackSpec| places::find(&context, stack.branches(), None).expect("there").0;
            let (found, others) = (find(wanted.0), find(used.0));
            let places = others.into_iter().map(|found| found.whereabouts()).filter(|_| is_noted).collect();
            let (wanted, used) = (instance(wanted.0, Vec::new(), wanted.1), instance(used.0, places, used.1));
            conflict((&wanted, &found), &used, is_own_pool).is_some()
        };
        let exclude = |wanted: &StackSpec, used: &StackSpec, is_own_pool, is_noted| {
            exclude_one((wanted, false), (used, false), is_own_pool, is_noted)
        };
        for (one, other) in [
            (alone("a"), alone("a")),
            (alone("a"), alone("a/b")),
            (alone("a"), shared("a")),
            (alone("u"), union("u", "l")),
            (alone("l/x"), union("u", "l")),
            (shared("u"), union("u", "l")),
            (union("u", "l"), union("u", "m")),
            (union("u", "l"), union("u/v", "m")),
            (union("u", "l"), union("m", "u")),
        ] {
            for is_noted in [true, false] {
                assert!(exclude(&one, &other, false, is_noted), "{one:?} {other:?}");
                assert!(exclude(&other, &one, false, is_noted), "{other:?} {one:?}");
            }
        }
        for (one, other) in [
            (alone("a"), alone("ab")),
            (shared("a"), shared("a")),
            (shared("l"), union("u", "l")),
            (union("u", "l"), union("v", "l")),
        ] {
            for is_noted in [true, false] {
                assert!(!exclude(&one, &other, false, is_noted), "{one:?} {other:?}");
                assert!(!exclude(&other, &one, false, is_noted), "{other:?} {one:?}");
            }
        }
        // A store of images that is changed, and the layers in it.
        for (one, other, are_exclusive) in [
            (alone("s"), union("u", "s/layers/x"), false),
            (alone("s"), union("u", "s/layers"), true),
            (alone("s"), union("s/layers/x", "l"), true),
            (alone("s/layers/x"), union("u", "s"), true),
            (alone("s"), alone("s/layers/x"), true),
        ] {
            for is_noted in [true, false] {
                assert_eq!(exclude_one((&one, true), (&other, false), false, is_noted), are_exclusive, "{other:?}");
                assert_eq!(exclude_one((&other, false), (&one, true), false, is_noted), are_exclusive, "{other:?}");
                assert!(exclude(&one, &other, false, is_noted) && exclude(&other, &one, false, is_noted), "{other:?}");
            }
        }
        // In one pool.
        for (one, other, is_conflict) in [
            (alone("a"), alone("a"), false),
            (alone("a"), alone("a/b"), true),
            (union("u", "l"), union("v", "l/x"), false),
            (union("u", "l"), union("m", "u"), false),
            (union("u/v", "l"), union("v", "u"), true),
            (union("u", "l"), union("u", "m"), true),
        ] {
            assert_eq!(exclude(&one, &other, true, true), is_conflict, "{one:?} {other:?}");
            assert_eq!(exclude(&other, &one, true, true), is_conflict, "{other:?} {one:?}");
        }
    }

    #[test]
    fn what_a_living_command_mounts_is_in_use_whatever_the_service_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let host = poolfs_host::RecordingHost::new();
        host.set_process(42, 777);
        host.set_process(43, 778);
        let host = std::sync::Arc::new(host);
        let mut context = Context::for_test(folder.path(), poolfs_host::RecordingHost::new());
        context.host = Box::new(std::sync::Arc::clone(&host));
        let stack = StackSpec::directory("/data");
        let spec = MountSpec::new("web-1", "/mnt", stack);
        let mounter = ProcessRecord::of(&*context.host, 42);
        let known = InstanceRecord {
            spec,
            owner: None,
            container: None,
            mounter,
            places: Vec::new(),
            device: None,
            is_store: false,
        };
        let service = ProcessRecord::of(&*context.host, 43);
        let pool = PoolRecord { instances: vec![known.clone()], next_instance: 2, ..PoolRecord::for_test(service) };
        // It is in no mount table, and no service listens.
        assert!(is_in_use(&context, &pool, &known).expect("nobody is asked"));
        assert!(!has_suspects(&*context.host, &[], &pool));
        host.set_process(42, 900);
        assert!(is_in_use(&context, &pool, &known).is_err(), "the service would know");
        assert!(has_suspects(&*context.host, &[], &pool));
    }
}
