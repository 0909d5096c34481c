//! Calls that open, close, duplicate and map descriptors: the kernel does them, and the descriptor table follows.
//!
//! Also calls that change what the library has cached of the process: `munmap` and `mprotect`, `umask`, `prlimit`.

use super::{kernel, kernel_cancellable, refresh_size};
use crate::files::{self, ADOPT_AT_BYTES, Purpose, open_file_for};
use crate::memory::{UserMemory, UserPath};
use crate::state::{Call, State, state};
use crate::{pages, process, rights, trace};
use linux_raw_sys::general as sys;
use rustix::fd::{AsRawFd, BorrowedFd};

pub(super) const EBADF: isize = 9;
const EIO: isize = 5;

/// `close_range` marks the descriptors close-on-exec instead of closing them.
const CLOSE_RANGE_CLOEXEC: u32 = 4;

/// `openat`
pub fn openat(descriptor: i32, path: UserPath, flags: i32, mode: u32) -> isize {
    let arguments = [descriptor as usize, path.address(), flags as usize, mode as usize, 0, 0];
    opened(|| kernel_cancellable(sys::__NR_openat, arguments))
}

/// `openat2`
pub fn openat2(descriptor: i32, path: UserPath, how: UserMemory) -> isize {
    let arguments = [descriptor as usize, path.address(), how.address(), how.length(), 0, 0];
    opened(|| kernel_cancellable(sys::__NR_openat2, arguments))
}

fn opened(open: impl FnOnce() -> isize) -> isize {
    // Whoever forks from here on may give the description to a child.
    let forks = process::forks();
    let result = open();
    if let (Ok(descriptor), Some(state)) = (i32::try_from(result), state())
        && descriptor >= 0
    {
        if state.is_own_process() {
            state.descriptors.opened(descriptor, forks);
        } else {
            state.descriptors.clear(descriptor);
        }
    }
    result
}

/// Whether a number is a descriptor of the library's own, which the program did not open and must not close.
#[inline]
pub(super) fn is_own(state: &State, descriptor: i32) -> bool {
    let is_own = || {
        state.sessions.owns(descriptor)
            || state.mounts.descriptors().any(|own| own == descriptor)
            || trace::kept() == Some(descriptor)
    };
    process::may_be_own(descriptor) && is_own()
}

/// `close`. Our own descriptors are none of the program's: to it they do not exist.
pub fn close(descriptor: i32) -> isize {
    let mut posted = None;
    if let Some(state) = state() {
        if is_own(state, descriptor) {
            return -EBADF;
        }
        if state.descriptors.noted_grant(descriptor).is_some() {
            posted = Call::begin().and_then(|call| Some((call, files::posted_by(call, descriptor)?)));
        }
        state.descriptors.clear(descriptor);
    }
    let closed = kernel_cancellable(sys::__NR_close, [descriptor as usize, 0, 0, 0, 0, 0]);
    match posted {
        // The kernel would have said it, of writes that it knew.
        Some((call, posts)) if closed == 0 && files::are_posts_lost(call, posts) => -EIO,
        _ => closed,
    }
}

/// Something that we do not see is about to close a number.
pub fn forget(descriptor: i32) {
    if let Some(state) = state() {
        state.descriptors.clear(descriptor);
    }
}

/// `close_range`; our own descriptors stay.
pub fn close_range(first: u32, last: u32, flags: u32) -> isize {
    let close =
        |first: u32, last: u32| kernel(sys::__NR_close_range, [first as usize, last as usize, flags as usize, 0, 0, 0]);
    let Some(state) = state() else { return close(first, last) };
    let only_marks = flags & CLOSE_RANGE_CLOEXEC != 0;
    if only_marks || first > last {
        return close(first, last);
    }
    state.descriptors.clear_range(first, last);
    let mut from = first;
    while let Some(own) = lowest_own(state, from, last) {
        if own > from {
            let result = close(from, own - 1);
            if result != 0 {
                return result;
            }
        }
        if own == last {
            return 0;
        }
        from = own + 1;
    }
    close(from, last)
}

/// The lowest of our own descriptors in a range.
fn lowest_own(state: &State, first: u32, last: u32) -> Option<u32> {
    state
        .sessions
        .descriptors()
        .chain(state.mounts.descriptors())
        .chain(trace::kept())
        .filter_map(|descriptor| u32::try_from(descriptor).ok())
        .filter(|descriptor| (first..=last).contains(descriptor))
        .min()
}

/// `dup`
pub fn dup(descriptor: i32) -> isize {
    duplicated(descriptor, kernel(sys::__NR_dup, [descriptor as usize, 0, 0, 0, 0, 0]))
}

/// Gives up what the library has at a number that the program takes for something else.
fn make_room(from: i32, to: i32) {
    if let Some(state) = state().filter(|state| from != to && state.is_own_process() && state.sessions.owns(to)) {
        state.sessions.end_all();
    }
}

/// `dup2`
pub fn dup2(from: i32, to: i32) -> isize {
    make_room(from, to);
    let result = kernel(sys::__NR_dup2, [from as usize, to as usize, 0, 0, 0, 0]);
    if from == to { result } else { duplicated(from, result) }
}

/// `dup3`
pub fn dup3(from: i32, to: i32, flags: i32) -> isize {
    make_room(from, to);
    duplicated(from, kernel(sys::__NR_dup3, [from as usize, to as usize, flags as usize, 0, 0, 0]))
}

/// To be called before `fcntl` with a command that does not duplicate.
pub fn before_control(descriptor: i32, command: i32, argument: usize) {
    let changes = command as u32 == sys::F_SETFL;
    if let Some(call) = changes.then(Call::begin).flatten() {
        files::change_flags(call, descriptor, argument as u32);
    }
}

/// To be called before `ioctl`: `FIONREAD` is answered by the kernel from the size it knows.
pub fn before_device_control(descriptor: i32, request: usize) {
    const FIONREAD: u32 = 0x541b;
    if request as u32 == FIONREAD {
        refresh_size(descriptor);
    }
}

/// `fcntl` with one of the commands that duplicate a descriptor
pub fn duplicate_above(descriptor: i32, command: i32, lowest: usize) -> isize {
    duplicated(descriptor, kernel(sys::__NR_fcntl, [descriptor as usize, command as usize, lowest, 0, 0, 0]))
}

/// Whether a command of `fcntl` duplicates the descriptor.
pub fn duplicates(command: i32) -> bool {
    matches!(command as u32, sys::F_DUPFD | sys::F_DUPFD_CLOEXEC)
}

fn duplicated(from: i32, result: isize) -> isize {
    if let (Ok(descriptor), Some(state)) = (i32::try_from(result), state())
        && descriptor >= 0
    {
        if state.is_own_process() {
            state.descriptors.duplicated(from, descriptor);
        } else {
            state.descriptors.clear(descriptor);
        }
    }
    result
}

/// `mmap`. One that may change a file for others without a call that anybody sees takes the description away from the user-level
/// path first, so that the service sends every user of the file to the kernel. A private one of a file that nobody has changed is
/// made of the bytes that the service has cached, so that there is no second copy of them; all others are the kernel's.
pub fn mmap(place: UserMemory, protection: i32, flags: i32, descriptor: i32, offset: i64) -> isize {
    pages::forget();
    let shared = matches!(flags as u32 & sys::MAP_TYPE, sys::MAP_SHARED | sys::MAP_SHARED_VALIDATE);
    if let Some(call) = Call::begin().filter(|_| descriptor >= 0 && flags as u32 & sys::MAP_ANONYMOUS == 0) {
        if shared && !is_refused(flags) {
            files::give_up(call, descriptor);
        } else if let Some(mapped) = map_lent(call, descriptor, place, (protection, flags), offset) {
            return mapped;
        }
        files::map_by_kernel(call, descriptor);
    }
    kernel(sys::__NR_mmap, mapping_arguments(place, (protection, flags), descriptor, offset))
}

/// Whether the kernel refuses a mapping of any file of ours: no FUSE filesystem has files that can be mapped with `MAP_SYNC`.
/// Databases ask so whether a file is persistent memory, and then use it as any other.
fn is_refused(flags: i32) -> bool {
    let flags = flags as u32;
    flags & sys::MAP_TYPE == sys::MAP_SHARED_VALIDATE && flags & sys::MAP_SYNC != 0
}

fn mapping_arguments(place: UserMemory, (protection, flags): (i32, i32), descriptor: i32, offset: i64) -> [usize; 6] {
    [place.address(), place.length(), protection as usize, flags as usize, descriptor as usize, offset as usize]
}

/// Maps privately what the service lends of a file that is open to be read; nothing when it lends nothing. Programs are not mapped by
/// this function: whether they may run from a mount is the kernel's to say.
fn map_lent(call: Call, descriptor: i32, place: UserMemory, how: (i32, i32), offset: i64) -> Option<isize> {
    let (protection, flags) = (how.0 as u32, how.1 as u32);
    let is_private = flags & sys::MAP_TYPE == sys::MAP_PRIVATE;
    let is_of_data = protection & (sys::PROT_READ | sys::PROT_EXEC) == sys::PROT_READ;
    if !is_private || !is_of_data || place.length() < ADOPT_AT_BYTES {
        return None;
    }
    let file = open_file_for(call, descriptor, Purpose::Read(place.length())).ok()?;
    if !file.is_regular() || !file.is_readable() || file.is_writable() {
        return None;
    }
    let map = |lent: BorrowedFd<'_>| kernel(sys::__NR_mmap, mapping_arguments(place, how, lent.as_raw_fd(), offset));
    file.session.with_whole_file(file.adopted.handle, map)
}

/// `munmap`
pub fn munmap(memory: UserMemory) -> isize {
    pages::forget();
    kernel(sys::__NR_munmap, [memory.address(), memory.length(), 0, 0, 0, 0])
}

/// `pkey_mprotect`; `mprotect` with a key of -1
pub fn mprotect(memory: UserMemory, protection: i32, key: i32) -> isize {
    pages::forget();
    let arguments = [memory.address(), memory.length(), protection as usize, key as usize, 0, 0];
    if key == -1 { kernel(sys::__NR_mprotect, arguments) } else { kernel(sys::__NR_pkey_mprotect, arguments) }
}

/// `mremap`
pub fn mremap(memory: UserMemory, length: usize, flags: i32, new: UserMemory) -> isize {
    pages::forget();
    kernel(sys::__NR_mremap, [memory.address(), memory.length(), length, flags as usize, new.address(), 0])
}

/// `shmdt`
pub fn shmdt(memory: UserMemory) -> isize {
    pages::forget();
    kernel(sys::__NR_shmdt, [memory.address(), 0, 0, 0, 0, 0])
}

/// `umask`
pub fn umask(mask: u32) -> isize {
    if let Some(state) = state() {
        state.forget_umask();
    }
    let before = kernel(sys::__NR_umask, [mask as usize, 0, 0, 0, 0, 0]);
    if let Some(state) = state() {
        state.forget_umask();
    }
    before
}

/// `prlimit`; `setrlimit` is a special case
pub fn prlimit(process: i32, resource: u32, new: UserMemory, old: UserMemory) -> isize {
    rights::forget_limits();
    let arguments = [process as usize, resource as usize, new.address(), old.address(), 0, 0];
    let result = kernel(sys::__NR_prlimit64, arguments);
    rights::forget_limits();
    result
}
