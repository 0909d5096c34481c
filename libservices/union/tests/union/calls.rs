//! Tests of the calls that an operation makes on the upper branch.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::{FileType, Name, NodeId, OpenFlags, SetAttributes};
use poolfs_libservice::{Libservice, Memory, Result};
use std::sync::{Arc, Mutex};

fn asked(upper: &Hooked, work: impl FnOnce()) -> Vec<Call> {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let noted = calls.clone();
    upper.hook(move |call| {
        noted.lock().unwrap().push(call);
        Ok(())
    });
    work();
    upper.unhook();
    std::mem::take(&mut *calls.lock().unwrap())
}

type Make = fn(&dyn Libservice, NodeId, Name<'_>) -> Result<()>;

/// Whatever is made is known to have no marks, and as what it was made until it goes.
#[test]
fn what_is_made_and_removed_is_not_asked_for_its_marks() {
    let below = Memory::new();
    mkdir(&*below, "d");
    put(&*below, "d/below", b"content");
    let upper = Hooked::over(Memory::new());
    let union = open_over(upper.clone(), std::slice::from_ref(&below)).unwrap();
    put(&*union, "d/first", b"");
    put(&*union, "d/other", b"content");
    let directory = node(&*union, "d").unwrap();
    let kinds: [(&str, Make); 5] = [
        ("a file", |union, parent, name| {
            let (_, handle) = union.create(ROOT, parent, name, 0o644, OpenFlags::READ_WRITE)?;
            union.release(handle);
            Ok(())
        }),
        ("a pipe", |union, parent, name| union.mknod(ROOT, parent, name, FileType::Fifo, 0o644, 0).map(drop)),
        ("a symbolic link", |union, parent, name| union.symlink(ROOT, parent, name, b"target").map(drop)),
        ("a link", |union, parent, name| union.link(ROOT, node(union, "d/other")?, parent, name).map(drop)),
        ("a directory", |union, parent, name| union.mkdir(ROOT, parent, name, 0o755).map(drop)),
    ];
    for (kind, make) in kinds {
        let calls = asked(&upper, || {
            make(&*union, directory, name("new")).expect(kind);
            let removed = match kind {
                "a directory" => union.rmdir(ROOT, directory, name("new")),
                _ => union.unlink(ROOT, directory, name("new")),
            };
            removed.expect(kind);
        });
        let is_of_marks = |call: &Call| matches!(call, Call::Getxattr | Call::Listxattr);
        assert!(!calls.iter().any(is_of_marks), "{kind}: {calls:?}");
        assert!(ls(&*union, "d").iter().eq(["below", "first", "other"]), "{kind}");
    }
}

/// A sketch is read and written at all places before its end without asking how long it is, also after it was made longer, shorter, or found again.
#[test]
fn a_sketch_is_not_asked_for_its_size_where_that_does_not_matter() {
    const BLOCK: usize = 4096;
    const BLOCKS: usize = 16;
    let below = Memory::new();
    put(&*below, "f", &[1; BLOCKS * BLOCK]);
    let upper = Hooked::over(Memory::new());
    let end = |blocks: usize| (blocks * BLOCK) as u64;
    let unasked = |union: &dyn Libservice, handle, until: usize| {
        let mut bytes = vec![0; BLOCK];
        // A block that is written in part is copied later, by more calls: each of these is whole.
        let calls = asked(&upper, || {
            for block in [until - 1, 1] {
                assert_eq!(union.write(ROOT, handle, end(block), &[3; BLOCK]).unwrap().count, BLOCK);
            }
            for offset in [end(until - 1), end(3) + 7, end(until) - 5] {
                let length = (end(until) - offset).min(BLOCK as u64) as usize;
                assert_eq!(union.read(ROOT, handle, offset, &mut bytes[..length]).unwrap(), length);
            }
        });
        assert!(!calls.contains(&Call::Look), "of {until} blocks: {calls:?}");
    };
    let size = |union: &dyn Libservice| union.getattr(ROOT, node(union, "f").unwrap()).unwrap().size;
    let resize = |union: &dyn Libservice, size| {
        let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        union.setattr(ROOT, node(union, "f").unwrap(), &changes, None).unwrap();
    };
    let read_all = |union: &dyn Libservice, handle| {
        let mut bytes = vec![9; (BLOCKS + 2) * BLOCK];
        union.read(ROOT, handle, 0, &mut bytes).unwrap() as u64
    };
    let union = open_over(upper.clone(), std::slice::from_ref(&below)).unwrap();
    let opened = |union: &dyn Libservice| {
        let handle = union.open(ROOT, node(union, "f").unwrap(), OpenFlags::READ_WRITE).unwrap();
        // The first is only noted, as long as it is alone.
        for offset in [0, end(2)] {
            assert_eq!(union.write(ROOT, handle, offset, &[4; BLOCK]).unwrap().count, BLOCK);
        }
        handle
    };
    let handle = opened(&*union);
    unasked(&*union, handle, BLOCKS);
    assert_eq!((read_all(&*union, handle), size(&*union)), (end(BLOCKS), end(BLOCKS)));
    // Longer by a write, behind which it ends.
    union.write(ROOT, handle, end(BLOCKS), &[2; BLOCK]).unwrap();
    assert_eq!(read_all(&*union, handle), end(BLOCKS + 1));
    unasked(&*union, handle, BLOCKS + 1);
    for shorter in [end(BLOCKS) + 3, end(5) + 3] {
        resize(&*union, shorter);
        assert_eq!((read_all(&*union, handle), size(&*union)), (shorter, shorter));
        let mut rest = vec![9; BLOCK];
        assert_eq!(union.read(ROOT, handle, shorter - 1, &mut rest).unwrap(), 1, "nothing is behind the end");
        assert_eq!(union.read(ROOT, handle, shorter, &mut rest).unwrap(), 0);
    }
    unasked(&*union, handle, 5);
    union.release(handle);
    drop(union);
    let union = open_over(upper.clone(), std::slice::from_ref(&below)).unwrap();
    let handle = opened(&*union);
    assert_eq!(read_all(&*union, handle), end(5) + 3);
    unasked(&*union, handle, 5);
    union.release(handle);
}
