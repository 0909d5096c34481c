//! Tests of block-level copy-up: what sketches copy, preserve, drop and refuse.

use crate::support::*;
use poolfs_libservice::types::{AllocateMode, Errno, Name, NodeId, OpenFlags, SeekTo, SetAttributes};
use poolfs_libservice::{Durability, Libservice, Memory};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 7 % 250) as u8 + 1).collect()
}

/// A union over one lower branch with a file `f` of so many bytes.
fn with_file(length: usize) -> (Branches, Vec<u8>) {
    let branches = Branches::empty(1);
    let content = pattern(length);
    put(&*branches.lowers[0], "f", &content);
    (branches, content)
}

/// The name of the only bitmap in the upper branch.
fn bitmaps(upper: &Memory) -> Vec<String> {
    ls(upper, ".poolfs/bitmaps")
}

#[test]
fn one_byte_moves_one_block() {
    let (branches, mut content) = with_file(100 * BLOCK);
    let union = branches.open();
    let reader = open(&*union, "f", OpenFlags::READ_ONLY).unwrap();
    let mut byte = [0];
    union.read(ROOT, reader, 50 * 4096 + 1, &mut byte).unwrap();
    write_at(&*union, "f", 50 * 4096 + 1, b"\xff");
    content[50 * BLOCK + 1] = 0xff;
    union.read(ROOT, reader, 50 * 4096 + 1, &mut byte).unwrap();
    assert_eq!(byte, [0xff], "a handle opened before the copy-up sees the change");
    union.sync().unwrap();
    union.read(ROOT, reader, 50 * 4096 + 1, &mut byte).unwrap();
    assert_eq!(byte, [0xff], "also when it is done");
    union.release(reader);
    assert_eq!(get(&*union, "f").unwrap(), content);
    let done = union.statistics();
    assert_eq!((done.sketches, done.blocks_moved, done.blocks_copied), (1, 1, 1));
    assert!(stat(&*branches.upper, "f").blocks <= 8, "the upper file holds one block");
    write_at(&*union, "f", 60 * 4096, &[9; 2 * BLOCK]);
    let done = union.statistics();
    assert_eq!((done.blocks_moved, done.blocks_copied), (3, 1), "whole blocks move without a copy");
    close(union);
    assert_eq!(bitmaps(&branches.upper).len(), 1);
    content[60 * BLOCK..62 * BLOCK].fill(9);
    assert_eq!(get(&*branches.open(), "f").unwrap(), content, "after a remount");
}

#[test]
fn attributes_change_without_a_block() {
    let (branches, content) = with_file(10 * BLOCK);
    let before = stat(&*branches.open(), "f");
    let union = branches.open();
    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap();
    let after = stat(&*union, "f");
    assert_eq!(
        (after.inode, after.modified, after.size, after.permissions),
        (before.inode, before.modified, before.size, 0o600)
    );
    fsync(&*union, "f");
    assert_eq!(union.statistics().blocks_moved, 0);
    close(union);
    assert!(bitmaps(&branches.upper).is_empty());
    let union = branches.open();
    assert_eq!((get(&*union, "f").unwrap(), stat(&*union, "f").inode), (content, before.inode));
}

#[test]
fn truncated_down_and_up_shows_zeros() {
    for cut in [0, 1, 4095, 4096, 4097, 9000] {
        let (branches, mut content) = with_file(20_000);
        let union = branches.open();
        resize(&*union, "f", cut);
        resize(&*union, "f", 20_000);
        content[cut as usize..].fill(0);
        assert_eq!(get(&*union, "f").unwrap(), content, "cut at {cut}");
        write_at(&*union, "f", cut + 2, b"x");
        content[cut as usize + 2] = b'x';
        assert_eq!(get(&*union, "f").unwrap(), content, "written after the cut at {cut}");
        close(union);
        assert_eq!(get(&*branches.open(), "f").unwrap(), content, "remounted after the cut at {cut}");
    }
}

#[test]
fn a_whole_file_becomes_ordinary() {
    let (branches, content) = with_file(5 * BLOCK + 100);
    let union = branches.open();
    let inode = stat(&*union, "f").inode;
    let new: Vec<u8> = content.iter().map(|byte| byte ^ 1).collect();
    write_at(&*union, "f", 0, &new);
    assert!(attribute(&*branches.upper, "f", "trusted.poolfs.sketch").is_some());
    fsync(&*union, "f");
    assert!(attribute(&*branches.upper, "f", "trusted.poolfs.sketch").is_none());
    assert!(attribute(&*branches.upper, "f", "trusted.overlay.metacopy").is_none());
    assert!(attribute(&*branches.upper, "f", "trusted.poolfs.origin").is_some());
    assert!(bitmaps(&branches.upper).is_empty());
    assert_eq!(get(&*union, "f").unwrap(), new);
    assert_eq!(get(&*branches.upper, "f").unwrap(), new);
    close(union);
    assert_eq!(stat(&*branches.open(), "f").inode, inode);
}

fn attribute(layer: &dyn Libservice, path: &str, name: &str) -> Option<Vec<u8>> {
    layer.getxattr(ROOT, node(layer, path).unwrap(), name.as_bytes()).ok()
}

#[test]
fn punched_blocks_do_not_show_the_lower_file() {
    let (branches, mut content) = with_file(10 * BLOCK);
    let union = branches.open();
    let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
    let mode = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    union.fallocate(ROOT, handle, mode, 5000, 20_000).unwrap();
    content[5000..25_000].fill(0);
    assert_eq!(union.seek(ROOT, handle, 0, SeekTo::Hole).unwrap(), 8192);
    union.release(handle);
    assert_eq!(get(&*union, "f").unwrap(), content);
    close(union);
    assert_eq!(get(&*branches.open(), "f").unwrap(), content);
}

#[test]
fn hard_links_stay_one_file() {
    let branches = Branches::empty(1);
    let lower = &*branches.lowers[0];
    put(lower, "a", &pattern(3 * BLOCK));
    let (file, root) = (node(lower, "a").unwrap(), node(lower, "").unwrap());
    for other in ["b", "c"] {
        lower.link(ROOT, file, root, name(other)).unwrap();
    }
    let union = branches.open();
    let inode = stat(&*union, "a").inode;
    write_at(&*union, "b", 10, b"changed");
    for path in ["a", "b", "c"] {
        let now = stat(&*union, path);
        assert_eq!((now.inode, now.links), (inode, 3), "{path}");
        assert_eq!(&get(&*union, path).unwrap()[10..17], b"changed", "{path}");
    }
    union.unlink(ROOT, root, name("b")).unwrap();
    close(union);
    let union = branches.open();
    assert_eq!((stat(&*union, "c").links, stat(&*union, "c").inode), (2, inode));
    assert_eq!(&get(&*union, "a").unwrap()[10..17], b"changed");
    union.unlink(ROOT, root, name("a")).unwrap();
    union.unlink(ROOT, root, name("c")).unwrap();
    assert!(ls(&*union, "").is_empty());
    assert!(ls(&*branches.upper, ".poolfs/index").is_empty());
    assert!(bitmaps(&branches.upper).is_empty());
}

#[test]
fn inode_numbers_of_a_listing_are_those_of_lookup() {
    let branches = Branches::empty(2);
    for (at, lower) in branches.lowers.iter().enumerate() {
        mkdir(&**lower, "d");
        put(&**lower, "d/same", b"same");
        put(&**lower, &format!("d/only{at}"), b"x");
    }
    let union = branches.open();
    put(&*union, "d/new", b"new");
    write_at(&*union, "d/only1", 0, b"y");
    let mut expected = std::collections::BTreeMap::new();
    for name in ["new", "only0", "only1", "same"] {
        expected.insert(name.to_string(), stat(&*union, &format!("d/{name}")).inode);
    }
    for union in [union, { branches.open() }] {
        let directory = node(&*union, "d").unwrap();
        let handle = union.opendir(ROOT, directory).unwrap();
        let mut seen = std::collections::BTreeMap::new();
        union
            .readdir(ROOT, handle, 0, &mut |entry| {
                seen.insert(String::from_utf8_lossy(entry.name.as_bytes()).into_owned(), entry.inode);
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
        union.release(handle);
        assert_eq!(seen, expected);
    }
}

/// A union whose only sketch has a durable bitmap, closed.
fn with_bitmap() -> (Branches, String) {
    let (branches, _) = with_file(10 * BLOCK);
    let union = branches.open();
    write_at(&*union, "f", 4096, &[7; 100]);
    fsync(&*union, "f");
    close(union);
    let name = bitmaps(&branches.upper).remove(0);
    (branches, name)
}

fn refuses(branches: &Branches, cause: &str) {
    let before = (fingerprint_of_bitmaps(&branches.upper), branches.upper.clone());
    let union = branches.open();
    let size = stat(&*union, "f").size;
    assert_eq!(size, 10 * 4096, "the file is still listed with its size");
    for flags in [OpenFlags::READ_ONLY, OpenFlags::READ_WRITE, OpenFlags::READ_WRITE | OpenFlags::TRUNCATE] {
        assert_eq!(open(&*union, "f", flags).unwrap_err(), Errno::EIO);
    }
    let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
    assert_eq!(union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap_err(), Errno::EIO);
    let damaged = union.statistics().damaged;
    assert_eq!(damaged.len(), 1);
    assert_eq!(damaged[0].path, "f");
    assert!(damaged[0].cause.contains(cause), "{damaged:?}");
    close(union);
    assert_eq!(fingerprint_of_bitmaps(&branches.upper), before.0, "nothing was overwritten");
}

fn fingerprint_of_bitmaps(upper: &Arc<Memory>) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| (name.clone(), get(&**upper, &format!(".poolfs/bitmaps/{name}")).unwrap());
    bitmaps(upper).into_iter().map(read).collect()
}

fn replace_bitmap(branches: &Branches, name_of: &str, fixture: &[u8]) {
    let path = format!(".poolfs/bitmaps/{name_of}");
    let (parent, last) = split(&*branches.upper, &path);
    let mut bytes = fixture.to_vec();
    // The fixtures were written for the id that is all ones; each union draws its own.
    let id = u128::from_str_radix(name_of, 16).unwrap().to_be_bytes();
    let broken = crc(&bytes) != stored_crc(&bytes);
    bytes[8..24].copy_from_slice(&id);
    if !broken {
        let sum = crc(&bytes);
        bytes[28..32].copy_from_slice(&sum.to_le_bytes());
    }
    branches.upper.unlink(ROOT, parent, last).unwrap();
    put(&*branches.upper, &path, &bytes);
}

fn crc(sector: &[u8]) -> u32 {
    let mut bytes = sector.to_vec();
    bytes[28..32].fill(0);
    crc32c::crc32c(&bytes)
}

fn stored_crc(sector: &[u8]) -> u32 {
    u32::from_le_bytes(sector[28..32].try_into().unwrap())
}

#[test]
fn a_sound_fixture_is_read() {
    let (branches, name) = with_bitmap();
    replace_bitmap(&branches, &name, include_bytes!("../fixtures/sound.bitmap"));
    let union = branches.open();
    let content = get(&*union, "f").unwrap();
    assert_eq!(&content[4096..4196], &[7; 100]);
    assert_eq!(content[..4096], pattern(4096)[..]);
}

#[test]
fn damaged_bitmaps_are_named_and_kept() {
    let (branches, id) = with_bitmap();
    replace_bitmap(&branches, &id, include_bytes!("../fixtures/corrupt.bitmap"));
    refuses(&branches, "checksum");
    let (branches, id) = with_bitmap();
    replace_bitmap(&branches, &id, include_bytes!("../fixtures/newer.bitmap"));
    refuses(&branches, "version 2");
    let (branches, id) = with_bitmap();
    let fixture: &[u8] = include_bytes!("../fixtures/missing.bitmap");
    assert!(fixture.is_empty(), "what is left of a missing bitmap");
    let (parent, last) = split(&*branches.upper, ".poolfs/bitmaps/x");
    assert_eq!(last.as_bytes(), b"x");
    branches.upper.unlink(ROOT, parent, name(&id)).unwrap();
    refuses(&branches, "missing");
    let (branches, id) = with_bitmap();
    branches.upper.unlink(ROOT, parent, name(&id)).unwrap();
    put(&*branches.upper, &format!(".poolfs/bitmaps/{id}"), fixture);
    refuses(&branches, "0 bytes instead of 512");
}

#[test]
fn a_changed_lower_file_is_refused() {
    let (branches, _) = with_bitmap();
    write_at(&*branches.lowers[0], "f", 0, b"other");
    refuses(&branches, "has changed");
}

#[test]
fn a_missing_layer_is_refused_and_removal_still_works() {
    let (branches, _) = with_bitmap();
    let alone = Branches { upper: branches.upper.clone(), lowers: Vec::new() };
    refuses(&alone, "is not part of the union");
    let union = alone.open();
    union.unlink(ROOT, node(&*union, "").unwrap(), name("f")).unwrap();
    assert!(ls(&*union, "").is_empty());
    assert!(bitmaps(&branches.upper).is_empty());
}

#[test]
fn orphans_of_an_unclean_end_are_swept() {
    let (branches, id) = with_bitmap();
    put(&*branches.upper, ".poolfs/bitmaps/00000000000000000000000000000001", b"orphan");
    put(&*branches.upper, ".poolfs/open", b"");
    put(&*branches.upper, ".poolfs/work/w5", b"left");
    let union = branches.open();
    assert_eq!(bitmaps(&branches.upper), [id]);
    assert!(ls(&*branches.upper, ".poolfs/work").is_empty());
    assert_eq!(&get(&*union, "f").unwrap()[4096..4196], &[7; 100]);
}

#[test]
fn a_lower_file_too_large_for_a_bitmap_is_read_only() {
    let branches = Branches::empty(1);
    put(&*branches.lowers[0], "f", b"start");
    resize(&*branches.lowers[0], "f", 1 << 60);
    let union = branches.open();
    let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
    assert_eq!(union.write(ROOT, handle, 0, b"x").unwrap_err(), Errno::EFBIG);
    let mut start = [0; 5];
    union.read(ROOT, handle, 0, &mut start).unwrap();
    assert_eq!(&start, b"start");
    union.release(handle);
    resize(&*union, "f", 0);
    assert_eq!(stat(&*union, "f").size, 0);
}

#[test]
fn a_removed_file_gives_its_room_back_when_nobody_holds_it() {
    let (branches, _) = with_file(100 * BLOCK);
    let union = branches.open();
    let entry = union.lookup(ROOT, NodeId::ROOT, name("f")).unwrap();
    let before = branches.upper.outstanding();
    let handle = union.open(ROOT, entry.node, OpenFlags::READ_WRITE).unwrap();
    union.write(ROOT, handle, 50 * 4096 + 1, &[7; BLOCK]).unwrap();
    union.unlink(ROOT, NodeId::ROOT, name("f")).unwrap();
    union.write(ROOT, handle, 60 * 4096 + 1, &[7; BLOCK]).unwrap();
    union.release(handle);
    union.forget(entry.node, 1);
    // Nothing of it waits for its bitmap to be written; a thread of the union may just look at it.
    let deadline = Instant::now() + Duration::from_secs(60);
    while branches.upper.outstanding() != before {
        assert!(Instant::now() < deadline, "{:?} instead of {before:?}", branches.upper.outstanding());
        std::thread::yield_now();
    }
    close(union);
}

#[test]
fn writes_scattered_over_a_huge_file_are_refused_in_the_end() {
    const SECTOR: u64 = 480 * 8 * 4096;
    const MOST: u64 = 16384 + 8;
    let lower = Memory::new();
    put(&*lower, "f", b"begin");
    let size = SetAttributes { size: Some(2 * MOST * SECTOR), ..SetAttributes::default() };
    let node = lower.lookup(ROOT, NodeId::ROOT, Name::new(b"f").unwrap()).unwrap().node;
    lower.setattr(ROOT, node, &size, None).unwrap();
    let upper = Memory::new();
    let open_union = || {
        let lowers = vec![Lower { layer_id: "layer-0".into(), layer: lower.clone(), is_union: false }];
        let config =
            UnionConfig { flush_interval: std::time::Duration::ZERO, ..UnionConfig::new(upper.clone(), lowers) };
        Union::open(UnionConfig { transit_blocks_max: 0, deferred_copy_ups_max: 0, ..config }).unwrap()
    };
    let union = open_union();
    let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
    let block = vec![7; 4096];
    for sector in 0..MOST {
        union.write(ROOT, handle, sector * SECTOR, &block).unwrap();
    }
    let refused = union.write(ROOT, handle, MOST * SECTOR, &block).unwrap_err();
    assert!(refused == Errno::ENOMEM, "{refused}");
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    let refused = union.fallocate(ROOT, handle, punch, 0, 2 * MOST * SECTOR).unwrap_err();
    assert!(refused == Errno::ENOMEM, "{refused}");
    // Where something was written already, there is room for more, and all of it is found by the next union.
    union.write(ROOT, handle, SECTOR * 9 + 8192, &block).unwrap();
    union.fsync(ROOT, handle, Durability::All).unwrap();
    union.release(handle);
    drop(union);
    let union = open_union();
    let handle = open(&*union, "f", OpenFlags::READ_ONLY).unwrap();
    for at in [SECTOR, SECTOR * 9 + 8192, (MOST - 1) * SECTOR] {
        let mut bytes = vec![0; 4096];
        assert_eq!(union.read(ROOT, handle, at, &mut bytes).unwrap(), 4096);
        assert_eq!(bytes, block);
    }
}
