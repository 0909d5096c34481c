//! Tests at the limit: what is accepted has its space, and what has space is accepted.

use crate::support::{BLOCK, ROOT, Stack, name, on_disk};
use poolfs_bcow::Layout;
use poolfs_libservice::types::{AllocateMode, Errno, FileType, NodeId, OpenFlags, RenameFlags, XattrFlags};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LIMIT: u64 = 2 << 20;
const LAYOUTS: [Option<Layout>; 3] = [None, Some(Layout::Performance), Some(Layout::Space)];

#[test]
fn data_is_refused_before_it_is_accepted_and_all_that_was_accepted_is_stored() {
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().expect("a folder");
        let stack = Stack::at(folder.path(), layout, LIMIT);
        let (_, handle) = stack.create("f");
        let blocks = stack.fill(handle, 0, 10_000);
        // Tables of compact files are written with their data, and counted then.
        let overhead = if layout.is_some() { 8 } else { 0 };
        let most = (LIMIT - 2 * BLOCK) / BLOCK;
        assert!((most - overhead..=most + 1).contains(&blocks), "{layout:?}: {blocks} of {most}");
        stack.top.sync().expect("all that was accepted has room");
        assert_eq!(stack.account.used(), on_disk(folder.path()), "{layout:?}");
        assert!(stack.account.used() <= LIMIT + overhead * BLOCK, "{layout:?}");
        // What is there can be written again, dirty or not.
        for _ in 0..2 {
            assert_eq!(stack.fill(handle, 0, blocks), blocks, "{layout:?}");
        }
        assert_eq!(stack.fill(handle, blocks + 10, 1), 0, "{layout:?}");
        let statistics = stack.top.statfs(ROOT, NodeId::ROOT).expect("known");
        assert_eq!(statistics.blocks * u64::from(statistics.block_size), LIMIT);
        assert_eq!(statistics.blocks_available, 0);
        stack.top.unlink(ROOT, NodeId::ROOT, name("f")).expect("there");
        stack.top.release(handle);
    }
}

#[test]
fn a_long_write_is_cut_where_the_room_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, LIMIT);
    let (node, handle) = stack.create("f");
    let appending = stack.top.open(ROOT, node, OpenFlags::WRITE_ONLY | OpenFlags::APPEND).expect("there");
    assert_eq!(stack.top.write(ROOT, handle, 0, &[1; 100]).expect("room").count, 100);
    let written = stack.top.write(ROOT, appending, 0, &vec![2; 2 * LIMIT as usize]).expect("room for some");
    assert_eq!(written.offset, 100);
    assert!(written.count as u64 >= LIMIT - 4 * BLOCK && (written.count as u64) < LIMIT);
    assert_eq!((written.count + 100) % BLOCK as usize, 0);
    let error = stack.top.write(ROOT, appending, 0, b"more").expect_err("full");
    assert_eq!(error.errno(), Errno::ENOSPC);
    assert!(error.to_string().contains("--upper-size"), "{error}");
    stack.top.write(ROOT, handle, 50, &vec![3; 64 << 10]).expect("there already");
    stack.top.sync().expect("room");
    assert!(on_disk(folder.path()) <= LIMIT);
}

#[test]
fn pieces_are_limited_as_writes_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, LIMIT);
    let (_, handle) = stack.create("f");
    let piece = vec![1; LIMIT as usize / 2];
    let pieces = [(0, &piece[..]), (1 << 30, &piece[..]), (2 << 30, &piece[..])];
    assert_eq!(stack.top.write_pieces(ROOT, handle, &pieces).expect_err("too much"), Errno::ENOSPC);
    stack.top.release(handle);
}

#[test]
fn room_that_nobody_has_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, LIMIT);
    let (_, handle) = stack.create("f");
    let before = stack.account.used();
    for (offset, length) in
        [(0, LIMIT), (0, 1 << 50), (1 << 50, i64::MAX as u64 - (1 << 50)), (5, u64::MAX - 4), (u64::MAX, 1)]
    {
        let refused = stack.top.fallocate(ROOT, handle, AllocateMode::empty(), offset, length).expect_err("too much");
        assert!([Errno::ENOSPC, Errno::EFBIG].contains(&refused.errno()), "{offset} {length}: {refused}");
    }
    assert_eq!(stack.account.used(), before);
}

#[test]
fn names_have_a_little_more_and_removing_needs_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, LIMIT);
    let (node, handle) = stack.create("f");
    stack.fill(handle, 0, 10_000);
    let mut made = 0;
    let refused = loop {
        match stack.top.mkdir(ROOT, NodeId::ROOT, name(&format!("d{made}")), 0o755) {
            Ok(entry) => stack.top.forget(entry.node, 1),
            Err(error) => break error,
        }
        made += 1;
    };
    assert_eq!(refused.errno(), Errno::ENOSPC);
    assert!((8..=LIMIT / 16 / BLOCK + 2).contains(&made), "{made}");
    for refused in [
        stack.top.mknod(ROOT, NodeId::ROOT, name("x"), FileType::Fifo, 0o644, 0).map(drop),
        stack.top.symlink(ROOT, NodeId::ROOT, name("x"), b"y").map(drop),
        stack.top.setxattr(ROOT, NodeId::ROOT, b"user.x", b"y", poolfs_libservice::types::XattrFlags::empty()),
    ] {
        assert_eq!(refused.expect_err("full").errno(), Errno::ENOSPC);
    }
    for number in 0..made {
        stack.top.rmdir(ROOT, NodeId::ROOT, name(&format!("d{number}"))).expect("needs no room");
    }
    stack.top.unlink(ROOT, NodeId::ROOT, name("f")).expect("needs no room");
    stack.top.release(handle);
    stack.top.forget(node, 1);
    let (_, handle) = stack.create("g");
    assert_eq!(stack.fill(handle, 0, 100), 100);
}

#[test]
fn many_writers_get_no_more_than_one() {
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().expect("a folder");
        let stack = Stack::at(folder.path(), layout, LIMIT);
        let handles: Vec<_> = (0..4).map(|number| stack.create(&format!("f{number}")).1).collect();
        let accepted = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for &handle in &handles {
                let (stack, accepted) = (&stack, &accepted);
                scope.spawn(move || {
                    for round in 0..4 {
                        accepted.fetch_add(stack.fill(handle, round * 150, 150), Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(accepted.load(Ordering::Relaxed) * BLOCK <= LIMIT, "{layout:?}");
        assert!(accepted.load(Ordering::Relaxed) * BLOCK >= LIMIT - (40 * BLOCK), "{layout:?}");
        stack.top.sync().expect("all that was accepted has room");
        assert_eq!(stack.account.used(), on_disk(folder.path()), "{layout:?}");
        assert!(stack.account.used() <= LIMIT + 16 * BLOCK, "{layout:?}");
    }
}

#[test]
fn a_writer_waits_for_the_room_of_a_removed_file_that_is_about_to_end() {
    for layout in LAYOUTS {
        let folder = tempfile::tempdir().expect("a folder");
        let stack = Stack::at(folder.path(), layout, LIMIT);
        for is_written in [false, true] {
            let (node, handle) = stack.create("f");
            let most = stack.fill(handle, 0, 10_000);
            if is_written {
                stack.top.sync().expect("room");
            }
            stack.top.unlink(ROOT, NodeId::ROOT, name("f")).expect("there");
            let top = Arc::clone(&stack.top);
            // As the kernel does it, after the calls have returned that caused it.
            *stack.meanwhile.lock().expect("nobody panics") = Some(Box::new(move || {
                top.release(handle);
                top.forget(node, 1);
            }));
            let (node, handle) = stack.create("g");
            assert!(stack.fill(handle, 0, most) + 8 >= most, "{layout:?}");
            stack.top.unlink(ROOT, NodeId::ROOT, name("g")).expect("there");
            stack.top.release(handle);
            stack.top.forget(node, 1);
        }
    }
}

#[test]
fn a_file_that_stays_open_without_a_name_is_waited_for_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, LIMIT);
    let (node, handle) = stack.create("f");
    stack.fill(handle, 0, 10_000);
    stack.top.unlink(ROOT, NodeId::ROOT, name("f")).expect("there");
    stack.top.forget(node, 1);
    let (_, other) = stack.create("g");
    assert_eq!(stack.fill(other, 0, 1), 0);
    let begun = Instant::now();
    for _ in 0..20 {
        assert_eq!(stack.fill(other, 0, 1), 0);
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "each has waited");
    stack.top.release(handle);
    assert_eq!(stack.fill(other, 0, 100), 100);
}

#[test]
fn with_more_than_a_lower_limit_files_can_be_removed_and_written_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let stack = Stack::at(folder.path(), None, LIMIT);
    let [(first, one), (_, other)] = ["f", "g"].map(|name| stack.create(name));
    assert_eq!((stack.fill(one, 0, 200), stack.fill(other, 0, 200)), (200, 200));
    stack.top.release(one);
    stack.top.release(other);
    stack.top.forget(first, 1);
    stack.top.sync().expect("room");
    drop(stack);
    let stack = Stack::at(folder.path(), None, LIMIT / 2);
    let node = stack.top.lookup(ROOT, NodeId::ROOT, name("g")).expect("there").node;
    let handle = stack.top.open(ROOT, node, OpenFlags::READ_WRITE).expect("there");
    assert_eq!((stack.fill(handle, 0, 200), stack.fill(handle, 200, 1)), (200, 0));
    stack.top.unlink(ROOT, NodeId::ROOT, name("f")).expect("needs no room");
    assert_eq!(stack.fill(handle, 200, 10), 10);
    assert!(stack.account.used() <= LIMIT / 2);
}

#[test]
fn in_memory_names_and_attributes_take_room() {
    const LIMIT: u64 = 1 << 20;
    /// What names may have more.
    const MOST: u64 = LIMIT + LIMIT / 16;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let used = |made: u64, stack: &Stack| {
        let used = stack.account.used();
        assert!(made > 10 && (LIMIT..=MOST + (64 << 10)).contains(&used), "{made} made, {used} bytes");
        assert_eq!(Stack::in_memory(folder.path(), LIMIT).account.used(), used, "as it is counted anew");
    };
    let until_full = |attempt: &dyn Fn(u64) -> poolfs_libservice::Result<()>| {
        let refused = |at: &u64| attempt(*at).is_err_and(|error| error.errno() == Errno::ENOSPC);
        (0..100_000).find(refused).expect("refused")
    };
    let stack = Stack::in_memory(folder.path(), LIMIT);
    let empty = stack.account.used();
    let at = |number: u64| format!("n{number}");
    let clear = |made: u64| {
        (0..made).for_each(|number| stack.top.unlink(ROOT, NodeId::ROOT, name(&at(number))).expect("there"));
    };
    let made = until_full(&|number| {
        let text = at(number);
        let entry = stack.top.mknod(ROOT, NodeId::ROOT, name(&text), FileType::Regular, 0o644, 0)?;
        stack.top.forget(entry.node, 1);
        Ok(())
    });
    used(made, &stack);
    clear(made);
    assert_eq!(stack.account.used(), empty);
    // More names of one file.
    let (node, handle) = stack.create("first");
    let made = until_full(&|number| {
        let text = at(number);
        let entry = stack.top.link(ROOT, node, NodeId::ROOT, name(&text))?;
        stack.top.forget(entry.node, 1);
        Ok(())
    });
    used(made, &stack);
    clear(made);
    // Attributes.
    let value = vec![7; 8000];
    let made = until_full(&|number| {
        let attribute = format!("trusted.{number}");
        stack.top.setxattr(ROOT, node, attribute.as_bytes(), &value, XattrFlags::empty())
    });
    used(made, &stack);
    stack.top.release(handle);
    stack.top.unlink(ROOT, NodeId::ROOT, name("first")).expect("there");
    stack.top.forget(node, 1);
    assert_eq!(stack.account.used(), empty);
}

/// A rename can make a device that stands for the name that has gone.
#[test]
fn in_memory_what_a_rename_leaves_is_counted() {
    const LIMIT: u64 = 1 << 20;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let stack = Stack::in_memory(folder.path(), LIMIT);
    let (node, handle) = stack.create("f0");
    stack.top.release(handle);
    stack.top.forget(node, 1);
    let used = stack.account.used();
    let rename = |from: u64| {
        let (from, to) = (format!("f{from}"), format!("f{}", from + 1));
        stack.top.rename(ROOT, NodeId::ROOT, name(&from), NodeId::ROOT, name(&to), RenameFlags::WHITEOUT)
    };
    rename(0).expect("renamed");
    assert_eq!(Stack::in_memory(folder.path(), LIMIT).account.used(), stack.account.used(), "as it is counted anew");
    stack.top.unlink(ROOT, NodeId::ROOT, name("f0")).expect("a whiteout");
    assert_eq!(stack.account.used(), used);
    let made = (1..100_000).find(|&at| rename(at).is_err_and(|error| error.errno() == Errno::ENOSPC));
    assert!(made.is_some_and(|made| made > 10), "{made:?}");
    assert_eq!(Stack::in_memory(folder.path(), LIMIT).account.used(), stack.account.used(), "as it is counted anew");
}

/// To find one page of a file in memory the kernel takes up to a node on each level of a tree.
#[test]
fn in_memory_pages_far_from_each_other_take_more_room() {
    const LIMIT: u64 = 2 << 20;
    const DISTANCE: u64 = (1 << 30) / BLOCK;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let stack = Stack::in_memory(folder.path(), LIMIT);
    let empty = stack.account.used();
    let (node, handle) = stack.create("dense");
    let dense = stack.fill(handle, 0, 400);
    stack.top.sync().expect("room");
    let of_tree = stack.account.used() - empty - dense * BLOCK;
    assert_eq!(dense, 400);
    assert!((7 * 576..12 << 10).contains(&of_tree), "{of_tree} bytes beside 400 pages and a name");
    stack.top.release(handle);
    stack.top.unlink(ROOT, NodeId::ROOT, name("dense")).expect("there");
    stack.top.forget(node, 1);
    assert_eq!(stack.account.used(), empty);
    let (node, handle) = stack.create("sparse");
    let fits = (0..1000).take_while(|number| stack.fill(handle, number * DISTANCE, 1) == 1).count() as u64;
    stack.top.sync().expect("room");
    // Two levels and the leaf are for each page alone.
    assert!(fits < LIMIT / (BLOCK + 2 * 576) && fits > LIMIT / (BLOCK + 4 * 592) - 8, "{fits} pages");
    assert_eq!(Stack::in_memory(folder.path(), LIMIT).account.used(), stack.account.used(), "as it is counted anew");
    stack.top.release(handle);
    stack.top.unlink(ROOT, NodeId::ROOT, name("sparse")).expect("there");
    stack.top.forget(node, 1);
    // Nor is there another way to have such pages: behind the end of a file, which does not tell where they are.
    let (_, handle) = stack.create("short");
    let behind = |at| stack.top.fallocate(ROOT, handle, AllocateMode::KEEP_SIZE, at, BLOCK);
    behind(0).expect("where it begins");
    assert_eq!(behind(DISTANCE * BLOCK).expect_err("a lonely page").errno(), Errno::EOPNOTSUPP);
    assert_eq!(stack.fill(handle, 0, 2), 2);
    behind(2 * BLOCK).expect("it continues the file");
    assert_eq!(behind(4 * BLOCK).expect_err("behind a hole").errno(), Errno::EOPNOTSUPP);
    stack.top.fallocate(ROOT, handle, AllocateMode::empty(), DISTANCE * BLOCK, BLOCK).expect("with the size");
}

/// What is written over takes no room, though it waits to be stored.
#[test]
fn names_fit_beside_what_is_written_over() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let stack = Stack::in_memory(folder.path(), LIMIT);
    let (_, handle) = stack.create("f");
    assert_eq!(stack.fill(handle, 0, 200), 200);
    stack.top.sync().expect("room");
    let make = |number: u64| {
        let text = format!("n{number}");
        stack.top.mknod(ROOT, NodeId::ROOT, name(&text), FileType::Regular, 0o644, 0).map(|_| ())
    };
    let made = (0..).find(|number| make(*number).is_err() || stack.account.used() >= LIMIT).expect("full");
    assert!(stack.account.used() < LIMIT + LIMIT / 32, "names may still be added");
    assert_eq!(stack.fill(handle, 0, 200), 200);
    make(made + 1).expect("nothing new is stored beside it");
    stack.top.release(handle);
}

/// Linux lists no more than 64 KiB of names: what is behind that could be had for nothing.
#[test]
fn in_memory_no_attribute_is_set_that_could_not_be_counted() {
    const LIMIT: u64 = 8 << 20;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let stack = Stack::in_memory(folder.path(), LIMIT);
    let (node, handle) = stack.create("f");
    let attribute = |number: u64| format!("trusted.{number:0240}");
    let set = |number: u64, value: &[u8]| {
        stack.top.setxattr(ROOT, node, attribute(number).as_bytes(), value, XattrFlags::empty())
    };
    let made = (0..1000).take_while(|number| set(*number, b"small").is_ok()).count() as u64;
    assert!((200..(64 << 10) / 249 + 1).contains(&made), "{made} names");
    assert_eq!(set(made, b"").expect_err("a list that is too long"), Errno::ENOSPC);
    assert_eq!(stack.top.listxattr(ROOT, node).expect("all of them").len() as u64, made);
    // Values of the names that there are: as much as the limit allows.
    let value = vec![7; 60 << 10];
    let large = (0..made).take_while(|number| set(*number, &value).is_ok()).count() as u64;
    assert!((100..(LIMIT + LIMIT / 16) / (60 << 10) + 1).contains(&large), "{large} values");
    assert!(stack.account.used() >= large * (60 << 10) && stack.account.used() <= LIMIT + LIMIT / 16);
    assert_eq!(Stack::in_memory(folder.path(), LIMIT).account.used(), stack.account.used(), "as it is counted anew");
    stack.top.release(handle);
}

/// What others have put there before may have more; it is not counted anew and again with each look.
#[test]
fn in_memory_attributes_that_cannot_be_listed_are_counted_once() {
    const LIMIT: u64 = 8 << 20;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let file = folder.path().join("f");
    std::fs::write(&file, "content").expect("written");
    for number in 0..300 {
        let name = format!("trusted.{number:0240}");
        rustix::fs::setxattr(&file, name.as_str(), b"small", rustix::fs::XattrFlags::empty()).expect("set");
    }
    let stack = Stack::in_memory(folder.path(), LIMIT);
    let before = stack.account.used();
    assert!(before > 64 << 10, "{before} bytes");
    let node = stack.top.lookup(ROOT, NodeId::ROOT, name("f")).expect("there").node;
    for _ in 0..5 {
        let refused = stack.top.setxattr(ROOT, node, b"trusted.one-more", b"", XattrFlags::empty());
        assert_eq!(refused.expect_err("a list that is too long"), Errno::ENOSPC);
        stack.top.removexattr(ROOT, node, b"trusted.none").expect_err("there is none");
    }
    assert_eq!(stack.account.used(), before);
}
