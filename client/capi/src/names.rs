//! Files by name.

use crate::macros::{export, memory, path, structure};
use core::ffi::{c_char, c_int, c_uint, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::calls::{self, Of};
use poolfs_client::paths::WORKING_DIRECTORY;

const NO_FOLLOW: c_int = sys::AT_SYMLINK_NOFOLLOW as c_int;
const EINVAL: isize = 22;

export! {
    poolfs_stat(name: *const c_char, out: *mut c_void) -> c_int =
        calls::fstatat(WORKING_DIRECTORY, path(name), structure::<sys::stat>(out), 0);
    poolfs_lstat(name: *const c_char, out: *mut c_void) -> c_int =
        calls::fstatat(WORKING_DIRECTORY, path(name), structure::<sys::stat>(out), NO_FOLLOW);
    poolfs_fstatat(directory: c_int, name: *const c_char, out: *mut c_void, flags: c_int) -> c_int =
        calls::fstatat(directory, path(name), structure::<sys::stat>(out), flags);
    poolfs_access(name: *const c_char, mode: c_int) -> c_int =
        calls::faccessat(WORKING_DIRECTORY, path(name), mode, 0);
    poolfs_mkdir(name: *const c_char, mode: c_uint) -> c_int = calls::mkdirat(WORKING_DIRECTORY, path(name), mode);
    poolfs_mknod(name: *const c_char, mode: c_uint, device: u64) -> c_int =
        calls::mknodat(WORKING_DIRECTORY, path(name), mode, device);
    poolfs_unlink(name: *const c_char) -> c_int = calls::unlinkat(WORKING_DIRECTORY, path(name), 0);
    poolfs_remove(name: *const c_char) -> c_int = calls::remove(path(name));
    poolfs_rename(from: *const c_char, to: *const c_char) -> c_int =
        calls::renameat2((WORKING_DIRECTORY, path(from)), (WORKING_DIRECTORY, path(to)), 0);
    poolfs_renameat2(directory: c_int, from: *const c_char, to_directory: c_int, to: *const c_char, flags: c_uint) -> c_int =
        calls::renameat2((directory, path(from)), (to_directory, path(to)), flags);
    poolfs_link(from: *const c_char, to: *const c_char) -> c_int =
        calls::linkat((WORKING_DIRECTORY, path(from)), (WORKING_DIRECTORY, path(to)), 0);
    poolfs_symlink(target: *const c_char, name: *const c_char) -> c_int =
        calls::symlinkat(path(target), WORKING_DIRECTORY, path(name));
    poolfs_readlink(name: *const c_char, out: *mut c_char, room: usize) -> isize =
        calls::readlinkat(WORKING_DIRECTORY, path(name), memory(out.cast::<c_void>(), room));
    poolfs_truncate(name: *const c_char, length: i64) -> c_int = calls::truncate(path(name), length);
    poolfs_chmod(name: *const c_char, mode: c_uint) -> c_int = calls::fchmodat(WORKING_DIRECTORY, path(name), mode, 0);
    poolfs_chown(name: *const c_char, uid: c_uint, gid: c_uint) -> c_int =
        calls::fchownat(WORKING_DIRECTORY, path(name), uid, gid, 0);
    poolfs_lchown(name: *const c_char, uid: c_uint, gid: c_uint) -> c_int =
        calls::fchownat(WORKING_DIRECTORY, path(name), uid, gid, NO_FOLLOW);
    poolfs_utimensat(directory: c_int, name: *const c_char, times: *const c_void, flags: c_int) -> c_int =
        if name.is_null() { -EINVAL } else {
            calls::utimensat(directory, Some(path(name)), structure::<[i64; 4]>(times), flags)
        };
    poolfs_getxattr(file: *const c_char, name: *const c_char, value: *mut c_void, size: usize) -> isize =
        calls::getxattr(Of::Path(path(file)), path(name), memory(value, size));
    poolfs_setxattr(file: *const c_char, name: *const c_char, value: *const c_void, size: usize, flags: c_int) -> c_int =
        calls::setxattr(Of::Path(path(file)), path(name), memory(value, size), flags);
    poolfs_listxattr(file: *const c_char, names: *mut c_char, size: usize) -> isize =
        calls::listxattr(Of::Path(path(file)), memory(names.cast::<c_void>(), size));
    poolfs_removexattr(file: *const c_char, name: *const c_char) -> c_int =
        calls::removexattr(Of::Path(path(file)), path(name));
}
