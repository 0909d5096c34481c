//! The conformance suite run over the in-memory reference.

use super::*;
use crate::Memory;

#[test]
fn the_reference_conforms() {
    run(&|| Memory::new());
}
