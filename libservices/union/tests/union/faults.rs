//! Fault-injection tests: a call of the upper branch fails at any point of any operation, and the union still shows what the disk
//! holds.

use crate::hooked::{Call, Hooked};
use crate::script::{Script, lower, nothing_left, remove_all, tree};
use crate::support::*;
use poolfs_libservice::Recorder;
use poolfs_libservice::types::{
    AllocateMode, Caller, Errno, FileType, Name, NodeId, OpenFlags, RenameFlags, SetAttributes, XattrFlags,
};
use poolfs_libservice::{Durability, Filter, Libservice, Memory, Result, fail};
use poolfs_union::Union;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

#[test]
fn a_failure_anywhere_leaves_a_whole_tree() {
    for seed in 0..150u64 {
        let below = lower();
        let recorder = Recorder::new();
        let upper = Hooked::over(recorder.clone());
        let union = open_over(upper.clone(), std::slice::from_ref(&below)).unwrap();
        let left = Arc::new(AtomicI64::new(i64::MAX));
        // What a failed removal leaves is swept by the next union.
        let swept_later = Arc::new(AtomicBool::new(false));
        let (counted, noted) = (left.clone(), swept_later.clone());
        // Changes that find no room with every second seed; with the others any call, as on a broken disk.
        let any = seed % 2 == 1;
        upper.hook(move |call: Call| {
            if !any && !call.changes() || counted.fetch_sub(1, Ordering::SeqCst) != 0 {
                return Ok(());
            }
            noted.fetch_or(!call.changes() || call == Call::Remove, Ordering::SeqCst);
            fail(if any { Errno::EIO } else { Errno::ENOSPC })
        });
        let mut script = Script::new(seed);
        let mut history = Vec::new();
        for step in 0..25 {
            left.store(script.random.below(if any { 60 } else { 14 }) as i64, Ordering::SeqCst);
            let done = script.step(&*union);
            let failed = left.swap(i64::MAX, Ordering::SeqCst) < 0;
            history.push(format!("{done}{}", if failed { " (failed below)" } else { "" }));
            let what = format!("seed {seed}, step {step}:\n{}\n", history.join("\n"));
            let shown = tree(&*union, &what);
            union.sync().unwrap();
            let disk = recorder.crashed(recorder.len(), 0);
            let again = open_over(disk.clone(), std::slice::from_ref(&below)).unwrap();
            assert_eq!(tree(&*again, &what), shown, "{what}: after a remount");
        }
        let what = format!("seed {seed}:\n{}\n", history.join("\n"));
        remove_all(&*union, &what);
        script.forget(&*union);
        if !swept_later.load(Ordering::SeqCst) {
            nothing_left(&*upper, &what);
        }
    }
}

const BLOCK: usize = 4096;

/// A union over one lower branch with the file `f` of so many bytes, all ones.
fn with_file(upper: Arc<Hooked>, length: usize) -> (Arc<Hooked>, Arc<Memory>, Arc<Union>) {
    let below = Memory::new();
    put(&*below, "f", &vec![1; length]);
    let union = open_over(upper.clone(), std::slice::from_ref(&below)).unwrap();
    (upper, below, union)
}

/// Lets the `nth` of these calls fail (counted from 1).
fn fail_at(upper: &Hooked, wanted: Call, nth: i64) {
    let left = AtomicI64::new(nth);
    upper.hook(
        move |call| {
            if call == wanted && left.fetch_sub(1, Ordering::SeqCst) == 1 { fail(Errno::ENOSPC) } else { Ok(()) }
        },
    );
}

#[test]
fn what_is_written_after_a_failed_punch_is_kept() {
    let (upper, _below, union) = with_file(Hooked::over(Memory::new()), 3 * BLOCK);
    let file = node(&*union, "f").unwrap();
    let handle = union.open(ROOT, file, OpenFlags::READ_WRITE).unwrap();
    fail_at(&upper, Call::Allocate, 1);
    let mode = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    assert_eq!(union.fallocate(ROOT, handle, mode, 100, 5000).unwrap_err(), Errno::ENOSPC);
    union.write(ROOT, handle, 10, b"new").unwrap();
    union.release(handle);
    union.sync().unwrap();
    union.forget(file, 1);
    assert_eq!(&get(&*union, "f").unwrap()[8..15], b"\x01\x01new\x01\x01");
}

#[test]
fn what_is_written_after_a_failed_truncation_is_kept() {
    for call in [Call::Setxattr, Call::Setattr] {
        for (nth, bitmap_durable) in (1..4).flat_map(|nth| [(nth, false), (nth, true)]) {
            let (upper, below, union) = with_file(Hooked::over(Memory::new()), 5 * BLOCK);
            write_at(&*union, "f", 0, b"moved");
            if bitmap_durable {
                fsync(&*union, "f");
            }
            fail_at(&upper, call, nth);
            let changes = SetAttributes { size: Some(6000), ..SetAttributes::default() };
            let truncated = union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None);
            upper.unhook();
            let size = stat(&*union, "f").size;
            assert_eq!(get(&*union, "f").unwrap().len() as u64, size, "{call:?} {nth}");
            let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
            union.write(ROOT, handle, 3 * BLOCK as u64 + 5, b"later").unwrap();
            union.fsync(ROOT, handle, Durability::All).unwrap();
            union.release(handle);
            let content = get(&*union, "f").unwrap();
            assert_eq!(&content[3 * BLOCK + 5..3 * BLOCK + 10], b"later");
            close(union);
            let again = get(&*open_over(upper, &[below]).unwrap(), "f").unwrap();
            assert!(again == content, "{call:?} {nth}, bitmap durable: {bitmap_durable}: {truncated:?}");
        }
    }
}

/// What a write reports is what it did, wherever the room ends.
#[test]
fn a_short_write_has_written_what_it_says() {
    let lengths = [2 * BLOCK, 2 * BLOCK + 100];
    let offsets = [0, 50, BLOCK, 2 * BLOCK + 50, 2 * BLOCK + 200, 3 * BLOCK + 7];
    for (room, length) in (0..60).flat_map(|room| lengths.map(|length| (500 * room, length))) {
        for (offset, append) in offsets.iter().flat_map(|&offset| [(offset, false), (offset, true)]) {
            for count in [80, 3000, 5 * BLOCK + 30] {
                let what = format!("room {room}, length {length}, offset {offset}, append {append}, count {count}");
                let (upper, _below, union) = with_file(Hooked::over(Memory::new()), length);
                let mut expected = vec![1; length];
                let flags = OpenFlags::READ_WRITE | if append { OpenFlags::APPEND } else { OpenFlags::empty() };
                let handle = open(&*union, "f", flags).unwrap();
                upper.limit(room);
                let data: Vec<u8> = (0..count).map(|at| (at / 16 % 200) as u8 + 2).collect();
                if let Ok(written) = union.write(ROOT, handle, offset as u64, &data) {
                    let at = if append { length } else { offset };
                    assert_eq!(written.offset, at as u64, "{what}");
                    expected.resize(expected.len().max(at + written.count), 0);
                    expected[at..at + written.count].copy_from_slice(&data[..written.count]);
                }
                upper.limit(u64::MAX);
                union.release(handle);
                let shown = get(&*union, "f").unwrap();
                assert_eq!(shown.len(), expected.len(), "{what}");
                assert!(shown == expected, "{what}");
            }
        }
    }
}

#[test]
fn a_file_that_cannot_be_read_does_not_keep_the_union_from_opening() {
    let (upper, below, union) = with_file(Hooked::over(Memory::new()), 3 * BLOCK);
    write_at(&*union, "f", 5, b"new");
    fsync(&*union, "f");
    let content = get(&*union, "f").unwrap();
    close(union);
    put(&*upper, ".poolfs/open", b"");
    upper.hook(|call| if call == Call::Getxattr { fail(Errno::EIO) } else { Ok(()) });
    let union = open_over(upper.clone(), &[below]).expect("sweeping can wait");
    upper.unhook();
    assert_eq!(get(&*union, "f").unwrap(), content);
}

#[test]
fn truncating_leaves_no_file_open() {
    let memory = Memory::new();
    let (_, below, union) = with_file(Hooked::over(memory.clone()), 3 * BLOCK);
    let before = (memory.outstanding().1, below.outstanding().1);
    let changes = SetAttributes { size: Some(100), ..SetAttributes::default() };
    union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap();
    assert_eq!((memory.outstanding().1, below.outstanding().1), before);
}

#[test]
fn a_copy_up_that_fails_at_the_end_leaves_nothing() {
    let (upper, _below, union) = with_file(Hooked::over(Memory::new()), 3 * BLOCK);
    for call in [Call::Rename, Call::Setattr, Call::Setxattr] {
        fail_at(&upper, call, 1);
        let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
        union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap_err();
        upper.unhook();
        nothing_left(&*upper, &format!("{call:?}"));
    }
}

#[test]
fn a_removed_directory_that_is_open_takes_changes() {
    let below = Memory::new();
    mkdir(&*below, "d");
    let upper = Memory::new();
    let union = open_over(upper.clone(), &[below]).unwrap();
    let directory = node(&*union, "d").unwrap();
    let handle = union.opendir(ROOT, directory).unwrap();
    union.rmdir(ROOT, NodeId::ROOT, name("d")).unwrap();
    let changes = SetAttributes { permissions: Some(0o711), ..SetAttributes::default() };
    assert_eq!(union.setattr(ROOT, directory, &changes, None).unwrap().permissions, 0o711);
    union.setxattr(ROOT, directory, b"user.x", b"y", XattrFlags::empty()).unwrap();
    assert!(list(&*union, directory).is_empty());
    union.release(handle);
    nothing_left(&*upper, "after the removal");
}

#[test]
fn a_directory_too_deep_to_be_renamed_stays_where_it_is() {
    let below = Memory::new();
    let mut path = String::new();
    for _ in 0..1100 {
        path.push('d');
        mkdir(&*below, &path);
        path.push('/');
    }
    put(&*below, &format!("{path}f"), b"deep");
    let upper = Memory::new();
    let union = open_over(upper.clone(), std::slice::from_ref(&below)).unwrap();
    let (parent, last) = split(&*union, path.trim_end_matches('/'));
    let renamed = union.rename(ROOT, parent, last, parent, name("e"), RenameFlags::empty());
    assert_eq!(renamed.unwrap_err(), Errno::EXDEV);
    // One that is less deep moves, and is found again.
    let (parent, last) = split(&*union, &path[..1999]);
    union.rename(ROOT, parent, last, parent, name("e"), RenameFlags::empty()).unwrap();
    close(union);
    let moved = format!("{}e{}f", &path[..1998], &path[1999..]);
    assert_eq!(get(&*open_over(upper, &[below]).unwrap(), &moved).unwrap(), b"deep");
}

/// As a union does with another below it.
struct WithoutMarks {
    below: Arc<dyn Libservice>,
    refused: &'static [u8],
    with: Errno,
    takes_whiteouts: bool,
}

impl Filter for WithoutMarks {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn setxattr(&self, caller: &Caller, node: NodeId, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        if name.starts_with(self.refused) {
            fail(self.with)
        } else {
            self.below.setxattr(caller, node, name, value, flags)
        }
    }

    fn unlink(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<()> {
        let found = self.below.lookup(caller, parent, name)?;
        self.below.forget(found.node, 1);
        let is_whiteout = found.attributes.file_type == FileType::CharDevice;
        if is_whiteout && self.takes_whiteouts { fail(Errno::ENOENT) } else { self.below.unlink(caller, parent, name) }
    }
}

#[test]
fn a_branch_that_keeps_no_marks_is_refused_and_says_which() {
    let cases: [(&[u8], bool, &str); 4] = [
        (b"trusted.overlay.", false, "the attribute trusted.overlay.opaque, as"),
        (b"trusted.poolfs.", false, "the attribute trusted.poolfs.origin, as"),
        (b"none", true, "whiteouts, as"),
        (b"none", false, ""),
    ];
    for (refused, takes_whiteouts, cause) in cases {
        let below = Memory::new();
        // Also the second time: the first leaves nothing that is taken for a branch.
        for _ in 0..2 {
            let with = Errno::EPERM;
            let upper = Arc::new(WithoutMarks { below: below.clone(), refused, with, takes_whiteouts });
            let opened = open_over(upper, &[lower()]);
            if cause.is_empty() {
                opened.expect("a branch like any other");
                continue;
            }
            let error = opened.map(drop).expect_err("refused");
            assert!(error.to_string().contains(cause), "{error}");
        }
    }
}

#[test]
fn a_full_branch_is_not_said_to_keep_no_marks() {
    let (below, with) = (Memory::new(), Errno::ENOSPC);
    let upper = Arc::new(WithoutMarks { below, refused: b"trusted.overlay.", with, takes_whiteouts: false });
    let error = open_over(upper, &[lower()]).map(drop).expect_err("full");
    assert!(error == Errno::ENOSPC && !error.to_string().contains("keep"), "{error}");
}
