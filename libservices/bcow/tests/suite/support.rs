//! Test support: layers over compact files, and helper functions for their use.

use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_libservice::types::{Attributes, Caller, FileType, HandleId, Name, NodeId, OpenFlags, SetAttributes};
use poolfs_libservice::{Branch, Durability, Libservice};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

pub const ROOT: &Caller = &Caller::ROOT;

/// Which files are of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    Grown,
    All,
}

/// A layer with the usual bounds, and no thread.
pub fn usual(below: Branch) -> Arc<Bcow> {
    Bcow::new(BcowConfig { flush_interval: Duration::ZERO, ..BcowConfig::new(below) })
}

pub fn layer(below: Branch, layout: Layout, files: Files) -> Arc<Bcow> {
    let config = BcowConfig::new(below);
    Bcow::new(BcowConfig {
        layout: Some(layout),
        all_files: files == Files::All,
        flush_interval: Duration::ZERO,
        // So few that files of tests have more.
        file_tables_max: 2,
        tables_max: 3,
        root_tables_max: 2,
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

/// The attribute of a file of the format.
pub const ATTRIBUTE: &[u8] = b"trusted.poolfs.bcow";

/// How many levels of tables the file has as it is stored in `below`, and how many places its record.
pub fn stored_levels(below: &dyn Libservice, file: &str) -> (u8, usize) {
    let record = below.getxattr(ROOT, node(below, file), ATTRIBUTE).expect("a record");
    (record[7], (record.len() - 64) / 8)
}

/// How many levels of tables the files below have that have units.
pub fn levels_of_all(below: &dyn Libservice) -> Vec<u8> {
    let (mut levels, mut pending) = (Vec::new(), vec![NodeId::ROOT]);
    while let Some(directory) = pending.pop() {
        let mut found = Vec::new();
        let handle = below.opendir(ROOT, directory).expect("opened");
        let listed = below.readdir(ROOT, handle, 0, &mut |entry| {
            found.push((entry.name.as_bytes().to_vec(), entry.file_type));
            ControlFlow::Continue(())
        });
        listed.expect("listed");
        below.release(handle);
        for (name, file_type) in found {
            let node = below.lookup(ROOT, directory, Name::new(&name).expect("a name")).expect("listed").node;
            match below.getxattr(ROOT, node, ATTRIBUTE) {
                Ok(record) if record[7] > 0 || record.len() > 64 => levels.push(record[7]),
                _ => {}
            }
            if file_type == FileType::Directory {
                pending.push(node);
            } else {
                below.forget(node, 1);
            }
        }
        if directory != NodeId::ROOT {
            below.forget(directory, 1);
        }
    }
    levels
}

/// Most units of a file without tables.
pub const INLINE_MAX: u64 = 40;

/// Numbers that look random.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}
