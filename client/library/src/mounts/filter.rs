//! A filter for paths that lead into no instance, decided by their first bytes.
//!
//! Most calls of a program are foreign and must not pay for a lookup in the mount table. A path's first bytes are compared with those of
//! each mount point at once, without a loop: most differ there.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Mount points that are told apart; of more, some are told by what they have in common.
const PLACES_MAX: usize = 16;

/// Bytes of a mount point that are looked at; a longer one is told by so many.
const PLACE_BYTES: usize = 128;

const WORD: usize = size_of::<u64>();

/// Words that are compared at once.
const FIRST_WORDS: usize = 4;
const FIRST_BYTES: usize = FIRST_WORDS * WORD;

/// The mount points of instances. All zeros: it was never filled, and tells nothing.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Filter {
    /// Odd while the places are being replaced.
    version: AtomicU32,
    count: AtomicU32,
    /// What was said of the places when they were put in force.
    stamp: AtomicU32,
    places: [Place; PLACES_MAX],
}

/// How the paths begin that lead to a mount point. What most paths are told by is in one line of the processor's cache.
#[derive(Debug, Default)]
#[repr(C)]
struct Place {
    /// The bits of the first words that count.
    counted: [AtomicU64; FIRST_WORDS],
    words: [AtomicU64; PLACE_BYTES / WORD],
    length: AtomicU32,
    /// 1: it is the whole of the mount point, and a name ends with it.
    whole: AtomicU32,
}

/// What a filter is to hold, collected before it is put in force.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// One more than there is room for, until two are joined.
    places: [Beginning; PLACES_MAX + 1],
    count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Beginning {
    bytes: [u8; PLACE_BYTES],
    length: usize,
    whole: bool,
}

impl Beginning {
    const NONE: Self = Self { bytes: [0; PLACE_BYTES], length: 0, whole: false };

    fn of(place: &[u8]) -> Self {
        let length = place.len().min(PLACE_BYTES);
        let mut new = Self { length, whole: length == place.len(), ..Self::NONE };
        new.bytes[..length].copy_from_slice(&place[..length]);
        new
    }

    fn common(&self, other: &Self) -> usize {
        let (mine, others) = (&self.bytes[..self.length], &other.bytes[..other.length]);
        mine.iter().zip(others).take_while(|(mine, other)| mine == other).count()
    }

    fn cut(&mut self, length: usize) {
        self.bytes[length..].fill(0);
        self.length = length;
        self.whole = false;
    }
}

impl Places {
    /// No places.
    pub const NONE: Self = Self { places: [Beginning::NONE; PLACES_MAX + 1], count: 0 };

    /// Adds the mount point of an instance, an absolute path as the kernel writes it.
    pub fn add(&mut self, place: &[u8]) {
        let names = place.strip_prefix(b"/").map(|names| names.split(|&byte| byte == b'/'));
        let is_plain = names.is_some_and(|mut names| names.all(|name| !matches!(name, b"" | b"." | b"..")));
        // That of the root has every path.
        self.places[self.count] = if is_plain { Beginning::of(place) } else { Beginning::NONE };
        self.count += 1;
        if self.count > PLACES_MAX {
            self.join_nearest();
        }
    }

    /// Makes one place of the two that have most in common.
    fn join_nearest(&mut self) {
        let common = |(one, other): (usize, usize)| self.places[one].common(&self.places[other]);
        let pairs = (1..self.count).flat_map(|one| (0..one).map(move |other| (one, other)));
        if let Some((one, other)) = pairs.max_by_key(|&pair| common(pair)) {
            let length = common((one, other));
            self.places[other].cut(length);
            self.count -= 1;
            self.places[one] = self.places[self.count];
        }
    }
}

impl Filter {
    /// Puts new places in force, with a stamp. One caller at a time.
    pub fn replace(&self, places: &Places, stamp: u32) {
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        fence(Ordering::Release);
        for (place, new) in self.places.iter().zip(&places.places) {
            for (word, bytes) in place.words.iter().zip(new.bytes.as_chunks().0) {
                word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
            }
            for (index, counted) in place.counted.iter().enumerate() {
                counted.store(low_bytes(new.length.saturating_sub(index * WORD)), Ordering::Relaxed);
            }
            place.length.store(new.length as u32, Ordering::Relaxed);
            place.whole.store(u32::from(new.whole), Ordering::Relaxed);
        }
        self.count.store(places.count as u32, Ordering::Relaxed);
        self.stamp.store(stamp, Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// Whether an absolute path without `..` may lead into an instance, or the places are not those with this stamp. A path ends at a
    /// NUL; one that does not may lead anywhere.
    #[inline]
    pub fn may_lead(&self, path: &[u8], stamp: u32) -> bool {
        let version = self.version.load(Ordering::Acquire);
        if version == 0 || version & 1 != 0 || self.stamp.load(Ordering::Relaxed) != stamp {
            return true;
        }
        let count = self.count.load(Ordering::Relaxed) as usize;
        if self.places.iter().take(count).any(|place| place.may_hold(path)) {
            return true;
        }
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) != version
    }
}

/// A word of which so many of the first bytes count.
fn low_bytes(count: usize) -> u64 {
    if count < WORD { (1 << (count * 8)) - 1 } else { u64::MAX }
}

impl Place {
    #[inline]
    fn may_hold(&self, path: &[u8]) -> bool {
        let Some(head) = path.first_chunk::<FIRST_BYTES>() else { return self.may_hold_further(path) };
        let mut different = [0; FIRST_WORDS];
        for (index, bytes) in head.as_chunks().0.iter().enumerate() {
            let counted = self.counted[index].load(Ordering::Relaxed);
            different[index] = (u64::from_le_bytes(*bytes) ^ self.words[index].load(Ordering::Relaxed)) & counted;
        }
        match different.iter().position(|&word| word != 0) {
            Some(at) => is_odd(path, at * WORD + different[at].trailing_zeros() as usize / 8),
            None => self.may_hold_further(path),
        }
    }

    /// As [`Place::may_hold`], by as much as is known of the path and the mount point.
    #[cold]
    #[inline(never)]
    fn may_hold_further(&self, path: &[u8]) -> bool {
        let length = self.length.load(Ordering::Relaxed) as usize;
        let mut words = self.words.iter().map(|word| word.load(Ordering::Relaxed));
        let mut at = 0;
        while at < length {
            let word = words.next().unwrap_or(0);
            let Some(bytes) = path.get(at..).and_then(<[u8]>::first_chunk) else {
                return self.may_hold_last(path, at);
            };
            let different = (u64::from_le_bytes(*bytes) ^ word) & low_bytes(length - at);
            if different != 0 {
                return is_odd(path, at + different.trailing_zeros() as usize / 8);
            }
            at += WORD;
        }
        self.ends(path, length)
    }

    /// The same from `at` on, where less than a word is known of the path.
    fn may_hold_last(&self, path: &[u8], at: usize) -> bool {
        let length = self.length.load(Ordering::Relaxed) as usize;
        let word = self.words.get(at / WORD).map_or(0, |word| word.load(Ordering::Relaxed)).to_le_bytes();
        for (index, mine) in (at..length).zip(word) {
            match path.get(index) {
                Some(byte) if *byte == mine => {}
                Some(_) => return is_odd(path, index),
                None => return true,
            }
        }
        self.ends(path, length)
    }

    /// Whether a path that begins like this goes on like one of ours.
    fn ends(&self, path: &[u8], length: usize) -> bool {
        self.whole.load(Ordering::Relaxed) == 0 || matches!(path.get(length), None | Some(b'/' | b'\0'))
    }
}

/// Whether a path that differs at `index` from a mount point may lead there all the same: it has an empty name or `.` there, which
/// count for nothing.
#[inline]
fn is_odd(path: &[u8], index: usize) -> bool {
    let byte = |index: usize| path.get(index).copied();
    match byte(index) {
        Some(b'/') => match byte(index.wrapping_sub(1)) {
            Some(b'/') => true,
            Some(b'.') => byte(index.wrapping_sub(2)) == Some(b'/'),
            _ => false,
        },
        Some(b'.') => byte(index.wrapping_sub(1)) == Some(b'/') && matches!(byte(index + 1), None | Some(b'/')),
        byte => byte.is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::components;
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    const STAMP: u32 = 7;

    fn filter<P: AsRef<[u8]>>(places: &[P]) -> Filter {
        let mut all = Places::NONE;
        places.iter().for_each(|place| all.add(place.as_ref()));
        let filter = Filter::default();
        assert!(filter.may_lead(b"/etc\0", 0), "it was never filled");
        filter.replace(&all, STAMP);
        assert!(filter.may_lead(b"/etc\0", STAMP + 1), "it is not the one that is asked");
        filter
    }

    fn may_lead(filter: &Filter, path: &str) -> bool {
        let short = filter.may_lead(&[path.as_bytes(), b"\0more"].concat(), STAMP);
        let long = filter.may_lead(&[path.as_bytes(), b"\0/mnt/more", &[b'x'; 200]].concat(), STAMP);
        assert_eq!(short, long, "{path}: what is behind it does not count");
        long
    }

    #[test]
    fn what_leads_to_an_instance_is_never_missed() {
        let filter = filter(&["/data", "/mnt/a", "/srv/pool/b/c", "/1/2/3/4/5/6/7/8/9", "/.x/y"]);
        let inside =
            ["/data", "/data/x/y", "/mnt/a", "/mnt/a/b", "/srv/pool/b/c/d", "/1/2/3/4/5/6/7/8/9/10", "/.x/y/z"];
        for path in inside.iter().chain(&["//data/x", "/./data/x", "/././/.x/y", "/mnt//a/b", "/mnt/./a", "/data/../x"])
        {
            assert!(may_lead(&filter, path), "{path}");
        }
        for path in
            ["/etc/passwd", "/usr", "/mnt/b/a", "/srv/pool/b/d", "/srv/pool", "/dat/a", "/m/nta", "/1/2/3", "/.y"]
        {
            assert!(!may_lead(&filter, path), "{path}");
        }
        assert!(filter.may_lead(b"/srv/poo", STAMP), "what follows is not known");
        assert!(!filter.may_lead(b"/srv/pu", STAMP), "what follows does not matter");
    }

    #[test]
    fn an_instance_at_the_root_has_everything() {
        assert!(may_lead(&filter(&["/"]), "/etc/passwd"));
        assert!(!may_lead(&filter::<&str>(&[]), "/etc/passwd"));
    }

    /// All paths of up to so many letters.
    fn paths(length: usize) -> Vec<Vec<u8>> {
        let longer = |path: &Vec<u8>| b"/.ab".map(|letter| [&path[..], &[letter]].concat());
        let mut all = std::vec![b"/".to_vec()];
        let mut last = all.clone();
        for _ in 1..length {
            last = last.iter().flat_map(longer).collect();
            all.extend_from_slice(&last);
        }
        all
    }

    fn is_inside(path: &[u8], place: &str) -> bool {
        let mut names = components(path);
        components(place.as_bytes()).all(|name| names.next() == Some(name))
            && !components(path).any(|name| name == b"..")
    }

    #[test]
    fn every_path_of_few_letters_is_told_as_its_names_tell_it() {
        for places in
            [&["/a"][..], &["/ab/b"], &["/a/.b"], &["/b/a", "/a.a"], &["/..a", "/aaaaaaaa/b"], &["/a/a/a", "/b"]]
        {
            let filter = filter(places);
            for path in paths(8) {
                let inside = places.iter().any(|place| is_inside(&path, place));
                let whole = [&path[..], b"\0"].concat();
                let longer = [&whole[..], &[b'a'; FIRST_BYTES]].concat();
                let text = String::from_utf8_lossy(&path);
                let leads = filter.may_lead(&whole, STAMP);
                assert_eq!(filter.may_lead(&longer, STAMP), leads, "{text}: what is behind it does not count");
                assert!(!inside || leads, "{text} leads into one of {places:?}");
                let is_plain = path.split(|&byte| byte == b'/').skip(1).all(|name| !matches!(name, b"" | b"." | b".."));
                assert!(!is_plain || inside || !leads, "{text} leads into none of {places:?}");
                let cut = (0..path.len()).all(|length| filter.may_lead(&path[..length], STAMP));
                assert!(!inside || cut, "the beginning of {text} may lead into one of {places:?}");
            }
        }
    }

    #[test]
    fn more_and_longer_mount_points_than_there_is_room_for_are_not_missed() {
        let long = std::format!("/{}/{}", "x".repeat(PLACE_BYTES), "y");
        let mut places: Vec<String> =
            (0..5 * PLACES_MAX).map(|number| std::format!("/srv/pools/{number}/mount")).collect();
        places.push(long.clone());
        let filter = filter(&places);
        for place in &places {
            assert!(may_lead(&filter, place) && may_lead(&filter, &std::format!("{place}/file")), "{place}");
        }
        assert!(!may_lead(&filter, "/srv/p") && !may_lead(&filter, "/etc/passwd"));
        assert!(may_lead(&filter, &long.replace('y', "z")), "told by its beginning");
    }
}
