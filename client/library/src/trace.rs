//! Operation counters, reported at the end of the process when `POOLFS_TRACE` or `POOLFS_REPORT` asks for it.
//!
//! `POOLFS_TRACE=FILE` appends one line per process to FILE, with how many operations took which path. `POOLFS_TRACE=-` writes it to what
//! was standard error when the process began: many programs close theirs before they end. `POOLFS_REPORT` does the same with a longer line:
//! the library's requests by operation, what was left to the kernel by reason, and what was not posted by reason.

use crate::{process, raw};
use core::fmt::Write;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use linux_raw_sys::general as sys;
use poolfs_ipc::OWN_DESCRIPTOR_MIN;
use poolfs_ipc::wire::Operation;
use poolfs_types::Errno;

/// Requests by the number of their operation.
static LIBRARY: [AtomicU64; Operation::ALL.len() + 1] = [const { AtomicU64::new(0) }; Operation::ALL.len() + 1];
static REASONS: [AtomicU64; Reason::ALL.len()] = [const { AtomicU64::new(0) }; Reason::ALL.len()];
static POSTED: AtomicU64 = AtomicU64::new(0);
static UNPOSTED: [AtomicU64; Unposted::ALL.len()] = [const { AtomicU64::new(0) }; Unposted::ALL.len()];
static KERNEL: AtomicU64 = AtomicU64::new(0);
static DIRECT: AtomicU64 = AtomicU64::new(0);
static DIRECT_STATS: AtomicU64 = AtomicU64::new(0);
static SESSIONS_REFUSED: AtomicU64 = AtomicU64::new(0);
static MOUNTS_UNREAD: AtomicU64 = AtomicU64::new(0);
static LAST_ERRNO: AtomicI32 = AtomicI32::new(0);
static REPORTED: AtomicBool = AtomicBool::new(false);

/// What was standard error at the start of the process, for whom a report to it is wanted: the number of a descriptor of our own
/// and one more, and by what it is known again should the program have closed the number.
static KEPT: AtomicI32 = AtomicI32::new(0);
static KEPT_INODE: AtomicU64 = AtomicU64::new(0);
static KEPT_DEVICE: AtomicU64 = AtomicU64::new(0);

const STANDARD_ERROR: i32 = 2;

/// Longest path of the file to report to.
const PATH_BYTES: usize = 512;

/// Longest line; written at once, so that those of several processes do not mix.
const LINE_BYTES: usize = 2048;

/// Why a call that concerned an instance went to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// the offset is not this process's alone: it has forked since the open, or was given the descriptor; or it is to be read with and there are several threads
    SharedOffset,
    /// a descriptor that is used for the first time: adopting it would not pay
    FirstUse,
    /// a descriptor the service gave no handle for, or that was given up (mapped shared)
    NotAdopted,
    /// no session: refused, or lost
    NoSession,
    /// all request buffers are in use
    NoBuffer,
    /// a path with `..`, the root of a mount, or one too long
    Path,
    /// a path that leads into another mount
    OtherMount,
    /// the service leaves it to the kernel
    Service,
}

impl Reason {
    const ALL: [(Self, &'static str); 8] = [
        (Self::SharedOffset, "shared-offset"),
        (Self::FirstUse, "first-use"),
        (Self::NotAdopted, "not-adopted"),
        (Self::NoSession, "no-session"),
        (Self::NoBuffer, "no-buffer"),
        (Self::Path, "path"),
        (Self::OtherMount, "other-mount"),
        (Self::Service, "service"),
    ];
}

/// Why a write of an adopted file was not posted, but waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unposted {
    /// the service has not granted it for this file
    NoGrant,
    /// others may have the description, another number stands for it, something is mapped by it, or its flags were changed
    Shared,
    /// more bytes than are posted at a time
    TooLong,
    /// behind an end that is not known: something else is changing it, or has
    UnknownEnd,
    /// too many posts are on the way, another thread posts, or all request buffers are in use
    NoRoom,
    /// the service took the grant away
    GrantLost,
}

impl Unposted {
    const ALL: [(Self, &'static str); 6] = [
        (Self::NoGrant, "no-grant"),
        (Self::Shared, "shared"),
        (Self::TooLong, "too-long"),
        (Self::UnknownEnd, "unknown-end"),
        (Self::NoRoom, "no-room"),
        (Self::GrantLost, "grant-lost"),
    ];
}

/// Counts a write that is not posted, for a reason.
#[inline]
pub fn unposted(reason: Unposted) {
    UNPOSTED[reason as usize].fetch_add(1, Ordering::Relaxed);
}

/// Counts a write that was posted.
#[inline]
pub fn posted() {
    count(&POSTED);
}

/// Counts why a call is left to the kernel.
#[inline]
pub fn left(reason: Reason) {
    REASONS[reason as usize].fetch_add(1, Ordering::Relaxed);
}

/// Counts a request of the library.
#[inline]
pub fn library(operation: u32) {
    if let Some(counter) = LIBRARY.get(operation as usize) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a call that concerned an instance and went to the kernel.
#[inline]
pub fn kernel() {
    KERNEL.fetch_add(1, Ordering::Relaxed);
}

/// Counts a read that needed no request.
#[inline]
pub fn direct() {
    count(&DIRECT);
}

/// Counts a look at attributes that needed no request.
#[inline]
pub fn direct_stat() {
    count(&DIRECT_STATS);
}

/// Counts one more, without a locked instruction where nobody else counts. A signal handler between the two may get lost.
#[inline]
fn count(counter: &AtomicU64) {
    if process::single_threaded() {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    } else {
        counter.fetch_add(1, Ordering::Relaxed);
    }
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
    LIBRARY.iter().chain(&REASONS).chain(&UNPOSTED).for_each(|counter| counter.store(0, Ordering::Relaxed));
    KERNEL.store(0, Ordering::Relaxed);
    POSTED.store(0, Ordering::Relaxed);
    DIRECT.store(0, Ordering::Relaxed);
    DIRECT_STATS.store(0, Ordering::Relaxed);
    SESSIONS_REFUSED.store(0, Ordering::Relaxed);
    MOUNTS_UNREAD.store(0, Ordering::Relaxed);
    REPORTED.store(false, Ordering::Relaxed);
    // A forked child has its parent's.
    if kept().is_none() && targets().contains(&Some(b"-")) {
        keep();
    }
}

/// Where reports are wanted: the short one's place, and the long one's.
fn targets() -> [Option<&'static [u8]>; 2] {
    ["POOLFS_TRACE", "POOLFS_REPORT"].map(|name| process::environment(name).filter(|target| !target.is_empty()))
}

/// Keeps standard error. Who started the process without one gets no report.
fn keep() {
    let Ok(descriptor) = raw::duplicate_up(STANDARD_ERROR, OWN_DESCRIPTOR_MIN) else { return };
    let Ok((inode, device)) = identity(descriptor) else { return raw::close(descriptor) };
    KEPT_INODE.store(inode, Ordering::Relaxed);
    KEPT_DEVICE.store(device, Ordering::Relaxed);
    process::note_own_descriptor(descriptor);
    KEPT.store(descriptor + 1, Ordering::Relaxed);
}

fn identity(descriptor: i32) -> Result<(u64, u64), i32> {
    let found = raw::statx_descriptor(descriptor)?;
    Ok((found.stx_ino, u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor)))
}

/// The descriptor that is kept for reports to standard error, if there is one.
pub fn kept() -> Option<i32> {
    KEPT.load(Ordering::Relaxed).checked_sub(1).filter(|&descriptor| descriptor >= 0)
}

/// Where a report to standard error goes: what the program has at that number now, should it have taken ours.
fn standard_error() -> i32 {
    let known = (KEPT_INODE.load(Ordering::Relaxed), KEPT_DEVICE.load(Ordering::Relaxed));
    kept().filter(|&descriptor| identity(descriptor) == Ok(known)).unwrap_or(STANDARD_ERROR)
}

/// Requests of the library and calls left to the kernel so far.
#[must_use]
pub fn counts() -> (u64, u64) {
    (LIBRARY.iter().map(|counter| counter.load(Ordering::Relaxed)).sum(), KERNEL.load(Ordering::Relaxed))
}

/// Writes the report, once, when it was asked for.
pub fn report() {
    let targets = targets();
    if targets == [None, None] || REPORTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let mut name = [0; 16];
    let name = program(&mut name);
    for (target, is_long) in targets.into_iter().zip([false, true]) {
        let mut line = Line { bytes: [0; LINE_BYTES], length: 0 };
        if let Some(target) = target
            && write_report(&mut line, name, is_long).is_ok()
        {
            deliver(target, line.bytes.get(..line.length).unwrap_or_default());
        }
    }
}

/// Appends a line to what an environment variable names.
fn deliver(target: &[u8], text: &[u8]) {
    if target == b"-" {
        raw::write(standard_error(), text).ok();
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
fn write_report(line: &mut Line, name: &str, is_long: bool) -> core::fmt::Result {
    let (library, kernel) = counts();
    write!(line, "poolfs {} {name} library={library} fuse={kernel}", raw::process_id())?;
    for (name, counter) in [("direct", &DIRECT), ("direct-stats", &DIRECT_STATS), ("posted", &POSTED)] {
        let count = counter.load(Ordering::Relaxed);
        if count > 0 {
            write!(line, " {name}={count}")?;
        }
    }
    let (refused, unread) = (SESSIONS_REFUSED.load(Ordering::Relaxed), MOUNTS_UNREAD.load(Ordering::Relaxed));
    if refused > 0 {
        write!(line, " sessions-refused={refused} errno={}", LAST_ERRNO.load(Ordering::Relaxed))?;
    }
    if unread > 0 {
        write!(line, " mounts-unread={unread}")?;
    }
    if is_long {
        write_details(line, kernel)?;
    }
    writeln!(line)
}

/// What was counted by operation and by reason, each at least once.
fn write_details(line: &mut Line, kernel: u64) -> core::fmt::Result {
    for operation in Operation::ALL {
        let count = LIBRARY.get(operation as usize).map_or(0, |counter| counter.load(Ordering::Relaxed));
        if count > 0 {
            write!(line, " library.{operation:?}={count}")?;
        }
    }
    for ((_, name), counter) in Unposted::ALL.iter().zip(&UNPOSTED) {
        let count = counter.load(Ordering::Relaxed);
        if count > 0 {
            write!(line, " unposted.{name}={count}")?;
        }
    }
    let mut rest = kernel;
    for ((_, name), counter) in Reason::ALL.iter().zip(&REASONS) {
        let count = counter.load(Ordering::Relaxed);
        if count > 0 {
            write!(line, " fuse.{name}={count}")?;
        }
        // What was left for a reason may have been served in another way after all: the rest is never less than nothing.
        rest = rest.saturating_sub(count);
    }
    if rest > 0 { write!(line, " fuse.other={rest}") } else { Ok(()) }
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
    bytes: [u8; LINE_BYTES],
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
