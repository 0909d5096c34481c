//! Tests of content before names: after a crash, a replaced file has the old content or the new, and nothing that was accepted is
//! missing.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::types::{Errno, NodeId, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Libservice, Memory, Recorder, Result, fail};
use poolfs_union::Union;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Many blocks, the last one not whole.
const BYTES: usize = 9 * 4096 + 1024;
const SEEDS: u64 = 8;

fn filled(with: u8) -> Vec<u8> {
    vec![with; BYTES]
}

fn lower() -> Arc<Memory> {
    let lower = Memory::new();
    for (path, with) in [("conf", 1), ("other", 2), ("log", 3)] {
        put(&*lower, path, &filled(with));
    }
    lower
}

/// Opens a union over a disk, with what is between the two.
type Open = fn(Arc<dyn Libservice>, &[Arc<Memory>]) -> Result<Arc<Union>>;

/// Over a cache that writes nothing by itself in the length of a test.
fn open_cached(disk: Arc<dyn Libservice>, lowers: &[Arc<Memory>]) -> Result<Arc<Union>> {
    let config = CacheConfig { expire: Duration::from_secs(3600), ..CacheConfig::with_limit(4 << 20) };
    open_over(Cache::new(&CachePool::new(config).expect("a pool"), disk), lowers)
}

/// Over such a cache above the layer that stores sketches compactly, as it is opened after a crash.
fn open_compact(disk: Arc<dyn Libservice>, lowers: &[Arc<Memory>]) -> Result<Arc<Union>> {
    let config = BcowConfig { layout: Some(Layout::Space), flush_interval: Duration::ZERO, ..BcowConfig::new(disk) };
    let bcow = Bcow::new(config);
    bcow.repair_all().expect("nothing is damaged");
    open_cached(bcow, lowers)
}

fn rename(union: &dyn Libservice, from: &str, to: &str, flags: RenameFlags) -> Result<()> {
    union.rename(ROOT, NodeId::ROOT, name(from), NodeId::ROOT, name(to), flags)
}

/// What is done, with the contents that `conf` may then have after a crash, before and after.
struct Case {
    what: &'static str,
    /// what is on disk before
    prepare: fn(&dyn Libservice),
    /// what is only accepted
    write: fn(&dyn Libservice),
    replace: fn(&dyn Libservice),
    old: fn() -> Vec<u8>,
    new: fn() -> Vec<u8>,
}

fn patched() -> Vec<u8> {
    let mut content = filled(2);
    content[5000..5100].fill(9);
    content
}

fn over(union: &dyn Libservice) {
    rename(union, "tmp", "conf", RenameFlags::empty()).unwrap();
}

fn other_over(union: &dyn Libservice) {
    rename(union, "other", "conf", RenameFlags::empty()).unwrap();
}

const CASES: [Case; 7] = [
    Case {
        what: "a new file over one of the lower branch",
        prepare: |_| {},
        write: |union| put(union, "tmp", &filled(9)),
        replace: over,
        old: || filled(1),
        new: || filled(9),
    },
    Case {
        what: "a new file over one of the upper branch",
        prepare: |union| {
            put(union, "was", &filled(7));
            rename(union, "was", "conf", RenameFlags::empty()).unwrap();
        },
        write: |union| put(union, "tmp", &filled(9)),
        replace: over,
        old: || filled(7),
        new: || filled(9),
    },
    Case {
        what: "a new file that was given its size first",
        prepare: |_| {},
        write: |union| {
            let made = union.create(ROOT, NodeId::ROOT, name("tmp"), 0o644, OpenFlags::READ_WRITE).unwrap();
            let size = SetAttributes { size: Some(BYTES as u64), ..SetAttributes::default() };
            union.setattr(ROOT, made.0.node, &size, Some(made.1)).unwrap();
            union.write(ROOT, made.1, 0, &filled(9)).unwrap();
            union.release(made.1);
        },
        replace: over,
        old: || filled(1),
        new: || filled(9),
    },
    Case {
        what: "an exchange",
        prepare: |_| {},
        write: |union| put(union, "tmp", &filled(9)),
        replace: |union| rename(union, "tmp", "conf", RenameFlags::EXCHANGE).unwrap(),
        old: || filled(1),
        new: || filled(9),
    },
    Case {
        what: "a sketch whose bits are behind",
        prepare: |union| {
            let handle = open(union, "other", OpenFlags::READ_WRITE).unwrap();
            union.write(ROOT, handle, 5 * 4096, &[2; 4096]).unwrap();
            union.release(handle);
        },
        write: |union| write_at(union, "other", 5000, &[9; 100]),
        replace: other_over,
        old: || filled(1),
        new: patched,
    },
    Case {
        what: "a file that was written for the first time",
        prepare: |_| {},
        write: |union| write_at(union, "other", 5000, &[9; 100]),
        replace: other_over,
        old: || filled(1),
        new: patched,
    },
    Case {
        what: "a lower file, unchanged",
        prepare: |_| {},
        write: |_| {},
        replace: other_over,
        old: || filled(1),
        new: || filled(2),
    },
];

fn replaces(way: &str, open: Open) {
    for case in &CASES {
        let (disk, lowers) = (Recorder::new(), [lower()]);
        let union = open(disk.clone(), &lowers).unwrap();
        (case.prepare)(&*union);
        union.sync().unwrap();
        (case.write)(&*union);
        let begun = disk.len();
        (case.replace)(&*union);
        let done = disk.len();
        for (count, seed) in (begun..=done).flat_map(|count| (0..SEEDS).map(move |seed| (count, seed))) {
            let crashed = open(disk.crashed(count, seed), &lowers).unwrap();
            let shown = get(&*crashed, "conf").unwrap();
            let is_new = shown == (case.new)();
            let what = format!("{way}, {}: {count} of {begun}..={done}, seed {seed}", case.what);
            assert!(
                is_new || count < done && shown == (case.old)(),
                "{what}: {} bytes, {:?}",
                shown.len(),
                shown.first()
            );
            close(crashed);
        }
        close(union);
    }
}

#[test]
fn a_crash_leaves_the_old_file_or_the_new() {
    replaces("at once", open_over);
}

#[test]
fn a_crash_leaves_the_old_file_or_the_new_below_a_cache() {
    replaces("cached", open_cached);
}

#[test]
fn a_crash_leaves_the_old_file_or_the_new_where_files_are_compact() {
    replaces("compact", open_compact);
}

/// After a close the new content is there, whatever was there before; only the truncation itself may show, as on a disk.
#[test]
fn a_file_that_was_emptied_and_written_again_is_whole_when_it_was_closed() {
    for open_union in [open_cached as Open, open_compact] {
        for path in ["conf", "upper"] {
            let (disk, lowers) = (Recorder::new(), [lower()]);
            let union = open_union(disk.clone(), &lowers).unwrap();
            put(&*union, "upper", &filled(7));
            union.sync().unwrap();
            let handle = open(&*union, path, OpenFlags::WRITE_ONLY | OpenFlags::TRUNCATE).unwrap();
            union.write(ROOT, handle, 0, &filled(9)).unwrap();
            union.flush(ROOT, handle).unwrap();
            union.release(handle);
            for seed in 0..SEEDS {
                let crashed = open_union(disk.crashed(disk.len(), seed), &lowers).unwrap();
                assert!(get(&*crashed, path).unwrap() == filled(9), "{path}, seed {seed}");
                close(crashed);
            }
            close(union);
        }
    }
}

/// The lower file ends within a block. What was appended there and has reached the disk shows, whether the bit came after it or not.
#[test]
fn what_was_appended_and_is_on_disk_is_no_hole() {
    let (disk, lowers) = (Recorder::new(), [lower()]);
    let union = open_over(disk.clone(), &lowers).unwrap();
    let appended = vec![9; 2 * 4096];
    write_at(&*union, "log", BYTES as u64, &appended);
    let whole = [filled(3), appended].concat();
    let mut arrived = 0;
    for seed in (0..400).map(|seed| seed * 7919) {
        let crashed = disk.crashed(disk.len(), seed);
        let stored = get(&*crashed, "log").unwrap();
        let is_there = stored.len() == whole.len() && stored[BYTES..] == whole[BYTES..];
        if !is_there {
            continue;
        }
        for _ in 0..2 {
            let union = open_over(crashed.clone(), &lowers).unwrap();
            let shown = get(&*union, "log").unwrap();
            assert!(shown == whole, "seed {seed}: {:?}", shown.iter().position(|&byte| byte == 0));
            close(union);
        }
        arrived += 1;
    }
    assert!(arrived > 0, "there was nothing to see");
    close(union);
}

/// The lower file ends within a block, and the file does not. When all that is written over that block has reached the disk, it shows, whether the
/// bit came after it or not; of what has not, it shows what was there before, and nothing else.
#[test]
fn what_was_written_over_the_end_of_the_lower_file_and_is_on_disk_shows_whole() {
    const START: usize = BYTES - BYTES % 4096;
    const NEW: [u8; 4096] = [9; 4096];
    let (disk, lowers) = (Recorder::new(), [lower()]);
    let union = open_over(disk.clone(), &lowers).unwrap();
    let old = [filled(3), vec![0; START + 2 * 4096 - BYTES]].concat();
    resize(&*union, "log", old.len() as u64);
    fsync(&*union, "log");
    write_at(&*union, "log", START as u64, &[9; 2 * 4096]);
    let (mut kept, mut arrived) = (0, 0);
    for seed in (0..400).map(|seed| seed * 7919) {
        let crashed = disk.crashed(disk.len(), seed);
        let stored = get(&*crashed, "log").unwrap();
        let union = open_over(crashed, &lowers).unwrap();
        let shown = get(&*union, "log").unwrap();
        let block = START..START + 4096;
        let mut pairs = shown[block.clone()].iter().zip(&old[block.clone()]);
        assert!(pairs.all(|(shown, old)| shown == old || *shown == 9), "seed {seed}");
        if stored[block.clone()] == NEW {
            assert_eq!(shown[block], NEW, "seed {seed}");
            arrived += 1;
        } else if shown[block.clone()] == old[block] {
            kept += 1;
        }
        close(union);
    }
    assert!(kept > 0 && arrived > 0, "{kept} {arrived}");
    close(union);
}

fn hooked() -> (Arc<Hooked>, Arc<Union>) {
    let upper = Hooked::over(Memory::new());
    let union = open_over(upper.clone(), &[lower()]).unwrap();
    (upper, union)
}

/// The calls that change names or write content, in their order.
fn asked(upper: &Hooked, work: impl FnOnce()) -> Vec<Call> {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let noted = calls.clone();
    upper.hook(move |call| {
        if matches!(call, Call::Rename | Call::WriteContent) {
            noted.lock().unwrap().push(call);
        }
        Ok(())
    });
    work();
    upper.unhook();
    std::mem::take(&mut *calls.lock().unwrap())
}

#[test]
fn content_is_written_where_a_file_is_replaced_and_nowhere_else() {
    let (upper, union) = hooked();
    put(&*union, "tmp", &filled(9));
    let renames = |from, to, flags| asked(&upper, || rename(&*union, from, to, flags).unwrap());
    let none = RenameFlags::empty();
    assert_eq!(renames("tmp", "new", none), [Call::Rename], "nothing is replaced");
    assert_eq!(renames("new", "conf", none), [Call::WriteContent, Call::Rename], "only the lower branch has it");
    put(&*union, "tmp", &filled(8));
    assert_eq!(renames("tmp", "conf", none), [Call::WriteContent, Call::Rename], "the upper branch has it");
    put(&*union, "tmp", &filled(7));
    let exchanged = renames("tmp", "conf", RenameFlags::EXCHANGE);
    assert_eq!(exchanged, [Call::WriteContent, Call::WriteContent, Call::Rename], "both take a place");
    let moved = renames("log", "conf", none);
    assert!(!moved.contains(&Call::WriteContent), "a lower file is on disk: {moved:?}");
}

#[test]
fn a_rename_whose_content_cannot_be_written_fails_and_changes_nothing() {
    let (upper, union) = hooked();
    put(&*union, "tmp", &filled(9));
    for flags in [RenameFlags::empty(), RenameFlags::EXCHANGE] {
        upper.hook(|call| if call == Call::WriteContent { fail(Errno::ENOSPC) } else { Ok(()) });
        assert_eq!(rename(&*union, "tmp", "conf", flags).unwrap_err().errno(), Errno::ENOSPC);
        upper.unhook();
        assert!(get(&*union, "conf").unwrap() == filled(1) && get(&*union, "tmp").unwrap() == filled(9));
    }
    rename(&*union, "tmp", "conf", RenameFlags::empty()).unwrap();
    assert!(get(&*union, "conf").unwrap() == filled(9) && get(&*union, "tmp").is_err());
}

/// While content is written no lock is held, and the names may become others.
#[test]
fn a_file_that_has_come_to_the_name_meanwhile_is_written_too() {
    let (upper, union) = hooked();
    put(&*union, "tmp", &filled(9));
    put(&*union, "later", &filled(8));
    let calls = Arc::new(Mutex::new(Vec::new()));
    let (noted, other, is_first) = (calls.clone(), Arc::downgrade(&union), AtomicBool::new(true));
    upper.hook(move |call| {
        if matches!(call, Call::Rename | Call::WriteContent) {
            noted.lock().unwrap().push(call);
        }
        if call == Call::WriteContent && is_first.swap(false, Ordering::SeqCst) {
            let union = other.upgrade().expect("it is renaming");
            rename(&*union, "tmp", "first", RenameFlags::empty())?;
            rename(&*union, "later", "tmp", RenameFlags::empty())?;
        }
        Ok(())
    });
    rename(&*union, "tmp", "conf", RenameFlags::empty()).unwrap();
    upper.unhook();
    let expected = [Call::WriteContent, Call::Rename, Call::Rename, Call::WriteContent, Call::Rename];
    assert_eq!(*calls.lock().unwrap(), expected);
    assert!(get(&*union, "conf").unwrap() == filled(8) && get(&*union, "first").unwrap() == filled(9));
}
