//! Tests of segments that clients read without requests: they hold the file's present content and nothing else, whatever was
//! there before.

use crate::support::*;
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::types::{AllocateMode, Errno, HandleId, OpenFlags, SetAttributes};
use poolfs_libservice::{Lease, Libservice, Memory, Segment, SharedContent};
use poolfs_union::{Lower, Union, UnionConfig};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const BLOCK: u64 = 4096;
/// Of the lower file: whole blocks, and a part of one.
const BLOCKS: u64 = 40;
const SIZE: u64 = BLOCKS * BLOCK + 100;
const OLD: u8 = 7;

struct Forever;

impl Lease for Forever {
    fn revoke(&self) {}
}

/// A union over a cached file.
struct Scene {
    union: Arc<Union>,
    handle: HandleId,
}

impl Scene {
    fn new() -> Self {
        let below = Memory::new();
        put(&*below, "f", &[OLD; SIZE as usize]);
        let pool = CachePool::new(CacheConfig::with_limit(16 << 20)).unwrap();
        let cached = |layer: Arc<Memory>| Cache::new(&pool, layer) as Arc<dyn Libservice>;
        let lower = Lower { layer_id: "below".into(), layer: cached(below), is_union: false };
        let union = Union::open(UnionConfig::new(cached(Memory::new()), vec![lower])).unwrap();
        let handle = open(&*union, "f", OpenFlags::READ_ONLY).unwrap();
        Self { union, handle }
    }

    fn segment(&self) -> Result<Segment, Errno> {
        let lease: Arc<dyn Lease> = Arc::new(Forever);
        self.union.segment(self.handle, &lease).map_err(|error| error.errno())
    }

    fn content(&self) -> Vec<u8> {
        let mut bytes = vec![0; 4 * SIZE as usize];
        let count = self.union.read(ROOT, self.handle, 0, &mut bytes).expect("read");
        bytes.truncate(count);
        bytes
    }

    fn set_size(&self, size: u64) {
        let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        self.union.setattr(ROOT, node(&*self.union, "f").unwrap(), &changes, None).unwrap();
    }

    /// What there is in a segment besides the content, if there is anything: what is not cached is zeros.
    fn excess(&self, segment: &Segment) -> Option<String> {
        let file = File::from(segment.data.try_clone().expect("a descriptor"));
        let most = (SIZE + 16 * BLOCK).min(file.metadata().expect("metadata").len());
        let mut raw = vec![0; most as usize];
        file.read_exact_at(&mut raw, 0).expect("readable");
        let mut content = self.content();
        let size = content.len();
        content.resize(raw.len().max(size), 0);
        let blocks = raw.chunks(BLOCK as usize).zip(content.chunks(BLOCK as usize));
        let wrong = blocks.enumerate().find(|(_, (raw, content))| raw != content && raw.iter().any(|&byte| byte != 0));
        wrong.map(|(block, _)| format!("block {block} of a file of {size} bytes"))
    }
}

#[test]
fn a_sketch_is_read_by_requests() {
    let scene = Scene::new();
    assert_eq!(scene.content().len(), SIZE as usize);
    let before = scene.segment().expect("of what has not been changed");
    assert_eq!(scene.excess(&before), None);
    write_at(&*scene.union, "f", 0, &[1; BLOCK as usize]);
    assert_eq!(scene.segment().err(), Some(Errno::EOPNOTSUPP), "the lower file has what was there before");
    fsync(&*scene.union, "f");
    assert_eq!(scene.segment().err(), Some(Errno::EOPNOTSUPP));
    scene.union.release(scene.handle);
    close(scene.union);
}

#[test]
fn no_segment_holds_more_than_the_content() {
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    let mut given = 0;
    for seed in 1..=8u64 {
        let scene = Scene::new();
        let mut dice = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut below = |limit: u64| {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            dice % limit
        };
        // A sketch of which every block has moved is none any more.
        let is_sketch_for = below(3) * 40;
        for step in 0..300u64 {
            let (offset, length) = (below(SIZE + 3 * BLOCK), 1 + below(3 * BLOCK));
            match below(20) {
                0..=9 => write_at(&*scene.union, "f", offset, &vec![100 + (step % 100) as u8; length as usize]),
                10 => scene.set_size(offset),
                11..=12 => {
                    let handle = open(&*scene.union, "f", OpenFlags::READ_WRITE).unwrap();
                    scene.union.fallocate(ROOT, handle, punch, offset, length).unwrap();
                    scene.union.release(handle);
                }
                13 => fsync(&*scene.union, "f"),
                _ => {}
            }
            if step == is_sketch_for {
                scene.set_size(0);
                write_at(&*scene.union, "f", 0, &vec![99; SIZE as usize]);
                fsync(&*scene.union, "f");
            }
            if let Ok(segment) = scene.segment() {
                given += 1;
                assert_eq!(scene.excess(&segment), None, "seed {seed}, step {step}");
            }
        }
        scene.union.release(scene.handle);
        close(scene.union);
    }
    assert!(given > 500, "segments were given {given} times only");
}
