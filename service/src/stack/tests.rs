//! Tests of the lifetime of branches.

use super::*;
use poolfs_libservice::types::{Caller, Name, NodeId, OpenFlags};

const ROOT: Caller = Caller::ROOT;

fn directory(path: &Path) -> Arc<dyn Source> {
    Arc::new(Directory::open(path, false).expect("there"))
}

fn write(layer: &dyn Libservice, content: &[u8]) {
    let name = Name::new(b"f").expect("a name");
    let (entry, handle) = layer.create(&ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).expect("room");
    layer.write(&ROOT, handle, 0, content).expect("room");
    layer.release(handle);
    layer.forget(entry.node, 1);
}

#[test]
fn the_end_of_a_stack_leaves_nothing_unwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let [upper, lower] = ["upper", "lower"].map(|name| folder.path().join(name));
    for path in [&upper, &lower] {
        std::fs::create_dir(path).expect("made");
    }
    let builder = StackBuilder::new(1 << 20, None).expect("a cache");
    for (stack, at) in
        [(StackSpec::directory(lower.clone()), &lower), (StackSpec::union(upper.clone(), vec![lower.clone()]), &upper)]
    {
        let stack = builder.build(&stack).expect("usable");
        if at == &upper {
            let name = Name::new(b"f").expect("a name");
            stack.layer.unlink(&ROOT, NodeId::ROOT, name).expect("there");
        }
        write(&*stack.layer, b"not flushed");
        assert!(builder.cache_status().dirty_bytes > 0);
        drop(stack);
        assert_eq!(std::fs::read(at.join("f")).expect("there"), b"not flushed");
        assert_eq!(builder.cache_status().dirty_bytes, 0);
    }
}

#[test]
fn a_branch_of_a_stack_that_is_never_finished_leaves_nothing_unwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let builder = StackBuilder::new(1 << 20, None).expect("a cache");
    let branch = builder
        .branch(&directory(folder.path()), Role::Upper, &Storage::default(), Some(ClaimKind::Alone))
        .expect("usable");
    write(&*branch.layer(), b"by a union that failed to open");
    drop(branch);
    assert_eq!(std::fs::read(folder.path().join("f")).expect("there"), b"by a union that failed to open");
    builder.branch(&directory(folder.path()), Role::Directory, &Storage::default(), None).expect("free again");
}

#[test]
fn who_wants_a_branch_that_ends_waits_and_who_wants_another_does_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let builder = StackBuilder::new(1 << 20, None).expect("a cache");
    let branch = |name: &str, role| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(&path).expect("made");
        builder.branch(&directory(&path), role, &Storage::default(), None)
    };
    let first = branch("one", Role::Directory).expect("usable");
    assert!(Arc::ptr_eq(&first, &branch("one", Role::Directory).expect("shared")));
    assert!(matches!(branch("one/below", Role::Lower), Err(StackError::Conflict { .. })));
    // It has begun to end, and has not come to it.
    let life = Arc::clone(&first._life);
    drop(first);
    let (told, tell) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        for name in ["one", "one/below"] {
            let (branch, told) = (&branch, told.clone());
            scope.spawn(move || {
                // The first of them excludes the second.
                let made = branch(name, Role::Directory);
                told.send(made.is_ok()).expect("heard");
                drop(made);
            });
        }
        branch("other", Role::Directory).expect("another one");
        assert!(tell.try_recv().is_err());
        drop(life);
        let answers = [tell.recv().expect("an answer"), tell.recv().expect("an answer")];
        assert!(answers.contains(&true));
    });
}

#[test]
fn what_others_write_into_memory_is_refused() {
    let folder = tempfile::Builder::new().tempdir_in("/dev/shm").expect("a tmpfs");
    let builder = StackBuilder::new(1 << 20, None).expect("a cache");
    let (directory, size_bytes) = (folder.path().to_owned(), Some(1 << 20));
    let timed = StackSpec::Directory { directory, coherence: Coherence::Timed { milliseconds: 1000 }, size_bytes };
    let refused = builder.build(&timed).map(drop).expect_err("without a limit").to_string();
    assert!(refused.contains("in memory"), "{refused}");
}

#[test]
fn who_wants_a_branch_at_once_has_the_same_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let builder = StackBuilder::new(1 << 20, None).expect("a cache");
    let given = directory(folder.path());
    let start = std::sync::Barrier::new(4);
    let all: Vec<_> = std::thread::scope(|scope| {
        let branch = || {
            start.wait();
            builder.branch(&given, Role::Directory, &Storage::default(), Some(ClaimKind::Alone)).expect("usable")
        };
        let all: Vec<_> = (0..4).map(|_| scope.spawn(branch)).collect();
        all.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(all.iter().all(|branch| Arc::ptr_eq(branch, &all[0])));
}
