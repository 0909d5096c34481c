//! Lock helpers that ignore poisoning after a panic of the holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks it, also after a panic.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
