//! Race tests: calls that overlap, and the state after a failure of the layer below.

use crate::fault::Call;
use crate::support::{ROOT, Stack, name, patient, pattern};
use poolfs_cache::Cache;
use poolfs_libservice::{Durability, Libservice};
use poolfs_types::{AllocateMode, Attributes, Errno, HandleId, NodeId, SetAttributes, SetTime, Timestamp, XattrFlags};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const LENGTH: usize = 50_000;

/// A dirty file "a", and a directory for its other name "b".
struct Linked {
    stack: Stack,
    directory: NodeId,
    file: NodeId,
    handle: HandleId,
}

impl Linked {
    fn new() -> Self {
        let stack = Stack::new(patient(1 << 20));
        let directory = stack.cache.mkdir(&ROOT, NodeId::ROOT, name("d"), 0o755).unwrap().node;
        let (file, handle) = stack.create("a");
        stack.write(handle, 0, &pattern(1, 0, LENGTH));
        Self { stack, directory, file, handle }
    }

    /// Lets `happen` run beside the next `call` below: that call returns when it has ended, or when it evidently waits for
    /// that call. The receiver gets a word when it has ended.
    fn beside(&self, call: Call, happen: impl FnOnce(&Cache) + Send + 'static) -> Receiver<()> {
        let (told, ended) = channel();
        let cache = Arc::clone(&self.stack.cache);
        self.stack.below.meanwhile(call, move || {
            let (here, there) = channel();
            std::thread::spawn(move || {
                happen(&cache);
                let _ = here.send(());
                let _ = told.send(());
            });
            let _ = there.recv_timeout(Duration::from_millis(300));
        });
        ended
    }

    /// "b" is left and nobody has the file open: it must still have what was written.
    fn has_all_of_it_as_b(self) {
        let Self { stack, directory, file, handle } = self;
        assert_eq!(stack.cache.getattr(&ROOT, file).unwrap().links, 1);
        stack.cache.release(handle);
        stack.cache.forget(file, 2);
        let found = stack.cache.lookup(&ROOT, directory, name("b")).unwrap();
        assert_eq!((found.node, found.attributes.links), (file, 1));
        stack.cache.sync().unwrap();
        assert!(stack.below.now(file).content == pattern(1, 0, LENGTH), "dirty data was dropped");
    }
}

fn link(cache: &Cache, file: NodeId, directory: NodeId) {
    cache.link(&ROOT, file, directory, name("b")).unwrap();
}

fn unlink(cache: &Cache) {
    cache.unlink(&ROOT, NodeId::ROOT, name("a")).unwrap();
}

#[test]
fn a_file_keeps_its_data_when_one_name_comes_while_the_other_goes() {
    let linked = Linked::new();
    let ended = linked.beside(Call::Link, unlink);
    link(&linked.stack.cache, linked.file, linked.directory);
    ended.recv().unwrap();
    linked.has_all_of_it_as_b();
}

#[test]
fn a_file_keeps_its_data_when_it_is_looked_at_while_a_name_goes() {
    let linked = Linked::new();
    let (cache, file) = (&linked.stack.cache, linked.file);
    link(cache, file, linked.directory);
    cache.setxattr(&ROOT, file, b"user.x", b"1", XattrFlags::empty()).unwrap();
    let ended = linked.beside(Call::Unlink, move |cache| {
        cache.getattr(&ROOT, file).unwrap();
    });
    unlink(cache);
    ended.recv().unwrap();
    linked.has_all_of_it_as_b();
}

#[test]
fn a_file_keeps_its_data_when_a_name_comes_while_attributes_are_set() {
    let linked = Linked::new();
    let (cache, file, directory) = (&linked.stack.cache, linked.file, linked.directory);
    let ended = linked.beside(Call::Setattr, move |cache| link(cache, file, directory));
    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    cache.setattr(&ROOT, file, &changes, None).unwrap();
    ended.recv().unwrap();
    assert_eq!(cache.getattr(&ROOT, file).unwrap().links, 2);
    unlink(cache);
    linked.has_all_of_it_as_b();
}

/// A disk takes its time, and the union sets back the time of each sketch whose blocks it moves.
#[test]
fn attributes_of_a_dirty_file_are_set_while_it_is_brought_to_disk() {
    let Linked { stack, file, handle, .. } = Linked::new();
    let [then, accessed] = [1_000_000, 2_000_000].map(|seconds| Timestamp { seconds, nanoseconds: 7 });
    let sync = || stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    let set = |changes| stack.cache.setattr(&ROOT, file, &changes, None).unwrap();
    stack.below.writes_allowed.store(0, Ordering::SeqCst);
    let shown = std::thread::scope(|scope| {
        scope.spawn(sync);
        while stack.below.writes.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let (done, seen) = channel();
        scope.spawn(move || {
            set(SetAttributes { permissions: Some(0o600), ..SetAttributes::default() });
            set(SetAttributes { modified: Some(SetTime::At(then)), ..SetAttributes::default() });
            let accessed = Some(SetTime::At(accessed));
            done.send(set(SetAttributes { accessed, uid: Some(7), ..SetAttributes::default() })).unwrap();
        });
        let shown = seen.recv_timeout(Duration::from_secs(20));
        stack.below.writes_allowed.store(u64::MAX, Ordering::SeqCst);
        shown.expect("it waits for the disk")
    });
    let known = |found: Attributes| (found.permissions, found.modified, found.accessed, found.uid);
    assert_eq!(known(shown), (0o600, then, accessed, 7));
    sync();
    assert_eq!(stack.below.durable(file).modified, then);
    stack.cache.drop_clean();
    assert_eq!(known(stack.cache.getattr(&ROOT, file).unwrap()), known(shown));
}

/// Who looks at a file while it is cut learns the new size before the cut is noted here; what is behind it is gone all the same.
#[test]
fn a_file_that_is_looked_at_while_it_is_cut_has_nothing_behind_the_cut() {
    for (size, length) in [(5000, 20_000), (0, 20_000), (70_000, 200_000)] {
        let stack = Stack::new(patient(1 << 20));
        let (file, handle) = stack.create("a");
        stack.write(handle, 0, &pattern(1, 0, length));
        stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
        // What the cache knows of its attributes is outdated.
        stack.cache.setxattr(&ROOT, file, b"user.x", b"1", XattrFlags::empty()).unwrap();
        let (cache, (told, seen)) = (Arc::clone(&stack.cache), channel());
        stack.below.meanwhile(Call::Setattr, move || {
            told.send(cache.getattr(&ROOT, file).unwrap().size).unwrap();
        });
        let resize = |size| {
            let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
            assert_eq!(stack.cache.setattr(&ROOT, file, &changes, Some(handle)).unwrap().size, size);
        };
        resize(size);
        assert_eq!(seen.recv().unwrap(), size, "it was looked at after the cut below");
        resize(length as u64);
        let mut expected = pattern(1, 0, size as usize);
        expected.resize(length, 0);
        assert!(stack.read(handle, 0, length) == expected, "what was cut off at {size} is there again");
    }
}

/// What a look-up is answered may be older than what has been written back since, when nothing of the file is known here any more.
#[test]
fn a_file_that_is_looked_up_while_the_last_of_it_is_written_back_has_all_of_it() {
    let stack = Stack::new(patient(1 << 20));
    let (file, handle) = stack.create("a");
    stack.write(handle, 0, &pattern(1, 0, LENGTH));
    // The name, that is.
    stack.cache.drop_clean();
    let cache = Arc::clone(&stack.cache);
    stack.below.meanwhile(Call::Lookup, move || {
        cache.fsync(&ROOT, handle, Durability::All).unwrap();
        cache.release(handle);
        cache.forget(file, 1);
        cache.drop_clean();
    });
    let found = stack.cache.lookup(&ROOT, NodeId::ROOT, name("a")).unwrap();
    assert_eq!((found.node, found.attributes.size), (file, LENGTH as u64));
    assert_eq!(stack.cache.usage().bytes(), 0, "it is known anew");
    let again = stack.cache.open(&ROOT, file, poolfs_types::OpenFlags::READ_ONLY).unwrap();
    assert!(stack.read(again, 0, LENGTH) == pattern(1, 0, LENGTH));
}

/// Something else makes the cache ask below again: an extended attribute that is removed in vain, or one that is set.
#[test]
fn times_of_a_file_that_is_written_back_are_those_that_were_seen() {
    let Linked { stack, file, handle, .. } = Linked::new();
    let shown = || stack.cache.getattr(&ROOT, file).unwrap();
    let below = || stack.below.memory.getattr(&ROOT, file).unwrap();
    let ask_anew = || {
        let before = stack.below.getattrs.load(Ordering::SeqCst);
        assert!(stack.cache.removexattr(&ROOT, file, b"user.none").is_err());
        let shown = shown();
        assert_eq!(stack.below.getattrs.load(Ordering::SeqCst), before + 1, "it is known already");
        shown
    };
    let written = shown();
    assert!(below().changed < written.changed, "nothing of it is below");
    assert_eq!(ask_anew().changed, written.changed, "while it is dirty");
    stack.cache.setxattr(&ROOT, file, b"user.x", b"1", XattrFlags::empty()).unwrap();
    let set = shown();
    assert!(set.changed > written.changed, "another change of a dirty file was below");
    assert_eq!((set.changed, set.modified), (below().changed, written.modified));
    stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
    assert!(below().changed > set.changed, "writing back has moved it");
    assert_eq!((shown().changed, ask_anew().changed), (set.changed, set.changed), "nothing else has");
    assert!(stack.cache.removexattr(&ROOT, file, b"user.none").is_err());
    let (cache, (told, seen)) = (Arc::clone(&stack.cache), channel());
    stack.below.meanwhile(Call::Setxattr, move || {
        told.send(cache.getattr(&ROOT, file).unwrap().changed).unwrap();
    });
    stack.cache.setxattr(&ROOT, file, b"user.x", b"2", XattrFlags::empty()).unwrap();
    assert!(below().changed > set.changed, "something else has");
    assert_eq!((seen.recv().unwrap(), shown().changed), (below().changed, below().changed));
}

#[test]
fn a_file_keeps_its_data_when_its_other_name_is_replaced() {
    let linked = Linked::new();
    let (cache, file, directory) = (&linked.stack.cache, linked.file, linked.directory);
    cache.mknod(&ROOT, NodeId::ROOT, name("c"), poolfs_types::FileType::Regular, 0o644, 0).unwrap();
    let ended = linked.beside(Call::Link, move |cache| {
        let flags = poolfs_types::RenameFlags::empty();
        cache.rename(&ROOT, NodeId::ROOT, name("c"), NodeId::ROOT, name("a"), flags).unwrap();
    });
    link(cache, file, directory);
    ended.recv().unwrap();
    linked.has_all_of_it_as_b();
}

#[test]
fn a_name_that_cannot_be_looked_up_is_not_removed() {
    let linked = Linked::new();
    let (cache, below) = (&linked.stack.cache, &linked.stack.below);
    link(cache, linked.file, linked.directory);
    cache.drop_clean();
    below.fail_lookups.store(Errno::EIO.raw(), Ordering::SeqCst);
    let refused = cache.unlink(&ROOT, NodeId::ROOT, name("a"));
    below.fail_lookups.store(0, Ordering::SeqCst);
    assert_eq!(refused.unwrap_err().errno(), Errno::EIO);
    assert_eq!(cache.getattr(&ROOT, linked.file).unwrap().links, 2);
    unlink(cache);
    linked.has_all_of_it_as_b();
}

#[test]
fn what_goes_by_a_name_the_cache_does_not_know_is_known_to_be_gone() {
    let linked = Linked::new();
    let Linked { stack, file, handle, .. } = linked;
    stack.cache.drop_clean();
    unlink(&stack.cache);
    assert_eq!(stack.cache.getattr(&ROOT, file).unwrap().links, 0);
    stack.cache.release(handle);
    stack.cache.forget(file, 1);
    assert_eq!(stack.cache.dirty_bytes(), 0);
    assert_eq!(stack.below.writes.load(Ordering::SeqCst), 0);
}

#[test]
fn a_size_is_set_only_through_a_handle_of_that_file() {
    let stack = Stack::new(patient(1 << 20));
    let (file, handle) = stack.create("a");
    let (_, other) = stack.create("b");
    let changes = SetAttributes { size: Some(100), ..SetAttributes::default() };
    let refused = stack.cache.setattr(&ROOT, file, &changes, Some(other));
    assert_eq!(refused.unwrap_err().errno(), Errno::EBADF);
    assert_eq!(stack.cache.setattr(&ROOT, file, &changes, Some(handle)).unwrap().size, 100);
}

#[test]
fn a_file_that_is_made_and_then_cannot_be_told_of_leaves_nothing_open() {
    let stack = Stack::new(patient(1 << 20));
    let directory = stack.cache.mkdir(&ROOT, NodeId::ROOT, name("d"), 0o755).unwrap().node;
    let file = poolfs_types::FileType::Regular;
    let leaving = stack.cache.mknod(&ROOT, directory, name("x"), file, 0o644, 0).unwrap().node;
    // A node that leaves meanwhile makes the cache ask for the attributes of the new one, and that fails.
    let (cache, below) = (Arc::clone(&stack.cache), Arc::clone(&stack.below));
    stack.below.meanwhile(Call::Create, move || {
        cache.unlink(&ROOT, directory, name("x")).unwrap();
        cache.forget(leaving, 1);
        below.fail_getattrs.store(Errno::EIO.raw(), Ordering::SeqCst);
    });
    let made = stack.cache.create(&ROOT, NodeId::ROOT, name("a"), 0o644, poolfs_types::OpenFlags::READ_WRITE);
    assert_eq!(made.unwrap_err().errno(), Errno::EIO);
    stack.below.fail_getattrs.store(0, Ordering::SeqCst);
    stack.cache.forget(directory, 1);
    let memory = Arc::clone(&stack.below.memory);
    stack.cache.shutdown().unwrap();
    drop(stack);
    assert_eq!(memory.outstanding(), (0, 0));
}

#[test]
fn punching_and_zeroing_what_is_not_below_yet_keeps_the_size() {
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    for mode in [punch, AllocateMode::ZERO_RANGE, AllocateMode::ZERO_RANGE | AllocateMode::KEEP_SIZE] {
        for (length, range) in [(8192, 4096..8192), (8192, 0..8192), (70_000, 4096..70_000), (70_000, 8192..1 << 20)] {
            let stack = Stack::new(patient(1 << 20));
            let (node, handle) = stack.create("f");
            stack.write(handle, 0, &pattern(1, 0, length));
            stack.cache.fallocate(&ROOT, handle, mode, range.start, range.end - range.start).unwrap();
            let mut expected = pattern(1, 0, length);
            let kept = mode.contains(AllocateMode::KEEP_SIZE);
            expected.resize(if kept { length } else { length.max(range.end as usize) }, 0);
            let end = expected.len().min(range.end as usize);
            expected[range.start as usize..end].fill(0);
            assert_eq!(stack.cache.getattr(&ROOT, node).unwrap().size, expected.len() as u64);
            stack.cache.fsync(&ROOT, handle, Durability::All).unwrap();
            assert!(stack.below.durable(node).content == expected, "{mode:?} {range:?} of {length}");
        }
    }
}
