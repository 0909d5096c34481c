//! Reads, writes and punches the content of a compact file.

use crate::file::File;
use poolfs_libservice::Result;
use poolfs_types::{AllocateMode, Caller, Errno};
use std::ops::Range;

impl File {
    /// Reads these bytes, below the size, into the begin of `buffer`; their tables are in memory.
    pub fn read(&self, bytes: Range<u64>, buffer: &mut [u8]) -> Result<usize> {
        let count = (bytes.end - bytes.start) as usize;
        let mut offset = bytes.start;
        while offset < bytes.end {
            let run = self.run(offset, bytes.end);
            let from = (offset - bytes.start) as usize;
            let piece = &mut buffer[from..from + run.length as usize];
            let read = match run.at {
                Some(at) => self.own.read_full(at, piece)?,
                None => 0,
            };
            // What is behind the end below was never written.
            piece[read..].fill(0);
            offset += run.length;
        }
        if let Some(stale) = self.stale_in(&bytes) {
            buffer[(stale.start - bytes.start) as usize..(stale.end - bytes.start) as usize].fill(0);
        }
        Ok(count)
    }

    /// Writes `data` to these bytes, which have places; returns how many bytes, at least one.
    pub fn put(&self, bytes: Range<u64>, data: &[u8]) -> Result<usize> {
        let mut offset = bytes.start;
        while offset < bytes.end {
            let run = self.run(offset, bytes.end);
            let from = (offset - bytes.start) as usize;
            let at = run.at.ok_or(Errno::EIO)?;
            match self.own.write_some(at, &data[from..from + run.length as usize]) {
                Ok(count) => offset += count as u64,
                Err(error) if offset == bytes.start => return Err(error),
                Err(_) => break,
            }
        }
        Ok((offset - bytes.start) as usize)
    }

    /// Writes `data` to these bytes, giving places to those that have none; returns how many bytes, at least one.
    pub fn write(&mut self, bytes: Range<u64>, data: &[u8]) -> Result<usize> {
        self.drop_stale()?;
        self.have_reach(bytes.end)?;
        self.learn(&bytes)?;
        let unit = self.record.unit();
        let (first, last) = (bytes.start / unit, bytes.end.div_ceil(unit));
        let mut made = Vec::new();
        let mut end = bytes.end;
        for index in first..last {
            let whole = index * unit >= bytes.start && (index + 1) * unit <= bytes.end;
            match self.make_unit(index, whole) {
                Ok(true) => made.push(index),
                Ok(false) => {}
                Err(error) if index == first => return Err(error),
                Err(_) => {
                    end = index * unit;
                    break;
                }
            }
        }
        let length = (end - bytes.start) as usize;
        let written = self.put(bytes.start..end, &data[..length]);
        let mut done = bytes.start + written.as_ref().map_or(0, |&count| count as u64);
        for index in made.into_iter().rev() {
            let (first, last) = (index * unit, (index + 1) * unit);
            // Of a unit that was to be written whole, the rest may be something else.
            let is_cut = first >= bytes.start && last <= bytes.end && last > done;
            if is_cut {
                done = done.min(first);
            }
            if first >= done {
                self.unmake_unit(index);
            }
        }
        if done > self.record.size {
            self.record.size = done;
            self.is_dirty = true;
        }
        match written {
            Ok(_) if done == bytes.start => Err(Errno::ENOSPC.into()),
            Ok(_) => Ok((done - bytes.start) as usize),
            Err(error) => Err(error),
        }
    }

    /// Gives places to these bytes, with room for them on disk.
    pub fn reserve(&mut self, bytes: Range<u64>) -> Result<()> {
        self.drop_stale()?;
        self.have_reach(bytes.end)?;
        let (unit, region) = (self.record.unit(), self.record.region());
        let mut at = bytes.start;
        while at < bytes.end {
            let end = bytes.end.min((at / region + 1) * region);
            self.learn(&(at..end))?;
            let mut made = Vec::new();
            let reserved = (at / unit..end.div_ceil(unit)).try_for_each(|index| {
                if self.make_unit(index, false)? {
                    made.push(index);
                }
                Ok(())
            });
            let reserved = reserved.and_then(|()| made.iter().try_for_each(|&index| self.reserve_unit(index)));
            if let Err(error) = reserved {
                made.into_iter().for_each(|index| self.unmake_unit(index));
                return Err(error);
            }
            at = end;
        }
        Ok(())
    }

    /// Has room on disk for a unit with zeros.
    fn reserve_unit(&self, index: u64) -> Result<()> {
        let unit = self.record.unit();
        let Some(at) = self.run(index * unit, index * unit + 1).at else { return Ok(()) };
        match self.own.branch().fallocate(&Caller::ROOT, self.own.id(), AllocateMode::empty(), at, unit) {
            Err(error) if error == Errno::EOPNOTSUPP => self.fill(at, unit),
            other => other,
        }
    }

    /// Has these bytes read as zeros, and keeps as few places for them as can be.
    pub fn punch(&mut self, bytes: Range<u64>) -> Result<()> {
        self.drop_stale()?;
        let unit = self.record.unit();
        let mut at = bytes.start;
        while at < bytes.end {
            let index = at / unit;
            // A part of the last unit that reaches to the file's end is all of it.
            let end_of_unit = (index + 1) * unit;
            let end = end_of_unit.min(bytes.end);
            let is_whole = at == index * unit && (end == end_of_unit || end >= self.record.size);
            self.learn(&(at..end))?;
            if is_whole {
                self.free_unit(index);
            } else {
                self.put_zeros(at..end)?;
            }
            at = self.next_with_units(end);
        }
        Ok(())
    }

    /// The next byte at or behind `offset` that has a place, or none; below the size.
    pub fn find(&mut self, offset: u64, has_place: bool) -> Result<Option<u64>> {
        let mut at = offset;
        while at < self.record.size {
            if has_place {
                at = self.next_with_units(at).max(at);
                if at >= self.record.size {
                    break;
                }
            }
            let region_end = (at / self.record.region() + 1) * self.record.region();
            let end = region_end.min(self.record.size);
            self.learn(&(at..end))?;
            while at < end {
                let run = self.run(at, end);
                if run.at.is_some() == has_place {
                    return Ok(Some(at));
                }
                at += run.length;
            }
        }
        Ok(None)
    }
}
