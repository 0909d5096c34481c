//! Conformance cases: concurrent callers.

use super::Case;
use super::support::*;
use crate::types::{Errno, OpenFlags, RenameFlags};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

pub(super) const CASES: &[Case] = &[
    Case::new("concurrency/appends", appends_do_not_overwrite_each_other),
    Case::new("concurrency/ranges", writers_of_neighbouring_ranges),
    Case::new("concurrency/creation", one_of_many_creators_wins),
    Case::new("concurrency/renames", a_name_under_renames_never_vanishes),
    Case::new("concurrency/names", threads_in_one_directory),
    Case::new("concurrency/lifetimes", lookups_while_names_go),
];

const THREADS: usize = 4;

/// Tells the threads that run until told, also when the case fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn appends_do_not_overwrite_each_other(layer: Layer<'_>) {
    const RECORDS: usize = 200;
    let node = file(layer, ROOT, "log", b"");
    thread::scope(|scope| {
        for writer in 0..THREADS {
            scope.spawn(move || {
                let handle = open(layer, node, OpenFlags::WRITE_ONLY | OpenFlags::APPEND);
                for _ in 0..RECORDS {
                    write(layer, handle, 0, &[writer as u8 + 1; 37]);
                }
                layer.release(handle);
            });
        }
    });
    let data = content(layer, node);
    assert_eq!(data.len(), THREADS * RECORDS * 37);
    let mut counts = [0; THREADS + 1];
    for record in data.chunks(37) {
        assert!(record.iter().all(|&byte| byte == record[0]), "two records are mixed");
        counts[record[0] as usize] += 1;
    }
    assert_eq!(counts[1..], [RECORDS; THREADS]);
}

fn writers_of_neighbouring_ranges(layer: Layer<'_>) {
    const PIECE: usize = 1500;
    let node = file(layer, ROOT, "file", b"");
    thread::scope(|scope| {
        for writer in 0..THREADS {
            scope.spawn(move || {
                let handle = open(layer, node, READ_WRITE);
                for at in 0..100 {
                    let offset = (at * THREADS + writer) * PIECE;
                    let data = vec![(writer * 50 + at % 50) as u8; PIECE];
                    write(layer, handle, offset as u64, &data);
                    same_bytes(&read(layer, handle, offset as u64, PIECE), &data);
                    if at % 40 == 0 {
                        ok(layer.fsync(&ME, handle, crate::Durability::Data));
                    }
                }
                layer.release(handle);
            });
        }
    });
    let data = content(layer, node);
    assert_eq!(data.len(), 100 * THREADS * PIECE);
    for (at, piece) in data.chunks(PIECE).enumerate() {
        let expected = (at % THREADS * 50 + at / THREADS % 50) as u8;
        assert!(piece.iter().all(|&byte| byte == expected), "piece {at} is damaged");
    }
}

fn one_of_many_creators_wins(layer: Layer<'_>) {
    for round in 0..20 {
        let text = format!("file {round}");
        let won = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| match layer.create(&ME, ROOT, name(&text), 0o644, READ_WRITE) {
                    Ok((_, handle)) => {
                        layer.release(handle);
                        won.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) => assert_eq!(error.errno(), Errno::EEXIST),
                });
            }
        });
        assert_eq!(won.into_inner(), 1, "creators of {text}");
    }
}

fn a_name_under_renames_never_vanishes(layer: Layer<'_>) {
    file(layer, ROOT, "stable", b"0");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let mut seen = 0;
            while !done.load(Ordering::SeqCst) || seen == 0 {
                let entry = lookup(layer, ROOT, "stable");
                assert_eq!(entry.attributes.size, 1);
                layer.forget(entry.node, 1);
                seen += 1;
            }
            seen
        });
        let _stop = Stop(&done);
        for at in 0..200 {
            let node = file(layer, ROOT, "temporary", &[at as u8]);
            ok(rename(layer, (ROOT, "temporary"), (ROOT, "stable"), RenameFlags::empty()));
            layer.forget(node, 1);
            if seen.is_finished() {
                break;
            }
        }
    });
    assert_eq!(names(layer, ROOT), ["stable"]);
}

fn threads_in_one_directory(layer: Layer<'_>) {
    thread::scope(|scope| {
        for owner in 0..THREADS {
            scope.spawn(move || {
                for at in 0..60 {
                    let text = format!("{owner}-{at}");
                    let node = file(layer, ROOT, &text, text.as_bytes());
                    if at % 3 == 0 {
                        ok(layer.unlink(&ME, ROOT, name(&text)));
                    } else if at % 3 == 1 {
                        let new = format!("{owner}-{at}-moved");
                        ok(rename(layer, (ROOT, &text), (ROOT, &new), RenameFlags::empty()));
                    }
                    layer.forget(node, 1);
                    drop(names(layer, ROOT));
                }
            });
        }
    });
    let found = names(layer, ROOT);
    assert_eq!(found.len(), THREADS * 40);
    for text in found {
        let expected = text.trim_end_matches("-moved");
        same_bytes(&content(layer, lookup(layer, ROOT, &text).node), expected.as_bytes());
    }
}

fn lookups_while_names_go(layer: Layer<'_>) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..THREADS - 1 {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    // What was looked up stays usable whatever happens to its name.
                    let Ok(entry) = layer.lookup(&ME, ROOT, name("file")) else { continue };
                    let handle = open(layer, entry.node, OpenFlags::READ_ONLY);
                    let bytes = read_to_slice(layer, handle, 0, 10);
                    assert!(matches!(bytes.len(), 0 | 5), "{bytes:?}");
                    layer.release(handle);
                    layer.forget(entry.node, 1);
                }
            });
        }
        let _stop = Stop(&done);
        for _ in 0..150 {
            let node = file(layer, ROOT, "file", b"bytes");
            ok(layer.unlink(&ME, ROOT, name("file")));
            layer.forget(node, 1);
        }
    });
}
