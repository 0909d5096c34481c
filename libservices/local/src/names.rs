//! Creates and removes names.

use crate::attributes::decode_device;
use crate::directories::type_of;
use crate::error::backend;
use crate::filesystem::{open_name, stat};
use crate::local::{Handle, Local};
use crate::nodes::{Identity, Node};
use crate::open_file::{OpenFile, backing_flags};
use crate::ownership::with_umask;
use poolfs_libservice::{Entry, Result, Taken, fail};
use poolfs_types::{Caller, Errno, FileType, HandleId, Name, NodeId, OpenFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno as Raw;
use rustix::path::DecInt;
use std::sync::{Arc, PoisonError, RwLockReadGuard};

/// Longest target of a symbolic link (Linux's PATH_MAX less the terminator).
const TARGET_BYTES_MAX: usize = 4095;

/// What a removal may take the last name from.
pub(crate) struct Removal<'a> {
    announced: RwLockReadGuard<'a, ()>,
    found: Arc<OwnedFd>,
    identity: Identity,
    is_directory: bool,
    permit: Option<Taken>,
}

pub(crate) fn shared(node: &Node) -> RwLockReadGuard<'_, ()> {
    node.names.read().unwrap_or_else(PoisonError::into_inner)
}

fn mode(permissions: u32) -> Mode {
    Mode::from_raw_mode(permissions & 0o7777)
}

fn rustix_type(file_type: FileType) -> rustix::fs::FileType {
    rustix::fs::FileType::from_raw_mode(file_type.mode_bits())
}

impl Local {
    pub(crate) fn create_file(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let parent = self.directory(parent)?;
        let _names = parent.names.write().unwrap_or_else(PoisonError::into_inner);
        let directory = self.entered(&parent)?;
        let how = backing_flags(flags) | OFlags::CREATE | OFlags::EXCL;
        let create = || with_umask(caller.umask, || open_name(&directory, name.as_bytes(), how, mode(permissions)));
        let file =
            self.nodes.with_room(|| self.backing.spend(create)).map_err(|raw| backend("creating a file", raw))?;
        let made = stat(&file);
        let inode = made.as_ref().map(|made| made.stx_ino).ok();
        let opened = self.open_new(file, made, caller, permissions, flags);
        opened.inspect_err(|_| undo(&directory, name, inode, AtFlags::empty()))
    }

    /// A file without a name, of which a descriptor is kept as of one that has lost its last.
    pub(crate) fn create_nameless(
        &self,
        caller: &Caller,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let parent = self.directory(parent)?;
        if !flags.writable() {
            return fail(Errno::EINVAL);
        }
        let directory = self.entered(&parent)?;
        let exclusive = if flags.contains(OpenFlags::EXCLUSIVE) { OFlags::EXCL } else { OFlags::empty() };
        let how = backing_flags(flags) | OFlags::TMPFILE | exclusive;
        let create = || with_umask(caller.umask, || open_name(&directory, b".", how, mode(permissions)));
        let file = self
            .nodes
            .with_room(|| self.backing.spend(create))
            .map_err(|raw| backend("creating a file without a name", raw))?;
        let made = stat(&file);
        self.open_new(file, made, caller, permissions, flags)
    }

    /// Puts the owner of a new file right, which is open as `file` and was found to be `made`, and gives it a node and a handle.
    fn open_new(
        &self,
        file: OwnedFd,
        made: rustix::io::Result<Statx>,
        caller: &Caller,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)> {
        let fault = |raw| backend("giving a new file its owner", raw);
        let settle = |made| self.backing.settle(file.as_fd(), made, caller, permissions);
        let settled = made.and_then(settle).map_err(fault)?;
        let file = Arc::new(file);
        // What is kept for longer than the file is open must not be what it can be written by.
        let path = if self.backing.has_handles() && settled.stx_nlink > 0 {
            Arc::clone(&file)
        } else {
            Arc::new(self.nodes.with_room(|| self.backing.reopen(&file, OFlags::PATH)).map_err(fault)?)
        };
        let entry = self.entry_of_new(&path, &settled)?;
        let open = |node: Arc<Node>| {
            node.open_by(&file);
            self.add_handle(Handle::File(OpenFile::of_new(node, flags, file, &self.nodes.descriptors)))
        };
        let handle = self.nodes.get(entry.node).and_then(open);
        handle.map(|handle| (entry, handle)).inspect_err(|_| self.nodes.forget(entry.node, 1))
    }

    /// Makes one object that is not opened: `make` gives it its name, everything else is common.
    fn make(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        make: impl Fn(&OwnedFd) -> rustix::io::Result<()>,
        remove: AtFlags,
    ) -> Result<Entry> {
        let parent = self.directory(parent)?;
        let fault = |raw| backend("making a new name", raw);
        let _names = parent.names.write().unwrap_or_else(PoisonError::into_inner);
        let directory = self.entered(&parent)?;
        self.backing.spend(|| with_umask(caller.umask, || make(&directory))).map_err(fault)?;
        let made = self.nodes.with_room(|| open_name(&directory, name.as_bytes(), OFlags::PATH, Mode::empty()));
        let made = made.map_err(fault).inspect_err(|_| undo(&directory, name, None, remove))?;
        let seen = stat(&made);
        let inode = seen.as_ref().map(|seen| seen.stx_ino).ok();
        let settled = seen.and_then(|seen| self.backing.settle(made.as_fd(), seen, caller, permissions));
        let entry = settled.map_err(fault).and_then(|settled| self.entry_of_new(&Arc::new(made), &settled));
        entry.inspect_err(|_| undo(&directory, name, inode, remove))
    }

    pub(crate) fn make_node(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Result<Entry> {
        if matches!(file_type, FileType::Directory | FileType::Symlink) {
            self.directory(parent)?;
            return fail(Errno::EINVAL);
        }
        let device = match file_type {
            FileType::CharDevice | FileType::BlockDevice => {
                let (major, minor) = decode_device(device);
                rustix::fs::makedev(major, minor)
            }
            _ => 0,
        };
        let make = |directory: &OwnedFd| {
            rustix::fs::mknodat(directory, name.as_bytes(), rustix_type(file_type), mode(permissions), device)
        };
        self.make(caller, parent, name, permissions, make, AtFlags::empty())
    }

    pub(crate) fn make_directory(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
    ) -> Result<Entry> {
        let make = |directory: &OwnedFd| rustix::fs::mkdirat(directory, name.as_bytes(), mode(permissions));
        self.make(caller, parent, name, permissions, make, AtFlags::REMOVEDIR)
    }

    pub(crate) fn make_symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry> {
        self.directory(parent)?;
        if target.is_empty() {
            return fail(Errno::ENOENT);
        }
        if target.len() > TARGET_BYTES_MAX {
            return fail(Errno::ENAMETOOLONG);
        }
        if target.contains(&0) {
            return fail(Errno::EINVAL);
        }
        let make = |directory: &OwnedFd| rustix::fs::symlinkat(target, directory, name.as_bytes());
        self.make(caller, parent, name, 0o777, make, AtFlags::empty())
    }

    pub(crate) fn make_link(&self, id: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let node = self.nodes.get(id)?;
        let parent = self.directory(parent)?;
        let _names = shared(&parent);
        let directory = self.entered(&parent)?;
        let descriptor = self.nodes.descriptor(&node)?;
        let number = DecInt::from_fd(descriptor.as_fd());
        let (from, name) = (number.as_c_str(), name.as_bytes());
        if !self.nodes.acquire_again(&node) {
            return fail(Errno::ESTALE);
        }
        let link = || rustix::fs::linkat(self.backing.proc(), from, &directory, name, AtFlags::SYMLINK_FOLLOW);
        // The node is in the table all the time: whoever removes the last name finds it there.
        let linked = self.backing.spend(link).and_then(|()| stat(&descriptor));
        match linked {
            Ok(now) => Ok(Entry { node: node.id, attributes: self.attributes(&now) }),
            Err(raw) => {
                self.nodes.forget(node.id, 1);
                Err(backend("making a link", raw))
            }
        }
    }

    pub(crate) fn remove(&self, parent: NodeId, name: Name<'_>, flags: AtFlags) -> Result<()> {
        let parent = self.directory(parent)?;
        self.changeable()?;
        let _names = shared(&parent);
        let directory = self.entered(&parent)?;
        let removal = self.removal(&directory, name)?;
        rustix::fs::unlinkat(&directory, name.as_bytes(), flags).map_err(|raw| backend("removing a name", raw))?;
        self.removed(removal);
        Ok(())
    }

    /// Removes a name of `victim`, which its caller holds. If it is the last name, a descriptor is kept; whether it is, the caller may know.
    /// Where either is wrong, because others change names behind the layer's back, what has really lost its name is as if they had removed it.
    pub(crate) fn remove_known(
        &self,
        parent: NodeId,
        name: Name<'_>,
        victim: NodeId,
        is_last: Option<bool>,
    ) -> Result<()> {
        let directory = self.directory(parent)?;
        self.changeable()?;
        let known = self.nodes.get(victim).ok().filter(|victim| victim.file_type != FileType::Directory);
        let Some(victim) = known else { return self.remove(parent, name, AtFlags::empty()) };
        let kept = if is_last == Some(false) || victim.is_kept() {
            None
        } else {
            let Ok(found) = self.keepable(&victim) else { return self.remove(parent, name, AtFlags::empty()) };
            Some((found, self.nodes.permit()?))
        };
        let _names = shared(&directory);
        let directory = self.entered(&directory)?;
        let _announced = self.nodes.begin_removal();
        rustix::fs::unlinkat(&directory, name.as_bytes(), AtFlags::empty())
            .map_err(|raw| backend("removing a name", raw))?;
        if let Some((found, permit)) = kept
            && (is_last == Some(true) || stat(&found).is_ok_and(|now| now.stx_nlink == 0))
        {
            self.nodes.keep(&victim, &found, permit);
        }
        Ok(())
    }

    /// A descriptor of a node that may be kept for longer than any file is open.
    fn keepable(&self, node: &Node) -> Result<Arc<OwnedFd>> {
        let found = self.nodes.descriptor(node)?;
        if !node.is_open_by(&found) {
            return Ok(found);
        }
        let path = self.nodes.with_room(|| self.backing.reopen(&found, OFlags::PATH));
        path.map(Arc::new).map_err(|raw| backend("removing a name", raw))
    }

    /// Takes hold of what `name` is, before the name goes.
    pub(crate) fn removal(&self, directory: &OwnedFd, name: Name<'_>) -> Result<Option<Removal<'_>>> {
        let fault = |raw| backend("removing a name", raw);
        let open = || open_name(directory, name.as_bytes(), OFlags::PATH, Mode::empty());
        let found = match self.nodes.with_room(open) {
            Ok(found) => Arc::new(found),
            Err(raw @ (Raw::MFILE | Raw::NFILE)) => return Err(fault(raw)),
            // The call itself says what is wrong.
            Err(_) => return Ok(None),
        };
        let seen = stat(&found).map_err(fault)?;
        let identity = self.backing.identity(&found, &seen).map_err(fault)?;
        let held = self.nodes.held(&identity).is_some_and(|node| !node.is_kept());
        let permit = match self.nodes.permit() {
            Err(error) if held => return Err(error),
            permit => permit.ok(),
        };
        let is_directory = type_of(&seen) == FileType::Directory;
        Ok(Some(Removal { announced: self.nodes.begin_removal(), found, identity, is_directory, permit }))
    }

    /// Keeps a descriptor of what lost its last name while somebody holds it.
    pub(crate) fn removed(&self, removal: Option<Removal<'_>>) {
        let Some(Removal { announced, found, identity, is_directory, permit: Some(permit) }) = removal else { return };
        // Directories have one name; not every filesystem counts it.
        let gone = is_directory || stat(&found).is_ok_and(|now| now.stx_nlink == 0);
        if gone && let Some(node) = self.nodes.held(&identity) {
            self.nodes.keep(&node, &found, permit);
        }
        drop(announced);
    }
}

/// Removes what a failed call has made: the name, unless it is known to be something else by now.
fn undo(directory: &OwnedFd, name: Name<'_>, made: Option<u64>, flags: AtFlags) {
    let here = rustix::fs::statx(directory, name.as_bytes(), AtFlags::SYMLINK_NOFOLLOW, StatxFlags::INO);
    if !here.is_ok_and(|here| made.is_none_or(|made| made == here.stx_ino)) {
        return;
    }
    if let Err(raw) = rustix::fs::unlinkat(directory, name.as_bytes(), flags) {
        tracing::warn!(%name, %raw, "a failed create left its name behind");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_failed_call_has_made_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let directory = OwnedFd::from(std::fs::File::open(folder.path()).expect("the folder"));
        let (ours, name) = (folder.path().join("x"), Name::new(b"x").expect("a name"));
        let made = OwnedFd::from(std::fs::File::create(&ours).expect("a file"));
        let inode = stat(&made).map(|made| made.stx_ino).expect("attributes");
        // Somebody who knows nothing of this layer has put another file in its place.
        std::fs::write(folder.path().join("other"), "theirs").expect("another file");
        std::fs::rename(folder.path().join("other"), &ours).expect("moved");
        undo(&directory, name, Some(inode), AtFlags::empty());
        assert_eq!(std::fs::read(&ours).expect("theirs is there"), b"theirs");
        let theirs = std::fs::File::open(&ours).expect("theirs is there");
        undo(&directory, name, stat(&theirs).map(|theirs| theirs.stx_ino).ok(), AtFlags::empty());
        assert!(!ours.exists());
    }
}
