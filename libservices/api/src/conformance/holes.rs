//! Conformance cases: holes and allocation.

use super::support::*;
use super::{Capability, Case};
use crate::types::{AllocateMode, Errno, OpenFlags, SeekTo};

pub(super) const CASES: &[Case] = &[
    Case::new("holes/seek_limits", seek_ends_at_the_size),
    Case::new("holes/seek_sound", seek_never_skips_data),
    Case::needing("holes/seek", Capability::Holes, seek_finds_holes),
    Case::needing("holes/punch", Capability::Holes, punched_ranges_read_as_zeros),
    Case::needing("holes/punch_frees", Capability::Holes, punching_gives_blocks_back),
    Case::needing("holes/zero", Capability::ZeroRange, zeroed_ranges_read_as_zeros),
    Case::needing("holes/allocate", Capability::Allocation, allocating_keeps_content),
    Case::new("holes/modes", wrong_modes_are_refused),
];

const PUNCH: AllocateMode = AllocateMode::PUNCH_HOLE.union(AllocateMode::KEEP_SIZE);
const MEBI: u64 = 1 << 20;

fn seek_ends_at_the_size(layer: Layer<'_>) {
    let (_, handle) = create(layer, ROOT, "file");
    for to in [SeekTo::Data, SeekTo::Hole] {
        refused(layer.seek(&ME, handle, 0, to), Errno::ENXIO);
    }
    write(layer, handle, 0, &pattern(1, 10_000));
    assert_eq!(ok(layer.seek(&ME, handle, 1234, SeekTo::Data)), 1234);
    assert_eq!(ok(layer.seek(&ME, handle, 1234, SeekTo::Hole)), 10_000);
    for offset in [10_000, 10_001, u64::MAX] {
        for to in [SeekTo::Data, SeekTo::Hole] {
            refused(layer.seek(&ME, handle, offset, to), Errno::ENXIO);
        }
    }
    layer.release(handle);
}

fn seek_never_skips_data(layer: Layer<'_>) {
    let (_, handle) = create(layer, ROOT, "file");
    for offset in [5 * MEBI + 100, 3 * MEBI, 9 * MEBI - 1] {
        write(layer, handle, offset, b"data");
        let before = ok(layer.seek(&ME, handle, offset.saturating_sub(100_000), SeekTo::Data));
        assert!(before <= offset, "data at {offset}, but the next is said to be at {before}");
        assert_eq!(ok(layer.seek(&ME, handle, offset, SeekTo::Data)), offset);
        assert!(ok(layer.seek(&ME, handle, offset, SeekTo::Hole)) >= offset + 4);
    }
    layer.release(handle);
}

fn seek_finds_holes(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    write(layer, handle, 0, &pattern(1, 4096));
    write(layer, handle, 4 * MEBI, &pattern(2, 4096));
    truncate(layer, node, 8 * MEBI);
    for round in ["before", "after"] {
        let hole = ok(layer.seek(&ME, handle, 0, SeekTo::Hole));
        assert!((4096..=MEBI).contains(&hole), "{round} fsync: a hole at {hole}");
        let data = ok(layer.seek(&ME, handle, 2 * MEBI, SeekTo::Data));
        assert!((3 * MEBI..=4 * MEBI).contains(&data), "{round} fsync: data at {data}");
        assert_eq!(ok(layer.seek(&ME, handle, 2 * MEBI, SeekTo::Hole)), 2 * MEBI);
        refused(layer.seek(&ME, handle, 6 * MEBI, SeekTo::Data), Errno::ENXIO);
        assert_eq!(ok(layer.seek(&ME, handle, 8 * MEBI - 1, SeekTo::Hole)), 8 * MEBI - 1);
        ok(layer.fsync(&ME, handle, crate::Durability::All));
    }
    layer.release(handle);
}

fn punched_ranges_read_as_zeros(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    let mut expected = pattern(3, 100_000);
    write(layer, handle, 0, &expected);
    for (offset, length) in [(100, 50), (4000, 200), (8192, 4096), (20_001, 50_000), (99_000, 5000), (200_000, 10)] {
        ok(layer.fallocate(&ME, handle, PUNCH, offset as u64, length as u64));
        let end = expected.len().min(offset + length);
        if let Some(range) = expected.get_mut(offset..end) {
            range.fill(0);
        }
        same_bytes(&read(layer, handle, 0, 300_000), &expected);
    }
    assert_eq!(attributes(layer, node).size, 100_000);
    write(layer, handle, 30_000, b"again");
    expected[30_000..30_005].copy_from_slice(b"again");
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
}

fn punching_gives_blocks_back(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    write(layer, handle, 0, &pattern(4, 4 << 20));
    ok(layer.fsync(&ME, handle, crate::Durability::All));
    let before = attributes(layer, node).blocks;
    ok(layer.fallocate(&ME, handle, PUNCH, 0, 4 * MEBI));
    ok(layer.fsync(&ME, handle, crate::Durability::All));
    let after = attributes(layer, node).blocks;
    assert!(after < before, "{before} blocks before, {after} after punching all of it");
    refused(layer.seek(&ME, handle, 0, SeekTo::Data), Errno::ENXIO);
    layer.release(handle);
}

fn zeroed_ranges_read_as_zeros(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    let mut expected = pattern(5, 50_000);
    write(layer, handle, 0, &expected);
    let zero = AllocateMode::ZERO_RANGE;
    ok(layer.fallocate(&ME, handle, zero, 1000, 9000));
    expected[1000..10_000].fill(0);
    same_bytes(&read(layer, handle, 0, 100_000), &expected);
    ok(layer.fallocate(&ME, handle, zero | KEEP_SIZE, 45_000, 10_000));
    expected[45_000..].fill(0);
    same_bytes(&read(layer, handle, 0, 100_000), &expected);
    ok(layer.fallocate(&ME, handle, zero, 49_000, 11_000));
    expected.resize(60_000, 0);
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
}

fn allocating_keeps_content(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    let mut expected = pattern(6, 10_000);
    write(layer, handle, 0, &expected);
    ok(layer.fallocate(&ME, handle, KEEP_SIZE, 5000, 50_000));
    assert_eq!(attributes(layer, node).size, 10_000);
    same_bytes(&read(layer, handle, 0, 100_000), &expected);
    ok(layer.fallocate(&ME, handle, AllocateMode::empty(), 0, 20_000));
    expected.resize(20_000, 0);
    same_bytes(&read(layer, handle, 0, 100_000), &expected);
    ok(layer.fallocate(&ME, handle, AllocateMode::empty(), 0, 100));
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
}

fn wrong_modes_are_refused(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"content");
    let handle = open(layer, node, READ_WRITE);
    refused(layer.fallocate(&ME, handle, AllocateMode::empty(), 0, 0), Errno::EINVAL);
    refused(layer.fallocate(&ME, handle, AllocateMode::PUNCH_HOLE, 0, 1), Errno::EOPNOTSUPP);
    let both = PUNCH | AllocateMode::ZERO_RANGE;
    refused(layer.fallocate(&ME, handle, both, 0, 1), Errno::EOPNOTSUPP);
    layer.release(handle);
    let reader = open(layer, node, OpenFlags::READ_ONLY);
    refused(layer.fallocate(&ME, reader, PUNCH, 0, 1), Errno::EBADF);
    layer.release(reader);
    same_bytes(&content(layer, node), b"content");
}
