//! The service's end of one instance: its queues and sessions.

use crate::area::{self, DATA_BYTES};
use crate::futex;
use crate::memory::{Mapping, create_sealed};
use crate::posts::POST_SLOTS;
use crate::queue::{Doorbell, DoorbellQueue, RelaxedQueue};
use crate::service::budget::{MemoryBudget, SessionMemory};
use crate::service::groups::CoreGroups;
use crate::service::peer::PeerFacts;
use crate::service::session::{Acquired, Recheck, Session};
use crate::service::tasks::Tasks;
use crate::wire::{MAGIC, VERSION, Welcome};
use poolfs_types::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

/// Sizes and bounds of an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// The core groups of the pool.
    pub groups: CoreGroups,
    /// Request buffers of a session.
    pub buffers: usize,
    /// Slots of a queue, a power of two.
    pub queue_slots: usize,
    /// Most sessions at a time, up to 4096.
    pub sessions_max: usize,
    /// Most sessions of one user at a time.
    pub sessions_per_user_max: usize,
    /// What the service may pay for the sessions' memory; may be shared with other endpoints.
    pub memory: Arc<dyn SessionMemory>,
    /// The leases of the instance's segments: how many, and a read-only descriptor of their file. Without one no segments are given.
    pub leases: Option<(u32, Arc<OwnedFd>)>,
    /// How long callers wait for a reply at most; none: as long as it takes. Counted in milliseconds, of which it has one at least.
    pub timeout: Option<Duration>,
}

/// Memory of sessions that one endpoint pays for, unless it is told otherwise.
const MEMORY_BYTES_MAX: usize = 128 << 20;

impl EndpointConfig {
    /// The usual sizes: one user cannot take all sessions.
    #[must_use]
    pub fn new(groups: CoreGroups) -> Self {
        let memory = Arc::new(MemoryBudget::new(MEMORY_BYTES_MAX));
        Self {
            groups,
            buffers: 16,
            queue_slots: 128,
            sessions_max: 1024,
            sessions_per_user_max: 768,
            memory,
            leases: None,
            timeout: None,
        }
    }
}

/// What an endpoint has counted.
#[derive(Debug, Default)]
pub struct EndpointCounters {
    /// Words in queues that were no doorbells.
    pub rejected: AtomicU64,
    /// Doorbells that named no session, or no request that was due.
    pub stray: AtomicU64,
    /// Doorbells rung again for a request nobody had taken: a ring that got lost, or a long backlog.
    pub repeated: AtomicU64,
    /// Reads without a request, as sessions told that have ended.
    ended_direct_reads: AtomicU64,
    refused: Mutex<BTreeMap<Errno, u64>>,
    refused_last: Mutex<VecDeque<(u32, Errno)>>,
}

/// How many of the latest refusals are remembered with the process.
const REFUSALS_REMEMBERED: usize = 64;

impl EndpointCounters {
    /// Clients that got no session, by what stood against it: `EPERM` when they changed their rights on the way or have some
    /// that nobody can vouch for, `EACCES` when they do not see the instance as a whole where they reach it, `E2BIG` when they have too many groups, or too many mounts to be
    /// looked at, `EUSERS` when there are too many, `ENOMEM` when there is no room for a session's memory or for what is kept of its client, `EPIPE` or `ECONNRESET` when they did not wait so long, `ETIMEDOUT` when
    /// they did not greet in time, `EMFILE` for each pause because this process had no descriptor left.
    pub fn refused(&self) -> BTreeMap<Errno, u64> {
        self.refusals().clone()
    }

    /// Why the process got no session when it last asked for one, if that is not too long ago to be remembered.
    pub fn refused_last(&self, process: u32) -> Option<Errno> {
        let all = self.refused_last.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().rev().find(|(known, _)| *known == process).map(|(_, why)| *why)
    }

    pub(super) fn remember_refusal(&self, process: u32, why: Errno) {
        let mut all = self.refused_last.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|(known, _)| *known != process);
        if all.len() >= REFUSALS_REMEMBERED {
            all.pop_front();
        }
        all.push_back((process, why));
    }

    pub(super) fn count_refusal(&self, why: Errno) {
        *self.refusals().entry(why).or_default() += 1;
    }

    fn refusals(&self) -> MutexGuard<'_, BTreeMap<Errno, u64>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Queue {
    file: OwnedFd,
    mapping: Mapping,
    slots: usize,
    /// What its consumers do, as only this process can write it. Held while the shared count is set.
    consumers: Mutex<Consumers>,
}

/// Consumers of a queue that are not serving a request.
#[derive(Default)]
struct Consumers {
    asleep: u32,
    /// Awake and bound to scan the queue once more before they sleep.
    searching: u32,
}

impl Consumers {
    /// How many sleepers producers are to see: who searches finds their doorbells without being woken.
    fn to_wake(&self) -> u32 {
        if self.searching > 0 { 0 } else { self.asleep }
    }
}

impl Queue {
    fn new(slots: usize) -> Result<Self, Errno> {
        let length = area::queue_length(slots);
        let file = create_sealed(c"poolfs-queue", length)?;
        let mapping = Mapping::of_sealed(&file, length, true)?;
        Ok(Self { file, mapping, slots, consumers: Mutex::default() })
    }

    fn words(&self) -> RelaxedQueue<'_> {
        area::queue(&self.mapping, self.slots)
    }

    fn consumers(&self) -> MutexGuard<'_, Consumers> {
        self.consumers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce_sleep(&self) -> u32 {
        let mut consumers = self.consumers();
        consumers.asleep += 1;
        self.words().announce_sleep(consumers.to_wake())
    }

    fn end_sleep(&self) {
        let mut consumers = self.consumers();
        consumers.asleep -= 1;
        self.words().end_sleep(consumers.to_wake());
    }

    fn begin_search(&self) {
        let mut consumers = self.consumers();
        consumers.searching += 1;
        self.words().end_sleep(0);
    }

    /// Who stops searching answers for the doorbells that rang nobody because of it: it looks once more, as before a
    /// sleep, and hands over what is left.
    fn end_search(&self) {
        let words = self.words();
        let mut consumers = self.consumers();
        consumers.searching -= 1;
        let to_wake = consumers.to_wake();
        words.announce_sleep(to_wake);
        drop(consumers);
        if to_wake > 0 && !words.is_empty() {
            futex::wake_one(words.ring());
        }
    }
}

/// Low bits of a session's number: its place in the table. The bits above count how often the place was used.
const PLACE_BITS: u32 = 12;

/// What the service says when it lets a client in.
pub struct Admission<C> {
    /// What it keeps with the session.
    pub content: C,
    /// Device number (major, minor) of the instance's mounts.
    pub device: [u32; 2],
    /// Whether what was found out for this still holds.
    pub recheck: Option<Recheck>,
}

/// A doorbell of a session, from the queue of a group.
struct Rung<C> {
    session: Arc<Session<C>>,
    doorbell: Doorbell,
    group: usize,
}

/// What a doorbell has called somebody for. [`Endpoint::acquire`] makes a request of it, which may take time: the client may have to be
/// looked at first, so whoever does it counts as serving a request.
pub struct Called<C>(Call<C>);

#[expect(clippy::large_enum_variant, reason = "the large one is nearly all of them, and lives on the stack")]
enum Call<C> {
    Summoned(Summoned<C>),
    Look(Rung<C>),
}

/// What a doorbell stands for.
#[expect(clippy::large_enum_variant, reason = "as above")]
pub enum Summoned<C> {
    /// A request.
    Request(Acquired<C>),
    /// Posts in this slot of the session, for whoever gets the slot's lock ([`Session::take_posts`]).
    Posts(Arc<Session<C>>, usize),
}

/// What is called with a session that comes to an end.
type SessionHook<C> = Box<dyn Fn(&Arc<Session<C>>) + Send + Sync>;

/// A place in the table of sessions.
type Place<C> = RwLock<Option<Arc<Session<C>>>>;

/// One instance's queues and sessions. `C` is what the service keeps with a session.
pub struct Endpoint<C> {
    config: EndpointConfig,
    queues: Vec<Queue>,
    places: Box<[Place<C>]>,
    /// Sessions let in so far.
    admitted: AtomicU32,
    counters: EndpointCounters,
    on_dismiss: OnceLock<SessionHook<C>>,
    on_over: OnceLock<SessionHook<C>>,
}

impl<C> Endpoint<C> {
    /// Makes the queues.
    ///
    /// # Errors
    /// `EINVAL` for sizes out of bounds; those of making memory files.
    pub fn new(config: EndpointConfig) -> Result<Self, Errno> {
        let sizes_fit = (1..=area::BUFFERS_MAX).contains(&config.buffers)
            && (2..=area::SLOTS_MAX).contains(&config.queue_slots)
            && config.queue_slots.is_power_of_two()
            && (1..=1 << PLACE_BITS).contains(&config.sessions_max);
        if !sizes_fit {
            return Err(Errno::EINVAL);
        }
        let queues = (0..config.groups.count()).map(|_| Queue::new(config.queue_slots)).collect::<Result<_, _>>()?;
        let places = (0..config.sessions_max).map(|_| RwLock::new(None)).collect();
        let counters = EndpointCounters::default();
        let (on_dismiss, on_over) = (OnceLock::new(), OnceLock::new());
        Ok(Self { config, queues, places, admitted: AtomicU32::new(0), counters, on_dismiss, on_over })
    }

    /// What was counted.
    pub fn counters(&self) -> &EndpointCounters {
        &self.counters
    }

    /// The core groups.
    pub fn groups(&self) -> &CoreGroups {
        &self.config.groups
    }

    /// The live session with this number.
    pub fn session(&self, number: u32) -> Option<Arc<Session<C>>> {
        let place = self.places.get(number as usize & ((1 << PLACE_BITS) - 1))?;
        let session = place.read().unwrap_or_else(PoisonError::into_inner);
        session.as_ref().filter(|session| session.number() == number).cloned()
    }

    /// All live sessions.
    pub fn sessions(&self) -> Vec<Arc<Session<C>>> {
        let all = self.places.iter();
        all.filter_map(|place| place.read().unwrap_or_else(PoisonError::into_inner).clone()).collect()
    }

    /// Reads without a request, as the clients tell.
    pub fn direct_reads(&self) -> u64 {
        let ended = self.counters.ended_direct_reads.load(Ordering::Relaxed);
        self.sessions().iter().fold(ended, |sum, session| sum.saturating_add(session.direct_reads().sum()))
    }

    /// Makes a session for a client, with the message and the buffers' file to send.
    ///
    /// # Errors
    /// `EUSERS` when there are too many sessions, `ENOMEM` when they have too much memory; those of making memory files;
    /// that of `admission`.
    pub(super) fn admit(
        &self,
        facts: PeerFacts,
        tasks: Tasks,
        admission: impl FnOnce(&PeerFacts) -> Result<Admission<C>, Errno>,
    ) -> Result<(Arc<Session<C>>, Welcome, OwnedFd), Errno> {
        let of_user = self.sessions().iter().filter(|session| session.facts().uid == facts.uid).count();
        if of_user >= self.config.sessions_per_user_max {
            return Err(Errno::EUSERS);
        }
        let is_free = |place: &Place<C>| place.read().unwrap_or_else(PoisonError::into_inner).is_none();
        let place = self.places.iter().position(is_free).ok_or(Errno::EUSERS)?;
        let use_number = self.admitted.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let number = (use_number << PLACE_BITS) | place as u32;
        let length = area::buffers_length(self.config.buffers, DATA_BYTES);
        let file = create_sealed(c"poolfs-buffers", length)?;
        let mapping = Mapping::of_sealed(&file, length, true)?;
        let Admission { content, device, recheck } = admission(&facts)?;
        let (buffers, memory) = (self.config.buffers, &self.config.memory);
        let session =
            Arc::new(Session::new(number, (facts, tasks), (content, recheck), mapping, buffers, DATA_BYTES, memory)?);
        *self.places[place].write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&session));
        let welcome = Welcome {
            magic: MAGIC,
            version: VERSION,
            session: number,
            buffers: self.config.buffers as u32,
            buffer_data: DATA_BYTES as u32,
            queues: self.queues.len() as u32,
            queue_slots: self.config.queue_slots as u32,
            group_of_cpu: self.config.groups.table(),
            device,
            leases: self.config.leases.as_ref().map_or(0, |(count, _)| *count),
            timeout_ms: self.config.timeout.map_or(0, |timeout| timeout.as_millis().clamp(1, u32::MAX.into()) as u32),
        };
        Ok((session, welcome, file))
    }

    /// The queues' files, in the order of the groups, and that of the leases.
    pub(super) fn shared_files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let leases = self.config.leases.iter().map(|(_, file)| file.as_fd());
        self.queues.iter().map(|queue| queue.file.as_fd()).chain(leases)
    }

    /// What is done first with a session that is about to end, while its requests are still acquired: its posts are taken.
    /// It may be called more than once for a session. Set once; later ones are dropped.
    pub fn set_on_dismiss(&self, on_dismiss: impl Fn(&Arc<Session<C>>) + Send + Sync + 'static) {
        let _ = self.on_dismiss.set(Box::new(on_dismiss));
    }

    /// Takes the session out of the table: no request of it is acquired any more, those under way end.
    pub(super) fn dismiss(&self, session: &Arc<Session<C>>) {
        self.prepare_end(session);
        session.end();
        let Some(place) = self.places.get(session.number() as usize & ((1 << PLACE_BITS) - 1)) else { return };
        let mut place = place.write().unwrap_or_else(PoisonError::into_inner);
        if place.as_ref().is_some_and(|other| Arc::ptr_eq(other, session)) {
            *place = None;
            let all = &self.counters.ended_direct_reads;
            let _ = all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |before| {
                Some(before.saturating_add(session.direct_reads().sum()))
            });
        }
    }

    /// What is done with a session that is over, before anybody hears of that: its client goes on by the kernel at once. After what is done when it is
    /// dismissed. Set once; later ones are dropped.
    pub fn set_on_over(&self, on_over: impl Fn(&Arc<Session<C>>) + Send + Sync + 'static) {
        let _ = self.on_over.set(Box::new(on_over));
    }

    fn prepare_end(&self, session: &Arc<Session<C>>) {
        session.is_dismissed.store(true, Ordering::Release);
        if let Some(on_dismiss) = self.on_dismiss.get() {
            on_dismiss(session);
        }
    }

    /// Looks whether a client still is who it was let in as. If it is not, the session is over: what was posted has been taken, and the kernel knows
    /// of it, when the first request is turned away, so that its caller finds it by the kernel.
    fn look_at(&self, session: &Arc<Session<C>>) {
        // A look may ask a branch that does not answer: others that come to be due go on.
        if session.still_has_its_rights() || !session.begin_ending() {
            return;
        }
        let _over = OverAtLast(session);
        self.prepare_end(session);
        if let Some(on_over) = self.on_over.get() {
            on_over(session);
        }
    }

    /// Takes what the queue of `group` has a doorbell for, if there is anything, with all the looks at clients that this needs.
    pub fn take(&self, group: usize) -> Option<Summoned<C>> {
        loop {
            if let Some(summoned) = self.acquire(self.called(group)?) {
                return Some(summoned);
            }
        }
    }

    /// What there is to be done for the queue of `group`, found out without waiting for anything.
    pub fn called(&self, group: usize) -> Option<Called<C>> {
        let queue = self.queues[group].words();
        // As many as were there when we came: whoever refills the queue with rubbish does not keep us here.
        for _ in 0..self.config.queue_slots {
            let mut rejected = 0;
            let doorbell = queue.take(&mut rejected);
            if rejected > 0 {
                self.counters.rejected.fetch_add(rejected, Ordering::Relaxed);
            }
            let doorbell = doorbell?;
            if queue.must_wake_producers() {
                futex::wake_all(queue.space());
            }
            let Some(session) = self.session(doorbell.session) else {
                self.counters.stray.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let rung = Rung { session, doorbell, group };
            if rung.session.has_to_be_looked_at() {
                return Some(Called(Call::Look(rung)));
            }
            if let Some(summoned) = self.answer(rung) {
                return Some(Called(Call::Summoned(summoned)));
            }
        }
        None
    }

    /// The request that was called for, or the slot whose posts were. Nothing when there is none, or its client no longer is who it
    /// was: then it has been told that its session has ended.
    pub fn acquire(&self, called: Called<C>) -> Option<Summoned<C>> {
        match called.0 {
            Call::Summoned(summoned) => Some(summoned),
            Call::Look(rung) => {
                self.look_at(&rung.session);
                self.answer(rung)
            }
        }
    }

    fn answer(&self, rung: Rung<C>) -> Option<Summoned<C>> {
        let Rung { session, doorbell, group } = rung;
        let Some(slot) = doorbell.posts_slot() else {
            if session.is_being_ended() {
                // It is turned away at the end of that; at the latest when its caller rings again.
                return None;
            }
            let Some(acquired) = session.acquire(usize::from(doorbell.buffer)) else {
                self.counters.stray.fetch_add(1, Ordering::Relaxed);
                return None;
            };
            if doorbell.again {
                self.ring_for_others(&session, group);
            }
            if session.is_over() {
                acquired.turn_away();
                return None;
            }
            return Some(Summoned::Request(acquired));
        };
        if slot >= POST_SLOTS || session.has_ended() {
            self.counters.stray.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        if !session.has_posts(slot) {
            // Whoever had something to do with the file has taken them meanwhile.
            return None;
        }
        if doorbell.again {
            self.ring_for_others(&session, group);
        }
        Some(Summoned::Posts(session, slot))
    }

    /// A ring was lost: others of the session may have been too.
    fn ring_for_others(&self, session: &Session<C>, group: usize) {
        self.counters.repeated.fetch_add(1, Ordering::Relaxed);
        let number = session.number();
        let of_buffers = (0..session.buffers()).filter(|&index| session.is_waiting(index)).map(|index| Doorbell {
            session: number,
            buffer: index as u16,
            again: false,
        });
        let of_slots = (0..POST_SLOTS as u16)
            .filter(|&slot| session.has_posts(usize::from(slot)))
            .map(|slot| Doorbell::of_posts(number, slot));
        let queue = self.queues[group].words();
        for doorbell in of_buffers.chain(of_slots) {
            // A full queue is no harm, they ring again.
            if queue.publish(doorbell).is_err() {
                break;
            }
        }
    }

    /// Has requests say when they were submitted, or no more. What they say nobody vouches for.
    pub fn want_stamps(&self, wanted: bool) {
        self.queues.iter().for_each(|queue| queue.words().want_stamps(wanted));
    }

    /// Doorbells waiting in the queue of `group`, counted up to `limit`.
    pub fn backlog(&self, group: usize, limit: usize) -> usize {
        self.queues[group].words().backlog(limit)
    }

    /// Begins a search: until its value is dropped, producers of the queue of `group` wake nobody. To be called before a
    /// reply is published, since the caller's next doorbell may come before this thread runs again.
    pub fn search(self: &Arc<Self>, group: usize) -> Search<C> {
        self.queues[group].begin_search();
        Search { endpoint: Arc::clone(self), group }
    }

    /// Wakes everybody who sleeps on the queue of `group`.
    pub fn wake_all(&self, group: usize) {
        futex::wake_all(self.queues[group].words().ring());
    }
}

/// A consumer that is awake and will scan the queue before it sleeps. Ends when dropped: before a request is served, which
/// may take long, and by [`wait_for_doorbells`].
pub struct Search<C> {
    endpoint: Arc<Endpoint<C>>,
    group: usize,
}

impl<C> Drop for Search<C> {
    fn drop(&mut self) {
        self.endpoint.queues[self.group].end_search();
    }
}

/// Sleeps until a doorbell is rung in the queue of `group` of some endpoint, `change` no longer holds `seen`, or `limit` has
/// passed. At most [`futex::WORDS_MAX`]` - 1` endpoints. The caller scans all queues afterwards.
///
/// Whoever changes `change` wakes its sleepers and then calls [`Endpoint::wake_all`] on all endpoints: a thread with one
/// queue sleeps on that queue's word alone, which costs less than sleeping on two. A client can turn that word back while a
/// thread goes to sleep, so both are repeated until no thread sleeps that began before.
pub fn wait_for_doorbells<C>(
    endpoints: &[Arc<Endpoint<C>>],
    group: usize,
    change: &AtomicU32,
    seen: u32,
    limit: Duration,
    searching: Option<Search<C>>,
) {
    if let [endpoint] = endpoints {
        let queue = &endpoint.queues[group];
        let words = queue.words();
        let expected = queue.announce_sleep();
        drop(searching);
        // After the event count was read: a change that is missed here rings after that.
        if words.is_empty() && change.load(Ordering::Acquire) == seen {
            futex::wait(words.events(), expected, limit);
        }
        return queue.end_sleep();
    }
    let queues: Vec<&Queue> = endpoints.iter().map(|endpoint| &endpoint.queues[group]).collect();
    let views: Vec<RelaxedQueue<'_>> = queues.iter().map(|queue| queue.words()).collect();
    let mut words = Vec::with_capacity(queues.len() + 1);
    words.extend(queues.iter().zip(&views).map(|(queue, view)| (view.events(), queue.announce_sleep())));
    words.push((change, seen));
    drop(searching);
    if views.iter().all(DoorbellQueue::is_empty) {
        futex::wait_any(&words, limit);
    }
    queues.iter().for_each(|queue| queue.end_sleep());
}

/// A session that is over when this is dropped, also by a panic: otherwise its requests would wait for ever.
struct OverAtLast<'s, C>(&'s Arc<Session<C>>);

impl<C> Drop for OverAtLast<'_, C> {
    fn drop(&mut self) {
        self.0.be_over();
        // Of requests that have come meanwhile the doorbells were dropped.
        (0..self.0.buffers()).filter_map(|buffer| self.0.acquire(buffer)).for_each(Acquired::turn_away);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_refusals_are_remembered_with_their_process() {
        let counters = EndpointCounters::default();
        for process in 1..=1000 {
            counters.remember_refusal(process, Errno::EPERM);
        }
        counters.remember_refusal(1000, Errno::EUSERS);
        assert_eq!(counters.refused_last(1000), Some(Errno::EUSERS));
        assert_eq!(counters.refused_last(999), Some(Errno::EPERM));
        assert_eq!(counters.refused_last(1), None, "it is too long ago");
        assert_eq!(counters.refused_last.lock().map(|all| all.len()).ok(), Some(REFUSALS_REMEMBERED));
    }
}
