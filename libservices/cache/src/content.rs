//! The cached bytes of one file: on the heap while the file is small, otherwise in a segment.
//!
//! What is not cached reads as zeros here: punched, dropped and never written ranges alike.

use crate::blocks::{block_of, blocks_for};
use crate::failure::cache_failure;
use crate::segments::{Segment, SegmentStore};
use poolfs_libservice::{ReadTarget, Result};
use std::io;
use std::ops::Range;
use std::sync::Arc;

#[derive(Default)]
pub(crate) enum Content {
    #[default]
    Empty,
    Heap(Vec<u8>),
    Segment(Segment),
}

impl Content {
    /// Reads to a part of `target`.
    pub(crate) fn read(&self, offset: u64, target: &mut dyn ReadTarget, part: Range<usize>) -> Result<()> {
        let bytes = match self {
            Content::Empty => &[][..],
            Content::Heap(bytes) => bytes,
            Content::Segment(segment) => {
                let file = segment.file().map_err(|error| cache_failure(&error))?;
                return target.put_file(part, &file, offset);
            }
        };
        let buffer = &mut target.buffer()[part.clone()];
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let count = buffer.len().min(bytes.len() - start);
        buffer[..count].copy_from_slice(&bytes[start..start + count]);
        buffer[count..].fill(0);
        target.put(part)
    }

    /// Stores `data`; content that would end beyond `heap_max` moves to a segment first, and so does content that would
    /// have whole blocks in it that nobody has stored and that are not charged.
    pub(crate) fn write(
        &mut self,
        store: &Arc<SegmentStore>,
        heap_max: u64,
        offset: u64,
        data: &[u8],
    ) -> io::Result<()> {
        let end = offset + data.len() as u64;
        let stored = match self {
            Content::Heap(bytes) => bytes.len() as u64,
            _ => 0,
        };
        let gap = block_of(offset) > blocks_for(stored);
        if gap || end > heap_max {
            self.promote(store)?;
        }
        if let Content::Empty = self {
            *self = Content::Heap(Vec::new());
        }
        match self {
            Content::Segment(segment) => segment.write(offset, data)?,
            Content::Heap(bytes) => {
                let (start, end) = (offset as usize, end as usize);
                if bytes.len() < end {
                    bytes.reserve_exact(end - bytes.len());
                    bytes.resize(end, 0);
                }
                bytes[start..end].copy_from_slice(data);
            }
            Content::Empty => {}
        }
        Ok(())
    }

    /// Moves to a segment, which is empty when nothing is cached.
    pub(crate) fn promote(&mut self, store: &Arc<SegmentStore>) -> io::Result<&mut Segment> {
        if !matches!(self, Content::Segment(_)) {
            let segment = store.create()?;
            if let Content::Heap(bytes) = self {
                segment.write(0, bytes)?;
            }
            *self = Content::Segment(segment);
        }
        match self {
            Content::Segment(segment) => Ok(segment),
            _ => Err(io::ErrorKind::Other.into()),
        }
    }

    /// Makes a range read as zeros and frees its memory. On the heap only the tail is freed.
    pub(crate) fn punch(&mut self, offset: u64, length: u64) -> io::Result<()> {
        match self {
            Content::Empty => {}
            Content::Heap(bytes) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
                let end = usize::try_from(offset.saturating_add(length)).unwrap_or(usize::MAX).min(bytes.len());
                if end == bytes.len() {
                    bytes.truncate(start);
                    bytes.shrink_to_fit();
                } else {
                    bytes[start..end].fill(0);
                }
            }
            Content::Segment(segment) => segment.punch(offset, length.min(i64::MAX as u64 - offset))?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_with_a_gap_takes_no_more_memory_than_its_blocks() {
        let store = Arc::new(SegmentStore::new(4, 4, None).unwrap());
        let mut late = Content::default();
        late.write(&store, 32 << 10, 28 << 10, &[1; 4096]).unwrap();
        assert!(matches!(late, Content::Segment(_)), "28 KiB on the heap for a block that is charged with 4");
        let mut next = Content::default();
        next.write(&store, 32 << 10, 0, &[1; 100]).unwrap();
        next.write(&store, 32 << 10, 4096, &[2; 100]).unwrap();
        assert!(matches!(next, Content::Heap(ref bytes) if bytes.len() == 4196));
        next.write(&store, 32 << 10, 12 << 10, &[3; 100]).unwrap();
        let mut buffer = [9; 12 << 10];
        next.read(0, &mut &mut buffer[..], 0..12 << 10).unwrap();
        assert!(matches!(next, Content::Segment(_)) && buffer[..100] == [1; 100] && buffer[4096..4196] == [2; 100]);
    }

    #[test]
    fn content_moves_to_a_segment_when_it_grows() {
        let store = Arc::new(SegmentStore::new(4, 4, None).unwrap());
        let mut content = Content::default();
        content.write(&store, 8192, 100, b"abc").unwrap();
        assert!(matches!(content, Content::Heap(ref bytes) if bytes.len() == 103));
        content.write(&store, 8192, 8190, b"defg").unwrap();
        assert!(matches!(content, Content::Segment(_)));
        let mut buffer = [1; 8200];
        content.read(0, &mut &mut buffer[..], 0..8200).unwrap();
        assert_eq!(&buffer[98..104], b"\0\0abc\0");
        assert_eq!(&buffer[8189..8196], b"\0defg\0\0");
        content.punch(0, 4096).unwrap();
        content.read(0, &mut &mut buffer[..], 0..8200).unwrap();
        assert_eq!(buffer[101], 0);
    }
}
