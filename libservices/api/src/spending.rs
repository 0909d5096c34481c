//! Per-thread attribution of backend space: the user on whose behalf the calling thread allocates.
//!
//! Filesystems reserve a part of their blocks for root. The service is root and works for users. A layer that stores something
//! therefore asks here for whom the thread works, and has the filesystem treat the allocation as that user's. The user is state
//! of the thread and no argument of each call, because most of what a request costs is not its own call: a copy-up, a table, a
//! journal. Data that was accepted earlier is the service's to store, whichever request finds it waiting: see
//! [`Spending::of_service`].

use std::cell::Cell;
use std::marker::PhantomData;

/// The service itself: root.
const SERVICE: u32 = 0;

thread_local! {
    static USER: Cell<u32> = const { Cell::new(SERVICE) };
}

/// As long as it is there, the thread that made it takes room for somebody else than before.
#[must_use]
pub struct Spending {
    before: u32,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Spending {
    /// For this user of the host.
    pub fn of_user(uid: u32) -> Self {
        Self { before: USER.replace(uid), _thread: PhantomData }
    }

    /// For the service: what it has accepted goes where there is any room at all.
    pub fn of_service() -> Self {
        Self::of_user(SERVICE)
    }

    /// The user for whom the calling thread takes room; nothing for root.
    #[must_use]
    pub fn user() -> Option<u32> {
        Some(USER.get()).filter(|&user| user != SERVICE)
    }
}

impl Drop for Spending {
    fn drop(&mut self) {
        USER.set(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_counts_and_only_in_its_thread() {
        let _user = Spending::of_user(1000);
        {
            let _service = Spending::of_service();
            assert_eq!(Spending::user(), None);
        }
        assert_eq!(Spending::user(), Some(1000));
        assert_eq!(std::thread::spawn(Spending::user).join().expect("no panic"), None);
    }
}
