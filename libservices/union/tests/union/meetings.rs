//! Race tests: one operation is stopped inside a call of the upper branch while another runs.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::{NodeId, SetAttributes, SetTime, Timestamp};
use poolfs_libservice::{Libservice, Memory};
use poolfs_union::Union;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCK: usize = 4096;
/// Long enough for an operation that nothing stops, short enough to wait for one that should be stopped.
const MOMENT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

struct Meeting {
    upper: Arc<Hooked>,
    union: Arc<Union>,
}

impl Meeting {
    /// A union over one lower branch with the files `d/x` and `d/y` of ten blocks.
    fn new() -> Self {
        let below = Memory::new();
        mkdir(&*below, "d");
        for path in ["d/x", "d/y"] {
            put(&*below, path, &[1; 10 * BLOCK]);
        }
        let upper = Hooked::over(Memory::new());
        let union = open_over(upper.clone(), &[below]).unwrap();
        Meeting { upper, union }
    }

    /// The `nth` call of this kind from now on (counted from 1) waits: the first end tells that it is there, the second lets it go.
    fn stop_at(&self, wanted: Call, nth: u64) -> (Receiver<()>, Sender<()>) {
        let ((told, arrived), (go, gone)) = (channel(), channel());
        let (told, gone) = (Mutex::new(told), Mutex::new(gone));
        let count = AtomicU64::new(0);
        self.upper.hook(move |call| {
            if call == wanted && count.fetch_add(1, Ordering::SeqCst) + 1 == nth {
                let _ = told.lock().unwrap().send(());
                let _ = gone.lock().unwrap().recv_timeout(LONG);
            }
            Ok(())
        });
        (arrived, go)
    }

    /// Starts `body` in a thread of its own; the receiver hears when it has ended.
    fn start(&self, body: impl FnOnce(&Union) + Send + 'static) -> Receiver<()> {
        let (told, ended) = channel();
        let union = self.union.clone();
        std::thread::spawn(move || {
            body(&union);
            let _ = told.send(());
        });
        ended
    }

    fn bitmaps(&self) -> Vec<String> {
        ls(&*self.upper, ".poolfs/bitmaps")
    }
}

fn chmod(union: &dyn Libservice, path: &str) {
    let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    union.setattr(ROOT, node(union, path).unwrap(), &changes, None).unwrap();
}

#[test]
fn sync_waits_for_a_flush_that_is_under_way() {
    let meeting = Meeting::new();
    write_at(&*meeting.union, "d/x", 5, b"new");
    let (arrived, go) = meeting.stop_at(Call::SyncFile, 1);
    let first = meeting.start(|union| union.sync().unwrap());
    arrived.recv_timeout(LONG).unwrap();
    let second = meeting.start(|union| union.sync().unwrap());
    assert!(second.recv_timeout(MOMENT).is_err(), "sync came back although the bitmap is not on disk");
    go.send(()).unwrap();
    first.recv_timeout(LONG).unwrap();
    second.recv_timeout(LONG).unwrap();
}

#[test]
fn fsync_waits_until_its_directories_are_durable() {
    let meeting = Meeting::new();
    chmod(&*meeting.union, "d/x");
    chmod(&*meeting.union, "d/y");
    let (arrived, go) = meeting.stop_at(Call::SyncDirectory, 1);
    let first = meeting.start(|union| fsync(union, "d/x"));
    arrived.recv_timeout(LONG).unwrap();
    let second = meeting.start(|union| fsync(union, "d/y"));
    assert!(second.recv_timeout(MOMENT).is_err(), "fsync came back although the directory may be lost");
    go.send(()).unwrap();
    first.recv_timeout(LONG).unwrap();
    second.recv_timeout(LONG).unwrap();
}

#[test]
fn fsync_waits_until_the_work_directory_is_durable() {
    let meeting = Meeting::new();
    write_at(&*meeting.union, "d/x", 5, b"new");
    write_at(&*meeting.union, "d/y", 5, b"new");
    // The first is `bitmaps`, the second what makes `bitmaps` itself last.
    let (arrived, go) = meeting.stop_at(Call::SyncDirectory, 2);
    let first = meeting.start(|union| fsync(union, "d/x"));
    arrived.recv_timeout(LONG).unwrap();
    let second = meeting.start(|union| fsync(union, "d/y"));
    assert!(second.recv_timeout(MOMENT).is_err(), "fsync came back although the bitmap's directory may be lost");
    go.send(()).unwrap();
    first.recv_timeout(LONG).unwrap();
    second.recv_timeout(LONG).unwrap();
}

#[test]
fn a_time_that_is_set_during_a_copy_up_stays() {
    let meeting = Meeting::new();
    chmod(&*meeting.union, "d/y");
    let directory = node(&*meeting.union, "d").unwrap();
    let (arrived, go) = meeting.stop_at(Call::Rename, 1);
    let copy_up = meeting.start(|union| chmod(union, "d/x"));
    arrived.recv_timeout(LONG).unwrap();
    let time = Timestamp { seconds: 1000, nanoseconds: 0 };
    let touched = meeting.start(move |union| {
        let changes = SetAttributes { modified: Some(SetTime::At(time)), ..SetAttributes::default() };
        union.setattr(ROOT, directory, &changes, None).unwrap();
    });
    assert!(touched.recv_timeout(MOMENT).is_err());
    go.send(()).unwrap();
    copy_up.recv_timeout(LONG).unwrap();
    touched.recv_timeout(LONG).unwrap();
    assert_eq!(stat(&*meeting.union, "d").modified, time);
}

#[test]
fn nobody_waits_while_the_whiteouts_of_a_removed_directory_go() {
    let meeting = Meeting::new();
    let directory = node(&*meeting.union, "d").unwrap();
    for last in ["x", "y"] {
        meeting.union.unlink(ROOT, directory, name(last)).unwrap();
    }
    let (arrived, go) = meeting.stop_at(Call::Remove, 1);
    let rmdir = meeting.start(|union| union.rmdir(ROOT, NodeId::ROOT, name("d")).unwrap());
    arrived.recv_timeout(LONG).unwrap();
    let other = meeting.start(|union| mkdir(union, "other"));
    let waited = other.recv_timeout(MOMENT).is_err();
    go.send(()).unwrap();
    rmdir.recv_timeout(LONG).unwrap();
    assert!(!waited, "a name could not be made while a directory of another went");
    assert_eq!(ls(&*meeting.union, ""), ["other"]);
    assert!(ls(&*meeting.upper, ".poolfs/work").is_empty());
}

#[test]
fn a_file_that_becomes_ordinary_during_a_flush_leaves_no_bitmap() {
    let meeting = Meeting::new();
    write_at(&*meeting.union, "d/x", 5, b"new");
    let (arrived, go) = meeting.stop_at(Call::SyncFile, 1);
    let flush = meeting.start(|union| union.sync().unwrap());
    arrived.recv_timeout(LONG).unwrap();
    let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
    meeting.union.setattr(ROOT, node(&*meeting.union, "d/x").unwrap(), &changes, None).unwrap();
    go.send(()).unwrap();
    flush.recv_timeout(LONG).unwrap();
    assert!(meeting.bitmaps().is_empty());
}

#[test]
fn a_file_removed_during_a_flush_leaves_no_bitmap() {
    for nth in 1..=4 {
        let meeting = Meeting::new();
        write_at(&*meeting.union, "d/x", 5, b"new");
        let (arrived, go) = meeting.stop_at(Call::SyncFile, nth);
        let flush = meeting.start(|union| fsync(union, "d/x"));
        arrived.recv_timeout(LONG).unwrap();
        let (parent, last) = split(&*meeting.union, "d/x");
        meeting.union.unlink(ROOT, parent, last).unwrap();
        go.send(()).unwrap();
        flush.recv_timeout(LONG).unwrap();
        assert!(meeting.bitmaps().is_empty(), "stopped at the sync number {nth}");
    }
}

#[test]
fn statistics_do_not_stop_at_a_damaged_file_that_changes() {
    let meeting = Meeting::new();
    write_at(&*meeting.union, "d/x", 5, b"new");
    fsync(&*meeting.union, "d/x");
    let Meeting { upper, union } = meeting;
    close(union);
    let (bitmaps, last) = (node(&*upper, ".poolfs/bitmaps").unwrap(), ls(&*upper, ".poolfs/bitmaps").remove(0));
    upper.unlink(ROOT, bitmaps, name(&last)).unwrap();
    let below = Memory::new();
    mkdir(&*below, "d");
    let union = open_over(upper.clone(), &[below]).unwrap();
    assert!(get(&*union, "d/x").is_err());
    let (told, ended) = channel();
    let file = node(&*union, "d/x").unwrap();
    let stop = Arc::new(AtomicU64::new(0));
    for _ in 0..3 {
        let (union, stop) = (union.clone(), stop.clone());
        std::thread::spawn(move || {
            let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
            while stop.load(Ordering::SeqCst) == 0 {
                union.setattr(ROOT, file, &changes, None).unwrap();
            }
        });
    }
    std::thread::spawn(move || {
        for _ in 0..20_000 {
            assert_eq!(union.statistics().damaged.len(), 1);
        }
        let _ = told.send(());
    });
    let result = ended.recv_timeout(LONG);
    stop.store(1, Ordering::SeqCst);
    assert!(result.is_ok(), "status and the writers of the file wait for each other");
}

/// Whoever looks a file up reads its record, and is then overtaken by one who looks it up as well, cuts it off and lets it go.
#[test]
fn what_was_read_of_a_file_that_another_has_changed_meanwhile_is_read_again() {
    let lower = Memory::new();
    put(&*lower, "f", &[5; 20 * BLOCK]);
    // Of a file of several names more is read after its record.
    lower.link(ROOT, node(&*lower, "f").unwrap(), NodeId::ROOT, name("g")).unwrap();
    let upper = Hooked::over(Memory::new());
    let lowers = [lower];
    let union = open_over(upper.clone(), &lowers).unwrap();
    write_at(&*union, "f", 100, b"written");
    close(union);
    // How many attributes are read of it.
    let reads = Arc::new(AtomicU64::new(0));
    let union = open_over(upper.clone(), &lowers).unwrap();
    let counted = reads.clone();
    upper.hook(move |call| {
        counted.fetch_add(u64::from(call == Call::Getxattr), Ordering::SeqCst);
        Ok(())
    });
    node(&*union, "f").unwrap();
    upper.unhook();
    close(union);
    let last = reads.load(Ordering::SeqCst);
    let union = open_over(upper.clone(), &lowers).unwrap();
    let (other, hooked, left) = (Arc::downgrade(&union), upper.clone(), AtomicU64::new(last));
    upper.hook(move |call| {
        if call == Call::Getxattr && left.fetch_sub(1, Ordering::SeqCst) == 1 {
            hooked.unhook();
            let union = other.upgrade().expect("it is in use");
            let file = union.lookup(ROOT, NodeId::ROOT, name("f"))?.node;
            for size in [5000, 10 * BLOCK as u64] {
                let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
                union.setattr(ROOT, file, &changes, None)?;
            }
            union.forget(file, 1);
        }
        Ok(())
    });
    let shown = get(&*union, "f").unwrap();
    let mut expected = vec![0; 10 * BLOCK];
    expected[..5000].fill(5);
    expected[100..107].copy_from_slice(b"written");
    assert!(shown == expected, "what was cut off is back");
    close(union);
}
