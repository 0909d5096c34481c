//! Directory listings of the union.
//!
//! **One branch.** A directory that only one branch has is passed on as that branch lists it, a few hundred names at a time, with
//! the branch's cookies.
//!
//! **Several branches.** Such a directory is merged when a walk begins, and the listing is kept by the handle, each name once. It
//! takes the name and 24 bytes each, at most [`ENTRIES_MAX`] of them, and for all handles together at most what the union was
//! given. More is refused with `ENOMEM`. Names count from the first one on, together with what is needed to tell which names have
//! been listed. What a handle caches of a branch's listing counts as well: what there is no memory for is fetched again.
//!
//! **Cookies.** The user of a listing may cache it, and continue from a cookie of one handle at another that has listed nothing.
//! So a merged listing is in the order of hashes of its names, which are the cookies: they are valid in any other listing of the
//! directory. Of two names with the same hash, the second takes the next number; if the first is removed between two listings,
//! the second may then be passed over. Which kind of cookies a directory has is determined when it is opened. Merged ones can be
//! told from a branch's ([`MERGED`]), because a directory of one branch becomes one of two with its first change.

use crate::branch::LowerNode;
use poolfs_libservice::{DirectoryEntry, Error, Headroom, Held, Opened, Result};
use poolfs_types::{Caller, Errno, FileType, Name};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use xxhash_rust::xxh3::xxh3_64;

/// Most names one merged listing holds.
const ENTRIES_MAX: usize = 1 << 22;
/// Bytes of a listing under construction that are counted at once.
const COUNTED_AT_ONCE: usize = 64 << 10;
/// What a name takes beside its bytes that is kept in memory of its own.
pub(crate) const NAME_COST: usize = 80;
/// Names fetched from a branch at a time.
const CHUNK_ENTRIES: usize = 256;
/// The upper half of merged listings' cookies. Of the filesystems that hash names, ext4 never uses it but for the end of a
/// directory, and others use small numbers.
const MERGED: u64 = 0x7fff_ffff << 32;
/// The highest hash. Between it and the end of a directory there is room for names that count on.
const HASH_MAX: u32 = 0xff00_0000;
const _: () = assert!(ENTRIES_MAX < (u32::MAX - HASH_MAX) as usize / 2);
const ROOT: &Caller = &Caller::ROOT;

/// Whether a merged listing, of whatever handle, has shown this cookie.
pub(crate) fn is_merged(cookie: u64) -> bool {
    cookie & !u64::from(u32::MAX) == MERGED && cookie as u32 <= HASH_MAX + ENTRIES_MAX as u32
}

/// How much memory the merged listings of a union hold.
pub(crate) struct Memory {
    bytes: AtomicU64,
    bytes_max: u64,
    /// What others have counts as well.
    room: Option<Arc<dyn Headroom>>,
}

impl Memory {
    pub fn new(bytes_max: u64, room: Option<Arc<dyn Headroom>>) -> Self {
        Memory { bytes: AtomicU64::new(0), bytes_max, room }
    }

    fn add(&self, bytes: u64) -> bool {
        let is_within = self.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) <= self.bytes_max;
        let has_room = is_within && self.room.as_ref().is_none_or(|room| room.add(bytes));
        if !has_room {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        has_room
    }

    fn subtract(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.room.iter().for_each(|room| room.subtract(bytes));
    }
}

/// What something has of that memory.
pub(crate) struct Counted {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Counted {
    pub fn new(memory: &Arc<Memory>) -> Self {
        Counted { memory: memory.clone(), bytes: 0 }
    }

    /// It has so many bytes now; as many as before if there is no room.
    pub fn set(&mut self, bytes: usize) -> Result<()> {
        let bytes = bytes as u64;
        if let Some(more) = bytes.checked_sub(self.bytes) {
            if !self.memory.add(more) {
                return Err(Error::new(Errno::ENOMEM, "too many large directories are being listed"));
            }
        } else {
            self.memory.subtract(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// It is growing to so many bytes, which are counted some at a time, and not the first of them: whoever looks at a small directory
    /// needs no room.
    pub fn grow(&mut self, bytes: usize) -> Result<()> {
        let counted = bytes - bytes % COUNTED_AT_ONCE;
        if counted as u64 <= self.bytes { Ok(()) } else { self.set(counted) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.memory.subtract(self.bytes);
    }
}

/// What an open directory lists.
#[derive(Clone)]
pub(crate) enum Walk {
    Merged(Arc<Listing>),
    Single(Arc<Single>),
}

impl Walk {
    /// Whether the walk knows what comes after `cookie`.
    pub fn leads_on_after(&self, cookie: u64) -> bool {
        cookie != 0 && (matches!(self, Self::Merged(_)) || !is_merged(cookie))
    }
}

pub(crate) struct Entry {
    pub start: usize,
    pub inode: u64,
    /// the lower half of its cookie
    pub place: u32,
    pub length: u8,
    pub file_type: FileType,
}

const _: () = assert!(size_of::<Entry>() == 24);

/// The merged names of a directory at one moment.
#[derive(Default)]
pub(crate) struct Listing {
    pub names: Vec<u8>,
    pub entries: Vec<Entry>,
    pub counted: Option<Counted>,
}

impl Listing {
    pub fn new(memory: &Arc<Memory>) -> Self {
        Listing { counted: Some(Counted::new(memory)), ..Listing::default() }
    }

    pub fn bytes(&self) -> usize {
        self.names.len() + self.entries.len() * size_of::<Entry>()
    }

    pub fn push(&mut self, name: &[u8], file_type: FileType, inode: u64) -> Result<()> {
        if self.entries.len() >= ENTRIES_MAX {
            return Err(Error::new(Errno::ENOMEM, "a directory of several branches has too many names to be listed"));
        }
        let place = (xxh3_64(name) as u32).clamp(1, HASH_MAX);
        self.entries.push(Entry { start: self.names.len(), inode, place, length: name.len() as u8, file_type });
        self.names.extend_from_slice(name);
        let bytes = self.bytes();
        self.counted.as_mut().map_or(Ok(()), |counted| counted.grow(bytes))
    }

    /// Puts all names in their places.
    pub fn sort(&mut self) {
        let mut entries = std::mem::take(&mut self.entries);
        entries.sort_unstable_by(|one, other| {
            one.place.cmp(&other.place).then_with(|| self.name(one).cmp(self.name(other)))
        });
        let mut last = 0;
        for entry in &mut entries {
            entry.place = entry.place.max(last + 1);
            last = entry.place;
        }
        self.entries = entries;
    }

    /// Nothing more comes.
    pub fn finish(&mut self) -> Result<()> {
        self.sort();
        self.names.shrink_to_fit();
        self.entries.shrink_to_fit();
        let bytes = self.bytes();
        self.counted.as_mut().map_or(Ok(()), |counted| counted.set(bytes))
    }

    pub fn name(&self, entry: &Entry) -> &[u8] {
        &self.names[entry.start..entry.start + usize::from(entry.length)]
    }

    /// Hands out the entries after `cookie`.
    pub fn visit(&self, cookie: u64, visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>) -> Result<()> {
        let from = match cookie {
            0 => 0,
            cookie if is_merged(cookie) => self.entries.partition_point(|entry| entry.place <= cookie as u32),
            _ => self.entries.len(),
        };
        for entry in &self.entries[from..] {
            let entry = DirectoryEntry {
                name: Name::new(self.name(entry))?,
                inode: entry.inode,
                file_type: entry.file_type,
                cookie: MERGED | u64::from(entry.place),
            };
            if visit(entry).is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// One branch's part of a directory.
pub(crate) enum Part {
    Upper(Arc<Held>),
    /// and whether it may hold whiteouts in xattr form
    Lower(LowerNode, bool),
}

/// A name as a branch, or as the union, lists it.
pub(crate) struct Named {
    pub name: Vec<u8>,
    pub file_type: FileType,
    pub inode: u64,
    pub cookie: u64,
}

/// What users see of a branch's name.
pub(crate) enum Judged {
    Nothing,
    Whiteout,
    Inode(u64),
}

/// Some consecutive names of a part that users see.
pub(crate) struct Chunk {
    /// the cookie that leads to the first
    pub start: u64,
    /// the cookie that leads on after the last; none at the end of the directory
    pub end: Option<u64>,
    pub entries: Vec<Named>,
    /// while it is kept
    pub _counted: Option<Counted>,
}

impl Chunk {
    /// Which entry follows `cookie`, if the chunk knows.
    pub fn index_after(&self, cookie: u64) -> Option<usize> {
        if cookie == self.start {
            return Some(0);
        }
        let known = self.entries.iter().position(|entry| entry.cookie == cookie).map(|at| at + 1);
        // What follows the last one is in another chunk.
        known.filter(|_| self.end != Some(cookie))
    }
}

/// The walk through a directory that one branch alone has.
pub(crate) struct Single {
    pub part: Part,
    pub progress: Mutex<Progress>,
}

#[derive(Default)]
pub(crate) struct Progress {
    /// the branch's directory, opened when its first name is asked for
    pub opened: Option<Opened>,
    /// what the last call fetched; the next one mostly goes on in it
    pub recent: Option<Arc<Chunk>>,
}

/// The next names of a branch's directory after `cookie`; none at the end.
pub(crate) fn names_after(directory: &Opened, cookie: u64) -> Result<Vec<Named>> {
    let mut names = Vec::new();
    directory.branch().readdir(ROOT, directory.id(), cookie, &mut |entry| {
        if names.len() >= CHUNK_ENTRIES {
            return ControlFlow::Break(());
        }
        let DirectoryEntry { name, inode, file_type, cookie } = entry;
        names.push(Named { name: name.as_bytes().to_vec(), file_type, inode, cookie });
        ControlFlow::Continue(())
    })?;
    Ok(names)
}
