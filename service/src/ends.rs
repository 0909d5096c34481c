//! Mounts that end without the service: by `umount(8)`, by the last user of a detached mount, or by an aborted connection.

use crate::sync::lock;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Told that a mount has ended, by any thread; waited for by the one that ends what is behind it.
#[derive(Default)]
pub(crate) struct Ends {
    is_told: Mutex<bool>,
    changed: Condvar,
}

impl Ends {
    /// Somebody should look. Waits for nothing.
    pub(crate) fn tell(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until it was told since the last time, or for so long.
    pub(crate) fn wait(&self, time_max: Option<Duration>) {
        let is_told = self.lock();
        let mut is_told = match time_max {
            None => self.changed.wait_while(is_told, |told| !*told).unwrap_or_else(PoisonError::into_inner),
            Some(time_max) => {
                let waited = self.changed.wait_timeout_while(is_told, time_max, |told| !*told);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        *is_told = false;
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        lock(&self.is_told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_told_before_it_waits_does_not_wait() {
        let ends = Ends::default();
        ends.tell();
        ends.wait(None);
        ends.wait(Some(Duration::ZERO));
        std::thread::scope(|scope| {
            scope.spawn(|| ends.wait(None));
            ends.tell();
        });
    }
}
