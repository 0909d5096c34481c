//! The bench command: paired measurements of every path.
fn main() {}
