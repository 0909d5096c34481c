//! The check of a sketch's bitmap: whether it exists, is undamaged, and belongs to this sketch.

use super::{Checker, Places, Problem, ROOT, in_work_directory};
use crate::bitmap::{Bitmap, SECTOR_BLOCKS, SECTOR_BYTES, mended};
use crate::format::{Cause, SketchRecord, bitmap_name};
use crate::sketch_files::each_sector;
use crate::upper_names::find;
use poolfs_libservice::{Branch, Durability, Held, Opened, Result};
use poolfs_types::{Name, OpenFlags};
use std::ops::ControlFlow;

/// What the sectors of a bitmap are like.
#[derive(Default)]
struct Sectors {
    /// those that a crash has cut
    cut: u64,
    /// the first that is damaged, and by what
    damage: Option<Cause>,
}

/// What is to become of sectors that are not sound.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unsound {
    /// all of them are damage
    Damage,
    /// those that a crash can have cut are counted
    Count,
    /// those are mended
    Mend,
}

/// Looks at every sector that was ever written of a bitmap with `size` bytes, for a file of `blocks` blocks.
fn scan(upper: &Branch, held: &Held, id: &[u8; 16], size: u64, blocks: u64, unsound: Unsound) -> Result<Sectors> {
    let flags = if unsound == Unsound::Mend { OpenFlags::READ_WRITE } else { OpenFlags::READ_ONLY };
    let file = Opened::file(upper, ROOT, held.node(), flags)?;
    let mut sectors = Sectors::default();
    each_sector(&file, size, &mut |number, bytes: &[u8; SECTOR_BYTES]| {
        let mut bitmap = Bitmap::default();
        if let Err(cause) = bitmap.load(id, number, bytes) {
            match mended(id, number, bytes).filter(|_| unsound != Unsound::Damage) {
                None => {
                    sectors.damage = Some(cause);
                    return Ok(ControlFlow::Break(()));
                }
                Some(whole) => {
                    sectors.cut += 1;
                    if unsound == Unsound::Mend {
                        file.write_full(u64::from(number) * SECTOR_BYTES as u64, &whole)?;
                    }
                    bitmap.load(id, number, &whole).unwrap_or_default();
                }
            }
        }
        let first = u64::from(number) * SECTOR_BLOCKS;
        let end = first + SECTOR_BLOCKS;
        let beyond = first.max(blocks).min(end);
        if bitmap.run_end(beyond, end, false) < end {
            sectors.damage = Some(format!("sector {number} tells of blocks beyond the file's {blocks}"));
            return Ok(ControlFlow::Break(()));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    if unsound == Unsound::Mend && sectors.cut > 0 {
        upper.fsync(ROOT, file.id(), Durability::All)?;
    }
    Ok(sectors)
}

impl Checker<'_> {
    /// Checks the bitmap of a sketch over a lower file of so many blocks, for which it has to have `size` bytes.
    pub fn check_bitmap(
        &mut self,
        places: &Places,
        path: &[u8],
        record: &SketchRecord,
        blocks: u64,
        size: u64,
    ) -> Result<()> {
        let (upper, id, name) = (self.upper, &record.id, bitmap_name(&record.id));
        let found = match &places.bitmaps {
            Some(bitmaps) => find(upper, bitmaps.node(), name.as_bytes())?.map(|found| (bitmaps, found)),
            None => None,
        };
        let Some((bitmaps, (held, attributes))) = found else {
            if record.bitmap_durable {
                self.findings.damage(path, Problem::Bitmap, format!("its bitmap {name} is missing"));
            }
            return Ok(());
        };
        let damage = if attributes.size != size {
            Some(format!("its bitmap {name} has {} bytes instead of {size}", attributes.size))
        } else {
            let how = if self.is_unclean { Unsound::Count } else { Unsound::Damage };
            let sectors = scan(upper, &held, id, size, blocks, how)?;
            if sectors.cut > 0 && sectors.damage.is_none() {
                let cause = format!("{} sectors of its bitmap {name} were cut", sectors.cut);
                let mend = || scan(upper, &held, id, size, blocks, Unsound::Mend).map(drop);
                let _ = self.mendable(path, Problem::BitmapCut, cause, mend);
            }
            sectors.damage
        };
        match damage {
            None => {}
            Some(cause) if record.bitmap_durable => self.findings.damage(path, Problem::Bitmap, cause),
            Some(cause) => {
                let mend = || upper.unlink(ROOT, bitmaps.node(), Name::new(name.as_bytes())?);
                let cause = format!("{cause}; nothing of it was promised");
                if self.mendable(path, Problem::BitmapUnpromised, cause, mend) {
                    let _ = self.bitmaps.remove(id);
                }
            }
        }
        Ok(())
    }

    /// Bitmaps that no sketch names.
    pub fn check_orphans(&mut self, places: &Places) -> Result<()> {
        let Some(bitmaps) = &places.bitmaps else { return Ok(()) };
        let upper = self.upper;
        for (id, owner) in std::mem::take(&mut self.bitmaps) {
            if owner.is_some() {
                continue;
            }
            let name = bitmap_name(&id);
            let path = in_work_directory("bitmaps", name.as_bytes());
            let doubt = match (self.has_lost_attributes, self.has_unknown) {
                (true, _) => Some("no sketch names it: its file has lost its extended attributes"),
                (_, true) => Some("no sketch names it, but it may belong to one that cannot be read"),
                // What a crash leaves, or goes with what is repaired.
                _ if self.is_unclean || self.nameless.contains(&id) => None,
                _ => Some(
                    "no sketch names it: its file was copied without extended attributes, or removed by hand, then remove this too",
                ),
            };
            if let Some(cause) = doubt {
                self.findings.damage(&path, Problem::Orphan, cause);
                continue;
            }
            let mend = || upper.unlink(ROOT, bitmaps.node(), Name::new(name.as_bytes())?);
            let _ = self.mendable(&path, Problem::Orphan, "no sketch names it", mend);
        }
        Ok(())
    }
}
