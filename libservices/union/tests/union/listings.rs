//! Tests of directory listings, of large directories and of directories that change meanwhile.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::{Errno, HandleId, NodeId, SetAttributes, XattrFlags};
use poolfs_libservice::{Libservice, Memory, Outcome};
use poolfs_union::check::{Check, Problem};
use poolfs_union::{Lower, Union, UnionConfig};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const FILES: usize = 1500;

fn file(number: usize) -> String {
    format!("file-{number:04}")
}

fn fill(layer: &dyn Libservice, directory: &str, numbers: std::ops::Range<usize>) {
    mkdir(layer, directory);
    numbers.for_each(|number| put(layer, &format!("{directory}/{}", file(number)), b""));
}

/// The next `most` names after `cookie`, and the cookie to go on with.
fn some(layer: &dyn Libservice, handle: HandleId, cookie: u64, most: usize) -> (Vec<String>, u64) {
    let (mut names, mut last) = (Vec::new(), cookie);
    let each = &mut |entry: poolfs_libservice::DirectoryEntry<'_>| {
        if names.len() == most {
            return ControlFlow::Break(());
        }
        names.push(String::from_utf8_lossy(entry.name.as_bytes()).into_owned());
        last = entry.cookie;
        ControlFlow::Continue(())
    };
    layer.readdir(ROOT, handle, cookie, each).unwrap();
    (names, last)
}

/// Walks in steps of `most` names; `meanwhile` happens after the third.
fn walk(union: &Union, directory: NodeId, most: usize, meanwhile: impl Fn()) -> Vec<String> {
    let handle = union.opendir(ROOT, directory).unwrap();
    let (mut all, mut cookie) = (Vec::new(), 0);
    for step in 0.. {
        let (names, next) = some(union, handle, cookie, most);
        if names.is_empty() {
            break;
        }
        all.extend(names);
        cookie = next;
        if step == 2 {
            meanwhile();
        }
    }
    union.release(handle);
    all
}

#[test]
fn what_stays_is_listed_once_whatever_changes() {
    let lower = Memory::new();
    fill(&*lower, "below", 0..FILES);
    fill(&*lower, "both", 0..FILES / 2);
    let union = open_over(Memory::new(), std::slice::from_ref(&lower)).unwrap();
    fill(&*union, "above", 0..FILES);
    for number in FILES / 2..FILES {
        put(&*union, &format!("both/{}", file(number)), b"");
    }
    for directory in ["below", "above", "both"] {
        for most in [1, 7, 256, 300] {
            let node = node(&*union, directory).unwrap();
            let names = walk(&union, node, most, || {
                for number in (0..FILES).step_by(10) {
                    let name_of = file(number);
                    let _ = union.unlink(ROOT, node, name(&name_of));
                }
                for number in (1..FILES).step_by(10) {
                    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
                    let name_of = file(number);
                    let file = union.lookup(ROOT, node, name(&name_of)).unwrap().node;
                    union.setattr(ROOT, file, &changes, None).unwrap();
                }
                let new = format!("{directory}/new-{most}");
                put(&*union, &new, b"");
            });
            let once: BTreeSet<_> = names.iter().cloned().collect();
            assert_eq!(once.len(), names.len(), "{directory}, {most} at a time: a name came twice");
            for number in (0..FILES).filter(|number| number % 10 != 0) {
                assert!(once.contains(&file(number)), "{directory}, {most} at a time: {} is missing", file(number));
            }
        }
        let left = ls(&*union, directory);
        assert_eq!(left.len(), FILES - FILES / 10 + 4, "{directory}");
    }
}

#[test]
fn a_full_directory_is_seen_to_be_full_at_once() {
    let lower = Memory::new();
    mkdir(&*lower, "d");
    put(&*lower, "d/below", b"");
    let upper = Hooked::over(Memory::new());
    let union = open_over(upper.clone(), &[lower]).unwrap();
    for number in 0..FILES {
        put(&*union, &format!("d/{}", file(number)), b"");
    }
    let reads = Arc::new(AtomicU64::new(0));
    let counted = reads.clone();
    upper.hook(move |call| {
        counted.fetch_add(u64::from(call == Call::Read), Ordering::SeqCst);
        Ok(())
    });
    assert_eq!(union.rmdir(ROOT, NodeId::ROOT, name("d")).unwrap_err(), Errno::ENOTEMPTY);
    assert_eq!(reads.load(Ordering::SeqCst), 1);
}

#[test]
fn listings_of_many_handles_are_bounded() {
    let lower = Memory::new();
    fill(&*lower, "both", 0..FILES);
    let lowers = vec![Lower { layer_id: "layer-0".into(), layer: lower as Arc<dyn Libservice>, is_union: false }];
    // Headroom for three listings of this directory, each name with 24 bytes, and not for four.
    let listings_bytes_max = 3 * (FILES * (24 + file(0).len() + 5)) as u64;
    let union = Union::open(UnionConfig { listings_bytes_max, ..UnionConfig::new(Memory::new(), lowers) }).unwrap();
    put(&*union, "both/new", b"");
    let directory = node(&*union, "both").unwrap();
    let begin = |handle| union.readdir(ROOT, handle, 0, &mut |_| ControlFlow::Break(()));
    let handles: Vec<_> = (0..4).map(|_| union.opendir(ROOT, directory).unwrap()).collect();
    for &handle in &handles[..3] {
        begin(handle).unwrap();
        begin(handle).unwrap();
    }
    assert_eq!(begin(handles[3]).unwrap_err(), Errno::ENOMEM);
    union.release(handles[0]);
    begin(handles[3]).unwrap();
    assert_eq!(some(&*union, handles[3], 0, usize::MAX).0.len(), FILES + 1);
}

#[test]
fn a_listing_counts_before_it_is_whole_and_what_handles_keep_of_a_branchs_counts_with_it() {
    let (lower, upper) = (Memory::new(), Hooked::over(Memory::new()));
    for (directory, names) in [("both", 10 * FILES), ("one", 10 * FILES), ("few", 2000)] {
        fill(&*lower, directory, 0..names);
    }
    let lowers = vec![Lower { layer_id: "layer-0".into(), layer: lower as Arc<dyn Libservice>, is_union: false }];
    let config = UnionConfig::new(upper.clone(), lowers);
    let union = Union::open(UnionConfig { listings_bytes_max: 192 << 10, ..config }).unwrap();
    (10 * FILES..20 * FILES).for_each(|number| put(&*union, &format!("both/{}", file(number)), b""));
    let reads = Arc::new(AtomicU64::new(0));
    let counted = reads.clone();
    upper.hook(move |call| {
        counted.fetch_add(u64::from(call == Call::Read), Ordering::SeqCst);
        Ok(())
    });
    let begin = |handle| union.readdir(ROOT, handle, 0, &mut |_| ControlFlow::Break(()));
    let both = union.opendir(ROOT, node(&*union, "both").unwrap()).unwrap();
    assert_eq!(begin(both).unwrap_err(), Errno::ENOMEM);
    let pieces = (10 * FILES / 256) as u64;
    assert!(reads.load(Ordering::SeqCst) < pieces, "it was given up when there was no more room");
    // Who keeps the next names of one branch counts; without room it goes without.
    let small = union.mkdir(ROOT, NodeId::ROOT, name("small"), 0o700).unwrap().node;
    begin(union.opendir(ROOT, small).unwrap()).unwrap();
    let one = node(&*union, "one").unwrap();
    let handles: Vec<_> = (0..40).map(|_| union.opendir(ROOT, one).unwrap()).collect();
    for &handle in &handles {
        assert_eq!(some(&*union, handle, 0, 300).0.len(), 300);
    }
    put(&*union, "few/new", b"");
    let few = union.opendir(ROOT, node(&*union, "few").unwrap()).unwrap();
    assert_eq!(begin(few).unwrap_err(), Errno::ENOMEM);
    handles.into_iter().for_each(|handle| union.release(handle));
    assert_eq!(some(&*union, few, 0, usize::MAX).0.len(), 2001);
}

/// The first change in a directory of one branch gives it a second one, whose listings are merged.
#[test]
fn a_walk_goes_on_with_any_handle_also_when_a_directory_gets_a_second_branch() {
    let lower = Memory::new();
    fill(&*lower, "d", 0..FILES);
    let union = open_over(Memory::new(), &[lower]).unwrap();
    let directory = node(&*union, "d").unwrap();
    let open = || union.opendir(ROOT, directory).unwrap();
    let names = |handle, from| some(&*union, handle, from, usize::MAX);
    let [of_one, other_of_one] = [open(), open()];
    let (mut first, one) = some(&*union, of_one, 0, 700);
    put(&*union, "d/new", b"");
    // Whoever opened it before knows both.
    let [of_two, other_of_two] = [open(), open()];
    let (merged, two) = some(&*union, of_two, 0, 700);
    let (rest, _) = names(other_of_one, one);
    first.extend(rest);
    assert_eq!(sorted(first), (0..FILES).map(file).collect::<Vec<_>>());
    for handle in [other_of_two, other_of_one] {
        let mut all = merged.clone();
        all.extend(names(handle, two).0);
        let expected: Vec<_> = (0..FILES).map(file).chain(["new".to_owned()]).collect();
        assert_eq!(sorted(all), expected);
    }
    [of_one, other_of_one, of_two, other_of_two].into_iter().for_each(|handle| union.release(handle));
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

/// Numbers that no union shows would have names passed over, or be taken for other objects.
#[test]
fn an_inode_number_that_cannot_be_shown_is_a_broken_origin() {
    const ORIGIN: &[u8] = b"trusted.poolfs.origin";
    for wrong in [0, 1, 1 << 63, u64::MAX] {
        let branches = Branches::empty(1);
        mkdir(&*branches.lowers[0], "d");
        put(&*branches.lowers[0], "d/f", &[7; 9 * 4096]);
        put(&*branches.lowers[0], "d/empty", b"");
        let union = branches.open();
        write_at(&*union, "d/f", 4096, &[1; 4096]);
        write_at(&*union, "d/empty", 0, b"whole");
        fsync(&*union, "d/f");
        close(union);
        for path in ["d", "d/f", "d/empty"] {
            let node = node(&*branches.upper, path).unwrap();
            let mut origin = branches.upper.getxattr(ROOT, node, ORIGIN).unwrap();
            origin[8..16].copy_from_slice(&u64::to_le_bytes(wrong));
            origin[40..44].fill(0);
            let sum = crc32c::crc32c(&origin);
            origin[40..44].copy_from_slice(&sum.to_le_bytes());
            branches.upper.setxattr(ROOT, node, ORIGIN, &origin, XattrFlags::empty()).unwrap();
        }
        let mut found = Vec::new();
        let check = Check { upper: branches.upper.clone(), lowers: None, repair: true, is_whole_below: true };
        let _ = check.run(&mut |finding| found.push((finding.path, finding.problem, finding.outcome))).unwrap();
        found.sort_by(|one, other| one.0.cmp(&other.0));
        let wanted = ["d", "d/empty", "d/f"].map(|path| (path.to_owned(), Problem::Origin, Outcome::Damage));
        assert_eq!(found, wanted, "{wrong}");

        let union = branches.open();
        for path in ["d", "d/f", "d/empty"] {
            let shown = stat(&*union, path).inode;
            assert!(shown > 1 && shown >> 63 == 0, "{wrong}: {path} has {shown}");
        }
        let directory = node(&*union, "d").unwrap();
        let handle = union.opendir(ROOT, directory).unwrap();
        let mut listed = Vec::new();
        union
            .readdir(ROOT, handle, 0, &mut |entry| {
                listed.push((String::from_utf8(entry.name.as_bytes().to_vec()).unwrap(), entry.inode));
                ControlFlow::Continue(())
            })
            .unwrap();
        union.release(handle);
        for (name, inode) in listed.iter().filter(|(name, _)| !name.starts_with('.')) {
            assert_eq!(*inode, stat(&*union, &format!("d/{name}")).inode, "{wrong}: {name}");
        }
        assert!(get(&*union, "d/f").is_err_and(|error| error == Errno::EIO), "{wrong}");
        assert_eq!(get(&*union, "d/empty").unwrap(), b"whole");
        union.unlink(ROOT, directory, name("f")).unwrap();
        union.unlink(ROOT, directory, name("empty")).unwrap();
        union.rmdir(ROOT, NodeId::ROOT, name("d")).unwrap();
    }
}
