//! Upper branches used in a way other than when they were written: what is refused, and what is reported.

use super::branches::Branch;
use super::crash_state::Carried;
use super::{Incomplete, Stack, StackError, with_causes};
use poolfs_union::Union;

/// Most branches that are named.
const NAMED_MAX: usize = 8;

/// Refuses to show an upper branch as it is: that would be zeros, and names that were removed; what is written there would not be in the union.
pub(super) fn refuse_alone(branch: &Branch) -> Result<(), StackError> {
    let cause = match poolfs_union::was_upper(&branch.layer()) {
        Ok(false) => return Ok(()),
        Ok(true) => "it is the upper branch of a union, and only the union shows what is in it".to_owned(),
        Err(error) => with_causes(&error),
    };
    Err(StackError::Upper { path: branch.path.clone(), cause })
}

impl Incomplete {
    /// Nothing where the union has all that the branch says it needs.
    pub(super) fn of(branch: &Branch, union: &Union) -> Option<Self> {
        let missing = union.missing_layers().to_vec();
        (!missing.is_empty()).then(|| Self { branch: branch.path.clone(), missing })
    }
}

impl Stack {
    /// Files that still wait, since a service died, to be brought to disk.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Carried> {
        self.branches
            .iter()
            .filter_map(|branch| branch.cache.as_ref().map(|cache| (cache, &branch.kept.carried)))
            .flat_map(|(cache, carried)| carried.iter().filter(|file| cache.is_behind(file.node)))
    }

    /// What whoever mounts it should know of it.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let Some((upper, lowers)) = self.branches.split_first() else { return Vec::new() };
        let named = |paths: Vec<String>| {
            let more = paths.len().saturating_sub(NAMED_MAX);
            let some = paths[..paths.len() - more].join(", ");
            if more > 0 { format!("{some} and {more} more") } else { some }
        };
        let note = |incomplete: &Incomplete| {
            let given = lowers.iter().map(|lower| lower.path.display().to_string()).collect();
            format!(
                "files of the {} branch {} have, or once had, some of their bytes in {}, which is not among the lower branches {}: those that still have answer EIO. Lower \
                 branches are known by their paths; unmount it, and mount it with --lower naming each at the path that it had",
                if incomplete.branch == upper.path { "upper" } else { "lower" },
                incomplete.branch.display(),
                named(incomplete.missing.clone()),
                named(given),
            )
        };
        let waits = |file: &Carried| {
            format!(
                "what was accepted for the file {} before the last service died cannot be brought to disk ({}): it waits in memory, and the branch {} cannot be \
                 unmounted in order before it is on disk or the file is removed",
                file.path,
                file.cause,
                upper.path.display(),
            )
        };
        let incomplete = self.incomplete.iter().take(NAMED_MAX).map(note);
        incomplete.chain(self.waiting().take(NAMED_MAX).map(waits)).collect()
    }
}
