//! The reference's state behind its lock: inodes, handles, and their lifetimes.

use super::content::Content;
use super::directory::Directory;
use crate::acl::Acl;
use crate::{Entry, Result, WrittenAt, fail};
use poolfs_types::limits::{BLOCK_SIZE, NAME_MAX};
use poolfs_types::{Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, NodeId, OpenFlags, Timestamp};
use std::collections::{BTreeMap, HashMap};
use std::time::{SystemTime, UNIX_EPOCH};

/// Most inodes of one filesystem.
const INODES_MAX: usize = 1 << 20;

/// Most open handles.
const HANDLES_MAX: usize = 1 << 20;

/// What an inode is.
#[derive(Debug)]
pub(super) enum Body {
    File(Content),
    Directory(Directory),
    Symlink(Vec<u8>),
    Special,
}

#[derive(Debug)]
pub(super) struct Inode {
    /// `size` and `blocks` of a file are those of its content: see [`Inode::shown_attributes`].
    pub(super) attributes: Attributes,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) access_acl: Option<Acl>,
    pub(super) default_acl: Option<Acl>,
    pub(super) body: Body,
    /// It has no name yet, and may get one.
    pub(super) linkable: bool,
    references: u64,
    handles: u64,
}

impl Inode {
    /// The attributes as callers see them.
    pub(super) fn shown_attributes(&self) -> Attributes {
        let mut attributes = self.attributes;
        match &self.body {
            Body::File(content) => {
                attributes.size = content.size();
                attributes.blocks = content.allocated() * (BLOCK_SIZE as u64 / 512);
            }
            Body::Symlink(target) => attributes.size = target.len() as u64,
            Body::Directory(_) => attributes.size = BLOCK_SIZE as u64,
            Body::Special => {}
        }
        attributes
    }

    /// The content or the names changed.
    pub(super) fn touch_content(&mut self) {
        self.attributes.modified = WrittenAt::now().max(self.attributes.changed);
        self.attributes.changed = self.attributes.modified;
        self.attributes.change += 1;
    }

    /// Attributes, xattrs or links changed.
    pub(super) fn touch_attributes(&mut self) {
        self.attributes.changed = now();
        self.attributes.change += 1;
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Handle {
    pub(super) inode: u64,
    pub(super) flags: OpenFlags,
}

#[derive(Debug)]
pub(super) struct State {
    inodes: HashMap<u64, Inode>,
    handles: HashMap<u64, Handle>,
    last_inode: u64,
    last_handle: u64,
    blocks_max: u64,
    blocks_used: u64,
}

/// The clock of the layer.
pub(super) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp { seconds: since.as_secs() as i64, nanoseconds: since.subsec_nanos() }
}

impl State {
    pub(super) fn new(capacity: u64) -> Self {
        let mut state = Self {
            inodes: HashMap::new(),
            handles: HashMap::new(),
            last_inode: 0,
            last_handle: 0,
            blocks_max: capacity / BLOCK_SIZE as u64,
            blocks_used: 0,
        };
        let root = state.add_inode(
            &Caller::ROOT,
            FileType::Directory,
            0o755,
            0,
            Body::Directory(Directory::new(NodeId::ROOT.0)),
        );
        if let Ok(root) = root
            && let Some(inode) = state.inodes.get_mut(&root)
        {
            inode.attributes.links = 2;
        }
        state
    }

    /// A new inode without names or references.
    pub(super) fn add_inode(
        &mut self,
        caller: &Caller,
        file_type: FileType,
        permissions: u32,
        device: u32,
        body: Body,
    ) -> Result<u64> {
        if self.inodes.len() >= INODES_MAX {
            return fail(Errno::ENOSPC);
        }
        self.last_inode += 1;
        let created = now();
        let attributes = Attributes {
            inode: self.last_inode,
            file_type,
            permissions: permissions & 0o7777,
            links: 0,
            uid: caller.uid,
            gid: caller.gid,
            device,
            size: 0,
            blocks: 0,
            accessed: created,
            modified: created,
            changed: created,
            change: 0,
        };
        let inode = Inode {
            attributes,
            xattrs: BTreeMap::new(),
            access_acl: None,
            default_acl: None,
            body,
            linkable: false,
            references: 0,
            handles: 0,
        };
        self.inodes.insert(self.last_inode, inode);
        Ok(self.last_inode)
    }

    /// The inode a caller names: it must hold a reference or a handle on it.
    pub(super) fn inode(&self, node: NodeId) -> Result<&Inode> {
        match self.inodes.get(&node.0) {
            Some(inode) if node == NodeId::ROOT || inode.references + inode.handles > 0 => Ok(inode),
            _ => fail(Errno::ESTALE),
        }
    }

    pub(super) fn inode_mut(&mut self, node: NodeId) -> Result<&mut Inode> {
        self.inode(node)?;
        self.any_inode_mut(node.0)
    }

    /// An inode that a directory names, whoever holds it.
    pub(super) fn any_inode(&self, inode: u64) -> Result<&Inode> {
        self.inodes.get(&inode).ok_or_else(|| Errno::ESTALE.into())
    }

    pub(super) fn any_inode_mut(&mut self, inode: u64) -> Result<&mut Inode> {
        self.inodes.get_mut(&inode).ok_or_else(|| Errno::ESTALE.into())
    }

    /// The names of a directory that a caller names.
    pub(super) fn directory(&self, node: NodeId) -> Result<&Directory> {
        match &self.inode(node)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => fail(Errno::ENOTDIR),
        }
    }

    /// The names of a directory known to be one.
    pub(super) fn directory_mut(&mut self, inode: u64) -> Result<&mut Directory> {
        match &mut self.any_inode_mut(inode)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => fail(Errno::ENOTDIR),
        }
    }

    /// Takes one reference for the caller.
    pub(super) fn referenced(&mut self, inode: u64) -> Result<Entry> {
        let found = self.any_inode_mut(inode)?;
        found.references += 1;
        Ok(Entry { node: NodeId(inode), attributes: found.shown_attributes() })
    }

    pub(super) fn forget(&mut self, node: NodeId, count: u64) {
        if let Some(inode) = self.inodes.get_mut(&node.0) {
            inode.references = inode.references.saturating_sub(count);
            self.drop_if_unused(node.0);
        }
    }

    /// Removes an inode that has neither names nor users.
    pub(super) fn drop_if_unused(&mut self, inode: u64) {
        let Some(found) = self.inodes.get(&inode) else { return };
        if found.attributes.links == 0 && found.references == 0 && found.handles == 0 {
            if let Body::File(content) = &found.body {
                self.blocks_used -= content.allocated();
            }
            self.inodes.remove(&inode);
        }
    }

    pub(super) fn new_handle(&mut self, node: NodeId, flags: OpenFlags) -> HandleId {
        self.last_handle += 1;
        if let Some(inode) = self.inodes.get_mut(&node.0) {
            inode.handles += 1;
        }
        self.handles.insert(self.last_handle, Handle { inode: node.0, flags });
        HandleId(self.last_handle)
    }

    /// Whether another handle may be opened.
    pub(super) fn check_handles(&self) -> Result<()> {
        if self.handles.len() < HANDLES_MAX { Ok(()) } else { fail(Errno::ENFILE) }
    }

    pub(super) fn handle(&self, handle: HandleId) -> Result<Handle> {
        self.handles.get(&handle.0).copied().ok_or_else(|| Errno::EBADF.into())
    }

    pub(super) fn release(&mut self, handle: HandleId) {
        let Some(handle) = self.handles.remove(&handle.0) else { return };
        if let Some(inode) = self.inodes.get_mut(&handle.inode) {
            inode.handles -= 1;
            self.drop_if_unused(handle.inode);
        }
    }

    pub(super) fn outstanding(&self) -> (u64, usize) {
        (self.inodes.values().map(|inode| inode.references).sum(), self.handles.len())
    }

    /// How many blocks may still be added.
    pub(super) fn room(&self) -> u64 {
        self.blocks_max.saturating_sub(self.blocks_used)
    }

    /// Runs `change` on the content of a file, keeping count of its blocks.
    pub(super) fn change_content<T>(&mut self, inode: u64, change: impl FnOnce(&mut Content) -> T) -> Result<T> {
        let found = self.any_inode_mut(inode)?;
        let Body::File(content) = &mut found.body else { return fail(Errno::EINVAL) };
        let before = content.allocated();
        let result = change(content);
        let after = content.allocated();
        self.blocks_used = self.blocks_used - before + after;
        Ok(result)
    }

    pub(super) fn statfs(&self, node: NodeId) -> Result<FileSystemStatistics> {
        self.inode(node)?;
        let files = INODES_MAX as u64;
        Ok(FileSystemStatistics {
            block_size: BLOCK_SIZE as u32,
            blocks: self.blocks_max,
            blocks_free: self.room(),
            blocks_available: self.room(),
            files,
            files_free: files - self.inodes.len() as u64,
            name_max: NAME_MAX as u32,
            has_quotas: false,
        })
    }
}
