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
use crate::format::Origin;
use crate::marks;
use crate::node::{Node, State, lock};
use crate::{Union, inode, work};
use hashbrown::HashSet;
use poolfs_libservice::{DirectoryEntry, Error, Headroom, Held, Opened, Result};
use poolfs_types::{Caller, Errno, FileType, Name, NodeId};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use xxhash_rust::xxh3::xxh3_64;

/// Most names one merged listing holds.
const ENTRIES_MAX: usize = 1 << 22;
/// Bytes of a listing under construction that are counted at once.
const COUNTED_AT_ONCE: usize = 64 << 10;
/// What a name takes beside its bytes that is kept in memory of its own.
const NAME_COST: usize = 80;
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
fn is_merged(cookie: u64) -> bool {
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
struct Counted {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Counted {
    fn new(memory: &Arc<Memory>) -> Self {
        Counted { memory: memory.clone(), bytes: 0 }
    }

    /// It has so many bytes now; as many as before if there is no room.
    fn set(&mut self, bytes: usize) -> Result<()> {
        let bytes = bytes as u64;
        if let Some(more) = bytes.checked_sub(self.bytes) {
            if !self.memory.add(more) {
                return Err(Error::new(
                    Errno::ENOMEM,
                    "too many large directories of several branches are being listed",
                ));
            }
        } else {
            self.memory.subtract(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }

    /// It is growing to so many bytes, which are counted some at a time, and not the first of them: whoever looks at a small directory
    /// needs no room.
    fn grow(&mut self, bytes: usize) -> Result<()> {
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

struct Entry {
    start: usize,
    inode: u64,
    /// the lower half of its cookie
    place: u32,
    length: u8,
    file_type: FileType,
}

const _: () = assert!(size_of::<Entry>() == 24);

/// The merged names of a directory at one moment.
#[derive(Default)]
pub(crate) struct Listing {
    names: Vec<u8>,
    entries: Vec<Entry>,
    counted: Option<Counted>,
}

impl Listing {
    fn new(memory: &Arc<Memory>) -> Self {
        Listing { counted: Some(Counted::new(memory)), ..Listing::default() }
    }

    fn bytes(&self) -> usize {
        self.names.len() + self.entries.len() * size_of::<Entry>()
    }

    fn push(&mut self, name: &[u8], file_type: FileType, inode: u64) -> Result<()> {
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
    fn sort(&mut self) {
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
    fn finish(&mut self) -> Result<()> {
        self.sort();
        self.names.shrink_to_fit();
        self.entries.shrink_to_fit();
        let bytes = self.bytes();
        self.counted.as_mut().map_or(Ok(()), |counted| counted.set(bytes))
    }

    fn name(&self, entry: &Entry) -> &[u8] {
        &self.names[entry.start..entry.start + usize::from(entry.length)]
    }

    /// Hands out the entries after `cookie`.
    fn visit(&self, cookie: u64, visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>) -> Result<()> {
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
enum Part {
    Upper(Arc<Held>),
    /// and whether it may hold whiteouts in xattr form
    Lower(LowerNode, bool),
}

/// A name as a branch, or as the union, lists it.
struct Named {
    name: Vec<u8>,
    file_type: FileType,
    inode: u64,
    cookie: u64,
}

/// What users see of a branch's name.
enum Judged {
    Nothing,
    Whiteout,
    Inode(u64),
}

/// Some consecutive names of a part that users see.
struct Chunk {
    /// the cookie that leads to the first
    start: u64,
    /// the cookie that leads on after the last; none at the end of the directory
    end: Option<u64>,
    entries: Vec<Named>,
    /// while it is kept
    _counted: Option<Counted>,
}

impl Chunk {
    /// Which entry follows `cookie`, if the chunk knows.
    fn index_after(&self, cookie: u64) -> Option<usize> {
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
    part: Part,
    progress: Mutex<Progress>,
}

#[derive(Default)]
struct Progress {
    /// the branch's directory, opened when its first name is asked for
    opened: Option<Opened>,
    /// what the last call fetched; the next one mostly goes on in it
    recent: Option<Arc<Chunk>>,
}

/// The next names of a branch's directory after `cookie`; none at the end.
fn names_after(directory: &Opened, cookie: u64) -> Result<Vec<Named>> {
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

impl Union {
    /// The walk of a handle that is being opened, where that decides what its cookies are. Callers hold the namespace lock.
    pub(crate) fn walk_when_opened(&self, node: &Node) -> Result<Option<Walk>> {
        if node.read().removed {
            return Ok(None);
        }
        let mut parts = self.parts(&node.read())?;
        let single = if parts.len() == 1 { parts.pop() } else { None };
        Ok(single.map(|part| Walk::Single(Arc::new(Single { part, progress: Mutex::default() }))))
    }

    /// Begins a walk through a directory. Callers hold the namespace lock.
    pub(crate) fn begin_walk(&self, node: &Node) -> Result<Walk> {
        if node.read().removed {
            return Ok(Walk::Merged(Arc::default()));
        }
        if let Some(walk) = self.walk_when_opened(node)? {
            return Ok(walk);
        }
        let mut listing = Listing::new(&self.listings);
        self.each_name(node, &mut |named, inode| {
            listing.push(&named.name, named.file_type, inode).map(|()| ControlFlow::Continue(()))
        })?;
        listing.finish()?;
        Ok(Walk::Merged(Arc::new(listing)))
    }

    /// Goes on with a walk after `cookie`.
    pub(crate) fn go_on(
        &self,
        node: &Node,
        walk: &Walk,
        mut cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let single = match walk {
            Walk::Merged(listing) => return listing.visit(cookie, visit),
            Walk::Single(single) => single,
        };
        loop {
            let chunk = self.chunk(node, single, cookie)?;
            for Named { name, file_type, inode, cookie } in &chunk.entries[chunk.index_after(cookie).unwrap_or(0)..] {
                let (name, file_type, inode, cookie) = (Name::new(name)?, *file_type, *inode, *cookie);
                if visit(DirectoryEntry { name, inode, file_type, cookie }).is_break() {
                    return Ok(());
                }
            }
            match chunk.end {
                Some(end) => cookie = end,
                None => return Ok(()),
            }
        }
    }

    /// The names that follow `cookie`, and perhaps some before.
    fn chunk(&self, node: &Node, single: &Single, cookie: u64) -> Result<Arc<Chunk>> {
        let mut progress = lock(&single.progress);
        if let Some(chunk) = progress.recent.as_ref().filter(|chunk| chunk.index_after(cookie).is_some()) {
            return Ok(chunk.clone());
        }
        let _names = self.names();
        let opened = match progress.opened.take() {
            Some(opened) => opened,
            None => self.open_part(&single.part)?,
        };
        let names = if node.read().removed { Ok(Vec::new()) } else { names_after(&opened, cookie) };
        progress.opened = Some(opened);
        let names = names?;
        let end = names.last().map(|last| last.cookie);
        let mut entries = Vec::new();
        for named in names {
            if let Judged::Inode(inode) = self.judge(node, &single.part, &named)? {
                entries.push(Named { inode, ..named });
            }
        }
        let mut counted = Counted::new(&self.listings);
        let is_kept = counted.set(entries.iter().map(|named| named.name.len() + NAME_COST).sum()).is_ok();
        let chunk = Arc::new(Chunk { start: cookie, end, entries, _counted: is_kept.then_some(counted) });
        progress.recent = is_kept.then(|| chunk.clone());
        Ok(chunk)
    }

    /// Whether a directory shows no name. Callers hold the namespace lock, here and below.
    pub(crate) fn is_empty(&self, node: &Node) -> Result<bool> {
        let mut empty = true;
        self.each_name(node, &mut |_, _| {
            empty = false;
            Ok(ControlFlow::Break(()))
        })?;
        Ok(empty)
    }

    /// How many directories a directory shows.
    pub(crate) fn count_subdirectories(&self, node: &Node) -> Result<u32> {
        let mut count = 0;
        self.each_name(node, &mut |named, _| {
            count += u32::from(named.file_type == FileType::Directory);
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(count)
    }

    /// The names that a directory shows.
    pub(crate) fn shown_names(&self, node: &Node) -> Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        self.each_name(node, &mut |named, _| {
            names.push(named.name.clone());
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(names)
    }

    /// Every name that a directory shows, once, with its inode number.
    fn each_name(&self, node: &Node, visit: &mut dyn FnMut(&Named, u64) -> Result<ControlFlow<()>>) -> Result<()> {
        let parts = self.parts(&node.read())?;
        let mut seen: HashSet<Vec<u8>> = HashSet::new();
        let (mut counted, mut bytes) = (Counted::new(&self.listings), 0);
        for (at, part) in parts.iter().enumerate() {
            let opened = self.open_part(part)?;
            let mut cookie = 0;
            loop {
                let names = names_after(&opened, cookie)?;
                let Some(last) = names.last() else { break };
                cookie = last.cookie;
                for named in names {
                    if seen.contains(&named.name) {
                        continue;
                    }
                    match self.judge(node, part, &named)? {
                        Judged::Nothing => continue,
                        Judged::Whiteout => {}
                        Judged::Inode(inode) => {
                            if visit(&named, inode)?.is_break() {
                                return Ok(());
                            }
                        }
                    }
                    if at + 1 < parts.len() {
                        bytes += named.name.len() + NAME_COST;
                        seen.insert(named.name);
                        counted.grow(bytes)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn parts(&self, state: &State) -> Result<Vec<Part>> {
        let mut parts: Vec<_> = state.upper.iter().cloned().map(Part::Upper).collect();
        for lower in &state.lowers {
            let marks = marks::Marks::read(&*self.lowers[lower.layer].layer, lower.held.node())?;
            parts.push(Part::Lower(lower.clone(), marks.whiteouts));
        }
        Ok(parts)
    }

    fn open_part(&self, part: &Part) -> Result<Opened> {
        match part {
            Part::Upper(held) => Opened::directory(&self.upper, held.node()),
            Part::Lower(lower, _) => Opened::directory(&self.lowers[lower.layer].layer, lower.held.node()),
        }
    }

    fn judge(&self, node: &Node, part: &Part, named: &Named) -> Result<Judged> {
        match part {
            Part::Upper(held) => self.judge_upper(node, held, named),
            Part::Lower(lower, whiteouts) => self.judge_lower(lower, *whiteouts, named),
        }
    }

    /// Whether an upper name is a whiteout, and the inode number of a copied-up object.
    fn judge_upper(&self, node: &Node, parent: &Held, named: &Named) -> Result<Judged> {
        if node.id == NodeId::ROOT && named.name == work::DIRECTORY {
            return Ok(Judged::Nothing);
        }
        let shown = Judged::Inode(inode::shown(inode::UPPER, named.inode));
        let (suspect, impure) = {
            let state = node.read();
            (state.whiteouts && named.file_type == FileType::Regular, state.impure)
        };
        if !suspect && !impure {
            return Ok(shown);
        }
        let entry = match self.upper.lookup(ROOT, parent.node(), Name::new(&named.name)?) {
            Ok(entry) => entry,
            Err(error) if error == Errno::ENOENT => return Ok(Judged::Nothing),
            Err(error) => return Err(error),
        };
        let held = Held::new(&self.upper, entry.node);
        if let Some(inode) = self.nodes.inode_of_upper(held.node()) {
            return Ok(Judged::Inode(inode));
        }
        if suspect && marks::is_xattr_whiteout(&*self.upper, held.node(), &entry.attributes)? {
            return Ok(Judged::Whiteout);
        }
        match self.upper.getxattr(ROOT, held.node(), marks::ORIGIN) {
            Ok(value) => Ok(Origin::decode(&value).map_or(shown, |origin| Judged::Inode(origin.inode))),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(shown),
            Err(error) => Err(error),
        }
    }

    fn judge_lower(&self, directory: &LowerNode, whiteouts: bool, named: &Named) -> Result<Judged> {
        if directory.path.is_empty() && named.name == work::DIRECTORY {
            return Ok(Judged::Nothing);
        }
        let lower = &self.lowers[directory.layer];
        let suspect = named.file_type == FileType::CharDevice || whiteouts && named.file_type == FileType::Regular;
        let whiteout = suspect
            && match self.lower_entry(directory.layer, &directory.held, &directory.path, &named.name) {
                Ok(Some((entry, attributes))) => lower.is_whiteout(entry.held.node(), &attributes)?,
                Ok(None) => true,
                // Too deep: whatever it is, whoever asks for it is told so.
                Err(error) if error == Errno::ENAMETOOLONG => false,
                Err(error) => return Err(error),
            };
        if whiteout { Ok(Judged::Whiteout) } else { Ok(Judged::Inode(inode::shown(&lower.layer_id, named.inode))) }
    }
}
