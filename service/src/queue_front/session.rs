//! The state of a session: the client's credentials, and the files it adopted.

use crate::access::Credentials;
use crate::handles::OpenFile;
use crate::queue_front::credentials::{effective_credentials, least_credentials, real_credentials};
use crate::queue_front::view::{Shown, View};
use hashbrown::HashMap;
use poolfs_ipc::posts::POST_SLOTS;
use poolfs_ipc::service::PeerFacts;
use poolfs_libservice::Taken;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Most files one session can have adopted; the rest goes through the kernel.
pub const HANDLES_PER_SESSION_MAX: usize = 1 << 15;

/// Keeps record of which sessions have handles on which files.
pub(super) trait HandleRecord: Send + Sync {
    /// A session has ended that had these handles.
    fn let_go(&self, handles: HashMap<u64, Arc<OpenFile>>);
}

/// A session's credentials and handles.
pub struct SessionState {
    effective: Credentials,
    real: Credentials,
    least: Credentials,
    handles: RwLock<HashMap<u64, Arc<OpenFile>>>,
    /// Whether all of them were taken back for good.
    has_let_go: AtomicBool,
    /// Where its handles are recorded; nowhere for one by itself.
    record: Option<Arc<dyn HandleRecord>>,
    /// How it is looked what the client sees of the instance; nothing where that is not to be looked at.
    view: Option<Arc<View>>,
    /// Bit n: slot n is that of a file whose writes may be posted.
    post_slots: AtomicU32,
    post_epochs: AtomicU32,
    _room: (Option<Taken>, Option<Taken>),
}

impl SessionState {
    /// The state of a new session, for which, and for what is kept of its client, there is `room`.
    #[must_use]
    pub(super) fn new(
        facts: &PeerFacts,
        record: Option<Arc<dyn HandleRecord>>,
        view: Option<Arc<View>>,
        room: (Option<Taken>, Option<Taken>),
    ) -> Self {
        let effective = effective_credentials(facts);
        let real = real_credentials(&effective, facts);
        let least = least_credentials();
        let (handles, has_let_go) = Default::default();
        let (post_slots, post_epochs) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { effective, real, least, handles, has_let_go, record, view, post_slots, post_epochs, _room: room }
    }

    /// A session with the same credentials for all purposes.
    #[must_use]
    pub fn of(credentials: Credentials) -> Self {
        Self {
            real: credentials.clone(),
            effective: credentials,
            least: least_credentials(),
            handles: RwLock::default(),
            has_let_go: AtomicBool::new(false),
            record: None,
            view: None,
            post_slots: AtomicU32::new(0),
            post_epochs: AtomicU32::new(0),
            _room: (None, None),
        }
    }

    /// What the client sees of the instance by the kernel, as of the last look; nothing where that is not to be looked at.
    #[must_use]
    pub fn shown(&self) -> Option<Arc<Shown>> {
        self.view.as_ref().map(|view| view.shown())
    }

    /// What the client sees of the instance by the kernel.
    #[cfg(test)]
    pub(super) fn view(&self) -> Option<&View> {
        self.view.as_deref()
    }

    /// Who asks.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.effective
    }

    /// Who asks `access`.
    #[must_use]
    pub fn real_credentials(&self) -> &Credentials {
        &self.real
    }

    /// Nobody, for what was asked by who has other rights since.
    #[must_use]
    pub fn least_credentials(&self) -> &Credentials {
        &self.least
    }

    /// The file behind a handle.
    #[must_use]
    pub fn file(&self, handle: u64) -> Option<Arc<OpenFile>> {
        self.handles.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    /// All files it has handles on.
    #[must_use]
    pub fn files(&self) -> Vec<Arc<OpenFile>> {
        self.handles.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Gives the session a handle on `file`, unless it has too many; returns the handle.
    pub fn adopt(&self, file: &Arc<OpenFile>) -> Option<u64> {
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        if handles.len() >= HANDLES_PER_SESSION_MAX && !handles.contains_key(&file.key()) {
            return None;
        }
        handles.insert(file.key(), Arc::clone(file));
        Some(file.key())
    }

    /// A slot for one more file whose writes may be posted.
    pub(super) fn take_post_slot(&self) -> Option<usize> {
        let taken = self.post_slots.fetch_update(Ordering::AcqRel, Ordering::Acquire, |slots| {
            let free = slots.trailing_ones() as usize;
            (free < POST_SLOTS).then_some(slots | 1 << free)
        });
        taken.ok().map(|before| before.trailing_ones() as usize)
    }

    /// Gives it back.
    pub(super) fn give_post_slot(&self, slot: usize) {
        self.post_slots.fetch_and(!(1 << slot), Ordering::AcqRel);
    }

    /// What tells a grant in a slot from earlier ones; never 0.
    pub(super) fn next_post_epoch(&self) -> u32 {
        let before = self
            .post_epochs
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |epoch| Some(epoch.checked_add(1).unwrap_or(1)));
        let (Ok(before) | Err(before)) = before;
        before.checked_add(1).unwrap_or(1)
    }

    /// Takes all handles back, for good.
    pub(super) fn let_go(&self) -> Vec<Arc<OpenFile>> {
        let mut handles = self.handles.write().unwrap_or_else(PoisonError::into_inner);
        self.has_let_go.store(true, Ordering::Release);
        std::mem::take(&mut *handles).into_values().collect()
    }

    /// Whether [`SessionState::let_go`] was called: what it has no handle for any more, it may have had one for.
    pub(super) fn has_let_go(&self) -> bool {
        self.has_let_go.load(Ordering::Acquire)
    }

    /// Takes a handle back.
    pub(super) fn release(&self, handle: u64) {
        self.handles.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
    }
}

impl Drop for SessionState {
    fn drop(&mut self) {
        if let Some(record) = &self.record {
            record.let_go(std::mem::take(self.handles.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(real_uid: u32) -> PeerFacts {
        PeerFacts {
            process: 1,
            uid: 0,
            gid: 0,
            real_uid,
            real_gid: 7,
            groups: vec![3],
            capabilities: 6,
            permitted: 15,
            user_namespace: None,
        }
    }

    #[test]
    fn access_is_asked_by_the_real_ids() {
        let root = SessionState::new(&facts(0), None, None, (None, None));
        assert_eq!((root.credentials().capabilities, root.real_credentials().capabilities), (6, 15));
        let user = SessionState::new(&facts(1000), None, None, (None, None));
        let real = user.real_credentials();
        assert_eq!((real.uid, real.gid, real.capabilities), (1000, 7, 0));
        assert_eq!((user.credentials().uid, &user.credentials().groups), (0, &real.groups));
    }
}
