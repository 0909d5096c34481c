//! Fills a layer with a random tree that is determined by the seed.

use super::operation::bytes;
use super::world::ROOT_USER;
use crate::types::{Errno, FileType, HandleId, Name, NodeId, OpenFlags, SetAttributes, SetTime, Timestamp, XattrFlags};
use crate::{Libservice, Result};
use fastrand::Rng;

/// How deep directories may lie.
const DEPTH_MAX: usize = 6;

/// Makes the random tree of `seed` with `files` regular files, of up to several MiB, among nested directories, hard
/// links, symlinks, pipes, xattrs and holes, with times of their own; then syncs. `layer` should be empty.
///
/// # Panics
/// When the layer refuses something.
pub fn populate(layer: &dyn Libservice, seed: u64, files: usize) {
    let mut populator = Populator { layer, random: Rng::with_seed(seed), made: Vec::new() };
    if let Err(error) = populator.run(files) {
        panic!("populating with seed {seed}: {error}");
    }
}

struct Populator<'a> {
    layer: &'a dyn Libservice,
    random: Rng,
    /// Everything made, parents before children; each holds a reference.
    made: Vec<Made>,
}

struct Made {
    node: NodeId,
    file_type: FileType,
    depth: usize,
}

impl Populator<'_> {
    fn run(&mut self, files: usize) -> Result<()> {
        for number in 0..files {
            match self.random.u8(0..10) {
                0..3 => self.directory(number)?,
                3 => self.link(number)?,
                4 => self.symlink(number)?,
                5 if self.random.u8(0..4) == 0 => self.pipe(number)?,
                _ => {}
            }
            self.file(number)?;
        }
        // Names change the times of directories, so these come last.
        for at in 0..self.made.len() {
            let modified =
                Timestamp { seconds: self.random.i64(0..999_999_999), nanoseconds: self.random.u32(0..1000) };
            let changes = SetAttributes { modified: Some(SetTime::At(modified)), ..Default::default() };
            self.layer.setattr(&ROOT_USER, self.made[at].node, &changes, None)?;
        }
        self.made.iter().for_each(|made| self.layer.forget(made.node, 1));
        self.layer.sync()
    }

    fn file(&mut self, number: usize) -> Result<()> {
        let (parent, depth) = self.parent();
        let name = format!("file-{number}");
        let permissions = self.random.u32(0..0o1000);
        let (entry, handle) =
            self.layer.create(&ROOT_USER, parent, name_of(&name), permissions, OpenFlags::READ_WRITE)?;
        let sizes = [0, 1, 4095, 4096, 4097, 8192, 65_536];
        let size = match self.random.u8(0..20) {
            0..7 => sizes[self.random.usize(0..sizes.len())],
            7..17 => self.random.usize(0..70_000),
            17 | 18 => self.random.usize(0..400_000),
            _ => (1 << 20) + self.random.usize(0..4 << 20),
        };
        self.write(handle, 0, size)?;
        if self.random.u8(0..8) == 0 {
            // A hole, and a little behind it.
            let offset = size as u64 + self.random.u64(0..200_000);
            self.write(handle, offset, 100)?;
        }
        self.layer.release(handle);
        self.made.push(Made { node: entry.node, file_type: FileType::Regular, depth });
        self.decorate(entry.node)
    }

    fn write(&mut self, handle: HandleId, offset: u64, length: usize) -> Result<()> {
        let data = bytes(self.random.u64(1..), length);
        let mut done = 0;
        while done < length {
            done += self.layer.write(&ROOT_USER, handle, offset + done as u64, &data[done..])?.count;
        }
        Ok(())
    }

    fn directory(&mut self, number: usize) -> Result<()> {
        let (parent, depth) = self.parent();
        let name = format!("directory-{number}");
        let permissions = self.random.u32(0..0o1000);
        let entry = self.layer.mkdir(&ROOT_USER, parent, name_of(&name), permissions)?;
        self.made.push(Made { node: entry.node, file_type: FileType::Directory, depth: depth + 1 });
        self.decorate(entry.node)
    }

    fn link(&mut self, number: usize) -> Result<()> {
        let files: Vec<NodeId> =
            self.made.iter().filter(|made| made.file_type == FileType::Regular).map(|made| made.node).collect();
        let Some(&node) = self.random.choice(&files) else { return Ok(()) };
        let (parent, _) = self.parent();
        self.layer.link(&ROOT_USER, node, parent, name_of(&format!("link-{number}")))?;
        self.layer.forget(node, 1);
        Ok(())
    }

    fn symlink(&mut self, number: usize) -> Result<()> {
        let (parent, depth) = self.parent();
        let target = format!("../file-{}", self.random.usize(0..=number));
        let name = format!("symlink-{number}");
        let entry = self.layer.symlink(&ROOT_USER, parent, name_of(&name), target.as_bytes())?;
        self.made.push(Made { node: entry.node, file_type: FileType::Symlink, depth });
        Ok(())
    }

    fn pipe(&mut self, number: usize) -> Result<()> {
        let (parent, depth) = self.parent();
        let name = format!("pipe-{number}");
        let entry = self.layer.mknod(&ROOT_USER, parent, name_of(&name), FileType::Fifo, 0o640, 0)?;
        self.made.push(Made { node: entry.node, file_type: FileType::Fifo, depth });
        Ok(())
    }

    /// Owners and xattrs for some.
    fn decorate(&mut self, node: NodeId) -> Result<()> {
        if self.random.u8(0..4) == 0 {
            let changes =
                SetAttributes { uid: Some(1000), gid: Some(self.random.u32(0..3) * 1000), ..Default::default() };
            self.layer.setattr(&ROOT_USER, node, &changes, None)?;
        }
        let value: Vec<u8> = (0..self.random.usize(0..60)).map(|_| self.random.u8(..)).collect();
        if self.random.u8(0..4) == 0 {
            match self.layer.setxattr(&ROOT_USER, node, b"user.a", &value, XattrFlags::empty()) {
                Err(error) if error == Errno::EOPNOTSUPP => {}
                result => result?,
            }
        }
        Ok(())
    }

    /// Some directory, and how deep it lies.
    fn parent(&mut self) -> (NodeId, usize) {
        let directories: Vec<(NodeId, usize)> = self
            .made
            .iter()
            .filter(|made| made.file_type == FileType::Directory && made.depth < DEPTH_MAX)
            .map(|made| (made.node, made.depth))
            .collect();
        match self.random.choice(&directories) {
            Some(&found) if self.random.u8(0..5) != 0 => found,
            _ => (NodeId::ROOT, 0),
        }
    }
}

/// The names made here are all valid.
fn name_of(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).unwrap_or_else(|error| panic!("{text:?}: {error}"))
}
