//! The reported state of a file's writes: whether they may be posted, and the reason if they may not.

use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::queue_front::posts::Posts;
use crate::queue_front::posts::granted::Granted;
use crate::queue_front::session::SessionState;
use poolfs_ipc::service::Session;
use poolfs_libservice::types::OpenFlags;
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

/// What stands against posting a file's writes whatever is written, by what is known without asking its branch.
pub(super) fn obstacle(instance: &Instance, file: &OpenFile) -> Option<NotPosted> {
    let waits = OpenFlags::DIRECT | OpenFlags::FILE_SYNC | OpenFlags::DATA_SYNC;
    // A write that has returned cannot fail when its time is over.
    if instance.spec().wait_for_writes || instance.spec().timeout.is_some() {
        Some(NotPosted::Switched)
    } else if instance.is_shared() || instance.timed().is_some() {
        Some(NotPosted::SharedBranch)
    } else if file.flags().intersects(waits) {
        Some(NotPosted::Flags)
    } else {
        (!file.is_unshared()).then_some(NotPosted::Shared)
    }
}
