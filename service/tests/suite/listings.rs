//! Coherence tests of the kernel's cached directory listings: it asks for none twice, and never shows an outdated one.

use crate::caches::{Library, mounts, requests};
use crate::harness::{Running, isolated};
use crate::queue::connect;
use poolfs_ipc::wire::Operation;
use poolfs_service_protocol::StackSpec;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Names of a directory that takes several answers of the kernel's usual size to list.
const MANY: usize = 3000;

/// An open directory, listed by as small steps as the kernel takes.
struct Listed(OwnedFd);

impl Listed {
    fn open(path: &Path) -> Self {
        Self(rustix::fs::open(path, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).expect("open"))
    }

    /// Some names from here, and where each of them leads.
    fn some(&self) -> Vec<(String, u64)> {
        let mut room = Vec::with_capacity(1024);
        let mut raw = RawDir::new(&self.0, room.spare_capacity_mut());
        let mut found = Vec::new();
        while let Some(entry) = raw.next() {
            let entry = entry.expect("readable");
            found.push((entry.file_name().to_str().expect("UTF-8").to_owned(), entry.next_entry_cookie()));
            if raw.is_buffer_empty() {
                break;
            }
        }
        found
    }

    fn rest(&self) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let some = self.some();
            if some.is_empty() {
                return all;
            }
            all.extend(some.into_iter().map(|(name, _)| name).filter(|name| name != "." && name != ".."));
        }
    }

    fn seek(&self, to: u64) {
        rustix::fs::seek(&self.0, SeekFrom::Start(to)).expect("seek");
    }

    /// From the start.
    fn again(&self) -> BTreeSet<String> {
        self.seek(0);
        once(self.rest())
    }
}

fn once(names: Vec<String>) -> BTreeSet<String> {
    let count = names.len();
    let set: BTreeSet<_> = names.into_iter().collect();
    assert_eq!(set.len(), count, "a name came twice");
    set
}

fn listed(path: &Path) -> BTreeSet<String> {
    Listed::open(path).again()
}

fn names(all: &[&str]) -> BTreeSet<String> {
    all.iter().map(|&name| name.to_owned()).collect()
}

fn file_of(number: usize) -> String {
    format!("file-{number:05}")
}

#[test]
fn a_listing_is_asked_for_once() {
    isolated("listings::a_listing_is_asked_for_once", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let directory = at.join("dir");
            let look = || assert_eq!(listed(&directory), names(&["f", "other"]));
            look();
            let again = requests(&service, || (0..10).for_each(|_| look()));
            assert_eq!(again, [("opendir".to_owned(), 10)], "{name}");
            fs::write(directory.join("made"), b"").expect("made by the kernel");
            assert_eq!(listed(&directory), names(&["f", "made", "other"]), "{name}");
            fs::rename(directory.join("made"), at.join("moved")).expect("moved by the kernel");
            look();
            let again = requests(&service, look);
            assert_eq!(again, [("opendir".to_owned(), 1)], "{name}");
            assert!(listed(&at).contains("moved"), "{name}");
        }
    });
}

#[test]
fn nothing_is_kept_while_names_from_before_a_change_may_come() {
    isolated("listings::nothing_is_kept_while_names_from_before_a_change_may_come", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            let directory = at.join("dir");
            let is_asked_for =
                || requests(&service, || drop(listed(&directory))).iter().any(|(kind, _)| kind == "list");
            let begun = Listed::open(&directory);
            assert_eq!(begun.rest().len(), 2);
            library.mode(Operation::MakeDirectory, "/dir/d", 0o755);
            assert!((0..3).all(|_| is_asked_for()), "{name}: kept");
            drop(begun);
            (0..3).for_each(|_| _ = is_asked_for());
            assert!(!is_asked_for(), "{name}: still not kept");
        }
    });
}

#[test]
fn what_the_library_changes_shows_in_listings_at_once() {
    isolated("listings::what_the_library_changes_shows_in_listings_at_once", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            let directory = at.join("dir");
            let kept = Listed::open(&directory);
            let expect = |what: &str, expected: &[&str]| {
                // Asked for twice, it comes from what the kernel keeps.
                for _ in 0..2 {
                    // First without a look at the directory, by which the kernel would find out by itself.
                    assert_eq!(kept.again(), names(expected), "{name}, {what}, in a directory that was open");
                    assert_eq!(listed(&directory), names(expected), "{name}, {what}");
                }
            };
            expect("at first", &["f", "other"]);
            library.mode(Operation::MakeDirectory, "/dir/d", 0o755);
            expect("a directory", &["d", "f", "other"]);
            library.simple(Operation::SymbolicLink, "/dir/s", "f");
            expect("a symbolic link", &["d", "f", "other", "s"]);
            library.simple(Operation::Link, "/dir/f", "/dir/l");
            expect("a link", &["d", "f", "l", "other", "s"]);
            library.simple(Operation::Rename, "/dir/l", "/dir/m");
            expect("another name", &["d", "f", "m", "other", "s"]);
            library.simple(Operation::Rename, "/f2", "/dir/came");
            expect("from elsewhere", &["came", "d", "f", "m", "other", "s"]);
            library.simple(Operation::Rename, "/dir/came", "/f2");
            library.simple(Operation::Unlink, "/dir/m", "");
            library.simple(Operation::Unlink, "/dir/s", "");
            fs::remove_dir(directory.join("d")).expect("removed by the kernel");
            expect("all as before", &["f", "other"]);
        }
    });
}

#[test]
fn a_listing_goes_on_where_it_was_whatever_was_kept_of_it() {
    isolated("listings::a_listing_goes_on_where_it_was_whatever_was_kept_of_it", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            // In the union, the first change makes one of two branches of it.
            let lower = folder.join(if name == "plain" { "plain" } else { "lower" }).join("dir");
            (0..MANY).for_each(|number| fs::write(lower.join(file_of(number)), b"").expect("write"));
            let directory = at.join("dir");
            for round in 0..3 {
                let whole = listed(&directory);
                assert!(whole.len() >= MANY, "{name}");
                // One that is in the middle of what is kept, one in the middle of what comes, when all that is kept goes.
                let begun = [Listed::open(&directory), Listed::open(&directory)];
                let mut seen = begun.each_ref().map(|open| (0..4).flat_map(|_| open.some()).collect::<Vec<_>>());
                let place = seen[0][20].1;
                library.mode(Operation::MakeDirectory, &format!("/dir/new-{round}"), 0o755);
                seen[1].extend(begun[1].some());
                listed(&directory);
                for (open, seen) in begun.iter().zip(seen) {
                    let dots = [".", ".."].map(str::to_owned);
                    let mut all: Vec<_> =
                        seen.into_iter().map(|(name, _)| name).filter(|n| !dots.contains(n)).collect();
                    all.extend(open.rest());
                    let missing: Vec<_> = whole.difference(&once(all)).cloned().collect();
                    assert!(missing.is_empty(), "{name}, {round}: {missing:?}");
                }
                begun[0].seek(place);
                let count = begun[0].rest().len();
                assert!((MANY - 19..=MANY).contains(&count), "{name}, {round}: {count} from there on");
            }
        }
    });
}

#[test]
fn nobody_is_listed_what_was_changed_before() {
    const ROUNDS: u64 = 800;
    isolated("listings::nobody_is_listed_what_was_changed_before", |folder| {
        let service = Running::start(folder);
        for (name, at) in mounts(folder, &service) {
            let library = Library(connect(folder, &name));
            let directory = at.join("dir");
            let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
            library.simple(Operation::SymbolicLink, "/dir/0", "somewhere");
            let watch = |kept: Option<Listed>| {
                while !stop.load(Ordering::Acquire) {
                    let at_least = done.load(Ordering::Acquire);
                    let found = match &kept {
                        Some(open) => open.again(),
                        None => listed(&directory),
                    };
                    let found: Vec<u64> = found.iter().filter_map(|name| name.parse().ok()).collect();
                    let stayed = found.iter().filter(|&number| number % 2 == 0 && *number <= at_least).count() as u64;
                    assert_eq!(stayed, at_least / 2 + 1, "{name}: those made until {at_least} are missing");
                    let removed: Vec<_> =
                        found.iter().filter(|&number| number % 2 == 1 && *number < at_least).collect();
                    assert!(removed.is_empty(), "{name}: {removed:?} were removed before {at_least}");
                }
            };
            thread::scope(|scope| {
                let watch = &watch;
                let mut watchers: Vec<_> = (0..2).map(|_| scope.spawn(|| watch(None))).collect();
                watchers.push(scope.spawn(|| watch(Some(Listed::open(&directory)))));
                for round in 1..=ROUNDS {
                    if watchers.iter().any(|watcher| watcher.is_finished()) {
                        break;
                    }
                    library.simple(Operation::SymbolicLink, &format!("/dir/{round}"), "somewhere");
                    if round % 2 == 0 {
                        library.simple(Operation::Unlink, &format!("/dir/{}", round - 1), "");
                    }
                    done.store(round, Ordering::Release);
                }
                stop.store(true, Ordering::Release);
                watchers.into_iter().for_each(|watcher| watcher.join().expect("nothing old was listed"));
            });
        }
    });
}

#[test]
fn what_another_mount_changes_shows_in_listings_at_once() {
    isolated("listings::what_another_mount_changes_shows_in_listings_at_once", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        fs::write(at.join("f"), b"").expect("write");
        let kept = Listed::open(&at);
        let look = |expected: &[&str]| {
            for _ in 0..2 {
                assert_eq!((listed(&at), kept.again()), (names(expected), names(expected)));
            }
        };
        look(&["f"]);
        let other = service.mount("other", StackSpec::directory(directory));
        fs::write(other.join("g"), b"").expect("write");
        look(&["f", "g"]);
        Library(connect(folder, "other")).simple(Operation::Unlink, "/f", "");
        look(&["g"]);
    });
}
