//! Leases of segments: whether a client may use the cached bytes it was given as a file's content.
//!
//! A node of the instance has at most one lease, which all clients share that read it without requests. It is revoked when the
//! node's content moves elsewhere (the union reports that), or may be changed by the kernel alone ([`crate::nodes`]).

use crate::sync::lock;
use poolfs_ipc::segment::{FileNotice, Leases, Life, Noted};
use poolfs_libservice::types::Errno;
use poolfs_libservice::{Holder, Lease, Share, Taken};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tracing::warn;

/// Leases of one instance.
pub const LEASES_PER_INSTANCE: usize = 1 << 10;

/// After so much was taken away it is judged whether clients keep it.
const TAKEN_BYTES_MIN: u64 = 8 << 20;

/// The notice of a lease, and what clients are given of it.
pub trait NoticePage: Send + Sync {
    /// The notice.
    fn notice(&self) -> &FileNotice;

    /// A read-only descriptor of it.
    ///
    /// # Errors
    /// Those of opening it.
    fn reader(&self) -> io::Result<OwnedFd>;
}

/// Makes a notice that says nothing.
pub type MakeNotice = Box<dyn Fn() -> io::Result<Box<dyn NoticePage>> + Send + Sync>;

/// The leases of one instance.
pub struct LeaseTable {
    words: Leases,
    file: Arc<OwnedFd>,
    make_notice: MakeNotice,
    free: Mutex<Vec<u32>>,
    /// In what all instances together have.
    share: OnceLock<Arc<Share>>,
    /// What was taken away of segments, and how much of that stayed in memory.
    taken: AtomicU64,
    stayed: AtomicU64,
    is_suspended: AtomicBool,
}

impl LeaseTable {
    /// A table over its words; `file` is what clients get of them.
    #[must_use]
    pub fn new(words: Leases, file: OwnedFd, make_notice: MakeNotice) -> Arc<Self> {
        let free = Mutex::new((0..words.count() as u32).rev().collect());
        let (file, share, taken, stayed, is_suspended) =
            (Arc::new(file), OnceLock::new(), AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Self { words, file, make_notice, free, share, taken, stayed, is_suspended })
    }

    /// Suspends it if its clients keep what was taken away; whether that is new.
    pub(crate) fn suspend_if_kept(&self) -> bool {
        let taken = self.taken.load(Ordering::Acquire);
        if taken < TAKEN_BYTES_MIN {
            return false;
        }
        self.taken.fetch_sub(taken, Ordering::AcqRel);
        let stayed = self.stayed.swap(0, Ordering::AcqRel);
        stayed > taken / 2 && !self.is_suspended.swap(true, Ordering::AcqRel)
    }

    /// Its clients may be given segments again.
    pub(crate) fn resume(&self) {
        self.is_suspended.store(false, Ordering::Release);
    }

    /// From now on its leases are counted with those of other instances; once.
    pub(crate) fn set_share(&self, share: &Arc<Share>) {
        let _ = self.share.set(Arc::clone(share));
    }

    /// How many it has, and what clients are given to read them.
    #[must_use]
    pub fn shared(&self) -> (u32, Arc<OwnedFd>) {
        (self.words.count() as u32, Arc::clone(&self.file))
    }

    /// Says that the service lives: without it no lease holds.
    ///
    /// # Errors
    /// Those of a robust mutex.
    pub fn live(&self) -> Result<Life<'_>, Errno> {
        self.words.live()
    }

    /// How many are in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.words.count().saturating_sub(self.free().len()) as u64
    }

    /// A new lease, if there is one.
    #[must_use]
    pub fn lease(self: &Arc<Self>) -> Option<Arc<SegmentLease>> {
        let room = match self.share.get() {
            Some(share) => Some(share.take(1)?),
            None => None,
        };
        let number = self.free().pop()?;
        let epoch = self.words.look(number as usize)?.epoch;
        let (notice, revoked) = (OnceLock::new(), AtomicBool::new(false));
        Some(Arc::new(SegmentLease { table: Arc::clone(self), number, epoch, notice, revoked, _room: room }))
    }

    fn free(&self) -> MutexGuard<'_, Vec<u32>> {
        lock(&self.free)
    }
}

impl Holder for LeaseTable {
    fn stayed(&self, taken: u64, stayed: u64) {
        self.stayed.fetch_add(stayed, Ordering::AcqRel);
        self.taken.fetch_add(taken, Ordering::AcqRel);
    }

    fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::Acquire)
    }
}

/// A lease.
pub struct SegmentLease {
    table: Arc<LeaseTable>,
    number: u32,
    epoch: u32,
    /// Made for the first who is given the lease.
    notice: OnceLock<Box<dyn NoticePage>>,
    revoked: AtomicBool,
    _room: Option<Taken>,
}

impl SegmentLease {
    /// Its place in the table.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What its word holds as long as it is not revoked.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// A descriptor of its file is being closed; to be called before the kernel is answered.
    pub fn count_closing(&self) {
        self.table.words.count_closing(self.number as usize);
    }

    /// A descriptor of its notice, for a client that has its file open for reading.
    ///
    /// # Errors
    /// `EOPNOTSUPP` when there is none to be had.
    pub fn notice_reader(&self) -> Result<OwnedFd, Errno> {
        let made = match self.notice.get() {
            Some(page) => page.reader(),
            None => (self.table.make_notice)().and_then(|page| self.notice.get_or_init(|| page).reader()),
        };
        made.map_err(|error| {
            warn!(%error, "a client looks at no attributes by itself, and reads no cache");
            Errno::EOPNOTSUPP
        })
    }

    /// Vouches for attributes of its file, where somebody may look. By one thread at a time.
    pub fn note(&self, noted: &Noted) {
        self.notice.get().into_iter().for_each(|page| page.notice().note(noted));
    }

    /// Vouches for them no more. By one thread at a time.
    pub fn forget_noted(&self) {
        self.notice.get().into_iter().for_each(|page| page.notice().forget());
    }

    /// Whether it is over.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

impl Lease for SegmentLease {
    fn revoke(&self) {
        if !self.revoked.swap(true, Ordering::AcqRel) {
            self.table.words.revoke(self.number as usize);
        }
    }

    fn holder(&self) -> Option<Arc<dyn Holder>> {
        Some(Arc::clone(&self.table) as Arc<dyn Holder>)
    }
}

impl Drop for SegmentLease {
    fn drop(&mut self) {
        self.revoke();
        self.table.free().push(self.number);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use poolfs_ipc::segment::{NOTICE_LENGTH, leases_length};
    use poolfs_ipc::wire::WireAttributes;

    struct TestPage(FileNotice, std::fs::File);

    impl NoticePage for TestPage {
        fn notice(&self) -> &FileNotice {
            &self.0
        }

        fn reader(&self) -> io::Result<OwnedFd> {
            Ok(self.1.try_clone()?.into())
        }
    }

    fn make_page() -> io::Result<Box<dyn NoticePage>> {
        let file = tempfile::tempfile()?;
        file.set_len(NOTICE_LENGTH as u64)?;
        let notice = FileNotice::new(&file, true).map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
        Ok(Box::new(TestPage(notice, file)))
    }

    /// A table of so many leases, and its words as clients see them.
    pub(crate) fn table(count: usize) -> (Arc<LeaseTable>, Leases) {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(leases_length(count) as u64).expect("sized");
        let words = Leases::new(&file, count, true).expect("leases");
        let seen = Leases::new(&file, count, false).expect("leases");
        (LeaseTable::new(words, file.into(), Box::new(make_page)), seen)
    }

    /// What clients see of a lease's notice.
    pub(crate) fn notice(lease: &SegmentLease) -> FileNotice {
        FileNotice::new(lease.notice_reader().expect("a descriptor"), false).expect("a notice")
    }

    #[test]
    fn files_read_without_requests_are_divided() {
        let shares = poolfs_libservice::Shares::new(8);
        let tables = [table(8).0, table(8).0];
        tables.iter().for_each(|table| table.set_share(&shares.join()));
        let all = |table: &Arc<LeaseTable>| std::iter::from_fn(|| table.lease()).collect::<Vec<_>>();
        let (first, second) = (all(&tables[0]), all(&tables[1]));
        assert_eq!((first.len(), second.len()), (6, 2));
        drop(first);
        assert_eq!(all(&tables[1]).len(), 4);
        assert_eq!(tables[0].used(), 0, "what is not given takes no place");
    }

    #[test]
    fn a_lease_that_is_over_does_not_come_back() {
        let (table, seen) = table(2);
        let (one, two) = (table.lease().expect("a lease"), table.lease().expect("another"));
        assert!(table.lease().is_none());
        assert_eq!(table.used(), 2);
        let number = one.number() as usize;
        let epoch = || seen.look(number).map(|word| word.epoch);
        assert_eq!(epoch(), Some(one.epoch()));
        one.revoke();
        assert!(one.is_revoked() && epoch() != Some(one.epoch()));
        let over = one.epoch();
        drop(one);
        let again = table.lease().expect("its place");
        assert_eq!((again.number() as usize, epoch()), (number, Some(again.epoch())));
        assert_ne!(again.epoch(), over);
        drop((two, again));
        assert_eq!(table.used(), 0);
    }

    #[test]
    fn whoever_keeps_what_was_taken_away_is_given_no_more() {
        let (table, _) = table(2);
        let holder = table.lease().expect("a lease").holder().expect("the table");
        holder.stayed(TAKEN_BYTES_MIN - 1, TAKEN_BYTES_MIN - 1);
        assert!(!table.suspend_if_kept(), "too little to tell");
        holder.stayed(1, 1);
        assert!(table.suspend_if_kept() && table.is_suspended() && !table.suspend_if_kept());
        table.resume();
        holder.stayed(TAKEN_BYTES_MIN, TAKEN_BYTES_MIN / 4);
        assert!(!table.suspend_if_kept() && !table.is_suspended());
    }

    #[test]
    fn a_lease_has_one_notice_for_all_and_no_other_lease_has_it() {
        let (table, _) = table(2);
        let (one, other) = (table.lease().expect("a lease"), table.lease().expect("another"));
        let noted = Noted { attributes: WireAttributes { inode: 7, ..WireAttributes::default() }, until_ns: 1 };
        // There is nobody who could look.
        one.note(&noted);
        let [first, second, others] = [&one, &one, &other].map(|lease| notice(lease));
        assert_eq!([&first, &second, &others].map(FileNotice::noted), [None; 3]);
        one.note(&noted);
        assert_eq!([&first, &second, &others].map(FileNotice::noted), [Some(noted), Some(noted), None]);
        one.forget_noted();
        assert_eq!(first.noted(), None);
    }
}
