//! The FUSE front of one instance: turns the kernel's calls into [`Request`]s, and [`Reply`]s into answers.

use super::abi;
use super::answer::{Answer, Given, KEPT, Keeps};
use super::incoming::{Call, FileOperation, Forgets, NodeOperation, Operation};
use crate::handles::OpenFile;
use crate::in_flight::now_ms;
use crate::instance::Instance;
use crate::nodes::listings::Opening;
use crate::nodes::passthrough::Asking;
use crate::request::{Context, Reply, Request};
use poolfs_ipc::wire::{ADOPT, Adopt, MAGIC, SHARE, SYNC_ALL};
use poolfs_libservice::Entry;
use poolfs_libservice::types::{Attributes, Errno, Name, NodeId, OpenFlags, SetAttributes};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use tracing::error;
use zerocopy::FromBytes;

/// How the names of access lists begin.
const ACCESS_LISTS: &[u8] = b"system.posix_acl_";

/// The name that a request adds to its directory or takes from it.
fn named<'a>(request: &Request<'a>) -> Option<Name<'a>> {
    match *request {
        Request::MakeNode { name, .. }
        | Request::MakeDirectory { name, .. }
        | Request::SymbolicLink { name, .. }
        | Request::Unlink { name, .. }
        | Request::RemoveDirectory { name, .. } => Some(name),
        _ => None,
    }
}

/// Whether an operation makes a node that the kernel comes to know.
fn makes_node(operation: &NodeOperation<'_>) -> bool {
    matches!(
        operation,
        NodeOperation::MakeNode { .. }
            | NodeOperation::MakeDirectory { .. }
            | NodeOperation::SymbolicLink { .. }
            | NodeOperation::Create { .. }
            | NodeOperation::CreateNameless { .. }
    )
}

fn name_of(parent: NodeId, name: Name<'_>) -> Given {
    Given::Name { parent, name: name.as_bytes().into() }
}

/// The kernel rounds times up to its tick, of which there are at least a hundred in a second, and goes on to the end of the last one; and the clock
/// by which it is known when a request came is a tick coarse.
const ROUNDING: Duration = Duration::from_millis(30);

/// What the kernel has given back while nobody could take it.
#[derive(Default)]
pub(super) struct PutOff {
    /// References, by the node's number.
    pub(super) forgets: BTreeMap<u64, u64>,
    /// Open files.
    pub(super) releases: Vec<u64>,
}

/// Serves the kernel's calls on an instance.
pub struct Front {
    pub(super) instance: Arc<Instance>,
}

pub(super) type Outcome<T> = Result<T, Errno>;

/// A reply of another kind than the request's is a mistake of the dispatcher.
pub(super) fn mistaken() -> Errno {
    Errno::EIO
}

impl Front {
    /// The front of `instance`.
    #[must_use]
    pub fn new(instance: Arc<Instance>) -> Self {
        Self { instance }
    }

    /// Serves a call; what it brings is put into `answer`.
    ///
    /// # Errors
    /// The errno of the answer, which then has no body. What was given already is to be taken back.
    pub fn serve(&self, call: Call<'_>, answer: &mut Answer<'_>) -> Result<(), Errno> {
        self.guarded(|| self.carry_out(call, answer)).unwrap_or(Err(Errno::EIO))
    }

    /// The kernel gives references back.
    pub fn forget(&self, forgets: Forgets<'_>) {
        self.guarded(|| forgets.for_each(|(number, count)| self.give_back(number, count)));
    }

    /// Takes what was put off.
    pub(super) fn make_good(&self, put_off: PutOff) {
        self.guarded(|| {
            put_off.releases.into_iter().for_each(|handle| self.instance.release(handle));
            put_off.forgets.into_iter().for_each(|(number, count)| self.give_back(number, count));
        });
    }

    /// The kernel did not take what an answer gave it.
    pub fn take_back(&self, given: Given) {
        self.guarded(|| match given {
            Given::Reference(number) => self.give_back(number, 1),
            Given::File(handle) => self.instance.release(handle),
            Given::Name { parent, name } => self.instance.name_changed_late(parent, &name),
        });
    }

    /// A layer that panics costs the request, never one of the threads all programs of the mount share.
    fn guarded<T>(&self, serve: impl FnOnce() -> T) -> Option<T> {
        let served = catch_unwind(AssertUnwindSafe(serve));
        if served.is_err() {
            error!(instance = self.instance.name(), "a layer panicked; the request failed");
        }
        served.ok()
    }

    fn give_back(&self, number: u64, count: u64) {
        if let Some((node, count)) = self.instance.nodes.forget(number, count) {
            let _ = self.ask(&Context::fuse(0, 0, 0, 0), Request::Forget { node, count });
        }
    }

    fn node(&self, number: u64) -> Outcome<NodeId> {
        self.instance.nodes.node(number).ok_or(Errno::ESTALE)
    }

    fn file(&self, handle: u64) -> Outcome<Arc<OpenFile>> {
        self.instance.handles.get(handle)
    }

    pub(super) fn ask(&self, context: &Context<'_>, request: Request<'_>) -> Outcome<Reply> {
        self.instance.dispatch(context, request).map_err(|failure| match failure.errno() {
            // By this one the kernel understands that such requests are never served: it would take every later fsync for done.
            Errno::ENOSYS => Errno::EOPNOTSUPP,
            errno => errno,
        })
    }

    fn carry_out(&self, call: Call<'_>, answer: &mut Answer<'_>) -> Outcome<()> {
        let context = call.context();
        let reply = match call.operation? {
            Operation::Init(_) => return Err(Errno::EIO),
            Operation::Destroy => Reply::Done,
            Operation::Node(operation) => {
                let asking = Asking { node: self.node(call.node)?, number: call.node, thread: call.thread };
                return self.on_node(&context, asking, operation, answer);
            }
            Operation::Change { changes, handle } => {
                let asking = Asking { node: self.node(call.node)?, number: call.node, thread: call.thread };
                self.change(&context, asking, changes, handle)?
            }
            Operation::Link { node, name } => {
                let parent = self.node(call.node)?;
                let request = Request::Link { node: self.node(node)?, parent, name };
                let kept = self.holds_name(parent, name.as_bytes());
                let linked = self.ask(&context, request)?;
                answer.give(name_of(parent, name));
                return self.put(linked, self.left(&context, kept), answer);
            }
            Operation::Rename { name, new_parent, new_name, flags } => {
                let (parent, new_parent) = (self.node(call.node)?, self.node(new_parent)?);
                let renamed = self.ask(&context, Request::Rename { parent, name, new_parent, new_name, flags })?;
                answer.give(name_of(parent, name));
                answer.give(name_of(new_parent, new_name));
                renamed
            }
            Operation::Release { handle } => {
                self.instance.release(handle);
                Reply::Done
            }
            Operation::File { handle, operation } => {
                return self.on_file(&context, &self.file(handle)?, operation, answer);
            }
        };
        self.put(reply, Duration::ZERO, answer)
    }

    /// For how long the kernel keeps the attributes that it may keep, or not at all.
    fn kept(&self, may_keep: bool) -> Duration {
        if may_keep { kept_for(self.instance.timed()) } else { Duration::ZERO }
    }

    /// What is left of such a time where others may change what was found. The kernel counts from when it has the answer, and what that says may be
    /// as old as the request.
    fn left(&self, context: &Context<'_>, kept: Duration) -> Duration {
        match (self.instance.timed(), context.asked_ms) {
            (Some(_), Some(asked)) => kept.saturating_sub(Duration::from_millis(now_ms().saturating_sub(asked))),
            _ => kept,
        }
    }

    /// Before a name is looked up or changed on the kernel's behalf: for how long it keeps what it is answered.
    pub(super) fn holds_name(&self, parent: NodeId, name: &[u8]) -> Duration {
        let may_keep = self.instance.nodes.hold_name(parent, name, !self.instance.can_be_shared());
        if may_keep { kept_for(self.instance.names_timed()) } else { Duration::ZERO }
    }

    /// The attributes, and for how long the kernel keeps them.
    fn stat(&self, context: &Context<'_>, Asking { node, number, .. }: Asking) -> Outcome<(Attributes, Duration)> {
        let may_keep = !self.instance.nodes.is_retired(number) && self.instance.nodes.hold_attributes(node);
        self.instance.nodes.shows_size(node);
        match self.ask(context, Request::Stat { node })? {
            Reply::Attributes(attributes) => Ok((attributes, self.left(context, self.kept(may_keep)))),
            _ => Err(mistaken()),
        }
    }

    /// An entry that the kernel has been given a reference to, and for how long it keeps its attributes. `unchanging` is from before it was looked up.
    pub(super) fn arriving(
        &self,
        context: &Context<'_>,
        number: u64,
        entry: Entry,
        unchanging: Option<u64>,
    ) -> (Entry, Duration) {
        let nodes = &self.instance.nodes;
        if nodes.is_retired(number) || !nodes.hold_arriving(entry.node) {
            return (entry, Duration::ZERO);
        }
        if unchanging.is_some_and(|since| nodes.still_unchanging(since)) {
            return (entry, self.left(context, self.kept(true)));
        }
        match self.ask(context, Request::Stat { node: entry.node }) {
            Ok(Reply::Attributes(attributes)) => (Entry { attributes, ..entry }, self.left(context, self.kept(true))),
            _ => (entry, Duration::ZERO),
        }
    }

    fn look_up_or_miss(
        &self,
        context: &Context<'_>,
        parent: NodeId,
        name: Name<'_>,
        answer: &mut Answer<'_>,
    ) -> Outcome<()> {
        let kept = self.holds_name(parent, name.as_bytes());
        let unchanging = self.instance.nodes.unchanging();
        match self.ask(context, Request::Lookup { parent, name }) {
            Ok(Reply::Entry(entry)) => {
                if !self.instance.nodes.admits(entry.node) {
                    let _ = self.ask(context, Request::Forget { node: entry.node, count: 1 });
                    return Err(Errno::ENOMEM);
                }
                let number = self.enter_name(context, (parent, name.as_bytes()), &entry);
                let (entry, attributes) = self.arriving(context, number, entry, unchanging);
                put_entry(number, &entry, Keeps { name: self.left(context, kept), attributes }, answer)
            }
            Ok(_) => Err(mistaken()),
            Err(Errno::ENOENT) if !kept.is_zero() => answer.put(&abi::EntryOut::missing(self.left(context, kept))),
            Err(errno) => Err(errno),
        }
    }

    fn change(
        &self,
        context: &Context<'_>,
        asking: Asking,
        changes: SetAttributes,
        handle: Option<u64>,
    ) -> Outcome<Reply> {
        let file = handle.map(|handle| self.file(handle)).transpose()?;
        let file = file.as_deref().filter(|file| file.flags().writable());
        // Who has it open for writing has been told by then.
        let sets_size = changes.size.is_some() && file.is_none();
        let _changing = if sets_size { self.instance.begin_resize(asking)? } else { None };
        self.ask(context, Request::Change { node: asking.node, changes, file })
    }

    fn open(&self, context: &Context<'_>, asking: Asking, flags: OpenFlags, answer: &mut Answer<'_>) -> Outcome<()> {
        let opening = self.instance.begin_open(asking, flags.writable())?;
        let Reply::Opened { file, .. } = self.ask(context, Request::Open { node: asking.node, flags })? else {
            return Err(mistaken());
        };
        answer.give(Given::File(file.key()));
        let backing = self.instance.opened(opening, &file);
        let own = self.open_flags(&file, false);
        let flags = match backing {
            Some(_) => own & abi::open::NO_FLUSH | abi::open::PASSTHROUGH,
            None => own,
        };
        answer.put(&abi::OpenOut { handle: file.key(), flags, backing: backing.unwrap_or(0) })
    }

    fn on_node(
        &self,
        context: &Context<'_>,
        asking: Asking,
        operation: NodeOperation<'_>,
        answer: &mut Answer<'_>,
    ) -> Outcome<()> {
        use NodeOperation as Op;
        if makes_node(&operation) && !self.instance.nodes.finds_room() {
            return Err(Errno::ENOMEM);
        }
        let node = asking.node;
        let parent = node;
        let request = match operation {
            Op::Lookup { name } => return self.look_up_or_miss(context, parent, name, answer),
            Op::Stat => {
                let (attributes, kept) = self.stat(context, asking)?;
                return answer.put(&abi::AttrOut::new(&attributes, kept));
            }
            Op::Statx => {
                let (attributes, kept) = self.stat(context, asking)?;
                return answer.put(&abi::StatxOut::new(&attributes, kept));
            }
            Op::ReadLink => Request::ReadLink { node },
            Op::SymbolicLink { name, target } => Request::SymbolicLink { parent, name, target },
            Op::MakeNode { name, file_type, permissions, device } => {
                Request::MakeNode { parent, name, file_type, permissions, device }
            }
            Op::MakeDirectory { name, permissions } => Request::MakeDirectory { parent, name, permissions },
            Op::Unlink { name } => Request::Unlink { parent, name },
            Op::RemoveDirectory { name } => Request::RemoveDirectory { parent, name },
            Op::Create { name, permissions, flags } => {
                let kept = self.holds_name(parent, name.as_bytes());
                let created = self.ask(context, Request::Create { parent, name, permissions, flags });
                // When the user-level path was faster with the name, the kernel looks again, finds it and opens it as it should.
                let lost = created.as_ref().is_err_and(|&errno| errno == Errno::EEXIST);
                let retry = lost && !flags.contains(OpenFlags::EXCLUSIVE);
                let created = if retry { Err(Errno::ESTALE) } else { created }?;
                answer.give(name_of(parent, name));
                return self.put(created, self.left(context, kept), answer);
            }
            Op::CreateNameless { permissions, flags } => Request::CreateNameless { parent, permissions, flags },
            Op::Open { flags } => return self.open(context, asking, flags, answer),
            Op::OpenDirectory => Request::OpenDirectory { node },
            Op::Statfs => Request::Statfs { node },
            Op::SetXattr { name, value, flags } => Request::SetXattr { node, name, value, flags },
            Op::GetXattr { name, room } => {
                if name.starts_with(ACCESS_LISTS) {
                    // The kernel keeps these, as long as it is not told to drop the attributes.
                    let _ = self.instance.nodes.hold_attributes(node);
                }
                return match self.ask(context, Request::GetXattr { node, name })? {
                    Reply::Bytes(value) => answer.put_sized(&value, room),
                    _ => Err(mistaken()),
                };
            }
            Op::ListXattr { room } => {
                return match self.ask(context, Request::ListXattr { node })? {
                    Reply::Names(names) => {
                        let text: Vec<u8> = names.into_iter().flat_map(|name| [name, vec![0]].concat()).collect();
                        answer.put_sized(&text, room)
                    }
                    _ => Err(mistaken()),
                };
            }
            Op::RemoveXattr { name } => Request::RemoveXattr { node, name },
        };
        let name = named(&request);
        let makes = name.is_some() && !matches!(request, Request::Unlink { .. } | Request::RemoveDirectory { .. });
        let made = name.filter(|_| makes);
        let kept = made.map_or(Duration::ZERO, |name| self.holds_name(parent, name.as_bytes()));
        let reply = self.ask(context, request)?;
        name.into_iter().for_each(|name| answer.give(name_of(parent, name)));
        self.put(reply, self.left(context, kept), answer)
    }

    fn on_file(
        &self,
        context: &Context<'_>,
        file: &Arc<OpenFile>,
        operation: FileOperation<'_>,
        answer: &mut Answer<'_>,
    ) -> Outcome<()> {
        use FileOperation as Op;
        let request = match operation {
            Op::Read { offset, length } => {
                return answer.fill(length, |mut buffer| {
                    match self.ask(context, Request::Read { file, offset, target: &mut buffer })? {
                        Reply::Count(count) => Ok(count),
                        _ => Err(mistaken()),
                    }
                });
            }
            Op::Write { offset, data, mode } => Request::Write { file, offset, data, mode },
            Op::Flush => Request::Flush { file },
            Op::Sync { durability } => Request::Sync { file, durability },
            Op::List { cookie, room } => {
                answer.limit(room);
                file.walk_listing();
                self.list(context, file, cookie, answer)?;
                return answer.end_listing(file);
            }
            Op::ListWithAttributes { cookie, room } => {
                answer.limit(room);
                file.walk_listing();
                self.list_with_attributes(context, file, cookie, answer)?;
                return answer.end_listing(file);
            }
            Op::Control { command: SYNC_ALL, .. } => {
                self.ask(context, Request::SyncAll)?;
                return answer.put(&abi::IoctlOut::default());
            }
            Op::Control { command: SHARE, .. } => {
                // Whoever asks for this has the kernel ask for the size.
                let _ = file.share();
                self.instance.revoke_posts(file.node());
                return answer.put(&abi::IoctlOut::default());
            }
            Op::Control { command: ADOPT, input, room } => {
                if room < size_of::<Adopt>() {
                    return Err(Errno::EINVAL);
                }
                let adopted = self.adopt(context, file, input)?;
                answer.put(&abi::IoctlOut::default())?;
                return answer.put(&adopted);
            }
            Op::Control { .. } => return Err(Errno::ENOTTY),
            Op::Allocate { mode, offset, length } => Request::Allocate { file, mode, offset, length },
            Op::Seek { offset, to } => Request::Seek { file, offset, to },
            Op::CopyRange { source_offset, target, target_offset, length, wide_answer } => {
                let target = &*self.file(target)?;
                let request = Request::CopyRange { source: file, source_offset, target, target_offset, length };
                return match self.ask(context, request)? {
                    Reply::Offset(count) if wide_answer => answer.put(&abi::CopyRange64Out { count }),
                    Reply::Offset(count) => put_count(count, answer),
                    _ => Err(mistaken()),
                };
            }
        };
        self.put(self.ask(context, request)?, Duration::ZERO, answer)
    }

    /// The entry under its FUSE number; its reference is the kernel's from here on.
    pub(super) fn enter(&self, entry: &Entry) -> u64 {
        self.instance.nodes.enter(entry.node, entry.attributes.inode)
    }

    /// The same of an entry that a name was looked up for.
    pub(super) fn enter_name(&self, context: &Context<'_>, name: (NodeId, &[u8]), entry: &Entry) -> u64 {
        self.instance.enter_name(name, entry.node, entry.attributes.inode, context.thread)
    }

    /// The replies that look the same to whatever they are the answer. A name in them the kernel keeps for so long; attributes
    /// that are the answer to a change it may not: it takes them even if it has been told of a newer change meanwhile, and those of a node
    /// that was made just now even after it has dropped what it has of it.
    fn put(&self, reply: Reply, kept: Duration, answer: &mut Answer<'_>) -> Outcome<()> {
        match reply {
            Reply::Done => Ok(()),
            Reply::Entry(entry) => {
                put_entry(self.enter(&entry), &entry, Keeps { name: kept, ..Keeps::default() }, answer)
            }
            Reply::Attributes(attributes) => answer.put(&abi::AttrOut::new(&attributes, Duration::ZERO)),
            Reply::Opened { file, entry } => {
                answer.give(Given::File(file.key()));
                let is_made = entry.is_some();
                if let Some(entry) = entry {
                    put_entry(self.enter(&entry), &entry, Keeps { name: kept, ..Keeps::default() }, answer)?;
                }
                answer.put(&abi::OpenOut { handle: file.key(), flags: self.open_flags(&file, is_made), backing: 0 })
            }
            Reply::Written(written) => put_count(written.count as u64, answer),
            Reply::Offset(offset) => answer.put(&abi::SeekOut { offset }),
            Reply::Bytes(bytes) => answer.put_bytes(&bytes),
            Reply::Statistics(statistics) => answer.put(&abi::StatfsOut::from(&statistics)),
            Reply::Count(_) | Reply::Names(_) => Err(mistaken()),
        }
    }

    /// How the kernel caches an open file. A description that appends goes past its pages: it would send a write that
    /// crosses a page boundary as two requests, between which others could append. Who only reads a short file has nothing to
    /// hear or tell of at close, and needs no request for it.
    fn open_flags(&self, file: &OpenFile, created: bool) -> u32 {
        let appends = file.flags().contains(OpenFlags::APPEND) && file.flags().writable();
        let keeps = created || self.instance.keeps_kernel_pages();
        let flag = |condition, flag| if condition { flag } else { 0 };
        if file.is_directory() {
            let Opening { keeps, drops } = file.open_listing();
            // Of what others make in a directory nobody tells the kernel.
            let keeps = keeps && self.instance.timed().is_none();
            return flag(keeps, abi::open::CACHE_LISTING) | flag(!drops, abi::open::KEEP_CACHE);
        }
        flag(appends, abi::open::DIRECT_IO)
            | flag(keeps, abi::open::KEEP_CACHE)
            | flag(!file.announces_closing(), abi::open::NO_FLUSH)
    }

    fn adopt(&self, context: &Context<'_>, file: &Arc<OpenFile>, asked: &[u8]) -> Outcome<Adopt> {
        let asked = Adopt::read_from_bytes(asked).map_err(|_| Errno::EINVAL)?;
        if asked.magic != MAGIC {
            return Err(Errno::EINVAL);
        }
        match self.instance.adopter() {
            Some(adopter) => adopter.adopt(context, file, asked),
            None => Ok(Adopt { handle: 0, ..asked }),
        }
    }
}

/// For how long the kernel keeps what others may change, where that is to be seen after a time.
fn kept_for(timed: Option<Duration>) -> Duration {
    timed.map_or(KEPT, |time| time.saturating_sub(ROUNDING))
}

/// An entry under a number that it was entered by.
fn put_entry(number: u64, entry: &Entry, keeps: Keeps, answer: &mut Answer<'_>) -> Outcome<()> {
    answer.give(Given::Reference(number));
    answer.put(&abi::EntryOut::new(number, &entry.attributes, keeps))
}

fn put_count(count: u64, answer: &mut Answer<'_>) -> Outcome<()> {
    let size = u32::try_from(count).unwrap_or(u32::MAX);
    answer.put(&abi::WriteOut { size, padding: 0 })
}
