//! Random changes of a small tree, and the invariants of a tree whatever has happened to it.

use crate::support::*;
use poolfs_libservice::types::{
    AllocateMode, Attributes, FileType, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
};
use poolfs_libservice::{Durability, Libservice, Memory, Result};
use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const BLOCK: u64 = 4096;

pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A lower branch with nested directories, hard links, and the names that the script uses.
pub fn lower() -> Arc<Memory> {
    let lower = Memory::new();
    fill_lower(&*lower);
    lower
}

pub fn fill_lower(lower: &dyn Libservice) {
    for directory in ["c", "d", "c/d", "d/c", "c/d/c"] {
        mkdir(lower, directory);
    }
    for (at, file) in ["a", "b", "c/a", "d/b", "c/d/a", "c/d/c/b"].iter().enumerate() {
        put(lower, file, &vec![at as u8 + 1; 2 * BLOCK as usize + 100 * at]);
    }
    for (file, other) in [("a", "c/b"), ("d/b", "d/a"), ("c/d/a", "c/d/b")] {
        let linked = node(lower, file).unwrap();
        let (parent, last) = split(lower, other);
        lower.link(ROOT, linked, parent, last).unwrap();
    }
    let link = lower.symlink(ROOT, node(lower, "d/c").unwrap(), name("a"), b"../a").unwrap();
    lower.link(ROOT, link.node, node(lower, "c/d/c").unwrap(), name("a")).unwrap();
}

/// One layer with the references that a script holds on it.
pub struct Script {
    pub random: Random,
    held: Vec<NodeId>,
}

impl Script {
    pub fn new(seed: u64) -> Self {
        Script { random: Random(seed), held: Vec::new() }
    }

    fn find(&mut self, layer: &dyn Libservice, path: &[&str]) -> Result<NodeId> {
        let mut node = NodeId::ROOT;
        for part in path {
            node = layer.lookup(ROOT, node, name(part))?.node;
            self.held.push(node);
        }
        Ok(node)
    }

    fn name(&mut self) -> &'static str {
        NAMES[self.random.below(NAMES.len() as u64) as usize]
    }

    /// A directory that is there, and a name.
    fn place(&mut self, layer: &dyn Libservice) -> (NodeId, Name<'static>) {
        let depth = self.random.below(4);
        let mut path = Vec::new();
        for _ in 0..depth {
            path.push(self.name());
        }
        let last = name(self.name());
        while let Err(_) | Ok((_, false)) =
            self.find(layer, &path).and_then(|node| Ok((node, layer.getattr(ROOT, node)?.is_directory())))
        {
            path.pop();
        }
        (self.find(layer, &path).unwrap_or(NodeId::ROOT), last)
    }

    /// Gives all references back, as a kernel under pressure does.
    pub fn forget(&mut self, layer: &dyn Libservice) {
        for node in self.held.drain(..) {
            layer.forget(node, 1);
        }
    }

    /// One random change; that it is refused is no matter.
    pub fn step(&mut self, layer: &dyn Libservice) -> String {
        let (parent, last) = self.place(layer);
        let shown = |node: NodeId, last: Name<'_>| format!("{}/{}", node.0, last.as_bytes().escape_ascii());
        let place = shown(parent, last);
        let (what, result) = match self.random.below(16) {
            0 => (
                "create",
                layer.create(ROOT, parent, last, 0o644, OpenFlags::READ_WRITE).map(|(entry, handle)| {
                    layer.release(handle);
                    self.held.push(entry.node);
                }),
            ),
            1 => ("mkdir", layer.mkdir(ROOT, parent, last, 0o755).map(|entry| self.held.push(entry.node))),
            2 => ("symlink", layer.symlink(ROOT, parent, last, b"x").map(|entry| self.held.push(entry.node))),
            3 | 4 => ("unlink", layer.unlink(ROOT, parent, last)),
            5 | 6 => ("rmdir", self.empty_and_remove(layer, parent, last)),
            7..11 => {
                let (other, new) = self.place(layer);
                let flags = if self.random.below(4) == 0 { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
                let result = layer.rename(ROOT, parent, last, other, new, flags);
                return format!("rename {place} {} {flags:?}: {result:?}", shown(other, new));
            }
            11 => {
                let (other, new) = self.place(layer);
                let result = layer.lookup(ROOT, parent, last).and_then(|entry| {
                    self.held.push(entry.node);
                    layer.link(ROOT, entry.node, other, new).map(|entry| self.held.push(entry.node))
                });
                return format!("link {place} {}: {result:?}", shown(other, new));
            }
            12 => (
                "chmod",
                layer.lookup(ROOT, parent, last).and_then(|entry| {
                    self.held.push(entry.node);
                    let changes = SetAttributes { permissions: Some(0o700), ..SetAttributes::default() };
                    layer.setattr(ROOT, entry.node, &changes, None).map(drop)
                }),
            ),
            _ => ("write", self.write(layer, parent, last)),
        };
        if self.random.below(5) == 0 {
            self.forget(layer);
        }
        format!("{what} {place}: {result:?}")
    }

    /// Removes a directory with the files in it, so that it is empty by whiteouts.
    fn empty_and_remove(&mut self, layer: &dyn Libservice, parent: NodeId, last: Name<'_>) -> Result<()> {
        let directory = layer.lookup(ROOT, parent, last)?.node;
        self.held.push(directory);
        let most = self.random.below(4);
        for name in NAMES.iter().take(most as usize) {
            let _ = layer.unlink(ROOT, directory, crate::support::name(name));
        }
        if self.random.below(2) == 0 { Ok(()) } else { layer.rmdir(ROOT, parent, last) }
    }

    fn write(&mut self, layer: &dyn Libservice, parent: NodeId, last: Name<'_>) -> Result<()> {
        let file = layer.lookup(ROOT, parent, last)?.node;
        self.held.push(file);
        let handle = layer.open(ROOT, file, OpenFlags::READ_WRITE)?;
        let (offset, length) = (self.random.below(3 * BLOCK), self.random.below(2 * BLOCK) + 1);
        let result = match self.random.below(6) {
            0 => {
                let changes = SetAttributes { size: Some(offset), ..SetAttributes::default() };
                layer.setattr(ROOT, file, &changes, None).map(drop)
            }
            1 => layer.fallocate(ROOT, handle, AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE, offset, length),
            2 => layer.fsync(ROOT, handle, Durability::All),
            _ => {
                let byte = self.random.below(200) as u8 + 50;
                layer.write(ROOT, handle, offset, &vec![byte; length as usize]).map(drop)
            }
        };
        layer.release(handle);
        result
    }
}

/// One object of a tree, as users see it, without its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub inode: u64,
    pub file_type: FileType,
    pub permissions: u32,
    pub links: u32,
    pub size: u64,
    pub content: Vec<(u8, usize)>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

fn content(layer: &dyn Libservice, node: NodeId, attributes: &Attributes, what: &str) -> Vec<(u8, usize)> {
    let bytes = match attributes.file_type {
        FileType::Regular => {
            let handle = layer.open(ROOT, node, OpenFlags::READ_ONLY).unwrap_or_else(|error| panic!("{what}: {error}"));
            let mut bytes = vec![0; attributes.size as usize];
            let count = layer.read(ROOT, handle, 0, &mut bytes).unwrap_or_else(|error| panic!("{what}: {error}"));
            layer.release(handle);
            assert_eq!(count, bytes.len(), "{what}");
            bytes
        }
        FileType::Symlink => layer.readlink(ROOT, node).unwrap(),
        _ => Vec::new(),
    };
    let mut runs: Vec<(u8, usize)> = Vec::new();
    for byte in bytes {
        match runs.last_mut() {
            Some((last, count)) if *last == byte => *count += 1,
            _ => runs.push((byte, 1)),
        }
    }
    runs
}

/// Every path of a tree. What a listing tells is what a look-up finds, with the same inode number; every file has as many
/// links as names, and can be read.
pub fn tree(layer: &dyn Libservice, what: &str) -> BTreeMap<String, Seen> {
    let mut all = BTreeMap::new();
    let mut names_of: HashMap<u64, u32> = HashMap::new();
    let mut pending = vec![(String::new(), NodeId::ROOT)];
    while let Some((path, directory)) = pending.pop() {
        let handle = layer.opendir(ROOT, directory).unwrap();
        let mut listed = Vec::new();
        let each = &mut |entry: poolfs_libservice::DirectoryEntry<'_>| {
            listed.push((entry.name.as_bytes().to_vec(), entry.inode, entry.file_type));
            ControlFlow::Continue(())
        };
        layer.readdir(ROOT, handle, 0, each).unwrap_or_else(|error| panic!("{what}: listing {path}: {error}"));
        layer.release(handle);
        for (name, inode, file_type) in listed {
            let path = format!("{path}/{}", name.escape_ascii());
            let entry = layer
                .lookup(ROOT, directory, Name::new(&name).unwrap())
                .unwrap_or_else(|error| panic!("{what}: {path} is listed, but {error}"));
            let attributes = entry.attributes;
            assert_eq!((attributes.inode, attributes.file_type), (inode, file_type), "{what}: {path}");
            let xattrs = layer.listxattr(ROOT, entry.node).unwrap();
            let xattrs =
                xattrs.into_iter().map(|name| (layer.getxattr(ROOT, entry.node, &name).unwrap(), name)).collect();
            let seen = Seen {
                inode,
                file_type,
                permissions: attributes.permissions,
                links: attributes.links,
                size: attributes.size,
                content: content(layer, entry.node, &attributes, &format!("{what}: {path}")),
                xattrs,
            };
            if file_type == FileType::Directory {
                pending.push((path.clone(), entry.node));
            } else {
                *names_of.entry(inode).or_default() += 1;
                layer.forget(entry.node, 1);
            }
            all.insert(path, seen);
        }
        if directory != NodeId::ROOT {
            layer.forget(directory, 1);
        }
    }
    for (path, seen) in all.iter().filter(|(_, seen)| seen.file_type != FileType::Directory) {
        assert_eq!(seen.links, names_of[&seen.inode], "{what}: links of {path}");
    }
    all
}

/// Removes everything, name by name.
pub fn remove_all(layer: &dyn Libservice, what: &str) {
    let tree = tree(layer, what);
    for (path, seen) in tree.iter().rev() {
        let (parent, last) = split(layer, path.trim_start_matches('/'));
        let result = match seen.file_type {
            FileType::Directory => layer.rmdir(ROOT, parent, last),
            _ => layer.unlink(ROOT, parent, last),
        };
        result.unwrap_or_else(|error| panic!("{what}: {path} cannot be removed: {error}"));
    }
    assert!(ls(layer, "").is_empty(), "{what}");
}

/// Nothing is left in the work directory of an upper branch whose union is empty or has no sketches.
pub fn nothing_left(upper: &dyn Libservice, what: &str) {
    for place in ["work", "bitmaps", "index"] {
        let left = ls(upper, &format!(".poolfs/{place}"));
        assert!(left.is_empty(), "{what}: {left:?} in {place}");
    }
}
