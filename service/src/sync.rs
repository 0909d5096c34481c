//! Locks that go on after a panic of who had them.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks it, also after a panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
