//! Locks whose holders may panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder panicked is still consistent enough to answer errors with.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
