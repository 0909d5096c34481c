//! Directory listings of the FUSE front. Cookies 1 and 2 are those of `.` and `..`; those of the layers follow.

use super::abi::EntryOut;
use super::answer::{Answer, Given, Keeps, Listed};
use super::front::{Front, Outcome, mistaken};
use crate::handles::OpenFile;
use crate::request::{Context, Reply, Request};
use poolfs_libservice::types::{Errno, FileType, Name};
use poolfs_libservice::{DirectoryEntry, Entry};
use std::ops::ControlFlow;

/// What is added to a layer's cookie.
const COOKIES: u64 = 2;

/// Most names of one listing with attributes: each is looked up before the answer.
const LOOKED_UP_MAX: usize = 1024;

/// A name that is kept while the layer goes on listing.
struct Kept {
    bytes: Vec<u8>,
    inode: u64,
    file_type: FileType,
    cookie: u64,
}

fn listed<'a>(entry: &DirectoryEntry<'a>) -> Listed<'a> {
    let cookie = entry.cookie.saturating_add(COOKIES);
    Listed { bytes: entry.name.as_bytes(), inode: entry.inode, file_type: entry.file_type, cookie }
}

impl Front {
    /// The names after `cookie`, as many as there is room for.
    pub(super) fn list(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        cookie: u64,
        answer: &mut Answer<'_>,
    ) -> Outcome<()> {
        if !self.put_dots(context, file, cookie, false, answer)? {
            return Ok(());
        }
        self.visit(context, file, cookie, &mut |entry| match answer.put_name(None, &listed(&entry)) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        })
    }

    /// The same with the attributes of each. They are looked up when the layer is done: it may hold locks while it lists.
    pub(super) fn list_with_attributes(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        cookie: u64,
        answer: &mut Answer<'_>,
    ) -> Outcome<()> {
        if !self.put_dots(context, file, cookie, true, answer)? {
            return Ok(());
        }
        let mut kept = Vec::new();
        let mut left = answer.left();
        self.visit(context, file, cookie, &mut |entry| {
            let name = listed(&entry);
            let size = size_of::<EntryOut>() + name.bytes.len();
            if size > left || kept.len() >= LOOKED_UP_MAX {
                return ControlFlow::Break(());
            }
            left -= size;
            let Listed { inode, file_type, cookie, .. } = name;
            kept.push(Kept { bytes: name.bytes.to_vec(), inode, file_type, cookie });
            ControlFlow::Continue(())
        })?;
        for Kept { bytes, inode, file_type, cookie } in kept {
            let name = Listed { bytes: &bytes, inode, file_type, cookie };
            if !self.put_looked_up(context, file, &name, answer) {
                break;
            }
        }
        Ok(())
    }

    /// `.` and `..`; whether there was room for them. Where the parent is, is not known here: the kernel shows nobody its
    /// number at a mount's root, and programs that need it ask for the attributes of `..`.
    fn put_dots(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        cookie: u64,
        with_attributes: bool,
        answer: &mut Answer<'_>,
    ) -> Outcome<bool> {
        if cookie >= COOKIES {
            return Ok(true);
        }
        let Reply::Attributes(own) = self.ask(context, Request::Stat { node: file.node() })? else {
            return Err(mistaken());
        };
        // With the number 0 for a node, the kernel takes the name only.
        let no_node = with_attributes.then(EntryOut::default);
        let dots: [&[u8]; COOKIES as usize] = [b".", b".."];
        let mut missing = dots.into_iter().zip(1..).filter(|&(_, at)| at > cookie);
        Ok(missing.all(|(bytes, cookie)| {
            let name = Listed { bytes, inode: own.inode, file_type: FileType::Directory, cookie };
            answer.put_name(no_node.as_ref(), &name)
        }))
    }

    fn visit(
        &self,
        context: &Context<'_>,
        file: &OpenFile,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Outcome<()> {
        let cookie = cookie.saturating_sub(COOKIES);
        self.ask(context, Request::List { file, cookie, visit }).map(drop)
    }

    /// Whether there was room. A name that has gone is left out; one that cannot be looked up is listed without its node, as is one for
    /// whose node there is no room.
    fn put_looked_up(
        &self,
        context: &Context<'_>,
        directory: &OpenFile,
        name: &Listed<'_>,
        answer: &mut Answer<'_>,
    ) -> bool {
        let kept = self.holds_name(directory.node(), name.bytes);
        let unchanging = self.instance.nodes.unchanging();
        match self.look_up(context, directory, name.bytes) {
            Ok(found) if !self.instance.nodes.has_room() => {
                let _ = self.ask(context, Request::Forget { node: found.node, count: 1 });
                answer.put_name(Some(&EntryOut::default()), name)
            }
            Ok(found) => {
                let number = self.enter_name(context, (directory.node(), name.bytes), &found);
                let (found, attributes) = self.arriving(context, number, found, unchanging);
                // Many more may be looked up before the answer goes.
                let is_timed = self.instance.timed().is_some();
                let keeps = if is_timed { Keeps::default() } else { Keeps { name: kept, attributes } };
                let name = Listed { inode: found.attributes.inode, file_type: found.attributes.file_type, ..*name };
                let fits = answer.put_name(Some(&EntryOut::new(number, &found.attributes, keeps)), &name);
                if fits {
                    answer.give(Given::Reference(number));
                } else {
                    self.take_back(Given::Reference(number));
                }
                fits
            }
            Err(Errno::ENOENT) => true,
            Err(_) => answer.put_name(Some(&EntryOut::default()), name),
        }
    }

    fn look_up(&self, context: &Context<'_>, directory: &OpenFile, name: &[u8]) -> Outcome<Entry> {
        match self.ask(context, Request::Lookup { parent: directory.node(), name: Name::new(name)? })? {
            Reply::Entry(entry) => Ok(entry),
            _ => Err(mistaken()),
        }
    }
}
