//! Adoptions: which sessions have handles on which files.

use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::queue_front::session::{HandleRecord, SessionState};
use crate::sync::lock;
use hashbrown::HashMap;
use poolfs_ipc::service::Session;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

type Sessions = Vec<Weak<Session<SessionState>>>;

/// Most handles all sessions of an instance have together: one file can be adopted by many of them.
pub const HANDLES_OF_SESSIONS_MAX: usize = 1 << 18;

/// The adopted files of an instance, by key. Bounded by the open files of the instance and the handles of its sessions.
///
/// No session may end while the table is locked, because its end locks the table: hence weak references, which are never
/// made strong under the lock.
#[derive(Default)]
pub struct Adoptions {
    table: Mutex<Table>,
    /// Whose files they are; nobody's in tests.
    instance: Weak<Instance>,
}

#[derive(Default)]
struct Table {
    files: HashMap<u64, Sessions>,
    /// Sessions of all files.
    handles: usize,
}

impl Table {
    /// Forgets the sessions of a file that have ended; whether it has others.
    fn tidy(&mut self, key: u64) -> bool {
        self.retain(key, |session| session.strong_count() > 0)
    }

    /// Forgets all sessions of a file but some; whether it has any.
    fn retain(&mut self, key: u64, stays: impl FnMut(&Weak<Session<SessionState>>) -> bool) -> bool {
        let Some(sessions) = self.files.get_mut(&key) else { return false };
        let before = sessions.len();
        sessions.retain(stays);
        self.handles -= before - sessions.len();
        let others = !sessions.is_empty();
        if !others {
            self.files.remove(&key);
        }
        others
    }
}

impl Adoptions {
    /// Those of an instance.
    pub(super) fn of(instance: Weak<Instance>) -> Self {
        Self { table: Mutex::default(), instance }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Gives `session` a handle on `file`, unless it is about to end, it or all sessions have too many, or the file was given up. Its client
    /// vouches that the description is `unshared`, or not.
    pub(super) fn adopt(
        &self,
        session: &Arc<Session<SessionState>>,
        file: &Arc<OpenFile>,
        unshared: bool,
    ) -> Option<u64> {
        let mut table = self.table();
        let adopted = table.tidy(file.key());
        if !file.set_adopted(true) {
            return None;
        }
        let is_own = |other: &Weak<Session<SessionState>>| other.as_ptr() == Arc::as_ptr(session);
        let known = table.files.get(&file.key()).is_some_and(|sessions| sessions.iter().any(is_own));
        // One that is about to end may have let go of all that it had.
        let room = !session.is_dismissed() && (known || table.handles < HANDLES_OF_SESSIONS_MAX);
        let Some(handle) = room.then(|| session.content().adopt(file)).flatten() else {
            if !adopted {
                file.set_adopted(false);
            }
            return None;
        };
        let sessions = table.files.entry(file.key()).or_default();
        if !known {
            sessions.push(Arc::downgrade(session));
        }
        let mut ends_unshared = false;
        if unshared && sessions.len() == 1 {
            file.vouch_unshared();
        } else {
            ends_unshared = file.share();
        }
        table.handles += usize::from(!known);
        drop(table);
        if ends_unshared {
            self.tell_size(file);
        }
        Some(handle)
    }

    /// From here on somebody may go by the size of `file` that the kernel knows.
    fn tell_size(&self, file: &OpenFile) {
        if let Some(instance) = self.instance.upgrade() {
            instance.tell_size_later(file.node());
        }
    }

    /// The kernel has closed `file`, or it was given up: all handles on it end.
    pub(super) fn released(&self, file: &OpenFile) {
        let sessions = {
            let mut table = self.table();
            let sessions = table.files.remove(&file.key()).unwrap_or_default();
            table.handles -= sessions.len();
            sessions
        };
        for session in sessions.iter().filter_map(Weak::upgrade) {
            session.content().release(file.key());
        }
    }

    /// A session is over, and lets go of all its files, which the caller drops.
    pub(super) fn session_over(&self, session: &Arc<Session<SessionState>>) -> Vec<Arc<OpenFile>> {
        let mut table = self.table();
        let files = session.content().let_go();
        for file in &files {
            if !table.retain(file.key(), |other| other.as_ptr() != Arc::as_ptr(session)) {
                file.set_adopted(false);
            }
        }
        files
    }
}

impl HandleRecord for Adoptions {
    fn let_go(&self, handles: HashMap<u64, Arc<OpenFile>>) {
        let mut table = self.table();
        // Kept until the table is unlocked: the last user of a file closes it in the layers.
        let mut ended = Vec::new();
        let mut untold = Vec::new();
        for file in handles.into_values() {
            let was_unshared = file.is_unshared();
            let was_adopted = table.files.contains_key(&file.key());
            if was_adopted && !table.tidy(file.key()) {
                file.set_adopted(false);
            }
            if was_unshared {
                untold.push(Arc::clone(&file));
            }
            ended.push(file);
        }
        drop(table);
        untold.iter().for_each(|file| self.tell_size(file));
        drop(ended);
    }
}
