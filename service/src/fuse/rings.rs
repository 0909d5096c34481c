//! The io_uring transport of a mount: its entries, and the threads that serve them, one each.
//!
//! The kernel has a queue for each possible CPU, and switches to them when each has an entry. It wakes the thread of an entry on
//! the CPU that the thread runs on. Threads of the pool's CPUs stay there, so that a caller finds its answer without another CPU
//! being woken. The queues of all other CPUs are served on the pool's CPUs.

use super::answer::Given;
use super::device::{Device, TRANSFER_BYTES_MAX, answerable};
use super::incoming::{Call, Message};
use super::interrupts::InService;
use crate::cpus::keep_on;
use crate::spans::Measured;
use crate::transfers::{Charge, Counted, MountTransfers};
use poolfs_fuse_ring::{Entry, Heir};
use poolfs_libservice::types::Errno;
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use tracing::{error, info, warn};

/// Entries, and so threads, of the queue of a CPU: one of the pool's, and any other. Requests that wait for a disk hold up their
/// queue when they take all of them.
const ALL: PerQueue = PerQueue { own: 4, other: 2 };
/// The same where there are many mounts: each entry is memory.
const FEWEST: PerQueue = PerQueue { own: 2, other: 1 };

struct PerQueue {
    own: usize,
    other: usize,
}

/// Most entries of a mount. Where the host has so many CPUs that there would be more, `/dev/fuse` is used.
const ENTRIES_MAX: usize = 128;

/// Most threads of a mount that are stuck with requests that nobody waits for any more.
const STUCK_MAX: usize = 32;

/// Threads that read `/dev/fuse` beside the rings.
pub(super) const READERS: usize = 2;

/// The entries for a connection, and what they are counted by as long as they are used.
#[derive(Default)]
pub(super) struct Entries {
    pub(super) all: Vec<Entry>,
    pub(super) counted: Option<Counted>,
}

/// The entries for a connection: none when it has to do without.
pub(super) fn entries(device: &Device, cpus: &[u32], transfers: &MountTransfers) -> Entries {
    let possible = std::fs::read_to_string("/sys/devices/system/cpu/possible");
    let Some(queues) = possible.ok().as_deref().and_then(queues) else {
        warn!("/dev/fuse is used: which CPUs are possible is not to be had");
        return Entries::default();
    };
    let [all, fewest] = [ALL, FEWEST].map(|per| layout(queues, cpus, &per));
    if all.len() > ENTRIES_MAX {
        info!(queues, "/dev/fuse is used: there are too many CPUs for rings");
        return Entries::default();
    }
    let Some((count, counted)) = transfers.entries(all.len(), fewest.len()) else {
        info!("/dev/fuse is used: other mounts have as many entries of rings as the pool has memory for");
        return Entries::default();
    };
    let wanted = if count == all.len() { all } else { fewest };
    let made = wanted.into_iter().map(|queue| Entry::new(device.descriptor(), queue, TRANSFER_BYTES_MAX));
    match made.collect::<io::Result<_>>() {
        Ok(all) => Entries { all, counted: Some(counted) },
        Err(error) => {
            warn!(%error, "/dev/fuse is used: rings cannot be made");
            Entries::default()
        }
    }
}

/// How many queues the kernel has, by its list of possible CPUs. It numbers queues as CPUs; a list with holes is not relied on.
fn queues(possible: &str) -> Option<u16> {
    let last = match possible.trim().strip_prefix('0')? {
        "" => 0,
        range => range.strip_prefix('-')?.parse::<u16>().ok()?,
    };
    last.checked_add(1)
}

/// The queue of each entry.
fn layout(queues: u16, cpus: &[u32], per: &PerQueue) -> Vec<u16> {
    let of = |queue| if cpus.contains(&u32::from(queue)) { per.own } else { per.other };
    (0..queues).flat_map(|queue| std::iter::repeat_n(queue, of(queue))).collect()
}

/// The entries of a session that came to serve.
pub(super) struct Rings {
    cpus: Vec<u32>,
    /// By place.
    heirs: Vec<Heir>,
    stuck: AtomicUsize,
    counted: OnceLock<Counted>,
}

/// What an entry is served with.
struct Lane {
    place: usize,
    entry: Entry,
    given: Vec<Given>,
    /// What the pool's memory is charged with for the entry's.
    charge: Charge,
}

impl Rings {
    pub(super) fn new(entries: &[Entry], cpus: &[u32]) -> Self {
        let heirs = entries.iter().map(Entry::heir).collect();
        Self { cpus: cpus.to_vec(), heirs, stuck: AtomicUsize::new(0), counted: OnceLock::new() }
    }

    /// The entries are used, and counted by this as long as the mount is there.
    pub(super) fn count_by(&self, counted: Option<Counted>) {
        counted.into_iter().for_each(|counted| drop(self.counted.set(counted)));
    }

    /// Whether a place is that of an entry.
    pub(super) fn have(&self, place: usize) -> bool {
        place < self.heirs.len()
    }

    /// Keeps the calling thread on the queue's CPU if it is one of the pool's, to which it is confined in any case.
    fn pin(&self, queue: u16) {
        let cpu = u32::from(queue);
        if self.cpus.contains(&cpu) {
            keep_on(&[cpu]);
        }
    }
}

/// The session whose requests come by the rings, as the threads of the entries see it.
pub(super) trait RingSession: Send + Sync + 'static {
    /// The name of its instance.
    fn name(&self) -> &str;

    fn device(&self) -> &Device;

    fn rings(&self) -> &Rings;

    fn in_service(&self) -> &InService;

    fn transfers(&self) -> &MountTransfers;

    /// Serves a call; its answer is put into `room`, and what it gives the kernel noted in `given`.
    fn serve(self: &Arc<Self>, place: usize, call: Call<'_>, room: &mut [u8], given: &mut Vec<Given>) -> Served<'_>;

    /// The kernel did not take the answer that was to give it this.
    fn take_back(&self, given: Given);

    /// A thread is about to end.
    fn has_ended(&self, error: &io::Error);
}

/// A call that was served.
pub(super) struct Served<'a> {
    /// How long the answer is, or what went wrong.
    pub(super) outcome: Result<usize, Errno>,
    /// Nobody else has answered meanwhile.
    pub(super) is_waited_for: bool,
    pub(super) measured: Option<Measured<'a>>,
}

/// Has the kernel send the requests of a session by `entries`, which have the first places; whether it does.
///
/// # Errors
/// When the kernel waits for what it will not get.
pub(super) fn start<S: RingSession>(session: &Arc<S>, entries: Vec<Entry>) -> io::Result<bool> {
    if entries.is_empty() {
        return Ok(false);
    }
    let all: BTreeSet<u16> = entries.iter().map(Entry::queue).collect();
    let (registered, registrations) = channel();
    let mut waiting = Vec::new();
    for (place, entry) in entries.into_iter().enumerate() {
        let (decided, decision) = sync_channel(1);
        let (served, registered) = (Arc::clone(session), registered.clone());
        let lane = Lane { place, entry, given: Vec::new(), charge: session.transfers().charge() };
        let name = format!("fuse-ring-{}", lane.entry.queue());
        match thread::Builder::new().name(name).spawn(move || register(&served, lane, registered, &decision)) {
            Ok(_) => waiting.push(decided),
            Err(error) => warn!(instance = session.name(), %error, "no thread for a ring"),
        }
    }
    drop(registered);
    let served: BTreeSet<u16> = registrations.iter().collect();
    // With an entry in each queue the kernel has gone over to them, whatever happened to further ones.
    let complete = served == all;
    if !complete {
        warn!(instance = session.name(), "the kernel does not take the rings, and uses /dev/fuse");
        poolfs_fuse_ring::refuse(session.device().descriptor())?;
    }
    // Those whose entry was not taken have ended.
    for decided in waiting {
        let _ = decided.send(complete);
    }
    Ok(complete)
}

fn register<S: RingSession>(session: &Arc<S>, mut lane: Lane, registered: Sender<u16>, decision: &Receiver<bool>) {
    let queue = lane.entry.queue();
    session.rings().pin(queue);
    if let Err(error) = lane.entry.register() {
        return warn!(instance = session.name(), queue, %error, "the kernel does not take a ring");
    }
    let _ = registered.send(queue);
    drop(registered);
    if decision.recv() == Ok(true) {
        serve_ring(session, lane);
    }
}

fn serve_ring<S: RingSession>(session: &Arc<S>, mut lane: Lane) {
    let ended = loop {
        match lane.entry.receive().and_then(|()| serve_one(session, &mut lane)) {
            Ok(true) => {}
            Ok(false) => break None,
            Err(error) => break Some(error),
        }
    };
    // Nobody has got the last answer.
    lane.given.drain(..).for_each(|given| session.take_back(given));
    match ended {
        Some(error) => session.has_ended(&error),
        None => drop(session.rings().stuck.fetch_sub(1, Ordering::AcqRel)),
    }
}

/// Serves the request that was received; whether the entry still is the thread's.
fn serve_one<S: RingSession>(session: &Arc<S>, lane: &mut Lane) -> io::Result<bool> {
    let (message, room) = lane.entry.split();
    let length = message.len();
    let outcome = match Message::parse(message) {
        Ok(Message::Call(call)) => {
            let Served { outcome, is_waited_for, measured } = session.serve(lane.place, call, room, &mut lane.given);
            measured.into_iter().for_each(|measured| measured.end(outcome.err().map_or("done", Errno::name)));
            if outcome.is_err() {
                lane.given.drain(..).for_each(|given| session.take_back(given));
            }
            lane.charge.note_used(length + outcome.unwrap_or(0));
            if !is_waited_for {
                return Ok(false);
            }
            outcome
        }
        other => {
            error!(instance = session.name(), ?other, "the kernel sent no request by a ring");
            Err(Errno::EIO)
        }
    };
    lane.entry.answer(outcome.map_err(answerable))?;
    Ok(true)
}

/// Answers the request in a place of a session, for which nobody waits any more, with `errno`; whether it will be. The thread that serves it
/// goes on with what it has, and ends; the entry is another thread's from here on.
pub(super) fn take_over<S: RingSession>(session: &Arc<S>, place: usize, unique: u64, errno: Errno) -> bool {
    let stuck = &session.rings().stuck;
    if stuck.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| (now < STUCK_MAX).then_some(now + 1)).is_err() {
        return false;
    }
    let name = format!("fuse-ring-{}", session.rings().heirs[place].queue());
    let session = Arc::clone(session);
    let spawned = thread::Builder::new().name(name).spawn(move || match succeed(&*session, place, unique, errno) {
        Ok(Some(lane)) => serve_ring(&session, lane),
        // Whoever took the request out of service has not been stuck.
        Ok(None) => drop(session.rings().stuck.fetch_sub(1, Ordering::AcqRel)),
        Err(error) => {
            session.rings().stuck.fetch_sub(1, Ordering::AcqRel);
            warn!(instance = session.name(), %error, "a caller that waits no longer is not answered");
        }
    });
    if spawned.is_err() {
        stuck.fetch_sub(1, Ordering::AcqRel);
    }
    spawned.is_ok()
}

/// The entry of a place without its request, which is answered; nothing when it is answered already.
fn succeed<S: RingSession>(session: &S, place: usize, unique: u64, errno: Errno) -> io::Result<Option<Lane>> {
    let heir = &session.rings().heirs[place];
    session.rings().pin(heir.queue());
    let successor = heir.successor()?;
    let Some(entry) = session.in_service().take(place, unique, || successor.step_in(unique)) else { return Ok(None) };
    let mut entry = entry?;
    entry.answer(Err(errno.raw()))?;
    Ok(Some(Lane { place, entry, given: Vec::new(), charge: session.transfers().charge() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_counted_only_where_they_are_all_there() {
        for (list, count) in [("0\n", Some(1)), ("0-1\n", Some(2)), ("0-127", Some(128)), ("0-65535", None)] {
            assert_eq!(queues(list), count, "{list}");
        }
        for list in ["", "1-3", "0,2", "0-1,4-5", "0-x", "00"] {
            assert_eq!(queues(list), None, "{list}");
        }
    }

    #[test]
    fn every_queue_has_entries_and_the_pools_own_have_more() {
        assert_eq!(layout(3, &[1, 7], &ALL), [0, 0, 1, 1, 1, 1, 2, 2]);
        assert_eq!(layout(1, &[], &ALL), [0, 0]);
        assert_eq!(layout(3, &[1, 7], &FEWEST), [0, 1, 1, 2]);
    }
}
