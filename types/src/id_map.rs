//! Maps between ids of the host and ids inside a user namespace, or inside an instance for a container that has one.

use crate::NO_ID;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

/// Most ranges of one map, as in Linux.
const RANGES_MAX: usize = 340;

/// Consecutive ids, written `INSIDE:HOST:COUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// First id inside.
    pub inside: u32,
    /// First id of the host.
    pub host: u32,
    /// How many.
    pub count: u32,
}

/// Why ranges are no map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdMapError {
    /// It is not three numbers.
    Form,
    /// It has no ids.
    Empty,
    /// It goes beyond the last id, 4294967294.
    TooLong(IdRange),
    /// Two ranges have the same id, inside or of the host.
    Overlap(IdRange, IdRange),
    /// There are more than 340.
    TooMany,
}

impl fmt::Display for IdRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.inside, self.host, self.count)
    }
}

impl fmt::Display for IdMapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Form => write!(f, "a range of ids is INSIDE:HOST:COUNT, such as 0:100000:65536"),
            Self::Empty => write!(f, "a range of no ids"),
            Self::TooLong(range) => write!(f, "the range {range} goes beyond the last id, {}", NO_ID - 1),
            Self::Overlap(one, other) => write!(f, "the ranges {one} and {other} overlap"),
            Self::TooMany => write!(f, "more than {RANGES_MAX} ranges of ids"),
        }
    }
}

impl core::error::Error for IdMapError {}

impl IdRange {
    fn check(self) -> Result<Self, IdMapError> {
        let fits = |first: u32| first.checked_add(self.count).is_some();
        match self.count {
            0 => Err(IdMapError::Empty),
            _ if fits(self.inside) && fits(self.host) => Ok(self),
            _ => Err(IdMapError::TooLong(self)),
        }
    }

    fn overlaps(self, other: Self) -> bool {
        let meet = |one: u32, its: u32| one < its + other.count && its < one + self.count;
        meet(self.inside, other.inside) || meet(self.host, other.host)
    }

    /// Where in the range that begins with `first` an id lies, counted from `target`.
    fn shifted(self, id: u32, first: u32, target: u32) -> Option<u32> {
        id.checked_sub(first).filter(|&at| at < self.count).map(|at| target + at)
    }
}

impl FromStr for IdRange {
    type Err = IdMapError;

    fn from_str(text: &str) -> Result<Self, IdMapError> {
        let mut numbers = text.split(':').map(str::parse::<u32>);
        let mut next = || numbers.next().and_then(Result::ok).ok_or(IdMapError::Form);
        let range = Self { inside: next()?, host: next()?, count: next()? };
        if numbers.next().is_some() { Err(IdMapError::Form) } else { range.check() }
    }
}

/// A map between ids of the host and ids inside: one to one, and nothing but ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdMap(Vec<IdRange>);

impl IdMap {
    /// The map of these ranges.
    ///
    /// # Errors
    /// When one is empty or too long, when two overlap, when they are too many.
    pub fn new(ranges: impl IntoIterator<Item = IdRange>) -> Result<Self, IdMapError> {
        let mut known: Vec<IdRange> = Vec::new();
        for range in ranges {
            let range = range.check()?;
            if let Some(other) = known.iter().find(|other| range.overlaps(**other)) {
                return Err(IdMapError::Overlap(*other, range));
            }
            if known.len() == RANGES_MAX {
                return Err(IdMapError::TooMany);
            }
            known.push(range);
        }
        Ok(Self(known))
    }

    /// The map in the text of `/proc/PID/uid_map`, read from the initial user namespace; `None` when it is malformed.
    #[must_use]
    pub fn parse_proc(text: &str) -> Option<Self> {
        let range = |line: &str| {
            let mut numbers = line.split_ascii_whitespace().map(str::parse::<u32>);
            let mut next = || numbers.next()?.ok();
            let range = IdRange { inside: next()?, host: next()?, count: next()? };
            numbers.next().is_none().then_some(range)
        };
        Self::new(text.lines().map(range).collect::<Option<Vec<_>>>()?).ok()
    }

    /// Its ranges, in the order they were given.
    #[must_use]
    pub fn ranges(&self) -> &[IdRange] {
        &self.0
    }

    /// The number inside of the host's `id`.
    #[must_use]
    pub fn inside(&self, id: u32) -> Option<u32> {
        self.0.iter().find_map(|range| range.shifted(id, range.host, range.inside))
    }

    /// The host's number of the `id` inside.
    #[must_use]
    pub fn host(&self, id: u32) -> Option<u32> {
        self.0.iter().find_map(|range| range.shifted(id, range.inside, range.host))
    }

    /// Whether `id` of the host has a counterpart inside.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.inside(id).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::string::ToString;

    fn map(texts: &[&str]) -> Result<IdMap, IdMapError> {
        IdMap::new(texts.iter().map(|text| text.parse().expect("a range")))
    }

    #[test]
    fn ids_go_both_ways_and_to_nobody_outside() {
        let map = map(&["0:100000:65536", "70000:5:1"]).expect("a map");
        for (inside, host) in [(0, 100_000), (33, 100_033), (65535, 165_535), (70_000, 5)] {
            assert_eq!((map.host(inside), map.inside(host)), (Some(host), Some(inside)));
        }
        for id in [0, 4, 6, 99_999, 165_536, NO_ID] {
            assert_eq!(map.inside(id), None, "{id} of the host");
        }
        for id in [65_536, 69_999, 70_001, NO_ID] {
            assert_eq!(map.host(id), None, "{id} inside");
        }
        assert_eq!(IdMap::default().inside(0), None);
    }

    #[test]
    fn the_last_id_is_the_one_before_nobody() {
        let all: IdMap = map(&["0:0:4294967295"]).expect("a map");
        assert_eq!((all.inside(NO_ID - 1), all.inside(NO_ID)), (Some(NO_ID - 1), None));
        for text in ["1:0:4294967295", "0:1:4294967295", "4294967295:0:1", "0:4294967295:1"] {
            assert!(matches!(text.parse::<IdRange>(), Err(IdMapError::TooLong(_))), "{text}");
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in ["", "0", "0:1", "0:1:2:3", "a:1:2", "0:-1:2", "0:1:4294967296", "0 1 2", "0:1:"] {
            assert_eq!(text.parse::<IdRange>(), Err(IdMapError::Form), "{text:?}");
        }
        assert_eq!("0:1:0".parse::<IdRange>(), Err(IdMapError::Empty));
    }

    #[test]
    fn ranges_that_meet_are_refused_and_neighbours_are_not() {
        assert!(map(&["0:100:10", "10:110:10", "20:90:10"]).is_ok());
        for other in ["9:200:1", "0:200:1", "100:109:5", "100:91:10", "0:100:10", "0:0:1000"] {
            let error = map(&["0:100:10", other]).expect_err(other);
            assert!(error.to_string().contains("0:100:10") && error.to_string().contains(other), "{error}");
        }
    }

    #[test]
    fn as_many_ranges_as_the_kernel_takes() {
        let ranges = |count: u32| (0..count).map(|n| IdRange { inside: n, host: 2 * n, count: 1 });
        assert!(IdMap::new(ranges(340)).is_ok());
        assert_eq!(IdMap::new(ranges(341)), Err(IdMapError::TooMany));
    }

    #[test]
    fn the_kernels_text_is_understood() {
        let map = IdMap::parse_proc("         0     100000      65536\n     70000  5 1\n").expect("well-formed");
        let texts: Vec<_> = map.ranges().iter().map(|range| format!("{range}")).collect();
        assert_eq!(texts, ["0:100000:65536", "70000:5:1"]);
        assert_eq!(IdMap::parse_proc(""), Some(IdMap::default()), "a namespace whose map is not written yet");
        for bad in ["0 0", "0 0 -1", "0 0 1 1", "0 x 1", "0 4294967295 1"] {
            assert_eq!(IdMap::parse_proc(bad), None, "{bad}");
        }
    }
}
