//! The part of a descriptor entry for posted writes: the grant, whether the number is verified for it, and the end of a file that is
//! appended to.
//!
//! As long as a grant holds, nobody has closed a descriptor of its description, and nobody has opened the file a second time. So when a
//! number is found to stand for the file, and the grant held before and after, it stands for the granted description. A number that was
//! given another description without the library's knowledge is detected by its inode and flags, which are read with each post.
//!
//! A grant stays recorded until none of its posts is outstanding: what is read without a request may be older than they are. A seal over
//! grant and handle proves that both belong to one adoption. A writer that was stopped between the two leaves a grant by which nothing is
//! posted.

use super::{ADOPTED, Adopted, DUPLICATED, Descriptors, Entry, KIND, Seen};
use crate::process;
use core::sync::atomic::{AtomicU64, Ordering};
use poolfs_ipc::posts::PostGrant;

/// All zeros: no grant, and an end that is not known.
#[repr(C)]
pub(super) struct Posts {
    /// 0: none.
    grant: AtomicU64,
    seal: AtomicU64,
    end: AtomicU64,
    /// Something was appended that the kernel does not know of.
    untold: AtomicU64,
}

/// Bit of a seal: the number was found to stand for the grant's description.
const VERIFIED: u64 = 1;

/// Bits of an end's word for the end, plus one.
const END_BITS: u32 = 44;
const END_MASK: u64 = (1 << END_BITS) - 1;

/// The end of a file that this process appends to, as a word: in the lower bits the end plus one, or 0 when it is not known; the upper
/// ones count the changes that were begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End(u64);

/// A change of a file's end, between its beginning and its end.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct EndChange {
    begun: End,
    /// Where the file ended before, if that was known.
    pub before: Option<u64>,
}

impl End {
    fn known(self) -> Option<u64> {
        (self.0 & END_MASK).checked_sub(1)
    }

    /// One more change is begun: it is not known.
    fn next(self) -> Self {
        Self(((self.0 >> END_BITS) + 1) << END_BITS)
    }

    /// The same number of changes, and the file ends there; not known when there is no room for it.
    fn at(self, end: Option<u64>) -> Self {
        Self(self.0 & !END_MASK | end.filter(|&end| end < END_MASK).map_or(0, |end| end + 1))
    }
}

impl Posts {
    /// Forgets the grant. First of what is stored for a new adoption, after the witness.
    pub(super) fn reset(&self) {
        self.grant.store(0, Ordering::Release);
    }

    /// Whether there is a grant.
    #[inline]
    pub(super) fn are_granted(&self) -> bool {
        self.grant.load(Ordering::Acquire) != 0
    }

    fn grant(&self) -> Option<PostGrant> {
        PostGrant::from_bits(self.grant.load(Ordering::Acquire))
    }

    /// The end is not known from here on. Last of what is stored for a new adoption.
    pub(super) fn forget_end(&self) {
        while self.change_end(|| true).is_err() {}
    }

    /// Begins a change, if `may` says so after the end was looked at. An error when another one came in between.
    fn change_end(&self, may: impl FnOnce() -> bool) -> Result<Option<EndChange>, ()> {
        let now = End(self.end.load(Ordering::Acquire));
        if !may() {
            return Ok(None);
        }
        let begun = now.next();
        let changed = self.end.compare_exchange(now.0, begun.0, Ordering::AcqRel, Ordering::Relaxed);
        changed.map(|_| Some(EndChange { begun, before: now.known() })).map_err(|_| ())
    }
}

/// A seal without [`VERIFIED`], never 0.
fn seal(grant: u64, adopted: &Adopted) -> u64 {
    let fields = [grant, adopted.handle, adopted.generation, adopted.instance.into()];
    // FNV-1a, a word at a time.
    let sum =
        fields.iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, field| (sum ^ field).wrapping_mul(0x0000_0100_0000_01b3));
    sum << 2 | 2
}

impl Descriptors {
    /// The grant that is noted with a number, whatever it stands for: its posts may be on the way.
    #[inline]
    pub fn noted_grant(&self, descriptor: i32) -> Option<PostGrant> {
        let entry = self.entry(descriptor)?;
        // A number nobody has asked about costs no page of its own, and other numbers have none.
        if entry.word.load(Ordering::Acquire) & KIND == ADOPTED { entry.posts.grant() } else { None }
    }

    /// The grant for what a number was adopted as, and whether the number was found to stand for it.
    pub fn grant(&self, descriptor: i32, adopted: &Adopted) -> Option<(PostGrant, bool)> {
        let posts = &self.entry(descriptor)?.posts;
        let grant = posts.grant()?;
        let found = posts.seal.load(Ordering::Acquire);
        (found & !VERIFIED == seal(grant.bits(), adopted)).then_some((grant, found & VERIFIED != 0))
    }

    /// Notes a grant for what a number was adopted as.
    pub fn granted(&self, descriptor: i32, adopted: &Adopted, grant: PostGrant) {
        let Some(entry) = self.entry(descriptor) else { return };
        let Posts { grant: noted, seal: sealed, .. } = &entry.posts;
        // In this order: an adoption that comes in between takes the grant away before it stores its handle.
        let before = noted.load(Ordering::Acquire);
        let bits = grant.bits();
        if entry.handle.load(Ordering::Acquire) != adopted.handle {
            return;
        }
        let is_noted = before == bits && sealed.load(Ordering::Acquire) & !VERIFIED == seal(bits, adopted);
        if !is_noted && noted.compare_exchange(before, bits, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            sealed.store(seal(bits, adopted), Ordering::Release);
        }
    }

    /// Notes that a number was found to stand for what it was adopted as, while the grant held.
    pub fn grant_verified(&self, descriptor: i32, adopted: &Adopted, grant: PostGrant) {
        let Some(entry) = self.entry(descriptor) else { return };
        let unverified = seal(grant.bits(), adopted);
        let sealed = &entry.posts.seal;
        sealed.compare_exchange(unverified, unverified | VERIFIED, Ordering::AcqRel, Ordering::Relaxed).ok();
    }

    /// Forgets a grant that no longer holds, of which no post is on the way.
    pub fn grant_over(&self, descriptor: i32, grant: PostGrant) {
        if let Some(entry) = self.entry(descriptor) {
            entry.posts.grant.compare_exchange(grant.bits(), 0, Ordering::AcqRel, Ordering::Relaxed).ok();
        }
    }

    /// By this number nothing is posted any more: what is known of its description is about to change.
    pub fn unpostable(&self, descriptor: i32) {
        if let Some(entry) = self.entry(descriptor) {
            entry.word.fetch_or(DUPLICATED, Ordering::SeqCst);
        }
    }

    /// Whether a number still says what it did, and its description is nobody else's.
    pub fn is_unchanged(&self, descriptor: i32, seen: &Seen) -> bool {
        let word = |entry: &Entry| entry.word.load(Ordering::SeqCst);
        self.entry(descriptor).map(word) == Some(seen.word) && process::forks() == seen.forks
    }

    /// Notes that the kernel does not know how long the file has become.
    pub fn appended(&self, descriptor: i32) {
        if let Some(entry) = self.entry(descriptor) {
            entry.posts.untold.store(1, Ordering::Relaxed);
        }
    }

    /// Whether it did not until now: the caller has it told.
    pub fn is_untold(&self, descriptor: i32) -> bool {
        let untold = self.entry(descriptor).map(|entry| &entry.posts.untold);
        untold.is_some_and(|untold| untold.load(Ordering::Relaxed) != 0 && untold.swap(0, Ordering::Relaxed) != 0)
    }

    /// Whether it is known where the file ends that a number was adopted as.
    pub fn knows_end(&self, descriptor: i32) -> bool {
        self.entry(descriptor).is_some_and(|entry| End(entry.posts.end.load(Ordering::Acquire)).known().is_some())
    }

    /// Begins a change of the end of the file that a number was adopted as: until [`Descriptors::end_changed`] it is not known.
    pub fn end_changes(&self, descriptor: i32, adopted: &Adopted) -> Option<EndChange> {
        let entry = self.entry(descriptor)?;
        // An adoption that comes in between stores its handle before it begins a change.
        let is_it = || entry.handle.load(Ordering::Acquire) == adopted.handle;
        loop {
            if let Ok(change) = entry.posts.change_end(is_it) {
                return change;
            }
        }
    }

    /// The file ends there after a change, which is believed when no other one was begun meanwhile: else the end is not known, as either
    /// of them may have come first.
    pub fn end_changed(&self, descriptor: i32, change: EndChange, end: Option<u64>) -> bool {
        let Some(Entry { posts, .. }) = self.entry(descriptor) else { return false };
        let (begun, now) = (change.begun, change.begun.at(end));
        let is_believed = posts.end.compare_exchange(begun.0, now.0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !is_believed {
            posts.forget_end();
        }
        is_believed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptors::Known;
    use std::boxed::Box;

    const FILE: Adopted = Adopted {
        handle: 7,
        generation: 1,
        inode: 42,
        mount: 3,
        flags: 2,
        instance: 0,
        mode: 0o100_644,
        announces_closing: true,
    };

    fn grant(slot: u32, epoch: u32) -> PostGrant {
        PostGrant::new(slot, epoch).expect("a grant")
    }

    /// With the file at number 5.
    fn table() -> Box<Descriptors> {
        // SAFETY: atomics of zeros.
        let table: Box<Descriptors> = unsafe { Box::new_zeroed().assume_init() };
        adopt(&table, FILE);
        table
    }

    fn adopt(table: &Descriptors, file: Adopted) {
        table.opened(5, process::forks());
        table.note(5, &table.look(5).expect("an entry"), Known::Adopted(file));
    }

    #[test]
    fn a_grant_is_of_one_adoption_and_verified_by_itself() {
        let table = table();
        assert_eq!((table.grant(5, &FILE), table.grant(-1, &FILE)), (None, None));
        table.granted(5, &FILE, grant(2, 9));
        assert_eq!(table.grant(5, &FILE), Some((grant(2, 9), false)));
        table.grant_verified(5, &FILE, grant(2, 8));
        assert_eq!(table.grant(5, &FILE), Some((grant(2, 9), false)), "another grant was");
        table.grant_verified(5, &FILE, grant(2, 9));
        table.granted(5, &FILE, grant(2, 9));
        assert_eq!(table.grant(5, &FILE), Some((grant(2, 9), true)), "it was told again");
        table.granted(5, &FILE, grant(3, 1));
        assert_eq!(table.grant(5, &FILE), Some((grant(3, 1), false)));
        table.grant_over(5, grant(2, 9));
        assert_eq!(table.noted_grant(5), Some(grant(3, 1)));
        table.grant_over(5, grant(3, 1));
        assert_eq!((table.grant(5, &FILE), table.noted_grant(5)), (None, None));
    }

    #[test]
    fn a_grant_is_forgotten_with_the_number() {
        let table = table();
        let all =
            [FILE, Adopted { handle: 8, ..FILE }, Adopted { generation: 2, ..FILE }, Adopted { instance: 1, ..FILE }];
        for (file, other) in all.iter().zip(all.iter().cycle().skip(1)) {
            adopt(&table, *file);
            table.granted(5, file, grant(0, 1));
            table.grant_verified(5, file, grant(0, 1));
            assert_eq!(table.grant(5, file), Some((grant(0, 1), true)));
            assert_eq!(table.grant(5, other), None);
        }
        table.clear(5);
        assert_eq!(table.noted_grant(5), None);
        adopt(&table, FILE);
        assert_eq!((table.noted_grant(5), table.grant(5, &FILE)), (None, None));
        // Whoever learned it of what the number was before is late.
        table.granted(5, &Adopted { handle: 6, ..FILE }, grant(0, 1));
        assert_eq!(table.noted_grant(5), None);
    }

    #[test]
    fn what_may_be_on_the_way_is_not_looked_at_by_who_holds_nothing() {
        let table = table();
        table.verified(5, crate::descriptors::Witness { segment: 1, closings: 0 });
        assert!(table.found(5).is_some());
        table.granted(5, &FILE, grant(0, 1));
        assert!(table.found(5).is_none());
        table.grant_over(5, grant(0, 1));
        assert!(table.found(5).is_some());
    }

    #[test]
    fn whoever_comes_to_share_a_description_is_noticed() {
        let table = table();
        let look = || table.look(5).expect("an entry");
        let changes: [fn(&Descriptors); 4] = [
            |table| table.unpostable(5),
            |table| table.duplicated(5, 6),
            |table| table.mapped(5),
            |table| table.clear(5),
        ];
        for change in changes {
            adopt(&table, FILE);
            let seen = look();
            assert!(table.is_unchanged(5, &seen) && !seen.is_duplicated());
            change(&table);
            assert!(!table.is_unchanged(5, &seen));
        }
    }

    #[test]
    fn the_end_is_known_when_no_change_came_in_between() {
        let table = table();
        let begin = || table.end_changes(5, &FILE).expect("the file's entry");
        let change = begin();
        assert_eq!((change.before, table.knows_end(5)), (None, false));
        assert!(table.end_changed(5, change, Some(100)) && table.knows_end(5));
        let change = begin();
        assert!(change.before == Some(100) && !table.knows_end(5), "a call that is left now leaves it unknown");
        assert!(table.end_changed(5, change, Some(110)));
        let (first, second) = (begin(), begin());
        assert_eq!((first.before, second.before), (Some(110), None));
        assert!(table.end_changed(5, second, Some(120)), "the first one may not have come yet");
        assert!(!table.end_changed(5, first, Some(130)) && !table.knows_end(5));
        let (first, second) = (begin(), begin());
        assert!(!table.end_changed(5, first, Some(1)) && !table.end_changed(5, second, Some(2)));
        assert!(!table.knows_end(5));
        let change = begin();
        assert!(table.end_changed(5, change, Some(u64::MAX)) && !table.knows_end(5), "too far away");
        assert!(table.end_changes(5, &Adopted { handle: 6, ..FILE }).is_none());
        let change = begin();
        adopt(&table, FILE);
        assert!(!table.end_changed(5, change, Some(1)) && !table.knows_end(5), "the number has got a new meaning");
    }

    #[test]
    fn changes_are_counted_in_a_circle() {
        let posts = Posts {
            grant: AtomicU64::new(0),
            seal: AtomicU64::new(0),
            end: AtomicU64::new(!END_MASK | 8),
            untold: AtomicU64::new(0),
        };
        assert_eq!(End(!END_MASK | 8).known(), Some(7));
        posts.forget_end();
        assert_eq!(posts.end.load(Ordering::Relaxed), 0);
    }
}
