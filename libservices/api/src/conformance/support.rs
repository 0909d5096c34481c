//! Helper functions of the conformance cases. Each of them fails the case if the layer refuses what it must do.

use crate::types::{
    AllocateMode, Attributes, Caller, Errno, HandleId, Name, NodeId, OpenFlags, RenameFlags, SetAttributes,
};
use crate::{Entry, Libservice, ReadTarget, Result};
use std::fmt::Debug;
use std::fs::File;
use std::ops::{ControlFlow, Range};

pub(super) use crate::types::NodeId as Node;

pub(super) type Layer<'a> = &'a dyn Libservice;

pub(super) const ROOT: NodeId = NodeId::ROOT;
pub(super) const ME: Caller = Caller::ROOT;
pub(super) const NO_NODE: NodeId = NodeId(0x7777_7777_7777);
pub(super) const NO_HANDLE: HandleId = HandleId(0x7777_7777_7777);
pub(super) const READ_WRITE: OpenFlags = OpenFlags::READ_WRITE;
pub(super) const KEEP_SIZE: AllocateMode = AllocateMode::KEEP_SIZE;

pub(super) fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a valid name")
}

/// What must fail, and how.
#[track_caller]
pub(super) fn refused<T: Debug>(result: Result<T>, errno: Errno) {
    match result {
        Err(error) if error == errno => {}
        other => panic!("expected {errno:?}, got {other:?}"),
    }
}

/// What must work.
#[track_caller]
pub(super) fn ok<T>(result: Result<T>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("must work, but: {error}"),
    }
}

#[track_caller]
pub(super) fn lookup(layer: Layer<'_>, parent: NodeId, text: &str) -> Entry {
    ok(layer.lookup(&ME, parent, name(text)))
}

#[track_caller]
pub(super) fn missing(layer: Layer<'_>, parent: NodeId, text: &str) {
    refused(layer.lookup(&ME, parent, name(text)), Errno::ENOENT);
}

#[track_caller]
pub(super) fn attributes(layer: Layer<'_>, node: NodeId) -> Attributes {
    ok(layer.getattr(&ME, node))
}

/// A new file and a handle that may read and write.
#[track_caller]
pub(super) fn create(layer: Layer<'_>, parent: NodeId, text: &str) -> (NodeId, HandleId) {
    let (entry, handle) = ok(layer.create(&ME, parent, name(text), 0o644, READ_WRITE));
    (entry.node, handle)
}

/// A new file with this content, closed.
#[track_caller]
pub(super) fn file(layer: Layer<'_>, parent: NodeId, text: &str, content: &[u8]) -> NodeId {
    let (node, handle) = create(layer, parent, text);
    write(layer, handle, 0, content);
    ok(layer.flush(&ME, handle));
    layer.release(handle);
    node
}

#[track_caller]
pub(super) fn mkdir(layer: Layer<'_>, parent: NodeId, text: &str) -> NodeId {
    ok(layer.mkdir(&ME, parent, name(text), 0o755)).node
}

#[track_caller]
pub(super) fn open(layer: Layer<'_>, node: NodeId, flags: OpenFlags) -> HandleId {
    ok(layer.open(&ME, node, flags))
}

/// Writes all of it.
#[track_caller]
pub(super) fn write(layer: Layer<'_>, handle: HandleId, offset: u64, data: &[u8]) {
    let written = ok(layer.write(&ME, handle, offset, data));
    assert_eq!(written.count, data.len(), "a short write without an error");
}

/// Reads up to `length` bytes of what nobody changes meanwhile, by both methods, by as many calls as it takes.
#[track_caller]
pub(super) fn read(layer: Layer<'_>, handle: HandleId, offset: u64, length: usize) -> Vec<u8> {
    let data = read_to_slice(layer, handle, offset, length);
    assert!(read_into(layer, handle, offset, length) == data, "`read_into` gives something else than `read`");
    data
}

/// Reads up to `length` bytes, by as many calls as it takes.
#[track_caller]
pub(super) fn read_to_slice(layer: Layer<'_>, handle: HandleId, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0xa5; length];
    let mut done = 0;
    while done < length {
        match ok(layer.read(&ME, handle, offset + done as u64, &mut data[done..])) {
            0 => break,
            got => done += got,
        }
    }
    data.truncate(done);
    data
}

/// The same into memory that is not the reader's.
#[track_caller]
fn read_into(layer: Layer<'_>, handle: HandleId, offset: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0x5a; length];
    let mut done = 0;
    while done < length {
        let mut target = Apart { target: &mut data[done..], buffer: vec![0xa5; length - done] };
        match ok(layer.read_into(&ME, handle, offset + done as u64, &mut target)) {
            0 => break,
            got => done += got,
        }
    }
    data.truncate(done);
    data
}

/// A target that has a buffer apart.
struct Apart<'a> {
    target: &'a mut [u8],
    buffer: Vec<u8>,
}

impl ReadTarget for Apart<'_> {
    fn buffer(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    fn put(&mut self, range: Range<usize>) -> Result<()> {
        self.target[range.clone()].copy_from_slice(&self.buffer[range]);
        Ok(())
    }

    fn put_file(&mut self, range: Range<usize>, file: &File, offset: u64) -> Result<()> {
        let mut part = &mut self.target[range];
        let length = part.len();
        part.put_file(0..length, file, offset)
    }
}

/// All of a file, by a handle of its own.
#[track_caller]
pub(super) fn content(layer: Layer<'_>, node: NodeId) -> Vec<u8> {
    let handle = open(layer, node, OpenFlags::READ_ONLY);
    let data = read(layer, handle, 0, attributes(layer, node).size as usize + 1);
    layer.release(handle);
    data
}

#[track_caller]
pub(super) fn truncate(layer: Layer<'_>, node: NodeId, size: u64) -> Attributes {
    ok(layer.setattr(&ME, node, &SetAttributes { size: Some(size), ..Default::default() }, None))
}

#[track_caller]
pub(super) fn chmod(layer: Layer<'_>, node: NodeId, permissions: u32) -> Attributes {
    ok(layer.setattr(&ME, node, &SetAttributes { permissions: Some(permissions), ..Default::default() }, None))
}

pub(super) fn rename(
    layer: Layer<'_>,
    (parent, text): (NodeId, &str),
    (new_parent, new_text): (NodeId, &str),
    flags: RenameFlags,
) -> Result<()> {
    layer.rename(&ME, parent, name(text), new_parent, name(new_text), flags)
}

/// All names of a directory, sorted, by a handle of its own.
#[track_caller]
pub(super) fn names(layer: Layer<'_>, node: NodeId) -> Vec<String> {
    let handle = ok(layer.opendir(&ME, node));
    let mut found = Vec::new();
    let mut visit = |entry: crate::DirectoryEntry<'_>| {
        found.push(entry.name.to_string());
        ControlFlow::Continue(())
    };
    ok(layer.readdir(&ME, handle, 0, &mut visit));
    layer.release(handle);
    found.sort();
    found
}

/// Bytes that differ from place to place and from `salt` to `salt`.
pub(super) fn pattern(salt: u8, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ salt).collect()
}

/// Whether two buffers are equal; says where they are not instead of printing them.
#[track_caller]
pub(super) fn same_bytes(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len(), "the length differs");
    if let Some(at) = found.iter().zip(expected).position(|(left, right)| left != right) {
        panic!("byte {at} is {:#x}, not {:#x}", found[at], expected[at]);
    }
}
