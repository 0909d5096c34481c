//! Calls that create, remove, rename and link names, and `readlink` and `truncate` by path.

use super::{change_by_path, change_by_path_with, kernel, on_path, request};
use crate::memory::{UserMemory, UserPath};
use crate::outcome::{Refusal, finish};
use crate::pages;
use crate::paths::{self, Extra, WORKING_DIRECTORY};
use linux_raw_sys::general as sys;
use poolfs_ipc::wire::{Operation, RequestFlags};

/// `mkdirat`
pub fn mkdirat(descriptor: i32, path: UserPath, mode: u32) -> isize {
    let served = || {
        let mut request = request(Operation::MakeDirectory);
        request.mode = mode;
        request.umask = on_path((descriptor, path))?.state.umask().ok_or(Refusal::Kernel)?;
        change_by_path((descriptor, path), &request)
    };
    finish(served(), || kernel(sys::__NR_mkdirat, [descriptor as usize, path.address(), mode as usize, 0, 0, 0]))
}

/// `mknodat`; sockets, fifos, devices and files. Device numbers beyond Linux's 32 bits do not exist.
pub fn mknodat(descriptor: i32, path: UserPath, mode: u32, device: u64) -> isize {
    let served = || {
        let mut request = request(Operation::MakeNode);
        request.mode = mode;
        request.device = u32::try_from(device).map_err(|_| Refusal::Kernel)?;
        request.umask = on_path((descriptor, path))?.state.umask().ok_or(Refusal::Kernel)?;
        change_by_path((descriptor, path), &request)
    };
    finish(served(), || {
        kernel(sys::__NR_mknodat, [descriptor as usize, path.address(), mode as usize, device as usize, 0, 0])
    })
}

/// `unlinkat`; the removal of directories is the kernel's.
pub fn unlinkat(descriptor: i32, path: UserPath, flags: i32) -> isize {
    let served = || {
        if flags != 0 {
            return Err(Refusal::Foreign);
        }
        change_by_path((descriptor, path), &request(Operation::Unlink))
    };
    finish(served(), || kernel(sys::__NR_unlinkat, [descriptor as usize, path.address(), flags as usize, 0, 0, 0]))
}

/// `remove`: a name of anything
pub fn remove(path: UserPath) -> isize {
    const EISDIR: isize = 21;
    match unlinkat(WORKING_DIRECTORY, path, 0) {
        result if result == -EISDIR => kernel(sys::__NR_rmdir, [path.address(), 0, 0, 0, 0, 0]),
        result => result,
    }
}

/// `renameat2`; `renameat` and `rename` are special cases
pub fn renameat2(from: (i32, UserPath), to: (i32, UserPath), flags: u32) -> isize {
    let served = || {
        let mut request = request(Operation::Rename);
        request.mode = flags;
        on_path(from)?;
        paths::by_two_paths(on_path(to)?, from, to, &request).map(|_| 0)
    };
    finish(served(), || {
        let arguments = [from.0 as usize, from.1.address(), to.0 as usize, to.1.address(), flags as usize, 0];
        if flags == 0 { kernel(sys::__NR_renameat, arguments) } else { kernel(sys::__NR_renameat2, arguments) }
    })
}

/// `linkat`
pub fn linkat(from: (i32, UserPath), to: (i32, UserPath), flags: i32) -> isize {
    let served = || {
        if flags as u32 & !sys::AT_SYMLINK_FOLLOW != 0 {
            return Err(Refusal::Foreign);
        }
        let mut request = request(Operation::Link);
        if flags as u32 & sys::AT_SYMLINK_FOLLOW == 0 {
            request.flags = RequestFlags::NO_FOLLOW.bits();
        }
        on_path(from)?;
        paths::by_two_paths(on_path(to)?, from, to, &request).map(|_| 0)
    };
    finish(served(), || {
        let arguments = [from.0 as usize, from.1.address(), to.0 as usize, to.1.address(), flags as usize, 0];
        kernel(sys::__NR_linkat, arguments)
    })
}

/// `symlinkat`
pub fn symlinkat(target: UserPath, descriptor: i32, path: UserPath) -> isize {
    let served = || {
        on_path((descriptor, path))?;
        let second = target.bytes().filter(|target| !target.is_empty()).ok_or(Refusal::Foreign)?;
        let extra = Extra { second, third: None };
        change_by_path_with((descriptor, path), &request(Operation::SymbolicLink), &extra)
    };
    finish(served(), || kernel(sys::__NR_symlinkat, [target.address(), descriptor as usize, path.address(), 0, 0, 0]))
}

/// `readlinkat`: the kernel keeps the targets of links, which never change.
pub fn readlinkat(descriptor: i32, path: UserPath, out: UserMemory) -> isize {
    kernel(sys::__NR_readlinkat, [descriptor as usize, path.address(), out.address(), out.length(), 0, 0])
}

/// `truncate`
pub fn truncate(path: UserPath, length: i64) -> isize {
    // As in `ftruncate`.
    pages::forget();
    let served = || {
        let call = on_path((WORKING_DIRECTORY, path))?;
        if call.state.file_size_limited() {
            return Err(Refusal::Foreign);
        }
        let mut request = request(Operation::Truncate);
        request.offset = u64::try_from(length).map_err(|_| Refusal::Foreign)?;
        change_by_path((WORKING_DIRECTORY, path), &request)
    };
    finish(served(), || kernel(sys::__NR_truncate, [path.address(), length as usize, 0, 0, 0, 0]))
}
