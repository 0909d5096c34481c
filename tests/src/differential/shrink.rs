//! Shrinking of a program that shows a difference.

use super::{Difference, World};

/// Most runs spent on it.
const RUNS_MAX: usize = 250;

/// A part of `program` on which the two sides still differ, and how; nothing when they do not when it is run again.
pub fn shortest(world: &mut World, program: &[String]) -> Option<(Vec<String>, Difference)> {
    let mut found = world.compare(program)?;
    let mut best = program[..=found.at].to_vec();
    let mut runs = 0;
    let mut part = best.len().div_ceil(2);
    while part > 0 {
        let mut shrunk = false;
        let mut start = 0;
        while start < best.len() && runs < RUNS_MAX {
            let mut without = best.clone();
            without.drain(start..(start + part).min(best.len()));
            runs += 1;
            match world.compare(&without) {
                Some(difference) => {
                    without.truncate(difference.at + 1);
                    (best, found) = (without, difference);
                    shrunk = true;
                }
                None => start += part,
            }
        }
        part = if part == 1 && shrunk && runs < RUNS_MAX { 1 } else { part / 2 };
    }
    Some((best, found))
}
