//! Fair shares of a bounded resource: no user of it can leave the others without.
//!
//! Half of the total is *reserved* in equal parts, one for each user. A request within a user's own part is granted whatever the
//! others have. What all users have beyond their parts is at most the other half. So a user that takes all it can still leaves
//! every other half of an equal share.
//!
//! Users come and go, and with each new one the parts become smaller. A new user gets its part even if the others have left too
//! little: the total is then exceeded, by no more than that, until somebody gives back. Where nobody can be made to give back, a
//! part is reserved for a second user before there is one ([`Shares::new`]); otherwise the first may have all
//! ([`Shares::reclaimable`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A bounded resource.
#[derive(Debug)]
pub struct Shares {
    total: u64,
    /// For so many users something is reserved at least.
    users_min: u64,
    /// What is reserved for each user.
    reserved: AtomicU64,
    /// Nobody gets more than that.
    is_tight: AtomicBool,
    /// What each user has.
    users: Mutex<Vec<Weak<AtomicU64>>>,
}

/// One user's share of a resource, as long as it lives.
#[derive(Debug)]
pub struct Share {
    of: Arc<Shares>,
    used: Arc<AtomicU64>,
}

/// Headroom for something that takes memory.
pub trait Headroom: Send + Sync {
    /// Takes so much, if that may be.
    fn add(&self, amount: u64) -> bool;

    /// Takes so much, whether it may be or not.
    fn force(&self, amount: u64);

    /// Gives back what was taken.
    fn subtract(&self, amount: u64);
}

/// A part of a resource that a user has; given back when dropped.
#[derive(Debug)]
pub struct Taken {
    share: Arc<Share>,
    amount: u64,
}

impl Shares {
    /// A resource of which there is so much.
    #[must_use]
    pub fn new(total: u64) -> Arc<Self> {
        Self::divided(total, 2)
    }

    /// One that users give back soon: the first may have all of it, until there is a second one.
    #[must_use]
    pub fn reclaimable(total: u64) -> Arc<Self> {
        Self::divided(total, 1)
    }

    fn divided(total: u64, users_min: u64) -> Arc<Self> {
        let shares = Self {
            total,
            users_min,
            reserved: AtomicU64::new(0),
            is_tight: AtomicBool::new(false),
            users: Mutex::default(),
        };
        shares.divide(&shares.users());
        Arc::new(shares)
    }

    /// How much there is.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// One more user.
    #[must_use]
    pub fn join(self: &Arc<Self>) -> Arc<Share> {
        let used = Arc::new(AtomicU64::new(0));
        let mut users = self.users();
        users.push(Arc::downgrade(&used));
        self.divide(&users);
        Arc::new(Share { of: Arc::clone(self), used })
    }

    fn users(&self) -> MutexGuard<'_, Vec<Weak<AtomicU64>>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn divide(&self, users: &[Weak<AtomicU64>]) {
        let part = self.total / (2 * self.users_min.max(users.len() as u64));
        // However many there are, each can go on.
        self.reserved.store(part.max(self.total.min(1)), Ordering::SeqCst);
    }

    /// From here on nobody gets more than what is reserved for it, or may again. What somebody has stays.
    pub fn tighten(&self, is_tight: bool) {
        self.is_tight.store(is_tight, Ordering::SeqCst);
    }

    /// Whether what all have beyond their parts, and so much more, is no more than may be.
    fn may_be_beyond(&self, more: u64) -> bool {
        if self.is_tight.load(Ordering::SeqCst) {
            return false;
        }
        let users = self.users();
        let reserved = self.reserved.load(Ordering::SeqCst);
        let have = users.iter().filter_map(Weak::upgrade).map(|used| used.load(Ordering::SeqCst));
        have.map(|used| used.saturating_sub(reserved)).fold(more, u64::saturating_add) <= self.total / 2
    }

    /// What all have.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.users().iter().filter_map(Weak::upgrade).map(|used| used.load(Ordering::SeqCst)).sum()
    }
}

impl Share {
    /// What the user has.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::SeqCst)
    }

    /// What it gets whatever others have.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.of.reserved.load(Ordering::SeqCst)
    }

    /// Takes so much, if the user may have it.
    #[must_use]
    pub fn take(self: &Arc<Self>, amount: u64) -> Option<Taken> {
        self.add(amount).then(|| Taken { share: Arc::clone(self), amount })
    }

    /// The same for who gives it back by [`Share::subtract`].
    #[must_use]
    pub fn add(&self, amount: u64) -> bool {
        let now = self.used.fetch_add(amount, Ordering::SeqCst).saturating_add(amount);
        let may = now <= self.reserved() || self.of.may_be_beyond(0);
        if !may {
            self.subtract(amount);
        }
        may
    }

    /// Takes so much, whether the user may have it or not.
    pub fn force(&self, amount: u64) {
        self.used.fetch_add(amount, Ordering::SeqCst);
    }

    /// Gives back what was [added](Share::add) or [forced](Share::force).
    pub fn subtract(&self, amount: u64) {
        self.used.fetch_sub(amount, Ordering::SeqCst);
    }

    /// Whether the user might take so much now.
    #[must_use]
    pub fn may_take(&self, amount: u64) -> bool {
        let (used, reserved) = (self.used(), self.reserved());
        let wanted = used.saturating_add(amount);
        wanted <= reserved || self.of.may_be_beyond(wanted - used.max(reserved))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut users = self.of.users();
        users.retain(|used| !std::ptr::eq(used.as_ptr(), Arc::as_ptr(&self.used)));
        self.of.divide(&users);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.share.subtract(self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(share: &Arc<Share>) -> Vec<Taken> {
        std::iter::from_fn(|| share.take(1)).collect()
    }

    #[test]
    fn whoever_takes_all_leaves_everybody_half_of_a_share() {
        for count in 2..20 {
            let shares = Shares::new(1000);
            let users: Vec<_> = (0..count).map(|_| shares.join()).collect();
            let half = 1000 / (2 * count);
            let taken: Vec<_> = users.iter().map(take_all).collect();
            assert!(taken.iter().all(|taken| taken.len() as u64 >= half), "{count}");
            assert!(shares.used() <= 1000, "{count}");
            assert_eq!(taken[0].len() as u64, 500 + half, "{count}");
        }
    }

    #[test]
    fn who_comes_later_finds_half_of_a_share_too() {
        let shares = Shares::new(1000);
        let mut users = Vec::new();
        for count in 1..20_u64 {
            let user = shares.join();
            let taken = take_all(&user);
            assert!(taken.len() as u64 >= 1000 / (2 * count.max(2)), "{count}");
            users.push((user, taken));
        }
        let parts: u64 = (2..20).map(|count| 1000 / (2 * count)).sum();
        assert!(shares.used() <= 1000 + parts);
    }

    #[test]
    fn alone_one_has_all_of_what_it_gives_back_soon_and_many_have_one_each() {
        let shares = Shares::reclaimable(16);
        let first = shares.join();
        let taken = take_all(&first);
        assert_eq!(taken.len(), 16);
        let others: Vec<_> = (0..40).map(|_| shares.join()).collect();
        assert!(others.iter().all(|other| other.take(1).is_some()));
        drop(taken);
        assert_eq!(take_all(&first).len(), 9);
    }

    #[test]
    fn while_it_is_tight_everybody_has_his_own_part() {
        let shares = Shares::new(100);
        let [one, other] = [shares.join(), shares.join()];
        let taken = one.take(50);
        shares.tighten(true);
        assert!(one.take(1).is_none() && !one.may_take(1));
        assert_eq!(take_all(&other).len(), 25);
        shares.tighten(false);
        assert!(one.take(1).is_some());
        drop(taken);
    }

    #[test]
    fn what_is_given_back_is_there_for_others() {
        let shares = Shares::new(100);
        let [one, other] = [shares.join(), shares.join()];
        let taken = take_all(&one);
        assert_eq!((taken.len(), one.used()), (75, 75));
        assert!(!one.may_take(1) && other.may_take(25) && !other.may_take(26));
        assert!(other.take(26).is_none() && other.used() == 0);
        drop(taken);
        assert!(other.take(75).is_some());
        assert_eq!(shares.used(), 0);
        one.force(90);
        drop(one);
        assert_eq!(shares.used(), 0, "it has gone with its share");
        assert!(other.add(75) && !other.add(1));
        other.subtract(75);
    }

    #[test]
    fn many_at_once_take_no_more_than_there_is() {
        let shares = Shares::new(500);
        let users = [shares.join(), shares.join()];
        let taken: usize = std::thread::scope(|scope| {
            let taking = |at: usize| {
                let user = &users[at % 2];
                scope.spawn(move || take_all(user))
            };
            let all: Vec<_> = (0..4).map(taking).collect();
            let kept: Vec<_> = all.into_iter().map(|thread| thread.join().expect("no panic")).collect();
            kept.iter().map(Vec::len).sum()
        });
        assert!((125..=500).contains(&taken), "{taken}");
    }
}
