//! Conformance cases: directory listings.

use super::Case;
use super::support::*;
use crate::types::{FileType, HandleId, RenameFlags};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

pub(super) const CASES: &[Case] = &[
    Case::new("directories/entries", entries_say_what_lookup_says),
    Case::new("directories/empty", empty_directories_list_nothing),
    Case::new("directories/steps", a_listing_goes_on_where_it_stopped),
    Case::new("directories/handles", a_listing_goes_on_with_another_handle),
    Case::new("directories/removal", removing_while_walking),
    Case::new("directories/insertion", inserting_while_walking),
    Case::new("directories/again", starting_again_sees_what_is_there),
    Case::new("directories/removed", a_removed_directory_is_empty),
    Case::new("directories/large", large_directories),
];

/// What the kernel can carry, and a little room for entries that are added above.
const COOKIE_MAX: u64 = i64::MAX as u64 - 16;

/// Up to `limit` names from `cookie`, each with the cookie after it.
#[track_caller]
fn step(layer: Layer<'_>, handle: HandleId, cookie: u64, limit: usize) -> Vec<(String, u64)> {
    let mut found = Vec::new();
    let mut visit = |entry: crate::DirectoryEntry<'_>| {
        if found.len() == limit {
            return ControlFlow::Break(());
        }
        assert!((1..=COOKIE_MAX).contains(&entry.cookie), "cookie {}", entry.cookie);
        found.push((entry.name.to_string(), entry.cookie));
        ControlFlow::Continue(())
    };
    ok(layer.readdir(&ME, handle, cookie, &mut visit));
    found
}

/// Walks to the end in steps of `limit`, doing something after each; sorted names.
#[track_caller]
fn walk(layer: Layer<'_>, handle: HandleId, limit: usize, mut between: impl FnMut(&[(String, u64)])) -> Vec<String> {
    let mut cookie = 0;
    let mut all = Vec::new();
    loop {
        let found = step(layer, handle, cookie, limit);
        let Some((_, last)) = found.last() else { break };
        cookie = *last;
        between(&found);
        all.extend(found.into_iter().map(|(name, _)| name));
        assert!(all.len() < 100_000, "the listing has no end");
    }
    all.sort();
    all
}

fn fill(layer: Layer<'_>, node: Node, count: usize) -> Vec<String> {
    let mut all: Vec<String> = (0..count).map(|at| format!("name {at:05}")).collect();
    for text in &all {
        layer.release(create(layer, node, text).1);
    }
    all.sort();
    all
}

fn entries_say_what_lookup_says(layer: Layer<'_>) {
    file(layer, ROOT, "file", b"x");
    mkdir(layer, ROOT, "directory");
    ok(layer.symlink(&ME, ROOT, name("link"), b"x"));
    ok(layer.mknod(&ME, ROOT, name("pipe"), FileType::Fifo, 0o600, 0));
    let handle = ok(layer.opendir(&ME, ROOT));
    let mut found = BTreeMap::new();
    let mut visit = |entry: crate::DirectoryEntry<'_>| {
        let again = found.insert(entry.name.to_string(), (entry.inode, entry.file_type));
        assert!(again.is_none(), "{} came twice", entry.name);
        ControlFlow::Continue(())
    };
    ok(layer.readdir(&ME, handle, 0, &mut visit));
    layer.release(handle);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["directory", "file", "link", "pipe"]);
    for (text, seen) in found {
        let looked_up = lookup(layer, ROOT, &text).attributes;
        assert_eq!(seen, (looked_up.inode, looked_up.file_type), "{text}");
    }
}

fn empty_directories_list_nothing(layer: Layer<'_>) {
    assert!(names(layer, ROOT).is_empty());
    assert!(names(layer, mkdir(layer, ROOT, "directory")).is_empty());
}

fn a_listing_goes_on_where_it_stopped(layer: Layer<'_>) {
    let expected = fill(layer, ROOT, 100);
    let handle = ok(layer.opendir(&ME, ROOT));
    for limit in [1, 7, 99, 100, 1000] {
        assert_eq!(walk(layer, handle, limit, |_| ()), expected, "in steps of {limit}");
    }
    // From every place, in no order.
    let whole = step(layer, handle, 0, 1000);
    for at in [50, 3, 98, 0, 77] {
        let rest = step(layer, handle, whole[at].1, 1000);
        assert_eq!(rest, whole[at + 1..], "after {}", whole[at].0);
    }
    assert!(step(layer, handle, whole[99].1, 1000).is_empty());
    layer.release(handle);
}

fn a_listing_goes_on_with_another_handle(layer: Layer<'_>) {
    let expected = fill(layer, ROOT, 100);
    let handle = ok(layer.opendir(&ME, ROOT));
    let whole = step(layer, handle, 0, 1000);
    assert_eq!(whole.len(), expected.len());
    for at in [50, 0, 98, 99] {
        let other = ok(layer.opendir(&ME, ROOT));
        assert_eq!(step(layer, other, whole[at].1, 1000), whole[at + 1..], "after {}", whole[at].0);
        layer.release(other);
    }
    let other = ok(layer.opendir(&ME, ROOT));
    ok(layer.unlink(&ME, ROOT, name(&whole[10].0)));
    let rest: Vec<_> = step(layer, other, whole[50].1, 1000).into_iter().map(|(text, _)| text).collect();
    let stayed: Vec<_> = whole[51..].iter().map(|(text, _)| text.clone()).collect();
    assert_eq!(rest, stayed, "what was delivered before has no part in what follows");
    layer.release(other);
    layer.release(handle);
}

fn removing_while_walking(layer: Layer<'_>) {
    let expected = fill(layer, ROOT, 500);
    let handle = ok(layer.opendir(&ME, ROOT));
    let found = walk(layer, handle, 13, |step| {
        for (text, _) in step {
            ok(layer.unlink(&ME, ROOT, name(text)));
        }
    });
    layer.release(handle);
    assert_eq!(found, expected, "names that existed until they were delivered");
    assert!(names(layer, ROOT).is_empty());
}

fn inserting_while_walking(layer: Layer<'_>) {
    let expected = fill(layer, ROOT, 300);
    file(layer, ROOT, "moving", b"x");
    let handle = ok(layer.opendir(&ME, ROOT));
    let mut added = 0;
    let mut found = walk(layer, handle, 20, |_| {
        // A bounded number: a layer may deliver them too.
        if added < 30 {
            file(layer, ROOT, &format!("later {added}"), b"x");
            added += 1;
        }
        if added == 5 {
            ok(rename(layer, (ROOT, "moving"), (ROOT, "later moved"), RenameFlags::empty()));
        }
    });
    layer.release(handle);
    found.retain(|text| text.starts_with("name "));
    assert_eq!(found, expected, "names that existed throughout");
}

fn starting_again_sees_what_is_there(layer: Layer<'_>) {
    fill(layer, ROOT, 10);
    let handle = ok(layer.opendir(&ME, ROOT));
    assert_eq!(step(layer, handle, 0, 100).len(), 10);
    file(layer, ROOT, "new", b"x");
    ok(layer.unlink(&ME, ROOT, name("name 00003")));
    let again = walk(layer, handle, 100, |_| ());
    assert!(again.contains(&"new".to_owned()), "{again:?}");
    assert!(!again.contains(&"name 00003".to_owned()), "{again:?}");
    layer.release(handle);
}

fn a_removed_directory_is_empty(layer: Layer<'_>) {
    let node = mkdir(layer, ROOT, "directory");
    file(layer, node, "file", b"x");
    let handle = ok(layer.opendir(&ME, node));
    ok(layer.unlink(&ME, node, name("file")));
    ok(layer.rmdir(&ME, ROOT, name("directory")));
    assert!(step(layer, handle, 0, 100).is_empty());
    layer.release(handle);
}

fn large_directories(layer: Layer<'_>) {
    let expected = fill(layer, ROOT, 3000);
    let handle = ok(layer.opendir(&ME, ROOT));
    assert_eq!(walk(layer, handle, 100, |_| ()), expected);
    layer.release(handle);
    assert_eq!(names(layer, ROOT), expected);
}
