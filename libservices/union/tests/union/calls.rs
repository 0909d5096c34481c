//! Tests of the calls that an operation makes on the upper branch.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::{FileType, Name, NodeId, OpenFlags};
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
