//! Empties the kernel's caches before memory is measured.

use crate::groups::{self, Memory};
use crate::targets::drop_caches;
use anyhow::Result;
use std::time::Duration;

/// How often caches are emptied at most, the pause in between, and how many bytes of difference make it worth while.
const EMPTYINGS: u32 = 20;
const EMPTYING_PAUSE: Duration = Duration::from_millis(100);
const EMPTYING_LEAST: u64 = 1 << 20;

/// What the groups use when the kernel's caches are empty: pages of what was unmounted just now take a moment to go.
pub fn emptied(pool: &str) -> Result<Memory> {
    drop_caches()?;
    let mut least = groups::used(pool)?;
    for _ in 0..EMPTYINGS {
        std::thread::sleep(EMPTYING_PAUSE);
        drop_caches()?;
        let used = groups::used(pool)?;
        if used.all + EMPTYING_LEAST >= least.all {
            break;
        }
        least = used;
    }
    Ok(least)
}
