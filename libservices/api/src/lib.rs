//! The storage-layer interface: the trait [`Libservice`], its contract, an in-memory reference implementation, and the tests that
//! every layer must pass.
//!
//! A filesystem instance is a stack (or tree) of layers: union, cache, local ... Each sees only the layers below it, through this
//! trait, and nothing is global. Begin reading with the contract below. The tests [`conformance`] and [`random_operations`] check
//! it, unchanged over every layer and every stack but for what a backend cannot do at all ([`conformance::Capability`]); [`Memory`] is
//! the reference.
//!
//! # The contract
//!
//! **Nodes.** A [`NodeId`] names one object. `lookup`, `create`, `tmpfile`, `mkdir`, `mknod`, `symlink` and `link` return an
//! [`Entry`] and take one reference on its node for the caller; `forget` gives references back. While the caller holds a
//! reference (or a handle on the node), the number names the same object, also after its last name is gone. [`NodeId::ROOT`]
//! needs no reference. Hard links of one file have one node. A number is never reused for another object. A number that was never
//! given out, or was forgotten long ago, is answered `ESTALE`: that is the caller's mistake and never a crash.
//!
//! **Handles.** `open`, `create`, `tmpfile` and `opendir` return a [`HandleId`], valid until `release` (which never fails and is
//! called exactly once). Reading needs a handle whose flags are readable, writing one that is writable, else `EBADF`. A handle
//! stays valid after unlink and rename. A handle keeps the number of no other file alive.
//!
//! **Permissions and owners.** Layers check types and structure (`ENOTDIR`, `EEXIST`, `ENOTEMPTY` ...), never permissions: the
//! service has done that. They store owner, group and mode as [`Caller`] and the call say, after removing the umask's bits or
//! applying the parent's default ACL (`system.posix_acl_default`) as Linux does. They do not consider the parent's set-group-id
//! bit; set-id bits of a written file are the service's business too. Whether a change of owner alone clears set-id bits is up to
//! the backend: a caller that depends on it names the permissions in the same call. So are owner and access lists of a whiteout
//! that a rename leaves behind. A layer that stores other owners than it shows refuses those that it cannot store (`EOVERFLOW`),
//! and shows those that it cannot name as [`types::NO_ID`].
//!
//! **Attributes.** Links and size of a directory are the layer's own. A mode cannot be set on a symbolic link (`EOPNOTSUPP`).
//! Setting an access ACL sets the mode, and the other way round, as on Linux; removing an ACL that does not exist succeeds.
//! Xattrs in `user.` exist on files and directories only (else `EPERM` to set, `ENODATA` to get).
//!
//! **Order of checks** where several errors apply: node or handle validity, then the parent's type (`ENOTDIR`), then existence,
//! then the object's type, then space. Errors of the arguments alone (contradicting flags, the target of a symbolic link) may be
//! reported at any of these points.
//!
//! **Times.** Creating or removing a name sets `modified` and `changed` of the directory; writing, truncating and allocating set
//! `modified` and `changed` of the file; changes of attributes, xattrs and links set `changed`. A truncate to the same size sets
//! them too, a write of no bytes does not. A time named explicitly wins over the one that the rest of the same call would set.
//! Layers do not maintain `accessed` on reads.
//!
//! **Bytes.** A read that starts below the size returns what is there up to it; at or beyond the size it returns 0. Holes and
//! extended ranges read as zeros. After `write` returned, every later read of any handle sees it. A write of an `APPEND` handle
//! goes to the end of the file, atomically against other appends. A write may be short only when space ran out after some bytes;
//! the next one then fails.
//!
//! **Durability.** After `fsync` of a handle returned Ok, the content (and with [`Durability::All`] the attributes) survive a
//! crash of everything; fsync of a directory handle makes its names durable. A layer that delays writes reports a failed
//! write-back once to every handle open at that time, by that handle's next `fsync` or `flush`. [`Libservice::sync`] does it for
//! the whole layer.
//!
//! **Deferred places.** A layer may accept content at once and store only later where it is ([`Libservice::defers`]). What it has
//! not stored yet survives neither a crash nor the end of the process. A layer above that promises that accepted data survives
//! the process keeps it until [`Libservice::store_deferred`] has returned Ok.
//!
//! **Content before names.** A layer that delays writes writes the content of a file to the layer below before it gives the file
//! another name (`link`), has it replace another (`rename` over a name, or `EXCHANGE`), or lets the close of a file return that
//! was truncated to nothing and written again. This applies to what was written before the call. If that fails, the call fails
//! with the error and changes no name. A layer that makes one change of names of several calls below, or replaces what the layer
//! below does not have, asks for it by [`Libservice::write_before_names`].
//!
//! **Concurrency.** Every method may be called from many threads at once. No call may wait for another call's caller. Multi-block
//! reads are not atomic against writes.
//!
//! **Hold.** A layer that delays writes keeps back a held block until the hold is released or the node is gone; held blocks count
//! as dirty for `fsync` only after the release.

#![forbid(unsafe_code)]

mod acl;
mod changed;
mod coherence;
pub mod conformance;
mod durability;
mod error;
mod filter;
mod findings;
mod held;
mod layered;
pub mod memory;
#[cfg(test)]
mod mutations;
mod page_buffer;
pub mod random_operations;
mod read_target;
mod recorder;
mod shared_content;
mod shares;
mod spending;
pub mod walk;
mod written_at;

pub use acl::Acl;
pub use changed::{Changed, Unseen};
pub use coherence::{Coherence, Stale, Upcalls};
pub use durability::{Durability, NameChange};
pub use error::{Error, Result};
pub use filter::{Filter, Operation};
pub use findings::{Finding, Findings, Outcome, Tally, shown_path};
pub use held::{Branch, Held, Opened};
pub use layered::{ChangesHeld, Difference, Flattened, Layered, Relation, Visit};
pub use memory::Memory;
pub use page_buffer::PageBuffer;
pub use poolfs_types as types;
pub use read_target::{PartOf, ReadTarget, read_with_zeros, unreadable_file};
pub use recorder::Recorder;
pub use shared_content::{Holder, Lease, Segment, SharedContent, Text, shared_content};
pub use shares::{Headroom, Share, Shares, Taken};
pub use spending::Spending;
pub use written_at::WrittenAt;

use poolfs_types::{
    AllocateMode, Attributes, Caller, Errno, FileSystemStatistics, FileType, HandleId, Name, NodeId, OpenFlags,
    RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use std::ops::{ControlFlow, Range};
use std::sync::Weak;

/// A name resolved: the node, with one reference for the caller, and its attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The node.
    pub node: NodeId,
    /// Its attributes at that moment.
    pub attributes: Attributes,
}

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug)]
pub struct DirectoryEntry<'a> {
    /// The name; never `.` or `..`.
    pub name: Name<'a>,
    /// The inode number, equal to what `lookup` of the name reports.
    pub inode: u64,
    /// The type.
    pub file_type: FileType,
    /// Where a listing goes on after this entry; never 0, and at most `i64::MAX - 16`.
    pub cookie: u64,
}

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Bytes written.
    pub count: usize,
    /// Where the first of them went (the old end of the file for an `APPEND` handle).
    pub offset: u64,
}

/// One storage layer. See the crate's documentation for the contract.
///
/// Methods return exactly one [`Error`] each; those named under "Errors" are required by the conformance suite, others
/// (`EIO`, `ENOSPC`, `EDQUOT`, `ENOMEM`, `EROFS`) may come from below at any time.
pub trait Libservice: Send + Sync {
    /// Resolves one name.
    ///
    /// # Errors
    /// `ENOTDIR` when `parent` is none, `ENOENT` when there is no such name.
    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry>;

    /// Gives back `count` references on `node`. Unknown nodes and excess counts are ignored.
    fn forget(&self, node: NodeId, count: u64);

    /// The attributes of `node`.
    ///
    /// # Errors
    /// `ESTALE` when the node is unknown.
    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes>;

    /// Changes attributes, all or (on an error) as few as possible, and returns the new ones. With a size, a writable
    /// `handle` may be given, whose access then counts instead of the node's state.
    ///
    /// # Errors
    /// A size: `EISDIR` for a directory, `EINVAL` for what is neither file nor directory, `EFBIG` beyond the layer's largest
    /// file, `EBADF` for a handle that is not writable.
    fn setattr(
        &self,
        caller: &Caller,
        node: NodeId,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes>;

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `EINVAL` when `node` is no symbolic link.
    fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>>;

    /// Creates a regular file, which must not exist, and opens it (`flags`: access mode, `APPEND`, sync bits).
    ///
    /// # Errors
    /// `EEXIST`, `ENOTDIR`, `ENOENT` when `parent` has been removed.
    fn create(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, HandleId)>;

    /// Creates a regular file without a name, in the directory's filesystem and with what the directory passes on, and opens it.
    /// [`Libservice::link`] gives it its first name, unless `flags` have `EXCLUSIVE`; without one it goes with its last reference and
    /// handle.
    ///
    /// # Errors
    /// `ENOTDIR`, `EINVAL` for `flags` that are not writable, `EOPNOTSUPP` when the backend has no such files.
    fn tmpfile(&self, caller: &Caller, parent: NodeId, permissions: u32, flags: OpenFlags)
    -> Result<(Entry, HandleId)>;

    /// Creates a regular file, fifo, socket or device node.
    ///
    /// # Errors
    /// `EEXIST`, `ENOTDIR`, `EINVAL` for a type that has its own call, `ENOENT` when `parent` has been removed.
    fn mknod(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Result<Entry>;

    /// Creates a directory.
    ///
    /// # Errors
    /// `EEXIST`, `ENOTDIR`, `EMLINK`, `ENOENT` when `parent` has been removed.
    fn mkdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>, permissions: u32) -> Result<Entry>;

    /// Creates a symbolic link to `target` (1 to 4095 bytes, no NUL: `ENOENT`, `ENAMETOOLONG`, `EINVAL`).
    ///
    /// # Errors
    /// `EEXIST`, `ENOTDIR`, `ENOENT` when `parent` has been removed.
    fn symlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>, target: &[u8]) -> Result<Entry>;

    /// Gives `node` another name.
    ///
    /// # Errors
    /// `EPERM` for a directory, `EEXIST`, `ENOTDIR`, `EMLINK`, `ENOENT` when `node` has no name left (or never may have one, see
    /// [`Libservice::tmpfile`]) or `parent` has been removed.
    fn link(&self, caller: &Caller, node: NodeId, parent: NodeId, name: Name<'_>) -> Result<Entry>;

    /// Removes a name of something that is not a directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR` when `parent` is none, `EISDIR` for a directory.
    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()>;

    /// Removes a name as [`Libservice::unlink`] does, for a caller who holds what it is of and knows that: `victim`, and with `is_last`
    /// whether it has no other name. A layer need not look then, as long as nobody else changes names of it.
    ///
    /// # Errors
    /// Those of [`Libservice::unlink`].
    fn unlink_known(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        _victim: NodeId,
        _is_last: Option<bool>,
    ) -> Result<()> {
        self.unlink(caller, parent, name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `ENOTEMPTY`.
    fn rmdir(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()>;

    /// Renames, within the layer. Two names of one file: nothing happens, and it succeeds.
    ///
    /// # Errors
    /// `ENOENT`; `EEXIST` with `NO_REPLACE`; `EISDIR`/`ENOTDIR` when file and directory meet; `ENOTEMPTY`; `EINVAL` for a
    /// directory into itself or below, and for contradicting flags.
    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        new_parent: NodeId,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()>;

    /// Opens a regular file. `CREATE` and `EXCLUSIVE` are ignored; `TRUNCATE` with write access truncates.
    ///
    /// # Errors
    /// `EISDIR` for a directory, `ELOOP` for a symbolic link, `ENXIO` for devices, fifos and sockets (the kernel opens
    /// those itself).
    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId>;

    /// Reads up to `buffer.len()` bytes at `offset`; returns how many.
    ///
    /// # Errors
    /// `EBADF` when the handle is unknown, not readable or a directory's.
    fn read(&self, caller: &Caller, handle: HandleId, offset: u64, buffer: &mut [u8]) -> Result<usize>;

    /// The same into `target`, as many bytes at most as that is long. A layer that has the content in a file gives it that.
    ///
    /// # Errors
    /// As above; those of the target.
    fn read_into(&self, caller: &Caller, handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        let count = self.read(caller, handle, offset, target.buffer())?;
        target.put(0..count)?;
        Ok(count)
    }

    /// Writes `data` at `offset`, or at the end for an `APPEND` handle.
    ///
    /// # Errors
    /// `EBADF` when the handle is unknown, not writable or a directory's; `EFBIG` beyond the layer's largest file.
    fn write(&self, caller: &Caller, handle: HandleId, offset: u64, data: &[u8]) -> Result<Written>;

    /// Writes all of these pieces, each with its offset, which do not overlap: in any order, and at once where the layer can. Not for `APPEND`
    /// handles.
    ///
    /// # Errors
    /// Those of [`Libservice::write`], and `ENOSPC` where it writes nothing. Any of them may have been written then, or a part of it.
    fn write_pieces(&self, caller: &Caller, handle: HandleId, pieces: &[(u64, &[u8])]) -> Result<()> {
        pieces.iter().try_for_each(|&(offset, data)| write_whole(self, caller, handle, offset, data))
    }

    /// Allocates, punches or zeroes a range.
    ///
    /// # Errors
    /// `EBADF`; `EINVAL` for a length of 0; `EOPNOTSUPP` for a mode the layer lacks and for `PUNCH_HOLE` without `KEEP_SIZE`;
    /// `EFBIG`.
    fn fallocate(&self, caller: &Caller, handle: HandleId, mode: AllocateMode, offset: u64, length: u64) -> Result<()>;

    /// The next data or hole at or after `offset`. A layer that does not know holes calls everything below the size data.
    ///
    /// # Errors
    /// `ENXIO` at or beyond the size, and for data when only holes follow; `EBADF`.
    fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64>;

    /// Makes the file or directory of `handle` durable.
    ///
    /// # Errors
    /// `EBADF`; what a write-back met since this handle last asked.
    fn fsync(&self, caller: &Caller, handle: HandleId, durability: Durability) -> Result<()>;

    /// Called at each close of a descriptor: a chance to report a failed write-back. What was written to a file since it was truncated to
    /// nothing is written below, as by [`Libservice::write_before_names`].
    ///
    /// # Errors
    /// `EBADF`; what a write-back met since this handle last asked.
    fn flush(&self, caller: &Caller, handle: HandleId) -> Result<()>;

    /// Ends a handle of a file or directory. Unknown handles are ignored.
    fn release(&self, handle: HandleId);

    /// Opens a directory for listing.
    ///
    /// # Errors
    /// `ENOTDIR`.
    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId>;

    /// Lists from `cookie` (0: the start) until the end or until `visit` breaks; an entry that broke counts as not
    /// delivered. Names that exist throughout are delivered exactly once by a walk from 0 to the end; starting again at 0 sees
    /// what is there then. A walk may go on with another handle that was opened before it began, or while nothing changed: whoever
    /// shows listings may keep them. `visit` does not call the layer.
    ///
    /// # Errors
    /// `EBADF` when the handle is unknown or a file's.
    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()>;

    /// The value of an extended attribute.
    ///
    /// # Errors
    /// `ENODATA`, `EOPNOTSUPP`.
    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>>;

    /// Sets an extended attribute (`name` with its namespace, 1 to 255 bytes: `ERANGE`; `value` up to 65536: `E2BIG`).
    ///
    /// # Errors
    /// `EEXIST`, `ENODATA` by `flags`; `EOPNOTSUPP`.
    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()>;

    /// The names of all extended attributes.
    ///
    /// # Errors
    /// `EOPNOTSUPP`.
    fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>>;

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// `ENODATA`, `EOPNOTSUPP`.
    fn removexattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<()>;

    /// Space and inodes of the filesystem that holds `node`.
    ///
    /// # Errors
    /// Those of the backend.
    fn statfs(&self, caller: &Caller, node: NodeId) -> Result<FileSystemStatistics>;

    /// Makes everything durable that was written before the call.
    ///
    /// # Errors
    /// The first failure; the rest is still tried.
    fn sync(&self) -> Result<()>;

    /// Makes the content of a byte range durable, before anything written later. A layer may do more than asked.
    ///
    /// # Errors
    /// As [`Libservice::fsync`].
    fn flush_range(&self, caller: &Caller, handle: HandleId, range: Range<u64>) -> Result<()> {
        let _ = range;
        self.fsync(caller, handle, Durability::Data)
    }

    /// Writes what is delayed of a regular file's content to where it is stored, so that it is there before the change of names that is
    /// about to come; held blocks stay. With [`NameChange::Replaces`] the backend is asked to begin with it at once: where it commits names
    /// after the content that it has begun to write (ext4 and btrfs do), a crash leaves the old file or the new one. A layer may do more
    /// than asked.
    ///
    /// # Errors
    /// `ESTALE` when the node is unknown; what the write-back met. Handles that are open hear of that too.
    fn write_before_names(&self, caller: &Caller, node: NodeId, change: NameChange) -> Result<()> {
        let _ = change;
        let handle = self.open(caller, node, OpenFlags::READ_ONLY)?;
        let synced = self.fsync(caller, handle, Durability::Data);
        self.release(handle);
        synced
    }

    /// Whether what `write`, `fallocate` and `copy_range` have done may be unknown to whoever opens what is stored after the death of this
    /// process, until [`Libservice::store_deferred`] or a sync. What `setattr` and changes of names have done is known.
    fn defers(&self) -> bool {
        false
    }

    /// Stores what is deferred of a regular file, as far as it was done before the call. Without anything deferred it does nothing.
    ///
    /// # Errors
    /// What storing it met; it is deferred still.
    fn store_deferred(&self, node: NodeId) -> Result<()> {
        let _ = node;
        Ok(())
    }

    /// Holds the blocks of a byte range back from write-back, or lets them go. Layers that write at once ignore it.
    ///
    /// # Errors
    /// `EBADF`.
    fn hold(&self, caller: &Caller, handle: HandleId, range: Range<u64>, held: bool) -> Result<()> {
        let _ = (caller, handle, range, held);
        Ok(())
    }

    /// Copies bytes between two files of the layer without passing them through the caller; returns how many, perhaps
    /// fewer than asked for, 0 only where the source ends. The target's handle does not append.
    ///
    /// # Errors
    /// `EBADF`; `EINVAL` for overlapping ranges of one file.
    fn copy_range(
        &self,
        caller: &Caller,
        source: HandleId,
        source_offset: u64,
        target: HandleId,
        target_offset: u64,
        length: u64,
    ) -> Result<u64> {
        copy_by_reading(self, caller, (source, source_offset), (target, target_offset), length)
    }

    /// What the layer can do with cached content beside reading it; nothing where it has none to share.
    fn shared_content(&self) -> Option<&dyn SharedContent> {
        None
    }

    /// Says who else changes what the layer shows, and tells `above` of it from here on, where it tells of it at all. For the layer above, which
    /// does so once. One that passes all on passes this on, too.
    fn attach(&self, above: Weak<dyn Upcalls>) -> Coherence {
        let _ = above;
        Coherence::Exclusive
    }

    /// Whether the layer refuses every change with `EROFS`.
    fn read_only(&self) -> bool {
        false
    }
}

/// Bytes that are read and written at a time where nothing better copies.
const COPY_BYTES: u64 = 256 << 10;

/// What [`Libservice::copy_range`] does where a layer has nothing better: bytes are read and written, each place a handle and an offset.
///
/// # Errors
/// Those of reading and writing, when nothing was copied before.
pub fn copy_by_reading<L: Libservice + ?Sized>(
    layer: &L,
    caller: &Caller,
    (source, source_offset): (HandleId, u64),
    (target, target_offset): (HandleId, u64),
    length: u64,
) -> Result<u64> {
    copy_in_pieces(
        0..length,
        |at, buffer| layer.read(caller, source, source_offset.saturating_add(at), buffer),
        |at, bytes| Ok(layer.write(caller, target, target_offset.saturating_add(at), bytes)?.count),
    )
}

/// Copies by `read` and `write`, each told how far it has come, from where `left` begins until it ends, there is nothing more to read, or less is
/// written than was read. Returns where that is.
///
/// # Errors
/// Those of `read` and `write`, when nothing was copied before.
pub fn copy_in_pieces(
    left: Range<u64>,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<usize>,
    mut write: impl FnMut(u64, &[u8]) -> Result<usize>,
) -> Result<u64> {
    let mut done = left.start;
    let mut buffer = PageBuffer::zeroed(left.end.saturating_sub(done).min(COPY_BYTES) as usize);
    while done < left.end {
        let want = (left.end - done).min(buffer.len() as u64) as usize;
        let step = read(done, &mut buffer[..want]).and_then(|got| match got {
            0 => Ok((0, 0)),
            got => Ok((got, write(done, &buffer[..got])?)),
        });
        match step {
            Ok((got, written)) => {
                done += written as u64;
                if got == 0 || written < got {
                    break;
                }
            }
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Writes all of `data`.
///
/// # Errors
/// Those of [`Libservice::write`], `ENOSPC` when it takes nothing more.
pub fn write_whole<L: Libservice + ?Sized>(
    layer: &L,
    caller: &Caller,
    handle: HandleId,
    offset: u64,
    data: &[u8],
) -> Result<()> {
    let mut done = 0;
    while done < data.len() {
        match layer.write(caller, handle, offset + done as u64, &data[done..])?.count {
            0 => return fail(Errno::ENOSPC),
            count => done += count,
        }
    }
    Ok(())
}

/// Shorthand for a failing call.
///
/// # Errors
/// Always `errno`.
pub fn fail<T>(errno: Errno) -> Result<T> {
    Err(Error::from(errno))
}
