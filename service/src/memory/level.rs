//! Memory levels: from the counters of the control group to what the cache may use.
//!
//! ```text
//! room = limit - kept
//!
//! plenty --(room < RESERVE)--> short --(room >= RECOVERED)--> reduced --(all of the cache fits)--> plenty
//!                              |   ^                             |
//!         (room < EXHAUSTED)   |   +------(room < RESERVE)-------+
//!                              v   |
//!                          exhausted (room >= EXHAUSTED; what holds of short holds of it as well)
//! ```
//!
//! Levels between two readings may be skipped: plenty becomes exhausted at once when so little is left, and exhausted reduced
//! when so much is.
//!
//! While the level is short or reduced, the cache has what leaves [`COMFORT`] free. It shrinks at once, and grows by steps.

use super::group::Reading;

/// Below so much room it is short.
pub const RESERVE: u64 = 32 << 20;
/// From so much on it is no more.
pub const RECOVERED: u64 = 40 << 20;
/// So much is left free by the cache then.
pub const COMFORT: u64 = 48 << 20;
/// Below so much it is exhausted: the cache has done what it can.
pub const EXHAUSTED: u64 = 16 << 20;
/// With less room it is looked at more often: it may be short soon.
pub const NEAR: u64 = 2 * COMFORT;
/// Of a group with a small limit these are parts of it: the reserve at most one in so many.
const RESERVE_PART: u64 = 5;
/// The cache gets back one part in so many of its limit at a time.
const STEP_PART: u64 = 16;

/// How much memory there is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// All of the cache fits.
    #[default]
    Plenty,
    /// The cache has less than its limit.
    Reduced,
    /// Nothing is given away.
    Short,
    /// Nor is anything else that can be refused, beyond what is reserved for each instance.
    Exhausted,
}

impl State {
    /// Whether nothing is given away.
    #[must_use]
    pub fn is_short(self) -> bool {
        matches!(self, Self::Short | Self::Exhausted)
    }

    /// Its name, for people and programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plenty => "plenty",
            Self::Reduced => "reduced",
            Self::Short => "short",
            Self::Exhausted => "exhausted",
        }
    }
}

/// What the cache has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Most that it may ever use.
    pub limit: u64,
    /// Most that it may use now.
    pub allowed: u64,
    /// What it uses.
    pub used: u64,
    /// Of that, memory of the kernel, which it can drop as little as the content for which it is there.
    pub of_kernel: u64,
}

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How much memory there is.
    pub state: State,
    /// What the cache may use from here on.
    pub allowed: u64,
    /// When so much more is used it is time for another look.
    pub look_after: u64,
}

/// Of `bytes`, what belongs to a group of this limit.
fn part(bytes: u64, limit: u64) -> u64 {
    bytes.min((limit / RESERVE_PART).saturating_mul(bytes >> 20) / (RESERVE >> 20))
}

impl Reading {
    /// Whether memory may soon be short.
    #[must_use]
    pub fn is_near(self) -> bool {
        self.limit.saturating_sub(self.kept) < part(NEAR, self.limit)
    }
}

impl State {
    /// What follows from what the group and the cache have now; `may_grow`: some time has passed since the cache got something back.
    #[must_use]
    pub fn after(self, reading: Reading, cache: CacheUse, may_grow: bool) -> Outcome {
        let room = reading.limit.saturating_sub(reading.kept);
        let [exhausted, reserve, recovered, comfort] =
            [EXHAUSTED, RESERVE, RECOVERED, COMFORT].map(|bytes| part(bytes, reading.limit));
        let is_short = room < reserve || (self.is_short() && room < recovered);
        // With so much in the cache the room is just what is to be left.
        let fitting = cache.used.saturating_add(room).saturating_sub(comfort);
        let allowed = match self {
            Self::Plenty if !is_short => cache.limit,
            _ if fitting <= cache.allowed => fitting,
            _ if may_grow => fitting.min(cache.allowed + cache.limit / STEP_PART).min(cache.limit),
            _ => cache.allowed,
        };
        let state = match (is_short, allowed >= cache.limit) {
            (true, _) if room < exhausted => Self::Exhausted,
            (true, _) => Self::Short,
            (false, true) => Self::Plenty,
            (false, false) => Self::Reduced,
        };
        // Some looks before the reserve is reached, and some within it.
        let look_after = (room.saturating_sub(reserve) / 4).clamp(exhausted / 4, exhausted);
        Outcome { state, allowed, look_after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 200 << 20;

    /// A service in which `others` bytes are used beside a cache that uses all it may.
    fn settle(mut state: State, mut allowed: u64, others: u64) -> (State, u64) {
        for _ in 0..100 {
            let reading = Reading { limit: LIMIT, kept: others + allowed };
            let outcome =
                state.after(reading, CacheUse { limit: 64 << 20, allowed, used: allowed, of_kernel: 0 }, true);
            // As the cache does it.
            (state, allowed) = (outcome.state, outcome.allowed.max(8 << 20));
        }
        (state, allowed)
    }

    #[test]
    fn the_cache_gives_way_to_others_and_gets_it_back() {
        let (state, allowed) = settle(State::Plenty, 64 << 20, 30 << 20);
        assert_eq!((state, allowed), (State::Plenty, 64 << 20));
        let (state, allowed) = settle(state, allowed, 120 << 20);
        assert_eq!((state, allowed), (State::Reduced, 32 << 20), "the comfort is left free");
        let (state, allowed) = settle(state, allowed, 165 << 20);
        assert_eq!((state, allowed), (State::Short, 8 << 20), "as much as it works with");
        let (state, allowed) = settle(state, allowed, 185 << 20);
        assert_eq!((state, allowed), (State::Exhausted, 8 << 20));
        assert_eq!(settle(state, allowed, 30 << 20), (State::Plenty, 64 << 20));
    }

    #[test]
    fn it_is_not_short_and_recovered_in_turn() {
        let cache = CacheUse { limit: 64 << 20, allowed: 64 << 20, used: 64 << 20, of_kernel: 0 };
        let look =
            |state: State, room: u64| state.after(Reading { limit: LIMIT, kept: LIMIT - room }, cache, true).state;
        assert_eq!(look(State::Plenty, RESERVE), State::Plenty);
        assert_eq!(look(State::Plenty, RESERVE - 1), State::Short);
        assert_eq!(look(State::Short, RECOVERED - 1), State::Short);
        assert_eq!(look(State::Short, RECOVERED), State::Reduced);
        assert_eq!(look(State::Reduced, RESERVE), State::Reduced);
    }

    #[test]
    fn it_gets_back_little_at_a_time() {
        let cache = CacheUse { limit: 64 << 20, allowed: 8 << 20, used: 8 << 20, of_kernel: 0 };
        let plenty = Reading { limit: LIMIT, kept: 40 << 20 };
        assert_eq!(State::Reduced.after(plenty, cache, false).allowed, 8 << 20);
        assert_eq!(State::Reduced.after(plenty, cache, true).allowed, 12 << 20);
    }

    #[test]
    fn small_groups_have_small_reserves_and_none_has_none() {
        let cache = CacheUse { limit: 4 << 20, allowed: 4 << 20, used: 4 << 20, of_kernel: 0 };
        let small = |kept| State::Plenty.after(Reading { limit: 40 << 20, kept }, cache, true).state;
        assert_eq!((small(31 << 20), small(33 << 20)), (State::Plenty, State::Short));
        let is_near = |kept, limit| Reading { limit, kept }.is_near();
        assert!(!is_near(16 << 20, 40 << 20) && is_near((16 << 20) + 1, 40 << 20), "in proportion, as all of these");
        assert!(!is_near(LIMIT - NEAR, LIMIT) && is_near(LIMIT - NEAR + 1, LIMIT) && !is_near(1 << 40, u64::MAX));
        let unlimited = Reading { limit: u64::MAX, kept: 1 << 40 };
        let outcome = State::Plenty.after(unlimited, cache, true);
        assert_eq!((outcome.state, outcome.allowed), (State::Plenty, 4 << 20));
    }
}
