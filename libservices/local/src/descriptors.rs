//! The descriptor cache: which descriptors stay open.
//!
//! A descriptor that can be opened again is kept in a [`Slot`], and closed when too many others were opened since its last use.
//! So however many files are open, and whoever opened them, they take at most a part of the process's descriptor table. If a
//! descriptor was closed, its next user opens it again by its node. A call in progress keeps the descriptors it uses.
//!
//! To close a descriptor may take as long as its filesystem likes: a FUSE server is asked first. So each directory's callers close those of their own
//! directory, and those of another directory a thread of that directory closes. What waits there while it is stuck is at most what was open of that
//! directory.
//!
//! Descriptors that cannot be opened again (see `nodes`) are kept for good. Each directory has a [`Share`] of those.

use poolfs_libservice::{Share, Shares};
use rustix::process::{Resource, getrlimit};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;

/// One part in so many of the process's table is for what can be opened again. A file that moves bytes directly takes two.
const REOPENABLE_PART: usize = 8;
const REOPENABLE_MIN: usize = 16;
const REOPENABLE_MAX: usize = 8192;

/// One part in so many is for what cannot.
const KEPT_PART: usize = 4;

/// Slots passed over for one that was used since it was last looked at.
const PASSED_OVER_MAX: usize = 64;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The descriptors of all directories that share it; usually one of a process.
pub struct Descriptors {
    reopenable_max: usize,
    /// Slots that were opened, the oldest first.
    opened: Mutex<VecDeque<OpenedSlot>>,
    kept: Arc<Shares>,
}

struct OpenedSlot {
    /// That of its directory.
    closer: Arc<Closer>,
    is_hot: Arc<AtomicBool>,
    slot: Weak<dyn Closable>,
}

impl fmt::Debug for Descriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Descriptors").field("reopenable_max", &self.reopenable_max).finish_non_exhaustive()
    }
}

impl Descriptors {
    /// With so many slots open at a time, and so many descriptors that are kept for good.
    #[must_use]
    pub fn new(reopenable_max: usize, kept_max: usize) -> Arc<Self> {
        let kept = Shares::new(kept_max as u64);
        Arc::new(Self { reopenable_max: reopenable_max.max(1), opened: Mutex::default(), kept })
    }

    /// With parts of what the process may have.
    #[must_use]
    pub fn of_process() -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20).min(1 << 20) as usize;
        Self::new((limit / REOPENABLE_PART).clamp(REOPENABLE_MIN, REOPENABLE_MAX), limit / KEPT_PART)
    }

    /// One more directory.
    pub(crate) fn join(self: &Arc<Self>) -> OwnDescriptors {
        OwnDescriptors { all: Arc::clone(self), closer: Arc::default(), kept: self.kept.join() }
    }
}

/// What closes slots of a directory for callers of others, who do not wait for that.
#[derive(Default)]
struct Closer {
    /// To its thread, which begins with the first slot, and ends with the directory.
    slots: Mutex<Option<Sender<Arc<dyn Closable>>>>,
}

impl Closer {
    fn close(&self, slot: Arc<dyn Closable>) {
        let mut sender = lock(&self.slots);
        if sender.is_none() {
            let (begun, slots) = channel::<Arc<dyn Closable>>();
            let thread = thread::Builder::new()
                .name("local-close".into())
                .spawn(move || slots.iter().for_each(|slot| slot.close()));
            *sender = thread.is_ok().then_some(begun);
        }
        match &*sender {
            Some(sender) => drop(sender.send(slot)),
            // Without a thread somebody has to.
            None => {
                drop(sender);
                slot.close();
            }
        }
    }
}

/// The descriptors of one directory among those of all.
pub(crate) struct OwnDescriptors {
    all: Arc<Descriptors>,
    closer: Arc<Closer>,
    /// Its part of those that are kept.
    pub kept: Arc<Share>,
}

impl fmt::Debug for OwnDescriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnDescriptors").field("all", &self.all).finish_non_exhaustive()
    }
}

impl OwnDescriptors {
    fn close(&self, (closer, slot): (Arc<Closer>, Arc<dyn Closable>)) {
        if Arc::ptr_eq(&closer, &self.closer) { slot.close() } else { closer.close(slot) }
    }

    /// Notes that a slot was opened, and closes others if there are too many.
    fn note(&self, slot: Weak<dyn Closable>, is_hot: Arc<AtomicBool>) {
        let mut surplus = Vec::new();
        let mut opened = lock(&self.all.opened);
        opened.push_back(OpenedSlot { closer: Arc::clone(&self.closer), is_hot, slot });
        let mut passed_over = 0;
        while opened.len() > self.all.reopenable_max {
            let Some(oldest) = opened.pop_front() else { break };
            // Nothing is held here of which this could be the last user: to let it go would close it.
            if passed_over < PASSED_OVER_MAX
                && oldest.slot.strong_count() > 0
                && oldest.is_hot.swap(false, Ordering::Relaxed)
            {
                passed_over += 1;
                opened.push_back(oldest);
            } else {
                surplus.extend(oldest.slot.upgrade().map(|slot| (oldest.closer, slot)));
            }
        }
        drop(opened);
        surplus.into_iter().for_each(|slot| self.close(slot));
    }

    /// Closes all that can be opened again.
    pub(crate) fn close_all(&self) {
        let opened = std::mem::take(&mut *lock(&self.all.opened));
        let open: Vec<_> =
            opened.into_iter().filter_map(|opened| Some((opened.closer, opened.slot.upgrade()?))).collect();
        open.into_iter().for_each(|slot| self.close(slot));
    }
}

/// Something that is open and can be opened again.
trait Closable: Send + Sync {
    /// Closes it, as soon as nobody uses it.
    fn close(&self);
}

/// The place of something that can be opened again.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    open: Mutex<Option<Arc<T>>>,
    /// Whether it was used since somebody looked for what to close.
    is_hot: Arc<AtomicBool>,
}

impl<T: Send + Sync + 'static> Slot<T> {
    /// An empty one.
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { open: Mutex::new(None), is_hot: Arc::default() })
    }

    /// What is open, or is opened by `open` now.
    pub(crate) fn get<E>(
        self: &Arc<Self>,
        descriptors: &OwnDescriptors,
        open: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        if let Some(open) = &*lock(&self.open) {
            self.is_hot.store(true, Ordering::Relaxed);
            return Ok(Arc::clone(open));
        }
        Ok(self.put(descriptors, Arc::new(open()?)))
    }

    /// Puts something open in, unless another one was faster; what then is there.
    pub(crate) fn put(self: &Arc<Self>, descriptors: &OwnDescriptors, opened: Arc<T>) -> Arc<T> {
        {
            let mut open = lock(&self.open);
            if let Some(open) = &*open {
                return Arc::clone(open);
            }
            *open = Some(Arc::clone(&opened));
        }
        let slot: Arc<dyn Closable> = self.clone();
        descriptors.note(Arc::downgrade(&slot), Arc::clone(&self.is_hot));
        opened
    }
}

impl<T> Slot<T> {
    /// Takes out what is open.
    pub(crate) fn take(&self) -> Option<Arc<T>> {
        lock(&self.open).take()
    }

    /// Takes out what is open, if it is `this`.
    pub(crate) fn take_this(&self, this: &Weak<T>) -> Option<Arc<T>> {
        lock(&self.open).take_if(|open| std::ptr::eq(Arc::as_ptr(open), this.as_ptr()))
    }
}

impl<T: Send + Sync> Closable for Slot<T> {
    fn close(&self) {
        drop(self.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn opened(slot: &Arc<Slot<u32>>, descriptors: &OwnDescriptors) -> bool {
        let mut opened = false;
        let got: Result<_, Infallible> = slot.get(descriptors, || {
            opened = true;
            Ok(7)
        });
        assert_eq!(got.map(|open| *open), Ok(7));
        opened
    }

    #[test]
    fn what_was_not_used_for_longest_is_closed_first() {
        let descriptors = Descriptors::new(3, 0).join();
        let slots: [_; 5] = std::array::from_fn(|_| Slot::new());
        let is_open = |at: usize| lock(&slots[at].open).is_some();
        (0..3).for_each(|at| assert!(opened(&slots[at], &descriptors)));
        assert!(!opened(&slots[0], &descriptors), "it is open");
        assert!(opened(&slots[3], &descriptors));
        assert!(is_open(0) && !is_open(1) && is_open(2) && is_open(3));
        assert!(opened(&slots[4], &descriptors) && opened(&slots[1], &descriptors));
        assert_eq!((0..5).filter(|&at| is_open(at)).count(), 3);
        descriptors.close_all();
        assert!(!(0..5).any(is_open));
    }

    #[test]
    fn a_use_outlives_the_closing_and_what_is_gone_takes_no_place() {
        let descriptors = Descriptors::new(1, 0).join();
        let slot = Slot::new();
        let used: Result<_, Infallible> = slot.get(&descriptors, || Ok(vec![1]));
        for _ in 0..10 {
            assert!(opened(&Slot::new(), &descriptors));
        }
        assert!(slot.take().is_none());
        assert_eq!(used.map(|used| used[0]), Ok(1));
        assert_eq!(lock(&descriptors.all.opened).len(), 1);
    }

    #[test]
    fn one_thing_is_taken_out_and_no_other() {
        let descriptors = Descriptors::new(3, 0).join();
        let (slot, first) = (Slot::new(), Arc::new(7));
        slot.put(&descriptors, Arc::clone(&first));
        assert!(slot.take_this(&Arc::downgrade(&Arc::new(7))).is_none());
        assert_eq!(slot.take_this(&Arc::downgrade(&first)).as_deref(), Some(&7));
        assert!(slot.take_this(&Arc::downgrade(&first)).is_none());
        assert!(opened(&slot, &descriptors), "it is empty");
        assert!(slot.take_this(&Arc::downgrade(&first)).is_none(), "another one is in it");
    }

    #[test]
    fn however_much_is_used_there_are_never_too_many() {
        let descriptors = Descriptors::new(100, 0).join();
        let slots: Vec<_> = (0..300).map(|_| Slot::new()).collect();
        for slot in &slots {
            opened(slot, &descriptors);
            slots.iter().for_each(|slot| slot.is_hot.store(true, Ordering::Relaxed));
            assert!(slots.iter().filter(|slot| lock(&slot.open).is_some()).count() <= 100);
        }
    }

    /// A descriptor whose filesystem does not let it be closed.
    struct Stuck(Mutex<std::sync::mpsc::Receiver<()>>);

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = lock(&self.0).recv();
        }
    }

    #[test]
    fn a_directory_in_which_closing_hangs_keeps_no_other_waiting() {
        let all = Descriptors::new(4, 0);
        let (hanging, healthy) = (all.join(), all.join());
        let (resume, stuck) = channel();
        let first = Slot::new();
        let got: Result<_, Infallible> = first.get(&hanging, || Ok(Stuck(Mutex::new(stuck))));
        drop(got);
        let others: [_; 3] = std::array::from_fn(|_| Slot::new());
        others.iter().for_each(|slot| assert!(opened(slot, &hanging)));
        // All of the hanging one's are closed in time, by nobody who waits here.
        let slots: Vec<_> = (0..20).map(|_| Slot::new()).collect();
        slots.iter().for_each(|slot| assert!(opened(slot, &healthy)));
        assert_eq!(slots.iter().filter(|slot| lock(&slot.open).is_some()).count(), 4, "its own are closed by itself");
        healthy.close_all();
        assert!(slots.iter().all(|slot| lock(&slot.open).is_none()));
        assert!(lock(&others[2].open).is_some(), "it waits behind the one that hangs");
        // A third one's are closed all the same, though its oldest are always the other healthy one's to close.
        let third = all.join();
        let more: Vec<_> = (0..20).map(|_| Slot::new()).collect();
        for (one, other) in more.iter().zip(&slots) {
            assert!(opened(one, &third) && opened(other, &healthy));
        }
        let is_open = |slots: &[Arc<Slot<u32>>]| slots.iter().filter(|slot| lock(&slot.open).is_some()).count();
        let begun = std::time::Instant::now();
        while is_open(&more) + is_open(&slots) > 4 {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "they wait behind the one that hangs");
            thread::yield_now();
        }
        drop(resume);
        let begun = std::time::Instant::now();
        while others.iter().any(|slot| lock(&slot.open).is_some()) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(60), "they are closed when it goes on");
            thread::yield_now();
        }
    }
}
