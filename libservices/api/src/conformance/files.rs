//! Conformance cases: file content (reading, writing, truncating, copying).

use super::Case;
use super::support::*;
use crate::types::{AllocateMode, Errno, FileType, HandleId, OpenFlags, SetAttributes, limits::FILE_SIZE_MAX};

pub(super) const CASES: &[Case] = &[
    Case::new("files/read_and_write", what_is_written_is_read),
    Case::new("files/unaligned", unaligned_writes_keep_their_neighbours),
    Case::new("files/end", reads_end_at_the_size),
    Case::new("files/gap", gaps_read_as_zeros),
    Case::new("files/append", appends_go_to_the_end),
    Case::new("files/two_handles", handles_see_each_others_writes),
    Case::new("files/open_types", open_is_for_regular_files),
    Case::new("files/open_truncate", open_may_truncate),
    Case::new("files/access", handles_allow_what_they_were_opened_for),
    Case::new("files/truncate", truncate_cuts_and_extends),
    Case::new("files/truncate_types", only_files_have_sizes_to_set),
    Case::new("files/truncate_handle", truncate_by_handle),
    Case::new("files/too_big", sizes_have_a_limit),
    Case::new("files/empty_write", empty_writes_do_nothing),
    Case::new("files/pieces", pieces_are_all_written),
    Case::new("files/copy_range", copies_within_the_layer),
];

fn what_is_written_is_read(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    let data = pattern(1, 3 * 1024 * 1024 + 123);
    for (at, chunk) in data.chunks(100_000).enumerate() {
        let written = ok(layer.write(&ME, handle, at as u64 * 100_000, chunk));
        assert_eq!((written.count, written.offset), (chunk.len(), at as u64 * 100_000));
    }
    assert_eq!(attributes(layer, node).size, data.len() as u64);
    same_bytes(&read(layer, handle, 0, data.len() + 1), &data);
    same_bytes(&read(layer, handle, 4095, 8194), &data[4095..4095 + 8194]);
    layer.release(handle);
    same_bytes(&content(layer, node), &data);
}

fn unaligned_writes_keep_their_neighbours(layer: Layer<'_>) {
    let mut expected = pattern(2, 40_000);
    let node = file(layer, ROOT, "file", &expected);
    let handle = open(layer, node, READ_WRITE);
    for (offset, length) in [(0, 1), (4095, 2), (4096, 4096), (5000, 1), (8191, 8194), (39_999, 1), (39_990, 100)] {
        let data = pattern(3, length);
        write(layer, handle, offset as u64, &data);
        expected.resize(expected.len().max(offset + length), 0);
        expected[offset..offset + length].copy_from_slice(&data);
        same_bytes(&read(layer, handle, 0, expected.len() + 1), &expected);
    }
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
}

fn pieces_are_all_written(layer: Layer<'_>) {
    const BLOCK: usize = 4096;
    let mut expected = pattern(1, 300_000);
    let node = file(layer, ROOT, "file", &expected);
    let handle = open(layer, node, READ_WRITE);
    let data = pattern(2, 600_000);
    // Whole blocks in memory that suits direct I/O, and others.
    let aligned = data.as_ptr().align_offset(BLOCK);
    let blocks = (0..40).map(|number| (number * 3 % 70 * BLOCK, aligned + number * BLOCK, BLOCK));
    let others = [(70 * BLOCK + 1, 3, 5000), (76 * BLOCK, aligned, 3 * BLOCK), (90 * BLOCK, 7, 4097), (400_000, 0, 0)];
    let places: Vec<(usize, usize, usize)> = blocks.chain(others).collect();
    for &(at, from, length) in places.iter().filter(|(_, _, length)| *length > 0) {
        expected.resize(expected.len().max(at + length), 0);
        expected[at..at + length].copy_from_slice(&data[from..from + length]);
    }
    let pieces: Vec<(u64, &[u8])> =
        places.iter().map(|&(at, from, length)| (at as u64, &data[from..from + length])).collect();
    ok(layer.write_pieces(&ME, handle, &pieces));
    ok(layer.write_pieces(&ME, handle, &[]));
    assert_eq!(attributes(layer, node).size, expected.len() as u64);
    same_bytes(&read(layer, handle, 0, expected.len() + 1), &expected);
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
    let reading = open(layer, node, OpenFlags::READ_ONLY);
    refused(layer.write_pieces(&ME, reading, &pieces), Errno::EBADF);
    layer.release(reading);
    refused(layer.write_pieces(&ME, reading, &pieces), Errno::EBADF);
}

fn reads_end_at_the_size(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"0123456789");
    let handle = open(layer, node, OpenFlags::READ_ONLY);
    let mut buffer = [0xa5; 16];
    assert_eq!(ok(layer.read(&ME, handle, 6, &mut buffer)), 4);
    assert_eq!(&buffer[..4], b"6789");
    assert_eq!(ok(layer.read(&ME, handle, 10, &mut buffer)), 0);
    assert_eq!(ok(layer.read(&ME, handle, 4096, &mut buffer)), 0);
    assert_eq!(ok(layer.read(&ME, handle, FILE_SIZE_MAX, &mut buffer)), 0);
    assert_eq!(ok(layer.read(&ME, handle, u64::MAX, &mut buffer)), 0);
    assert_eq!(ok(layer.read(&ME, handle, 3, &mut [])), 0);
    layer.release(handle);
}

fn gaps_read_as_zeros(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    write(layer, handle, 10, b"first");
    write(layer, handle, 100_000, b"second");
    let mut expected = vec![0; 100_006];
    expected[10..15].copy_from_slice(b"first");
    expected[100_000..].copy_from_slice(b"second");
    same_bytes(&read(layer, handle, 0, 200_000), &expected);
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
}

fn appends_go_to_the_end(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"start");
    let handle = open(layer, node, READ_WRITE | OpenFlags::APPEND);
    let written = ok(layer.write(&ME, handle, 0, b" middle"));
    assert_eq!((written.count, written.offset), (7, 5));
    truncate(layer, node, 20);
    let written = ok(layer.write(&ME, handle, 3, b"end"));
    assert_eq!(written.offset, 20);
    same_bytes(&read(layer, handle, 0, 100), b"start middle\0\0\0\0\0\0\0\0end");
    layer.release(handle);
    let (entry, handle) = ok(layer.create(&ME, ROOT, name("log"), 0o644, OpenFlags::WRITE_ONLY | OpenFlags::APPEND));
    write(layer, handle, 77, b"one");
    write(layer, handle, 77, b"two");
    layer.release(handle);
    same_bytes(&content(layer, entry.node), b"onetwo");
}

fn handles_see_each_others_writes(layer: Layer<'_>) {
    let (node, writer) = create(layer, ROOT, "file");
    let reader = open(layer, node, OpenFlags::READ_ONLY);
    assert!(read(layer, reader, 0, 10).is_empty());
    write(layer, writer, 0, b"first");
    same_bytes(&read(layer, reader, 0, 10), b"first");
    write(layer, writer, 3, b"xyz");
    same_bytes(&read(layer, reader, 0, 10), b"firxyz");
    truncate(layer, node, 2);
    same_bytes(&read(layer, reader, 0, 10), b"fi");
    layer.release(writer);
    layer.release(reader);
}

fn open_is_for_regular_files(layer: Layer<'_>) {
    let link = ok(layer.symlink(&ME, ROOT, name("link"), b"file")).node;
    let pipe = ok(layer.mknod(&ME, ROOT, name("pipe"), FileType::Fifo, 0o644, 0)).node;
    let socket = ok(layer.mknod(&ME, ROOT, name("socket"), FileType::Socket, 0o644, 0)).node;
    for flags in [OpenFlags::READ_ONLY, READ_WRITE] {
        refused(layer.open(&ME, ROOT, flags), Errno::EISDIR);
        refused(layer.open(&ME, link, flags), Errno::ELOOP);
        refused(layer.open(&ME, pipe, flags), Errno::ENXIO);
        refused(layer.open(&ME, socket, flags), Errno::ENXIO);
    }
    let node = file(layer, ROOT, "file", b"content");
    let handle = open(layer, node, OpenFlags::CREATE | OpenFlags::EXCLUSIVE);
    same_bytes(&read(layer, handle, 0, 100), b"content");
    layer.release(handle);
}

fn open_may_truncate(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", &pattern(4, 10_000));
    let watching = open(layer, node, OpenFlags::READ_ONLY);
    let handle = open(layer, node, OpenFlags::WRITE_ONLY | OpenFlags::TRUNCATE);
    assert_eq!(attributes(layer, node).size, 0);
    assert!(read(layer, watching, 0, 10).is_empty());
    write(layer, handle, 5000, b"x");
    layer.release(handle);
    let expected: Vec<u8> = [vec![0; 5000], b"x".to_vec()].concat();
    same_bytes(&read(layer, watching, 0, 10_000), &expected);
    layer.release(watching);
}

fn handles_allow_what_they_were_opened_for(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"content");
    let reader = open(layer, node, OpenFlags::READ_ONLY);
    let writer = open(layer, node, OpenFlags::WRITE_ONLY);
    refused(layer.write(&ME, reader, 0, b"x"), Errno::EBADF);
    refused(layer.fallocate(&ME, reader, KEEP_SIZE, 0, 1), Errno::EBADF);
    refused(layer.read(&ME, writer, 0, &mut [0; 1]), Errno::EBADF);
    refused(layer.copy_range(&ME, writer, 0, writer, 100, 1), Errno::EBADF);
    refused(layer.copy_range(&ME, reader, 0, reader, 100, 1), Errno::EBADF);
    write(layer, writer, 0, b"C");
    same_bytes(&read(layer, reader, 0, 100), b"Content");
    layer.release(reader);
    layer.release(writer);
}

fn truncate_cuts_and_extends(layer: Layer<'_>) {
    let data = pattern(5, 20_000);
    let node = file(layer, ROOT, "file", &data);
    let handle = open(layer, node, READ_WRITE);
    let mut expected = data;
    for size in [15_000, 15_001, 30_000, 8192, 8193, 4095, 12_288, 1, 0, 5000] {
        assert_eq!(truncate(layer, node, size).size, size);
        expected.resize(size as usize, 0);
        assert_eq!(attributes(layer, node).size, size);
        same_bytes(&read(layer, handle, 0, 100_000), &expected);
        if size > 10 {
            write(layer, handle, size - 5, b"12345");
            expected[size as usize - 5..].copy_from_slice(b"12345");
        }
    }
    layer.release(handle);
    same_bytes(&content(layer, node), &expected);
}

fn only_files_have_sizes_to_set(layer: Layer<'_>) {
    let sized = SetAttributes { size: Some(1), ..Default::default() };
    refused(layer.setattr(&ME, ROOT, &sized, None), Errno::EISDIR);
    let pipe = ok(layer.mknod(&ME, ROOT, name("pipe"), FileType::Fifo, 0o644, 0)).node;
    refused(layer.setattr(&ME, pipe, &sized, None), Errno::EINVAL);
    let link = ok(layer.symlink(&ME, ROOT, name("link"), b"file")).node;
    refused(layer.setattr(&ME, link, &sized, None), Errno::EINVAL);
}

fn truncate_by_handle(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"content");
    let writer = open(layer, node, OpenFlags::WRITE_ONLY);
    let reader = open(layer, node, OpenFlags::READ_ONLY);
    let sized = SetAttributes { size: Some(3), ..Default::default() };
    refused(layer.setattr(&ME, node, &sized, Some(reader)), Errno::EBADF);
    refused(layer.setattr(&ME, node, &sized, Some(NO_HANDLE)), Errno::EBADF);
    assert_eq!(attributes(layer, node).size, 7);
    assert_eq!(ok(layer.setattr(&ME, node, &sized, Some(writer))).size, 3);
    same_bytes(&read(layer, reader, 0, 100), b"con");
    layer.release(writer);
    layer.release(reader);
}

fn sizes_have_a_limit(layer: Layer<'_>) {
    let node = file(layer, ROOT, "file", b"content");
    let handle = open(layer, node, READ_WRITE);
    for offset in [FILE_SIZE_MAX, FILE_SIZE_MAX + 1, u64::MAX - 1, u64::MAX] {
        refused(layer.write(&ME, handle, offset, b"xy"), Errno::EFBIG);
        refused(layer.fallocate(&ME, handle, AllocateMode::empty(), offset, 2), Errno::EFBIG);
    }
    let sized = SetAttributes { size: Some(FILE_SIZE_MAX + 1), ..Default::default() };
    refused(layer.setattr(&ME, node, &sized, None), Errno::EFBIG);
    same_bytes(&read(layer, handle, 0, 100), b"content");
    assert_eq!(attributes(layer, node).size, 7);
    layer.release(handle);
}

fn empty_writes_do_nothing(layer: Layer<'_>) {
    let (node, handle) = create(layer, ROOT, "file");
    assert_eq!(ok(layer.write(&ME, handle, 1000, b"")).count, 0);
    assert_eq!(attributes(layer, node).size, 0);
    layer.release(handle);
}

fn copies_within_the_layer(layer: Layer<'_>) {
    let data = pattern(6, 300_000);
    let source_node = file(layer, ROOT, "source", &data);
    let source = open(layer, source_node, OpenFlags::READ_ONLY);
    let (node, target) = create(layer, ROOT, "target");
    copy(layer, (source, 5), (target, 10), 299_000);
    let mut expected = vec![0; 10];
    expected.extend_from_slice(&data[5..299_005]);
    same_bytes(&content(layer, node), &expected);
    assert_eq!(ok(layer.copy_range(&ME, source, 300_000, target, 0, 10)), 0, "nothing is left at the end");
    copy(layer, (source, 299_998), (target, 0), 2);
    expected[..2].copy_from_slice(&data[299_998..]);
    copy(layer, (target, 0), (target, 500_000), 100);
    expected.resize(500_000, 0);
    expected.extend_from_within(0..100);
    same_bytes(&content(layer, node), &expected);
    layer.release(source);
    layer.release(target);
}

/// Copies all of it, by as many calls as it takes.
#[track_caller]
fn copy(layer: Layer<'_>, (source, from): (HandleId, u64), (target, to): (HandleId, u64), length: u64) {
    let mut done = 0;
    while done < length {
        let copied = ok(layer.copy_range(&ME, source, from + done, target, to + done, length - done));
        assert!(copied > 0, "stopped after {done} of {length} bytes");
        done += copied;
    }
}
