//! Tests of pinned nodes: the union keeps them after everybody has forgotten them, because another node needs them.

use crate::support::{Branches, Counting, ROOT, close, name, node};
use poolfs_libservice::types::{NodeId, OpenFlags};
use poolfs_libservice::{Headroom, Libservice};
use poolfs_union::Union;
use std::sync::Arc;

/// So much may be more or less than was told.
const STEP: usize = 64;

fn counted() -> (Arc<Union>, Arc<Counting>) {
    let (union, count) = (Branches::empty(1).open(), Arc::new(Counting::default()));
    union.set_pinned_room(Arc::clone(&count) as Arc<dyn Headroom>);
    (union, count)
}

/// Files, each with names in directories of their own: `dFILE-NUMBER/n`. Nothing but the files is referred to.
fn make_files(union: &Union, files: usize, names: usize) -> Vec<NodeId> {
    let file = |file: usize| {
        let called = format!("f{file}");
        let (entry, handle) =
            union.create(ROOT, NodeId::ROOT, name(&called), 0o644, OpenFlags::READ_WRITE).expect("made");
        let _ = union.write(ROOT, handle, 0, called.as_bytes()).expect("written");
        union.release(handle);
        for number in 0..names {
            let directory = union.mkdir(ROOT, NodeId::ROOT, name(&format!("d{file}-{number}")), 0o755).expect("made");
            union.link(ROOT, entry.node, directory.node, name("n")).expect("linked");
            union.forget(entry.node, 1);
            union.forget(directory.node, 1);
        }
        entry.node
    };
    (0..files).map(file).collect()
}

/// A container that holds files, each with names in many directories, has the union keep all of these.
#[test]
fn directories_of_the_names_of_files_are_counted_after_they_are_forgotten() {
    const FILES: usize = 20;
    const NAMES: usize = 20;
    let (union, count) = counted();
    let held = make_files(&union, FILES, NAMES);
    let counted = count.count() as usize;
    assert!(counted.abs_diff(FILES * NAMES) < STEP, "{counted} are counted");
    // Whoever looks one up refers to it again.
    let again: Vec<_> = (0..NAMES).map(|number| node(&*union, &format!("d0-{number}")).expect("there")).collect();
    let fewer = count.count() as usize;
    assert!(fewer.abs_diff((FILES - 1) * NAMES) < STEP, "{fewer} are counted");
    again.iter().for_each(|&node| union.forget(node, 1));
    held.iter().for_each(|&node| union.forget(node, 1));
    assert!((count.count() as usize) < STEP, "all are given back");
    close(union);
    assert_eq!(count.count(), 0, "all are given back");
}

/// Files have names that the union does not remember any more when it has too many directories for them: they are found again.
#[test]
fn names_that_are_not_remembered_are_names_all_the_same() {
    const FILES: usize = 400;
    const NAMES: usize = 40;
    const MANY: usize = 8192;
    let (union, count) = counted();
    let held = make_files(&union, FILES, NAMES);
    let counted = count.count() as usize;
    assert!(counted < MANY + FILES + STEP, "{counted} are counted of {}", FILES * NAMES);
    for file in [0, FILES - 1] {
        // The first name goes, then what was linked last, and all that is between them but one.
        union.unlink(ROOT, NodeId::ROOT, name(&format!("f{file}"))).expect("removed");
        for number in (1..NAMES).rev() {
            let directory = node(&*union, &format!("d{file}-{number}")).expect("there");
            union.unlink(ROOT, directory, name("n")).expect("removed");
            union.forget(directory, 1);
        }
        let found = node(&*union, &format!("d{file}-0/n")).expect("there");
        assert_eq!(found, held[file]);
        assert_eq!(union.getattr(ROOT, found).expect("there").links, 1);
        let handle = union.open(ROOT, found, OpenFlags::READ_WRITE).expect("opened");
        let mut content = [0; 8];
        let length = union.read(ROOT, handle, 0, &mut content).expect("read");
        assert_eq!(&content[..length], format!("f{file}").as_bytes());
        let _ = union.write(ROOT, handle, 0, b"again").expect("written");
        union.release(handle);
        union.forget(found, 1);
    }
    held.iter().for_each(|&node| union.forget(node, 1));
    close(union);
    assert_eq!(count.count(), 0, "all are given back");
}
