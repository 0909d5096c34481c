//! `stat` in its forms, and `access`.

use super::descriptors::{EBADF, is_own};
use super::{by_file, kernel, no_follow, on_descriptor, on_path, request};
use crate::files::open_file;
use crate::memory::{UserMemory, UserPath};
use crate::mounts::MountPoint;
use crate::outcome::{Refusal, Served, finish};
use crate::paths::{self, Extra};
use crate::state::{Call, state};
use linux_raw_sys::general as sys;
use poolfs_ipc::OWN_DESCRIPTOR_MIN;
use poolfs_ipc::wire::{Operation, RequestFlags, WireAttributes};
use poolfs_types::limits::BLOCK_SIZE;

/// Attribute bits of a file that `statx` says it could tell: what the kernel says for every FUSE file.
const ATTRIBUTES_MASK: u64 = (sys::STATX_ATTR_AUTOMOUNT | sys::STATX_ATTR_MOUNT_ROOT | sys::STATX_ATTR_DAX) as u64;

/// `fstat`. Who tries every number to find out what is open does not find our own descriptors.
pub fn fstat(descriptor: i32, out: UserMemory) -> isize {
    let mut take = |attributes: &WireAttributes, mount: &MountPoint| out.put(stat_of(attributes, mount));
    let mut served = || {
        let call = on_descriptor(descriptor)?;
        if out.is_impossible() { Err(Refusal::Foreign) } else { stat_descriptor(call, descriptor, &mut take) }
    };
    finish(served(), || {
        if descriptor >= OWN_DESCRIPTOR_MIN && state().is_some_and(|state| is_own(state, descriptor)) {
            return -EBADF;
        }
        kernel(sys::__NR_fstat, [descriptor as usize, out.address(), 0, 0, 0, 0])
    })
}

/// `fstatat`; `stat` and `lstat` are special cases
pub fn fstatat(descriptor: i32, path: UserPath, out: UserMemory, flags: i32) -> isize {
    let known = sys::AT_SYMLINK_NOFOLLOW | sys::AT_NO_AUTOMOUNT | sys::AT_EMPTY_PATH;
    let mut take = |attributes: &WireAttributes, mount: &MountPoint| out.put(stat_of(attributes, mount));
    let mut served = || {
        let call = on_path((descriptor, path))?;
        let is_known = flags as u32 & !known == 0 && !out.is_impossible();
        if is_known { stat_at(call, descriptor, path, flags, &mut take) } else { Err(Refusal::Foreign) }
    };
    finish(served(), || {
        kernel(sys::__NR_newfstatat, [descriptor as usize, path.address(), out.address(), flags as usize, 0, 0])
    })
}

/// `statx`
pub fn statx(descriptor: i32, path: UserPath, flags: i32, mask: u32, out: UserMemory) -> isize {
    let known = sys::AT_SYMLINK_NOFOLLOW | sys::AT_NO_AUTOMOUNT | sys::AT_EMPTY_PATH | sys::AT_STATX_FORCE_SYNC;
    let tellable = sys::STATX_BASIC_STATS | sys::STATX_BTIME | sys::STATX_MNT_ID;
    let mut take = |attributes: &WireAttributes, mount: &MountPoint| out.put(statx_of(attributes, mount));
    let mut served = || {
        let call = on_path((descriptor, path))?;
        let is_known = flags as u32 & !known == 0 && mask & !tellable == 0 && !out.is_impossible();
        if is_known { stat_at(call, descriptor, path, flags, &mut take) } else { Err(Refusal::Foreign) }
    };
    finish(served(), || {
        let arguments = [descriptor as usize, path.address(), flags as usize, mask as usize, out.address(), 0];
        kernel(sys::__NR_statx, arguments)
    })
}

/// Takes attributes; says whether there was room for them.
type TakeAttributes<'t> = &'t mut dyn FnMut(&WireAttributes, &MountPoint) -> bool;

/// Apart from its callers, which have little to do for what is none of ours.
#[inline(never)]
fn stat_at(call: Call, descriptor: i32, path: UserPath, flags: i32, take: TakeAttributes<'_>) -> Served<usize> {
    if flags as u32 & sys::AT_EMPTY_PATH != 0 && path.bytes().is_some_and(<[u8]>::is_empty) {
        return if descriptor < 0 { Err(Refusal::Foreign) } else { stat_descriptor(call, descriptor, take) };
    }
    let mut request = request(Operation::Stat);
    request.flags = no_follow(flags);
    let mut taken = false;
    paths::by_path(call, (descriptor, path), false, &request, &Extra::default(), &mut |reply, _, mount| {
        taken = take(&reply.attributes, mount);
    })?;
    if taken { Ok(0) } else { Err(Refusal::Kernel) }
}

#[inline(never)]
fn stat_descriptor(call: Call, descriptor: i32, take: TakeAttributes<'_>) -> Served<usize> {
    let file = open_file(call, descriptor)?;
    let request = request(Operation::Stat);
    let mut taken = false;
    by_file(call, &file, &request, &Extra::default(), &mut |reply, _, mount| taken = take(&reply.attributes, mount))?;
    if taken { Ok(0) } else { Err(Refusal::Kernel) }
}

/// `faccessat` with the flags of the newer call; `access` and `euidaccess` are special cases
pub fn faccessat(descriptor: i32, path: UserPath, mode: i32, flags: i32) -> isize {
    let known = sys::AT_SYMLINK_NOFOLLOW | sys::AT_EACCESS;
    let served = || {
        if flags as u32 & !known != 0 || mode & !7 != 0 {
            return Err(Refusal::Foreign);
        }
        let call = on_path((descriptor, path))?;
        let mut request = request(Operation::Access);
        request.mode = mode as u32;
        request.flags = no_follow(flags);
        if flags as u32 & sys::AT_EACCESS == 0 {
            request.flags |= RequestFlags::REAL_IDS.bits();
        }
        // Whether a read-only mount may be written is the kernel's to say.
        let changes = mode as u32 & sys::W_OK != 0;
        paths::by_path(call, (descriptor, path), changes, &request, &Extra::default(), &mut |_, _, _| {}).map(|_| 0)
    };
    finish(served(), || {
        if flags == 0 {
            return kernel(sys::__NR_faccessat, [descriptor as usize, path.address(), mode as usize, 0, 0, 0]);
        }
        kernel(sys::__NR_faccessat2, [descriptor as usize, path.address(), mode as usize, flags as usize, 0, 0])
    })
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

fn statx_of(attributes: &WireAttributes, mount: &MountPoint) -> sys::statx {
    // SAFETY: plain numbers.
    let mut out: sys::statx = unsafe { core::mem::zeroed() };
    let time = |index: usize| sys::statx_timestamp {
        tv_sec: attributes.seconds[index],
        tv_nsec: attributes.nanoseconds[index],
        __reserved: 0,
    };
    out.stx_mask = sys::STATX_BASIC_STATS | sys::STATX_MNT_ID;
    out.stx_blksize = BLOCK_SIZE as u32;
    out.stx_nlink = attributes.links;
    out.stx_uid = attributes.uid;
    out.stx_gid = attributes.gid;
    out.stx_mode = attributes.mode as u16;
    out.stx_ino = attributes.inode;
    out.stx_size = attributes.size;
    out.stx_blocks = attributes.blocks;
    out.stx_attributes_mask = ATTRIBUTES_MASK;
    (out.stx_atime, out.stx_mtime, out.stx_ctime) = (time(0), time(1), time(2));
    // Linux's 32-bit encoding: minor low 8 bits, major 12, minor high 12.
    out.stx_rdev_major = attributes.device >> 8 & 0xfff;
    out.stx_rdev_minor = attributes.device & 0xff | attributes.device >> 12 & 0xfff00;
    (out.stx_dev_major, out.stx_dev_minor) = mount.device;
    out.stx_mnt_id = mount.id;
    out
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
        assert_eq!(size_of::<sys::statx>(), size_of::<libc::statx>());
        assert_eq!(core::mem::offset_of!(sys::statx, stx_mnt_id), core::mem::offset_of!(libc::statx, stx_mnt_id));
    }

    #[test]
    fn device_numbers_are_encoded_as_libc_decodes_them() {
        for (major, minor) in [(0, 98), (8, 1), (259, 300), (0, 1_000_000)] {
            let number = device_number((major, minor));
            assert_eq!((libc::major(number), libc::minor(number)), (major, minor));
        }
    }
}
