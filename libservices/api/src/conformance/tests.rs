//! The suite judged by the reference.

use super::*;
use crate::Memory;

#[test]
fn the_reference_conforms() {
    run(&|| Memory::new());
}
