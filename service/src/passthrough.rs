//! Passthrough and mmap exports: files of the cache that the kernel maps and reads by itself, or that processes map by the
//! library.
//!
//! All containers that run the same program have one copy of it in memory, the service's. So have processes that map a file by
//! the library.
//!
//! Only content that never changes is given away. For the kernel that is the file of a lower branch, as long as nobody has
//! changed it, opened for reading, that is a program (ELF). It comes by a read-only clone of its tmpfs, so that the kernel itself
//! would refuse to write there. What happens when such a file is changed is described in [`crate::nodes::passthrough`].

use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::nodes::passthrough::{Asking, Backing, Opening, TextCounts, Undecided};
use crate::notify::KernelCache;
use poolfs_libservice::types::{Errno, NodeId};
use poolfs_libservice::{Holder, Text, fail, shared_content};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tracing::warn;

impl Instance {
    /// The kernel is about to open a file; nothing where it is given no programs.
    ///
    /// # Errors
    /// Those of [`NodeTable::begin_open`](crate::NodeTable).
    pub(crate) fn begin_open(&self, asking: Asking, writes: bool) -> Result<Option<Opening>, Errno> {
        if self.programs_to().is_none() {
            return Ok(None);
        }
        let is_covered = || self.is_covered(asking.node);
        let opening = self.nodes.begin_open(asking, writes, is_covered);
        opening.inspect_err(|_| self.drop_attributes_of(asking.number)).map(Some)
    }

    /// The kernel is about to set a size, until what is returned is dropped.
    ///
    /// # Errors
    /// Those of [`NodeTable::begin_open`](crate::NodeTable).
    pub(crate) fn begin_resize(&self, asking: Asking) -> Result<Option<impl Drop + use<>>, Errno> {
        if self.programs_to().is_none() {
            return Ok(None);
        }
        let changing = self.nodes.begin_change(asking, || self.is_covered(asking.node));
        changing.inspect_err(|_| self.drop_attributes_of(asking.number)).map(Some)
    }

    /// A file is open: by which of the kernel's numbers it maps and reads it by itself, if it does.
    pub(crate) fn opened(&self, opening: Option<Opening>, file: &OpenFile) -> Option<u32> {
        let opening = match opening? {
            Opening::Undecided(undecided) => self.decide(&undecided, file)?,
            decided => decided,
        };
        let (text_use, id) = match opening {
            Opening::Text(text_use, id) => (text_use, Some(id)),
            Opening::Cached(text_use) => (text_use, None),
            Opening::Undecided(_) => return None,
        };
        file.set_use(text_use);
        id
    }

    fn decide(&self, undecided: &Undecided, file: &OpenFile) -> Option<Opening> {
        let backing = match shared_content(self.layer())
            .and_then(|content| content.text(file.handle(), self.holder().as_ref()))
        {
            Ok(text) => self.give(text),
            Err(error) => {
                if error.errno() == Errno::ENOMEM {
                    self.ask_for_texts();
                }
                None
            }
        };
        self.nodes.open_text(undecided, backing)
    }

    /// All of a file for a process that has it open to be read, and maps it privately instead.
    ///
    /// # Errors
    /// `EBADF` when it is not open so; those of the layers.
    pub(crate) fn lend(&self, file: &OpenFile) -> poolfs_libservice::Result<OwnedFd> {
        if !file.flags().readable() || file.flags().writable() || file.is_directory() {
            return fail(Errno::EBADF);
        }
        let lent = shared_content(self.layer()).and_then(|content| content.lend(file.handle(), self.holder().as_ref()));
        if matches!(&lent, Err(error) if error.errno() == Errno::ENOMEM) {
            self.ask_for_texts();
        }
        lent
    }

    /// Who is noted to have what is given, and is given nothing while somebody of the instance keeps what was taken away.
    fn holder(&self) -> Option<Arc<dyn Holder>> {
        self.leases().map(|leases| Arc::clone(leases) as Arc<dyn Holder>)
    }

    /// There is no more room for them: others may be used no more.
    fn ask_for_texts(&self) {
        self.pruner().into_iter().for_each(|pruner| pruner.ask_for_texts());
    }

    fn give(&self, text: Text) -> Option<Backing> {
        let kernel = self.programs_to()?;
        let given = self.nodes.backing(kernel, text);
        let given = given.inspect_err(
            |error| warn!(instance = self.name(), %error, "the kernel does not take a program from the cache"),
        );
        given.ok()
    }

    /// What the kernel has of programs; nothing where it is given none.
    #[must_use]
    pub fn texts(&self) -> Option<TextCounts> {
        self.programs_to().map(|_| self.nodes.texts())
    }

    /// The number for a name that the kernel has looked up, and one reference to it. That of a program which is open with the content
    /// from before a change, if something has been mounted on the name since: another one would take the mount away.
    pub(crate) fn enter_name(&self, (parent, name): (NodeId, &[u8]), node: NodeId, inode: u64, thread: u32) -> u64 {
        if let Some(retired) = self.nodes.retired_number(node) {
            if self.is_mounted_on(parent, name) && self.nodes.enter_retired(retired) {
                return retired;
            }
            self.nodes.looked_up_again(retired, thread);
        }
        self.nodes.enter(node, inode)
    }

    fn programs_to(&self) -> Option<&Arc<dyn KernelCache>> {
        self.notifications().map(|notifications| notifications.kernel()).filter(|kernel| kernel.takes_backings())
    }

    fn drop_attributes_of(&self, number: u64) {
        if let Some(notifications) = self.notifications() {
            let _ = notifications.drop_attributes(number);
        }
    }
}
