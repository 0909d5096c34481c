//! Calls that change modes, owners and times.

use super::{change_by_descriptor, change_by_path, kernel, no_follow, request};
use crate::memory::{UserMemory, UserPath};
use crate::outcome::{Refusal, Served, finish};
use crate::paths::Extra;
use linux_raw_sys::general as sys;
use poolfs_ipc::wire::{Operation, WireTime};

/// `fchmod`
pub fn fchmod(descriptor: i32, mode: u32) -> isize {
    let mut request = request(Operation::ChangeMode);
    request.mode = mode;
    finish(change_by_descriptor(descriptor, &request, &Extra::default()), || {
        kernel(sys::__NR_fchmod, [descriptor as usize, mode as usize, 0, 0, 0, 0])
    })
}

/// `fchmodat`; with flags by the newer call, which follows no links when asked
pub fn fchmodat(descriptor: i32, path: UserPath, mode: u32, flags: i32) -> isize {
    let served = || {
        if flags != 0 {
            return Err(Refusal::Foreign);
        }
        let mut request = request(Operation::ChangeMode);
        request.mode = mode;
        change_by_path((descriptor, path), &request)
    };
    finish(served(), || {
        let arguments = [descriptor as usize, path.address(), mode as usize, flags as usize, 0, 0];
        if flags == 0 { kernel(sys::__NR_fchmodat, arguments) } else { kernel(sys::__NR_fchmodat2, arguments) }
    })
}

/// `fchown`. Owners are changed by the kernel alone, which locks the file from the check to the change.
pub fn fchown(descriptor: i32, uid: u32, gid: u32) -> isize {
    kernel(sys::__NR_fchown, [descriptor as usize, uid as usize, gid as usize, 0, 0, 0])
}

/// `fchownat`, as [`fchown`]; `chown` and `lchown` are special cases
pub fn fchownat(descriptor: i32, path: UserPath, uid: u32, gid: u32, flags: i32) -> isize {
    kernel(sys::__NR_fchownat, [descriptor as usize, path.address(), uid as usize, gid as usize, flags as usize, 0])
}

/// `utimensat` as the system call has it: a null path means the descriptor itself. `times` is null (now) or two `timespec`.
pub fn utimensat(descriptor: i32, path: Option<UserPath>, times: UserMemory, flags: i32) -> isize {
    let served = || {
        if flags as u32 & !sys::AT_SYMLINK_NOFOLLOW != 0 {
            return Err(Refusal::Foreign);
        }
        let mut request = request(Operation::SetTimes);
        request.flags = no_follow(flags);
        request.times = wire_times(times)?;
        match path {
            Some(path) => change_by_path((descriptor, path), &request),
            None => change_by_descriptor(descriptor, &request, &Extra::default()),
        }
    };
    finish(served(), || {
        let path = path.map_or(0, UserPath::address);
        kernel(sys::__NR_utimensat, [descriptor as usize, path, times.address(), flags as usize, 0, 0])
    })
}

/// As [`utimensat`], with two `timeval` (microseconds) or null.
pub fn utimes_at(descriptor: i32, path: Option<UserPath>, times: UserMemory, flags: i32) -> isize {
    if times.is_null() {
        return utimensat(descriptor, path, times, flags);
    }
    const EINVAL: isize = 22;
    const EFAULT: isize = 14;
    let Some(values) = times.get::<[i64; 4]>() else { return -EFAULT };
    if [values[1], values[3]].iter().any(|microseconds| !(0..1_000_000).contains(microseconds)) {
        return -EINVAL;
    }
    let mut precise = [values[0], values[1] * 1000, values[2], values[3] * 1000];
    // SAFETY: a local array.
    let times = unsafe { UserMemory::new(precise.as_mut_ptr().cast(), size_of_val(&precise)) };
    utimensat(descriptor, path, times, flags)
}

/// `utime`: two whole seconds, or null
pub fn utime(path: UserPath, times: UserMemory) -> isize {
    let at = sys::AT_FDCWD;
    let Some([accessed, modified]) = times.get::<[i64; 2]>() else {
        return utimensat(at, Some(path), times, 0);
    };
    let mut precise = [accessed, 0, modified, 0];
    // SAFETY: a local array.
    let times = unsafe { UserMemory::new(precise.as_mut_ptr().cast(), size_of_val(&precise)) };
    utimensat(at, Some(path), times, 0)
}

fn wire_times(times: UserMemory) -> Served<[WireTime; 2]> {
    if times.is_null() {
        let now = WireTime { seconds: 0, nanoseconds: sys::UTIME_NOW, reserved: 0 };
        return Ok([now; 2]);
    }
    let [a, a_ns, m, m_ns] = times.get::<[i64; 4]>().ok_or(Refusal::Foreign)?;
    let time = |seconds, nanoseconds: i64| {
        let special = [i64::from(sys::UTIME_NOW), i64::from(sys::UTIME_OMIT)].contains(&nanoseconds);
        let valid = special || (0..1_000_000_000).contains(&nanoseconds);
        // The kernel has its own errno for what is no time.
        if valid {
            Ok(WireTime { seconds, nanoseconds: nanoseconds as u32, reserved: 0 })
        } else {
            Err(Refusal::Foreign)
        }
    };
    if a_ns == i64::from(sys::UTIME_OMIT) && m_ns == a_ns {
        // Nothing to change, for which nobody is asked for permission.
        return Err(Refusal::Foreign);
    }
    Ok([time(a, a_ns)?, time(m, m_ns)?])
}
