//! Tests of what the reference does beyond the contract: capacity, strictness, and no lock held while a visitor runs.

use super::*;
use crate::types::Errno;

const ROOT: Caller = Caller::ROOT;

fn file(layer: &Memory, text: &str) -> (NodeId, HandleId) {
    let name = Name::new(text.as_bytes()).unwrap();
    let (entry, handle) = layer.create(&ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).unwrap();
    (entry.node, handle)
}

#[test]
fn a_full_layer_writes_what_fits_and_recovers() {
    let layer = Memory::with_capacity(10 * 4096);
    let (node, handle) = file(&layer, "file");
    let written = layer.write(&ROOT, handle, 4000, &[1; 100_000]).unwrap();
    assert_eq!(written.count, 10 * 4096 - 4000);
    assert_eq!(layer.write(&ROOT, handle, 10 * 4096, &[1]).unwrap_err(), Errno::ENOSPC);
    assert_eq!(layer.write(&ROOT, handle, 0, &[2; 4096]).unwrap().count, 4096, "what has its blocks can be written");
    let (_, other) = file(&layer, "other");
    assert_eq!(layer.fallocate(&ROOT, other, AllocateMode::empty(), 0, 1).unwrap_err(), Errno::ENOSPC);
    assert_eq!(layer.statfs(&ROOT, node).unwrap().blocks_free, 0);
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    layer.fallocate(&ROOT, handle, punch, 4096, 4096).unwrap();
    layer.fallocate(&ROOT, other, AllocateMode::empty(), 0, 1).unwrap();
    assert_eq!(layer.statfs(&ROOT, node).unwrap().blocks_free, 0);
    layer.unlink(&ROOT, NodeId::ROOT, Name::new(b"file").unwrap()).unwrap();
    layer.forget(node, 1);
    assert_eq!(layer.statfs(&ROOT, NodeId::ROOT).unwrap().blocks_free, 0, "an open file keeps its blocks");
    layer.release(handle);
    assert_eq!(layer.statfs(&ROOT, NodeId::ROOT).unwrap().blocks_free, 9);
}

#[test]
fn a_forgotten_node_is_stale_at_once() {
    let layer = Memory::new();
    let (node, handle) = file(&layer, "file");
    layer.forget(node, 1);
    assert!(layer.getattr(&ROOT, node).is_ok(), "the handle keeps it");
    layer.release(handle);
    assert_eq!(layer.getattr(&ROOT, node).unwrap_err(), Errno::ESTALE);
    assert_eq!(layer.lookup(&ROOT, NodeId::ROOT, Name::new(b"file").unwrap()).unwrap().node, node);
    assert_eq!(layer.outstanding(), (1, 0));
}

#[test]
fn a_visitor_may_stop_and_nothing_is_locked_meanwhile() {
    let layer = Memory::new();
    file(&layer, "a");
    file(&layer, "b");
    let handle = layer.opendir(&ROOT, NodeId::ROOT).unwrap();
    let mut seen = 0;
    let mut visit = |entry: DirectoryEntry<'_>| {
        seen += 1;
        layer.lookup(&ROOT, NodeId::ROOT, entry.name).unwrap();
        ControlFlow::Break(())
    };
    layer.readdir(&ROOT, handle, 0, &mut visit).unwrap();
    assert_eq!(seen, 1);
}
