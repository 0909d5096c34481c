//! Tests of copy-after-write: which requests wait for the rest of a block and which do not, and what becomes of it.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::types::{Errno, OpenFlags, SeekTo, SetAttributes};
use poolfs_libservice::{Durability, Error, Libservice, Memory, fail};
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;

/// A union over one lower branch whose calls can be met, with a file `f` of 20 blocks of sevens.
struct Scene {
    upper: Arc<Memory>,
    lower: Arc<Hooked>,
    content: Vec<u8>,
}

impl Scene {
    fn new() -> Self {
        let lower = Memory::new();
        let content = vec![7; 20 * BLOCK];
        put(&*lower, "f", &content);
        Scene { upper: Memory::new(), lower: Hooked::over(lower), content }
    }

    fn open(&self, transit_blocks_max: usize) -> Arc<Union> {
        let lowers = vec![Lower { layer_id: "layer-0".into(), layer: self.lower.clone(), is_union: false }];
        let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(self.upper.clone(), lowers) };
        Union::open(UnionConfig { transit_blocks_max, deferred_copy_ups_max: 0, ..config }).expect("the union opens")
    }

    /// From now on nothing can be read from below.
    fn refuse_reads(&self) {
        self.lower.hook(|call| if call == Call::Read { fail(Errno::EIO) } else { Ok(()) });
    }

    /// From now on whoever reads from below waits, until the sender is dropped.
    fn hold_reads(&self) -> Sender<()> {
        let (release, wait) = channel();
        let wait = std::sync::Mutex::new(wait);
        self.lower.hook(move |call| {
            if call == Call::Read {
                let _ = wait.lock().unwrap().recv();
            }
            Ok(())
        });
        release
    }

    fn write(&mut self, union: &Union, offset: usize, data: &[u8]) {
        write_at(union, "f", offset as u64, data);
        self.content[offset..offset + data.len()].copy_from_slice(data);
    }
}

fn read_block(union: &Union, block: usize) -> Vec<u8> {
    let handle = open(union, "f", OpenFlags::READ_ONLY).unwrap();
    let mut bytes = vec![0; BLOCK];
    assert_eq!(union.read(ROOT, handle, (block * BLOCK) as u64, &mut bytes).unwrap(), BLOCK);
    union.release(handle);
    bytes
}

fn sync(union: &Union) -> Result<(), Error> {
    let handle = open(union, "f", OpenFlags::READ_WRITE)?;
    let result = union.fsync(ROOT, handle, Durability::Data);
    union.release(handle);
    result
}

#[test]
fn a_write_does_not_wait_for_the_lower_file_and_a_reader_does() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    let release = scene.hold_reads();
    scene.write(&union, 5 * BLOCK + 100, b"new");
    scene.write(&union, 6 * BLOCK + 4000, &[1; 200]);
    assert_eq!(union.statistics().blocks_in_transit, 3);
    std::thread::scope(|scope| {
        let (done, ended) = channel();
        let reader = {
            let union = &union;
            scope.spawn(move || {
                let read = get(&**union, "f").unwrap();
                done.send(()).unwrap();
                read
            })
        };
        assert!(ended.recv_timeout(Duration::from_millis(50)).is_err(), "the reader got what has not been copied");
        drop(release);
        assert!(reader.join().unwrap() == scene.content);
    });
    assert_eq!(union.statistics().blocks_in_transit, 0);
    assert_eq!((union.statistics().blocks_moved, union.statistics().blocks_copied), (3, 3));
    close(union);
    assert!(get(&*scene.open(8), "f").unwrap() == scene.content);
}

/// Whoever needs a block in transit waits for the lower file, and keeps nobody else from other blocks.
#[test]
fn others_go_on_while_somebody_waits_for_the_rest_of_a_block() {
    type Need = fn(&Union);
    let needs: [(&str, Need); 5] = [
        ("a reader", |union| drop(read_block(union, 5))),
        ("a second write", |union| write_at(union, "f", 5 * BLOCK as u64 + 3000, b"again")),
        ("fsync", |union| sync(union).unwrap()),
        ("a truncation", |union| {
            let changes = SetAttributes { size: Some(19 * BLOCK as u64), ..SetAttributes::default() };
            union.setattr(ROOT, node(union, "f").unwrap(), &changes, None).unwrap();
        }),
        ("a look for data", |union| {
            let handle = open(union, "f", OpenFlags::READ_ONLY).unwrap();
            union.seek(ROOT, handle, 0, SeekTo::Data).unwrap();
            union.release(handle);
        }),
    ];
    for (title, need) in needs {
        let scene = Scene::new();
        let union = scene.open(8);
        let release = scene.hold_reads();
        write_at(&*union, "f", 5 * BLOCK as u64 + 100, b"new");
        std::thread::scope(|scope| {
            let needy = scope.spawn(|| need(&union));
            std::thread::sleep(Duration::from_millis(100));
            let (done, ended) = channel();
            let union = &union;
            scope.spawn(move || {
                write_at(&**union, "f", 9 * BLOCK as u64, &[1; BLOCK]);
                done.send(()).unwrap();
            });
            let went_on = ended.recv_timeout(Duration::from_secs(10));
            assert!(!needy.is_finished(), "{title} got what has not been copied");
            drop(release);
            assert!(went_on.is_ok(), "{title} keeps a writer of another block waiting");
        });
    }
}

/// Others may be far away, and many.
#[test]
fn a_reader_waits_for_its_own_block_alone() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    let (release, wait) = channel::<()>();
    let (begin, begun) = channel();
    let first = std::sync::Mutex::new(Some((begin, wait)));
    scene.lower.hook(move |call| {
        let met = if call == Call::Read { first.lock().unwrap().take() } else { None };
        if let Some((begin, wait)) = met {
            begin.send(()).unwrap();
            let _ = wait.recv();
        }
        Ok(())
    });
    scene.write(&union, 5 * BLOCK + 100, b"new");
    scene.write(&union, 15 * BLOCK + 100, b"new");
    // The thread that copies has come to block 5.
    begun.recv().unwrap();
    assert!(read_block(&union, 15) == scene.content[15 * BLOCK..16 * BLOCK]);
    assert_eq!(union.statistics().blocks_in_transit, 1);
    drop(release);
    assert!(get(&*union, "f").unwrap() == scene.content);
}

#[test]
fn what_cannot_be_copied_stays_and_fsync_says_so() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.refuse_reads();
    scene.write(&union, 3 * BLOCK + 1, b"x");
    scene.write(&union, 9 * BLOCK, &[2; BLOCK]);
    assert!(sync(&union).is_err_and(|error| error == Errno::EIO));
    assert!(sync(&union).is_err_and(|error| error == Errno::EIO), "again, while it is so");
    assert!(get(&*union, "f").is_err_and(|error| error == Errno::EIO));
    assert_eq!(union.statistics().blocks_in_transit, 1);
    scene.lower.unhook();
    sync(&union).unwrap();
    assert!(get(&*union, "f").unwrap() == scene.content);
    close(union);
    assert!(get(&*scene.open(8), "f").unwrap() == scene.content);
}

#[test]
fn a_block_that_cannot_be_copied_does_not_keep_others_from_the_disk() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.refuse_reads();
    scene.write(&union, 9 * BLOCK, &[2; BLOCK]);
    write_at(&*union, "f", 3 * BLOCK as u64 + 1, b"x");
    assert!(sync(&union).is_err());
    // As a crash leaves it: the union that wrote is never closed.
    let left = Arc::new(union);
    scene.lower.unhook();
    let seen = get(&*scene.open(8), "f").unwrap();
    assert!(seen == scene.content, "the block that was written whole is durable, the other is the lower one");
    drop(left);
}

#[test]
fn what_fills_a_block_needs_no_copy() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.refuse_reads();
    for at in (0..BLOCK).step_by(256) {
        scene.write(&union, 4 * BLOCK + at, &[at as u8 / 16 + 1; 256]);
    }
    sync(&union).unwrap();
    scene.lower.unhook();
    assert!(get(&*union, "f").unwrap() == scene.content);
    assert_eq!((union.statistics().blocks_moved, union.statistics().blocks_copied), (1, 0));
}

#[test]
fn a_second_write_elsewhere_in_the_block_hurries_it() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.write(&union, 100, b"first");
    scene.write(&union, 3000, b"second");
    scene.write(&union, 50, b"before");
    scene.write(&union, 103, b"over the end");
    scene.write(&union, BLOCK - 2, b"across");
    assert!(get(&*union, "f").unwrap() == scene.content);
    close(union);
    assert!(get(&*scene.open(8), "f").unwrap() == scene.content);
}

#[test]
fn only_so_many_blocks_are_in_transit() {
    for most in [0, 2] {
        let scene = Scene::new();
        let union = scene.open(most);
        scene.refuse_reads();
        let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
        for block in 0..most {
            union.write(ROOT, handle, (block * BLOCK) as u64 + 9, b"x").unwrap();
        }
        let refused = union.write(ROOT, handle, (most * BLOCK) as u64 + 9, b"x");
        assert!(refused.is_err_and(|error| error == Errno::EIO), "with {most}, this one has to copy at once");
        assert_eq!(union.statistics().blocks_in_transit, most as u64);
        scene.lower.unhook();
        union.release(handle);
        union.sync().unwrap();
        assert_eq!(union.statistics().blocks_in_transit, 0);
    }
}

#[test]
fn a_copy_is_no_change() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.refuse_reads();
    scene.write(&union, 2 * BLOCK + 10, b"new");
    let written = stat(&*union, "f");
    scene.lower.unhook();
    std::thread::sleep(Duration::from_millis(20));
    sync(&union).unwrap();
    assert_eq!(union.statistics().blocks_in_transit, 0);
    let copied = stat(&*union, "f");
    assert_eq!((copied.modified, copied.changed), (written.modified, written.changed));
    scene.write(&union, 8 * BLOCK, b"later");
    assert!(stat(&*union, "f").changed > written.changed);
}

#[test]
fn cut_and_grown_in_transit() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.write(&union, 10 * BLOCK + 10, b"new");
    scene.write(&union, 19 * BLOCK + 10, b"gone");
    let cut = 10 * BLOCK as u64 + 12;
    for size in [cut, 20 * BLOCK as u64] {
        let changes = poolfs_libservice::types::SetAttributes { size: Some(size), ..Default::default() };
        union.setattr(ROOT, node(&*union, "f").unwrap(), &changes, None).unwrap();
    }
    scene.content[cut as usize..].fill(0);
    assert!(get(&*union, "f").unwrap() == scene.content);
    close(union);
    assert!(get(&*scene.open(8), "f").unwrap() == scene.content);
}

/// Its writer has been answered, and may be gone before anybody reads the block.
#[test]
fn what_could_not_be_completed_is_told_to_those_who_close() {
    let mut scene = Scene::new();
    let union = scene.open(8);
    scene.refuse_reads();
    let [writer, reader] =
        [OpenFlags::READ_WRITE, OpenFlags::READ_ONLY].map(|flags| open(&*union, "f", flags).unwrap());
    union.write(ROOT, writer, 5000, b"new").expect("accepted");
    scene.content[5000..5003].copy_from_slice(b"new");
    let begun = Instant::now();
    while union.flush(ROOT, writer).map_err(|error| error.errno()) != Err(Errno::EIO) {
        assert!(begun.elapsed() < Duration::from_secs(60), "nobody is told");
        std::thread::yield_now();
    }
    union.flush(ROOT, reader).expect("it is none of its business");
    assert!(union.flush(ROOT, writer).is_err(), "it is not stored yet");
    scene.lower.unhook();
    union.flush(ROOT, writer).expect("now it is");
    union.release(writer);
    union.release(reader);
    assert!(get(&*union, "f").unwrap() == scene.content);
    close(union);
}
