//! Open directories: listings in chunks that can be resumed at any cookie.

use crate::descriptors::Slot;
use crate::error::backend;
use crate::local::{Handle, Local};
use crate::nodes::lock;
use crate::open_directory::{OpenDirectory, OpenedDirectory, raw_cookie, shown_cookie};
use poolfs_libservice::{DirectoryEntry, Result};
use poolfs_types::{HandleId, Name, NodeId};
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

impl Local {
    pub(crate) fn open_directory(&self, id: NodeId) -> Result<HandleId> {
        let node = self.directory(id)?;
        let descriptor = self.entered(&node)?;
        let open = OpenDirectory { node, opened: Slot::new(), progress: Mutex::default() };
        open.opened.put(&self.nodes.descriptors, Arc::new(self.open_listing(&descriptor)?));
        self.add_handle(Handle::Directory(open))
    }

    fn open_listing(&self, descriptor: &OwnedFd) -> Result<OpenedDirectory> {
        let reopen = || self.backing.reopen(descriptor, OFlags::RDONLY | OFlags::DIRECTORY);
        let directory = self.nodes.with_room(reopen).map_err(|raw| backend("opening a directory", raw))?;
        Ok(OpenedDirectory { directory, position: AtomicU64::new(0) })
    }

    /// The descriptor of an open directory, which stays open as long as it is used.
    pub(crate) fn opened_directory(&self, open: &OpenDirectory) -> Result<Arc<OpenedDirectory>> {
        open.opened.get(&self.nodes.descriptors, || {
            self.nodes.descriptor(&open.node).and_then(|path| self.open_listing(&path))
        })
    }

    pub(crate) fn list(
        &self,
        open: &OpenDirectory,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let opened = self.opened_directory(open)?;
        let mut cookie = raw_cookie(cookie);
        // The callback runs without the lock: it may list again, and it may take its time.
        while let Some(chunk) = open.chunk(&opened, cookie).map_err(|raw| backend("listing a directory", raw))? {
            let next = chunk.index_after(cookie).unwrap_or(0);
            for entry in &chunk.entries[next..] {
                let Ok(name) = Name::new(&chunk.names[entry.name.clone()]) else { continue };
                let inode = self.backing.shown_inode(open.node.device, entry.inode);
                if visit(DirectoryEntry { name, inode, file_type: entry.file_type, cookie: shown_cookie(entry.cookie) })
                    .is_break()
                {
                    lock(&open.progress).rest = Some(chunk);
                    return Ok(());
                }
            }
            cookie = chunk.end;
        }
        Ok(())
    }
}
