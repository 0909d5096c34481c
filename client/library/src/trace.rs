//! How many operations took which path, told at the end of the process when `POOLFS_TRACE` asks for it.
//!
//! `POOLFS_TRACE=FILE` appends one line per process to FILE; `POOLFS_TRACE=-` writes it to standard error.

use crate::state::state_if_mapped;
use crate::{process, raw};
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use linux_raw_sys::general as sys;
use poolfs_types::Errno;

static LIBRARY: AtomicU64 = AtomicU64::new(0);
static KERNEL: AtomicU64 = AtomicU64::new(0);
static SESSIONS_REFUSED: AtomicU64 = AtomicU64::new(0);
static MOUNTS_UNREAD: AtomicU64 = AtomicU64::new(0);
static LAST_ERRNO: AtomicI32 = AtomicI32::new(0);
static REPORTED: AtomicBool = AtomicBool::new(false);

/// Longest path of the file to report to.
const PATH_BYTES: usize = 512;

/// Counts a request of the library.
#[inline]
pub fn library() {
    LIBRARY.fetch_add(1, Ordering::Relaxed);
}

/// Counts a call that concerned an instance and went to the kernel.
#[inline]
pub fn kernel() {
    KERNEL.fetch_add(1, Ordering::Relaxed);
}

/// Counts a session that could not be had, and why.
#[cold]
pub fn no_session(errno: Errno) {
    SESSIONS_REFUSED.fetch_add(1, Ordering::Relaxed);
    LAST_ERRNO.store(errno.raw(), Ordering::Relaxed);
}

/// Counts a reading of the mounts that failed, or found more than there is room for.
#[cold]
pub fn no_mounts() {
    MOUNTS_UNREAD.fetch_add(1, Ordering::Relaxed);
}

/// Starts counting for a new process.
pub fn start() {
    LIBRARY.store(0, Ordering::Relaxed);
    KERNEL.store(0, Ordering::Relaxed);
    SESSIONS_REFUSED.store(0, Ordering::Relaxed);
    MOUNTS_UNREAD.store(0, Ordering::Relaxed);
    REPORTED.store(false, Ordering::Relaxed);
}

/// Requests of the library and calls left to the kernel so far.
#[must_use]
pub fn counts() -> (u64, u64) {
    (LIBRARY.load(Ordering::Relaxed), KERNEL.load(Ordering::Relaxed))
}

/// Writes the report, once, when it was asked for. For the end of the process, not of one that only runs in its memory.
pub fn report() {
    if state_if_mapped().is_some_and(|state| !state.is_own_process()) {
        return;
    }
    let Some(target) = process::environment("POOLFS_TRACE").filter(|target| !target.is_empty()) else { return };
    if REPORTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let (library, kernel) = counts();
    let mut line = Line { bytes: [0; 240], length: 0 };
    let mut name = [0; 16];
    let name = program(&mut name);
    if write_report(&mut line, name, library, kernel).is_err() {
        return;
    }
    let text = line.bytes.get(..line.length).unwrap_or_default();
    if target == b"-" {
        raw::write(2, text).ok();
        return;
    }
    let mut path = [0; PATH_BYTES];
    if let Some(place) = path.get_mut(..target.len()).filter(|_| target.len() < PATH_BYTES) {
        place.copy_from_slice(target);
        let flags = sys::O_WRONLY | sys::O_APPEND | sys::O_CREAT | sys::O_CLOEXEC;
        if let Ok(file) = raw::open(&path, flags, 0o666) {
            raw::write(file, text).ok();
            raw::close(file);
        }
    }
}

/// What kept the library from working stands there only when something did.
fn write_report(line: &mut Line, name: &str, library: u64, kernel: u64) -> core::fmt::Result {
    write!(line, "poolfs {} {name} library={library} kernel={kernel}", raw::process_id())?;
    let (refused, unread) = (SESSIONS_REFUSED.load(Ordering::Relaxed), MOUNTS_UNREAD.load(Ordering::Relaxed));
    if refused > 0 {
        write!(line, " sessions-refused={refused} errno={}", LAST_ERRNO.load(Ordering::Relaxed))?;
    }
    if unread > 0 {
        write!(line, " mounts-unread={unread}")?;
    }
    writeln!(line)
}

/// The program's name as the kernel has it.
fn program(name: &mut [u8; 16]) -> &str {
    let Ok(file) = raw::open_read(c"/proc/self/comm") else { return "?" };
    let length = raw::read(file, name).unwrap_or(0);
    raw::close(file);
    core::str::from_utf8(name.get(..length).unwrap_or_default().trim_ascii()).unwrap_or("?")
}

/// A line being written; what does not fit is an error.
struct Line {
    bytes: [u8; 240],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(core::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}
