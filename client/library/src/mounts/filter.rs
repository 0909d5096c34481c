//! Which paths surely lead into no instance, told by their first names: most calls of a program are none of ours, and shall
//! not pay for a look at the table.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const WORDS: usize = 8;
const BITS: u64 = WORDS as u64 * 64;

/// Names of a mount point that are looked at; a longer one is told by so many.
const NAMES_MAX: u32 = 8;

/// The mount points of instances, as hashes. All zeros: there are none.
#[derive(Debug)]
#[repr(C)]
pub struct Filter {
    words: [AtomicU64; WORDS],
    /// A bit for each number of names a mount point has.
    depths: AtomicU32,
}

/// What a filter is to hold, collected before it is put in force.
#[derive(Clone, Copy, Debug, Default)]
pub struct Places {
    words: [u64; WORDS],
    depths: u32,
}

impl Places {
    /// Adds the mount point of an instance, an absolute path.
    pub fn add(&mut self, place: &[u8]) {
        let mut last = None;
        let walk = walk(place, |depth, hash| {
            last = Some((depth, hash));
            depth < NAMES_MAX
        });
        match last {
            Some((depth, hash)) if walk != Walk::Odd => {
                let (word, bit) = place_of(hash);
                self.words[word] |= bit;
                self.depths |= 1 << depth;
            }
            _ => *self = Self { words: [u64::MAX; WORDS], depths: u32::MAX },
        }
    }
}

impl Filter {
    /// Puts new places in force. Meanwhile readers see the new or the old ones, so that what is in both is never missed.
    pub fn replace(&self, places: &Places) {
        self.depths.store(places.depths, Ordering::Relaxed);
        for (word, new) in self.words.iter().zip(places.words) {
            word.store(new, Ordering::Relaxed);
        }
    }

    /// Whether an absolute path may lead into an instance. It ends at a NUL; one that does not may lead anywhere.
    #[inline]
    pub fn may_lead(&self, path: &[u8]) -> bool {
        let depths = self.depths.load(Ordering::Relaxed);
        let mut found = false;
        let walk = walk(path, |depth, hash| {
            let (word, bit) = place_of(hash);
            found = depths >> depth & 1 != 0 && self.words[word].load(Ordering::Relaxed) & bit != 0;
            !found && depths >> depth > 1
        });
        found || walk != Walk::Plain
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Walk {
    /// As far as was asked for, or to the NUL at the end.
    Plain,
    /// To an end without a NUL.
    Cut,
    /// To an empty name, `.` or `..`: such paths are rare, and looked at in full.
    Odd,
}

/// Goes along a path and tells how many names were passed, and a hash of all of them, after each, as long as it is asked to.
#[inline(always)]
fn walk(path: &[u8], mut passed: impl FnMut(u32, u64) -> bool) -> Walk {
    let (mut hash, mut depth, mut dots, mut length) = (0_u64, 0, 0, 0);
    let mut rest = path.get(1..).unwrap_or_default().iter();
    loop {
        let byte = rest.next().copied();
        if let Some(byte) = byte.filter(|byte| !matches!(byte, b'/' | b'\0')) {
            hash = hash.rotate_left(5) ^ u64::from(byte);
            length += 1;
            dots += u32::from(byte == b'.');
            continue;
        }
        if length == dots && length <= 2 {
            return Walk::Odd;
        }
        hash = hash.rotate_left(5) ^ u64::from(b'/');
        depth += 1;
        if !passed(depth, hash) || byte == Some(b'\0') {
            return Walk::Plain;
        }
        if byte.is_none() {
            return Walk::Cut;
        }
        (dots, length) = (0, 0);
    }
}

fn place_of(hash: u64) -> (usize, u64) {
    let bit = hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32 & (BITS - 1);
    ((bit / 64) as usize, 1 << (bit % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(places: &[&str]) -> Filter {
        let mut all = Places::default();
        places.iter().for_each(|place| all.add(place.as_bytes()));
        let filter = Filter { words: [const { AtomicU64::new(0) }; WORDS], depths: AtomicU32::new(0) };
        filter.replace(&all);
        filter
    }

    fn may_lead(filter: &Filter, path: &str) -> bool {
        filter.may_lead(&[path.as_bytes(), b"\0more"].concat())
    }

    #[test]
    fn what_leads_to_an_instance_is_never_missed() {
        let filter = filter(&["/data", "/mnt/a", "/srv/pool/b/c", "/1/2/3/4/5/6/7/8/9"]);
        let inside = ["/data", "/data/x/y", "/mnt/a", "/mnt/a/b", "/srv/pool/b/c/d", "/1/2/3/4/5/6/7/8/9/10"];
        for path in inside.iter().chain(&["//data/x", "/./data/x", "/x/../data/y", "/mnt//a/b", "/mnt/./a", "/"]) {
            assert!(may_lead(&filter, path), "{path}");
        }
        for path in ["/etc/passwd", "/usr", "/mnt/b/a", "/srv/pool/b/d", "/srv/pool", "/dat/a", "/m/nta", "/1/2/3"] {
            assert!(!may_lead(&filter, path), "{path}");
        }
        assert!(filter.may_lead(b"/etc/pass"), "what follows is not known");
    }

    #[test]
    fn an_instance_at_the_root_has_everything() {
        assert!(may_lead(&filter(&["/"]), "/etc/passwd"));
        assert!(!may_lead(&filter(&[]), "/etc/passwd"));
    }
}
