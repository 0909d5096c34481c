//! The `poolfs_*` functions that take a path.

use crate::types::{dev_t, gid_t, memory, mode_t, path as user_path, ssize_t, stat, structures, timespec, uid_t};
use core::ffi::{c_char, c_int, c_uint, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::calls::{self, Of};
use poolfs_client::errno::convert;
use poolfs_client::paths::WORKING_DIRECTORY;

const NO_FOLLOW: c_int = sys::AT_SYMLINK_NOFOLLOW as c_int;
const EINVAL: isize = 22;

/// `stat`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_stat(path: *const c_char, out: *mut stat) -> c_int {
    convert(calls::fstatat(WORKING_DIRECTORY, user_path(path), structures(out, 1), 0)) as c_int
}

/// `lstat`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_lstat(path: *const c_char, out: *mut stat) -> c_int {
    convert(calls::fstatat(WORKING_DIRECTORY, user_path(path), structures(out, 1), NO_FOLLOW)) as c_int
}

/// `fstatat`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_fstatat(directory: c_int, path: *const c_char, out: *mut stat, flags: c_int) -> c_int {
    convert(calls::fstatat(directory, user_path(path), structures(out, 1), flags)) as c_int
}

/// `access`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_access(path: *const c_char, mode: c_int) -> c_int {
    convert(calls::faccessat(WORKING_DIRECTORY, user_path(path), mode, 0)) as c_int
}

/// `mkdir`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_mkdir(path: *const c_char, mode: mode_t) -> c_int {
    convert(calls::mkdirat(WORKING_DIRECTORY, user_path(path), mode)) as c_int
}

/// `mknod`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_mknod(path: *const c_char, mode: mode_t, device: dev_t) -> c_int {
    convert(calls::mknodat(WORKING_DIRECTORY, user_path(path), mode, device)) as c_int
}

/// `unlink`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_unlink(path: *const c_char) -> c_int {
    convert(calls::unlinkat(WORKING_DIRECTORY, user_path(path), 0)) as c_int
}

/// `remove`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_remove(path: *const c_char) -> c_int {
    convert(calls::remove(user_path(path))) as c_int
}

/// `rename`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_rename(from: *const c_char, to: *const c_char) -> c_int {
    convert(calls::renameat2((WORKING_DIRECTORY, user_path(from)), (WORKING_DIRECTORY, user_path(to)), 0)) as c_int
}

/// `renameat2`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_renameat2(
    directory: c_int,
    from: *const c_char,
    to_directory: c_int,
    to: *const c_char,
    flags: c_uint,
) -> c_int {
    convert(calls::renameat2((directory, user_path(from)), (to_directory, user_path(to)), flags)) as c_int
}

/// `link`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_link(from: *const c_char, to: *const c_char) -> c_int {
    convert(calls::linkat((WORKING_DIRECTORY, user_path(from)), (WORKING_DIRECTORY, user_path(to)), 0)) as c_int
}

/// `symlink`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_symlink(target: *const c_char, path: *const c_char) -> c_int {
    convert(calls::symlinkat(user_path(target), WORKING_DIRECTORY, user_path(path))) as c_int
}

/// `readlink`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_readlink(path: *const c_char, out: *mut c_char, room: usize) -> ssize_t {
    convert(calls::readlinkat(WORKING_DIRECTORY, user_path(path), memory(out.cast(), room)))
}

/// `truncate`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_truncate(path: *const c_char, length: i64) -> c_int {
    convert(calls::truncate(user_path(path), length)) as c_int
}

/// `chmod`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_chmod(path: *const c_char, mode: mode_t) -> c_int {
    convert(calls::fchmodat(WORKING_DIRECTORY, user_path(path), mode, 0)) as c_int
}

/// `chown`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_chown(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
    convert(calls::fchownat(WORKING_DIRECTORY, user_path(path), uid, gid, 0)) as c_int
}

/// `lchown`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_lchown(path: *const c_char, uid: uid_t, gid: gid_t) -> c_int {
    convert(calls::fchownat(WORKING_DIRECTORY, user_path(path), uid, gid, NO_FOLLOW)) as c_int
}

/// `utimensat`: `times` is null, or the times of last access and modification.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_utimensat(
    directory: c_int,
    path: *const c_char,
    times: *const timespec,
    flags: c_int,
) -> c_int {
    let result = if path.is_null() {
        -EINVAL
    } else {
        calls::utimensat(directory, Some(user_path(path)), structures(times, 2), flags)
    };
    convert(result) as c_int
}

/// `getxattr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_getxattr(
    path: *const c_char,
    name: *const c_char,
    value: *mut c_void,
    size: usize,
) -> ssize_t {
    convert(calls::getxattr(Of::Path(user_path(path)), user_path(name), memory(value, size)))
}

/// `setxattr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_setxattr(
    path: *const c_char,
    name: *const c_char,
    value: *const c_void,
    size: usize,
    flags: c_int,
) -> c_int {
    convert(calls::setxattr(Of::Path(user_path(path)), user_path(name), memory(value, size), flags)) as c_int
}

/// `listxattr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_listxattr(path: *const c_char, names: *mut c_char, size: usize) -> ssize_t {
    convert(calls::listxattr(Of::Path(user_path(path)), memory(names.cast(), size)))
}

/// `removexattr`
#[unsafe(no_mangle)]
pub unsafe extern "C" fn poolfs_removexattr(path: *const c_char, name: *const c_char) -> c_int {
    convert(calls::removexattr(Of::Path(user_path(path)), user_path(name))) as c_int
}
