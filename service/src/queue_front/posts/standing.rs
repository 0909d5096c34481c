//! The reported state of a file's writes: whether they may be posted, and the reason if they may not.

use crate::handles::OpenFile;
use crate::queue_front::posts::Posts;
use crate::queue_front::posts::granted::Granted;
use crate::queue_front::posts::obstacle::obstacle;
use crate::queue_front::session::SessionState;
use poolfs_ipc::service::Session;
use poolfs_service_protocol::{NotPosted, WriteStatus};
use std::sync::{Arc, PoisonError};

impl Posts {
    /// How the writes of a file by a session are taken now. Asks no branch.
    pub(in crate::queue_front) fn standing(
        &self,
        session: &Arc<Session<SessionState>>,
        file: &Arc<OpenFile>,
    ) -> WriteStatus {
        let is_its = |granted: &Arc<Granted>| {
            Arc::ptr_eq(&granted.session, session) && Arc::ptr_eq(&granted.file, file) && !granted.is_revoked()
        };
        let granted = self.grants.read().unwrap_or_else(PoisonError::into_inner).iter().any(is_its);
        let obstacle = || {
            let instance = self.instance.upgrade()?;
            let is_shared = || (!instance.nodes().may_post(file.node())).then_some(NotPosted::Shared);
            obstacle(&instance, file).or_else(is_shared).or_else(|| file.not_posted())
        };
        let not_posted = if granted || !file.flags().writable() { None } else { obstacle() };
        WriteStatus { granted, posted_requests: file.posted(), not_posted }
    }
}
