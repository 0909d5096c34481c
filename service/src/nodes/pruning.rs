//! Pruning: the kernel is asked to forget nodes that nobody uses.
//!
//! The kernel keeps a node as long as it has memory of its own to spare, and the service has to keep it as long: a walk through a
//! large tree would grow the service beyond its pool's limit. So the nodes of all mounts of a service are counted together. Above
//! a bound, a thread of its own, with no lock held, asks for those that were looked up longest ago to be forgotten. What is open,
//! mounted on, watched (inotify) or somebody's working directory stays; a directory stays until what is in it has gone. A kernel
//! before Linux 6.18 cannot be asked for single nodes; it is made to forget all unused ones of a mount.
//!
//! What stays is bounded as well: see [`super::admission`].
//!
//! The same is asked for programs that the kernel maps by itself ([`super::passthrough`]) when there is no room for another one:
//! they stay in the cache until the kernel forgets them.

use super::{NodeTable, ROOT_NUMBER, lock};
use crate::notify::KernelCache;
use crate::pool_memory::PoolMemory;
use crate::shares::NODE_BYTES;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, info};

/// Nodes named in one message.
const BATCH: usize = 512;

/// How often a round asks in a row without getting back much of what it asked for: that is in use.
const FRUITLESS_MAX: u32 = 4;

/// How long it waits each time for the kernel to give back what it was asked for.
const PASS_WAIT_MAX: Duration = Duration::from_millis(20);
pub(super) const PASS_PAUSE: Duration = Duration::from_millis(1);

/// How long a round waits for a mount whose kernel is asked for all that nobody uses.
const REMOUNT_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long no more is asked for programs after it was.
const TEXTS_PAUSE: Duration = Duration::from_secs(1);

/// The nodes that the kernel knows, of all mounts.
pub(super) struct Known {
    nodes_max: u64,
    memory: Arc<dyn PoolMemory>,
    count: AtomicU64,
    /// How many have left so far.
    given_back: AtomicU64,
    /// Above this count somebody asks for a round; nobody does while one is due.
    due_above: AtomicU64,
    signal: Mutex<Signal>,
    wake: Condvar,
}

#[derive(Default)]
struct Signal {
    due: bool,
    /// There is no room for programs.
    texts_due: bool,
    ending: bool,
}

impl Known {
    pub(super) fn entered(&self) {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if count > self.nodes_max {
            self.memory.charge(NODE_BYTES);
        }
        self.ask_if_due(count);
    }

    /// Has a round begin now.
    pub(super) fn ask_now(&self) {
        lock(&self.signal).due = true;
        self.wake.notify_one();
    }

    fn ask_if_due(&self, count: u64) {
        let is_due = count > self.due_above.load(Ordering::Relaxed);
        if is_due && self.due_above.swap(u64::MAX, Ordering::Relaxed) != u64::MAX {
            lock(&self.signal).due = true;
            self.wake.notify_one();
        }
    }

    pub(super) fn left(&self, nodes: u64) {
        self.given_back.fetch_add(nodes, Ordering::Relaxed);
        let before = self.count.fetch_sub(nodes, Ordering::Relaxed);
        let count = before.saturating_sub(nodes);
        let beyond = before.max(self.nodes_max) - count.max(self.nodes_max);
        if beyond > 0 {
            self.memory.discharge(beyond * NODE_BYTES);
        }
        let (due_above, next) = (self.due_above.load(Ordering::Relaxed), self.next_round(count));
        if due_above != u64::MAX && due_above > next {
            self.due_above.fetch_min(next, Ordering::Relaxed);
        }
    }

    /// When so many stay, who is to ask next: nodes in use are not asked for again and again.
    fn next_round(&self, count: u64) -> u64 {
        self.nodes_max.max(count + self.nodes_max / 4)
    }

    /// Waits until something is due, of nodes or of programs, if there is to be anything more.
    fn wait(&self) -> Option<(bool, bool)> {
        let mut signal = lock(&self.signal);
        while !signal.due && !signal.texts_due && !signal.ending {
            signal = self.wake.wait(signal).unwrap_or_else(PoisonError::into_inner);
        }
        let due = (std::mem::take(&mut signal.due), std::mem::take(&mut signal.texts_due));
        (!signal.ending).then_some(due)
    }
}

struct Mount {
    nodes: Weak<NodeTable>,
    kernel: Weak<dyn KernelCache>,
    forgets: Forgets,
    /// Whether its kernel is being asked for all that nobody uses.
    is_asked: Arc<AtomicBool>,
}

/// What a mount's kernel can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forgets {
    /// Single nodes.
    Single,
    /// All that nobody uses.
    Unused,
    /// Nothing.
    Nothing,
}

/// Keeps the kernel from having the service keep too much.
pub struct Pruner {
    known: Arc<Known>,
    mounts: Arc<Mutex<Vec<Mount>>>,
    thread: Option<JoinHandle<()>>,
}

impl Pruner {
    /// Starts the thread, which has the kernel forget nodes when it knows more than `nodes_max`. `memory` is charged with those above.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(nodes_max: u64, memory: Arc<dyn PoolMemory>) -> io::Result<Self> {
        let (count, given_back, signal, wake) = Default::default();
        let known = Arc::new(Known {
            nodes_max,
            memory,
            count,
            given_back,
            due_above: AtomicU64::new(nodes_max),
            signal,
            wake,
        });
        let mounts: Arc<Mutex<Vec<Mount>>> = Arc::default();
        let (of_thread, all) = (Arc::clone(&known), Arc::clone(&mounts));
        let work = move || {
            let mut texts_asked_for: Option<Instant> = None;
            while let Some((nodes_due, texts_due)) = of_thread.wait() {
                if texts_due && texts_asked_for.is_none_or(|last| last.elapsed() >= TEXTS_PAUSE) {
                    texts_asked_for = Some(Instant::now());
                    ask_for_texts(&all);
                }
                if nodes_due {
                    round(&of_thread, &all);
                }
            }
        };
        let thread = std::thread::Builder::new().name("prune".into()).spawn(work)?;
        Ok(Self { known, mounts, thread: Some(thread) })
    }

    /// There is no room for a program: those that nobody uses any more are to be given back.
    pub(crate) fn ask_for_texts(&self) {
        lock(&self.known.signal).texts_due = true;
        self.known.wake.notify_one();
    }

    /// Counts these nodes from here on, while they are known by `kernel`. To be called before it knows any.
    pub(crate) fn add(&self, nodes: &Arc<NodeTable>, kernel: &Arc<dyn KernelCache>) {
        if nodes.known.set(Arc::clone(&self.known)).is_ok() {
            let mut mounts = lock(&self.mounts);
            mounts.retain(|mount| mount.nodes.strong_count() > 0);
            mounts.push(Mount {
                nodes: Arc::downgrade(nodes),
                kernel: Arc::downgrade(kernel),
                forgets: Forgets::Single,
                is_asked: Arc::default(),
            });
        }
    }
}

impl Drop for Pruner {
    fn drop(&mut self) {
        lock(&self.known.signal).ending = true;
        self.known.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Has the kernel forget what is too much, and says when that is to be done next.
fn round(known: &Known, mounts: &Mutex<Vec<Mount>>) {
    let target = known.nodes_max / 4 * 3;
    let mut fruitless = 0;
    while fruitless < FRUITLESS_MAX && !lock(&known.signal).ending {
        let before = known.given_back.load(Ordering::Relaxed);
        let asked = ask_once(known, mounts, target);
        if asked == 0 {
            break;
        }
        let start = Instant::now();
        let given_back = || known.given_back.load(Ordering::Relaxed).wrapping_sub(before);
        while given_back() < asked && start.elapsed() < PASS_WAIT_MAX {
            std::thread::sleep(PASS_PAUSE);
        }
        // Some may be in use, and new ones come meanwhile.
        fruitless = if given_back() * 4 < asked { fruitless + 1 } else { 0 };
    }
    let left = known.count.load(Ordering::Relaxed);
    debug!(left, "the kernel was asked to forget nodes");
    known.due_above.store(known.next_round(left), Ordering::Relaxed);
    // Whoever came before that was said asked for nothing.
    known.ask_if_due(known.count.load(Ordering::Relaxed));
}

/// Asks each mount's kernel for programs that nobody has open.
fn ask_for_texts(mounts: &Mutex<Vec<Mount>>) {
    let all: Vec<_> = {
        let mounts = lock(mounts);
        mounts.iter().filter_map(|mount| Some((mount.nodes.upgrade()?, mount.kernel.upgrade()?))).collect()
    };
    for (nodes, kernel) in all.iter().filter(|(_, kernel)| kernel.takes_backings()) {
        let numbers = nodes.unused_texts();
        if let Err(error) = numbers.chunks(BATCH).try_for_each(|batch| kernel.prune(batch)) {
            info!(%error, "the kernel does not give programs back");
        }
    }
}

/// Asks each mount's kernel for its part of what is above `target`; for how many nodes.
fn ask_once(known: &Known, mounts: &Mutex<Vec<Mount>>, target: u64) -> u64 {
    let count = known.count.load(Ordering::Relaxed);
    let surplus = count.saturating_sub(target);
    let all: Vec<_> = {
        let mounts = lock(mounts);
        let able = mounts.iter().filter(|mount| mount.forgets != Forgets::Nothing);
        let asked = |mount: &Mount| (mount.forgets, Arc::clone(&mount.is_asked));
        able.filter_map(|mount| Some((mount.nodes.upgrade()?, mount.kernel.upgrade()?, asked(mount)))).collect()
    };
    // A mount keeps half of an equal share, whatever others have.
    let reserved = target / (2 * all.len().max(1) as u64);
    let beyond = |nodes: &NodeTable| nodes.len().saturating_sub(reserved);
    let all_beyond: u64 = all.iter().map(|(nodes, _, _)| beyond(nodes)).sum();
    let mut asked = 0;
    for (nodes, kernel, (forgets, is_asked)) in &all {
        let part = beyond(nodes).saturating_mul(surplus).div_ceil(all_beyond.max(1));
        if part == 0 {
            continue;
        }
        asked += match forgets {
            Forgets::Single => {
                let numbers = nodes.longest_unused(part);
                let told = numbers.chunks(BATCH).try_for_each(|batch| kernel.prune(batch));
                // EINVAL is that it knows no such message.
                told.map_or_else(|error| give_up(mounts, nodes, &error, Forgets::Unused), |()| numbers.len() as u64)
            }
            Forgets::Unused => match ask_for_unused(kernel, is_asked) {
                Some(told) => told.map_or_else(|error| give_up(mounts, nodes, &error, Forgets::Nothing), |()| part),
                None => 0,
            },
            Forgets::Nothing => 0,
        };
    }
    asked
}

/// Has a mount's kernel asked, by a thread of its own, for all that nobody uses; nothing when it is still being asked. A remount waits for
/// what the mount's directory is on and for what the kernel has to write, and neither the other mounts nor an end of the service wait for that.
fn ask_for_unused(kernel: &Arc<dyn KernelCache>, is_asked: &Arc<AtomicBool>) -> Option<io::Result<()>> {
    if is_asked.swap(true, Ordering::Acquire) {
        return None;
    }
    let (told, answer) = channel();
    let (kernel, done) = (Arc::clone(kernel), Arc::clone(is_asked));
    let asking = std::thread::Builder::new().name("forget".into()).spawn(move || {
        let asked = kernel.forget_unused();
        done.store(false, Ordering::Release);
        let _ = told.send(asked);
    });
    match asking {
        Ok(_) => answer.recv_timeout(REMOUNT_WAIT_MAX).ok(),
        Err(error) => {
            is_asked.store(false, Ordering::Release);
            debug!(%error, "no thread to have the kernel forget nodes");
            None
        }
    }
}

/// The kernel of a mount does not do what it was asked for: what else it may be asked for from here on. It is asked again if that is something.
fn give_up(mounts: &Mutex<Vec<Mount>>, nodes: &Arc<NodeTable>, error: &io::Error, next: Forgets) -> u64 {
    info!(%error, ?next, "the kernel does not forget nodes when asked to");
    let own = |mount: &&mut Mount| std::ptr::addr_eq(mount.nodes.as_ptr(), Arc::as_ptr(nodes));
    lock(mounts).iter_mut().filter(own).for_each(|mount| mount.forgets = next);
    u64::from(next != Forgets::Nothing)
}

impl NodeTable {
    /// FUSE's numbers of about `count` nodes without open files, those first that were looked up, or taken from here,
    /// longest ago.
    fn longest_unused(&self, count: u64) -> Vec<u64> {
        let of_each = usize::try_from(count.div_ceil(self.states.len() as u64)).unwrap_or(usize::MAX);
        let mut numbers = Vec::new();
        for shard in &self.states {
            let mut states = lock(shard);
            let unused = states
                .values_mut()
                .filter(|state| state.kernel_references > 0 && state.open_files == 0 && state.number != ROOT_NUMBER);
            let mut unused: Vec<_> = unused.collect();
            if unused.len() > of_each {
                unused.select_nth_unstable_by_key(of_each, |state| state.entered);
                unused.truncate(of_each);
            }
            for state in unused {
                // Whoever cannot be forgotten now is not the first to be asked for again.
                state.entered = self.entries.fetch_add(1, Ordering::Relaxed);
                numbers.push(state.number);
            }
        }
        numbers
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::shares::tests::Memory;
    use poolfs_libservice::types::NodeId;
    use std::collections::BTreeSet;
    use std::os::fd::OwnedFd;

    const NODES_MAX: u64 = 1000;

    /// A kernel that forgets what it is asked to, but for what somebody uses, and notes what it was given.
    #[derive(Default)]
    pub(in crate::nodes) struct Kernel {
        nodes: Arc<NodeTable>,
        used_below: u64,
        forgets: Option<Forgets>,
        given: Mutex<(u32, BTreeSet<u32>)>,
        /// While it is held, a remount does not come back.
        hangs: Mutex<()>,
    }

    impl Kernel {
        /// How many files it has.
        pub(in crate::nodes) fn has(&self) -> usize {
            lock(&self.given).1.len()
        }
    }

    impl KernelCache for Kernel {
        fn expires_names(&self) -> bool {
            true
        }

        fn drop_attributes(&self, _: u64) -> io::Result<bool> {
            Ok(true)
        }

        fn invalidate(&self, _: u64, _: i64, _: i64) -> io::Result<()> {
            Ok(())
        }

        fn store(&self, _: u64, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn invalidate_name(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn expire_name(&self, _: u64, _: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn prune(&self, numbers: &[u64]) -> io::Result<()> {
            if self.forgets != Some(Forgets::Single) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            for number in numbers.iter().filter(|number| **number >= self.used_below) {
                self.nodes.forget(*number, u64::MAX);
            }
            Ok(())
        }

        fn forget_unused(&self) -> io::Result<()> {
            if self.forgets != Some(Forgets::Unused) {
                return Err(io::ErrorKind::Unsupported.into());
            }
            let _hangs = lock(&self.hangs);
            let all: Vec<u64> =
                self.nodes.numbers.iter().flat_map(|shard| lock(shard).keys().copied().collect::<Vec<_>>()).collect();
            for number in all.into_iter().filter(|number| *number >= self.used_below) {
                self.nodes.forget(number, u64::MAX);
            }
            Ok(())
        }

        fn open_backing(&self, _: &OwnedFd) -> io::Result<u32> {
            let mut given = lock(&self.given);
            given.0 += 1;
            let id = given.0;
            given.1.insert(id);
            Ok(id)
        }

        fn close_backing(&self, id: u32) -> io::Result<()> {
            assert!(lock(&self.given).1.remove(&id), "it has it once");
            Ok(())
        }
    }

    fn pruner() -> Pruner {
        Pruner::start(NODES_MAX, Arc::new(Memory::default())).expect("a thread")
    }

    fn mounted(pruner: &Pruner, used_below: u64, forgets: Forgets) -> (Arc<NodeTable>, Arc<dyn KernelCache>) {
        let nodes = Arc::new(NodeTable::default());
        let kernel: Arc<dyn KernelCache> =
            Arc::new(Kernel { nodes: Arc::clone(&nodes), used_below, forgets: Some(forgets), ..Kernel::default() });
        pruner.add(&nodes, &kernel);
        (nodes, kernel)
    }

    fn eventually(what: &str, condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(10), "{what}");
            std::thread::sleep(PASS_PAUSE);
        }
    }

    fn enter(nodes: &NodeTable, numbers: std::ops::Range<u64>) {
        for number in numbers {
            assert_eq!(nodes.enter(NodeId(number), number), number);
        }
    }

    #[test]
    fn the_nodes_of_all_mounts_are_bounded_and_those_in_use_stay() {
        let pruner = pruner();
        let [(first, _kernel), (second, _other)] =
            [mounted(&pruner, 302, Forgets::Single), mounted(&pruner, 2, Forgets::Single)];
        enter(&first, 2..602);
        nodes_of_one_in_use(&second);
        assert_eq!(first.len() + second.len(), 1000, "nothing is asked for up to the bound");
        enter(&second, 5000..5001);
        eventually("too many", || first.len() + second.len() <= NODES_MAX);
        assert!(second.node(3000).is_some(), "it is open");
        assert!((2..302).all(|number| first.node(number).is_some()), "they are in use");
        // Those in use are not what every round asks for.
        for start in 0..20 {
            enter(&second, 10_000 + start * 1000..10_000 + (start + 1) * 1000);
            eventually("too many again", || first.len() + second.len() <= NODES_MAX + NODES_MAX / 4);
        }
        drop((first, second));
        let (third, _kernel) = mounted(&pruner, 2, Forgets::Single);
        enter(&third, 2..12_000);
        eventually("too many after the end of other mounts", || third.len() <= NODES_MAX);
    }

    #[test]
    fn an_instance_within_its_part_keeps_what_it_knows() {
        let pruner = pruner();
        let [(first, _kernel), (second, _other)] =
            [mounted(&pruner, 2, Forgets::Single), mounted(&pruner, 2, Forgets::Single)];
        enter(&first, 2..152);
        for start in 0..20 {
            enter(&second, 10_000 + start * 1000..10_000 + (start + 1) * 1000);
            eventually("too many", || first.len() + second.len() <= NODES_MAX + NODES_MAX / 4);
        }
        assert_eq!(first.len(), 150);
    }

    fn nodes_of_one_in_use(nodes: &NodeTable) {
        enter(nodes, 3000..3400);
        nodes.opened(NodeId(3000), false, false);
    }

    #[test]
    fn a_kernel_that_cannot_forget_is_not_asked_again_and_what_it_knows_counts_no_more_when_it_is_gone() {
        let pruner = pruner();
        let (nodes, kernel) = mounted(&pruner, 2, Forgets::Nothing);
        enter(&nodes, 2..4002);
        eventually("it was asked", || lock(&pruner.mounts).iter().any(|mount| mount.forgets == Forgets::Nothing));
        assert_eq!(nodes.len(), 4000);
        nodes.forget_all();
        eventually("nothing is known", || pruner.known.count.load(Ordering::Relaxed) == 0);
        drop((nodes, kernel));
    }

    #[test]
    fn a_kernel_that_cannot_forget_single_nodes_forgets_all_that_nobody_uses() {
        let pruner = pruner();
        let (nodes, _kernel) = mounted(&pruner, 102, Forgets::Unused);
        enter(&nodes, 2..4002);
        eventually("all were forgotten", || nodes.len() <= NODES_MAX);
        assert!((2..102).all(|number| nodes.node(number).is_some()), "they are in use");
    }

    #[test]
    fn a_mount_whose_kernel_does_not_come_back_keeps_no_other_from_being_asked_and_no_service_from_ending() {
        let pruner = pruner();
        let hanging = Arc::new(NodeTable::default());
        let nodes = Arc::clone(&hanging);
        let kernel = Arc::new(Kernel { nodes, used_below: 2, forgets: Some(Forgets::Unused), ..Kernel::default() });
        let hangs = lock(&kernel.hangs);
        pruner.add(&hanging, &(Arc::clone(&kernel) as Arc<dyn KernelCache>));
        let (other, _kernel) = mounted(&pruner, 2, Forgets::Unused);
        enter(&hanging, 2..4002);
        for start in 0..3 {
            enter(&other, 10_000 + start * 1000..10_000 + (start + 1) * 1000);
            eventually("the other was asked", || other.len() < 1000);
        }
        assert_eq!(hanging.len(), 4000);
        drop(pruner);
        drop(hangs);
        eventually("it came back", || hanging.is_empty());
    }

    #[test]
    fn what_is_in_use_is_charged_and_leaves_others_half_of_a_share() {
        const ROOM: u64 = 3000;
        let memory = Arc::new(Memory::default());
        let pruner = Pruner::start(NODES_MAX, Arc::clone(&memory) as Arc<dyn PoolMemory>).expect("a thread");
        let shares = poolfs_libservice::Shares::reclaimable(ROOM);
        let [(greedy, _kernel), (other, _other)] =
            [mounted(&pruner, u64::MAX, Forgets::Single), mounted(&pruner, 2, Forgets::Single)];
        let joined = [&greedy, &other].map(|nodes| {
            let share = shares.join();
            nodes.set_share(&share);
            share
        });
        let mut next = 2;
        while greedy.finds_room() {
            enter(&greedy, next..next + 1);
            next += 1;
        }
        assert_eq!(greedy.len(), ROOM / 2 + ROOM / 4);
        assert!(!greedy.admits(NodeId(next)) && greedy.admits(NodeId(next - 1)) && greedy.admits(NodeId::ROOT));
        assert_eq!(memory.0.load(Ordering::Relaxed), (greedy.len() - NODES_MAX) * NODE_BYTES);
        for number in 10_000..20_000 {
            assert!(other.finds_room(), "{number}: the kernel forgets what this one does not use");
            enter(&other, number..number + 1);
        }
        greedy.forget_all();
        assert!(greedy.has_room());
        eventually("nobody pays for them", || memory.0.load(Ordering::Relaxed) == 0);
        drop(joined);
    }
}
