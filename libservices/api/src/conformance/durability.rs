//! Conformance cases: `fsync`, `sync`, held blocks and synchronous handles, as far as they can be observed without a crash.

use super::Case;
use super::support::*;
use crate::Durability;
use crate::types::OpenFlags;

pub(super) const CASES: &[Case] = &[
    Case::new("durability/fsync", fsync_works_on_everything_open),
    Case::new("durability/sync", sync_works_at_any_time),
    Case::new("durability/hold", held_blocks_are_read_and_written),
    Case::new("durability/sync_flags", synchronous_handles_write),
];

fn fsync_works_on_everything_open(layer: Layer<'_>) {
    let directory = mkdir(layer, ROOT, "directory");
    let (node, handle) = create(layer, directory, "file");
    let data = pattern(1, 70_000);
    for durability in [Durability::Data, Durability::All] {
        write(layer, handle, 0, &data);
        ok(layer.fsync(&ME, handle, durability));
        same_bytes(&read(layer, handle, 0, 100_000), &data);
    }
    let reader = open(layer, node, OpenFlags::READ_ONLY);
    ok(layer.fsync(&ME, reader, Durability::All));
    ok(layer.flush(&ME, reader));
    ok(layer.flush_range(&ME, handle, 100..20_000));
    layer.release(reader);
    for node in [ROOT, directory] {
        let listing = ok(layer.opendir(&ME, node));
        ok(layer.fsync(&ME, listing, Durability::Data));
        ok(layer.fsync(&ME, listing, Durability::All));
        ok(layer.flush(&ME, listing));
        layer.release(listing);
    }
    ok(layer.unlink(&ME, directory, name("file")));
    ok(layer.fsync(&ME, handle, Durability::All));
    layer.release(handle);
}

fn sync_works_at_any_time(layer: Layer<'_>) {
    ok(layer.sync());
    let (node, handle) = create(layer, ROOT, "file");
    let data = pattern(2, 200_000);
    write(layer, handle, 0, &data);
    ok(layer.sync());
    write(layer, handle, 100, b"more");
    ok(layer.sync());
    layer.release(handle);
    assert_eq!(attributes(layer, node).size, 200_000);
    same_bytes(&content(layer, node)[100..104], b"more");
}

fn held_blocks_are_read_and_written(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    let mut data = pattern(3, 40_000);
    write(layer, handle, 0, &data);
    ok(layer.hold(&ME, handle, 0..8192, true));
    write(layer, handle, 4000, b"while held");
    data[4000..4010].copy_from_slice(b"while held");
    ok(layer.fsync(&ME, handle, Durability::All));
    same_bytes(&read(layer, handle, 0, 100_000), &data);
    ok(layer.hold(&ME, handle, 0..8192, false));
    ok(layer.fsync(&ME, handle, Durability::All));
    same_bytes(&read(layer, handle, 0, 100_000), &data);
    ok(layer.hold(&ME, handle, 0..40_000, true));
    ok(layer.unlink(&ME, ROOT, name("file")));
    layer.release(handle);
    layer.forget(node, 1);
    ok(layer.sync());
}

fn synchronous_handles_write(layer: Layer<'_>) {
    for (text, flags) in [("d", OpenFlags::DATA_SYNC), ("s", OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC)] {
        let (entry, handle) = ok(layer.create(&ME, ROOT, name(text), 0o644, READ_WRITE | flags));
        write(layer, handle, 0, b"content");
        same_bytes(&read(layer, handle, 0, 100), b"content");
        layer.release(handle);
        same_bytes(&content(layer, entry.node), b"content");
    }
}
