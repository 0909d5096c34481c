//! `syncfs` and `sync`: the kernel does not ask a FUSE filesystem for either.
//!
//! The kernel's call comes first: it sends to the service what programs have changed in mappings. Then the service is asked, over the
//! session; where there is none at the moment, through a descriptor of the mount.

use super::{kernel_cancellable, on, request};
use crate::files::mount_behind;
use crate::mounts::MountPoint;
use crate::outcome::{Refusal, Served, finish};
use crate::raw;
use crate::state::Call;
use linux_raw_sys::general as sys;
use poolfs_ipc::wire::Operation;

/// `syncfs`
pub fn syncfs(descriptor: i32) -> isize {
    let by_kernel = kernel_cancellable(sys::__NR_syncfs, [descriptor as usize, 0, 0, 0, 0, 0]);
    if by_kernel != 0 {
        return by_kernel;
    }
    let Ok(call) = on() else { return by_kernel };
    match mount_behind(call, descriptor) {
        Some(mount) => sync_instance(call, &mount, || raw::sync_all(descriptor)),
        None => by_kernel,
    }
}

/// `sync`, of all instances this process can reach
pub fn sync_everything() -> isize {
    let by_kernel = kernel_cancellable(sys::__NR_sync, [0; 6]);
    if let Ok(call) = on() {
        let mut place = [0; sys::PATH_MAX as usize];
        let mut last = 0;
        while let Some(mount) = next_instance(call, last, &mut place) {
            // There is nobody to tell of an error.
            let _ = sync_instance(call, &mount, || sync_by_mount(&mount, &place));
            last = mount.id;
        }
    }
    by_kernel
}

/// The mount by which the next instance is reached; its path goes to `place`.
fn next_instance(call: Call, after: u64, place: &mut [u8]) -> Option<MountPoint> {
    let next = call.state.mounts.with_waiting(call.began.frame, |table| {
        let next = table.next_instance(after)?;
        let path = table.place(next);
        place.fill(0);
        // A path the kernel takes is shorter than the room. Of another one only the session can be used.
        if let Some(room) = place.get_mut(..path.len() + 1) {
            room[..path.len()].copy_from_slice(path);
        }
        Some(*next)
    });
    next.flatten()
}

fn sync_instance(call: Call, mount: &MountPoint, by_mount: impl FnOnce() -> Result<(), i32>) -> isize {
    match sync_by_session(call, mount) {
        Err(Refusal::Kernel) => by_mount().map_or_else(|errno| -(errno as isize), |()| 0),
        // Of what is not ours the kernel has done all there is.
        served => finish(served, || 0),
    }
}

fn sync_by_session(call: Call, mount: &MountPoint) -> Served<usize> {
    let instance = mount.instance().ok_or(Refusal::Foreign)?;
    let session = call.state.sessions.enter(call.began, instance).ok_or(Refusal::Kernel)?;
    if !session.serves(mount) {
        return Err(Refusal::Foreign);
    }
    let mut borrowed = session.borrow()?;
    session.execute(&mut borrowed, &request(Operation::SyncAll)).map(|_| 0)
}

/// Asks the service through the mount at `path`. Nothing but files and directories is opened: opening a device does something.
fn sync_by_mount(mount: &MountPoint, path: &[u8]) -> Result<(), i32> {
    let opened = raw::open(path, sys::O_PATH | sys::O_NOFOLLOW | sys::O_CLOEXEC, 0)?;
    let found = raw::statx_descriptor(opened);
    raw::close(opened);
    let found = found?;
    let is_it = found.stx_mnt_id == mount.id && (found.stx_dev_major, found.stx_dev_minor) == mount.device;
    if !is_it || !matches!(u32::from(found.stx_mode) & sys::S_IFMT, sys::S_IFREG | sys::S_IFDIR) {
        return Err(linux_raw_sys::errno::ENODEV.cast_signed());
    }
    let descriptor = raw::open(path, sys::O_RDONLY | sys::O_NOFOLLOW | sys::O_NONBLOCK | sys::O_CLOEXEC, 0)?;
    let done = raw::sync_all(descriptor);
    raw::close(descriptor);
    done
}
