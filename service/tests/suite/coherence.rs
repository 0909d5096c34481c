//! Coherence of the two paths under load: what one path was told is written, the other path reads.

use crate::harness::{Running, isolated};
use crate::queue::{connect, handle, read, write};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

const BLOCK: u64 = 4096;
const BLOCKS: usize = 64;
const ROUNDS: u64 = 1500;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("open")
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// Ends the watchers also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Reads all blocks again and again by FUSE: none may ever show a number older than what had been answered before.
fn watch(path: &Path, written: &[AtomicU64], stop: &AtomicBool) -> u64 {
    let file = File::open(path).expect("open");
    let mut reads = 0;
    while !stop.load(Ordering::Acquire) {
        for (block, newest) in written.iter().enumerate() {
            let at_least = newest.load(Ordering::Acquire);
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, block as u64 * BLOCK).expect("read");
            assert!(number(&bytes) >= at_least, "block {block}: {} after {at_least}", number(&bytes));
            reads += 1;
        }
    }
    reads
}

#[test]
fn nobody_reads_what_was_overwritten_on_the_other_path() {
    isolated("coherence::nobody_reads_what_was_overwritten_on_the_other_path", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let path = at.join("f");
        let file = open(&path);
        file.write_all_at(&vec![0; BLOCKS * BLOCK as usize], 0).expect("write");
        let connection = connect(folder, "one");
        let adopted = handle(&file, &connection);
        let written: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let watchers: Vec<_> = (0..3).map(|_| scope.spawn(|| watch(&path, &written, &stop))).collect();
            let end = Stop(&stop);
            for round in 1..=ROUNDS {
                let block = (round * 31) as usize % BLOCKS;
                let offset = block as u64 * BLOCK;
                if round % 3 == 0 {
                    file.write_all_at(&round.to_le_bytes(), offset).expect("write by FUSE");
                    assert_eq!(number(&read(&connection, adopted, offset, 8)), round);
                } else {
                    let reply = write(&connection, adopted, offset, &round.to_le_bytes());
                    assert_eq!((reply.status, reply.length), (0, 8));
                    let mut bytes = [0; 8];
                    file.read_exact_at(&mut bytes, offset).expect("read by FUSE");
                    assert_eq!(number(&bytes), round);
                }
                written[block].store(round, Ordering::Release);
            }
            drop(end);
            assert!(watchers.into_iter().map(|watcher| watcher.join().expect("no old content")).sum::<u64>() > 0);
        });
    });
}

#[test]
fn appends_by_both_paths_are_all_there_and_whole() {
    isolated("coherence::appends_by_both_paths_are_all_there_and_whole", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        // Whoever only appends, and whoever also reads by the descriptor.
        for reads in [false, true] {
            let name = format!("log, reads {reads}");
            let path = at.join(&name);
            let append = || OpenOptions::new().create(true).append(true).read(reads).open(&path).expect("open");
            let (mut by_kernel, by_library) = (append(), append());
            let connection = connect(folder, "one");
            let adopted = handle(&by_library, &connection);
            assert_ne!(handle(&by_kernel, &connection), 0);
            thread::scope(|scope| {
                scope.spawn(|| {
                    for n in 0..500 {
                        by_kernel.write_all(format!("kernel {n:05}\n").as_bytes()).expect("append");
                    }
                });
                for n in 0..500 {
                    let line = format!("request {n:04}\n");
                    let reply = write(&connection, adopted, 0, line.as_bytes());
                    assert_eq!((reply.status, reply.length), (0, line.len() as u64));
                }
            });
            by_kernel.sync_all().expect("fsync");
            for text in [std::fs::read_to_string(&path), std::fs::read_to_string(directory.join(&name))] {
                let text = text.expect("readable");
                assert_eq!(text.lines().count(), 1000);
                for start in ["kernel", "request"] {
                    let own: Vec<&str> = text.lines().filter(|line| line.starts_with(start)).collect();
                    assert!(own.len() == 500 && own.is_sorted(), "{start}: {}", own.len());
                }
            }
        }
    });
}
