//! The generator of random operations: it chooses by the seed and by the reference's state, so that most operations make sense
//! and some do not.

use super::inodes::EXPLICIT_BEFORE;
use super::operation::{HandleSlot, NodeSlot, Operation, Place, Text};
use super::tree::names;
use super::world::{HeldHandle, ROOT_USER, World};
use crate::conformance::Capability;
use crate::types::{
    AllocateMode, Caller, FileType, OpenFlags, RenameFlags, SeekTo, SetAttributes, SetTime, Timestamp, XattrFlags,
};
use crate::{Durability, Libservice};
use fastrand::Rng;

/// Most nodes and handles a program holds at once.
const NODES_MAX: usize = 40;
const HANDLES_MAX: usize = 16;

/// Writes start below this, so that whole files can be compared often.
const OFFSET_MAX: u64 = 3 << 20;

const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

pub(super) struct Generator {
    random: Rng,
    lacking: Vec<Capability>,
}

impl Generator {
    pub(super) fn new(seed: u64, lacking: Vec<Capability>) -> Self {
        Self { random: Rng::with_seed(seed), lacking }
    }

    pub(super) fn next(&mut self, world: &World) -> Operation {
        if world.nodes.len() > NODES_MAX {
            return Operation::Forget(self.random.usize(1..world.nodes.len()));
        }
        if world.handles.len() > HANDLES_MAX {
            return Operation::Release(self.random.usize(0..world.handles.len()));
        }
        match self.random.u8(0..100) {
            0..30 => self.about_names(world),
            30..45 => self.about_nodes(world),
            45..55 => self.about_xattrs(world),
            55..62 => Operation::Open { node: self.regular(world), flags: self.open_flags() },
            _ => self.about_handles(world).unwrap_or_else(|| self.create(world)),
        }
    }

    fn about_names(&mut self, world: &World) -> Operation {
        match self.random.u8(0..31) {
            0..7 => Operation::Lookup(self.existing(world)),
            7..11 => self.create(world),
            11..13 => self.mknod(world),
            13..16 => {
                Operation::Mkdir { place: self.place(world), permissions: self.permissions(), caller: self.caller() }
            }
            16..18 => Operation::Symlink { place: self.place(world), target: self.target(), caller: self.caller() },
            18..20 => Operation::Link { node: self.linkable(world), place: self.place(world) },
            20..23 => Operation::Unlink(self.existing(world)),
            23..25 => Operation::Rmdir(self.existing(world)),
            25..29 => {
                let to = if self.random.bool() { self.existing(world) } else { self.place(world) };
                Operation::Rename { from: self.existing(world), to, flags: self.rename_flags() }
            }
            _ => Operation::List { node: self.directory(world), step: 1 + self.random.usize(0..20) },
        }
    }

    fn about_nodes(&mut self, world: &World) -> Operation {
        let node = self.random.usize(0..world.nodes.len());
        match self.random.u8(0..20) {
            0..4 => Operation::Getattr(node),
            4..7 if node != 0 => Operation::Forget(node),
            7..12 => self.setattr(world, node),
            12..15 => self.truncate(world),
            15 => Operation::Readlink(node),
            16 => Operation::Sync,
            _ => Operation::Content(self.regular(world)),
        }
    }

    fn about_handles(&mut self, world: &World) -> Option<Operation> {
        if world.handles.is_empty() {
            return None;
        }
        let handle = self.random.usize(0..world.handles.len());
        let held = world.handles[handle];
        let offset = self.offset(world, held);
        Some(match self.random.u8(0..38) {
            0..3 => Operation::Release(handle),
            3..11 => Operation::Read { handle, offset, length: self.length() },
            11..25 => Operation::Write { handle, offset, length: self.length(), fill: self.fill() },
            25..29 => return self.allocate(world, handle, offset),
            29..31 => {
                let to = if self.random.bool() { SeekTo::Data } else { SeekTo::Hole };
                Operation::Seek { handle, offset, to }
            }
            31..33 => {
                let durability = if self.random.bool() { Durability::Data } else { Durability::All };
                Operation::Fsync { handle, durability }
            }
            33 => Operation::FlushRange { handle, offset, length: self.length() as u64 },
            34 => Operation::WriteHeld { handle, offset, length: self.length(), fill: self.fill() },
            _ => self.copy(world, handle, offset)?,
        })
    }

    fn about_xattrs(&mut self, world: &World) -> Operation {
        let mut node = self.random.usize(0..world.nodes.len());
        if world.nodes[node].file_type == FileType::CharDevice {
            // Perhaps a whiteout, whose access lists are the backend's business.
            node = 0;
        }
        let plain: Vec<&[u8]> = [
            (Capability::UserXattrs, b"user.a".as_slice()),
            (Capability::UserXattrs, b"user.b"),
            (Capability::TrustedXattrs, b"trusted.poolfs-test"),
            (Capability::SecurityXattrs, b"security.poolfs-test"),
        ]
        .into_iter()
        .filter_map(|(capability, name)| self.offers(capability).then_some(name))
        .collect();
        let acl = self.offers(Capability::Acls) && self.random.u8(0..3) == 0;
        let name = match self.random.choice(&plain) {
            _ if acl => ACLS[self.random.usize(0..2)],
            Some(name) => name,
            None => return Operation::Getattr(node),
        };
        let text = Text(name.to_vec());
        match self.random.u8(0..10) {
            0..5 if acl => {
                let value = self.acl();
                Operation::Setxattr { node, name: text, value, flags: XattrFlags::empty() }
            }
            0..5 => {
                let value = Text((0..self.random.usize(0..100)).map(|_| self.random.u8(..)).collect());
                let flags = [XattrFlags::empty(), XattrFlags::empty(), XattrFlags::CREATE, XattrFlags::REPLACE];
                Operation::Setxattr { node, name: text, value, flags: flags[self.random.usize(0..4)] }
            }
            5 | 6 => Operation::Getxattr { node, name: text },
            7 => Operation::Listxattr(node),
            // Removing a list that is not there is answered in two ways on Linux.
            _ if acl && !has_xattr(world, node, name) => Operation::Getxattr { node, name: text },
            _ => Operation::Removexattr { node, name: text },
        }
    }

    fn create(&mut self, world: &World) -> Operation {
        let flags = self.open_flags() - OpenFlags::TRUNCATE;
        Operation::Create { place: self.place(world), permissions: self.permissions(), flags, caller: self.caller() }
    }

    fn mknod(&mut self, world: &World) -> Operation {
        let (file_type, device) = match self.random.u8(0..5) {
            0 => (FileType::Fifo, 0),
            1 => (FileType::Socket, 0),
            2 if self.offers(Capability::Devices) => (FileType::CharDevice, 0x0501),
            3 if self.offers(Capability::Devices) => (FileType::BlockDevice, 0x0010_0702),
            _ => (FileType::Regular, 0),
        };
        let (permissions, caller) = (self.permissions(), self.caller());
        Operation::Mknod { place: self.place(world), file_type, permissions, device, caller }
    }

    /// Set-id bits and owners of a file are changed together, so that nobody has to guess which a chown clears.
    fn setattr(&mut self, world: &World, node: NodeSlot) -> Operation {
        let file_type = world.nodes[node].file_type;
        let mut changes = SetAttributes::default();
        if self.random.u8(0..3) == 0 {
            changes.uid = self.random.bool().then(|| self.random.u32(0..3) * 1000);
            changes.gid = self.random.bool().then(|| self.random.u32(0..3) * 1000);
        }
        let owner = changes.uid.is_some() || changes.gid.is_some();
        if file_type != FileType::Symlink && (owner || self.random.bool()) {
            changes.permissions = Some(self.permissions());
        }
        if self.random.bool() {
            changes.accessed = Some(SetTime::At(self.explicit_time()));
        }
        match self.random.u8(0..5) {
            0..3 => changes.modified = Some(SetTime::At(self.explicit_time())),
            3 => changes.modified = Some(SetTime::Now),
            _ => {}
        }
        Operation::Setattr { node, changes }
    }

    fn truncate(&mut self, world: &World) -> Operation {
        let writable = world.handles.iter().position(|held| held.flags.writable());
        let handle = writable.filter(|_| self.random.bool());
        let size = if self.random.bool() {
            self.random.u64(0..20_000)
        } else {
            let block = self.random.u64(0..OFFSET_MAX / 4096) * 4096;
            (block + self.random.u64(0..5)).saturating_sub(2)
        };
        Operation::Truncate { node: self.regular(world), size, handle }
    }

    fn allocate(&mut self, world: &World, handle: HandleSlot, offset: u64) -> Option<Operation> {
        let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
        let mut modes = Vec::new();
        if self.offers(Capability::Allocation) {
            modes.extend([AllocateMode::empty(), AllocateMode::KEEP_SIZE]);
        }
        if self.offers(Capability::Holes) && offset < size_of(world, world.handles[handle]) {
            modes.extend([punch, punch]);
        }
        if self.offers(Capability::ZeroRange) {
            modes.extend([AllocateMode::ZERO_RANGE, AllocateMode::ZERO_RANGE | AllocateMode::KEEP_SIZE]);
        }
        if modes.is_empty() {
            return None;
        }
        let mode = modes[self.random.usize(0..modes.len())];
        Some(Operation::Allocate { handle, mode, offset, length: self.length() as u64 })
    }

    /// Between different files, to a handle that does not append: the rest is up to the backend.
    fn copy(&mut self, world: &World, source: HandleSlot, source_offset: u64) -> Option<Operation> {
        let targets: Vec<HandleSlot> = (0..world.handles.len())
            .filter(|&slot| world.handles[slot].node != world.handles[source].node)
            .filter(|&slot| !world.handles[slot].flags.contains(OpenFlags::APPEND))
            .collect();
        let target = *self.random.choice(&targets)?;
        let target_offset = self.offset(world, world.handles[target]);
        let length = self.length() as u64;
        Some(Operation::Copy { source, source_offset, target, target_offset, length })
    }

    fn offers(&self, capability: Capability) -> bool {
        !self.lacking.contains(&capability)
    }

    /// A directory, mostly.
    fn directory(&mut self, world: &World) -> NodeSlot {
        self.of_type(world, 30, |file_type| file_type == FileType::Directory)
    }

    /// A regular file, mostly.
    fn regular(&mut self, world: &World) -> NodeSlot {
        self.of_type(world, 15, |file_type| file_type == FileType::Regular)
    }

    /// Anything but a directory, mostly.
    fn linkable(&mut self, world: &World) -> NodeSlot {
        self.of_type(world, 10, |file_type| file_type != FileType::Directory)
    }

    fn of_type(&mut self, world: &World, exception: u8, wanted: impl Fn(FileType) -> bool) -> NodeSlot {
        let fitting: Vec<NodeSlot> =
            (0..world.nodes.len()).filter(|&slot| wanted(world.nodes[slot].file_type)).collect();
        match self.random.choice(&fitting) {
            Some(&slot) if self.random.u8(0..exception) != 0 => slot,
            _ => self.random.usize(0..world.nodes.len()),
        }
    }

    /// A name out of few, in some directory.
    fn place(&mut self, world: &World) -> Place {
        let name = match self.random.usize(0..20) {
            0 => vec![b'l'; 255],
            1 => b"\xff\xfe \n".to_vec(),
            at => vec![b'a' + at as u8],
        };
        Place { parent: self.directory(world), name: Text(name) }
    }

    /// A name that exists, mostly.
    fn existing(&mut self, world: &World) -> Place {
        let place = self.place(world);
        let all = names(&*world.reference, world.nodes[place.parent].id.reference);
        match self.random.choice(&all) {
            Some(name) if self.random.u8(0..8) != 0 => Place { name: Text(name.clone()), ..place },
            _ => place,
        }
    }

    fn rename_flags(&mut self) -> RenameFlags {
        if !self.offers(Capability::RenameFlags) {
            return RenameFlags::empty();
        }
        match self.random.u8(0..12) {
            0 => RenameFlags::NO_REPLACE,
            1..4 => RenameFlags::EXCHANGE,
            4 if self.offers(Capability::Devices) => RenameFlags::WHITEOUT,
            _ => RenameFlags::empty(),
        }
    }

    fn open_flags(&mut self) -> OpenFlags {
        let access = [OpenFlags::READ_ONLY, OpenFlags::WRITE_ONLY, OpenFlags::READ_WRITE, OpenFlags::READ_WRITE];
        let mut flags = access[self.random.usize(0..4)];
        flags.set(OpenFlags::APPEND, self.random.u8(0..8) == 0);
        flags.set(OpenFlags::TRUNCATE, self.random.u8(0..10) == 0);
        flags.set(OpenFlags::DATA_SYNC, self.random.u8(0..30) == 0);
        flags
    }

    fn permissions(&mut self) -> u32 {
        let special = if self.random.u8(0..6) == 0 { self.random.u32(0..8) << 9 } else { 0 };
        special | self.random.u32(0..0o1000)
    }

    fn caller(&mut self) -> Caller {
        let umasks = [0, 0o022, 0o077];
        Caller {
            uid: self.random.u32(0..3) * 1000,
            gid: self.random.u32(0..3) * 1000,
            umask: umasks[self.random.usize(0..3)],
        }
    }

    fn target(&mut self) -> Text {
        let length = if self.random.u8(0..5) == 0 { 1000 } else { 20 };
        Text((0..1 + self.random.usize(0..length)).map(|_| self.random.u8(1..)).collect())
    }

    fn explicit_time(&mut self) -> Timestamp {
        let seconds = self.random.i64(0..EXPLICIT_BEFORE);
        Timestamp { seconds, nanoseconds: self.random.u32(0..1_000_000_000) }
    }

    fn acl(&mut self) -> Text {
        let mut value = 2u32.to_le_bytes().to_vec();
        let mut entry = |tag: u16, permissions: u16, id: u32| {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        };
        let mut permissions = || self.random.u16(0..8);
        let named = permissions() > 1;
        entry(0x01, permissions(), u32::MAX);
        if named {
            entry(0x02, permissions(), 1000);
        }
        entry(0x04, permissions(), u32::MAX);
        if named {
            entry(0x08, permissions(), 2000);
            entry(0x10, permissions(), u32::MAX);
        }
        entry(0x20, permissions(), u32::MAX);
        Text(value)
    }

    fn offset(&mut self, world: &World, held: HeldHandle) -> u64 {
        let size = size_of(world, held);
        match self.random.u8(0..10) {
            0..2 => self.random.u64(0..100),
            2..5 => {
                let block = self.random.u64(0..64) * 4096;
                (block + self.random.u64(0..5)).saturating_sub(2)
            }
            5..7 => (size + self.random.u64(0..10)).saturating_sub(5),
            7..9 => self.random.u64(0..=size),
            _ => self.random.u64(0..OFFSET_MAX),
        }
    }

    fn length(&mut self) -> usize {
        match self.random.u8(0..20) {
            0..7 => 1 + self.random.usize(0..100),
            7..11 => 4096,
            11..14 => 4094 + self.random.usize(0..5),
            14..19 => 1 + self.random.usize(0..20_000),
            _ => 1 + self.random.usize(0..300_000),
        }
    }

    fn fill(&mut self) -> u64 {
        if self.random.u8(0..10) == 0 { 0 } else { self.random.u64(1..) }
    }
}

fn size_of(world: &World, held: HeldHandle) -> u64 {
    world.reference.getattr(&ROOT_USER, held.node.reference).map_or(0, |attributes| attributes.size)
}

fn has_xattr(world: &World, node: NodeSlot, name: &[u8]) -> bool {
    world.reference.getxattr(&ROOT_USER, world.nodes[node].id.reference, name).is_ok()
}
