//! Reads and writes: runs of blocks from the upper and the lower file, and the move of a block at its first change.

use crate::Union;
use crate::copyup::Bytes;
use crate::format::BLOCK;
use crate::node::{Content, Node, OpenFile, State};
use crate::sketch::{Files, Map, Sketch};
use crate::sync::lock;
use crate::transit::Copies;
use poolfs_libservice::{
    Durability, Error, Held, Holder, Lease, Opened, PartOf, ReadTarget, Result, Segment, Text, Written, fail,
    shared_content,
};
use poolfs_types::limits::FILE_SIZE_MAX;
use poolfs_types::{Caller, Errno, OpenFlags, SetAttributes};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The part of an open file's flags that its upper file is opened with.
fn upper_flags(flags: OpenFlags) -> OpenFlags {
    let keep = OpenFlags::WRITE_ONLY
        | OpenFlags::READ_WRITE
        | OpenFlags::APPEND
        | OpenFlags::DATA_SYNC
        | OpenFlags::FILE_SYNC
        | OpenFlags::NO_ATIME;
    flags & keep
}

/// Reads as many bytes as `target` is long, from `offset` on, as the sketch has them; what no file has is zero.
pub(crate) fn read_runs(
    sketch: &Sketch,
    map: &Map,
    files: &Files,
    offset: u64,
    target: &mut dyn ReadTarget,
) -> Result<()> {
    let end = offset + target.buffer().len() as u64;
    let lower_blocks = sketch.lower_blocks();
    let mut at = offset;
    while at < end {
        let block = at / BLOCK;
        let last = end.div_ceil(BLOCK);
        let upper = block >= lower_blocks || map.bitmap.moved(block);
        let run_blocks = match (upper, block >= lower_blocks) {
            (_, true) => last,
            (true, _) => {
                let run = map.bitmap.run_end(block, last.min(lower_blocks), true);
                if run == lower_blocks { last } else { run }
            }
            (false, _) => map.bitmap.run_end(block, last.min(lower_blocks), false),
        };
        let run_end = (run_blocks * BLOCK).min(end);
        let (start, stop) = ((at - offset) as usize, (run_end - offset) as usize);
        let got = if upper {
            files.upper.read_full_into(at, &mut PartOf::new(target, start..stop))?
        } else {
            let visible = (sketch.record.limit.max(at) - at).min(run_end - at) as usize;
            let got = files.lower.read_full_into(at, &mut PartOf::new(target, start..start + visible))?;
            if got < visible {
                return Err(Error::new(Errno::EIO, "a lower file became shorter while it was in use"));
            }
            got
        };
        if start + got < stop {
            target.buffer()[start + got..stop].fill(0);
            target.put(start + got..stop)?;
        }
        at = run_end;
    }
    Ok(())
}

impl Union {
    /// The handle of the upper file that belongs to an open file.
    pub(crate) fn upper_handle<'a>(&self, file: &'a OpenFile, held: &Held) -> Result<&'a Opened> {
        if let Some(opened) = file.upper.get() {
            return Ok(opened);
        }
        let opened = Opened::file(&self.upper, &Caller::ROOT, held.node(), upper_flags(file.flags))?;
        // Two threads may open it at once; the second one's goes away again.
        Ok(file.upper.get_or_init(|| opened))
    }

    pub(crate) fn lower_handle<'a>(&self, file: &'a OpenFile, state: &State) -> Result<&'a Opened> {
        if let Some(opened) = file.lower.get() {
            return Ok(opened);
        }
        let lower = state.lowers.first().ok_or_else(|| Error::from(Errno::ESTALE))?;
        let branch = &self.lowers[lower.layer].layer;
        let opened = Opened::file(branch, &Caller::ROOT, lower.held.node(), OpenFlags::READ_ONLY)?;
        Ok(file.lower.get_or_init(|| opened))
    }

    pub(crate) fn read_file(
        &self,
        caller: &Caller,
        file: &OpenFile,
        offset: u64,
        target: &mut dyn ReadTarget,
    ) -> Result<usize> {
        let node = &file.node;
        let length = target.buffer().len();
        let blocks = offset / BLOCK..offset.saturating_add(length as u64).div_ceil(BLOCK);
        loop {
            let state = node.read();
            match (&state.upper, &state.content) {
                (_, Content::Damaged(cause)) => return Err(self.damaged(node, cause)),
                (None, _) => {
                    let lower = self.lower_handle(file, &state)?;
                    let Some(first) = &state.first_write else {
                        return lower.read_into(caller, offset, target);
                    };
                    let buffer = target.buffer();
                    let count = lower.read(caller, offset, buffer)?;
                    first.overlay(offset, &mut buffer[..count]);
                    return target.put(0..count).map(|()| count);
                }
                (Some(held), Content::Plain) => {
                    return self.upper_handle(file, held)?.read_into(caller, offset, target);
                }
                (Some(held), Content::Sketch(sketch)) => {
                    if let Ok((map, files)) = sketch.parts()
                        && !sketch.transit.any(blocks.clone())
                    {
                        let end = offset.saturating_add(length as u64);
                        let size = sketch.size_from(end, || Ok(self.upper.getattr(caller, held.node())?.size))?;
                        let count = size.saturating_sub(offset).min(length as u64) as usize;
                        read_runs(sketch, map, files, offset, &mut PartOf::new(target, 0..count))?;
                        return Ok(count);
                    }
                }
            }
            drop(state);
            self.make_ready(node, blocks.clone())?;
        }
    }

    /// The segment of the file that the content is in, if it is in one. The lower file of a sketch holds more than the sketch shows: what
    /// is hidden by now, perhaps from those who may read the sketch at all times. A sketch is read by requests.
    pub(crate) fn segment_of(&self, file: &OpenFile, lease: &Arc<dyn Lease>) -> Result<Segment> {
        let node = &file.node;
        self.complete_deferred(node)?;
        let state = node.read();
        if state.first_write.is_some() {
            return fail(Errno::EOPNOTSUPP);
        }
        let opened = match (&state.upper, &state.content) {
            (None, Content::Plain) if self.work.is_frozen() => self.lower_handle(file, &state)?,
            (None, Content::Plain) => {
                // A copy-up that comes now waits for the state, and finds the lease.
                let before = lock(&node.lease).replace(Arc::downgrade(lease)).and_then(|before| before.upgrade());
                if let Some(before) = before.filter(|before| !Arc::ptr_eq(before, lease)) {
                    before.revoke();
                }
                self.lower_handle(file, &state)?
            }
            (Some(held), Content::Plain) => self.upper_handle(file, held)?,
            _ => return fail(Errno::EOPNOTSUPP),
        };
        shared_content(&**opened.branch())?.segment(opened.id(), lease)
    }

    /// The program that the content is, while all of it is below.
    pub(crate) fn text_of(&self, file: &OpenFile, holder: Option<&Arc<dyn Holder>>) -> Result<Text> {
        // That may take its time, and is about what stays, whatever becomes of the file here.
        let below = self.whole_below(file)?;
        shared_content(&**below.branch())?.text(below.id(), holder)
    }

    /// The content, while all of it is below.
    pub(crate) fn lend_of(&self, file: &OpenFile, holder: Option<&Arc<dyn Holder>>) -> Result<OwnedFd> {
        // As above.
        let below = self.whole_below(file)?;
        shared_content(&**below.branch())?.lend(below.id(), holder)
    }

    /// The file below, while all of the content is there.
    fn whole_below<'a>(&self, file: &'a OpenFile) -> Result<&'a Opened> {
        let state = file.node.read();
        match (&state.upper, &state.content) {
            (None, Content::Plain) if state.first_write.is_none() => self.lower_handle(file, &state),
            _ => fail(Errno::EOPNOTSUPP),
        }
    }

    /// Makes sure that `node` has an upper object.
    pub(crate) fn ensure_upper(&self, node: &Arc<Node>, bytes: Bytes) -> Result<()> {
        if node.read().upper.is_none() {
            let _names = self.names_mut();
            self.copy_up(node, bytes)?;
        }
        Ok(())
    }

    pub(crate) fn write_file(&self, caller: &Caller, file: &OpenFile, offset: u64, data: &[u8]) -> Result<Written> {
        let node = &file.node;
        let append = file.flags.contains(OpenFlags::APPEND);
        if !append && offset.checked_add(data.len() as u64).is_none_or(|end| end > FILE_SIZE_MAX) {
            return fail(Errno::EFBIG);
        }
        if data.is_empty() {
            return Ok(Written { count: 0, offset });
        }
        if let Some(written) = self.write_first(file, offset, data)? {
            return Ok(written);
        }
        self.ensure_upper(node, Bytes::Sketch)?;
        let at_once = file.flags.contains(OpenFlags::DATA_SYNC);
        if let Some(written) = self.write_moved(caller, file, offset, data)? {
            // The upper layer made the bytes durable; the bits that show them are the union's business.
            if at_once && matches!(node.read().content, Content::Sketch(_)) {
                self.sync_file(file, Durability::Data)?;
            }
            return Ok(written);
        }
        let mut has_waited = false;
        let written = loop {
            let mut state = node.write();
            self.load_locked(node, &mut state)?;
            let State { upper: Some(held), content, .. } = &mut *state else { return fail(Errno::ESTALE) };
            let opened = self.upper_handle(file, held)?;
            let Content::Sketch(sketch) = content else {
                return opened.write(caller, offset, data).inspect(|_| node.changed.see());
            };
            let whole_end = offset.saturating_add(data.len() as u64).div_ceil(BLOCK).saturating_mul(BLOCK);
            let seen_until = if append { u64::MAX } else { whole_end };
            let size = sketch.size_from(seen_until, || Ok(self.upper.getattr(caller, held.node())?.size))?;
            let offset = if append { size } else { offset };
            let end = offset.checked_add(data.len() as u64).filter(|&end| end <= FILE_SIZE_MAX);
            let end = end.ok_or_else(|| Error::from(Errno::EFBIG))?;
            let written = if let Some(count) = Copies::extend(sketch, offset, data)? {
                self.journal.record(node.id, sketch).map(|()| Written { count, offset })
            } else {
                let blocks = offset / BLOCK..end.div_ceil(BLOCK);
                if !has_waited && sketch.transit.any(blocks.clone()) {
                    drop(state);
                    self.copies.complete(node, blocks)?;
                    has_waited = true;
                    continue;
                }
                let held = held.clone();
                self.copies.settle(node, &mut state, blocks)?;
                let Content::Sketch(sketch) = &mut state.content else { return fail(Errno::EIO) };
                let idle = sketch.transit.is_empty();
                let admitted = sketch.admit(offset / BLOCK..end.div_ceil(BLOCK));
                let written = admitted.and_then(|()| self.write_moving(sketch, &held, size, offset, data));
                let written = self.journal.record(node.id, sketch).and(written);
                if idle {
                    self.have_transit_ended(node, sketch);
                }
                written
            };
            break written.inspect(|_| node.changed.see());
        };
        // Also after a failure, for what had moved by then.
        self.after_move(node);
        let written = written?;
        if at_once {
            self.sync_file(file, Durability::Data)?;
        }
        Ok(written)
    }

    /// Has what is in transit of a sketch copied, where nothing was before.
    pub(crate) fn have_transit_ended(&self, node: &Arc<Node>, sketch: &Sketch) {
        if !sketch.transit.is_empty() {
            self.copies.submit(node);
            self.have_copied();
        }
    }

    /// The write that moves nothing, without exclusion of others: an ordinary file, or blocks that have moved before.
    fn write_moved(&self, caller: &Caller, file: &OpenFile, offset: u64, data: &[u8]) -> Result<Option<Written>> {
        let state = file.node.read();
        let Some(held) = &state.upper else { return Ok(None) };
        match &state.content {
            Content::Damaged(cause) => return Err(self.damaged(&file.node, cause)),
            Content::Sketch(sketch) => {
                if file.flags.contains(OpenFlags::APPEND) {
                    return Ok(None);
                }
                let blocks = offset / BLOCK..(offset + data.len() as u64).div_ceil(BLOCK);
                if !sketch.all_upper(blocks) {
                    return Ok(None);
                }
            }
            Content::Plain => {}
        }
        let written = self.upper_handle(file, held)?.write(caller, offset, data)?;
        file.node.changed.see();
        Ok(Some(written))
    }

    /// Writes to a sketch, whose lock is held, and moves the blocks that have not moved.
    ///
    /// Of a block that is written in part, the rest is copied later; where that cannot be, it gets the rest from below
    /// first, in memory, and reaches the layer below by one write.
    pub(crate) fn write_moving(
        &self,
        sketch: &mut Sketch,
        held: &Held,
        size: u64,
        offset: u64,
        data: &[u8],
    ) -> Result<Written> {
        let end = offset + data.len() as u64;
        let (first, last) = (offset / BLOCK, (end - 1) / BLOCK);
        let partial = |block: u64| {
            let whole = offset <= block * BLOCK && end >= ((block + 1) * BLOCK).min(size.max(end));
            !whole && !sketch.all_upper(block..block + 1)
        };
        let mut copied = 0;
        let mut done = 0usize;
        let mut deferred = Vec::new();
        let (map, files) = sketch.parts()?;
        let mut edge = |block: u64, piece: &[u8], at: u64| -> Result<()> {
            let start = block * BLOCK;
            let stop = (start + BLOCK).min(size.max(at + piece.len() as u64));
            let mut whole = vec![0; (stop - start) as usize];
            let within = (at - start) as usize;
            let new = within..within + piece.len();
            let permit = (start + BLOCK <= size.min(sketch.record.limit)).then(|| self.copies.permit()).flatten();
            match permit {
                Some(permit) => deferred.push((block, new.clone(), permit)),
                None => {
                    read_runs(sketch, map, files, start, &mut &mut whole[..])?;
                    copied += 1;
                }
            }
            whole[new].copy_from_slice(piece);
            files.upper.write_full(start, &whole).inspect_err(|_| deferred.retain(|(failed, ..)| *failed != block))
        };
        let head_end = ((first + 1) * BLOCK).min(end);
        let result = (|| {
            if partial(first) {
                let piece = &data[..(head_end - offset) as usize];
                edge(first, piece, offset)?;
                done = piece.len();
            }
            let tail = (last > first && partial(last)).then_some(last * BLOCK);
            let stop = (tail.unwrap_or(end) - offset) as usize;
            while done < stop {
                let at = offset + done as u64;
                done += files.upper.write_some(at, &data[done..stop])?;
            }
            if let Some(start) = tail {
                edge(last, &data[stop..], start)?;
                done = data.len();
            }
            Ok(())
        })();
        // A block counts as moved only when all of it was accepted, up to where the file ended before or ends now.
        let reached = offset + done as u64;
        let whole_blocks = done == data.len() || reached >= size;
        let moved_end = match done {
            0 => first,
            _ if whole_blocks => reached.div_ceil(BLOCK),
            _ => reached / BLOCK,
        };
        let mut fresh = 0;
        let mut from = first;
        for waiting in deferred.iter().map(|(block, ..)| *block).chain([moved_end]) {
            fresh += sketch.set_moved(from..waiting.min(moved_end));
            from = waiting + 1;
        }
        self.statistics.moved(fresh, copied);
        for (block, new, permit) in deferred {
            sketch.set_in_transit(block, new, permit);
        }
        let kept = if whole_blocks { done } else { (moved_end * BLOCK).saturating_sub(offset) as usize };
        if result.is_err() && end > size {
            // The file ends where it ended, or where the bytes end that are told of.
            let told = if kept > 0 { offset + kept as u64 } else { 0 };
            let changes = SetAttributes { size: Some(size.max(told)), ..SetAttributes::default() };
            self.upper.setattr(&Caller::ROOT, held.node(), &changes, None)?;
        }
        match result {
            Err(error) if kept == 0 => Err(error),
            _ => Ok(Written { count: kept, offset }),
        }
    }

    /// Moves the blocks in which a punched or zeroed range begins and ends, whole, so that the range may be punched above.
    /// What has moved by then stays moved when it fails.
    pub(crate) fn move_edges(&self, sketch: &mut Sketch, size: u64, offset: u64, end: u64) -> Result<()> {
        for (at, edge) in [(offset / BLOCK, offset), (end / BLOCK, end)] {
            if edge.is_multiple_of(BLOCK) || at * BLOCK >= size || sketch.all_upper(at..at + 1) {
                continue;
            }
            let start = at * BLOCK;
            let mut whole = vec![0; (BLOCK.min(size - start)) as usize];
            let (map, files) = sketch.parts()?;
            read_runs(sketch, map, files, start, &mut &mut whole[..])?;
            files.upper.write_full(start, &whole)?;
            let fresh = sketch.set_moved(at..at + 1);
            self.statistics.moved(fresh, 1);
        }
        Ok(())
    }
}
