//! What directories are used for, in all pools: uses that would destroy each other's data are refused, and limits that are not kept are
//! told of.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::record::PoolRecord;
use crate::service;
use crate::text::{complain, size};
use poolfs_service_protocol::StackSpec;
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
        match (self, other) {
            (Use::Lower | Use::Shared, Use::Lower | Use::Shared) => true,
            // Equal ones the services themselves keep apart, where it matters.
            (Use::Upper, Use::Lower) | (Use::Lower, Use::Upper) => true,
            _ => false,
        }
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
        StackSpec::Directory { directory } => vec![(Use::Alone, directory)],
        StackSpec::SharedDirectory { directory } => vec![(Use::Shared, directory)],
        StackSpec::Union { upper, lowers, .. } => {
            let lowers = lowers.iter().map(|lower| (Use::Lower, lower.as_path()));
            std::iter::once((Use::Upper, upper.as_path())).chain(lowers).collect()
        }
    }
}

/// A directory, and what it is for.
type Used<'a> = (Use, &'a Path);

/// The first two directories of two mounts in pools of their own that exclude each other.
fn conflict<'a>(wanted: &'a StackSpec, used: &'a StackSpec) -> Option<(Used<'a>, Used<'a>)> {
    let all = uses(used);
    let pairs = uses(wanted).into_iter().flat_map(|wanted| all.iter().map(move |used| (wanted, *used)));
    pairs.into_iter().find(|((wanted, path), (used, other))| {
        !wanted.goes_with(*used) && (path.starts_with(other) || other.starts_with(path))
    })
}

/// Refuse what another mount excludes. Within a pool the service decides, but for two unions over one upper branch.
pub fn refuse_conflicts(context: &Context, own: &PoolRecord, stack: &StackSpec) -> Result<()> {
    let others: Vec<PoolRecord> = context.pools()?.peek_all()?;
    let pools = others.iter().filter(|pool| pool.name != own.name).chain([own]);
    for pool in pools.filter(|pool| pool.service_alive(&*context.host) == Some(true)) {
        for instance in &pool.instances {
            let Some(((wanted, path), (used, other))) = conflict(stack, &instance.spec.stack) else { continue };
            let is_between_uppers = wanted == Use::Upper && used == Use::Upper;
            if (pool.name == own.name && !is_between_uppers) || !is_served(context, pool, &instance.spec.instance)? {
                continue;
            }
            let (name, place) = (&pool.name, instance.spec.mount_point.display());
            let is_same = if path == other { "it is" } else { "it contains, or lies in," };
            let cause = format!("{is_same} {} at {place} by pool {name}", used.described());
            let remedy = match (wanted, used) {
                (Use::Upper, Use::Upper) => "unmount that first, or use another --upper",
                (Use::Alone, Use::Lower) | (Use::Lower, Use::Alone) => {
                    "unmount that first, or mount the directory with --shared if nobody writes there"
                }
                (Use::Alone | Use::Shared, Use::Alone | Use::Shared) => {
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

/// Whether the service of a pool has an instance, as it says itself: a command that was killed may not have taken note of an unmount,
/// nor does `umount(8)`.
fn is_served(context: &Context, pool: &PoolRecord, instance: &str) -> Result<bool> {
    Ok(service::instances(context, &pool.name)?.iter().any(|served| served == instance))
}

/// After a mount: note the limit of its upper branch there, and say so if it had one that is not kept.
pub fn note_limit(stack: &StackSpec) {
    let StackSpec::Union { upper, storage, .. } = stack else { return };
    let before = noted_limit(upper);
    // Where there are no attributes, nothing can be told later.
    let _ = match storage.size_bytes {
        Some(bytes) => rustix::fs::setxattr(upper, LIMIT_ATTRIBUTE, bytes.to_string().as_bytes(), XattrFlags::empty()),
        None if before.is_some() => rustix::fs::removexattr(upper, LIMIT_ATTRIBUTE),
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

    #[test]
    fn what_would_overwrite_each_other_is_found() {
        let alone = |path: &str| StackSpec::Directory { directory: path.into() };
        let shared = |path: &str| StackSpec::SharedDirectory { directory: path.into() };
        let union = |upper: &str, lower: &str| StackSpec::union(upper, vec![lower.into()]);
        for (one, other) in [
            (alone("/a"), alone("/a")),
            (alone("/a"), alone("/a/b")),
            (alone("/a"), shared("/a")),
            (alone("/u"), union("/u", "/l")),
            (alone("/l/x"), union("/u", "/l")),
            (shared("/u"), union("/u", "/l")),
            (union("/u", "/l"), union("/u", "/m")),
            (union("/u", "/l"), union("/u/v", "/m")),
        ] {
            assert!(conflict(&one, &other).is_some(), "{one:?} {other:?}");
            assert!(conflict(&other, &one).is_some(), "{other:?} {one:?}");
        }
        for (one, other) in [
            (alone("/a"), alone("/ab")),
            (shared("/a"), shared("/a")),
            (shared("/l"), union("/u", "/l")),
            (union("/u", "/l"), union("/v", "/l")),
        ] {
            assert!(conflict(&one, &other).is_none(), "{one:?} {other:?}");
            assert!(conflict(&other, &one).is_none(), "{other:?} {one:?}");
        }
    }
}
