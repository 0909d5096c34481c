//! Parallel writes by io_uring: the kernel is given several at once and answers when the last is done.
//!
//! A direct write waits for the disk, and a disk can do many at a time. Written one after the other, twenty small pieces take the
//! time of twenty disk writes. If io_uring is not available, or all rings are in use, the pieces are written one after the other.

use crate::descriptors::lock;
use io_uring::{IoUring, opcode, types};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::fmt;
use std::io::{Error, ErrorKind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Writes that one ring takes at a time.
const ENTRIES: usize = 32;

/// Most rings of a directory. Each has a descriptor and some pages of memory.
const RINGS_MAX: usize = 4;

/// Most threads of the kernel, of each thread that uses a ring, for writes that cannot begin without waiting, as room on the disk has to be found first.
/// They end when they are idle.
const WAITING_MAX: u32 = 4;

/// Most bytes of one write (Linux moves at most 2 GiB - 4 KiB).
const WRITE_BYTES_MAX: usize = 1 << 30;

/// How long to wait where the kernel does not say when something is done.
const PAUSE: Duration = Duration::from_millis(1);

/// The rings of a directory, made when they are needed.
#[derive(Default)]
pub(crate) struct Rings {
    idle: Mutex<Vec<IoUring>>,
    /// Those there are, idle or in use.
    count: AtomicUsize,
    /// There are none on this machine, or for this process.
    are_refused: AtomicBool,
}

impl fmt::Debug for Rings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Rings").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Rings {
    /// Writes pieces, each with its offset, to a file. For each of them, whether all of it is written; nobody knows what is of the others.
    pub(crate) fn write(&self, file: BorrowedFd<'_>, pieces: &[(u64, &[u8])]) -> Vec<bool> {
        let mut are_written = vec![false; pieces.len()];
        let Some(mut ring) = self.take() else { return are_written };
        let mut parts = pieces.chunks(ENTRIES).zip(are_written.chunks_mut(ENTRIES));
        if parts.all(|(pieces, are_written)| write_at_once(&mut ring, file, pieces, are_written)) {
            lock(&self.idle).push(ring);
        } else {
            // It may have writes that it has not begun, and must not.
            drop(ring);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        are_written
    }

    fn take(&self) -> Option<IoUring> {
        if let Some(ring) = lock(&self.idle).pop() {
            return Some(ring);
        }
        if self.are_refused.load(Ordering::Relaxed) {
            return None;
        }
        let one_more = |count| (count < RINGS_MAX).then_some(count + 1);
        self.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        ring().inspect_err(|error| self.failed(error)).ok()
    }

    fn failed(&self, error: &Error) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        tracing::debug!(%error, "no io_uring: pieces are written one after the other");
        // Memory and descriptors may come back.
        let may_pass = matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::EINTR));
        self.are_refused.fetch_or(!may_pass, Ordering::Relaxed);
    }
}

fn ring() -> std::io::Result<IoUring> {
    let ring = IoUring::new(ENTRIES as u32)?;
    ring.submitter().register_iowq_max_workers(&mut [WAITING_MAX; 2])?;
    Ok(ring)
}

/// Writes as many pieces as a ring takes, and waits for all that were begun. Whether the ring is of use after that.
fn write_at_once(ring: &mut IoUring, file: BorrowedFd<'_>, pieces: &[(u64, &[u8])], are_written: &mut [bool]) -> bool {
    let mut left = 0;
    for (number, (offset, bytes)) in pieces.iter().enumerate() {
        let length = bytes.len().min(WRITE_BYTES_MAX) as u32;
        let write = opcode::Write::new(types::Fd(file.as_raw_fd()), bytes.as_ptr(), length).offset(*offset).build();
        // SAFETY: the kernel uses descriptor and bytes, which are borrowed for as long as this function runs, until it answers. The
        // function returns when all that the kernel was given is answered, and nothing in it panics. What the kernel has not taken
        // by then it will not: the caller closes the ring.
        if unsafe { ring.submission().push(&write.user_data(number as u64)) }.is_err() {
            break;
        }
        left += 1;
    }
    while left > 0 {
        let answer = ring.submit_and_wait(left);
        for done in ring.completion() {
            left = left.saturating_sub(1);
            let number = done.user_data() as usize;
            if let (Some((_, bytes)), Some(is_written)) = (pieces.get(number), are_written.get_mut(number)) {
                *is_written = usize::try_from(done.result()) == Ok(bytes.len());
            }
        }
        match answer {
            Err(error) if error.kind() != ErrorKind::Interrupted => {
                if ring.submission().len() == left {
                    return false;
                }
                // Others are still being written.
                std::thread::sleep(PAUSE);
            }
            _ => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::os::unix::fs::FileExt;

    #[test]
    fn pieces_are_written_whole_or_it_is_said_which_are_not() {
        let file = tempfile::tempfile().expect("a file");
        let rings = Rings::default();
        let contents: Vec<Vec<u8>> = (0..100).map(|number| vec![number; 1000 + usize::from(number)]).collect();
        let pieces: Vec<(u64, &[u8])> =
            contents.iter().enumerate().map(|(number, bytes)| (number as u64 * 5000, &bytes[..])).collect();
        for round in 0..3 {
            let are_written = rings.write(file.as_fd(), &pieces);
            if rings.are_refused.load(Ordering::Relaxed) {
                return assert!(!are_written.contains(&true), "there is no io_uring here");
            }
            assert!(are_written.iter().all(|&is_written| is_written), "round {round}");
        }
        for (offset, bytes) in &pieces {
            let mut found = vec![0; bytes.len()];
            file.read_exact_at(&mut found, *offset).expect("readable");
            assert_eq!(found, *bytes);
        }
        assert_eq!(rings.count.load(Ordering::Relaxed), 1, "one ring is used again");
        let unwritable = std::fs::File::open("/proc/self/exe").expect("readable");
        assert_eq!(rings.write(unwritable.as_fd(), &pieces[..2]), [false; 2]);
    }

    #[test]
    fn who_finds_all_rings_in_use_does_without() {
        let file = tempfile::tempfile().expect("a file");
        let rings = Rings::default();
        let taken: Vec<IoUring> = std::iter::from_fn(|| rings.take()).collect();
        assert!(taken.len() == RINGS_MAX || rings.are_refused.load(Ordering::Relaxed));
        assert_eq!(rings.write(file.as_fd(), &[(0, b"one"), (5, b"two")]), [false; 2]);
        assert_eq!(file.metadata().expect("a file").len(), 0);
    }
}
