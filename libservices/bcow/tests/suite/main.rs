//! The conformance suite and the random-operations test over compact files, and the tests of the format itself: space, growth,
//! crashes.

mod check;
mod cold;
mod crash;
mod damage;
mod room;
mod support;
mod threads;

use poolfs_bcow::Layout;
use poolfs_libservice::random_operations::Comparison;
use poolfs_libservice::{Libservice, Memory, conformance};
use std::collections::BTreeSet;
use std::sync::Arc;
use support::{Files, layer, levels_of_all};

const LAYOUTS: [Layout; 2] = [Layout::Performance, Layout::Space];

#[test]
fn conformance_where_only_grown_files_are_of_the_format() {
    for layout in LAYOUTS {
        conformance::run(&|| layer(Memory::new(), layout, Files::Grown));
    }
}

#[test]
fn conformance_where_all_files_are_of_the_format() {
    for layout in LAYOUTS {
        conformance::run(&|| layer(Memory::new(), layout, Files::All));
    }
}

#[test]
fn random_operations_with_remounts() {
    let mut levels = BTreeSet::new();
    for seed in 0..12 {
        let layout = LAYOUTS[seed as usize % 2];
        let files = if seed % 3 == 0 { Files::Grown } else { Files::All };
        let memory = Memory::new();
        let first = layer(memory.clone(), layout, files);
        let remount = |before: Arc<dyn Libservice>| {
            drop(before);
            levels.extend(levels_of_all(&*memory));
            layer(memory.clone(), layout, files) as Arc<dyn Libservice>
        };
        let summary = Comparison::new(seed, 3000).remounting(200, remount).run(first);
        assert!(summary.succeeded > 750, "{summary:?}");
    }
    // With places in the record, with one table and with a root, as files are found by the next layer.
    assert!([0, 1, 2].iter().all(|level| levels.contains(level)), "{levels:?}");
}

#[test]
fn nothing_of_the_layer_below_is_kept() {
    let memory = Memory::new();
    Comparison::new(3, 2000).run(layer(memory.clone(), Layout::Space, Files::All));
    assert_eq!(memory.outstanding(), (0, 0));
}
