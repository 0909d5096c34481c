//! Facts about the library's own process (sharing, threads, environment), and symbols of libc that may be missing.

use crate::raw;
use crate::signals::SignalsHeld;
use core::ffi::{CStr, c_char, c_int, c_ulong};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use linux_raw_sys::general as sys;

/// The address of a symbol that the process may have or not: null when no library defines it.
#[macro_export]
macro_rules! weak_symbol {
    ($name:literal) => {{
        let address: *const u8;
        // SAFETY: reads one entry of the global offset table, which the loader filled in with the address or with null.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) address,
                options(pure, readonly, nostack, preserves_flags)
            );
        }
        address
    }};
}

/// How often this process, or what runs in its memory, has made another one that shares its descriptions.
///
/// Not in the wiped state: a child counts on from its parent's number.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Says that descriptions may be shared with another process from now on.
pub fn note_fork() {
    FORKS.fetch_add(1, Ordering::SeqCst);
}

/// Whether another process may be running in this one's memory, as a child of `vfork` does: whoever uses what is there then
/// has to ask whether it is the one it belongs to.
static MEMORY_SHARED: AtomicBool = AtomicBool::new(false);

/// Says that another process may run in this one's memory from now on.
pub fn note_shared_memory() {
    MEMORY_SHARED.store(true, Ordering::Relaxed);
}

/// Whether another process may be running in this one's memory.
pub fn shares_memory() -> bool {
    MEMORY_SHARED.load(Ordering::Relaxed)
}

/// How often descriptions have been shared.
pub fn forks() -> u32 {
    FORKS.load(Ordering::SeqCst)
}

/// Adoptions for which this process vouched that it shares the description with nobody, and of how many of them the service knows by now
/// that this may be over.
static VOUCHED: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];

/// Says that the process is about to vouch for a description. Before it looks for the last time whether it may.
pub fn note_vouched() {
    VOUCHED[0].fetch_add(1, Ordering::SeqCst);
}

/// How often it has vouched, unless the service knows that all that may be over. After [`note_fork`].
pub fn vouched() -> Option<u32> {
    let vouched = VOUCHED[0].load(Ordering::SeqCst);
    (vouched != VOUCHED[1].load(Ordering::SeqCst)).then_some(vouched)
}

/// Says that the service knows that what was vouched for so often may be over.
pub fn note_shared(vouched: u32) {
    VOUCHED[1].fetch_max(vouched, Ordering::SeqCst);
}

/// The lowest number that a descriptor of the library's own ever had here, or in a process this one was forked from.
static LOWEST_OWN: AtomicI32 = AtomicI32::new(i32::MAX);

/// Says that a number is a descriptor of the library's own from now on.
pub fn note_own_descriptor(number: i32) {
    LOWEST_OWN.fetch_min(number, Ordering::Relaxed);
}

/// Whether a number may be a descriptor of the library's own. They are kept high: most numbers of programs are told by this.
#[inline]
pub fn may_be_own(number: i32) -> bool {
    number >= LOWEST_OWN.load(Ordering::Relaxed)
}

/// Whether libc says that this process never had a second thread (false when it does not say).
pub fn single_threaded() -> bool {
    let flag = weak_symbol!("__libc_single_threaded");
    // SAFETY: glibc's variable, one byte that is only read.
    !flag.is_null() && unsafe { flag.read_volatile() } != 0
}

/// Lets a thread be cancelled in a call of the kernel that may wait, as libc's own functions do.
pub fn cancellable(call: impl FnOnce() -> isize) -> isize {
    let function = weak_symbol!("pthread_setcanceltype");
    if function.is_null() || single_threaded() {
        return call();
    }
    // SAFETY: the symbol of that name has this type in every libc.
    let set_type: extern "C" fn(c_int, *mut c_int) -> c_int = unsafe { core::mem::transmute(function) };
    const ASYNCHRONOUS: c_int = 1;
    let mut before: c_int = 0;
    set_type(ASYNCHRONOUS, &raw mut before);
    let result = call();
    set_type(before, core::ptr::null_mut());
    result
}

/// The value of an environment variable.
pub fn environment(name: &str) -> Option<&'static [u8]> {
    let variable = weak_symbol!("environ").cast::<*const *const c_char>();
    if variable.is_null() {
        return None;
    }
    // SAFETY: libc's `environ`: null, or an array of strings that ends with a null.
    unsafe {
        let mut entry = *variable;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            if let Some(value) = text.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"=")) {
                return Some(value);
            }
            entry = entry.add(1);
        }
    }
    None
}

/// Whether the program runs with more rights than who started it (`AT_SECURE`); also when that cannot be told.
pub fn runs_secure() -> bool {
    const AT_SECURE: u64 = 23;
    let function = weak_symbol!("getauxval");
    if !function.is_null() {
        // SAFETY: the symbol of that name has this type in every libc.
        let value: extern "C" fn(c_ulong) -> c_ulong = unsafe { core::mem::transmute(function) };
        return value(AT_SECURE) != 0;
    }
    let Ok(file) = raw::open_read(c"/proc/self/auxv") else { return true };
    let mut vector = [0_u8; 1024];
    let length = raw::read(file, &mut vector).unwrap_or(0);
    raw::close(file);
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    vector[..length]
        .chunks_exact(16)
        .find(|pair| word(&pair[..8]) == AT_SECURE)
        .is_none_or(|pair| word(&pair[8..]) != 0)
}

/// The file creation mask, from `/proc/self/status` (asking by `umask` would change it for a moment).
pub fn read_umask() -> Option<u32> {
    let _held = SignalsHeld::hold();
    let file = raw::open_read(c"/proc/self/status").ok()?;
    let mut text = [0_u8; 1024];
    let length = raw::read(file, &mut text).unwrap_or(0);
    raw::close(file);
    parse_umask(&text[..length])
}

fn parse_umask(status: &[u8]) -> Option<u32> {
    let line = status.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(b"Umask:"))?;
    line.trim_ascii().iter().try_fold(0, |mask: u32, digit| match digit {
        b'0'..=b'7' => Some(mask << 3 | u32::from(digit - b'0')),
        _ => None,
    })
}

/// Whether the size of files this process writes is limited (`RLIMIT_FSIZE`).
pub fn file_size_limited() -> bool {
    raw::limit(sys::RLIMIT_FSIZE).map_or(true, |(soft, _)| soft != u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_octal() {
        assert_eq!(parse_umask(b"Name:\tx\nUmask:\t0022\nState:\tR\n"), Some(0o22));
        assert_eq!(parse_umask(b"Umask:\t9"), None);
        assert_eq!(parse_umask(b"State:\tR"), None);
        assert!(read_umask().is_some());
    }

    #[test]
    fn the_process_is_seen_as_it_is() {
        assert!(!runs_secure());
        assert!(!single_threaded(), "the test harness runs threads");
        assert_eq!(environment("PATH"), std::env::var("PATH").ok().as_deref().map(str::as_bytes));
        assert_eq!(environment("POOLFS_NO_SUCH_VARIABLE"), None);
    }
}
