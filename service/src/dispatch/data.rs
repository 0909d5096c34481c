//! Dispatch of requests on content: opening, reading, writing, syncing.

use super::privileges::Writer;
use super::{Served, Stop};
use crate::access::{self, READ, WRITE};
use crate::handles::{OpenFile, layer_flags};
use crate::instance::Instance;
use crate::request::{Context, Reply, WriteMode};
use poolfs_libservice::types::limits::FILE_SIZE_MAX;
use poolfs_libservice::types::{AllocateMode, Caller, Errno, FileType, NodeId, OpenFlags, SeekTo};
use poolfs_libservice::{Durability, ReadTarget, Spending, Written};

/// Most bytes one copy request moves, so that a service thread comes back within a moment.
const COPY_BYTES_MAX: u64 = 64 << 20;

/// The kernel tells of the closing of files from this length on.
const ANNOUNCED_FROM_BYTES: u64 = 1 << 20;

impl Instance {
    pub(super) fn open(&self, context: &Context<'_>, node: NodeId, flags: OpenFlags) -> Served {
        let truncates = flags.contains(OpenFlags::TRUNCATE) && flags.writable();
        if let Some(credentials) = context.credentials {
            let mut mask = if flags.readable() { READ } else { 0 };
            if flags.writable() || truncates {
                mask |= WRITE;
            }
            let object = self.check(context, node, mask)?;
            if flags.contains(OpenFlags::NO_ATIME) {
                access::may_own(credentials, &object)?;
            }
        }
        let room = self.handles.reserve()?;
        if truncates {
            self.drop_privileges(context, node, Writer::Caller)?;
        }
        let handle = self.layer().open(&context.caller, node, layer_flags(flags))?;
        let file = room.enter(node, handle, flags, false);
        self.revoke_posts(node);
        if !context.is_library() {
            self.tell_size_to_opener(node);
        }
        self.note_writer(context, &file);
        if !flags.writable() && self.is_read_at_length(node) {
            file.announce_closing();
        }
        if truncates && context.is_library() {
            self.content_changed(node, None);
        }
        Ok(Reply::Opened { file, entry: None })
    }

    /// Before anybody has the open file.
    pub(super) fn note_writer(&self, context: &Context<'_>, file: &OpenFile) {
        if file.flags().writable() {
            self.nodes.opened_to_write_by(file.node(), context.caller.uid);
        }
    }

    /// Whether clients may come to read a file without requests, and its length makes up for a request at its closing, which
    /// spares them a look at what their descriptor stands for with each read.
    fn is_read_at_length(&self, node: NodeId) -> bool {
        let attributes = self.leases().and_then(|_| self.layer().getattr(&Caller::ROOT, node).ok());
        attributes.is_some_and(|attributes| attributes.size >= ANNOUNCED_FROM_BYTES)
    }

    pub(super) fn open_directory(&self, context: &Context<'_>, node: NodeId) -> Served {
        if context.credentials.is_some() {
            self.check(context, node, READ)?;
        }
        let room = self.handles.reserve()?;
        let handle = self.layer().opendir(&context.caller, node)?;
        Ok(Reply::Opened { file: room.enter(node, handle, OpenFlags::READ_ONLY, true), entry: None })
    }

    /// Whether the content of the file may be touched by the user-level path: not while the kernel may hold changes.
    fn check_content(&self, context: &Context<'_>, file: &OpenFile) -> Served<()> {
        if context.is_library() && self.nodes.may_map(file.node()) {
            return Err(Stop::UseKernel);
        }
        Ok(())
    }

    pub(super) fn read(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        offset: u64,
        target: &mut dyn ReadTarget,
    ) -> Served {
        if file.is_directory() {
            return Err(Errno::EISDIR.into());
        }
        self.check_content(context, file)?;
        if !file.flags().readable() {
            return Err(Errno::EBADF.into());
        }
        if !context.is_library() {
            self.nodes.touched(file.node(), offset, target.buffer().len() as u64, false);
            self.revoke_posts(file.node());
        }
        let count = self.layer().read_into(&context.caller, file.handle(), offset, target)?;
        file.count_read(context.path);
        Ok(Reply::Count(count))
    }

    pub(super) fn write(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        offset: u64,
        data: &[u8],
        mode: WriteMode,
    ) -> Served {
        // Such a write comes without a user, and gets no more room than who may have mapped the file.
        let _spending = mode.from_mapping.then(|| Spending::of_user(self.nodes.user_of_mappings(file.node())));
        let served = self.write_content(context, file, offset, data, mode);
        if let Err(Stop::Error(error)) = &served
            && mode.from_mapping
        {
            self.nodes.write_back_failed(file.node(), error.errno());
        }
        served
    }

    fn write_content(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        offset: u64,
        data: &[u8],
        mode: WriteMode,
    ) -> Served {
        if !file.flags().writable() || file.is_directory() {
            return Err(Errno::EBADF.into());
        }
        if !context.is_posted {
            self.check_content(context, file)?;
            file.posted_failure()?;
        }
        let length = data.len() as u64;
        let append = mode.append && !mode.from_mapping;
        if !append && offset.checked_add(length).is_none_or(|end| end > FILE_SIZE_MAX) {
            return Err(Errno::EFBIG.into());
        }
        if !context.is_library() {
            self.nodes.touched(file.node(), offset, length, mode.from_mapping);
            self.revoke_posts(file.node());
        }
        if data.is_empty() {
            return Ok(Reply::Written(Written { count: 0, offset }));
        }
        if !mode.from_mapping {
            let kernel = Writer::Kernel { kill_set_id: mode.kill_set_id };
            let writer = if context.is_library() { Writer::Caller } else { kernel };
            self.drop_privileges(context, file.node(), writer)?;
        }
        let handle = file.handle_for(&context.caller, append)?;
        let written = self.layer().write(&context.caller, handle, offset, data)?;
        if context.is_posted {
            self.nodes.changed_by_post(file.node());
        } else if context.is_library() && written.count > 0 {
            let end = written.offset + written.count as u64;
            let last = data.get(written.count - 1).copied().unwrap_or(0);
            self.content_changed(file.node(), Some((end, last)));
        } else if append && written.offset != offset {
            self.appended_elsewhere(file.node());
        }
        self.sync_if_asked(context, file, mode.durability)?;
        Ok(Reply::Written(written))
    }

    /// What was written is durable before the answer, where the open file (`O_SYNC`, `O_DSYNC`) or the write itself asks for that.
    fn sync_if_asked(&self, context: &Context<'_>, file: &OpenFile, own: Option<Durability>) -> Served<()> {
        match own.max(Durability::of_writes(file.flags())) {
            Some(durability) => self.sync_handles(context, file, durability),
            None => Ok(()),
        }
    }

    pub(super) fn allocate(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        mode: AllocateMode,
        offset: u64,
        length: u64,
    ) -> Served {
        if !file.flags().writable() || file.is_directory() {
            return Err(Errno::EBADF.into());
        }
        if length == 0 {
            return Err(Errno::EINVAL.into());
        }
        let end = offset.checked_add(length).filter(|&end| end <= FILE_SIZE_MAX).ok_or(Errno::EFBIG)?;
        if !is_allocation(mode) {
            // Before anything is taken away from the file.
            return Err(Errno::EOPNOTSUPP.into());
        }
        self.check_content(context, file)?;
        self.drop_privileges(context, file.node(), Writer::Caller)?;
        self.layer().fallocate(&context.caller, file.handle(), mode, offset, length)?;
        self.revoke_posts(file.node());
        if context.is_library() {
            let grown = (!mode.contains(AllocateMode::KEEP_SIZE)).then_some((end, 0));
            self.content_changed(file.node(), grown);
        }
        self.sync_if_asked(context, file, None)?;
        Ok(Reply::Done)
    }

    pub(super) fn seek(&self, context: &Context<'_>, file: &OpenFile, offset: u64, to: SeekTo) -> Served {
        if file.is_directory() {
            return Err(Errno::EINVAL.into());
        }
        self.check_content(context, file)?;
        Ok(Reply::Offset(self.layer().seek(&context.caller, file.handle(), offset, to)?))
    }

    pub(super) fn sync_file(&self, context: &Context<'_>, file: &OpenFile, durability: Durability) -> Served {
        self.check_content(context, file)?;
        self.settle_all_posts(Some(file.node()));
        file.posted_failure()?;
        self.sync_handles(context, file, durability)?;
        self.all_is_stored(file)?;
        Ok(Reply::Done)
    }

    /// That nothing is missing that was stored in a mapping: the kernel has told of it once, and has it no more to write.
    fn all_is_stored(&self, file: &OpenFile) -> Served<()> {
        Ok(self.nodes.failed_write_back(file.node()).map_or(Ok(()), Err)?)
    }

    /// All handles are asked, so that each has reported what it met; the first failure counts.
    fn sync_handles(&self, context: &Context<'_>, file: &OpenFile, durability: Durability) -> Served<()> {
        let mut outcome = Ok(());
        for handle in file.handles() {
            outcome = outcome.and(self.layer().fsync(&context.caller, handle, durability));
        }
        Ok(outcome?)
    }

    pub(super) fn flush(&self, context: &Context<'_>, file: &OpenFile) -> Served {
        self.revoke_posts(file.node());
        let mut outcome = Ok(());
        if !file.is_directory() && file.flags().writable() {
            for handle in file.handles() {
                outcome = outcome.and(self.layer().flush(&context.caller, handle));
                if self.closes_durably() {
                    outcome = outcome.and(self.layer().fsync(&context.caller, handle, Durability::Data));
                }
            }
        }
        self.nodes.closing(file.node());
        file.posted_failure()?;
        outcome?;
        if file.flags().writable() {
            self.all_is_stored(file)?;
        }
        Ok(Reply::Done)
    }

    pub(super) fn copy_range(
        &self,
        context: &Context<'_>,
        (source, source_offset): (&OpenFile, u64),
        (target, target_offset): (&OpenFile, u64),
        length: u64,
    ) -> Served {
        if !source.flags().readable() || !target.flags().writable() || source.is_directory() || target.is_directory() {
            return Err(Errno::EBADF.into());
        }
        // Nothing is copied to what appends. Whoever asks knows whether it does: `F_SETFL` changes that, which is not told.
        if context.is_library() && source.node() == target.node() {
            // What overlaps, and whether a file that grows by it is copied on, is one thing for `sendfile` and another for
            // `copy_file_range`: the kernel knows which it is.
            return Err(Stop::UseKernel);
        }
        self.check_content(context, source)?;
        self.check_content(context, target)?;
        // No more than there is: what lies behind the source's end overlaps nothing and is too large for nobody.
        let there = self.layer().getattr(&context.caller, source.node())?.size.saturating_sub(source_offset);
        let length = length.min(COPY_BYTES_MAX).min(there);
        let (from, to) = (source_offset, target_offset);
        if to.checked_add(length).is_none_or(|end| end > FILE_SIZE_MAX) {
            return Err(Errno::EFBIG.into());
        }
        if source.node() == target.node() && from < to + length && to < from + length {
            return Err(Errno::EINVAL.into());
        }
        if length == 0 {
            // Who writes nothing takes nothing away from the target.
            return Ok(Reply::Offset(0));
        }
        self.drop_privileges(context, target.node(), Writer::Caller)?;
        let (source_handle, target_handle) = (source.handle(), target.handle_for(&context.caller, false)?);
        let copied = self.layer().copy_range(&context.caller, source_handle, from, target_handle, to, length)?;
        self.revoke_posts(target.node());
        if context.is_library() && copied > 0 {
            let mut last = [0];
            let end = to + copied;
            let handle = source.handle();
            let _ = self.layer().read(&context.caller, handle, from + copied - 1, &mut last);
            self.content_changed(target.node(), Some((end, last[0])));
        }
        self.sync_if_asked(context, target, None)?;
        Ok(Reply::Offset(copied))
    }

    /// Whether a FUSE open of the node may keep the pages the kernel has.
    #[must_use]
    pub fn keeps_kernel_pages(&self) -> bool {
        self.stack.is_private()
    }

    /// Whether the kernel opens objects of this type itself.
    #[must_use]
    pub fn is_special(file_type: FileType) -> bool {
        !matches!(file_type, FileType::Regular | FileType::Directory)
    }
}

/// Whether `fallocate` knows this mode: a hole leaves the size as it is, and does nothing else.
fn is_allocation(mode: AllocateMode) -> bool {
    let keeps = mode - AllocateMode::KEEP_SIZE;
    keeps.is_empty() || keeps == AllocateMode::ZERO_RANGE || mode == AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE
}
