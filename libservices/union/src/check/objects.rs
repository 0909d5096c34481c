//! The check of one object of the tree: its marks, and what a sketch needs.

use super::{Checker, Places, Problem, ROOT};
use crate::bitmap::SKETCH_SIZE_MAX;
use crate::branch;
use crate::format::{Cause, Origin, SketchRecord};
use crate::lower_path::LowerPath;
use crate::marks::{self, Redirect};
use crate::sketch_files::finish_truncation;
use crate::{bitmap, links, place};
use poolfs_libservice::{Branch, Held, Result};
use poolfs_types::{Attributes, Errno, FileType, OpenFlags};

/// The marks of an object that the rest of its check needs.
#[derive(Default)]
struct Seen {
    origin: Option<std::result::Result<Origin, Cause>>,
    sketch: Option<Vec<u8>>,
    metacopy: bool,
    links: bool,
}

/// What is wrong with a mark that has this value on an object of these attributes, if anything is.
fn wrong_mark(name: &[u8], value: &[u8], attributes: &Attributes) -> Option<String> {
    let is_directory = attributes.is_directory();
    let is_file = attributes.file_type == FileType::Regular;
    let (is_right_object, is_right_value) = match name {
        marks::WHITEOUT => (is_file && attributes.size == 0, value.is_empty()),
        marks::OPAQUE => (is_directory, matches!(value, b"x" | b"y")),
        marks::IMPURE => (is_directory, value == b"y"),
        marks::REDIRECT => (is_directory, Redirect::parse(value).is_ok()),
        marks::WHITEOUTS => (is_directory, value.is_empty()),
        marks::METACOPY => (is_file, value.is_empty()),
        marks::LINKS => (!is_directory, links::parse(value).is_some()),
        marks::SKETCH => (is_file, true),
        _ => (true, true),
    };
    let name = name.escape_ascii();
    if !is_right_object {
        Some(format!("{name} cannot be on such an object"))
    } else if !is_right_value {
        let some = &value[..value.len().min(64)];
        Some(format!("{name} cannot be \"{}\" ({} bytes)", some.escape_ascii(), value.len()))
    } else {
        None
    }
}

impl Checker<'_> {
    pub fn origin(&self, held: &Held) -> Result<Option<Origin>> {
        match self.upper.getxattr(ROOT, held.node(), marks::ORIGIN) {
            Ok(value) => Ok(Origin::decode(&value).ok()),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Looks at one object. What cannot be read of it is a finding.
    pub fn examine(&mut self, places: &Places, path: &[u8], held: &Held, attributes: &Attributes) {
        if let Err(error) = self.try_examine(places, path, held, attributes) {
            self.unreadable(path, &error);
        }
    }

    fn try_examine(&mut self, places: &Places, path: &[u8], held: &Held, attributes: &Attributes) -> Result<()> {
        let seen = self.read_marks(path, held, attributes)?;
        let is_file = attributes.file_type == FileType::Regular;
        if !attributes.is_directory() && seen.links && !self.index.contains_key(&attributes.inode) {
            self.findings.damage(path, Problem::Links, "it has trusted.overlay.nlink, and is not in the index");
        }
        match (is_file, &seen.sketch) {
            (true, Some(value)) => self.sketch(places, path, held, attributes, &seen, value),
            (true, None) if seen.metacopy => {
                let upper = self.upper;
                let cause = "it has trusted.overlay.metacopy, and is no sketch any more";
                let mend = || marks::clear(&**upper, held.node(), marks::METACOPY);
                let _ = self.mendable(path, Problem::MetacopyLeft, cause, mend);
                self.bad_origin(path, &seen);
                Ok(())
            }
            _ => {
                self.bad_origin(path, &seen);
                Ok(())
            }
        }
    }

    fn bad_origin(&mut self, path: &[u8], seen: &Seen) {
        if let Some(Err(cause)) = &seen.origin {
            self.findings.damage(path, Problem::Origin, cause);
        }
    }

    fn read_marks(&mut self, path: &[u8], held: &Held, attributes: &Attributes) -> Result<Seen> {
        let mut seen = Seen::default();
        let names = match self.upper.listxattr(ROOT, held.node()) {
            Ok(names) => names,
            Err(error) if error == Errno::EOPNOTSUPP => return Ok(seen),
            Err(error) => return Err(error),
        };
        for name in names.iter().filter(|name| marks::hidden(name)) {
            let value = self.upper.getxattr(ROOT, held.node(), name)?;
            if let Some(cause) = wrong_mark(name, &value, attributes) {
                self.findings.damage(path, Problem::Mark, cause);
            }
            self.checked.is_upper |= name.starts_with(b"trusted.poolfs.");
            match name.as_slice() {
                marks::ORIGIN => seen.origin = Some(Origin::decode(&value)),
                marks::SKETCH => seen.sketch = Some(value),
                marks::METACOPY => seen.metacopy = true,
                marks::LINKS => seen.links = true,
                _ => {}
            }
        }
        Ok(seen)
    }

    /// Why a sketch is not the one whose bitmap it names, if it is not.
    fn stranger(&mut self, record: &SketchRecord, inode: u64) -> Option<Cause> {
        let first = *self.bitmaps.entry(record.id).or_default().get_or_insert(inode);
        if self.are_owners_known {
            return place::stranger(record, inode);
        }
        (first != inode).then(|| {
            let name = crate::format::bitmap_name(&record.id);
            format!("another sketch, with the inode number {first} in the upper branch, has the same bitmap {name}")
        })
    }

    fn sketch(
        &mut self,
        places: &Places,
        path: &[u8],
        held: &Held,
        attributes: &Attributes,
        seen: &Seen,
        value: &[u8],
    ) -> Result<()> {
        self.checked.sketches += 1;
        let mut record = match SketchRecord::decode(value) {
            Ok(record) => record,
            Err(cause) => {
                // The id stands at the same place in every version.
                let id = value.get(8..24).and_then(|id| <[u8; 16]>::try_from(id).ok());
                match id.and_then(|id| self.bitmaps.get_mut(&id)) {
                    Some(owner) => *owner = Some(attributes.inode),
                    None => self.has_unknown = true,
                }
                self.findings.damage(path, Problem::Record, cause);
                self.bad_origin(path, seen);
                return Ok(());
            }
        };
        let stranger = self.stranger(&record, attributes.inode);
        let origin = match &seen.origin {
            Some(Ok(origin)) => origin,
            Some(Err(cause)) => {
                self.findings.damage(path, Problem::Origin, cause);
                return Ok(());
            }
            None => {
                self.findings.damage(path, Problem::Origin, "it is a sketch, and its origin is missing");
                return Ok(());
            }
        };
        if record.limit > origin.size.min(SKETCH_SIZE_MAX) {
            let cause = format!("its limit is {}, its lower file had {} bytes", record.limit, origin.size);
            self.findings.damage(path, Problem::Record, cause);
            return Ok(());
        }
        let upper = self.upper;
        if !seen.metacopy {
            let cause = "it is a sketch without trusted.overlay.metacopy";
            let mend = || marks::set(&**upper, held.node(), marks::METACOPY, b"");
            let _ = self.mendable(path, Problem::MetacopyMissing, cause, mend);
        }
        if record.is_truncating() {
            let cause = format!("a truncation to {} bytes was not finished", record.size);
            let _ = self.mendable(path, Problem::Truncation, cause, || finish_truncation(upper, held, &mut record));
        }
        if let Some(cause) = stranger {
            self.findings.damage(path, Problem::Bitmap, cause);
        } else {
            self.check_bitmap(places, path, &record, bitmap::blocks(origin.size), bitmap::file_bytes(origin.size))?;
        }
        if let Some(lowers) = self.lowers {
            match branch::lower_of(lowers, &LowerPath::root(None), origin)? {
                Ok((lower, _)) if lowers[lower.layer].is_union => {
                    if let Err(error) = open_once(&lowers[lower.layer].layer, &lower.held) {
                        let (shown, layer) = (origin.path.escape_ascii(), &origin.layer_id);
                        let cause = format!("its lower file \"{shown}\" of layer {layer} cannot be read: {error}");
                        self.findings.damage(path, Problem::Lower, cause);
                    }
                }
                Ok(_) => {}
                Err(cause) => self.findings.damage(path, Problem::Lower, cause),
            }
        }
        Ok(())
    }
}

/// A file of a branch that was an upper one may have bytes further below: whether they are there shows when it is opened.
fn open_once(layer: &Branch, file: &Held) -> Result<()> {
    let handle = layer.open(ROOT, file.node(), OpenFlags::READ_ONLY)?;
    layer.release(handle);
    Ok(())
}
