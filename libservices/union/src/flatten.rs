//! Flattening: every block of a sketch moves to the upper branch, so that the file becomes an ordinary one that needs no lower
//! file.

use crate::Union;
use crate::data::read_runs;
use crate::format::BLOCK;
use crate::node::{Content, Node};
use crate::sketch::Sketch;
use poolfs_libservice::{Difference, Durability, Flattened, Held, Layered, PageBuffer, Result};
use poolfs_types::{Caller, Errno, FileType, SetAttributes, SetTime};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

const ROOT: &Caller = &Caller::ROOT;

/// Blocks that are copied while nobody else uses the file.
const STEP_BLOCKS: u64 = 256;

/// Most files that are named because they could not be completed.
const FAILED_MAX: usize = 100;

/// Most bytes of the path of each.
const FAILED_PATH_MAX: usize = 4096;

fn cut(path: &[u8]) -> Vec<u8> {
    match path.split_at_checked(FAILED_PATH_MAX) {
        Some((first, rest)) if !rest.is_empty() => [first, b"..."].concat(),
        _ => path.to_vec(),
    }
}

/// What becomes of blocks of zeros that move to where there is a hole.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeros {
    Holes,
    Stored,
}

impl Union {
    /// See [`Layered::flatten`].
    pub(crate) fn complete_all(&self, go_on: &dyn Fn() -> bool) -> Result<Flattened> {
        let mut done = Flattened::default();
        self.differences(&mut |path, difference| {
            if !go_on() {
                return Ok(ControlFlow::Break(()));
            }
            let Difference::Object { node, attributes, .. } = difference else { return Ok(ControlFlow::Continue(())) };
            if attributes.file_type != FileType::Regular {
                return Ok(ControlFlow::Continue(()));
            }
            match self.node(node).and_then(|node| self.complete(&node, go_on)) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    done.files += 1;
                    done.bytes += bytes;
                }
                Err(error) => {
                    done.failed += 1;
                    if done.failures.len() < FAILED_MAX {
                        done.failures.push((cut(path), error.to_string()));
                    }
                }
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(done)
    }

    /// Moves every block of a sketch; how many bytes were copied. Nothing for a file that is none, or that `go_on` kept from becoming an ordinary
    /// one.
    fn complete(&self, node: &Arc<Node>, go_on: &dyn Fn() -> bool) -> Result<Option<u64>> {
        if !matches!(node.read().content, Content::Sketch(_) | Content::Damaged(_)) {
            return Ok(None);
        }
        let mut buffer = PageBuffer::default();
        let (mut from, mut bytes) = (0, 0);
        let result = loop {
            if !go_on() {
                break Ok(None);
            }
            match self.complete_step(node, from, &mut buffer) {
                Ok(Some((next, copied))) => {
                    from = next;
                    bytes += copied;
                }
                Ok(None) => break self.flush_sketch(node, Durability::Data).map(|()| Some(bytes)),
                Err(error) => break Err(error),
            }
        };
        self.close_unused(node);
        result
    }

    /// Moves some of the blocks of a sketch from `from` on: where to go on, and the bytes that were copied. Nothing when there are no more.
    fn complete_step(&self, node: &Arc<Node>, from: u64, buffer: &mut PageBuffer) -> Result<Option<(u64, u64)>> {
        let mut state = self.ready(node)?;
        if state.removed {
            return Ok(None);
        }
        let Some(held) = state.upper.clone() else { return Ok(None) };
        let Content::Sketch(sketch) = &mut state.content else { return Ok(None) };
        let (map, _) = sketch.parts()?;
        let end = sketch.lower_blocks();
        let first = if from < end { map.bitmap.run_end(from, end, true) } else { end };
        if first >= end {
            return Ok(None);
        }
        let last = map.bitmap.run_end(first, end.min(first + STEP_BLOCKS), false);
        let moved = self.move_blocks(node, &held, sketch, first..last, buffer, Zeros::Holes);
        drop(state);
        self.after_move(node);
        Ok(Some((last, moved?)))
    }

    /// Moves blocks of a sketch, whose lock is held, that have not moved; how many bytes were stored.
    pub(crate) fn move_blocks(
        &self,
        node: &Node,
        held: &Held,
        sketch: &mut Sketch,
        blocks: Range<u64>,
        buffer: &mut PageBuffer,
        zeros: Zeros,
    ) -> Result<u64> {
        let (map, files) = sketch.parts()?;
        let offset = blocks.start * BLOCK;
        let before = self.upper.getattr(ROOT, held.node())?;
        let length = (blocks.end * BLOCK).min(before.size).checked_sub(offset).ok_or(Errno::EIO)?;
        buffer.set_length(length as usize);
        read_runs(sketch, map, files, offset, &mut &mut buffer[..])?;
        let written = match zeros {
            Zeros::Holes => self.put_completed(files, offset, buffer),
            Zeros::Stored => files.upper.write_full(offset, buffer).map(|()| length),
        };
        // That it is stored elsewhere is no change that a user sees.
        let modified = Some(SetTime::At(before.modified));
        let times = SetAttributes { modified, ..SetAttributes::default() };
        let after = self.upper.setattr(ROOT, held.node(), &times, None)?;
        node.changed.hide(before.changed, after.changed);
        let stored = written?;
        let fresh = sketch.set_moved(blocks);
        self.statistics.moved(fresh, fresh);
        self.journal.record(node.id, sketch).map(|()| stored)
    }

    /// Writes what blocks of the lower file have, but for zeros where the upper file has a hole; how many bytes.
    fn put_completed(&self, files: &crate::sketch::Files, offset: u64, bytes: &[u8]) -> Result<u64> {
        let mut copied = 0;
        let mut hole_end = offset;
        for (at, block) in (offset..).step_by(BLOCK as usize).zip(bytes.chunks(BLOCK as usize)) {
            let end = at + block.len() as u64;
            if block.iter().all(|&byte| byte == 0) {
                if hole_end < end {
                    hole_end = match files.upper.branch().seek(ROOT, files.upper.id(), at, poolfs_types::SeekTo::Data) {
                        Ok(data) => data,
                        Err(error) if error == Errno::ENXIO => u64::MAX,
                        Err(error) => return Err(error),
                    };
                }
                if hole_end >= end {
                    continue;
                }
            }
            files.upper.write_full(at, block)?;
            copied += block.len() as u64;
        }
        Ok(copied)
    }
}
