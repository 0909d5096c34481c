//! The steps that end an instance: what it has accepted is flushed, its mount is taken from its place, and what is left ends with its last user.

use super::{Mounted, Service, lock};
use crate::failures::ServiceError;
use crate::instance::Instance;
use crate::legacy::{LegacyMount, MountError};
use poolfs_libservice::Error;
use poolfs_service_protocol::Ending;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// How long an unmount waits for the kernel to let go, before the rest is left to the background.
const UNMOUNT_WAIT: Duration = Duration::from_secs(5);

/// The same when the whole service ends: then nobody is waited for much longer than a program needs to notice.
const SHUTDOWN_WAIT: Duration = Duration::from_millis(500);

/// How long an unmount of a busy mount is repeated: a program that has just ended may hold it for a moment.
const BUSY_WAIT: Duration = Duration::from_millis(500);
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// How long what is forced waits for a branch that takes nothing.
const FORCED_FLUSH_WAIT: Duration = Duration::from_secs(10);

impl Service {
    /// Flushes and unmounts an instance. One that does not exist (any more) is fine; one that is about to be mounted will not be.
    ///
    /// # Errors
    /// It is still mounted then, unless the error says that something is lost.
    pub fn unmount(&self, name: &str, ending: Ending) -> Result<(), ServiceError> {
        let mut one_at_a_time = self.changes.begin();
        if one_at_a_time.give_up(name) {
            info!(instance = name, "its mount is given up");
            return Ok(());
        }
        drop(one_at_a_time);
        // Beside what others do: it may take long, or for ever.
        let is_stuck = match ending {
            Ending::Orderly | Ending::Detached => {
                self.flush(name)?;
                false
            }
            Ending::Forced => self.is_stuck(name),
            Ending::Discarded => false,
        };
        let _one_at_a_time = self.changes.begin();
        if is_stuck { self.abandon(name) } else { self.end_instance(name, ending) }
    }

    /// Brings what an instance has accepted to the disk. One that does not exist (any more) is fine.
    ///
    /// # Errors
    /// The branch does not take it.
    pub fn flush(&self, name: &str) -> Result<(), ServiceError> {
        let Some(instance) = self.instance(name) else { return Ok(()) };
        instance.layer().sync().map_err(|cause| not_written(&instance, cause))
    }

    /// Whether the branch of an instance takes nothing any more of what was written.
    fn is_stuck(&self, name: &str) -> bool {
        let Some(instance) = self.instance(name) else { return false };
        let (send, flushed) = sync_channel(1);
        let flushing = Arc::clone(&instance);
        let flush = move || send.send(flushing.layer().sync().is_ok());
        let spawned = std::thread::Builder::new().name("last-flush".into()).spawn(flush);
        spawned.is_ok() && stands_still(&flushed, FORCED_FLUSH_WAIT, || instance.stack.pending_bytes())
    }

    /// Takes the mount of an instance away whose branch does not answer. The rest ends in the background, should it ever answer. Whoever calls has `changes`.
    fn abandon(&self, name: &str) -> Result<(), ServiceError> {
        let Some(instance) = self.instance(name) else { return Ok(()) };
        error!(instance = name, "its branch does not answer: unmounted all the same, as was asked for");
        instance.stack.discard();
        if let Some(mounted) = self.take_away(name, Ending::Forced)? {
            mounted.front.close(&self.threads);
            self.leave_behind(mounted.instance, mounted.mount);
        }
        Ok(())
    }

    /// Ends the instances whose mounts others have taken away. Whether one stays, because what was written to it cannot be put on the
    /// disk. Whoever calls has `changes`.
    pub(super) fn end_unmounted(&self) -> bool {
        let over = |mounted: &Mounted| mounted.mount.is_over();
        let names: Vec<String> =
            lock(&self.instances).iter().filter(|(_, mounted)| over(mounted)).map(|(name, _)| name.clone()).collect();
        let mut is_left = false;
        for name in names {
            info!(instance = name, "its mount was taken away");
            if let Err(error) = self.end_instance(&name, Ending::Orderly) {
                warn!(instance = name, %error, "an instance without a mount stays");
                is_left = true;
            }
        }
        is_left
    }

    /// Flushes and unmounts an instance. Whoever calls has `changes`.
    fn end_instance(&self, name: &str, ending: Ending) -> Result<(), ServiceError> {
        let Some(instance) = self.instance(name) else { return Ok(()) };
        let stopped = instance.jobs().stop();
        if ending == Ending::Discarded {
            instance.stack.discard();
        }
        if let Err(cause) = instance.layer().sync() {
            let error = not_written(&instance, cause);
            if !ending.is_forced() {
                return Err(error);
            }
            warn!(instance = name, %error, "unmounted all the same, as was asked for");
        }
        match self.take_away(name, ending)? {
            Some(mounted) => {
                stopped.for_good();
                self.linger(mounted, ending)
            }
            None => Ok(()),
        }
    }

    /// Takes the mount of an instance from its place.
    fn take_away(&self, name: &str, ending: Ending) -> Result<Option<Mounted>, ServiceError> {
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
                Err(MountError::Busy { .. }) if ending != Ending::Orderly => mounted.mount.detach(),
                other => other,
            };
            taken?;
            return Ok(instances.remove(name));
        }
    }

    /// After the mount is gone from its place: waits for its last users, then flushes. Whoever has files of it open in another mount
    /// namespace keeps the instance, if it is to end in order; a mount that is only seen there goes on in the background until the service
    /// ends.
    fn linger(&self, mounted: Mounted, ending: Ending) -> Result<(), ServiceError> {
        mounted.front.close(&self.threads);
        let is_over = mounted.mount.wait(UNMOUNT_WAIT);
        let files = mounted.instance.handles.len();
        if !is_over && ending == Ending::Orderly && files > 0 {
            let path = mounted.instance.spec().mount_point.clone();
            lock(&self.instances).insert(mounted.instance.name().to_owned(), mounted);
            return Err(ServiceError::UsedElsewhere { path, files });
        }
        let Mounted { instance, mount, .. } = mounted;
        if is_over {
            return match wind_up(&instance) {
                Err(cause) if !ending.is_forced() => Err(self.mount_again(&instance, cause)),
                _ => Ok(()),
            };
        }
        warn!(instance = instance.name(), "the mount is still used elsewhere and ends with its last user");
        self.leave_behind(instance, mount);
        Ok(())
    }

    /// What is gone from its place ends in the background, with its last user.
    fn leave_behind(&self, instance: Arc<Instance>, mount: LegacyMount) {
        let mut lingering = lock(&self.lingering);
        lingering.retain(|instance| instance.strong_count() > 0);
        lingering.push(Arc::downgrade(&instance));
        drop(lingering);
        let spawned = std::thread::Builder::new().name("lingering".into()).spawn(move || {
            while !mount.wait(Duration::from_secs(3600)) {}
            // What fails is in the log: whoever asked for the unmount has had an answer.
            let _ = wind_up(&instance);
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
        let mut result = Ok(());
        let mut end = |instance: &Instance| {
            let lost = |cause| ServiceError::LostAtEnd { instance: instance.name().to_owned(), cause };
            let ended = wind_up(instance).map_err(lost);
            if result.is_ok() {
                result = ended;
            }
        };
        let deadline = Instant::now() + SHUTDOWN_WAIT;
        for Mounted { instance, mount, front } in all.into_values() {
            instance.jobs().stop().for_good();
            front.close(&self.threads);
            if !mount.wait(deadline.saturating_duration_since(Instant::now())) {
                warn!(instance = instance.name(), "the mount is still used; its users lose it");
                instance.refuse();
            }
            end(&instance);
        }
        for instance in lock(&self.lingering).drain(..).filter_map(|instance| instance.upgrade()) {
            instance.refuse();
            end(&instance);
        }
        self.builder.end();
        result
    }
}

/// Whether what is `awaited` neither comes nor comes nearer for so long, by what is `left` to be done.
fn stands_still<T>(awaited: &Receiver<T>, longest: Duration, left: impl Fn() -> u64) -> bool {
    let mut before = left();
    while let Err(RecvTimeoutError::Timeout) = awaited.recv_timeout(longest) {
        let now = left();
        if now >= before {
            return true;
        }
        before = now;
    }
    false
}

fn not_written(instance: &Instance, cause: Error) -> ServiceError {
    ServiceError::NotWritten { path: instance.spec().mount_point.clone(), cause }
}

fn wind_up(instance: &Instance) -> Result<(), Error> {
    instance
        .wind_up()
        .inspect(|()| info!(instance = instance.name(), "unmounted"))
        .inspect_err(|error| error!(instance = instance.name(), %error, "flushing at the end failed"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn what_goes_on_is_waited_for_and_what_stands_still_is_not() {
        const LONGEST: Duration = Duration::from_millis(1);
        let (send, awaited) = sync_channel(1);
        let left = Cell::new(5);
        let goes_on = || {
            left.set(left.get() - 1);
            if left.get() == 0 {
                send.send(()).expect("room");
            }
            left.get()
        };
        assert!(!stands_still(&awaited, LONGEST, goes_on));
        assert_eq!(left.get(), 0, "it came when all was done");
        assert!(stands_still(&awaited, LONGEST, || 7));
        drop(send);
        assert!(!stands_still(&awaited, LONGEST, || 7), "whoever did it has ended");
    }
}
