//! Measures bulk copies by size: plain copies beside the papers' shared-memory-optimised ones (SMO).

use crate::table::{Row, Table};
use crate::worker::median;
use poolfs_ipc::copy::{copy, copy_streaming};
use std::time::Instant;

/// The source is walked through, so that it is cold for the cache as file content mostly is.
const SOURCE: usize = 64 << 20;

const ROUNDS: usize = 31;

/// Medians of [`ROUNDS`] rounds, the two variants in turn.
pub fn run() -> Table {
    let source = vec![1u8; SOURCE];
    let rows = [4 << 10, 16 << 10, 64 << 10, 128 << 10, 1 << 20]
        .map(|size| {
            let mut target = vec![0u8; size];
            let (mut plain, mut streaming) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                plain.push(sweep(&source, &mut target, |from, to| {
                    // SAFETY: both slices are as long as `to`, and they are different allocations.
                    unsafe { copy(from.as_ptr(), to.as_mut_ptr(), to.len()) }
                }));
                streaming.push(sweep(&source, &mut target, |from, to| {
                    // SAFETY: as above.
                    unsafe { copy_streaming(from.as_ptr(), to.as_mut_ptr(), to.len()) }
                }));
            }
            Row { title: format!("{} KiB", size >> 10), medians: vec![median(&mut plain), median(&mut streaming)] }
        })
        .into();
    Table::of_operations(&["memcpy", "SMO"], rows)
}

/// Copies 16 MiB in pieces of the target's size; nanoseconds a piece.
fn sweep(source: &[u8], target: &mut [u8], copy: impl Fn(&[u8], &mut [u8])) -> f64 {
    let pieces = (16 << 20) / target.len();
    let begun = Instant::now();
    for piece in 0..pieces {
        let at = (piece * target.len()) % (SOURCE - target.len());
        copy(&source[at..at + target.len()], target);
        std::hint::black_box(&*target);
    }
    begun.elapsed().as_nanos() as f64 / pieces as f64
}
