//! Test support: branches in memory, and helper functions that use a layer by path.

use poolfs_libservice::types::{Attributes, Caller, FileType, HandleId, Name, NodeId, OpenFlags, SetAttributes};
use poolfs_libservice::{Headroom, Libservice, Memory, Result};
use poolfs_union::{Lower, Union, UnionConfig};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const ROOT: &Caller = &Caller::ROOT;

pub struct Branches {
    pub upper: Arc<Memory>,
    pub lowers: Vec<Arc<Memory>>,
}

impl Branches {
    pub fn empty(lowers: usize) -> Self {
        Branches { upper: Memory::new(), lowers: (0..lowers).map(|_| Memory::new()).collect() }
    }

    pub fn open(&self) -> Arc<Union> {
        open_over(self.upper.clone(), &self.lowers).expect("the union opens")
    }
}

pub fn open_over(upper: Arc<dyn Libservice>, lowers: &[Arc<Memory>]) -> Result<Arc<Union>> {
    let lowers = lowers
        .iter()
        .enumerate()
        .map(|(at, layer)| Lower {
            layer_id: format!("layer-{at}"),
            layer: layer.clone() as Arc<dyn Libservice>,
            is_union: false,
        })
        .collect();
    Union::open(UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(upper, lowers) })
}

/// Ends a union as its service does: until its threads have ended, one of them may be its last owner, and still write when
/// another union is opened over the same branches.
pub fn close(union: Arc<Union>) {
    union.end_threads();
    assert_eq!(Arc::strong_count(&union), 1, "somebody still has the union");
}

/// What [`close`] does, for a union that is closed by who does not know that it is one.
#[derive(Default)]
pub struct Remounted(Option<Arc<Union>>);

impl Remounted {
    /// Opens a union after the one before has ended, of which this was the last use but `layer`.
    pub fn open(
        &mut self,
        layer: Option<Arc<dyn Libservice>>,
        open: impl FnOnce() -> Arc<Union>,
    ) -> Arc<dyn Libservice> {
        drop(layer);
        self.0.take().into_iter().for_each(close);
        let union = open();
        self.0 = Some(union.clone());
        union
    }
}

pub fn name(name: &str) -> Name<'_> {
    Name::new(name.as_bytes()).expect("a name")
}

/// The node at a path, with a reference that is never given back.
pub fn node(layer: &dyn Libservice, path: &str) -> Result<NodeId> {
    let mut node = NodeId::ROOT;
    for part in path.split('/').filter(|part| !part.is_empty()) {
        node = layer.lookup(ROOT, node, name(part))?.node;
    }
    Ok(node)
}

/// The parent's node and the last name of a path.
pub fn split<'a>(layer: &dyn Libservice, path: &'a str) -> (NodeId, Name<'a>) {
    let (parent, last) = path.rsplit_once('/').unwrap_or(("", path));
    (node(layer, parent).expect("the parent exists"), name(last))
}

pub fn stat(layer: &dyn Libservice, path: &str) -> Attributes {
    let node = node(layer, path).expect("it exists");
    layer.getattr(ROOT, node).expect("it has attributes")
}

pub fn put(layer: &dyn Libservice, path: &str, content: &[u8]) {
    let (parent, last) = split(layer, path);
    let (_, handle) = layer.create(ROOT, parent, last, 0o644, OpenFlags::READ_WRITE).expect("created");
    if !content.is_empty() {
        assert_eq!(layer.write(ROOT, handle, 0, content).expect("written").count, content.len());
    }
    layer.release(handle);
}

pub fn mkdir(layer: &dyn Libservice, path: &str) {
    let (parent, last) = split(layer, path);
    layer.mkdir(ROOT, parent, last, 0o755).expect("made");
}

pub fn open(layer: &dyn Libservice, path: &str, flags: OpenFlags) -> Result<HandleId> {
    layer.open(ROOT, node(layer, path)?, flags)
}

pub fn write_at(layer: &dyn Libservice, path: &str, offset: u64, data: &[u8]) {
    let handle = open(layer, path, OpenFlags::READ_WRITE).expect("opened");
    assert_eq!(layer.write(ROOT, handle, offset, data).expect("written").count, data.len());
    layer.release(handle);
}

pub fn resize(layer: &dyn Libservice, path: &str, size: u64) {
    let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
    layer.setattr(ROOT, node(layer, path).unwrap(), &changes, None).unwrap();
}

pub fn fsync(layer: &dyn Libservice, path: &str) {
    let handle = open(layer, path, OpenFlags::READ_WRITE).expect("opened");
    layer.fsync(ROOT, handle, poolfs_libservice::Durability::All).expect("synced");
    layer.release(handle);
}

pub fn get(layer: &dyn Libservice, path: &str) -> Result<Vec<u8>> {
    let handle = open(layer, path, OpenFlags::READ_ONLY)?;
    let mut content = Vec::new();
    let mut buffer = [0; 10_000];
    let result = loop {
        match layer.read(ROOT, handle, content.len() as u64, &mut buffer) {
            Ok(0) => break Ok(content),
            Ok(count) => content.extend_from_slice(&buffer[..count]),
            Err(error) => break Err(error),
        }
    };
    layer.release(handle);
    result
}

pub fn ls(layer: &dyn Libservice, path: &str) -> Vec<String> {
    let node = node(layer, path).expect("it exists");
    list(layer, node).into_iter().map(|(name, _)| String::from_utf8_lossy(&name).into_owned()).collect()
}

pub fn list(layer: &dyn Libservice, node: NodeId) -> Vec<(Vec<u8>, FileType)> {
    let handle = layer.opendir(ROOT, node).expect("opened");
    let mut names = Vec::new();
    layer
        .readdir(ROOT, handle, 0, &mut |entry| {
            names.push((entry.name.as_bytes().to_vec(), entry.file_type));
            ControlFlow::Continue(())
        })
        .expect("listed");
    layer.release(handle);
    names.sort_by(|a, b| a.0.cmp(&b.0));
    names
}

/// A whole tree as text: every path with attributes, xattrs and content.
pub fn fingerprint(layer: &dyn Libservice) -> String {
    let mut out = String::new();
    let mut pending = vec![(String::new(), NodeId::ROOT)];
    while let Some((path, directory)) = pending.pop() {
        for (name, file_type) in list(layer, directory) {
            let entry = layer.lookup(ROOT, directory, Name::new(&name).expect("a name")).expect("listed, so it exists");
            let path = format!("{path}/{}", name.escape_ascii());
            let content = match file_type {
                FileType::Regular => {
                    let handle = layer.open(ROOT, entry.node, OpenFlags::READ_ONLY).expect("opened");
                    let mut content = vec![0; entry.attributes.size as usize];
                    let count = layer.read(ROOT, handle, 0, &mut content).expect("read");
                    layer.release(handle);
                    assert_eq!(count, content.len());
                    content
                }
                FileType::Symlink => layer.readlink(ROOT, entry.node).expect("read"),
                _ => Vec::new(),
            };
            let xattrs: Vec<_> = layer
                .listxattr(ROOT, entry.node)
                .expect("listed")
                .into_iter()
                .map(|name| (layer.getxattr(ROOT, entry.node, &name).expect("read"), name))
                .collect();
            let sum = content
                .iter()
                .fold(0xcbf2_9ce4_8422_2325u64, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
            out.push_str(&format!("{path} {:?} {sum:x} {xattrs:?}\n", entry.attributes));
            if file_type == FileType::Directory {
                pending.push((path, entry.node));
            } else {
                layer.forget(entry.node, 1);
            }
        }
        layer.forget(directory, 1);
    }
    out
}

/// A room in which everything finds place, and is counted.
#[derive(Default)]
pub struct Counting(AtomicU64);

impl Counting {
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Headroom for Counting {
    fn add(&self, amount: u64) -> bool {
        self.force(amount);
        true
    }

    fn force(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    fn subtract(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }
}
