//! Which sessions have handles on which files.

use crate::handles::OpenFile;
use crate::queue_front::session::SessionState;
use hashbrown::HashMap;
use poolfs_ipc::service::Session;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

type Sessions = Vec<Weak<Session<SessionState>>>;

/// The adopted files of an instance, by key. Bounded by the open files of the instance and the handles of its sessions.
///
/// No session may end while the table is locked, because its end locks the table: hence weak references, which are never
/// made strong under the lock.
#[derive(Default)]
pub struct Adoptions(Mutex<HashMap<u64, Sessions>>);

impl Adoptions {
    fn table(&self) -> MutexGuard<'_, HashMap<u64, Sessions>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `session` a handle on `file`, unless it has too many or the file was given up.
    pub(super) fn adopt(&self, session: &Arc<Session<SessionState>>, file: &Arc<OpenFile>) -> Option<u64> {
        let mut table = self.table();
        if !file.set_adopted(true) {
            return None;
        }
        let Some(handle) = session.content().adopt(file) else {
            if !table.contains_key(&file.key()) {
                file.set_adopted(false);
            }
            return None;
        };
        let sessions = table.entry(file.key()).or_default();
        sessions.retain(|other| other.strong_count() > 0);
        if !sessions.iter().any(|other| other.as_ptr() == Arc::as_ptr(session)) {
            sessions.push(Arc::downgrade(session));
        }
        Some(handle)
    }

    /// The kernel has closed `file`, or it was given up: all handles on it end.
    pub(super) fn released(&self, file: &OpenFile) {
        let sessions = self.table().remove(&file.key()).unwrap_or_default();
        for session in sessions.iter().filter_map(Weak::upgrade) {
            session.content().release(file.key());
        }
    }

    /// A session has ended that had handles on `files`.
    pub(super) fn let_go(&self, files: impl Iterator<Item = Arc<OpenFile>>) {
        let mut table = self.table();
        // Kept until the table is unlocked: the last user of a file closes it in the layers.
        let mut ended = Vec::new();
        for file in files {
            if let Some(sessions) = table.get_mut(&file.key()) {
                sessions.retain(|session| session.strong_count() > 0);
                if sessions.is_empty() {
                    table.remove(&file.key());
                    file.set_adopted(false);
                }
            }
            ended.push(file);
        }
        drop(table);
        drop(ended);
    }
}
