//! Directory merge: the names of a directory in all its branches, each once.
//!
//! A listing is made when a walk starts (cookie 0) and kept by the handle, so that cookies stay good whatever changes
//! meanwhile. It holds each name once, name and 24 bytes; a directory of more than [`ENTRIES_MAX`] names is refused
//! with `ENOMEM`.

use crate::branch::Opened;
use crate::format::Origin;
use crate::marks;
use crate::node::{Node, State};
use crate::{Union, inode, work};
use hashbrown::HashSet;
use poolfs_libservice::{DirectoryEntry, Result, fail};
use poolfs_types::{Caller, Errno, FileType, Name, NodeId};
use std::ops::ControlFlow;

/// Most names one listing holds.
pub(crate) const ENTRIES_MAX: usize = 1 << 22;
const ROOT: &Caller = &Caller::ROOT;

struct Entry {
    start: usize,
    length: u8,
    file_type: FileType,
    inode: u64,
}

/// The merged names of a directory at one moment.
#[derive(Default)]
pub(crate) struct Listing {
    names: Vec<u8>,
    entries: Vec<Entry>,
}

impl Listing {
    fn push(&mut self, name: &[u8], file_type: FileType, inode: u64) {
        self.entries.push(Entry { start: self.names.len(), length: name.len() as u8, file_type, inode });
        self.names.extend_from_slice(name);
    }

    fn name(&self, entry: &Entry) -> &[u8] {
        &self.names[entry.start..entry.start + usize::from(entry.length)]
    }

    /// Hands out the entries after `cookie`.
    pub fn visit(&self, cookie: u64, visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>) -> Result<()> {
        let from = usize::try_from(cookie).unwrap_or(usize::MAX).min(self.entries.len());
        for (at, entry) in self.entries.iter().enumerate().skip(from) {
            let entry = DirectoryEntry {
                name: Name::new(self.name(entry))?,
                inode: entry.inode,
                file_type: entry.file_type,
                cookie: at as u64 + 1,
            };
            if visit(entry).is_break() {
                break;
            }
        }
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn subdirectories(&self) -> u32 {
        self.entries.iter().filter(|entry| entry.file_type == FileType::Directory).count() as u32
    }
}

impl Union {
    /// The merged names of a directory.
    pub(crate) fn list(&self, node: &Node) -> Result<Listing> {
        let state = node.read();
        let mut listing = Listing::default();
        let mut seen: HashSet<Vec<u8>> = HashSet::new();
        let merged = usize::from(state.upper.is_some()) + state.lowers.len() > 1;
        self.list_upper(node.id, &state, merged, &mut listing, &mut seen)?;
        for at in 0..state.lowers.len() {
            self.list_lower(&state, at, merged, &mut listing, &mut seen)?;
        }
        Ok(listing)
    }

    fn list_upper(
        &self,
        id: NodeId,
        state: &State,
        merged: bool,
        listing: &mut Listing,
        seen: &mut HashSet<Vec<u8>>,
    ) -> Result<()> {
        let Some(held) = &state.upper else { return Ok(()) };
        for (name, file_type, number) in self.branch_names(&self.upper, held.node())? {
            if id == NodeId::ROOT && name == work::DIRECTORY {
                continue;
            }
            let suspect = state.whiteouts && file_type == FileType::Regular;
            let mut shown = inode::shown(inode::UPPER, number);
            if suspect || state.impure {
                match self.look_closer(held.node(), &name, suspect)? {
                    Closer::Gone => continue,
                    Closer::Whiteout => {
                        seen.insert(name);
                        continue;
                    }
                    Closer::Inode(inode) => shown = inode.unwrap_or(shown),
                }
            }
            listing.push(&name, file_type, shown);
            if merged {
                seen.insert(name);
            }
            check_length(listing)?;
        }
        Ok(())
    }

    /// Whether an upper name is a whiteout, and the inode number of a copied-up object.
    fn look_closer(&self, parent: NodeId, name: &[u8], suspect: bool) -> Result<Closer> {
        let entry = match self.upper.lookup(ROOT, parent, Name::new(name)?) {
            Ok(entry) => entry,
            Err(error) if error == Errno::ENOENT => return Ok(Closer::Gone),
            Err(error) => return Err(error),
        };
        let held = crate::branch::Held::new(&self.upper, entry.node);
        if let Some(inode) = self.nodes.inode_of_upper(held.node()) {
            return Ok(Closer::Inode(Some(inode)));
        }
        if suspect && marks::is_xattr_whiteout(&*self.upper, held.node(), &entry.attributes)? {
            return Ok(Closer::Whiteout);
        }
        Ok(Closer::Inode(match self.upper.getxattr(ROOT, held.node(), marks::ORIGIN) {
            Ok(value) => Origin::decode(&value).ok().map(|origin| origin.inode),
            Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => None,
            Err(error) => return Err(error),
        }))
    }

    fn list_lower(
        &self,
        state: &State,
        at: usize,
        merged: bool,
        listing: &mut Listing,
        seen: &mut HashSet<Vec<u8>>,
    ) -> Result<()> {
        let directory = &state.lowers[at];
        let lower = &self.lowers[directory.layer];
        let node = directory.held.node();
        let whiteouts = marks::Marks::read(&*lower.layer, node)?.whiteouts;
        for (name, file_type, number) in self.branch_names(&lower.layer, node)? {
            if seen.contains(&name) || directory.path.is_empty() && name == work::DIRECTORY {
                continue;
            }
            let suspect = file_type == FileType::CharDevice || whiteouts && file_type == FileType::Regular;
            let whiteout = suspect
                && match self.lower_entry(directory.layer, &directory.held, &directory.path, &name)? {
                    Some((entry, attributes)) => {
                        marks::is_lower_whiteout(&*lower.layer, entry.held.node(), &attributes)?
                    }
                    None => true,
                };
            if !whiteout {
                listing.push(&name, file_type, inode::shown(&lower.layer_id, number));
                check_length(listing)?;
            }
            if merged {
                seen.insert(name);
            }
        }
        Ok(())
    }

    fn branch_names(&self, branch: &crate::branch::Branch, node: NodeId) -> Result<Vec<(Vec<u8>, FileType, u64)>> {
        let directory = Opened::directory(branch, node)?;
        let mut names = Vec::new();
        branch.readdir(ROOT, directory.id(), 0, &mut |entry| {
            names.push((entry.name.as_bytes().to_vec(), entry.file_type, entry.inode));
            if names.len() > ENTRIES_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(names)
    }
}

enum Closer {
    Gone,
    Whiteout,
    Inode(Option<u64>),
}

fn check_length(listing: &Listing) -> Result<()> {
    if listing.entries.len() > ENTRIES_MAX { fail(Errno::ENOMEM) } else { Ok(()) }
}
