//! The operations of a random program.

use crate::Durability;
use crate::types::{AllocateMode, Caller, FileType, OpenFlags, RenameFlags, SeekTo, SetAttributes, XattrFlags};
use std::fmt;

/// Which of the nodes held at that moment.
pub(super) type NodeSlot = usize;

/// Which of the handles held at that moment.
pub(super) type HandleSlot = usize;

/// Bytes that show as text, long ones by their start and length.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Text(pub(super) Vec<u8>);

impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.split_at_checked(24) {
            Some((start, rest)) if rest.len() > 8 => write!(f, "\"{}...\"({})", start.escape_ascii(), self.0.len()),
            _ => write!(f, "\"{}\"", self.0.escape_ascii()),
        }
    }
}

/// A directory and a name in it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) parent: NodeSlot,
    pub(super) name: Text,
}

/// One call, or a few that belong together.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    Lookup(Place),
    Forget(NodeSlot),
    Getattr(NodeSlot),
    Setattr { node: NodeSlot, changes: SetAttributes },
    Truncate { node: NodeSlot, size: u64, handle: Option<HandleSlot> },
    Readlink(NodeSlot),
    Create { place: Place, permissions: u32, flags: OpenFlags, caller: Caller },
    Mknod { place: Place, file_type: FileType, permissions: u32, device: u32, caller: Caller },
    Mkdir { place: Place, permissions: u32, caller: Caller },
    Symlink { place: Place, target: Text, caller: Caller },
    Link { node: NodeSlot, place: Place },
    Unlink(Place),
    Rmdir(Place),
    Rename { from: Place, to: Place, flags: RenameFlags },
    Open { node: NodeSlot, flags: OpenFlags },
    Release(HandleSlot),
    Read { handle: HandleSlot, offset: u64, length: usize },
    Write { handle: HandleSlot, offset: u64, length: usize, fill: u64 },
    Allocate { handle: HandleSlot, mode: AllocateMode, offset: u64, length: u64 },
    Seek { handle: HandleSlot, offset: u64, to: SeekTo },
    Fsync { handle: HandleSlot, durability: Durability },
    FlushRange { handle: HandleSlot, offset: u64, length: u64 },
    WriteHeld { handle: HandleSlot, offset: u64, length: usize, fill: u64 },
    Copy { source: HandleSlot, source_offset: u64, target: HandleSlot, target_offset: u64, length: u64 },
    Content(NodeSlot),
    List { node: NodeSlot, step: usize },
    Getxattr { node: NodeSlot, name: Text },
    Setxattr { node: NodeSlot, name: Text, value: Text, flags: XattrFlags },
    Listxattr(NodeSlot),
    Removexattr { node: NodeSlot, name: Text },
    Sync,
}

/// The bytes a write of this `fill` brings; fill 0 is zeros.
pub(super) fn bytes(fill: u64, length: usize) -> Vec<u8> {
    let mut data = vec![0; length];
    if fill != 0 {
        fastrand::Rng::with_seed(fill).fill(&mut data);
    }
    data
}
