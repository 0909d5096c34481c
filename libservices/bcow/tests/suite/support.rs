//! Layers, and small helpers to use them.

use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_libservice::types::{Attributes, Caller, HandleId, Name, NodeId, OpenFlags, SetAttributes};
use poolfs_libservice::{Branch, Durability, Libservice};
use std::sync::Arc;
use std::time::Duration;

pub const ROOT: &Caller = &Caller::ROOT;

/// Which files are of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    Grown,
    All,
}

pub fn layer(below: Branch, layout: Layout, files: Files) -> Arc<Bcow> {
    let config = BcowConfig::new(below);
    Bcow::new(BcowConfig {
        layout: Some(layout),
        all_files: files == Files::All,
        flush_interval: Duration::ZERO,
        ..config
    })
}

pub fn name(name: &str) -> Name<'_> {
    Name::new(name.as_bytes()).expect("a name")
}

/// The node of a name in the root, with a reference that is never given back.
pub fn node(layer: &dyn Libservice, file: &str) -> NodeId {
    layer.lookup(ROOT, NodeId::ROOT, name(file)).expect("it is there").node
}

pub fn create(layer: &dyn Libservice, file: &str) -> HandleId {
    layer.create(ROOT, NodeId::ROOT, name(file), 0o600, OpenFlags::READ_WRITE).expect("created").1
}

pub fn open(layer: &dyn Libservice, file: &str) -> HandleId {
    layer.open(ROOT, node(layer, file), OpenFlags::READ_WRITE).expect("opened")
}

pub fn stat(layer: &dyn Libservice, file: &str) -> Attributes {
    layer.getattr(ROOT, node(layer, file)).expect("attributes")
}

pub fn resize(layer: &dyn Libservice, file: &str, size: u64) {
    let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
    layer.setattr(ROOT, node(layer, file), &changes, None).expect("resized");
}

pub fn write(layer: &dyn Libservice, handle: HandleId, offset: u64, data: &[u8]) {
    assert_eq!(layer.write(ROOT, handle, offset, data).expect("written").count, data.len());
}

pub fn sync(layer: &dyn Libservice, handle: HandleId) {
    layer.fsync(ROOT, handle, Durability::All).expect("synced");
}

/// So many bytes from `offset` on, or up to the end.
pub fn read(layer: &dyn Libservice, handle: HandleId, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; length];
    let mut done = 0;
    while done < length {
        match layer.read(ROOT, handle, offset + done as u64, &mut bytes[done..]).expect("read") {
            0 => break,
            count => done += count,
        }
    }
    bytes.truncate(done);
    bytes
}

/// Numbers that look random.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}
