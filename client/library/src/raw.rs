//! System calls without libc, whose functions this library replaces.

use core::arch::asm;
use linux_raw_sys::general as sys;

/// The largest errno the kernel returns, negated, from a system call.
const ERRNO_MAX: isize = 4095;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// So many pages are asked for one by one faster than together.
const FEW_PAGES: usize = 2;

/// One system call with the kernel's convention: a result, or a negative errno.
///
/// # Safety
/// The arguments must be what the kernel expects of `number`: above all, memory it writes to must be the caller's to
/// give away.
#[inline(always)]
pub unsafe fn system_call(number: u32, arguments: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the instruction clobbers rcx and r11 and nothing else but rax; what the kernel does to memory is the
    // caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") arguments[0],
            in("rsi") arguments[1],
            in("rdx") arguments[2],
            in("r10") arguments[3],
            in("r8") arguments[4],
            in("r9") arguments[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// A result of the kernel as a `Result`.
pub fn check(result: isize) -> Result<usize, i32> {
    if (-ERRNO_MAX..0).contains(&result) { Err(-result as i32) } else { Ok(result as usize) }
}

/// What `statx` says of an open descriptor, from what the kernel already knows.
///
/// # Errors
/// The kernel's errno.
pub fn statx_descriptor(descriptor: i32) -> Result<sys::statx, i32> {
    statx(descriptor, c"", sys::AT_EMPTY_PATH | sys::AT_STATX_DONT_SYNC)
}

/// `statx` with the basic fields and the mount's number.
///
/// # Errors
/// The kernel's errno.
pub fn statx(descriptor: i32, path: &core::ffi::CStr, flags: u32) -> Result<sys::statx, i32> {
    let mut out = core::mem::MaybeUninit::<sys::statx>::zeroed();
    // SAFETY: the path ends with a NUL and the kernel writes one `statx` to `out`.
    let result = unsafe {
        system_call(
            sys::__NR_statx,
            [
                descriptor as usize,
                path.as_ptr() as usize,
                flags as usize,
                (sys::STATX_BASIC_STATS | sys::STATX_MNT_ID) as usize,
                out.as_mut_ptr() as usize,
                0,
            ],
        )
    };
    // SAFETY: plain numbers, zeroed before.
    check(result).map(|_| unsafe { out.assume_init() })
}

/// `openat` for reading, close-on-exec, without following a final symbolic link's mode bits.
///
/// # Errors
/// The kernel's errno.
pub fn open_read(path: &core::ffi::CStr) -> Result<i32, i32> {
    let flags = sys::O_RDONLY | sys::O_CLOEXEC;
    // SAFETY: the path ends with a NUL.
    check(unsafe {
        system_call(sys::__NR_openat, [sys::AT_FDCWD as usize, path.as_ptr() as usize, flags as usize, 0, 0, 0])
    })
    .map(|descriptor| descriptor as i32)
}

/// `openat` of the path in `path`, which ends at its first NUL.
///
/// # Errors
/// The kernel's errno; `EINVAL` when there is no NUL.
pub fn open(path: &[u8], flags: u32, mode: u32) -> Result<i32, i32> {
    let path = core::ffi::CStr::from_bytes_until_nul(path).map_err(|_| sys_errno::EINVAL)?;
    // SAFETY: the path ends with a NUL.
    check(unsafe {
        system_call(
            sys::__NR_openat,
            [sys::AT_FDCWD as usize, path.as_ptr() as usize, flags as usize, mode as usize, 0, 0],
        )
    })
    .map(|descriptor| descriptor as i32)
}

/// `read`, repeated when a signal interrupted it.
///
/// # Errors
/// The kernel's errno.
pub fn read(descriptor: i32, buffer: &mut [u8]) -> Result<usize, i32> {
    loop {
        // SAFETY: the kernel writes at most the slice's length into it.
        let result = check(unsafe {
            system_call(sys::__NR_read, [descriptor as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0])
        });
        if result != Err(sys_errno::EINTR) {
            return result;
        }
    }
}

/// `write`.
///
/// # Errors
/// The kernel's errno.
pub fn write(descriptor: i32, bytes: &[u8]) -> Result<usize, i32> {
    // SAFETY: the kernel only reads the slice.
    check(unsafe { system_call(sys::__NR_write, [descriptor as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]) })
}

/// `close`.
pub fn close(descriptor: i32) {
    simple(sys::__NR_close, [descriptor as usize, 0, 0]).ok();
}

/// `lseek`.
///
/// # Errors
/// The kernel's errno.
pub fn seek(descriptor: i32, offset: i64, whence: u32) -> Result<u64, i32> {
    simple(sys::__NR_lseek, [descriptor as usize, offset as usize, whence as usize]).map(|offset| offset as u64)
}

/// The open flags of a descriptor.
///
/// # Errors
/// The kernel's errno.
pub fn open_flags(descriptor: i32) -> Result<u32, i32> {
    simple(sys::__NR_fcntl, [descriptor as usize, sys::F_GETFL as usize, 0]).map(|flags| flags as u32)
}

/// A duplicate of `descriptor` at or above `lowest`, close-on-exec.
///
/// # Errors
/// The kernel's errno.
pub fn duplicate_up(descriptor: i32, lowest: i32) -> Result<i32, i32> {
    let arguments = [descriptor as usize, sys::F_DUPFD_CLOEXEC as usize, lowest as usize];
    simple(sys::__NR_fcntl, arguments).map(|duplicate| duplicate as i32)
}

/// The same, and the original is closed.
///
/// # Errors
/// The kernel's errno; the original stays open.
pub fn move_up(descriptor: i32, lowest: i32) -> Result<i32, i32> {
    let moved = duplicate_up(descriptor, lowest)?;
    close(descriptor);
    Ok(moved)
}

/// The calling thread's set of blocked signals, replaced; the kernel leaves out those that cannot be blocked.
///
/// # Errors
/// The kernel's errno.
pub fn replace_signal_mask(mask: u64) -> Result<u64, i32> {
    const SET_MASK: usize = 2;
    let mut before = 0_u64;
    // SAFETY: the kernel reads one set of 8 bytes and writes one.
    check(unsafe {
        let arguments = [SET_MASK, &raw const mask as usize, &raw mut before as usize, size_of::<u64>(), 0, 0];
        system_call(sys::__NR_rt_sigprocmask, arguments)
    })?;
    Ok(before)
}

/// The process's number.
pub fn process_id() -> u32 {
    simple(sys::__NR_getpid, [0; 3]).unwrap_or(0) as u32
}

/// Events pending on one descriptor, without waiting.
///
/// # Errors
/// The kernel's errno.
pub fn poll_now(descriptor: i32, events: i16) -> Result<i16, i32> {
    let mut poll = sys::pollfd { fd: descriptor, events, revents: 0 };
    // SAFETY: one structure, which the kernel fills in.
    check(unsafe { system_call(sys::__NR_poll, [&raw mut poll as usize, 1, 0, 0, 0, 0]) })?;
    Ok(poll.revents)
}

/// The soft and hard limit of a resource.
///
/// # Errors
/// The kernel's errno.
pub fn limit(resource: u32) -> Result<(u64, u64), i32> {
    let mut limits = [0_u64; 2];
    // SAFETY: the kernel writes two 64-bit numbers.
    check(unsafe { system_call(sys::__NR_prlimit64, [0, resource as usize, 0, limits.as_mut_ptr() as usize, 0, 0]) })?;
    Ok((limits[0], limits[1]))
}

/// The number that tells a socket from all others of this kernel.
///
/// # Errors
/// The kernel's errno: `EBADF`, `ENOTSOCK`.
pub fn socket_cookie(descriptor: i32) -> Result<u64, i32> {
    const SO_COOKIE: usize = 57;
    socket_option(descriptor, SO_COOKIE)
}

/// Whether a descriptor is a socket that keeps the boundaries of messages and their order.
pub fn is_sequenced_packets(descriptor: i32) -> bool {
    const SO_TYPE: usize = 3;
    const SOCK_SEQPACKET: u64 = 5;
    socket_option(descriptor, SO_TYPE) == Ok(SOCK_SEQPACKET)
}

/// A socket's option that is a number.
fn socket_option(descriptor: i32, option: usize) -> Result<u64, i32> {
    const SOL_SOCKET: usize = 1;
    let mut value = 0_u64;
    let mut length = size_of::<u64>() as u32;
    // SAFETY: the kernel writes at most `length` bytes to `value`, and the length.
    check(unsafe {
        system_call(
            sys::__NR_getsockopt,
            [descriptor as usize, SOL_SOCKET, option, &raw mut value as usize, &raw mut length as usize, 0],
        )
    })?;
    Ok(value)
}

/// The address of a socket's peer into `room`; its length, which may be more than there is room for.
///
/// # Errors
/// The kernel's errno: `EBADF`, `ENOTSOCK`, `ENOTCONN`.
pub fn peer_address(descriptor: i32, room: &mut [u8]) -> Result<usize, i32> {
    let mut length = room.len() as u32;
    // SAFETY: the kernel writes at most `length` bytes to `room`, and the length.
    check(unsafe {
        system_call(
            sys::__NR_getpeername,
            [descriptor as usize, room.as_mut_ptr() as usize, &raw mut length as usize, 0, 0, 0],
        )
    })?;
    Ok(length as usize)
}

/// A monotonic time that moves on every few milliseconds. Read from memory the kernel keeps it in: cheaper than the
/// processor's own counter.
#[inline]
pub fn coarse_time_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The processor's counter, which moves on some times in a nanosecond; where it has none, nanoseconds.
#[inline]
pub fn counter() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        core::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    coarse_time_ns()
}

/// Bytes between a description's offset and the end of the file that the kernel knows, which it does not ask for: the low 32 bits.
///
/// # Errors
/// The kernel's errno.
pub fn readable_bytes(descriptor: i32) -> Result<u32, i32> {
    const FIONREAD: usize = 0x541b;
    let mut bytes = 0_u32;
    // SAFETY: the kernel writes one number to `bytes`.
    check(unsafe { system_call(sys::__NR_ioctl, [descriptor as usize, FIONREAD, &raw mut bytes as usize, 0, 0, 0]) })
        .map(|_| bytes)
}

/// The adoption ioctl; `adopt` is its argument and answer.
///
/// # Errors
/// The kernel's errno: `ENOTTY` for anything but a descriptor of a poolfs mount.
pub fn adopt(descriptor: i32, adopt: &mut poolfs_ipc::wire::Adopt) -> Result<(), i32> {
    // SAFETY: the number says that 64 bytes go in and out, the size of the structure.
    check(unsafe {
        system_call(
            sys::__NR_ioctl,
            [descriptor as usize, poolfs_ipc::wire::ADOPT as usize, &raw mut *adopt as usize, 0, 0, 0],
        )
    })
    .map(|_| ())
}

/// Has the service make durable all that was written to the instance that `descriptor` is of.
///
/// # Errors
/// The kernel's errno: `ENOTTY` for anything but a descriptor of a poolfs mount, and what the service failed with.
pub fn sync_all(descriptor: i32) -> Result<(), i32> {
    // SAFETY: the number says that nothing goes in or out.
    check(unsafe {
        system_call(sys::__NR_ioctl, [descriptor as usize, poolfs_ipc::wire::SYNC_ALL as usize, 0, 0, 0, 0])
    })
    .map(|_| ())
}

/// Tells the service that others may have the description behind `descriptor`, or that it is about to be mapped.
///
/// # Errors
/// The negative result.
pub fn share(descriptor: i32) -> Result<(), i32> {
    // SAFETY: the number says that nothing goes in or out.
    check(unsafe { system_call(sys::__NR_ioctl, [descriptor as usize, poolfs_ipc::wire::SHARE as usize, 0, 0, 0, 0]) })
        .map(|_| ())
}

/// Sleeps for so long, less than a second, or until a signal comes.
pub fn sleep(nanoseconds: u32) {
    let time = sys::timespec { tv_sec: 0, tv_nsec: nanoseconds.into() };
    // SAFETY: the kernel reads one timespec.
    let _ = unsafe { system_call(sys::__NR_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// The target of `/proc/self/fd/N`-like links: `readlink` into `buffer`.
///
/// # Errors
/// The kernel's errno.
pub fn read_link(path: &core::ffi::CStr, buffer: &mut [u8]) -> Result<usize, i32> {
    // SAFETY: the path ends with a NUL; the kernel writes at most the slice's length.
    check(unsafe {
        system_call(sys::__NR_readlink, [path.as_ptr() as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0])
    })
}

/// `faccessat2` by the effective ids.
///
/// # Errors
/// The kernel's errno.
pub fn may_search(path: &core::ffi::CStr) -> Result<(), i32> {
    // SAFETY: the path ends with a NUL.
    check(unsafe {
        system_call(
            sys::__NR_faccessat2,
            [sys::AT_FDCWD as usize, path.as_ptr() as usize, sys::X_OK as usize, sys::AT_EACCESS as usize, 0, 0],
        )
    })
    .map(|_| ())
}

/// Fresh anonymous memory that reads as zeros, and as zeros again in a forked child.
///
/// # Errors
/// The kernel's errno.
pub fn map_wiped_on_fork(length: usize) -> Result<*mut u8, i32> {
    let protection = sys::PROT_READ | sys::PROT_WRITE;
    let flags = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE;
    // SAFETY: a new mapping at a place of the kernel's choice disturbs nobody.
    let address =
        check(unsafe { system_call(sys::__NR_mmap, [0, length, protection as usize, flags as usize, usize::MAX, 0]) })?;
    // Small parts of it are used in every process; without huge pages only those cost memory. Its failure costs no more.
    advise(address, length, sys::MADV_NOHUGEPAGE).ok();
    if let Err(errno) = advise(address, length, sys::MADV_WIPEONFORK) {
        // SAFETY: nobody has seen the mapping yet.
        unsafe { unmap(address as *mut u8, length) };
        return Err(errno);
    }
    Ok(address as *mut u8)
}

/// Whether a range of [`map_wiped_on_fork`] reads as zeros in a forked child from now on, or as it does here.
///
/// # Errors
/// The kernel's errno.
pub fn wipe_on_fork(address: *mut u8, length: usize, wipe: bool) -> Result<(), i32> {
    advise(address as usize, length, if wipe { sys::MADV_WIPEONFORK } else { sys::MADV_KEEPONFORK }).map(|_| ())
}

/// Zeros at a place where nothing is mapped; somebody else's memory there stays.
///
/// # Errors
/// The kernel's errno.
pub fn map_zeros(address: usize, length: usize) -> Result<(), i32> {
    let protection = sys::PROT_READ | sys::PROT_WRITE;
    let flags = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE | sys::MAP_FIXED_NOREPLACE;
    // SAFETY: nothing that is mapped already is replaced.
    let mapped =
        unsafe { system_call(sys::__NR_mmap, [address, length, protection as usize, flags as usize, usize::MAX, 0]) };
    check(mapped).map(|_| ())
}

/// What can be done with zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Zeros {
    /// They can be read.
    Readable = sys::PROT_READ,
    /// What is written there is this process's own.
    Writable = sys::PROT_READ | sys::PROT_WRITE,
}

/// Zeros that are never given back, at a multiple of `alignment`.
///
/// # Errors
/// The kernel's errno.
pub fn reserve_zeros(length: usize, alignment: usize, zeros: Zeros) -> Result<usize, i32> {
    let flags = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE;
    let room = length + alignment - PAGE;
    // SAFETY: a new mapping at a place of the kernel's choice disturbs nobody.
    let mapped =
        check(unsafe { system_call(sys::__NR_mmap, [0, room, zeros as usize, flags as usize, usize::MAX, 0]) })?;
    let start = mapped.next_multiple_of(alignment);
    for (rest, end) in [(mapped, start), (start + length, mapped + room)] {
        if rest < end {
            // SAFETY: a part of what was just mapped, which nobody has the address of.
            unsafe { unmap(rest as *mut u8, end - rest) };
        }
    }
    Ok(start)
}

/// Puts zeros into a range.
///
/// # Safety
/// The range is mapped, and whoever uses it takes zeros, too.
///
/// # Errors
/// The kernel's errno.
pub unsafe fn replace_by_zeros(address: usize, length: usize, zeros: Zeros) -> Result<(), i32> {
    let flags = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE | sys::MAP_FIXED;
    let arguments = [address, length, zeros as usize, flags as usize, usize::MAX, 0];
    // SAFETY: the caller's promise.
    check(unsafe { system_call(sys::__NR_mmap, arguments) }).map(|_| ())
}

/// Maps what is mapped shared at `from` a second time, in the place of what is at `to`. A forked child has it, too.
///
/// # Safety
/// The range at `to` is mapped, and whoever reads there takes what is at `from`, too.
///
/// # Errors
/// The kernel's errno.
pub unsafe fn map_again(from: usize, to: usize, length: usize) -> Result<(), i32> {
    let flags = sys::MREMAP_MAYMOVE | sys::MREMAP_FIXED;
    // SAFETY: an old length of 0 leaves what is at `from` as it is; the rest is the caller's promise.
    check(unsafe { system_call(sys::__NR_mremap, [from, 0, length, flags as usize, to, 0]) })?;
    advise(to, length, sys::MADV_DOFORK).map(|_| ())
}

/// `madvise` with advice that changes nobody's bytes in this process.
fn advise(address: usize, length: usize, advice: u32) -> Result<usize, i32> {
    simple(sys::__NR_madvise, [address, length, advice as usize])
}

/// `munmap`.
///
/// # Safety
/// Nobody may use the range afterwards.
pub unsafe fn unmap(address: *mut u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { system_call(sys::__NR_munmap, [address as usize, length, 0, 0, 0, 0]) };
}

/// A system call whose arguments are numbers only.
fn simple(number: u32, [a, b, c]: [usize; 3]) -> Result<usize, i32> {
    // SAFETY: the callers in this module choose calls that write to no memory.
    check(unsafe { system_call(number, [a, b, c, 0, 0, 0]) })
}

/// Whether every page of a range can be read now: asked of the kernel, which finds out without a fault.
pub fn is_readable(address: usize, length: usize) -> bool {
    // No meaning of the set that is read: the answer is EFAULT or EINVAL, in any case nothing is changed.
    const NO_MEANING: usize = 77;
    const SET_BYTES: usize = 8;
    let pages = pages(address, length);
    if pages.len() > FEW_PAGES * PAGE {
        return advise(pages.start, pages.len(), sys::MADV_POPULATE_READ).is_ok();
    }
    // SAFETY: the kernel only reads the set.
    let read = |page| unsafe { system_call(sys::__NR_rt_sigprocmask, [NO_MEANING, page, 0, SET_BYTES, 0, 0]) };
    pages.step_by(PAGE).all(|page| check(read(page)) == Err(sys_errno::EINVAL))
}

/// Whether every page of a range can be written now, asked like [`is_readable`].
pub fn is_writable(address: usize, length: usize) -> bool {
    const ADD_NOTHING: usize = (sys::FUTEX_OP_ADD as usize) << 28;
    let pages = pages(address, length);
    if pages.len() > PAGE {
        return advise(pages.start, pages.len(), sys::MADV_POPULATE_WRITE).is_ok();
    }
    let nobody_waits = 0_u32;
    let operation = (sys::FUTEX_WAKE_OP | sys::FUTEX_PRIVATE_FLAG) as usize;
    let word = address & !(size_of::<u32>() - 1);
    // SAFETY: adds 0 to a word in one step, whatever else happens to it, and wakes none.
    check(unsafe {
        system_call(sys::__NR_futex, [&raw const nobody_waits as usize, operation, 0, 0, word, ADD_NOTHING])
    })
    .is_ok()
}

/// The pages of a range that does not reach the end of the address space.
fn pages(address: usize, length: usize) -> core::ops::Range<usize> {
    address & !(PAGE - 1)..(address + length).next_multiple_of(PAGE)
}

/// The kernel's error numbers, as the raw calls return them.
pub mod sys_errno {
    /// interrupted
    pub const EINTR: i32 = 4;
    /// bad descriptor
    pub const EBADF: i32 = 9;
    /// invalid argument
    pub const EINVAL: i32 = 22;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_errnos_are_told_apart() {
        assert_eq!(check(0), Ok(0));
        assert_eq!(check(-9), Err(9));
        assert_eq!(check(-4095), Err(4095));
        assert_eq!(check(-4096), Ok(-4096_isize as usize));
    }

    #[test]
    fn the_kernel_says_which_memory_can_be_used() {
        for pages in [1, 2, 3, 40] {
            let length = pages * PAGE;
            let map = |protection| {
                // SAFETY: a new mapping.
                let base = unsafe {
                    libc::mmap(core::ptr::null_mut(), length, protection, libc::MAP_PRIVATE | libc::MAP_ANON, -1, 0)
                };
                assert_ne!(base, libc::MAP_FAILED);
                base as usize
            };
            let (both, read, none) =
                (map(libc::PROT_READ | libc::PROT_WRITE), map(libc::PROT_READ), map(libc::PROT_NONE));
            assert!(is_readable(both + 1, length - 2) && is_writable(both + 1, length - 2), "{pages}");
            assert!(is_readable(read, length) && !is_writable(read, length), "{pages}");
            assert!(!is_readable(none, length) && !is_writable(none, length), "{pages}");
            // SAFETY: the end of the mapping made above, which nobody uses.
            unsafe { libc::munmap((both + length - PAGE) as *mut _, PAGE) };
            assert!(!is_readable(both, length) && !is_writable(both, length), "{pages}");
            let straddling = both + length - PAGE - 1;
            assert!(pages == 1 || (!is_readable(straddling, 2) && !is_writable(straddling, 2)), "{pages}");
            for base in [both, read, none] {
                // SAFETY: made above; what is gone already is no error.
                unsafe { libc::munmap(base as *mut _, length) };
            }
        }
    }

    #[test]
    fn the_kernel_answers() {
        assert_eq!(process_id(), std::process::id());
        assert_eq!(statx_descriptor(-1).err(), Some(sys_errno::EBADF));
        assert!(limit(sys::RLIMIT_NOFILE).is_ok_and(|(soft, hard)| soft > 0 && soft <= hard));
    }
}
