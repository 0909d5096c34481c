//! What stands against posting: in a file and how it is open, or in the state of the branches.

use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::stack::Stack;
use poolfs_libservice::types::OpenFlags;
use poolfs_service_protocol::NotPosted;

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

/// What may make a write to a stack wait, or fail, before long.
pub(super) fn strain_of(stack: &Stack) -> Option<NotPosted> {
    if !stack.is_at_ease() {
        Some(NotPosted::Slow)
    } else if !stack.knows_few_places() {
        Some(NotPosted::Limit)
    } else {
        None
    }
}
