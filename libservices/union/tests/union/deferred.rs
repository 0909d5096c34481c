//! Tests of deferred copy-ups: a first write is answered before there is an upper file, and nobody sees a difference.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::{Attributes, Errno, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes};
use poolfs_libservice::{Durability, Layered, Libservice, Memory, Result, fail};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;

/// A union over one lower branch with `d/f` and `g`, of three blocks and a half each, and an upper branch that can refuse.
struct Scene {
    upper: Arc<Hooked>,
    lower: Arc<Memory>,
    content: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        let lower = Memory::new();
        let content: Vec<u8> = (0..3 * BLOCK + 2048).map(|at| (at / 512) as u8 + 1).collect();
        mkdir(&*lower, "d");
        put(&*lower, "d/f", &content);
        put(&*lower, "g", &content);
        Scene { upper: Hooked::over(Memory::new()), lower, content }
    }

    fn open_with(&self, deferred_copy_ups_max: usize) -> Arc<Union> {
        let lowers = vec![Lower { layer_id: "layer-0".into(), layer: self.lower.clone(), is_union: false }];
        let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(self.upper.clone(), lowers) };
        Union::open(UnionConfig { deferred_copy_ups_max, journal_bytes: 1 << 20, ..config }).expect("the union opens")
    }

    fn open(&self) -> Arc<Union> {
        self.upper.unhook();
        self.open_with(8)
    }

    /// From now on the upper branch takes nothing but bytes of files that are there, which the journal is.
    fn refuse(&self) {
        self.upper.hook(|call| if call.changes() && call != Call::Write { fail(Errno::ENOSPC) } else { Ok(()) });
    }

    /// From now on nothing changes.
    fn die(&self) {
        self.upper.hook(|call| if call.changes() { fail(Errno::EIO) } else { Ok(()) });
    }

    /// Writes into the first of two paths whose copy-up comes later, and cannot come before `unhook`.
    fn write(&mut self, union: &Union, path: &str) {
        // So that there is a journal.
        write_at(union, "g", 0, b"g");
        union.sync().unwrap();
        self.refuse();
        write_at(union, path, 5000, b"first");
        self.content[5000..5005].copy_from_slice(b"first");
    }
}

fn waiting(union: &Union) -> u64 {
    union.statistics().copy_ups_deferred
}

#[test]
fn a_first_write_needs_no_upper_file_and_is_seen_at_once() {
    let mut scene = Scene::new();
    let union = scene.open();
    let reader = open(&*union, "d/f", OpenFlags::READ_ONLY).unwrap();
    let before = stat(&*union, "d/f");
    scene.write(&union, "d/f");
    assert_eq!((waiting(&union), ls(&*scene.upper, "")), (1, vec![".poolfs".into(), "g".into()]));
    assert!(get(&*union, "d/f").unwrap() == scene.content);
    let mut part = [0; 9];
    assert_eq!(union.read(ROOT, reader, 4998, &mut part).unwrap(), 9);
    assert_eq!(part, scene.content[4998..5007], "by a handle that was open before");
    let written = stat(&*union, "d/f");
    assert!(written.modified > before.modified && written.changed > before.changed);
    assert_eq!(Attributes { modified: before.modified, changed: before.changed, ..written }, before);
    // It cannot be made now, and whoever needs it is told.
    let handle = open(&*union, "d/f", OpenFlags::READ_WRITE).unwrap();
    assert!(union.fsync(ROOT, handle, Durability::All).is_err_and(|error| error == Errno::ENOSPC));
    assert!(union.write(ROOT, handle, 9000, b"second").is_err_and(|error| error == Errno::ENOSPC));
    assert!(union.sync().is_err_and(|error| error == Errno::ENOSPC));
    assert!(get(&*union, "d/f").unwrap() == scene.content, "what was accepted stays");
    scene.upper.unhook();
    union.fsync(ROOT, handle, Durability::All).unwrap();
    assert_eq!(waiting(&union), 0);
    assert!(get(&*union, "d/f").unwrap() == scene.content);
    let copied = stat(&*union, "d/f");
    assert_eq!((copied.modified, copied.changed, copied.inode), (written.modified, written.changed, written.inode));
    union.release(handle);
    union.release(reader);
    close(union);
    assert!(get(&*scene.open(), "d/f").unwrap() == scene.content);
}

#[test]
fn the_thread_of_the_union_copies_up_what_nobody_needs() {
    let mut scene = Scene::new();
    let union = scene.open();
    scene.write(&union, "d/f");
    scene.upper.unhook();
    let begun = Instant::now();
    while waiting(&union) > 0 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(ls(&*scene.upper, "d"), ["f"]);
    assert_eq!((union.statistics().sketches, union.statistics().nodes), (2, 4), "nobody forgot a node");
    close(union);
}

#[test]
fn so_many_wait_and_no_more_and_none_for_want_of_room() {
    let scene = Scene::new();
    for number in 0..3 {
        put(&*scene.lower, &format!("n{number}"), &scene.content);
    }
    let union = scene.open_with(2);
    write_at(&*union, "g", 0, b"g");
    union.sync().unwrap();
    scene.refuse();
    let write = |path: &str, data: &[u8]| -> Result<()> {
        let handle = open(&*union, path, OpenFlags::READ_WRITE)?;
        let written = union.write(ROOT, handle, 4000, data);
        union.release(handle);
        written.map(drop)
    };
    let refused = |result: Result<()>| result.is_err_and(|error| error == Errno::ENOSPC);
    assert!(refused(write("d/f", &[1; 97])), "what reaches into another block");
    write("n0", &[1; 96]).unwrap();
    write("n1", b"x").unwrap();
    assert!(refused(write("n2", b"x")), "there is no room for a third");
    scene.upper.unhook();
    union.sync().unwrap();
    assert_eq!(waiting(&union), 0);
    scene.refuse();
    for flags in [OpenFlags::APPEND, OpenFlags::DATA_SYNC, OpenFlags::FILE_SYNC] {
        let handle = open(&*union, "n2", OpenFlags::READ_WRITE | flags).unwrap();
        assert!(union.write(ROOT, handle, 0, b"x").is_err(), "{flags:?}");
        union.release(handle);
    }
    scene.upper.unhook();
    close(union);
}

#[test]
fn whoever_needs_the_file_makes_it() {
    type Need = fn(&Union, &mut Vec<u8>);
    let needs: [(&str, Need); 9] = [
        ("a second write", |union, content| {
            write_at(union, "d/f", 5003, b"second");
            content[5003..5009].copy_from_slice(b"second");
        }),
        ("a write into another block", |union, content| {
            write_at(union, "d/f", 100, &[9; BLOCK]);
            content[100..100 + BLOCK].fill(9);
        }),
        ("a cut", |union, content| {
            let changes = SetAttributes { size: Some(5002), ..SetAttributes::default() };
            union.setattr(ROOT, node(union, "d/f").unwrap(), &changes, None).unwrap();
            content.truncate(5002);
        }),
        ("an emptying open", |union, content| {
            let handle = open(union, "d/f", OpenFlags::READ_WRITE | OpenFlags::TRUNCATE).unwrap();
            union.release(handle);
            content.clear();
        }),
        ("a mode", |union, _| {
            let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
            union.setattr(ROOT, node(union, "d/f").unwrap(), &changes, None).unwrap();
            assert_eq!(stat(union, "d/f").permissions, 0o600);
        }),
        ("a link", |union, _| {
            let parent = node(union, "d").unwrap();
            union.link(ROOT, node(union, "d/f").unwrap(), parent, name("h")).unwrap();
        }),
        ("a walk over data and holes", |union, _| {
            let handle = open(union, "d/f", OpenFlags::READ_ONLY).unwrap();
            assert_eq!(union.seek(ROOT, handle, 0, SeekTo::Data).unwrap(), 0);
            union.release(handle);
        }),
        ("a list of what differs", |union, _| {
            let mut paths = Vec::new();
            union
                .differences(&mut |path, _| {
                    paths.push(String::from_utf8_lossy(path).into_owned());
                    Ok(std::ops::ControlFlow::Continue(()))
                })
                .unwrap();
            assert!(paths.contains(&"d/f".to_owned()), "{paths:?}");
            let parts = union.changed_parts(node(union, "d/f").unwrap(), 0, 9).unwrap();
            assert!(parts.len() == 1 && parts[0] == (4096..8192), "{parts:?}");
        }),
        ("a write to disk", |union, _| fsync(union, "d/f")),
    ];
    for (what, need) in needs {
        let mut scene = Scene::new();
        let union = scene.open();
        scene.write(&union, "d/f");
        scene.upper.unhook();
        need(&union, &mut scene.content);
        assert_eq!(ls(&*scene.upper, "d").first().map(String::as_str), Some("f"), "{what}");
        assert!(get(&*union, "d/f").unwrap() == scene.content, "{what}");
        scene.die();
        close(union);
        assert!(get(&*scene.open(), "d/f").unwrap() == scene.content, "{what}, and a death");
    }
}

#[test]
fn names_may_change_while_it_waits() {
    type Change = fn(&Union) -> Option<&'static str>;
    fn moved(union: &Union, from: &str, to: &str, flags: RenameFlags) {
        let ((parent, from), (new_parent, to)) = (split(union, from), split(union, to));
        union.rename(ROOT, parent, from, new_parent, to, flags).unwrap();
    }
    let changes: [(&str, Change); 5] = [
        ("renamed", |union| {
            moved(union, "d/f", "d/h", RenameFlags::empty());
            Some("d/h")
        }),
        ("its directory renamed", |union| {
            moved(union, "d", "e", RenameFlags::empty());
            Some("e/f")
        }),
        ("exchanged", |union| {
            moved(union, "d/f", "g", RenameFlags::EXCHANGE);
            Some("g")
        }),
        ("replaced", |union| {
            moved(union, "g", "d/f", RenameFlags::empty());
            None
        }),
        ("removed", |union| {
            let (parent, last) = split(union, "d/f");
            union.unlink(ROOT, parent, last).unwrap();
            None
        }),
    ];
    for (what, change) in changes {
        let mut scene = Scene::new();
        let union = scene.open();
        let reader = open(&*union, "d/f", OpenFlags::READ_ONLY).unwrap();
        scene.write(&union, "d/f");
        scene.upper.unhook();
        let place = change(&union);
        let mut shown = vec![0; scene.content.len()];
        assert_eq!(union.read(ROOT, reader, 0, &mut shown).unwrap(), shown.len(), "{what}");
        assert!(shown == scene.content, "{what}: who has it open");
        union.release(reader);
        scene.die();
        close(union);
        let union = scene.open();
        match place {
            Some(place) => assert!(get(&*union, place).unwrap() == scene.content, "{what}"),
            None => {
                assert!(get(&*union, "d/f").is_ok_and(|found| found[5000..5005] != *b"first") == (what == "replaced"))
            }
        }
        close(union);
    }
}

#[test]
fn a_death_takes_nothing_that_was_accepted_and_brings_nothing_back() {
    let mut scene = Scene::new();
    let union = scene.open();
    scene.write(&union, "d/f");
    let written = stat(&*union, "d/f");
    scene.die();
    close(union);
    let union = scene.open();
    assert!(get(&*union, "d/f").unwrap() == scene.content, "it waited");
    let shown = stat(&*union, "d/f");
    assert_eq!((shown.modified, shown.inode), (written.modified, written.inode));
    // What came after it stays the last.
    write_at(&*union, "d/f", 5000, b"FIRST");
    let handle = open(&*union, "d/f", OpenFlags::READ_WRITE).unwrap();
    scene.die();
    union.release(handle);
    close(union);
    scene.content[5000..5005].copy_from_slice(b"FIRST");
    let union = scene.open();
    assert!(get(&*union, "d/f").unwrap() == scene.content);
    close(union);
    assert!(ls(&*scene.upper, ".poolfs").iter().all(|name| !name.starts_with("journal")), "an orderly end");
}

/// Writers of new files, somebody who renames their directories, somebody who has all brought to disk, and readers.
#[test]
fn whoever_comes_meanwhile_finds_each_write() {
    const FILES: usize = 120;
    const DIRECTORIES: usize = 4;
    for death in [false, true] {
        let scene = Scene::new();
        let path = |prefix: char, file: usize| format!("{prefix}{}/n{file}", file % DIRECTORIES);
        for directory in 0..DIRECTORIES {
            mkdir(&*scene.lower, &format!("a{directory}"));
        }
        for file in 0..FILES {
            put(&*scene.lower, &path('a', file), &scene.content);
        }
        let union = scene.open();
        let nodes: Vec<_> = (0..FILES).map(|file| node(&*union, &path('a', file)).unwrap()).collect();
        let ended = AtomicBool::new(false);
        let write = |file: usize| {
            let handle = union.open(ROOT, nodes[file], OpenFlags::READ_WRITE).unwrap();
            assert_eq!(union.write(ROOT, handle, 6000, &[file as u8; 5]).unwrap().count, 5);
            let mut shown = [0; 7];
            assert_eq!(union.read(ROOT, handle, 5999, &mut shown).unwrap(), 7);
            assert_eq!(shown[1..6], [file as u8; 5], "file {file}");
            union.release(handle);
        };
        std::thread::scope(|scope| {
            let writers: Vec<_> =
                (0..2).map(|half| scope.spawn(move || (half..FILES).step_by(2).for_each(write))).collect();
            let _renamer = scope.spawn(|| {
                let mut names = ['a', 'b'];
                while !ended.load(Ordering::Relaxed) || names[0] == 'b' {
                    for directory in 0..DIRECTORIES {
                        let [from, to] = names.map(|prefix| format!("{prefix}{directory}"));
                        let (root, none) = (NodeId::ROOT, RenameFlags::empty());
                        union.rename(ROOT, root, name(&from), root, name(&to), none).unwrap();
                    }
                    names.reverse();
                }
            });
            let _syncer = scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    union.sync().unwrap();
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            ended.store(true, Ordering::Relaxed);
        });
        let check = |union: &Union| {
            for file in 0..FILES {
                let found = get(union, &path('a', file)).unwrap();
                assert!(found[6000..6005] == [file as u8; 5] && found.len() == scene.content.len(), "file {file}");
            }
        };
        check(&union);
        if death {
            scene.die();
        }
        close(union);
        let union = scene.open();
        check(&union);
        close(union);
    }
}

#[test]
fn a_first_write_while_the_file_is_copied_up_waits_for_it() {
    let mut scene = Scene::new();
    let union = scene.open();
    let (begun, seen) = channel();
    let begun = Mutex::new(begun);
    scene.upper.hook(move |call| {
        if call == Call::Rename && begun.lock().unwrap().send(()).is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    });
    let file = node(&*union, "d/f").unwrap();
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
            union.setattr(ROOT, file, &changes, None).unwrap();
        });
        seen.recv().unwrap();
        // By its node: a path would be looked up when it is over.
        let handle = union.open(ROOT, file, OpenFlags::READ_WRITE).unwrap();
        assert_eq!(union.write(ROOT, handle, 5000, b"first").unwrap().count, 5);
        union.release(handle);
        copier.join().unwrap();
    });
    scene.content[5000..5005].copy_from_slice(b"first");
    assert!(get(&*union, "d/f").unwrap() == scene.content);
    close(union);
}

#[test]
fn a_removed_file_that_cannot_be_copied_up_keeps_nothing_from_the_disk() {
    let mut scene = Scene::new();
    let union = scene.open();
    put(&*union, "d/other", b"makes the directory");
    scene.write(&union, "d/f");
    // Nothing of the upper file can be made, but names can.
    scene.upper.hook(|call| if call == Call::Setattr { fail(Errno::EIO) } else { Ok(()) });
    assert!(union.sync().is_err(), "as long as it has a name");
    let handle = open(&*union, "d/f", OpenFlags::READ_WRITE).expect("opened");
    let directory = node(&*union, "d").expect("there");
    union.unlink(ROOT, directory, name("f")).expect("removed");
    assert!(union.fsync(ROOT, handle, Durability::All).is_err(), "who has it open hears of it");
    union.sync().expect("it is nobody else's business");
    union.release(handle);
    union.sync().expect("there is nothing of it");
    assert_eq!(waiting(&union), 0);
    scene.upper.unhook();
    drop(union);
    let union = scene.open();
    assert!(get(&*union, "d/f").is_err(), "it is removed");
}
