//! Tests of content before names: content is below before a name puts it in another file's place.

use crate::fault::Logged;
use crate::support::{ROOT, Stack, name, patient, pattern};
use poolfs_libservice::{Libservice, NameChange};
use poolfs_types::{Errno, HandleId, NodeId, OpenFlags, RenameFlags, SetAttributes};
use std::sync::atomic::Ordering;

const BYTES: usize = 10_000;

fn stack() -> Stack {
    Stack::new(patient(1 << 20))
}

/// A file with content that is below, and its handle.
fn old(stack: &Stack, text: &str) -> (NodeId, HandleId) {
    let (node, handle) = stack.create(text);
    stack.write(handle, 0, &pattern(1, 0, BYTES));
    stack.cache.sync().unwrap();
    let _ = stack.below.take_log();
    (node, handle)
}

/// A file with content that is not below yet, and its handle.
fn new(stack: &Stack, text: &str) -> (NodeId, HandleId) {
    let (node, handle) = stack.create(text);
    stack.write(handle, 0, &pattern(2, 0, BYTES));
    (node, handle)
}

fn rename(stack: &Stack, from: &str, to: &str, flags: RenameFlags) -> poolfs_libservice::Result<()> {
    stack.cache.rename(&ROOT, NodeId::ROOT, name(from), NodeId::ROOT, name(to), flags)
}

#[test]
fn a_rename_over_a_file_comes_after_the_content() {
    let stack = stack();
    let _ = old(&stack, "conf");
    let (tmp, handle) = new(&stack, "tmp");
    stack.cache.release(handle);
    rename(&stack, "tmp", "conf", RenameFlags::empty()).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Write(tmp), Logged::Rename]);
    assert_eq!(stack.below.now(tmp).content, pattern(2, 0, BYTES));
    assert_eq!(stack.cache.dirty_bytes(), 0);
}

#[test]
fn a_name_that_the_cache_has_forgotten_is_replaced_as_well() {
    let stack = stack();
    let (conf, _) = old(&stack, "conf");
    let (tmp, _) = new(&stack, "tmp");
    stack.cache.forget(conf, 1);
    stack.cache.drop_clean();
    rename(&stack, "tmp", "conf", RenameFlags::empty()).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Write(tmp), Logged::Rename]);
}

#[test]
fn an_exchange_comes_after_the_content_of_both() {
    let stack = stack();
    let (one, _) = new(&stack, "one");
    let (two, _) = new(&stack, "two");
    rename(&stack, "one", "two", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Write(one), Logged::Write(two), Logged::Rename]);
}

#[test]
fn a_link_comes_after_the_content_also_of_a_file_that_had_no_name() {
    let stack = stack();
    let (tmp, _) = new(&stack, "tmp");
    stack.cache.link(&ROOT, tmp, NodeId::ROOT, name("conf")).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Write(tmp), Logged::Link(tmp)]);
    let made = stack.cache.tmpfile(&ROOT, NodeId::ROOT, 0o644, OpenFlags::READ_WRITE).unwrap();
    stack.write(made.1, 0, &pattern(3, 0, BYTES));
    stack.cache.link(&ROOT, made.0.node, NodeId::ROOT, name("other")).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Write(made.0.node), Logged::Link(made.0.node)]);
}

#[test]
fn a_rename_that_replaces_nothing_and_one_of_a_clean_file_write_nothing() {
    let stack = stack();
    let (_, handle) = new(&stack, "tmp");
    rename(&stack, "tmp", "conf", RenameFlags::empty()).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Rename]);
    stack.cache.release(handle);
    stack.cache.sync().unwrap();
    let _ = old(&stack, "other");
    rename(&stack, "conf", "other", RenameFlags::empty()).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Rename]);
    let _ = new(&stack, "third");
    let refused = rename(&stack, "third", "other", RenameFlags::NO_REPLACE).unwrap_err();
    assert_eq!(refused.errno(), Errno::EEXIST);
    assert_eq!(stack.below.take_log(), []);
}

#[test]
fn a_rename_whose_content_cannot_be_written_fails_and_changes_nothing() {
    let stack = stack();
    let (conf, _) = old(&stack, "conf");
    let (tmp, handle) = new(&stack, "tmp");
    for errno in [Errno::ENOSPC, Errno::EIO] {
        stack.below.fail_writes.store(errno.raw(), Ordering::SeqCst);
        let failed = rename(&stack, "tmp", "conf", RenameFlags::empty()).unwrap_err();
        assert_eq!(failed.errno(), errno);
        let linked = stack.cache.link(&ROOT, tmp, NodeId::ROOT, name("more")).unwrap_err();
        assert_eq!(linked.errno(), errno);
    }
    assert_eq!(stack.below.take_log(), []);
    let found = |text| stack.cache.lookup(&ROOT, NodeId::ROOT, name(text)).map(|entry| entry.node);
    assert_eq!((found("conf").unwrap(), found("tmp").unwrap()), (conf, tmp));
    assert_eq!(found("more").unwrap_err().errno(), Errno::ENOENT);
    assert_eq!(stack.read(handle, 0, BYTES), pattern(2, 0, BYTES), "what was accepted stays");
    stack.below.fail_writes.store(0, Ordering::SeqCst);
    rename(&stack, "tmp", "conf", RenameFlags::empty()).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::Write(tmp), Logged::Rename]);
}

#[test]
fn a_file_that_was_emptied_and_written_again_is_below_when_it_is_closed() {
    let stack = stack();
    let (conf, handle) = old(&stack, "conf");
    let writer = stack.cache.open(&ROOT, conf, OpenFlags::WRITE_ONLY | OpenFlags::TRUNCATE).unwrap();
    stack.cache.flush(&ROOT, writer).unwrap();
    assert_eq!(stack.below.take_log(), [], "there is nothing to write yet");
    stack.write(writer, 0, &pattern(2, 0, BYTES));
    stack.cache.flush(&ROOT, writer).unwrap();
    let replaced = Logged::BeforeNames(conf, NameChange::Replaces);
    assert_eq!(stack.below.take_log(), [Logged::Write(conf), replaced]);
    assert_eq!(stack.below.now(conf).content, pattern(2, 0, BYTES));
    // A descriptor that somebody had only inherited was the first to be closed.
    stack.write(writer, BYTES as u64, &pattern(3, 0, BYTES));
    stack.cache.flush(&ROOT, writer).unwrap();
    assert_eq!(stack.below.take_log(), [], "once is enough for those");
    stack.cache.release(writer);
    assert_eq!(stack.below.take_log(), [Logged::Write(conf), replaced]);
    // From then on it is a file like others.
    stack.write(handle, 0, b"later");
    stack.cache.flush(&ROOT, handle).unwrap();
    stack.cache.release(handle);
    assert_eq!(stack.below.take_log(), []);
}

#[test]
fn a_file_that_was_emptied_by_its_size_is_below_when_it_is_closed() {
    let stack = stack();
    let (conf, handle) = old(&stack, "conf");
    let empty = SetAttributes { size: Some(0), ..SetAttributes::default() };
    stack.cache.setattr(&ROOT, conf, &empty, None).unwrap();
    stack.write(handle, 0, &pattern(2, 0, BYTES));
    stack.below.fail_writes.store(Errno::ENOSPC.raw(), Ordering::SeqCst);
    assert_eq!(stack.cache.flush(&ROOT, handle).unwrap_err().errno(), Errno::ENOSPC, "close tells of it");
    stack.below.fail_writes.store(0, Ordering::SeqCst);
    stack.cache.release(handle);
    assert_eq!(stack.below.take_log(), [Logged::Write(conf), Logged::BeforeNames(conf, NameChange::Replaces)]);
}

#[test]
fn what_is_to_replace_a_name_of_another_layer_is_written_on_request() {
    let stack = stack();
    let (tmp, handle) = new(&stack, "tmp");
    stack.cache.write_before_names(&ROOT, tmp, NameChange::Replaces).unwrap();
    let replaced = Logged::BeforeNames(tmp, NameChange::Replaces);
    assert_eq!(stack.below.take_log(), [Logged::Write(tmp), replaced]);
    // The layer below may have something left to write although this one has not.
    stack.cache.write_before_names(&ROOT, tmp, NameChange::Replaces).unwrap();
    assert_eq!(stack.below.take_log(), [replaced]);
    stack.cache.hold(&ROOT, handle, 0..4096, true).unwrap();
    stack.write(handle, 0, b"held");
    stack.cache.write_before_names(&ROOT, tmp, NameChange::Adds).unwrap();
    assert_eq!(stack.below.take_log(), [Logged::BeforeNames(tmp, NameChange::Adds)], "what is on hold stays");
}
