//! What is refused, or said, of upper branches that are used otherwise than when they were written.

use super::branches::Branch;
use super::{Stack, StackError, with_causes};

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

impl Stack {
    /// What whoever mounts it should know of it.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let (Some(union), Some((upper, lowers))) = (&self.union, self.branches.split_first()) else {
            return Vec::new();
        };
        let missing = union.0.missing_layers();
        if missing.is_empty() {
            return Vec::new();
        }
        let named = |paths: Vec<String>| {
            let more = paths.len().saturating_sub(NAMED_MAX);
            let some = paths[..paths.len() - more].join(", ");
            if more > 0 { format!("{some} and {more} more") } else { some }
        };
        let given = lowers.iter().map(|lower| lower.path.display().to_string()).collect();
        vec![format!(
            "files of the upper branch {} have, or once had, some of their bytes in {}, which is not among the lower branches {}: those that still have answer EIO. Lower \
             branches are known by their paths; unmount it, and mount it with --lower naming each at the path that it had",
            upper.path.display(),
            named(missing.to_vec()),
            named(given),
        )]
    }
}
