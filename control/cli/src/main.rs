//! poolfs: the command line.
fn main() {}
