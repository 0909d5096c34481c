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
    Err(StackError::Upper { path: branch.path().to_owned(), cause })
}

impl Incomplete {
    /// Nothing where the union has all that the branch says it needs.
    pub(super) fn of(branch: &Branch, union: &Union) -> Option<Self> {
        let missing = union.missing_layers().to_vec();
        (!missing.is_empty()).then(|| Self { branch: branch.path().to_owned(), missing })
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
        let is_given = |id: &&String| lowers.iter().any(|lower| lower.path().to_str() == Some(id));
        // The branches below one that was an upper branch are those that are listed after it.
        let order = |incomplete: &Incomplete| {
            let (branch, given) = (incomplete.branch.display(), incomplete.missing.iter().filter(is_given));
            let given: Vec<String> = given.cloned().collect();
            (incomplete.branch != upper.path() && !given.is_empty()).then(|| {
                format!(
                    "files of the lower branch {branch} have, or once had, some of their bytes in {}, which --lower lists before it: those that still have answer EIO. A \
                     branch is listed before the branches that it was written over; unmount it, and mount it with --lower naming {branch} first",
                    named(given),
                )
            })
        };
        let absent = |incomplete: &Incomplete| {
            let given = lowers.iter().map(|lower| lower.path().display().to_string()).collect();
            let missing: Vec<String> = incomplete.missing.iter().filter(|id| !is_given(id)).cloned().collect();
            let is_upper = incomplete.branch == upper.path();
            (!missing.is_empty()).then(|| format!(
                "files of the {} branch {} have, or once had, some of their bytes in {}, which is not among the lower branches {}: those that still have answer EIO. Lower \
                 branches are known by their paths; unmount it, and mount it with --lower naming each at the path that it had",
                if is_upper { "upper" } else { "lower" },
                incomplete.branch.display(),
                named(missing),
                named(given),
            ))
        };
        let waits = |file: &Carried| {
            format!(
                "what was accepted for the file {} before the last service died cannot be brought to disk ({}): it waits in memory, and the branch {} cannot be \
                 unmounted in order before it is on disk or the file is removed",
                file.path,
                file.cause,
                upper.path().display(),
            )
        };
        let incomplete =
            self.incomplete.iter().take(NAMED_MAX).flat_map(|one| absent(one).into_iter().chain(order(one)));
        incomplete.chain(self.waiting().take(NAMED_MAX).map(waits)).collect()
    }
}
