//! Differential test: random programs on poolfs and on the disk's own filesystem, compared in everything that programs can see.
//!
//! A program is a list of lines, each for one of the processes in [`PROCESSES`]: for each of three users one process by the library and one
//! by the kernel. The same lines are given to the same number of processes (`programs/differential.c`) on poolfs and on the disk, and their
//! answers are compared line by line. Times are compared by the step in which they were made: the line `tick` begins another one. A program
//! on which the two differ is shrunk as far as possible.

mod compare;
mod generator;
mod process;
mod shrink;
mod tree;
mod world;

pub use compare::Difference;
pub use generator::program as random_program;
pub use shrink::shortest;
pub use world::{Stack, World};

use crate::Way;

/// A process of a program: which way it takes on poolfs, and who it is.
#[derive(Clone, Copy, Debug)]
pub struct Who {
    way: Way,
    user: u32,
    group: u32,
    supplementary: u32,
}

/// The processes that the lines of a program name by number.
pub const PROCESSES: [Who; 6] = [
    Who { way: Way::Library, user: 0, group: 0, supplementary: 0 },
    Who { way: Way::Fuse, user: 0, group: 0, supplementary: 0 },
    Who { way: Way::Library, user: 1000, group: 1000, supplementary: 3000 },
    Who { way: Way::Fuse, user: 1000, group: 1000, supplementary: 3000 },
    Who { way: Way::Library, user: 2000, group: 2000, supplementary: 1000 },
    Who { way: Way::Fuse, user: 2000, group: 2000, supplementary: 1000 },
];

/// The line that begins another step of time.
pub const TICK: &str = "tick";
