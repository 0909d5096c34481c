//! Walks through directories of the union: what each branch lists is judged, merged, and passed on.

use crate::branch::LowerNode;
use crate::format::{self, Origin};
use crate::listing::{Chunk, Counted, Judged, Listing, NAME_COST, Named, Part, Single, Walk, names_after};
use crate::marks;
use crate::node::{Node, State};
use crate::sync::lock;
use crate::{Union, inode};
use hashbrown::HashSet;
use poolfs_libservice::{DirectoryEntry, Held, Opened, Result};
use poolfs_types::{Caller, Errno, FileType, Name, NodeId};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

const ROOT: &Caller = &Caller::ROOT;

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

    /// Every name that a directory shows, once, with its inode number.
    pub(crate) fn each_name(
        &self,
        node: &Node,
        visit: &mut dyn FnMut(&Named, u64) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
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
        if node.id == NodeId::ROOT && named.name == format::DIRECTORY {
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
        if directory.path.is_empty() && named.name == format::DIRECTORY {
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
