//! Tests of the limits: few descriptors, no space, a read-only layer.

use crate::support::{Filesystem, ROOT, create, in_namespace, name, open, read, write};
use poolfs_libservice::Libservice;
use poolfs_local::{Descriptors, Local, LocalOptions};
use poolfs_types::{AllocateMode, Errno, FileType, NodeId, OpenFlags, RenameFlags, SetAttributes, SetTime, XattrFlags};
use rustix::fs::OFlags;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::Metadata;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;

/// Lowers the descriptor limit of this process, which the namespace runner has to itself.
fn few_descriptors(count: u64) {
    setrlimit(Resource::Nofile, Rlimit { current: Some(count), maximum: Some(count) }).expect("setrlimit");
}

#[test]
fn a_tree_larger_than_the_descriptor_table() {
    in_namespace("limits::a_tree_larger_than_the_descriptor_table", || {
        const FILES: usize = 25_000;
        for kind in ["ext4", "tmpfs"] {
            let filesystem = Filesystem::new(kind, 320);
            let files = filesystem.path().join("files");
            std::fs::create_dir(&files).expect("a directory");
            for at in 0..FILES {
                std::fs::File::create(files.join(at.to_string())).expect("a file");
            }
            few_descriptors(256);
            let layer = open(&filesystem.path());
            let parent = layer.lookup(&ROOT, NodeId::ROOT, name("files")).expect("lookup").node;
            let nodes: Vec<_> =
                (0..FILES).map(|at| layer.lookup(&ROOT, parent, name(&at.to_string())).expect("lookup")).collect();
            for entry in nodes.iter().step_by(7) {
                assert_eq!(layer.getattr(&ROOT, entry.node).expect("getattr"), entry.attributes, "{kind}");
            }
            // Names may change behind a node that has no descriptor: it stays the same file.
            for (at, entry) in nodes.iter().enumerate().step_by(1000) {
                let (old, new) = (at.to_string(), format!("renamed-{at}"));
                layer.rename(&ROOT, parent, name(&old), parent, name(&new), RenameFlags::empty()).expect("rename");
                assert_eq!(layer.lookup(&ROOT, parent, name(&new)).expect("lookup").node, entry.node);
                layer.forget(entry.node, 1);
            }
            for entry in &nodes {
                layer.forget(entry.node, 1);
            }
            let gone = layer.getattr(&ROOT, nodes[3].node);
            assert!(gone.is_err_and(|error| error == Errno::ESTALE), "{kind}");
        }
    });
}

#[test]
fn removed_files_in_use_are_bounded() {
    in_namespace("limits::removed_files_in_use_are_bounded", || {
        let filesystem = Filesystem::new("ext4", 64);
        // One for the root, and a fourth part for a second directory.
        let options = LocalOptions { descriptors: Descriptors::new(4, 16), ..LocalOptions::default() };
        let layer = Local::open(&filesystem.path(), options).expect("open");
        let mut held = Vec::new();
        let mut refused = None;
        for at in 0..20 {
            let text = at.to_string();
            let entry = layer.mknod(&ROOT, NodeId::ROOT, name(&text), FileType::Regular, 0o600, 0).expect("mknod");
            held.push(entry.node);
            if let Err(error) = layer.unlink(&ROOT, NodeId::ROOT, name(&text)) {
                refused.get_or_insert((at, error));
            }
        }
        let (at, error) = refused.expect("a bound");
        assert_eq!((at, error.errno()), (11, Errno::ENFILE));
        assert!(error.message().is_some());
        for &node in &held[..11] {
            assert_eq!(layer.getattr(&ROOT, node).expect("removed, but held").links, 0);
        }
        // What was refused is still there, and goes when there is room again.
        assert_eq!(layer.getattr(&ROOT, held[11]).expect("getattr").links, 1);
        held.iter().for_each(|&node| layer.forget(node, 1));
        for at in 11..20 {
            layer.unlink(&ROOT, NodeId::ROOT, name(&at.to_string())).expect("unlink");
        }
    });
}

#[test]
fn without_handles_nodes_are_bounded() {
    in_namespace("limits::without_handles_nodes_are_bounded", || {
        let filesystem = Filesystem::new("overlay", 64);
        let descriptors = Descriptors::new(4, 100);
        let options = LocalOptions { descriptors, ..LocalOptions::default() };
        let make = |layer: &Local, at: usize| {
            layer.mknod(&ROOT, NodeId::ROOT, name(&at.to_string()), FileType::Regular, 0o600, 0)
        };
        let layer = Local::open(&filesystem.path(), options.clone()).expect("open");
        for at in 0..75 {
            match make(&layer, at) {
                Ok(_) => assert!(at < 74),
                Err(error) => {
                    assert_eq!((at, error.errno()), (74, Errno::ENFILE));
                    let left = layer.lookup(&ROOT, NodeId::ROOT, name("74"));
                    assert!(left.is_err_and(|error| error == Errno::ENOENT), "a failed create left its name");
                }
            }
        }
        // Half of an equal share is another directory's.
        let other = Filesystem::new("overlay", 64);
        let other = Local::open(&other.path(), options).expect("open");
        assert_eq!((0..100).take_while(|&at| make(&other, at).is_ok()).count(), 24);
    });
}

/// Descriptors of this process.
fn descriptors_now() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc").count()
}

#[test]
fn however_many_files_are_open_they_take_few_descriptors() {
    in_namespace("limits::however_many_files_are_open_they_take_few_descriptors", || {
        const FILES: usize = 600;
        for kind in ["tmpfs", "ext4", "xfs", "btrfs"] {
            let filesystem = Filesystem::new(kind, 320);
            let descriptors = Descriptors::new(16, 1 << 12);
            let options = LocalOptions { descriptors, ..LocalOptions::default() };
            let layer = Local::open(&filesystem.path(), options).expect("open");
            let before = descriptors_now();
            let content = |at: usize| (0..70_000).map(|byte| (byte * 7 + at) as u8).collect::<Vec<_>>();
            let files: Vec<_> = (0..FILES)
                .map(|at| {
                    let (node, handle) = create(&layer, NodeId::ROOT, &at.to_string());
                    write(&layer, handle, 0, &content(at));
                    (node, handle)
                })
                .collect();
            let made = layer.mkdir(&ROOT, NodeId::ROOT, name("d"), 0o755).expect("mkdir").node;
            create(&layer, made, "inside");
            let listings: Vec<_> = (0..50).map(|_| layer.opendir(&ROOT, made).expect("opendir")).collect();
            assert!(descriptors_now() - before < 16 * 2 + 8, "{kind}: {}", descriptors_now());
            for (at, &(node, handle)) in files.iter().enumerate() {
                // A file is found again under another name, and without any.
                match at % 3 {
                    0 => layer.unlink(&ROOT, NodeId::ROOT, name(&at.to_string())).expect("unlink"),
                    1 => {
                        let (old, new) = (at.to_string(), format!("new-{at}"));
                        layer
                            .rename(&ROOT, NodeId::ROOT, name(&old), made, name(&new), RenameFlags::empty())
                            .expect("rename");
                        create(&layer, NodeId::ROOT, &old);
                    }
                    _ => {}
                }
                layer.forget(node, 1);
                write(&layer, handle, 69_000, b"written again");
            }
            for (at, &(_, handle)) in files.iter().enumerate().rev() {
                let mut want = content(at);
                want[69_000..69_013].copy_from_slice(b"written again");
                assert!(read(&layer, handle, 0, 100_000) == want, "{kind}: {at}");
            }
            for &listing in &listings {
                let mut seen = 0;
                layer
                    .readdir(&ROOT, listing, 0, &mut |_| {
                        seen += 1;
                        ControlFlow::Continue(())
                    })
                    .expect("readdir");
                assert_eq!(seen, FILES / 3 + 1, "{kind}");
                layer.release(listing);
            }
            files.iter().for_each(|&(_, handle)| layer.release(handle));
        }
    });
}

/// Descriptors of this process that are open on a file: those by which it can be written, and all of them.
fn descriptors_of(file: &Metadata) -> (usize, usize) {
    let mut counts = (0, 0);
    for entry in std::fs::read_dir("/proc/self/fd").expect("proc") {
        let number = entry.expect("an entry").file_name().into_string().expect("a number");
        // One is that of this listing.
        let Ok(found) = std::fs::metadata(format!("/proc/self/fd/{number}")) else { continue };
        if (found.dev(), found.ino()) != (file.dev(), file.ino()) {
            continue;
        }
        let facts = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).expect("facts");
        let flags = facts.lines().find_map(|line| line.strip_prefix("flags:")).expect("flags");
        let flags = OFlags::from_bits_retain(u32::from_str_radix(flags.trim(), 8).expect("octal"));
        counts.0 += usize::from(!flags.contains(OFlags::PATH) && flags.intersects(OFlags::RDWR | OFlags::WRONLY));
        counts.1 += 1;
    }
    counts
}

#[test]
fn nothing_to_write_by_outlives_an_open_file() {
    in_namespace("limits::nothing_to_write_by_outlives_an_open_file", || {
        let kinds = ["tmpfs", "ext4", "xfs", "btrfs", "overlay"];
        for (kind, most) in kinds.into_iter().flat_map(|kind| [(kind, 1), (kind, 64)]) {
            let filesystem = Filesystem::new(kind, 320);
            let options = LocalOptions { descriptors: Descriptors::new(most, 1 << 12), ..LocalOptions::default() };
            let layer = Local::open(&filesystem.path(), options).expect("open");
            let host = |at: &str| std::fs::metadata(filesystem.path().join(at)).expect("it is there");
            let other = layer.mkdir(&ROOT, NodeId::ROOT, name("other"), 0o755).expect("mkdir").node;

            let (node, handle) = create(&layer, NodeId::ROOT, "f");
            let file = host("f");
            if most > 1 && kind != "overlay" {
                assert_eq!(descriptors_of(&file), (1, 1), "{kind}: one is enough for the file and its node");
            }
            write(&layer, handle, 0, b"content");
            layer.link(&ROOT, node, NodeId::ROOT, name("g")).expect("link");
            // Where there is room for one alone, the file itself is closed before its handle is.
            layer.getattr(&ROOT, other).expect("getattr");
            layer.release(handle);
            assert_eq!(descriptors_of(&file).0, 0, "{kind} {most}");
            assert_eq!(layer.getattr(&ROOT, node).expect("getattr").links, 2);
            let handle = layer.open(&ROOT, node, OpenFlags::READ_ONLY).expect("open");
            assert_eq!(read(&layer, handle, 0, 100), b"content");
            layer.release(handle);

            for is_known in [false, true] {
                let (node, handle) = create(&layer, NodeId::ROOT, "removed");
                let file = host("removed");
                if is_known {
                    layer.unlink_known(&ROOT, NodeId::ROOT, name("removed"), node, Some(true)).expect("unlink");
                } else {
                    layer.unlink(&ROOT, NodeId::ROOT, name("removed")).expect("unlink");
                }
                layer.release(handle);
                assert_eq!(descriptors_of(&file).0, 0, "{kind} {most}: removed while it was open");
                assert_eq!(layer.getattr(&ROOT, node).expect("getattr").links, 0);
            }

            let (nameless, handle) =
                layer.tmpfile(&ROOT, NodeId::ROOT, 0o600, OpenFlags::READ_WRITE).expect("a nameless file");
            layer.release(handle);
            layer.link(&ROOT, nameless.node, NodeId::ROOT, name("named")).expect("link");
            assert_eq!(descriptors_of(&host("named")).0, 0, "{kind} {most}: made without a name");

            for round in 0..50 {
                let (from, to) = (format!("x{round}"), format!("y{round}"));
                let (node, handle) = create(&layer, NodeId::ROOT, &from);
                std::thread::scope(|scope| {
                    scope.spawn(|| layer.link(&ROOT, node, NodeId::ROOT, name(&to)).expect("link"));
                    layer.release(handle);
                });
                assert_eq!(descriptors_of(&host(&from)).0, 0, "{kind} {most}: linked while it was closed");
            }
        }
    });
}

#[test]
fn a_full_disk_keeps_what_was_accepted() {
    in_namespace("limits::a_full_disk_keeps_what_was_accepted", || {
        let filesystem = Filesystem::new("ext4", 20);
        let layer = open(&filesystem.path());
        let (node, handle) = create(&layer, NodeId::ROOT, "file");
        let piece: Vec<u8> = (0..300_000u32).map(|at| (at % 239) as u8).collect();
        let mut accepted = 0u64;
        let error = loop {
            match layer.write(&ROOT, handle, accepted, &piece) {
                Ok(written) => accepted += written.count as u64,
                Err(error) => break error,
            }
            assert!(accepted < 20 << 20);
        };
        assert_eq!(error.errno(), Errno::ENOSPC);
        assert!(accepted > 10 << 20);
        let size = layer.getattr(&ROOT, node).expect("getattr").size;
        assert!(size >= accepted);
        for at in (0..accepted).step_by(piece.len()) {
            let want = piece.len().min((accepted - at) as usize);
            assert!(read(&layer, handle, at, want) == piece[..want], "bytes at {at} are lost");
        }
        let (_, other) = create(&layer, NodeId::ROOT, "other");
        let range = layer.fallocate(&ROOT, other, AllocateMode::empty(), 0, 5 << 20);
        assert_eq!(range.expect_err("no space").errno(), Errno::ENOSPC);
        layer.setattr(&ROOT, node, &SetAttributes { size: Some(0), ..Default::default() }, None).expect("truncate");
        write(&layer, handle, 0, &piece);
    });
}

#[test]
fn read_only_means_nothing_changes() {
    in_namespace("limits::read_only_means_nothing_changes", || {
        for kind in ["tmpfs", "ext4", "xfs", "btrfs"] {
            let filesystem = Filesystem::new(kind, 320);
            let at = filesystem.path();
            std::fs::create_dir(at.join("d")).expect("a directory");
            std::fs::write(at.join("d/f"), b"content").expect("a file");
            let before = std::fs::metadata(at.join("d/f")).expect("metadata");
            let options = LocalOptions { read_only: true, ..LocalOptions::default() };
            let layer = Local::open(&at, options).expect("open");
            assert!(layer.read_only());
            let d = layer.lookup(&ROOT, NodeId::ROOT, name("d")).expect("lookup").node;
            let f = layer.lookup(&ROOT, d, name("f")).expect("lookup").node;
            let handle = layer.open(&ROOT, f, OpenFlags::READ_ONLY).expect("open to read");
            assert_eq!(read(&layer, handle, 0, 100), b"content");
            every_change_is_refused(&layer, d, f);
            let taken = layer.mkdir(&ROOT, d, name("f"), 0o755);
            assert_eq!(taken.expect_err("exists").errno(), Errno::EEXIST, "{kind}");
            let after = std::fs::metadata(at.join("d/f")).expect("metadata");
            assert_eq!((before.atime_nsec(), before.ctime_nsec()), (after.atime_nsec(), after.ctime_nsec()));
            assert_eq!((before.mtime_nsec(), before.len()), (after.mtime_nsec(), after.len()));
        }
    });
}

fn every_change_is_refused(layer: &Local, d: NodeId, f: NodeId) {
    let new = name("new");
    let flags = OpenFlags::READ_WRITE;
    let changes = [
        SetAttributes { permissions: Some(0), ..Default::default() },
        SetAttributes { uid: Some(1), ..Default::default() },
        SetAttributes { size: Some(1), ..Default::default() },
        SetAttributes { accessed: Some(SetTime::Now), ..Default::default() },
    ];
    let mut results = vec![
        layer.create(&ROOT, d, new, 0o600, flags).map(drop),
        layer.mkdir(&ROOT, d, new, 0o700).map(drop),
        layer.mknod(&ROOT, d, new, FileType::Fifo, 0o600, 0).map(drop),
        layer.symlink(&ROOT, d, new, b"target").map(drop),
        layer.link(&ROOT, f, d, new).map(drop),
        layer.unlink(&ROOT, d, name("f")),
        layer.rmdir(&ROOT, NodeId::ROOT, name("d")),
        layer.rename(&ROOT, d, name("f"), d, new, RenameFlags::empty()),
        layer.open(&ROOT, f, OpenFlags::WRITE_ONLY).map(drop),
        layer.open(&ROOT, f, OpenFlags::READ_WRITE | OpenFlags::TRUNCATE).map(drop),
        layer.setxattr(&ROOT, f, b"user.x", b"v", XattrFlags::empty()),
        layer.removexattr(&ROOT, f, b"user.x"),
    ];
    results.extend(changes.iter().map(|change| layer.setattr(&ROOT, f, change, None).map(drop)));
    for (at, result) in results.into_iter().enumerate() {
        assert_eq!(result.expect_err("refused").errno(), Errno::EROFS, "change {at}");
    }
}
