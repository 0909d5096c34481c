//! The end of an instance: its accepted data is flushed, its mount is detached, and what is left ends with its last user.

use super::{Mounted, Service, lock};
use crate::failures::ServiceError;
use crate::flushes::{LOOK, Standing};
use crate::fuse::{FuseMount, MountError};
use crate::instance::Instance;
use crate::jobs::Stopped;
use crate::last_flush::{close, flush, next, reopen, said_since};
use crate::queue_front::QueueFront;
use poolfs_libservice::Error;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::UnmountMode;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, TryLockError, Weak};
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// How long an unmount waits for the kernel to let go, before the rest is left to the background.
const UNMOUNT_WAIT: Duration = Duration::from_secs(5);

/// The same when the whole service ends: then nobody is waited for much longer than a program needs to notice.
const SHUTDOWN_WAIT: Duration = Duration::from_millis(500);

/// How long an unmount of a busy mount is repeated: a program that has just ended may hold it for a moment.
const BUSY_WAIT: Duration = Duration::from_millis(500);
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// How long what is thrown away is written all the same.
const DISCARD_WAIT: Duration = Duration::from_secs(10);

/// How long a work on an instance that was asked to end may take for that.
const JOBS_WAIT: Duration = Duration::from_secs(30);

/// Most instances that are wound up at once.
const ENDING_MAX: usize = 64;

/// What an unmount has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// nothing that anybody can use
    Nothing,
    /// the mount, for who has it in another mount namespace or has something of it open: the instance ends with the last of them
    Used,
}

impl Service {
    /// Flushes and unmounts an instance. One that does not exist (any more) is fine; one that is about to be mounted will not be.
    ///
    /// # Errors
    /// It is still mounted then, unless the error says that something is lost; also when it is not `wanted` by anybody any more.
    pub fn unmount(&self, name: &str, ending: UnmountMode, is_wanted: &dyn Fn() -> bool) -> Result<Left, ServiceError> {
        let mut one_at_a_time = self.changes.begin();
        if one_at_a_time.give_up(name) {
            info!(instance = name, "its mount is given up");
            return Ok(Left::Nothing);
        }
        drop(one_at_a_time);
        let Some(instance) = self.instance(name) else { return Ok(Left::Nothing) };
        // Beside what others do: it may take long, or for ever.
        let end_of_discarded = Instant::now() + DISCARD_WAIT;
        if ending == UnmountMode::Discarded {
            instance.stack.discard();
        }
        let flushed = flush(&instance, |standing| {
            is_wanted()
                && match ending {
                    // Whoever wants to wait longer flushes first, and keeps nobody from anything meanwhile.
                    UnmountMode::Orderly | UnmountMode::Detached | UnmountMode::Forced => !standing.is_stuck(),
                    // The work of it is for nothing.
                    UnmountMode::Discarded => Instant::now() < end_of_discarded,
                }
        });
        let answers = flushed.is_some();
        match flushed {
            None if !is_wanted() => return Err(ServiceError::GivenUp(name.to_owned())),
            None if !ending.is_forced() => return Err(not_written(&instance, does_not_answer())),
            Some(Err(cause)) if !ending.is_forced() => return Err(not_written(&instance, cause)),
            _ => {}
        }
        let stopped = if answers { stop_jobs(&instance, is_wanted) } else { None };
        match stopped {
            None if !is_wanted() => return Err(ServiceError::GivenUp(name.to_owned())),
            None if !ending.is_forced() => return Err(not_written(&instance, does_not_answer())),
            _ => {}
        }
        let meant = Arc::downgrade(&instance);
        // Its branches are free as soon as it has ended.
        drop(instance);
        let _one_at_a_time = self.changes.begin();
        if !self.is_still(name, &meant) {
            return Ok(Left::Nothing);
        }
        match stopped {
            Some(stopped) => self.end_instance(name, ending, stopped),
            None => self.abandon(name),
        }
    }

    /// Whether an instance that was there still is, and no other one has its name. Whoever calls has `changes`.
    fn is_still(&self, name: &str, meant: &Weak<Instance>) -> bool {
        self.instance(name).is_some_and(|instance| std::ptr::eq(Arc::as_ptr(&instance), meant.as_ptr()))
    }

    /// Brings what an instance has accepted to the disk, as long as that is `wanted`. One that does not exist (any more) is fine.
    ///
    /// # Errors
    /// The branch does not take it, or it is not wanted any more.
    pub fn flush(&self, name: &str, is_wanted: &dyn Fn() -> bool) -> Result<(), ServiceError> {
        let Some(instance) = self.instance(name) else { return Ok(()) };
        let flushed = flush(&instance, |_| is_wanted()).ok_or_else(|| ServiceError::GivenUp(name.to_owned()))?;
        flushed.map_err(|cause| not_written(&instance, cause))
    }

    /// Takes the mount of an instance away whose branch does not answer. The rest ends in the background, should it ever answer. Whoever calls has `changes`.
    fn abandon(&self, name: &str) -> Result<Left, ServiceError> {
        let Some(mounted) = self.take_away(name, UnmountMode::Forced)? else { return Ok(Left::Nothing) };
        error!(instance = name, "its branch does not answer: unmounted all the same, as was asked for");
        // Nobody may believe that what he writes to what is left is stored.
        mounted.instance.refuse();
        mounted.instance.jobs().end();
        mounted.front.close(&self.threads);
        self.leave_behind(mounted.instance, mounted.mount);
        Ok(Left::Nothing)
    }

    /// Ends the instances whose mounts others have taken away, as long as `goes_on` says. Whether one may be left, because what was written to it is not on the
    /// disk. Whoever calls does not have `changes`: to flush may take long, or for ever.
    pub(super) fn end_unmounted(&self, goes_on: &dyn Fn() -> bool) -> bool {
        // Whoever comes next finds the branches free of those that have ended, and not in use for a flush.
        let _alone = loop {
            match self.unmounted.try_lock() {
                Ok(alone) => break alone,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if goes_on() => std::thread::sleep(BUSY_PAUSE),
                Err(TryLockError::WouldBlock) => return true,
            }
        };
        let over = |mounted: &Mounted| mounted.mount.is_over();
        let names: Vec<String> =
            lock(&self.instances).iter().filter(|(_, mounted)| over(mounted)).map(|(name, _)| name.clone()).collect();
        let mut is_left = false;
        for name in &names {
            let Some(instance) = self.instance(name) else { continue };
            match flush(&instance, |standing| goes_on() && !standing.is_stuck()) {
                Some(Ok(())) => {}
                outcome => {
                    warn!(instance = name, ?outcome, "an instance without a mount stays");
                    is_left = true;
                    continue;
                }
            }
            let Some(stopped) = stop_jobs(&instance, goes_on) else {
                warn!(instance = name, "an instance without a mount stays: somebody still works on it");
                is_left = true;
                continue;
            };
            let meant = Arc::downgrade(&instance);
            // Its branches are free as soon as it has ended.
            drop(instance);
            let _one_at_a_time = self.changes.begin();
            if !self.is_still(name, &meant) || !lock(&self.instances).get(name).is_some_and(over) {
                continue;
            }
            info!(instance = name, "its mount was taken away");
            if let Err(error) = self.end_instance(name, UnmountMode::Orderly, stopped) {
                is_left |= self.instance(name).is_some();
                warn!(instance = name, %error, is_left, "an instance without a mount did not end well");
            }
        }
        is_left
    }

    /// Unmounts an instance that was flushed just now and on which nobody works, with what was written since. Whoever calls has `changes`.
    fn end_instance(&self, name: &str, ending: UnmountMode, stopped: Stopped) -> Result<Left, ServiceError> {
        let Some(instance) = self.instance(name) else { return Ok(Left::Nothing) };
        let flushed = match flush(&instance, |standing| !standing.is_stuck()) {
            None if ending.is_forced() => {
                let abandoned = self.abandon(name);
                if abandoned.is_ok() {
                    stopped.for_good();
                }
                return abandoned;
            }
            flushed => flushed.unwrap_or_else(|| Err(does_not_answer())),
        };
        if let Err(cause) = flushed {
            let error = not_written(&instance, cause);
            if !ending.is_forced() {
                return Err(error);
            }
            warn!(instance = name, %error, "unmounted all the same, as was asked for");
        }
        // What one that was begun beside it says from here on concerns whoever unmounts as well.
        let first = next(&instance);
        match self.take_away(name, ending)? {
            Some(mounted) => {
                stopped.for_good();
                if !close(&instance) {
                    warn!(instance = name, "its branch does not answer");
                }
                drop(instance);
                self.linger(mounted, ending, first)
            }
            None => Ok(Left::Nothing),
        }
    }

    /// Takes the mount of an instance from its place.
    fn take_away(&self, name: &str, ending: UnmountMode) -> Result<Option<Mounted>, ServiceError> {
        let give_up = Instant::now() + BUSY_WAIT;
        loop {
            let mut instances = lock(&self.instances);
            let Some(mounted) = instances.get_mut(name) else { return Ok(None) };
            let taken = match mounted.mount.unmount() {
                Err(MountError::Busy { .. }) if Instant::now() < give_up => {
                    drop(instances);
                    std::thread::sleep(BUSY_PAUSE);
                    continue;
                }
                Err(MountError::Busy { .. }) if ending != UnmountMode::Orderly => mounted.mount.detach(),
                other => other,
            };
            taken?;
            return Ok(instances.remove(name));
        }
    }

    /// After the mount is gone from its place: waits for its last users, then flushes. Whoever has files of it open in another mount
    /// namespace keeps the instance, if it is to end in order; a mount that is only seen there goes on in the background until the service
    /// ends.
    fn linger(&self, mounted: Mounted, ending: UnmountMode, first: u64) -> Result<Left, ServiceError> {
        mounted.front.close(&self.threads);
        let is_over = mounted.mount.wait(UNMOUNT_WAIT);
        let files = mounted.instance.handles.len();
        if !is_over && ending == UnmountMode::Orderly && files > 0 {
            let path = mounted.instance.spec().mount_point.clone();
            reopen(&mounted.instance);
            mounted.instance.jobs().begin_again();
            lock(&self.instances).insert(mounted.instance.name().to_owned(), mounted);
            return Err(ServiceError::UsedElsewhere { path, files });
        }
        let Mounted { instance, mount, .. } = mounted;
        if is_over {
            let (path, left) = (instance.spec().mount_point.clone(), Arc::downgrade(&instance));
            return match WindingUp::begin(instance, Some(first)).wait(Standing::is_stuck, ending.is_forced()) {
                Ended::Well => Ok(Left::Nothing),
                Ended::Failed(..) if ending.is_forced() => Ok(Left::Nothing),
                Ended::Failed(Some(instance), cause) => Err(self.mount_again(&instance, cause)),
                Ended::Failed(None, cause) => Err(ServiceError::LeftBehind { path, cause }),
                Ended::GivenUp => {
                    lock(&self.lingering).push(left);
                    let cause = does_not_answer();
                    if ending.is_forced() { Ok(Left::Nothing) } else { Err(ServiceError::LeftBehind { path, cause }) }
                }
            };
        }
        warn!(instance = instance.name(), "the mount is still used elsewhere and ends with its last user");
        self.leave_behind(instance, mount);
        Ok(Left::Used)
    }

    /// What is gone from its place ends in the background, with its last user.
    fn leave_behind(&self, instance: Arc<Instance>, mount: FuseMount) {
        let mut lingering = lock(&self.lingering);
        lingering.retain(|instance| instance.strong_count() > 0);
        lingering.push(Arc::downgrade(&instance));
        drop(lingering);
        let spawned = std::thread::Builder::new().name("lingering".into()).spawn(move || {
            while !mount.wait(Duration::from_secs(3600)) {}
            // What fails is in the log: whoever asked for the unmount has had an answer.
            let _ = wind_up(&instance, None);
        });
        if let Err(error) = spawned {
            error!(%error, "no thread for a mount that lingers");
        }
    }

    /// Something was written between the flush before the unmount and the unmount, and cannot be written back: it must not
    /// be forgotten, and whoever wrote it must be able to reach it.
    fn mount_again(&self, instance: &Instance, cause: Error) -> ServiceError {
        let path = instance.spec().mount_point.clone();
        match self.mount_stack(instance.spec().clone(), instance.stack.clone()) {
            Ok(()) => ServiceError::NotWritten { path, cause },
            Err(again) => ServiceError::Lost { path, cause, again: Box::new(again) },
        }
    }

    /// Nobody works on these instances any more, by the library or for commands; many at once, because the branch of each may not answer for a while.
    fn close_at_end(&self, all: &[Mounted], end_of_jobs: Instant) {
        let close = |instance: &Instance, front: &Arc<QueueFront>| {
            match instance.jobs().stop(|| Instant::now() < end_of_jobs) {
                Some(stopped) => stopped.for_good(),
                None => instance.jobs().end(),
            }
            front.close(&self.threads);
        };
        for some in all.chunks(ENDING_MAX) {
            std::thread::scope(|scope| {
                for Mounted { instance, front, .. } in some {
                    let closing = std::thread::Builder::new().name("last-close".into());
                    // Where there are no more threads to be had, one after the other.
                    if closing.spawn_scoped(scope, || close(instance, front)).is_err() {
                        close(instance, front);
                    }
                }
            });
        }
    }

    /// Unmounts everything, whoever uses it, and flushes. Who still has something open finds it gone (`ENOTCONN`).
    ///
    /// # Errors
    /// The first failure to write something back, which is lost. Everything is unmounted all the same.
    pub fn shut_down(&self) -> Result<(), ServiceError> {
        let _last = self.changes.begin_last();
        let mut all = std::mem::take(&mut *lock(&self.instances));
        for (name, mounted) in &mut all {
            if let Err(error) = mounted.mount.detach() {
                warn!(instance = name, %error, "unmounting at the end failed");
            }
        }
        let deadline = Instant::now() + SHUTDOWN_WAIT;
        let end_of_jobs = Instant::now() + JOBS_WAIT;
        let mut left = Vec::new();
        let all: Vec<Mounted> = all.into_values().collect();
        self.close_at_end(&all, end_of_jobs);
        for Mounted { instance, mount, .. } in all {
            if !mount.wait(deadline.saturating_duration_since(Instant::now())) {
                warn!(instance = instance.name(), "the mount is still used; its users lose it");
                instance.refuse();
            }
            left.push((instance, true));
        }
        for instance in lock(&self.lingering).drain(..).filter_map(|instance| instance.upgrade()) {
            // Of one that was given up has been told.
            let is_news = !instance.is_refusing();
            instance.refuse();
            left.push((instance, is_news));
        }
        left.sort_by_key(|(_, is_news)| !is_news);
        let mut result = Ok(());
        while !left.is_empty() {
            let some = left.drain(..left.len().min(ENDING_MAX));
            let (mut all, news): (Vec<_>, Vec<_>) = some
                .map(|(instance, is_news)| {
                    let waits = instance.stack.left_behind();
                    (WindingUp::begin(instance, None), (is_news, waits))
                })
                .unzip();
            // Each has its time, and all have it at once.
            loop {
                let (mut patience, mut are_over) = (LOOK, true);
                for (winding_up, (is_news, _)) in all.iter_mut().zip(&news) {
                    let gives_up = if *is_news { Standing::is_lost } else { Standing::is_stuck };
                    if !winding_up.is_over(patience, gives_up, true) {
                        (patience, are_over) = (Duration::ZERO, false);
                    }
                }
                if are_over {
                    break;
                }
            }
            for (winding_up, (is_news, waits)) in all.into_iter().zip(news) {
                let instance = winding_up.name.clone();
                let cause = match winding_up.outcome() {
                    Ended::Well => continue,
                    Ended::Failed(_, cause) => cause,
                    Ended::GivenUp => does_not_answer(),
                };
                let told = match waits() {
                    true => ServiceError::WaitsAtEnd { instance, cause },
                    false => ServiceError::LostAtEnd { instance, cause },
                };
                result = result.and(if is_news { Err(told) } else { Ok(()) });
            }
        }
        self.builder.end();
        result
    }
}

/// Nobody works on an instance any more that is to end, unless that takes too long or is not `wanted`. Whoever calls does not have `changes`: a job may wait for a branch.
fn stop_jobs(instance: &Instance, is_wanted: &dyn Fn() -> bool) -> Option<Stopped> {
    let end = Instant::now() + JOBS_WAIT;
    instance.jobs().stop(|| is_wanted() && Instant::now() < end)
}

fn does_not_answer() -> Error {
    Error::new(Errno::ETIMEDOUT, "its branch does not answer")
}

fn not_written(instance: &Instance, cause: Error) -> ServiceError {
    ServiceError::NotWritten { path: instance.spec().mount_point.clone(), cause }
}

/// What has become of an instance that was wound up.
enum Ended {
    /// All is on the disk, and its branches are free.
    Well,
    /// Not all is; the instance, if it was to be given back.
    Failed(Option<Arc<Instance>>, Error),
    /// Its branches do not answer. It ends should they ever do.
    GivenUp,
}

/// An instance that is being wound up, on a thread of its own if there is one to be had. That lets it go, too: with its last reference all its layers end, which
/// a branch can hold up that does not answer.
struct WindingUp {
    name: String,
    /// As long as it may be given back.
    instance: Option<Arc<Instance>>,
    told: Receiver<Result<(), Error>>,
    /// The thread keeps the instance as long as there is this, so that no other reference is the last.
    keep: Option<SyncSender<()>>,
    standing: Standing,
    is_over: bool,
    outcome: Option<Result<(), Error>>,
}

impl WindingUp {
    fn begin(instance: Arc<Instance>, first: Option<u64>) -> Self {
        let standing = Standing::begin(&instance.stack);
        let (send, told) = sync_channel(1);
        let (keep, kept) = sync_channel(0);
        let (ending, tell) = (Arc::clone(&instance), send.clone());
        let wind_up_there = move || {
            let failed = |_| Err(Error::new(Errno::EIO, "its end has failed"));
            let outcome = catch_unwind(AssertUnwindSafe(|| wind_up(&ending, first))).unwrap_or_else(failed);
            // Whoever waited may have given it up.
            let _ = tell.send(outcome);
            let _: Result<(), _> = kept.recv();
            // Whoever sees the channel end may count on its branches being free.
            drop(ending);
        };
        if std::thread::Builder::new().name("last-end".into()).spawn(wind_up_there).is_err() {
            let _ = send.send(wind_up(&instance, first));
        }
        let name = instance.name().to_owned();
        Self { name, instance: Some(instance), told, keep: Some(keep), standing, is_over: false, outcome: None }
    }

    /// Has the thread let go of it, which this does before.
    fn let_go(&mut self) {
        self.instance = None;
        self.keep = None;
    }

    /// Waits for a moment; whether it has ended, or `gives_up` on the branches. It is let go when it has failed, too, if it `lets_go` of it.
    fn is_over(&mut self, patience: Duration, gives_up: fn(&Standing) -> bool, lets_go: bool) -> bool {
        if self.is_over {
            return true;
        }
        match self.told.recv_timeout(patience) {
            Ok(outcome) => {
                self.is_over = outcome.is_err() && !lets_go;
                self.outcome = Some(outcome);
                if !self.is_over {
                    self.let_go();
                    self.standing = Standing::given();
                }
            }
            Err(RecvTimeoutError::Disconnected) => {
                self.outcome.get_or_insert_with(|| Err(Error::new(Errno::EIO, "its end has failed")));
                self.is_over = true;
            }
            Err(RecvTimeoutError::Timeout) => {
                if let Some(instance) = &self.instance {
                    self.standing.look(&instance.stack);
                }
                self.is_over = gives_up(&self.standing);
                if self.is_over {
                    error!(instance = self.name, "its branch does not answer, and is not waited for");
                    self.let_go();
                }
            }
        }
        self.is_over
    }

    fn outcome(self) -> Ended {
        match self.outcome {
            Some(Ok(())) => Ended::Well,
            Some(Err(cause)) => Ended::Failed(self.instance, cause),
            None => Ended::GivenUp,
        }
    }

    /// Waits for its end, unless it `gives_up` on the branches.
    fn wait(mut self, gives_up: fn(&Standing) -> bool, lets_go: bool) -> Ended {
        while !self.is_over(LOOK, gives_up, lets_go) {}
        self.outcome()
    }
}

/// Ends it, and says what flushes have said since the one with the number `first`, too, and what nobody has heard.
fn wind_up(instance: &Instance, first: Option<u64>) -> Result<(), Error> {
    let ended = instance.wind_up();
    // A flush that goes on beside it may have been told what this was not.
    if !close(instance) {
        warn!(instance = instance.name(), "its branch does not answer");
    }
    ended
        .and(said_since(instance, first))
        .inspect(|()| info!(instance = instance.name(), "unmounted"))
        .inspect_err(|error| error!(instance = instance.name(), %error, "flushing at the end failed"))
}
