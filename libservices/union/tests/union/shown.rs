//! What clients read of a sketch by themselves is what the union would have told them.

use crate::support::*;
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_ipc::segment::{SegmentView, SketchFiles};
use poolfs_libservice::types::{AllocateMode, Errno, HandleId, OpenFlags, SetAttributes, XattrFlags};
use poolfs_libservice::{Lease, Libservice, Memory};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const BLOCK: u64 = 4096;
/// Of the lower file: whole blocks, and a part of one.
const BLOCKS: u64 = 40;
const SIZE: u64 = BLOCKS * BLOCK + 100;

#[derive(Default)]
struct Flag(AtomicBool);

impl Lease for Flag {
    fn revoke(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn over(content: &[u8], mode: u32) -> Arc<Union> {
    let below = Memory::new();
    put(&*below, "f", content);
    let changes = SetAttributes { permissions: Some(mode), ..SetAttributes::default() };
    below.setattr(ROOT, node(&*below, "f").unwrap(), &changes, None).unwrap();
    over_layer(below)
}

fn over_layer(below: Arc<Memory>) -> Arc<Union> {
    let pool = CachePool::new(CacheConfig::with_limit(16 << 20)).unwrap();
    let cached = |layer: Arc<Memory>| Cache::new(&pool, layer) as Arc<dyn Libservice>;
    let lower = Lower { layer_id: "below".into(), layer: cached(below), is_union: false };
    let config = UnionConfig::new(cached(Memory::new()), vec![lower]);
    let shared_memory = move |length| Ok(pool.shared_memory(length).expect("memory"));
    Union::open(UnionConfig { shared_memory: Some(Arc::new(shared_memory)), ..config }).unwrap()
}

/// A client of one file.
struct Client {
    union: Arc<Union>,
    handle: HandleId,
    given: Option<(SegmentView, Arc<Flag>)>,
    /// Blocks read by itself, by whether there was a file below.
    blocks: [u64; 2],
}

impl Client {
    fn new(union: &Arc<Union>) -> Self {
        let handle = open(&**union, "f", OpenFlags::READ_ONLY).unwrap();
        Self { union: union.clone(), handle, given: None, blocks: [0; 2] }
    }

    fn ask(&mut self) -> Result<bool, Errno> {
        let lease = Arc::new(Flag::default());
        let theirs: Arc<dyn Lease> = lease.clone();
        let segment = self.union.segment(self.handle, &theirs).map_err(|error| error.errno())?;
        let of_sketch = segment.base.is_some();
        let view = match segment.base {
            None => SegmentView::new(segment.map, segment.data, segment.capacity),
            Some(base) => {
                let files = SketchFiles {
                    moved: base.moved,
                    blocks: base.blocks,
                    map: base.map,
                    data: base.data,
                    capacity: base.capacity,
                };
                SegmentView::of_sketch(segment.map, segment.data, segment.capacity, files)
            }
        };
        self.given = Some((view.expect("a view"), lease));
        Ok(of_sketch)
    }

    /// What can be read without asking, and whether that is all.
    fn read(&mut self, offset: u64, length: usize) -> (Vec<u8>, bool) {
        let is_over =
            self.given.as_ref().is_none_or(|(view, lease)| view.is_over(offset) || lease.0.load(Ordering::SeqCst));
        if is_over {
            self.ask().expect("a segment");
        }
        let (view, lease) = self.given.as_ref().expect("just asked for");
        let mut bytes = vec![0xEE; length];
        // SAFETY: the vector has that many bytes.
        let read = unsafe { view.read(offset, bytes.as_mut_ptr(), length, || !lease.0.load(Ordering::SeqCst)) };
        bytes.truncate(read.count);
        self.blocks[usize::from(view.ranges().count() > 2)] += read.count as u64 / BLOCK;
        (bytes, read.is_whole)
    }

    fn asked(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let count = self.union.read(ROOT, self.handle, offset, &mut bytes).expect("read");
        bytes.truncate(count);
        bytes
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.union.release(self.handle);
    }
}

#[test]
fn every_change_of_a_sketch_is_seen() {
    let content: Vec<u8> = (0..SIZE).map(|at| (at / 11 % 251) as u8).collect();
    for seed in 1..=8u64 {
        let union = over(&content, 0o644);
        let mut client = Client::new(&union);
        let mut dice = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut below = |limit: u64| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            dice % limit
        };
        for step in 0..600u64 {
            let (offset, length) = (below(SIZE + 3 * BLOCK), 1 + below(3 * BLOCK));
            let file = node(&*union, "f").unwrap();
            match below(40) {
                0..=9 => write_at(&*union, "f", offset, &vec![step as u8; length as usize]),
                10..=13 => write_at(&*union, "f", offset / BLOCK * BLOCK, &vec![step as u8; BLOCK as usize]),
                14 => {
                    let changes = SetAttributes { size: Some(offset), ..SetAttributes::default() };
                    union.setattr(ROOT, file, &changes, None).unwrap();
                }
                15 => {
                    let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
                    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                    union.fallocate(ROOT, handle, punch, offset, length).unwrap();
                    union.release(handle);
                }
                16 => fsync(&*union, "f"),
                _ => {}
            }
            let (at, length) = (below(SIZE + 3 * BLOCK), 1 + below(4 * BLOCK) as usize);
            // Who is asked has what is in transit copied first.
            let early = (step % 2 == 0).then(|| client.read(at, length));
            let asked = client.asked(at, length);
            let (read, whole) = early.unwrap_or_else(|| client.read(at, length));
            assert!(
                asked.starts_with(&read) && (!whole || read == asked),
                "seed {seed}, step {step}, {length} at {at}"
            );
        }
        assert!(client.blocks[1] > 100, "seed {seed}: {:?} blocks were read without asking", client.blocks);
        drop(client);
        close(union);
    }
}

#[test]
fn a_sketch_is_shown_to_those_who_could_read_what_is_below() {
    let content = vec![7; SIZE as usize];
    let union = over(&content, 0o600);
    let mut client = Client::new(&union);
    assert_eq!(client.ask(), Ok(false));
    write_at(&*union, "f", 5, b"moved");
    assert_eq!(client.ask(), Ok(true));
    let permit = |mode| {
        let changes = SetAttributes { permissions: Some(mode), ..SetAttributes::default() };
        union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap();
    };
    permit(0o644);
    assert_eq!(client.ask(), Err(Errno::EOPNOTSUPP), "what was secret below stays so");
    permit(0o200);
    assert_eq!(client.ask(), Ok(true));
    let give = SetAttributes { uid: Some(1000), ..SetAttributes::default() };
    union.setattr(ROOT, node(&*union, "f").unwrap(), &give, None).unwrap();
    assert_eq!(client.ask(), Err(Errno::EOPNOTSUPP), "another one's file");
    drop(client);
    close(union);
}

#[test]
fn a_list_below_that_is_gone_above_is_no_right_to_what_is_below() {
    const LIST: &[u8] = b"system.posix_acl_access";
    const NOBODY: u32 = u32::MAX;
    let entries = [(1u16, 6u16, NOBODY), (2, 4, 1000), (4, 0, NOBODY), (16, 4, NOBODY), (32, 0, NOBODY)];
    let list = entries.iter().fold(2u32.to_le_bytes().to_vec(), |mut list, (tag, permissions, id)| {
        list.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        list.extend(id.to_le_bytes());
        list
    });
    let below = Memory::new();
    put(&*below, "f", &[7; SIZE as usize]);
    let file = node(&*below, "f").unwrap();
    below.setxattr(ROOT, file, LIST, &list, XattrFlags::empty()).unwrap();
    let union = over_layer(below);
    let mut client = Client::new(&union);
    write_at(&*union, "f", 5, b"moved");
    let file = node(&*union, "f").unwrap();
    union.removexattr(ROOT, file, LIST).unwrap();
    let changes = SetAttributes { permissions: Some(0o640), ..SetAttributes::default() };
    union.setattr(ROOT, file, &changes, None).unwrap();
    assert_eq!(client.ask(), Err(Errno::EOPNOTSUPP), "its group may not read what is below");
    drop(client);
    close(union);
}

/// Every block says in each word in which version it is; the lower file is version 0.
#[test]
fn readers_see_no_older_block_than_they_know_of_while_others_move_it() {
    const LENGTH: usize = (BLOCKS * BLOCK) as usize;
    for _ in 0..3 {
        let union = over(&[0; LENGTH], 0o644);
        write_at(&*union, "f", 0, &[1; 8]);
        let done: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
        let stop = AtomicBool::new(false);
        // Blocks that each reader has read without asking.
        let reads = [const { AtomicU64::new(0) }; 2];
        std::thread::scope(|scope| {
            for (first, reads) in (0..).zip(&reads) {
                let (union, done, stop) = (&union, &done, &stop);
                scope.spawn(move || {
                    let mut client = Client::new(union);
                    let mut at = first;
                    while !stop.load(Ordering::Relaxed) {
                        at = at % (BLOCKS - 1) + 1;
                        let known = done[at as usize].load(Ordering::SeqCst);
                        let (bytes, whole) = client.read(at * BLOCK + 64, 64);
                        reads.fetch_add(u64::from(whole), Ordering::Relaxed);
                        let seen = if whole { bytes } else { client.asked(at * BLOCK + 64, 64) };
                        let is_new = seen.iter().all(|&byte| u64::from(byte) >= known);
                        assert!(is_new, "block {at}: {seen:?}, {known} known");
                    }
                });
            }
            for version in 1..=u8::MAX {
                for block in 1..BLOCKS {
                    write_at(&*union, "f", block * BLOCK + 64, &[version; 64]);
                    done[block as usize].store(u64::from(version), Ordering::SeqCst);
                }
                if version >= 40 && reads.iter().all(|reads| reads.load(Ordering::Relaxed) > 100) {
                    break;
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let reads = reads.each_ref().map(|reads| reads.load(Ordering::Relaxed));
        assert!(reads.iter().all(|&reads| reads > 0), "{reads:?} blocks were read without asking");
        close(union);
    }
}
