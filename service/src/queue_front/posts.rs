//! Posted writes in the service: what is granted, when posts are taken, and when a grant ends.
//!
//! A *post* is a `Write` in a request buffer whose caller has gone on. It is *granted* for one open file of one session, in one
//! of the session's slots, while nobody else uses the file: its description is the only one, and one process alone has it; the
//! kernel keeps neither pages nor attributes of the file.
//!
//! Posts are *taken* (served) before anything else is done in the instance, by any request ([`Posts::settle`]). So a process that
//! sees that a write has returned sees what it wrote, and times are in the order of the calls. Posts that no request asks for are
//! taken by the thread that receives the doorbell, or by a thread of the instance that looks every millisecond while many come.
//!
//! A grant ends before an event that it must not overlap: another open file of the node, a read or write of the kernel, another
//! size, the closing of a descriptor, the end of the session. First its word is cleared, then the outstanding posts are taken: a
//! caller looks at the word after it has posted, and waits for the answer where it is cleared.
//!
//! **Invariant.** One thread at a time takes the posts of a grant, and waits for nothing that a request of the kernel may hold:
//! neither for notifications nor for other grants. For write-back it waits only where data accepted before would have no room
//! otherwise, in the branch or in memory.

mod granted;
mod granting;
mod obstacle;
mod standing;
mod tender;
mod tender_state;

use self::granted::{Granted, Taking};
use self::obstacle::strain_of;
use self::tender_state::TenderState;
use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::queue_front::serve::{serve, serve_post};
use crate::queue_front::session::SessionState;
use crate::sync::lock;
use poolfs_ipc::area::DATA_BYTES;
use poolfs_ipc::service::{Acquired, Session};
use poolfs_ipc::wire::{Reply, Status};
use poolfs_libservice::types::limits::{BLOCK_SIZE, CACHED_SIZE_MAX};
use poolfs_libservice::types::{Caller, Errno, FileSystemStatistics, NodeId, OpenFlags, Timestamp};
use poolfs_libservice::{PageBuffer, WrittenAt};
use poolfs_service_protocol::NotPosted;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};
use tracing::{error, warn};

/// Nothing is posted where there is less room than this, bytes: what was posted is not told of that any more.
const ROOM_MIN: i64 = 32 << 20;

/// So much may posts take before somebody looks again how much room there is, bytes.
const ROOM_TRUSTED: i64 = 128 << 20;

/// How long it is believed how much room there is, while something is posted: others fill the same filesystem.
const ROOM_BELIEVED: Duration = Duration::from_millis(100);

/// Files that are longer than this are not appended to by posts: how long a file may be is told to who waits. What is outstanding of a grant
/// when it ends is far less than what is left to [`CACHED_SIZE_MAX`].
pub(super) const APPENDED_SIZE_MAX: u64 = CACHED_SIZE_MAX - (1 << 30);

/// How long nothing of a file is posted after somebody else had to do with it.
const PAUSE: Duration = Duration::from_millis(100);

/// What takes longer than this is not posted for a while: others wait for it.
const SLOW: Duration = Duration::from_millis(20);

/// How long somebody waits for posts that another thread takes: longer only a branch takes that does not answer.
const TAKING_MAX: Duration = Duration::from_secs(10);

/// So often a thread that was called takes what was rung for meanwhile, before it leaves that to the thread that takes posts: others want to be served, too.
const ROUNDS_MAX: u32 = 64;

/// Until when somebody waits who cannot for long.
fn soon() -> Option<Instant> {
    Some(Instant::now() + TAKING_MAX)
}

/// Most room that a post of so many bytes takes in a branch: the blocks of which it writes a part.
fn room_of(length: u64) -> u64 {
    const BLOCK: u64 = BLOCK_SIZE as u64;
    (length.div_ceil(BLOCK) + 1) * BLOCK
}

/// Whether a file has become too long to be appended to by posts, after the write that this answers.
fn is_too_long(file: &OpenFile, written: &Reply) -> bool {
    file.flags().contains(OpenFlags::APPEND) && written.value.saturating_add(written.length) > APPENDED_SIZE_MAX
}

/// What came of a look for posts.
#[derive(Default)]
struct Taken {
    count: usize,
    /// Bytes of the branch that they take at most.
    room: u64,
    /// The grant has to end.
    ends: Option<NotPosted>,
    /// Of files that the grant is not for: requests whose callers wait.
    others: Vec<Acquired<SessionState>>,
}

/// The posted writes of an instance.
pub(crate) struct Posts {
    instance: Weak<Instance>,
    grants: RwLock<Vec<Arc<Granted>>>,
    /// Bytes of the branch that posts may take, and [`ROOM_MIN`] more, before somebody has to look how much room there is.
    room: AtomicI64,
    /// Until when that is believed.
    room_until: Mutex<Option<Instant>>,
    posted: AtomicU64,
    not_posted: Mutex<BTreeMap<NotPosted, u64>>,
    /// Requests that were found among posts, whose callers wait: served by the thread that takes posts.
    others: Mutex<Vec<Acquired<SessionState>>>,
    tender: TenderState,
    /// Who has the instance's changes held.
    holds: AtomicUsize,
    closed: AtomicBool,
    /// What was posted when it was closed is being taken by a thread that does not come back.
    is_given_up: AtomicBool,
}

impl Posts {
    pub(super) fn new(instance: &Weak<Instance>) -> Arc<Self> {
        Arc::new(Self {
            instance: Weak::clone(instance),
            grants: RwLock::default(),
            room: AtomicI64::new(0),
            room_until: Mutex::default(),
            posted: AtomicU64::new(0),
            not_posted: Mutex::default(),
            others: Mutex::default(),
            tender: TenderState::default(),
            holds: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
        })
    }

    pub(super) fn grants(&self) -> Vec<Arc<Granted>> {
        self.grants.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes that were posted, and how often somebody who wrote was not allowed to post, by what stood against it.
    pub(crate) fn counts(&self) -> (u64, BTreeMap<NotPosted, u64>) {
        (self.posted.load(Ordering::Relaxed), lock(&self.not_posted).clone())
    }

    fn refuse(&self, file: &OpenFile, cause: NotPosted) {
        file.note_not_posted(Some(cause));
        *lock(&self.not_posted).entry(cause).or_default() += 1;
    }

    /// Takes all that was posted before this call. What another thread takes is waited for, for as long as a branch may be slow; whether nothing is left.
    pub(crate) fn settle(&self) -> bool {
        let give_up = Some(Instant::now() + TAKING_MAX);
        let grants = self.grants();
        // All of them, also behind one that is left.
        grants.iter().for_each(|granted| _ = self.take(granted, give_up));
        !grants.iter().any(|granted| granted.is_stuck())
    }

    /// The same of one node, or of all, however long it takes.
    pub(crate) fn settle_all(&self, of: Option<NodeId>) {
        let grants = self.grants();
        let those = grants.iter().filter(|granted| of.is_none_or(|node| granted.file.node() == node));
        those.for_each(|granted| _ = self.take(granted, None));
    }

    /// Nothing of this node is posted when this returns, and what was has been taken.
    pub(crate) fn revoke(&self, node: NodeId, cause: NotPosted) {
        self.end_those(Some(cause), None, |granted| granted.file.node() == node);
    }

    /// The same, unless a branch does not answer: then what is left is taken when it does.
    pub(super) fn revoke_soon(&self, node: NodeId, cause: NotPosted) {
        self.end_those(Some(cause), soon(), |granted| granted.file.node() == node);
    }

    /// Whether something that a session has posted may not have been taken.
    pub(super) fn may_have_posts_of(&self, session: &Arc<Session<SessionState>>) -> bool {
        self.grants().iter().any(|granted| Arc::ptr_eq(&granted.session, session) && granted.may_have_posts())
    }

    /// The session is about to end.
    pub(super) fn end_session(&self, session: &Arc<Session<SessionState>>) {
        self.end_those(None, soon(), |granted| Arc::ptr_eq(&granted.session, session));
    }

    /// Nothing is posted until [`Posts::go_on`]: changes are about to be held, which posts would make everybody wait for. Whether nothing is left that was.
    pub(crate) fn pause(&self) -> bool {
        self.holds.fetch_add(1, Ordering::SeqCst);
        let grants = self.grants();
        grants.iter().for_each(|granted| self.end(granted, None, soon()));
        !grants.iter().any(|granted| granted.is_stuck())
    }

    /// After [`Posts::pause`].
    pub(crate) fn go_on(&self) {
        self.holds.fetch_sub(1, Ordering::SeqCst);
    }

    fn is_refusing(&self) -> bool {
        self.closed.load(Ordering::SeqCst) || self.holds.load(Ordering::SeqCst) > 0
    }

    /// Nothing is posted any more when this returns, and what was has been taken, unless its branch does not answer: then the rest is left to a thread. Whoever calls may have
    /// what others of the pool wait for.
    pub(crate) fn close(self: &Arc<Self>) {
        self.closed.store(true, Ordering::SeqCst);
        let grants = self.grants();
        grants.iter().for_each(|granted| granted.revoke());
        if grants.is_empty() || self.is_given_up.load(Ordering::SeqCst) {
            return;
        }
        drop(grants);
        let posts = Arc::clone(self);
        let (send, ended) = sync_channel(1);
        let ending = move || {
            posts.end_those(None, None, |_| true);
            drop(posts);
            // Nobody may be waiting any more.
            let _ = send.send(());
        };
        if let Err(error) = std::thread::Builder::new().name("posts-end".into()).spawn(ending) {
            warn!(%error, "no thread to take what was posted last");
            return self.end_those(None, soon(), |_| true);
        }
        if ended.recv_timeout(TAKING_MAX) == Err(RecvTimeoutError::Timeout) {
            self.is_given_up.store(true, Ordering::SeqCst);
            warn!("what was posted last is still being taken");
        }
    }

    fn end_those(&self, cause: Option<NotPosted>, give_up: Option<Instant>, is_one: impl Fn(&Granted) -> bool) {
        for granted in self.grants().into_iter().filter(|granted| is_one(granted)) {
            self.end(&granted, cause, give_up);
        }
    }

    /// Serves what a session rang for in a slot.
    pub(super) fn answer(self: &Arc<Self>, session: &Arc<Session<SessionState>>, slot: usize) {
        if let Some(granted) = self.granted_or_given_back(session, slot) {
            self.take_rung(&granted);
            if self.tender.is_rung_often() {
                self.tender.call();
            }
        }
        self.serve_others();
    }

    /// The grant of a slot. What is posted in one that nobody is granted is of clients who wait, and is left to [`Posts::serve_others`].
    fn granted_or_given_back(&self, session: &Arc<Session<SessionState>>, slot: usize) -> Option<Arc<Granted>> {
        let grants = self.grants.read().unwrap_or_else(PoisonError::into_inner);
        let granted = grants.iter().find(|granted| granted.is_of(session, slot)).cloned();
        if granted.is_none() {
            // Nobody is granted it meanwhile.
            lock(&self.others).extend(session.take_posts(slot));
        }
        granted
    }

    /// Takes what was posted, as a doorbell has come. Of many that come for one grant one thread is kept.
    fn take_rung(&self, granted: &Arc<Granted>) {
        for _ in 0..ROUNDS_MAX {
            let Some(taking) = granted.begin_taking_or_leave() else {
                // Whoever ends the grant looks once more, unless he has done that.
                let _ = self.granted_or_given_back(&granted.session, granted.slot);
                return;
            };
            let _ = self.go_on_taking(granted, taking, None);
            if !granted.was_rung() {
                return;
            }
        }
        self.tender.call();
    }

    /// Ends a grant: what was posted is taken.
    fn end(&self, granted: &Arc<Granted>, cause: Option<NotPosted>, give_up: Option<Instant>) {
        granted.revoke();
        let Some(mut taking) = granted.begin_taking(give_up) else { return };
        // Granted since, by who did not know that it would end.
        granted.session.revoke_posts(granted.slot);
        let mut others = self.take_with(granted, &mut taking).others;
        granted.end_taking(taking, true);
        granted.file.pause_posts(PAUSE);
        cause.into_iter().for_each(|cause| self.refuse(&granted.file, cause));
        let instance = self.instance.upgrade();
        {
            let mut grants = self.grants.write().unwrap_or_else(PoisonError::into_inner);
            grants.retain(|other| !Arc::ptr_eq(other, granted));
            if let Some(instance) = &instance {
                instance.count_posting(grants.len());
            }
        }
        if let Some(instance) = &instance {
            instance.nodes().end_posting(granted.file.node());
        }
        if granted.was_rung() {
            // By who has found since that the grant has ended, and waits.
            others.extend(granted.session.take_posts(granted.slot));
        }
        granted.session.content().give_post_slot(granted.slot);
        self.leave(others);
    }

    /// Takes what was posted; ends the grant where it has to.
    fn take(&self, granted: &Arc<Granted>, give_up: Option<Instant>) -> usize {
        let Some(taking) = granted.begin_taking(give_up) else { return 0 };
        let count = self.go_on_taking(granted, taking, give_up);
        if granted.was_rung() {
            // Whoever asks for something is not kept by who goes on ringing.
            self.tender.call();
        }
        count
    }

    /// The same unless another does it, who then looks once more.
    fn take_if_free(&self, granted: &Arc<Granted>) -> usize {
        granted.begin_taking_or_leave().map_or(0, |taking| self.go_on_taking(granted, taking, None))
    }

    /// The same for who has begun it.
    fn go_on_taking(&self, granted: &Arc<Granted>, mut taking: Taking, give_up: Option<Instant>) -> usize {
        let taken = self.take_with(granted, &mut taking);
        granted.end_taking(taking, false);
        if taken.ends.is_some() {
            self.end(granted, taken.ends, give_up);
        }
        self.leave(taken.others);
        taken.count
    }

    fn take_with(&self, granted: &Granted, taking: &mut Taking) -> Taken {
        let mut taken = Taken::default();
        if !granted.session.has_posts(granted.slot) {
            return taken;
        }
        let begun = Instant::now();
        let instance = self.instance.upgrade();
        let is_who_it_was = granted.session.is_who_it_was();
        for post in granted.session.take_posts(granted.slot) {
            if post.request().handle != granted.file.key() {
                taken.others.push(post);
                continue;
            }
            let length = post.request().length;
            taken.count += 1;
            taken.room += room_of(length);
            let reply = match (&instance, taking.failed) {
                (Some(instance), None) => apply(instance, granted, &post, &mut taking.scratch),
                (_, failed) => failure(failed.unwrap_or(Errno::EIO)),
            };
            let failed = match Status::from_number(reply.status) {
                Some(Status::Done) if reply.length == length => None,
                // A part of it, which does not say why.
                Some(Status::Done) => {
                    let has_room = instance.as_ref().is_some_and(|instance| self.find_room(instance).is_ok());
                    Some(if has_room { Errno::EIO } else { Errno::ENOSPC })
                }
                Some(Status::Failed) => Some(Errno::from_raw(reply.errno)),
                _ => Some(Errno::EIO),
            };
            if let Some(errno) = failed {
                granted.file.note_post_failure(errno);
                taking.failed = Some(errno);
                taken.ends = Some(NotPosted::Failed);
            } else if is_too_long(&granted.file, &reply) {
                taken.ends = Some(NotPosted::Limit);
            }
            post.finish(&reply);
        }
        if !is_who_it_was && taken.ends.is_none() {
            taken.ends = Some(NotPosted::Observed);
        }
        self.posted.fetch_add(taken.count as u64, Ordering::Relaxed);
        granted.file.count_posted(taken.count);
        let room = self.room.fetch_sub(taken.room as i64, Ordering::Relaxed) - taken.room as i64;
        if taken.ends.is_none() && taken.count > 0 {
            let strain = instance.as_ref().map_or(Some(NotPosted::Slow), |instance| strain_of(&instance.stack));
            if begun.elapsed() > SLOW {
                taken.ends = Some(NotPosted::Slow);
            } else if strain.is_some() {
                taken.ends = strain;
            } else if room < ROOM_MIN || !self.is_room_known() {
                taken.ends = instance.map_or(Some(NotPosted::Room), |instance| self.find_room(&instance).err());
            }
        }
        taken
    }

    /// Leaves requests whose callers wait to who may wait for the kernel.
    fn leave(&self, others: Vec<Acquired<SessionState>>) {
        if !others.is_empty() {
            lock(&self.others).extend(others);
            self.tender.call();
        }
    }

    /// Serves requests of slots that are not granted any more. Not for handlers of FUSE requests.
    fn serve_others(&self) {
        let others = std::mem::take(&mut *lock(&self.others));
        if others.is_empty() {
            return;
        }
        let Some(instance) = self.instance.upgrade() else { return };
        let mut scratch = PageBuffer::zeroed(DATA_BYTES);
        for acquired in others {
            let (session, request) = (Arc::clone(acquired.session()), *acquired.request());
            if session.is_over() {
                acquired.turn_away();
                continue;
            }
            let served = catch_unwind(AssertUnwindSafe(|| {
                serve(&instance, session.content(), &request, &acquired, &mut scratch)
            }));
            match served {
                Ok(reply) => acquired.finish(&reply),
                Err(_) => error!(instance = instance.name(), ?request, "a layer panicked; the request failed"),
            }
        }
    }

    fn is_room_known(&self) -> bool {
        lock(&self.room_until).is_some_and(|until| Instant::now() < until)
    }

    /// Ends all grants where others have taken the room, though nothing is posted: what is posted next is told that it is done.
    pub(super) fn look_for_room(&self) {
        let Some(instance) = self.instance.upgrade().filter(|_| !self.grants().is_empty()) else { return };
        if let Err(cause) = self.find_room(&instance) {
            self.end_those(Some(cause), soon(), |_| true);
        }
    }

    /// Finds so much room that nothing of what is posted can fail for want of it.
    fn find_room(&self, instance: &Instance) -> Result<(), NotPosted> {
        *lock(&self.room_until) = Some(Instant::now() + ROOM_BELIEVED);
        // Whoever takes posts comes back, whatever a layer does.
        let asked = catch_unwind(AssertUnwindSafe(|| instance.layer().statfs(&Caller::ROOT, NodeId::ROOT)));
        let found = asked.ok().and_then(Result::ok).ok_or(NotPosted::Room)?;
        if found.has_quotas {
            return Err(NotPosted::Quotas);
        }
        self.room.store(room_to_post(&found), Ordering::Relaxed);
        if room_to_post(&found) >= ROOM_MIN { Ok(()) } else { Err(NotPosted::Room) }
    }
}

/// How many bytes may be posted, as far as that depends on what a filesystem says of itself.
fn room_to_post(found: &FileSystemStatistics) -> i64 {
    // A backend that does not say how large it is: what is written there is accepted by request as well, and may fail later.
    if found.blocks == 0 {
        return ROOM_TRUSTED;
    }
    let free = found.blocks_available.saturating_mul(u64::from(found.block_size));
    // Half of it: others of the branch take some, too.
    i64::try_from(free / 2).unwrap_or(i64::MAX).min(ROOM_TRUSTED)
}

/// Applies a post, as the request that it is.
fn apply(instance: &Instance, granted: &Granted, post: &Acquired<SessionState>, scratch: &mut PageBuffer) -> Reply {
    let request = *post.request();
    // No more than there is of it: most are small, and of many files nothing else is ever posted. Its length was checked when it was taken.
    scratch.set_length(usize::try_from(request.length).unwrap_or(usize::MAX).min(DATA_BYTES));
    let session = granted.session.content();
    let made = request.times[1];
    let _at = WrittenAt::at(Timestamp { seconds: made.seconds, nanoseconds: made.nanoseconds.min(999_999_999) });
    // The write had returned, and who may write by an open file may do so whoever it has become since: only what needs a right is not done.
    let least = granted.session.has_other_rights();
    let served = catch_unwind(AssertUnwindSafe(|| serve_post(instance, (session, least), &request, post, scratch)));
    served.unwrap_or_else(|_| {
        error!(instance = instance.name(), ?request, "a layer panicked; a posted write failed");
        failure(Errno::EIO)
    })
}

fn failure(errno: Errno) -> Reply {
    Reply { status: Status::Failed as u32, errno: errno.raw(), ..Reply::default() }
}
