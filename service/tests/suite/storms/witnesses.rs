//! Well-behaved clients: they write, read back what they wrote, and measure how long that takes.

use crate::queue::{connect, handle, read, write};
use poolfs_ipc::Connection;
use poolfs_ipc::wire::Status;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BLOCK: u64 = 3000;
const BLOCKS: u64 = 16;

/// What every block of a witness's file begins with, and nobody else may ever see.
pub const MARK: [u8; 8] = *b"\xf1witness";

/// One way to a file of one's own.
pub struct Witness {
    file: File,
    library: Option<(Connection, u64)>,
}

/// Ends the witnesses also when the test fails.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn create(at: &Path, name: &str) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(at.join(name)).expect("made")
}

impl Witness {
    pub fn by_library(folder: &Path, instance: &str, at: &Path) -> Self {
        let (file, connection) = (create(at, "witness-of-requests"), connect(folder, instance));
        let handle = handle(&file, &connection);
        Self { file, library: Some((connection, handle)) }
    }

    pub fn by_kernel(at: &Path) -> Self {
        Self { file: create(at, "witness-of-the-kernel"), library: None }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        match &self.library {
            Some((connection, handle)) => {
                let reply = write(connection, *handle, offset, bytes);
                assert_eq!((reply.status, reply.length), (Status::Done as u32, bytes.len() as u64), "{reply:?}");
            }
            None => self.file.write_all_at(bytes, offset).expect("written"),
        }
    }

    fn read(&self, offset: u64) -> Vec<u8> {
        match &self.library {
            Some((connection, handle)) => read(connection, *handle, offset, BLOCK as usize),
            None => {
                let mut bytes = vec![0; BLOCK as usize];
                self.file.read_exact_at(&mut bytes, offset).expect("read");
                bytes
            }
        }
    }
}

/// Writes and reads until told to stop: how many rounds, and how long the longest operation took.
pub fn witness(witness: Witness, stop: &AtomicBool) -> (u64, Duration) {
    let content = |round: u64| [&MARK[..], &round.to_le_bytes(), &vec![round as u8; BLOCK as usize - 16]].concat();
    let mut longest = Duration::ZERO;
    let mut timed = |work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        longest = longest.max(start.elapsed());
    };
    let mut written = [None; BLOCKS as usize];
    let mut rounds = 0u64;
    while !stop.load(Ordering::Acquire) {
        let block = rounds % BLOCKS;
        timed(&mut || witness.write(block * BLOCK, &content(rounds)));
        written[block as usize] = Some(rounds);
        let (other, expected) = (rounds * 7 % BLOCKS, written[(rounds * 7 % BLOCKS) as usize]);
        if let Some(expected) = expected {
            timed(&mut || assert!(witness.read(other * BLOCK) == content(expected), "block {other}, round {rounds}"));
        }
        if rounds.is_multiple_of(64) {
            timed(&mut || witness.file.sync_data().expect("synced"));
        }
        rounds += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    (rounds, longest)
}
