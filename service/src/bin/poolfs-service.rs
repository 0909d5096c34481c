//! The filesystem service process.
fn main() {}
