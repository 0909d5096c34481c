//! Instances are made and ended one at a time, but for what takes long: the branches of one that is to be mounted are looked at beside everything else. Meanwhile its
//! mount is *under way*, and only what has to do with it waits for it. Nobody can hurry it; it can be given up, and then comes to nothing when it ends.

use poolfs_service_protocol::MountSpec;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Changes of the instances that a service has.
#[derive(Default)]
pub(crate) struct Changes {
    state: Mutex<State>,
    /// One of the mounts is no longer under way.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    mounts: Vec<MountSpec>,
    /// The instances among them whose mount comes to nothing.
    given_up: Vec<String>,
    is_last: bool,
}

/// As long as it is there, nothing else is made or ended.
pub(crate) struct Change<'a> {
    of: &'a Changes,
    state: MutexGuard<'a, State>,
}

impl Changes {
    /// A change, when no other one is made.
    pub(crate) fn begin(&self) -> Change<'_> {
        self.begin_after(|_| false)
    }

    /// The same when none of these mounts is under way, either.
    pub(crate) fn begin_after(&self, is_awaited: impl Fn(&MountSpec) -> bool) -> Change<'_> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |state: &mut State| state.mounts.iter().any(&is_awaited);
        let state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        Change { of: self, state }
    }

    /// The last one, when no mount is under way: none begins after it.
    pub(crate) fn begin_last(&self) -> Change<'_> {
        self.begin().state.is_last = true;
        self.begin_after(|_| true)
    }
}

impl<'a> Change<'a> {
    /// Whether nothing is to be mounted any more.
    pub(crate) fn is_last(&self) -> bool {
        self.state.is_last
    }

    /// The mounts that are under way.
    pub(crate) fn mounts(&self) -> &[MountSpec] {
        &self.state.mounts
    }

    /// Have the mount of an instance come to nothing; whether it is under way.
    pub(crate) fn give_up(&mut self, instance: &str) -> bool {
        let is_underway = self.state.mounts.iter().any(|mount| mount.instance == instance);
        if is_underway {
            self.state.given_up.push(instance.to_owned());
        }
        is_underway
    }

    /// Does `work` for a mount, which is under way meanwhile, beside other changes. There is no result when it was given up.
    pub(crate) fn beside<T>(mut self, mount: &MountSpec, work: impl FnOnce() -> T) -> (Option<T>, Self) {
        self.state.mounts.push(mount.clone());
        let underway = Underway { of: self.of, mount, has_ended: false };
        drop(self);
        let done = work();
        let (is_given_up, change) = underway.end();
        (Some(done).filter(|_| !is_given_up), change)
    }
}

/// A mount that is under way.
struct Underway<'a, 'm> {
    of: &'a Changes,
    mount: &'m MountSpec,
    has_ended: bool,
}

impl<'a> Underway<'a, '_> {
    /// The mount is no longer under way, and nobody else comes between that and the change that is returned. Whether it was given up.
    fn end(mut self) -> (bool, Change<'a>) {
        self.has_ended = true;
        self.taken_away()
    }

    fn taken_away(&self) -> (bool, Change<'a>) {
        let mut change = self.of.begin();
        let instance = &self.mount.instance;
        change.state.mounts.retain(|mount| mount.instance != *instance);
        let is_given_up = change.state.given_up.contains(instance);
        change.state.given_up.retain(|name| name != instance);
        self.of.changed.notify_all();
        (is_given_up, change)
    }
}

impl Drop for Underway<'_, '_> {
    /// Its work may have panicked.
    fn drop(&mut self) {
        if !self.has_ended {
            drop(self.taken_away());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_service_protocol::StackSpec;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;

    fn mount(instance: &str) -> MountSpec {
        MountSpec {
            instance: instance.into(),
            mount_point: "/mnt".into(),
            stack: StackSpec::Directory { directory: "/nowhere".into() },
            devices: false,
            suid: false,
            is_root: false,
            ids: None,
        }
    }

    fn names(change: &Change<'_>) -> Vec<String> {
        change.mounts().iter().map(|mount| mount.instance.clone()).collect()
    }

    #[test]
    fn only_what_awaits_a_mount_waits_for_it() {
        let changes = Changes::default();
        let (one, other) = (mount("one"), mount("other"));
        let (told, tell) = channel();
        std::thread::scope(|scope| {
            let (done, change) = changes.begin().beside(&one, || {
                let (done, mut change) = changes.begin().beside(&other, || {
                    assert_eq!(names(&changes.begin()), ["one", "other"]);
                    drop(changes.begin_after(|mount| mount.instance == "third"));
                    for awaited in ["one", "other"] {
                        let (changes, told) = (&changes, told.clone());
                        scope.spawn(move || {
                            drop(changes.begin_after(|mount| mount.instance == awaited));
                            told.send(awaited).expect("heard");
                        });
                    }
                });
                assert_eq!((done, names(&change)), (Some(()), vec!["one".to_owned()]));
                assert!(!change.give_up("other"));
                drop(change);
                assert_eq!(tell.recv(), Ok("other"));
            });
            assert_eq!(done, Some(()));
            assert!(names(&change).is_empty() && tell.try_recv().is_err());
            drop(change);
            assert_eq!(tell.recv(), Ok("one"));
        });
    }

    #[test]
    fn a_mount_that_is_given_up_has_no_result_and_another_of_its_name_has() {
        let changes = Changes::default();
        let one = mount("one");
        let (done, change) = changes.begin().beside(&one, || assert!(changes.begin().give_up("one")));
        assert!(done.is_none() && names(&change).is_empty());
        let (done, mut change) = change.beside(&one, || 7);
        assert_eq!((done, change.give_up("one")), (Some(7), false));
    }

    #[test]
    fn the_last_change_comes_after_all_mounts_and_a_panic_ends_one() {
        let changes = Changes::default();
        let one = mount("one");
        let panicked = catch_unwind(AssertUnwindSafe(|| drop(changes.begin().beside(&one, || panic!("in a layer")))));
        assert!(panicked.is_err() && changes.begin().mounts().is_empty());
        std::thread::scope(|scope| {
            let (_, change) = changes.begin().beside(&one, || {
                scope.spawn(|| assert!(names(&changes.begin_last()).is_empty()));
                while !changes.begin().is_last() {
                    std::thread::yield_now();
                }
                assert_eq!(names(&changes.begin()), ["one"]);
            });
            assert!(change.is_last());
        });
    }
}
