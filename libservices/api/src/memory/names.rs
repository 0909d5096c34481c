//! Operations of the reference on names: looking up, creating, linking, removing and renaming.

use super::content::Content;
use super::directory::Directory;
use super::state::{Body, State};
use crate::{Entry, Result, fail};
use poolfs_types::{Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags, RenameFlags};

/// Most bytes of a symbolic link's target.
const TARGET_MAX: usize = 4095;

/// Most hard links of one object.
const LINKS_MAX: u32 = 65_000;

/// A directory and a name in it.
type Place<'a> = (NodeId, Name<'a>);

/// One entry of a listing.
pub(super) struct Listed {
    pub(super) name: Box<[u8]>,
    pub(super) inode: u64,
    pub(super) file_type: FileType,
    pub(super) cookie: u64,
}

impl State {
    pub(super) fn lookup(&mut self, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let inode = self.existing(parent, name)?;
        self.referenced(inode)
    }

    pub(super) fn mknod(
        &mut self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Result<Entry> {
        self.directory(parent)?;
        let (body, device) = match file_type {
            FileType::Directory | FileType::Symlink => return fail(Errno::EINVAL),
            FileType::Regular => (Body::File(Content::default()), 0),
            FileType::CharDevice | FileType::BlockDevice => (Body::Special, device),
            FileType::Fifo | FileType::Socket => (Body::Special, 0),
        };
        self.check_handles()?;
        self.check_free(parent, name)?;
        let inode = self.add_inode(caller, file_type, permissions, device, body)?;
        self.inherit_acl(caller, parent, inode)?;
        self.give_name(parent, name, inode)?;
        self.referenced(inode)
    }

    pub(super) fn tmpfile(
        &mut self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        self.directory(parent)?;
        if !flags.writable() {
            return fail(Errno::EINVAL);
        }
        self.check_handles()?;
        let inode = self.add_inode(caller, FileType::Regular, permissions, 0, Body::File(Content::default()))?;
        self.inherit_acl(caller, parent, inode)?;
        self.any_inode_mut(inode)?.linkable = !flags.contains(OpenFlags::EXCLUSIVE);
        let entry = self.referenced(inode)?;
        Ok((entry, self.new_handle(entry.node, flags)))
    }

    pub(super) fn mkdir(&mut self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry> {
        self.check_free(parent, name)?;
        if self.inode(parent)?.attributes.links >= LINKS_MAX {
            return fail(Errno::EMLINK);
        }
        let body = Body::Directory(Directory::new(parent.0));
        let inode = self.add_inode(caller, FileType::Directory, permissions, 0, body)?;
        self.inherit_acl(caller, parent, inode)?;
        self.give_name(parent, name, inode)?;
        self.any_inode_mut(inode)?.attributes.links = 2;
        self.inode_mut(parent)?.attributes.links += 1;
        self.referenced(inode)
    }

    pub(super) fn symlink(&mut self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.directory(parent)?;
        if target.is_empty() {
            return fail(Errno::ENOENT);
        }
        if target.len() > TARGET_MAX {
            return fail(Errno::ENAMETOOLONG);
        }
        if target.contains(&0) {
            return fail(Errno::EINVAL);
        }
        self.check_free(parent, name)?;
        let inode = self.add_inode(caller, FileType::Symlink, 0o777, 0, Body::Symlink(target.to_vec()))?;
        self.give_name(parent, name, inode)?;
        self.referenced(inode)
    }

    pub(super) fn readlink(&self, node: NodeId) -> Result<Vec<u8>> {
        match &self.inode(node)?.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => fail(Errno::EINVAL),
        }
    }

    pub(super) fn link(&mut self, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let links = self.inode(node)?.attributes.links;
        self.check_free(parent, name)?;
        if self.inode(node)?.attributes.is_directory() {
            return fail(Errno::EPERM);
        }
        if links == 0 && !self.inode(node)?.linkable {
            return fail(Errno::ENOENT);
        }
        if links >= LINKS_MAX {
            return fail(Errno::EMLINK);
        }
        self.give_name(parent, name, node.0)?;
        let linked = self.any_inode_mut(node.0)?;
        linked.linkable = false;
        linked.touch_attributes();
        self.referenced(node.0)
    }

    pub(super) fn unlink(&mut self, parent: NodeId, name: Name<'_>) -> Result<()> {
        let inode = self.existing(parent, name)?;
        if self.any_inode(inode)?.attributes.is_directory() {
            return fail(Errno::EISDIR);
        }
        self.take_name(parent, name)?;
        self.lose_name(inode)
    }

    pub(super) fn rmdir(&mut self, parent: NodeId, name: Name<'_>) -> Result<()> {
        let inode = self.existing(parent, name)?;
        if !self.directory_mut(inode)?.is_empty() {
            return fail(Errno::ENOTEMPTY);
        }
        self.take_name(parent, name)?;
        self.inode_mut(parent)?.attributes.links -= 1;
        self.lose_name(inode)
    }

    pub(super) fn rename(&mut self, caller: &Caller, from: Place<'_>, to: Place<'_>, flags: RenameFlags) -> Result<()> {
        self.directory(from.0)?;
        self.directory(to.0)?;
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        if exchange && flags.intersects(RenameFlags::NO_REPLACE | RenameFlags::WHITEOUT)
            || !RenameFlags::all().contains(flags)
        {
            return fail(Errno::EINVAL);
        }
        let source = self.existing(from.0, from.1)?;
        let target = self.directory(to.0)?.get(to.1.as_bytes());
        if target.is_none() && (exchange || self.inode(to.0)?.attributes.links == 0) {
            return fail(Errno::ENOENT);
        }
        if target.is_some() && flags.contains(RenameFlags::NO_REPLACE) {
            return fail(Errno::EEXIST);
        }
        if self.lies_within(to.0.0, source)? {
            return fail(Errno::EINVAL);
        }
        if let Some(target) = target {
            if target == source {
                return Ok(());
            }
            if self.lies_within(from.0.0, target)? {
                return fail(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
            }
        }
        match target {
            Some(target) if exchange => self.exchange((from, source), (to, target)),
            _ => self.replace((from, source), (to, target), flags.contains(RenameFlags::WHITEOUT).then_some(caller)),
        }
    }

    fn exchange(&mut self, (from, source): (Place<'_>, u64), (to, target): (Place<'_>, u64)) -> Result<()> {
        self.point(from, target)?;
        self.point(to, source)?;
        self.moved(source, from.0, to.0)?;
        self.moved(target, to.0, from.0)
    }

    fn replace(
        &mut self,
        (from, source): (Place<'_>, u64),
        (to, target): (Place<'_>, Option<u64>),
        whiteout_by: Option<&Caller>,
    ) -> Result<()> {
        if let Some(target) = target {
            let source_is_directory = self.any_inode(source)?.attributes.is_directory();
            match (&self.any_inode(target)?.body, source_is_directory) {
                (Body::Directory(_), false) => return fail(Errno::EISDIR),
                (Body::Directory(names), true) if !names.is_empty() => return fail(Errno::ENOTEMPTY),
                (Body::Directory(_), true) => {}
                (_, true) => return fail(Errno::ENOTDIR),
                (_, false) => {}
            }
        }
        let whiteout = match whiteout_by {
            Some(caller) => Some(self.add_inode(caller, FileType::CharDevice, 0, 0, Body::Special)?),
            None => None,
        };
        self.point(to, source)?;
        match whiteout {
            Some(whiteout) => {
                self.point(from, whiteout)?;
                self.any_inode_mut(whiteout)?.attributes.links = 1;
            }
            None => self.take_name(from.0, from.1)?,
        }
        self.moved(source, from.0, to.0)?;
        if let Some(target) = target {
            if self.any_inode(target)?.attributes.is_directory() {
                self.any_inode_mut(to.0.0)?.attributes.links -= 1;
            }
            self.lose_name(target)?;
        }
        Ok(())
    }

    /// The entries after `cookie`.
    pub(super) fn listing(&self, handle: HandleId, cookie: u64) -> Result<Vec<Listed>> {
        let inode = self.any_inode(self.handle(handle)?.inode)?;
        let Body::Directory(directory) = &inode.body else { return fail(Errno::EBADF) };
        directory
            .after(cookie)
            .map(|(name, cookie, inode)| {
                let file_type = self.any_inode(inode)?.attributes.file_type;
                Ok(Listed { name: name.into(), inode, file_type, cookie })
            })
            .collect()
    }

    /// What a name leads to; nothing where that cannot be said.
    pub(super) fn named(&self, parent: NodeId, name: Name<'_>) -> Option<NodeId> {
        self.existing(parent, name).ok().map(NodeId)
    }

    /// The inode a name leads to.
    fn existing(&self, parent: NodeId, name: Name<'_>) -> Result<u64> {
        self.directory(parent)?.get(name.as_bytes()).ok_or_else(|| Errno::ENOENT.into())
    }

    /// Whether a name may be made.
    fn check_free(&self, parent: NodeId, name: Name<'_>) -> Result<()> {
        if self.directory(parent)?.get(name.as_bytes()).is_some() {
            return fail(Errno::EEXIST);
        }
        if self.inode(parent)?.attributes.links == 0 {
            return fail(Errno::ENOENT);
        }
        Ok(())
    }

    fn give_name(&mut self, parent: NodeId, name: Name<'_>, inode: u64) -> Result<()> {
        self.point((parent, name), inode)?;
        self.any_inode_mut(inode)?.attributes.links += 1;
        Ok(())
    }

    /// Makes a name lead somewhere; links are the caller's business.
    fn point(&mut self, (parent, name): Place<'_>, inode: u64) -> Result<()> {
        self.directory_mut(parent.0)?.set(name.as_bytes(), inode);
        self.any_inode_mut(parent.0)?.touch_content();
        Ok(())
    }

    fn take_name(&mut self, parent: NodeId, name: Name<'_>) -> Result<()> {
        self.directory_mut(parent.0)?.remove(name.as_bytes());
        self.any_inode_mut(parent.0)?.touch_content();
        Ok(())
    }

    /// Counts one link less; a directory loses its own `.` too.
    fn lose_name(&mut self, inode: u64) -> Result<()> {
        let found = self.any_inode_mut(inode)?;
        found.attributes.links = if found.attributes.is_directory() { 0 } else { found.attributes.links - 1 };
        found.touch_attributes();
        self.drop_if_unused(inode);
        Ok(())
    }

    /// What a move means for the object itself and, if it is a directory, for the links of the parents.
    fn moved(&mut self, inode: u64, from: NodeId, to: NodeId) -> Result<()> {
        let found = self.any_inode_mut(inode)?;
        found.touch_attributes();
        if let Body::Directory(directory) = &mut found.body {
            directory.parent = to.0;
            self.any_inode_mut(from.0)?.attributes.links -= 1;
            self.any_inode_mut(to.0)?.attributes.links += 1;
        }
        Ok(())
    }

    /// Whether directory `inode` is `ancestor` or below it.
    fn lies_within(&self, mut inode: u64, ancestor: u64) -> Result<bool> {
        loop {
            if inode == ancestor {
                return Ok(true);
            }
            let Body::Directory(directory) = &self.any_inode(inode)?.body else { return Ok(false) };
            if directory.parent == inode {
                return Ok(false);
            }
            inode = directory.parent;
        }
    }
}
