//! The descriptor table: what the library knows of each descriptor number.
//!
//! A number is unknown, not ours, a candidate for adoption, refused by the service, or adopted as a file of an instance. libc opens and
//! closes descriptors without the library's knowledge, so an entry records what a number once stood for. It is no proof: a user of an entry
//! first verifies that the number still is that file ([`crate::files`]), or that no descriptor of the file was closed since the last
//! verification ([`Witness`]).
//!
//! Entries are read and written without locks. The state word carries a version, which every change raises. The fields are valid only when
//! the word is the same before and after reading them and their checksum is right: a writer that was stopped between two fields may resume
//! after others have written theirs. A writer that is interrupted by a signal leaves the entry `BUSY`, which sends others to the kernel.
//! Whoever clears the entry meanwhile wins.

mod posts;

pub use posts::EndChange;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use posts::Posts;

/// Descriptor numbers from here on are left to the kernel.
pub const DESCRIPTORS_MAX: usize = 1 << 16;

const KIND: u64 = 7;
const UNKNOWN: u64 = 0;
const NOT_OURS: u64 = 1;
const BUSY: u64 = 2;
const ADOPTED: u64 = 3;
const CANDIDATE: u64 = 4;
const REFUSED: u64 = 5;
/// The description was made by an `open` of this process that we saw.
const OWN: u64 = 8;
const USES_SHIFT: u32 = 4;
const USES_MASK: u64 = 0x3f;
/// Something was mapped by the number, which goes by the size that the kernel knows.
const MAPPED: u64 = 1 << 10;
/// Another number stands for the same description, or did.
const DUPLICATED: u64 = 1 << 11;
/// What is known of a description, whatever the rest says.
const FLAGS: u64 = OWN | MAPPED | DUPLICATED;
const VERSION: u64 = 1 << 12;

/// A file that an adopted descriptor stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The handle in the session.
    pub handle: u64,
    /// The session's generation, without which the handle means nothing.
    pub generation: u64,
    /// `st_ino`
    pub inode: u64,
    /// `stx_mnt_id`
    pub mount: u64,
    /// `O_*`
    pub flags: u32,
    /// The instance's slot.
    pub instance: u32,
    /// `st_mode` at adoption: the type does not change.
    pub mode: u32,
    /// The service hears of every descriptor of the description that is closed, before that is done.
    pub announces_closing: bool,
}

/// What tells that no descriptor of a file was closed between two moments: the same witness at both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    /// The number of the segment's arrival, never 0.
    pub segment: u32,
    /// Closings counted.
    pub closings: u32,
}

/// What a number was found to stand for. Only whoever finds the segment of the witness for the handle in the session may take it for
/// one file's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The instance's slot.
    pub instance: u32,
    /// The handle in the session.
    pub handle: u64,
    /// What was there when it was found.
    pub witness: Witness,
}

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// nothing
    Unknown,
    /// to be left to the kernel
    NotOurs,
    /// of an instance, not adopted yet, used that often
    Candidate(u32),
    /// of an instance; the service did not give a handle
    Refused,
    /// adopted
    Adopted(Adopted),
}

/// What an entry said at one moment, and what is needed to change it only if it still says so.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// What it said.
    pub known: Known,
    word: u64,
    forks: u32,
}

#[repr(C)]
struct Entry {
    word: AtomicU64,
    handle: AtomicU64,
    generation: AtomicU64,
    inode: AtomicU64,
    mount: AtomicU64,
    flags: AtomicU32,
    instance: AtomicU32,
    mode: AtomicU32,
    forks: AtomicU32,
    looks: AtomicU32,
    announces_closing: AtomicU32,
    sum: AtomicU64,
    /// The witness of the last time when the number was found to stand for the file; 0: none.
    verified: AtomicU64,
    posts: Posts,
}

/// The table, by number.
#[repr(transparent)]
pub struct Descriptors([Entry; DESCRIPTORS_MAX]);

impl Descriptors {
    fn entry(&self, descriptor: i32) -> Option<&Entry> {
        usize::try_from(descriptor).ok().and_then(|number| self.0.get(number))
    }

    /// Whether the number is known not to be ours, which is never wrong in a harmful way: the kernel serves it.
    #[inline]
    pub fn is_foreign(&self, descriptor: i32) -> bool {
        self.entry(descriptor).is_none_or(|entry| entry.word.load(Ordering::Relaxed) & KIND == NOT_OURS)
    }

    /// What is known of a number; nothing while somebody changes it.
    pub fn look(&self, descriptor: i32) -> Option<Seen> {
        let entry = self.entry(descriptor)?;
        let word = entry.word.load(Ordering::Acquire);
        let known = match word & KIND {
            UNKNOWN => Known::Unknown,
            NOT_OURS => Known::NotOurs,
            CANDIDATE => Known::Candidate((word >> USES_SHIFT & USES_MASK) as u32),
            REFUSED => Known::Refused,
            ADOPTED => Known::Adopted(entry.load(word)?),
            _ => return None,
        };
        let forks = entry.forks.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        (entry.word.load(Ordering::Relaxed) == word).then_some(Seen { known, word, forks })
    }

    /// Notes that a number was found to stand for what its entry says, after `witness` was there.
    pub fn verified(&self, descriptor: i32, witness: Witness) {
        if let Some(entry) = self.entry(descriptor) {
            let witness = witness.bits();
            if entry.verified.load(Ordering::Relaxed) != witness {
                entry.verified.store(witness, Ordering::Relaxed);
            }
        }
    }

    /// Whether a number was ever found to stand for what its entry says, with a witness.
    #[inline]
    pub fn was_verified(&self, descriptor: i32) -> bool {
        self.entry(descriptor).is_some_and(|entry| entry.verified.load(Ordering::Relaxed) != 0)
    }

    /// Whether a number was found to stand for what its entry says at a time with the same witness.
    #[inline]
    pub fn is_verified(&self, descriptor: i32, witness: Witness) -> bool {
        self.entry(descriptor).is_some_and(|entry| entry.verified.load(Ordering::Relaxed) == witness.bits())
    }

    /// What a number was last found to stand for with a witness; nothing where posts may be on the way.
    #[inline]
    pub fn found(&self, descriptor: i32) -> Option<Found> {
        let entry = self.entry(descriptor)?;
        let word = entry.word.load(Ordering::Acquire);
        // In this order: what is stored for another adoption takes the witness away before the grant.
        if word & KIND != ADOPTED || entry.posts.are_granted() {
            return None;
        }
        let verified = entry.verified.load(Ordering::Relaxed);
        if verified == 0 {
            return None;
        }
        let witness = Witness { segment: (verified >> 32) as u32, closings: verified as u32 };
        let (instance, handle) = (entry.instance.load(Ordering::Relaxed), entry.handle.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (entry.word.load(Ordering::Relaxed) == word).then_some(Found { instance, handle, witness })
    }

    /// Counts a read or a look at attributes that took a request or the kernel; how many there were since the count was begun.
    pub fn count_look(&self, descriptor: i32) -> u32 {
        self.entry(descriptor).map_or(0, |entry| entry.looks.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }

    /// Begins the count anew.
    pub fn recount_looks(&self, descriptor: i32) {
        if let Some(entry) = self.entry(descriptor) {
            entry.looks.store(0, Ordering::Relaxed);
        }
    }

    /// Forgets a number: at close, and before it is given a new meaning.
    pub fn clear(&self, descriptor: i32) {
        if let Some(entry) = self.entry(descriptor) {
            // A number nobody has asked about costs no page of its own.
            if entry.word.load(Ordering::Relaxed) & (KIND | OWN) != 0 {
                entry.looks.store(0, Ordering::Relaxed);
                let mut word = entry.word.load(Ordering::Relaxed);
                while let Err(now) = entry.word.compare_exchange_weak(
                    word,
                    next_version(word) | UNKNOWN,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                ) {
                    word = now;
                }
            }
        }
    }

    /// Forgets all numbers from `first` to `last`.
    pub fn clear_range(&self, first: u32, last: u32) {
        for descriptor in first as usize..=(last as usize).min(DESCRIPTORS_MAX - 1) {
            self.clear(descriptor as i32);
        }
    }

    /// Notes that this process has just opened the description a number stands for.
    pub fn opened(&self, descriptor: i32, forks: u32) {
        if let Some(entry) = self.entry(descriptor) {
            self.clear(descriptor);
            let word = entry.word.load(Ordering::Relaxed);
            entry.forks.store(forks, Ordering::Relaxed);
            // Whoever changes it at the same time has seen what the number stood for before.
            entry.word.store(next_version(word) | OWN, Ordering::Release);
        }
    }

    /// The numbers of descriptions that this process has opened.
    pub fn unshared(&self) -> impl Iterator<Item = i32> + '_ {
        let is_own = |entry: &Entry| {
            let word = entry.word.load(Ordering::Relaxed);
            word & OWN != 0 && word & KIND != NOT_OURS
        };
        self.0.iter().enumerate().filter(move |(_, entry)| is_own(entry)).map(|(number, _)| number as i32)
    }

    /// Notes that something is about to be mapped by a number.
    pub fn mapped(&self, descriptor: i32) {
        if let Some(entry) = self.entry(descriptor) {
            entry.word.fetch_or(MAPPED, Ordering::SeqCst);
        }
    }

    /// Notes that `to` now stands for the same description as `from`.
    pub fn duplicated(&self, from: i32, to: i32) {
        self.clear(to);
        let Some(entry) = self.entry(from) else { return };
        let flags = entry.word.fetch_or(DUPLICATED, Ordering::SeqCst) & FLAGS;
        if flags & OWN != 0 {
            self.opened(to, entry.forks.load(Ordering::Relaxed));
            if let Some(other) = self.entry(to) {
                other.word.fetch_or(flags | DUPLICATED, Ordering::AcqRel);
            }
        }
    }

    /// Notes what a number turned out to be, unless something happened to it since it was looked at.
    pub fn note(&self, descriptor: i32, seen: &Seen, known: Known) {
        let Some(entry) = self.entry(descriptor) else { return };
        let flags = seen.word & FLAGS;
        let busy = next_version(seen.word) | flags | BUSY;
        if entry.word.compare_exchange(seen.word, busy, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let kind = match known {
            Known::Unknown => UNKNOWN,
            Known::NotOurs => NOT_OURS,
            Known::Candidate(uses) => CANDIDATE | u64::from(uses).min(USES_MASK) << USES_SHIFT,
            Known::Refused => REFUSED,
            Known::Adopted(_) => ADOPTED,
        };
        let done = next_version(busy) | kind;
        if let Known::Adopted(adopted) = known {
            entry.store(&adopted, done);
        }
        let end = |now: u64| (now & !FLAGS == busy & !FLAGS).then_some(done | now & FLAGS);
        entry.word.fetch_update(Ordering::Release, Ordering::Relaxed, end).ok();
    }
}

impl Seen {
    /// Whether the kernel's offset of the description is this process's alone: it opened it and has not shared it since.
    pub fn is_own(&self, forks: u32) -> bool {
        self.word & OWN != 0 && self.forks == forks
    }

    /// Whether nobody but this process has the description, and nothing was mapped by it.
    pub fn is_unshared(&self, forks: u32) -> bool {
        self.is_own(forks) && self.word & MAPPED == 0
    }

    /// Whether other numbers may stand for the same description.
    pub fn is_duplicated(&self) -> bool {
        self.word & DUPLICATED != 0
    }
}

impl Adopted {
    /// A sum over all of it, and the version of the entry that holds it.
    #[inline]
    fn sum(&self, word: u64) -> u64 {
        let bits = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let fields = [
            self.handle,
            self.generation,
            self.inode,
            self.mount,
            bits(self.flags, self.instance),
            bits(self.mode, self.announces_closing.into()),
        ];
        // FNV-1a, a word at a time.
        fields.iter().fold(word / VERSION, |sum, field| (sum ^ field).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

impl Witness {
    fn bits(self) -> u64 {
        u64::from(self.segment) << 32 | u64::from(self.closings)
    }
}

impl Entry {
    /// What is stored under a word, if it is all of one adoption.
    #[inline]
    fn load(&self, word: u64) -> Option<Adopted> {
        let adopted = Adopted {
            handle: self.handle.load(Ordering::Relaxed),
            generation: self.generation.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
            mount: self.mount.load(Ordering::Relaxed),
            flags: self.flags.load(Ordering::Relaxed),
            instance: self.instance.load(Ordering::Relaxed),
            mode: self.mode.load(Ordering::Relaxed),
            announces_closing: self.announces_closing.load(Ordering::Relaxed) != 0,
        };
        (self.sum.load(Ordering::Relaxed) == adopted.sum(word)).then_some(adopted)
    }

    fn store(&self, adopted: &Adopted, word: u64) {
        // The BUSY word was stored before; its release fence keeps these after it.
        fence(Ordering::Release);
        self.verified.store(0, Ordering::Relaxed);
        self.posts.reset();
        self.handle.store(adopted.handle, Ordering::Relaxed);
        self.generation.store(adopted.generation, Ordering::Relaxed);
        self.inode.store(adopted.inode, Ordering::Relaxed);
        self.mount.store(adopted.mount, Ordering::Relaxed);
        self.flags.store(adopted.flags, Ordering::Relaxed);
        self.instance.store(adopted.instance, Ordering::Relaxed);
        self.mode.store(adopted.mode, Ordering::Relaxed);
        self.announces_closing.store(adopted.announces_closing.into(), Ordering::Relaxed);
        self.sum.store(adopted.sum(word), Ordering::Relaxed);
        self.looks.store(0, Ordering::Relaxed);
        self.posts.forget_end();
    }
}

/// The next version, with no kind and no flags.
fn next_version(word: u64) -> u64 {
    (word & !(VERSION - 1)).wrapping_add(VERSION)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    fn table() -> Box<Descriptors> {
        // SAFETY: atomics of zeros.
        unsafe { Box::new_zeroed().assume_init() }
    }

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

    #[test]
    fn what_is_noted_is_seen_until_it_is_cleared() {
        let table = table();
        let seen = table.look(5).expect("an entry");
        assert_eq!(seen.known, Known::Unknown);
        table.note(5, &seen, Known::Adopted(FILE));
        assert_eq!(table.look(5).map(|seen| seen.known), Some(Known::Adopted(FILE)));
        table.clear(5);
        assert_eq!(table.look(5).map(|seen| seen.known), Some(Known::Unknown));
    }

    #[test]
    fn a_note_about_a_number_closed_meanwhile_is_dropped() {
        let table = table();
        let seen = table.look(5).expect("an entry");
        table.note(5, &seen, Known::Candidate(1));
        let seen = table.look(5).expect("an entry");
        table.clear(5);
        table.note(5, &seen, Known::Adopted(FILE));
        assert_eq!(table.look(5).map(|seen| seen.known), Some(Known::Unknown));
    }

    #[test]
    fn an_adoption_mixed_with_an_older_one_is_none() {
        let table = table();
        let seen = table.look(5).expect("an entry");
        table.note(5, &seen, Known::Adopted(FILE));
        let entry = table.entry(5).expect("an entry");
        let word = entry.word.load(Ordering::Relaxed);
        // A writer that was stopped as it noted an earlier meaning of the number goes on now.
        entry.handle.store(6, Ordering::Relaxed);
        assert!(table.look(5).is_none());
        entry.store(&Adopted { handle: 6, ..FILE }, word - VERSION);
        assert!(table.look(5).is_none());
        entry.store(&FILE, word);
        assert_eq!(table.look(5).map(|seen| seen.known), Some(Known::Adopted(FILE)));
    }

    #[test]
    fn what_was_verified_holds_for_one_witness_and_one_adoption() {
        let table = table();
        let seen = table.look(5).expect("an entry");
        let witness = Witness { segment: 1, closings: 0 };
        assert!(!table.is_verified(5, witness));
        table.note(5, &seen, Known::Adopted(FILE));
        table.verified(5, witness);
        assert!(table.is_verified(5, witness));
        assert!(!table.is_verified(5, Witness { closings: 1, ..witness }));
        assert_eq!(table.found(5), Some(Found { instance: FILE.instance, handle: FILE.handle, witness }));
        assert!(!table.is_verified(5, Witness { segment: 2, ..witness }));
        let seen = table.look(5).expect("an entry");
        table.note(5, &seen, Known::Adopted(FILE));
        assert!(!table.is_verified(5, witness), "it was adopted anew");
        assert_eq!((table.found(5), table.found(-1)), (None, None));
        table.verified(5, witness);
        table.clear(5);
        assert_eq!(table.found(5), None);
        assert!(!table.is_verified(-1, witness));
    }

    #[test]
    fn looks_are_counted_until_the_number_is_closed() {
        let table = table();
        table.opened(5, 0);
        assert_eq!([table.count_look(5), table.count_look(5)], [1, 2]);
        table.clear(5);
        assert_eq!((table.count_look(5), table.count_look(-1)), (1, 0));
        table.recount_looks(5);
        assert_eq!(table.count_look(5), 1);
    }

    #[test]
    fn own_descriptions_stop_being_own_at_fork_and_at_close() {
        let table = table();
        table.opened(5, 0);
        let seen = table.look(5).expect("an entry");
        assert!(seen.is_own(0) && !seen.is_own(1));
        table.note(5, &seen, Known::Adopted(FILE));
        assert!(table.look(5).expect("an entry").is_own(0));
        table.clear(5);
        assert!(!table.look(5).expect("an entry").is_own(0));
    }

    #[test]
    fn what_is_mapped_is_shared_and_its_duplicates_say_that_they_are_some() {
        let table = table();
        let look = |number| table.look(number).expect("an entry");
        table.opened(5, 0);
        assert!(look(5).is_unshared(0) && !look(5).is_unshared(1) && !look(5).is_duplicated());
        table.duplicated(5, 6);
        assert!([5, 6].iter().all(|&number| look(number).is_duplicated() && look(number).is_unshared(0)));
        let seen = look(5);
        table.mapped(5);
        table.note(5, &seen, Known::Adopted(FILE));
        assert_eq!(look(5).known, Known::Unknown, "noted by who did not know of the mapping");
        table.note(5, &look(5), Known::Adopted(FILE));
        assert!(look(5).is_own(0) && !look(5).is_unshared(0));
        table.duplicated(5, 7);
        assert!(look(7).is_own(0) && !look(7).is_unshared(0));
        table.opened(5, 0);
        assert!(look(5).is_unshared(0) && !look(5).is_duplicated());
    }

    #[test]
    fn numbers_outside_the_table_are_the_kernels() {
        let table = table();
        for number in [-1, i32::MIN, DESCRIPTORS_MAX as i32, i32::MAX] {
            assert!(table.is_foreign(number));
            assert!(table.look(number).is_none());
            table.clear(number);
            table.opened(number, 0);
        }
        table.clear_range(65_530, u32::MAX);
    }
}
