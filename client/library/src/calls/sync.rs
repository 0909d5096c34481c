//! Making everything durable: what the kernel does not ask a FUSE filesystem for.
//!
//! The kernel comes first: what programs have changed in mappings it sends to the service.

use super::{kernel_cancellable, on, request};
use crate::files::mount_behind;
use crate::mounts::{Freshness, MountPoint};
use crate::outcome::{Refusal, Served, finish};
use crate::session::INSTANCES_MAX;
use crate::state::Call;
use linux_raw_sys::general as sys;
use poolfs_ipc::wire::Operation;

/// `syncfs`
pub fn syncfs(descriptor: i32) -> isize {
    let by_kernel = kernel_cancellable(sys::__NR_syncfs, [descriptor as usize, 0, 0, 0, 0, 0]);
    if by_kernel != 0 {
        return by_kernel;
    }
    let served = || {
        let call = on()?;
        sync_instance(call, &mount_behind(call, descriptor).ok_or(Refusal::Foreign)?)
    };
    finish(served(), || by_kernel)
}

/// `sync`, of all instances this process can reach
pub fn sync_everything() -> isize {
    let by_kernel = kernel_cancellable(sys::__NR_sync, [0; 6]);
    if let Ok(call) = on() {
        // There is nobody to tell of an error.
        for mount in instances(call).into_iter().flatten() {
            let _ = finish(sync_instance(call, &mount), || by_kernel);
        }
    }
    by_kernel
}

/// A mount of each instance.
fn instances(call: Call) -> [Option<MountPoint>; INSTANCES_MAX] {
    let mut found = [None; INSTANCES_MAX];
    call.state.mounts.with(call.frame, Freshness::Exact, |table| {
        for mount in table.points().iter().filter(|mount| mount.instance().is_some()) {
            let is_known = |known: &Option<MountPoint>| known.is_some_and(|known| known.instance() == mount.instance());
            if found.iter().any(is_known) {
                continue;
            }
            let Some(room) = found.iter_mut().find(|place| place.is_none()) else { return };
            *room = Some(*mount);
        }
    });
    found
}

fn sync_instance(call: Call, mount: &MountPoint) -> Served<usize> {
    let instance = mount.instance().ok_or(Refusal::Foreign)?;
    let session = call.state.sessions.enter(call, instance).ok_or(Refusal::Kernel)?;
    if !session.serves(mount) {
        return Err(Refusal::Foreign);
    }
    let mut borrowed = session.borrow()?;
    session.execute(&mut borrowed, &request(Operation::SyncAll)).map(|_| 0)
}
