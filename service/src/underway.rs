//! Mounts under way: instances are made and ended one at a time, except for the part that takes long.
//!
//! The branches of an instance that is to be mounted are examined concurrently with everything else. Meanwhile its mount is
//! *under way*, and only later mounts that conflict with it wait for it. Nobody can hurry it. It can be given up, and then comes
//! to nothing when it ends, which nobody waits for.
//!
//! **Lock order.** A [`Change`] comes before all other locks of the service. A thread that examines branches holds none.

use crate::sync::lock;
use poolfs_service_protocol::MountSpec;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Most instances of one service.
pub const INSTANCES_MAX: usize = 1024;

/// Most mounts under way. Each keeps a thread and a connection, of which others need some, too.
pub(crate) const UNDERWAY_MAX: usize = 24;

/// Changes of the instances that a service has.
#[derive(Default)]
pub(crate) struct Changes {
    state: Mutex<State>,
    /// A mount is no longer under way, or was given up.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which they came.
    mounts: Vec<Mount>,
    /// How many have come so far.
    tickets: u64,
    is_last: bool,
}

struct Mount {
    ticket: u64,
    spec: MountSpec,
    is_given_up: bool,
}

/// As long as it is there, nothing else is made or ended.
pub(crate) struct Change<'a> {
    of: &'a Changes,
    state: MutexGuard<'a, State>,
}

impl Changes {
    /// A change, when no other one is made.
    pub(crate) fn begin(&self) -> Change<'_> {
        Change { of: self, state: lock(&self.state) }
    }

    /// The last one: whatever is under way is given up, and nothing is mounted after it.
    pub(crate) fn begin_last(&self) -> Change<'_> {
        let mut change = self.begin();
        change.state.is_last = true;
        change.give_up_each(|_| true);
        change
    }

    /// Has a mount under way, unless too many are.
    pub(crate) fn enter(&self, spec: &MountSpec) -> Option<Underway<'_>> {
        let mut change = self.begin();
        if change.state.mounts.len() >= UNDERWAY_MAX {
            return None;
        }
        let ticket = change.state.tickets;
        change.state.tickets += 1;
        change.state.mounts.push(Mount { ticket, spec: spec.clone(), is_given_up: false });
        Some(Underway { of: self, ticket, has_ended: false })
    }
}

impl Change<'_> {
    /// Whether nothing is to be mounted any more.
    pub(crate) fn is_last(&self) -> bool {
        self.state.is_last
    }

    /// The instances whose mounts are under way and were not given up.
    pub(crate) fn mounts(&self) -> impl Iterator<Item = &str> {
        let wanted = self.state.mounts.iter().filter(|mount| !mount.is_given_up);
        wanted.map(|mount| mount.spec.instance.as_str())
    }

    /// Have the mount of an instance come to nothing; whether one is under way.
    pub(crate) fn give_up(&mut self, instance: &str) -> bool {
        self.give_up_each(|spec| spec.instance == instance)
    }

    fn give_up_each(&mut self, is_meant: impl Fn(&MountSpec) -> bool) -> bool {
        let mut is_any = false;
        for mount in self.state.mounts.iter_mut().filter(|mount| is_meant(&mount.spec)) {
            mount.is_given_up = true;
            is_any = true;
        }
        self.of.changed.notify_all();
        is_any
    }
}

/// A mount that is under way. What holds a [`Change`] must be dropped before it.
pub(crate) struct Underway<'a> {
    of: &'a Changes,
    ticket: u64,
    has_ended: bool,
}

impl<'a> Underway<'a> {
    /// A change, when no mount that it awaits is under way of those that came before it; none when it was given up. `awaits` is told of each what it is, and whether it
    /// was given up.
    pub(crate) fn turn(&self, awaits: impl Fn(&MountSpec, bool) -> bool) -> Option<Change<'a>> {
        let Change { of, state } = self.of.begin();
        let waits = |state: &mut State| {
            let mut until_own = state.mounts.iter().take_while(|mount| mount.ticket != self.ticket);
            !state.is_given_up(self.ticket) && until_own.any(|mount| awaits(&mount.spec, mount.is_given_up))
        };
        let state = of.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        (!state.is_given_up(self.ticket)).then_some(Change { of, state })
    }

    /// Does `work` beside other changes, and whether the mount was given up meanwhile. It is under way until [`Underway::end`], or until this is dropped.
    pub(crate) fn beside<T>(&self, change: Change<'a>, work: impl FnOnce() -> T) -> (T, bool, Change<'a>) {
        drop(change);
        let done = work();
        let change = self.of.begin();
        (done, change.state.is_given_up(self.ticket), change)
    }

    /// It is no longer under way: from this change on, it is there.
    pub(crate) fn end(mut self, change: &mut Change<'_>) {
        self.has_ended = true;
        self.leave(change);
    }

    fn leave(&self, change: &mut Change<'_>) {
        change.state.mounts.retain(|mount| mount.ticket != self.ticket);
        self.of.changed.notify_all();
    }
}

impl State {
    fn is_given_up(&self, ticket: u64) -> bool {
        self.mounts.iter().any(|mount| mount.ticket == ticket && mount.is_given_up)
    }
}

impl Drop for Underway<'_> {
    /// It was refused or given up, or its work has panicked.
    fn drop(&mut self) {
        if !self.has_ended {
            self.leave(&mut self.of.begin());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_service_protocol::StackSpec;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;
    use std::thread;

    fn mount(instance: &str) -> MountSpec {
        MountSpec::new(instance, "/mnt", StackSpec::directory("/nowhere"))
    }

    fn names(change: &Change<'_>) -> Vec<String> {
        change.mounts().map(str::to_owned).collect()
    }

    /// Does `work` with a mount under way that awaits nobody.
    fn beside<'a, T>(changes: &'a Changes, instance: &str, work: impl FnOnce() -> T) -> (T, bool, Change<'a>) {
        let underway = changes.enter(&mount(instance)).expect("there is room");
        let change = underway.turn(|_, _| false).expect("it was not given up");
        let (done, is_given_up, mut change) = underway.beside(change, work);
        underway.end(&mut change);
        (done, is_given_up, change)
    }

    #[test]
    fn only_what_awaits_an_earlier_mount_waits_for_it() {
        let changes = Changes::default();
        let (told, tell) = channel();
        thread::scope(|scope| {
            let (_, _, change) = beside(&changes, "one", || {
                let (_, _, change) = beside(&changes, "other", || {
                    assert_eq!(names(&changes.begin()), ["one", "other"]);
                    for awaited in ["one", "other"] {
                        let (changes, told) = (&changes, told.clone());
                        let later = changes.enter(&mount("later")).expect("there is room");
                        drop(later.turn(|spec, _| spec.instance == "third").expect("nobody is awaited"));
                        scope.spawn(move || {
                            drop(later.turn(|spec, _| spec.instance == awaited).expect("it was not given up"));
                            told.send(awaited).expect("heard");
                        });
                    }
                });
                drop(change);
                assert_eq!(tell.recv(), Ok("other"));
            });
            assert!(tell.try_recv().is_err());
            drop(change);
            assert_eq!(tell.recv(), Ok("one"));
        });
        assert!(names(&changes.begin()).is_empty());
    }

    #[test]
    fn a_mount_is_given_up_while_it_waits_and_while_it_is_looked_at() {
        let changes = Changes::default();
        let first = changes.enter(&mount("first")).expect("there is room");
        let ((), is_given_up, change) = beside(&changes, "one", || assert!(changes.begin().give_up("one")));
        assert!(is_given_up);
        drop(change);
        let waiting = changes.enter(&mount("one")).expect("there is room");
        thread::scope(|scope| {
            let waits = scope.spawn(|| waiting.turn(|spec, _| spec.instance == "first").is_none());
            assert_eq!(names(&changes.begin()), ["first", "one"]);
            assert!(changes.begin().give_up("one") && waits.join().expect("it was told"));
        });
        assert_eq!(names(&changes.begin()), ["first"]);
        drop((first, waiting));
        let ((), is_given_up, mut change) = beside(&changes, "one", || ());
        assert!(!is_given_up && !change.give_up("one"));
    }

    #[test]
    fn the_last_change_gives_up_what_is_under_way_and_waits_for_nothing() {
        let changes = Changes::default();
        let ((), is_given_up, change) = beside(&changes, "one", || {
            assert!(names(&changes.begin_last()).is_empty());
        });
        assert!(is_given_up && change.is_last());
    }

    #[test]
    fn a_panic_ends_a_mount_and_there_are_never_too_many() {
        let changes = Changes::default();
        let panics = || drop(beside(&changes, "one", || panic!("in a layer")));
        assert!(catch_unwind(AssertUnwindSafe(panics)).is_err() && names(&changes.begin()).is_empty());
        let all: Vec<_> = (0..UNDERWAY_MAX).map(|_| changes.enter(&mount("one")).expect("there is room")).collect();
        assert!(changes.enter(&mount("other")).is_none());
        drop(all);
        assert!(changes.enter(&mount("other")).is_some());
    }
}
