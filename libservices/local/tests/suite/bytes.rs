//! Tests of the coherence of direct and buffered I/O on one file.

use crate::support::{Filesystem, ROOT, create, in_namespace, name, open, read, write};
use poolfs_libservice::{Durability, Libservice, NameChange};
use poolfs_types::{NodeId, OpenFlags, SetAttributes};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

const KINDS: [&str; 4] = ["tmpfs", "ext4", "xfs", "btrfs"];

/// A small generator, so that a failure can be run again.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

fn each(test: &str, check: impl Fn(&str, &Filesystem)) {
    in_namespace(test, || {
        for kind in KINDS {
            check(kind, &Filesystem::new(kind, 320));
        }
    });
}

/// Requests at every alignment, from memory at every alignment, compared with an array and with what the kernel shows.
#[test]
fn mixed_requests_agree_with_an_array() {
    each("bytes::mixed_requests_agree_with_an_array", |kind, filesystem| {
        let layer = open(&filesystem.path());
        let (node, handle) = create(&layer, NodeId::ROOT, "file");
        let outside = std::fs::File::open(filesystem.path().join("file")).expect("the file from outside");
        let mut numbers = Numbers(0x9E37_79B9);
        let mut model: Vec<u8> = Vec::new();
        let mut memory = vec![0u8; 1 << 20];
        for round in 0..600 {
            let unit = [1, 512, 4096][numbers.next(3) as usize];
            let offset = (numbers.next(600_000) / unit * unit) as usize;
            let length = (numbers.next(300_000) / unit * unit).max(1) as usize;
            let skew = [0, 512, 7][numbers.next(3) as usize];
            match numbers.next(8) {
                0..4 => {
                    memory[skew..skew + length].fill_with(|| numbers.next(251) as u8);
                    write(&layer, handle, offset as u64, &memory[skew..skew + length]);
                    model.resize(model.len().max(offset + length), 0);
                    model[offset..offset + length].copy_from_slice(&memory[skew..skew + length]);
                }
                4 => {
                    let size = SetAttributes { size: Some(offset as u64), ..Default::default() };
                    layer.setattr(&ROOT, node, &size, Some(handle)).expect("truncate");
                    model.resize(offset, 0);
                }
                _ => {
                    let part = &mut memory[skew..skew + length];
                    let got = layer.read(&ROOT, handle, offset as u64, part).expect("read");
                    let expected = &model[offset.min(model.len())..(offset + length).min(model.len())];
                    assert!(part[..got] == *expected, "{kind}, round {round}: read {offset}+{length} is wrong");
                }
            }
            let size = layer.getattr(&ROOT, node).expect("getattr").size;
            assert_eq!(size, model.len() as u64, "{kind}, round {round}: the size was rounded");
            if round % 50 == 0 {
                let mut seen = vec![0; model.len() + 1];
                let got = outside.read_at(&mut seen, 0).expect("read from outside");
                assert!(seen[..got] == model[..], "{kind}, round {round}: the kernel shows other bytes");
            }
        }
    });
}

/// One thread rewrites the body of a file while another rewrites its unaligned tail and a third reads both: nothing of either
/// may be lost or torn back to an older version.
#[test]
fn body_and_tail_do_not_disturb_each_other() {
    each("bytes::body_and_tail_do_not_disturb_each_other", |kind, filesystem| {
        const BODY: usize = 128 << 10;
        const TAIL: usize = 1000;
        const ROUNDS: u8 = 150;
        let layer = open(&filesystem.path());
        let (_, handle) = create(&layer, NodeId::ROOT, "file");
        // The tail starts inside the last page of the body's writer, so that both touch the same page.
        let tail_at = (BODY + 700) as u64;
        write(&layer, handle, 0, &vec![0; BODY + 700 + TAIL]);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut newest = 0;
                while !done.load(Ordering::Acquire) {
                    let tail = read(&layer, handle, tail_at, TAIL);
                    assert!(tail.len() == TAIL && tail[0] >= newest, "{kind}: an older tail came back");
                    newest = tail[0];
                }
            });
            let bodies = scope.spawn(|| {
                for round in 1..=ROUNDS {
                    write(&layer, handle, 0, &vec![round; BODY + 700]);
                    let seen = read(&layer, handle, 0, BODY + 700);
                    assert!(seen.iter().all(|&byte| byte == round), "{kind}: the body of round {round} is torn");
                }
            });
            for round in 1..=ROUNDS {
                write(&layer, handle, tail_at, &vec![round; TAIL]);
                let seen = read(&layer, handle, tail_at, TAIL);
                assert!(seen.iter().all(|&byte| byte == round), "{kind}: the tail of round {round} is torn");
            }
            bodies.join().expect("the writer of bodies");
            done.store(true, Ordering::Release);
            reader.join().expect("the reader");
        });
        layer.fsync(&ROOT, handle, Durability::Data).expect("fsync");
        let all = read(&layer, handle, 0, BODY + 700 + TAIL + 1);
        assert_eq!(all.len(), BODY + 700 + TAIL);
        assert!(all.iter().all(|&byte| byte == ROUNDS), "{kind}: not everything is of the last round");
    });
}

/// Appends of several handles and threads, beside a writer inside the file: all are there, each where its answer said.
#[test]
fn appends_go_where_they_say() {
    each("bytes::appends_go_where_they_say", |kind, filesystem| {
        let layer = open(&filesystem.path());
        let (node, handle) = create(&layer, NodeId::ROOT, "log");
        write(&layer, handle, 0, &[0xFF; 100_000]);
        let flags = OpenFlags::WRITE_ONLY | OpenFlags::APPEND;
        let places: Vec<(u64, Vec<u8>)> = std::thread::scope(|scope| {
            let layer = &layer;
            let writers: Vec<_> = (0..4u8)
                .map(|writer| {
                    scope.spawn(move || {
                        let own = layer.open(&ROOT, node, flags).expect("open for append");
                        let mut places = Vec::new();
                        for round in 0..100usize {
                            let record = vec![writer; 1 + (round * 977 + usize::from(writer)) % 9000];
                            // The offset given is of no account.
                            let written = layer.write(&ROOT, own, 3, &record).expect("append");
                            assert_eq!(written.count, record.len());
                            places.push((written.offset, record));
                        }
                        layer.release(own);
                        places
                    })
                })
                .collect();
            for round in 0..50 {
                write(layer, handle, 4096, &vec![round; 65536]);
            }
            writers.into_iter().flat_map(|writer| writer.join().expect("a writer")).collect()
        });
        let total: usize = places.iter().map(|(_, record)| record.len()).sum();
        assert_eq!(layer.getattr(&ROOT, node).expect("getattr").size, 100_000 + total as u64, "{kind}");
        for (offset, record) in places {
            assert!(read(&layer, handle, offset, record.len()) == record, "{kind}: no record at {offset}");
        }
    });
}

/// A handle that asks for synchrony gets it, and the layer does not mistake its flags for anything else.
#[test]
fn synchronous_handles_write_and_read() {
    each("bytes::synchronous_handles_write_and_read", |kind, filesystem| {
        let layer = open(&filesystem.path());
        let (node, handle) = create(&layer, NodeId::ROOT, "file");
        for flags in [OpenFlags::DATA_SYNC, OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC] {
            let sync = layer.open(&ROOT, node, OpenFlags::READ_WRITE | flags).expect("open");
            let data = vec![flags.bits() as u8 ^ 0x5A; 70_001];
            write(&layer, sync, 3, &data);
            assert_eq!(read(&layer, handle, 3, 80_000), data, "{kind}");
            layer.release(sync);
        }
        assert_eq!(layer.lookup(&ROOT, NodeId::ROOT, name("file")).expect("lookup").node, node);
    });
}

/// How many descriptors of this process are open for direct I/O.
/// Content that is about to take another's place has blocks, by which ext4 commits it before the name; not what only gets a name.
#[test]
fn the_kernel_begins_to_write_what_is_to_replace_something() {
    in_namespace("bytes::the_kernel_begins_to_write_what_is_to_replace_something", || {
        let filesystem = Filesystem::new("ext4", 64);
        let layer = open(&filesystem.path());
        let file = filesystem.path().join("file");
        // The layer itself, where it can, writes past the kernel's cache.
        std::fs::write(&file, [7_u8; 3000]).expect("written");
        let node = layer.lookup(&ROOT, NodeId::ROOT, name("file")).expect("there").node;
        let is_delayed = || {
            let extents = std::process::Command::new("filefrag").arg("-v").arg(&file).output();
            let extents = extents.expect("filefrag (package e2fsprogs)");
            assert!(extents.status.success(), "{extents:?}");
            String::from_utf8_lossy(&extents.stdout).contains("delalloc")
        };
        layer.write_before_names(&ROOT, node, NameChange::Adds).expect("nothing to do");
        assert!(is_delayed(), "ext4 gives blocks late");
        layer.write_before_names(&ROOT, node, NameChange::Replaces).expect("begun");
        assert!(!is_delayed(), "it has no blocks");
        layer.write_before_names(&ROOT, NodeId::ROOT, NameChange::Replaces).expect("a directory has no such content");
        layer.forget(node, 1);
    });
}

fn direct_descriptors() -> usize {
    let infos = std::fs::read_dir("/proc/self/fdinfo").expect("fdinfo");
    let texts = infos.filter_map(|info| std::fs::read_to_string(info.ok()?.path()).ok());
    let flags = texts.filter_map(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
        u32::from_str_radix(line.trim(), 8).ok()
    });
    flags.filter(|flags| flags & OpenFlags::DIRECT.bits() != 0).count()
}

#[test]
fn only_larger_files_of_disks_move_directly() {
    each("bytes::only_larger_files_of_disks_move_directly", |kind, filesystem| {
        let layer = open(&filesystem.path());
        let (_, small) = create(&layer, NodeId::ROOT, "small");
        write(&layer, small, 0, &[1; 60_000]);
        assert_eq!(read(&layer, small, 0, 70_000).len(), 60_000);
        assert_eq!(direct_descriptors(), 0, "{kind}: a small file");
        let (_, large) = create(&layer, NodeId::ROOT, "large");
        write(&layer, large, 0, &[2; 70_000]);
        assert_eq!(direct_descriptors(), usize::from(kind != "tmpfs"), "{kind}: a large file");
        layer.release(large);
        assert_eq!(direct_descriptors(), 0, "{kind}: released");
    });
}
