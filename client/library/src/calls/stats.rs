//! `stat` in its forms, and `access`.
//!
//! What the kernel knows of names and attributes is true (the service tells it of every change before it answers), costs a tenth
//! of a request, and serves the next `open` of the name: paths are its. So are descriptors, except of files that this process
//! may be changing by requests: there the kernel would have to be told of every change for nothing but the next look.

use super::descriptors::{EBADF, is_own};
use super::{by_file, kernel, on_descriptor, request};
use crate::descriptors::Known;
use crate::files::open_file;
use crate::memory::{UserMemory, UserPath};
use crate::mounts::MountPoint;
use crate::outcome::{Refusal, Served, finish};
use crate::paths::Extra;
use crate::state::state;
use linux_raw_sys::general as sys;
use poolfs_ipc::OWN_DESCRIPTOR_MIN;
use poolfs_ipc::wire::{Operation, WireAttributes};
use poolfs_types::limits::BLOCK_SIZE;

/// `fstat`. Who tries every number to find out what is open does not find our own descriptors.
pub fn fstat(descriptor: i32, out: UserMemory) -> isize {
    finish(stat_changing(descriptor, out), || {
        if descriptor >= OWN_DESCRIPTOR_MIN && state().is_some_and(|state| is_own(state, descriptor)) {
            return -EBADF;
        }
        kernel(sys::__NR_fstat, [descriptor as usize, out.address(), 0, 0, 0, 0])
    })
}

/// `fstat` of a file that this process may be changing by requests.
fn stat_changing(descriptor: i32, out: UserMemory) -> Served<usize> {
    let call = on_descriptor(descriptor)?;
    let seen = call.state.descriptors.look(descriptor).ok_or(Refusal::Foreign)?;
    let is_changing = matches!(seen.known, Known::Adopted(adopted) if adopted.flags & sys::O_ACCMODE != sys::O_RDONLY);
    if !is_changing || out.is_impossible() {
        return Err(Refusal::Foreign);
    }
    let file = open_file(call, descriptor)?;
    let request = request(Operation::Stat);
    let mut taken = false;
    by_file(call, &file, &request, &Extra::default(), &mut |reply, _, mount| {
        taken = out.put(stat_of(&reply.attributes, mount));
    })?;
    if taken { Ok(0) } else { Err(Refusal::Kernel) }
}

/// `fstatat`; `stat` and `lstat` are special cases
pub fn fstatat(descriptor: i32, path: UserPath, out: UserMemory, flags: i32) -> isize {
    kernel(sys::__NR_newfstatat, [descriptor as usize, path.address(), out.address(), flags as usize, 0, 0])
}

/// `faccessat` with the flags of the newer call; `access` and `euidaccess` are special cases
pub fn faccessat(descriptor: i32, path: UserPath, mode: i32, flags: i32) -> isize {
    if flags == 0 {
        return kernel(sys::__NR_faccessat, [descriptor as usize, path.address(), mode as usize, 0, 0, 0]);
    }
    kernel(sys::__NR_faccessat2, [descriptor as usize, path.address(), mode as usize, flags as usize, 0, 0])
}

/// The kernel's encoding of a device number, as `st_dev` has it.
fn device_number((major, minor): (u32, u32)) -> u64 {
    u64::from(minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12)
}

fn stat_of(attributes: &WireAttributes, mount: &MountPoint) -> sys::stat {
    let [accessed, modified, changed] = attributes.seconds.map(|seconds| seconds as u64);
    let [accessed_ns, modified_ns, changed_ns] = attributes.nanoseconds.map(u64::from);
    sys::stat {
        st_dev: device_number(mount.device),
        st_ino: attributes.inode,
        st_nlink: u64::from(attributes.links),
        st_mode: attributes.mode,
        st_uid: attributes.uid,
        st_gid: attributes.gid,
        __pad0: 0,
        st_rdev: u64::from(attributes.device),
        st_size: attributes.size as i64,
        st_blksize: BLOCK_SIZE as i64,
        st_blocks: attributes.blocks as i64,
        st_atime: accessed,
        st_atime_nsec: accessed_ns,
        st_mtime: modified,
        st_mtime_nsec: modified_ns,
        st_ctime: changed,
        st_ctime_nsec: changed_ns,
        __unused: [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_libcs_layout() {
        assert_eq!(size_of::<sys::stat>(), size_of::<libc::stat>());
        assert_eq!(core::mem::offset_of!(sys::stat, st_size), core::mem::offset_of!(libc::stat, st_size));
        assert_eq!(core::mem::offset_of!(sys::stat, st_ctime_nsec), core::mem::offset_of!(libc::stat, st_ctime_nsec));
        assert_eq!(core::mem::offset_of!(sys::stat, st_rdev), core::mem::offset_of!(libc::stat, st_rdev));
    }

    #[test]
    fn device_numbers_are_encoded_as_libc_decodes_them() {
        for (major, minor) in [(0, 98), (8, 1), (259, 300), (0, 1_000_000)] {
            let number = device_number((major, minor));
            assert_eq!((libc::major(number), libc::minor(number)), (major, minor));
        }
    }
}
