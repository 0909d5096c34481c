//! Tests of files that wait for a replay: nobody sees or changes such a file until its accepted changes are applied.

use crate::death::{AMPLE, BLOCK, Mortal, lower, lowers_of};
use crate::hooked::Call;
use crate::support::*;
use poolfs_libservice::types::{AllocateMode, Errno, NodeId, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Layered, Libservice, Memory, fail};
use poolfs_union::{Union, UnionConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn writes(union: &Union, path: &str, offset: u64, data: &[u8]) -> Result<(), Errno> {
    let handle = open(union, path, OpenFlags::READ_WRITE).map_err(|error| error.errno())?;
    let written = union.write(ROOT, handle, offset, data);
    union.release(handle);
    written.map(drop).map_err(|error| error.errno())
}

fn reads(union: &dyn Libservice, path: &str) -> Result<Vec<u8>, Errno> {
    get(union, path).map_err(|error| error.errno())
}

/// Nothing of the file can be had or changed.
fn expect_waiting(union: &Union, path: &str) {
    assert_eq!(reads(union, path), Err(Errno::EIO), "read");
    assert_eq!(writes(union, path, 5 * BLOCK as u64 + 10, b"x"), Err(Errno::EIO), "write");
    let file = node(union, path).expect("its name is there");
    let size = SetAttributes { size: Some(3), ..SetAttributes::default() };
    assert_eq!(union.setattr(ROOT, file, &size, None).map(drop).map_err(|error| error.errno()), Err(Errno::EIO));
}

/// A power cut takes the journal of the service that runs now.
fn cut_power(mortal: &Mortal, union: Arc<Union>) {
    mortal.die();
    close(union);
    mortal.upper.unhook();
    let top = node(&*mortal.upper, ".poolfs").expect("it is there");
    for journal in mortal.journals().iter().filter(|name| *name != "journal-0") {
        mortal.upper.unlink(ROOT, top, name(journal)).expect("it is there");
    }
}

#[test]
fn a_sketch_that_could_not_be_read_is_left_alone_until_it_can() {
    type End = fn(&Mortal, Arc<Union>);
    let clean: End = |_, union| close(union);
    let death: End = |mortal, union| {
        mortal.die();
        close(union);
    };
    for end in [clean, death, cut_power] {
        let (lower, mut content) = lower();
        let mortal = Mortal { deferred_copy_ups_max: 0, ..Mortal::new(vec![lower], AMPLE) };
        let union = mortal.open();
        write_at(&*union, "f", 5 * BLOCK as u64, &[0xaa; BLOCK]);
        content[5 * BLOCK..6 * BLOCK].fill(0xaa);
        mortal.die();
        close(union);
        mortal.upper.damage(b"f");
        let union = mortal.open();
        mortal.upper.mend();
        expect_waiting(&union, "f");
        put(&*union, "g", b"others go on");
        end(&mortal, union);
        let union = mortal.open();
        assert!(reads(&*union, "f").expect("it is made good") == content);
        write_at(&*union, "f", 5 * BLOCK as u64 + 10, b"x");
        content[5 * BLOCK + 10] = b'x';
        let union = mortal.die_and_open(union);
        assert!(reads(&*union, "f").expect("it is there") == content);
        close(union);
        assert_eq!(mortal.journals(), [] as [&str; 0]);
    }
}

#[test]
fn records_whose_bytes_are_not_on_disk_stay_behind_them() {
    let (lower, mut content) = lower();
    let mortal = Mortal { deferred_copy_ups_max: 0, ..Mortal::new(vec![lower], AMPLE) };
    let union = mortal.open();
    write_at(&*union, "f", 5 * BLOCK as u64, &[0xaa; BLOCK]);
    content[5 * BLOCK..6 * BLOCK].fill(0xaa);
    mortal.die();
    close(union);
    let once = AtomicBool::new(true);
    let fails = move |call| {
        if call == Call::SyncFile && once.swap(false, Ordering::SeqCst) { fail(Errno::EIO) } else { Ok(()) }
    };
    mortal.upper.hook(fails);
    let config = UnionConfig::new(mortal.upper.clone(), lowers_of(&mortal.lowers));
    let config = UnionConfig { flush_interval: Duration::ZERO, journal_bytes: AMPLE, ..config };
    let union = Union::open(config).expect("one file is no reason to refuse all");
    expect_waiting(&union, "f");
    assert!(!mortal.journals().iter().any(|name| name == "journal-0"), "nothing says that they are there");
    close(union);
    assert_eq!(mortal.journals().len(), 1);
    let union = mortal.open();
    assert!(reads(&*union, "f").expect("it is made good") == content);
    close(union);
    assert_eq!(mortal.journals(), [] as [&str; 0]);
}

/// Opens the union while the upper branch takes no attributes.
fn open_without_attributes(mortal: &Mortal) -> Arc<Union> {
    mortal.upper.hook(|call| if call == Call::Setxattr { fail(Errno::ENOMEM) } else { Ok(()) });
    let config = UnionConfig::new(mortal.upper.clone(), lowers_of(&mortal.lowers));
    let config = UnionConfig { flush_interval: Duration::ZERO, journal_bytes: AMPLE, ..config };
    let union = Union::open(config).expect("one file is no reason to refuse all");
    mortal.upper.hook(|_| Ok(()));
    union
}

#[test]
fn a_first_write_that_could_not_be_made_good_is_followed_by_none() {
    let lower = Memory::new();
    mkdir(&*lower, "d");
    let content: Vec<u8> = (0..20 * BLOCK).map(|at| (at / BLOCK) as u8 + 1).collect();
    put(&*lower, "d/f", &content);
    put(&*lower, "g", &content);
    let mortal = Mortal::new(vec![lower], AMPLE);
    let union = mortal.open();
    write_at(&*union, "d/f", 5 * BLOCK as u64 + 100, b"first");
    mortal.die();
    close(union);
    let union = open_without_attributes(&mortal);
    expect_waiting(&union, "d/f");
    let file = node(&*union, "d/f").expect("its name is there");
    let errno = |done: poolfs_libservice::Result<()>| done.map_err(|error| error.errno());
    let mode = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
    assert_eq!(errno(union.setattr(ROOT, file, &mode, None).map(drop)), Err(Errno::EIO));
    assert_eq!(errno(union.link(ROOT, file, NodeId::ROOT, name("h")).map(drop)), Err(Errno::EIO));
    let rename = |from, to, flags| errno(union.rename(ROOT, NodeId::ROOT, name(from), NodeId::ROOT, name(to), flags));
    assert_eq!(rename("d", "e", RenameFlags::empty()), Err(Errno::EIO));
    assert_eq!(rename("g", "d", RenameFlags::EXCHANGE), Err(Errno::EIO));
    assert_eq!(rename("g", "h", RenameFlags::empty()), Ok(()), "others go on");
    let told = union.differences(&mut |_, _| Ok(std::ops::ControlFlow::Continue(())));
    assert_eq!(errno(told), Err(Errno::EIO), "what is made of them would be without that write");
    mortal.die();
    close(union);
    let union = mortal.open();
    let shown = reads(&*union, "d/f").expect("it is made good");
    assert_eq!(&shown[5 * BLOCK + 100..5 * BLOCK + 105], b"first");
    close(union);
    assert_eq!(mortal.journals(), [] as [&str; 0]);
}

#[test]
fn what_waits_never_becomes_more_than_the_next_union_reads() {
    let (lower, _) = lower();
    let mortal = Mortal { deferred_copy_ups_max: 0, ..Mortal::new(vec![lower], AMPLE) };
    let union = mortal.open();
    for block in [5, 9] {
        write_at(&*union, "f", block * BLOCK as u64, &[0xaa; BLOCK]);
    }
    mortal.die();
    close(union);
    mortal.upper.unhook();
    let journal = reads(&*mortal.upper, ".poolfs/journal-1").expect("it is there");
    let (header, records) = journal.split_at(40);
    assert_eq!(records.len(), 80, "two records");
    write_at(&*mortal.upper, ".poolfs/journal-1", header.len() as u64, &records.repeat((9 << 20) / 80));
    mortal.upper.damage(b"f");
    let open = || {
        let config = UnionConfig::new(mortal.upper.clone(), lowers_of(&mortal.lowers));
        Union::open(UnionConfig { journal_bytes: AMPLE, ..config })
    };
    let refused = open().err().expect("what waits is too much");
    assert!(refused == Errno::EIO && refused.to_string().contains("remove"), "{refused}");
    assert_eq!(mortal.journals(), ["journal-1"]);
    mortal.upper.mend();
    let union = open().expect("it can be made good");
    assert_eq!(reads(&*union, "f").expect("read")[9 * BLOCK..10 * BLOCK], [0xaa; BLOCK]);
    close(union);
}

#[test]
fn a_journal_takes_no_more_memory_than_what_a_union_with_as_much_leaves() {
    let (lower, _) = lower();
    let mortal = Mortal { deferred_copy_ups_max: 0, ..Mortal::new(vec![lower], AMPLE) };
    let union = mortal.open();
    write_at(&*union, "f", 5 * BLOCK as u64, &[0xaa; BLOCK]);
    mortal.die();
    close(union);
    mortal.upper.unhook();
    let journal = reads(&*mortal.upper, ".poolfs/journal-1").expect("it is there");
    // Each of another sketch, of which there is none.
    let of_sketch = |number: u64| {
        let mut record = [0; 40];
        record[..36].copy_from_slice(&journal[40..76]);
        record[..8].copy_from_slice(&number.to_le_bytes());
        let sum = crc32c::crc32c(&record).to_le_bytes();
        record[36..].copy_from_slice(&sum);
        record
    };
    let config = || UnionConfig::new(mortal.upper.clone(), lowers_of(&mortal.lowers));
    // As many as may be read may be too many to be kept: the next union would have to read some more.
    let records: Vec<u8> = (0..30_000).flat_map(of_sketch).collect();
    write_at(&*mortal.upper, ".poolfs/journal-1", journal.len() as u64, &records);
    mortal.upper.damage(b"f");
    let refused = Union::open(UnionConfig { journal_bytes: AMPLE, ..config() }).err().expect("it is too much to wait");
    assert!(refused == Errno::EIO && refused.to_string().contains("wait"), "{refused}");
    assert_eq!(mortal.journals(), ["journal-1"]);
    mortal.upper.mend();
    let records: Vec<u8> = (0..60_000).flat_map(of_sketch).collect();
    write_at(&*mortal.upper, ".poolfs/journal-1", journal.len() as u64, &records);
    let refused = Union::open(UnionConfig { journal_bytes: AMPLE, ..config() }).err().expect("it is too much");
    assert!(refused == Errno::EIO && refused.to_string().contains("more cache"), "{refused}");
    let union = Union::open(UnionConfig { journal_bytes: 4 * AMPLE, ..config() }).expect("with more memory it is not");
    assert_eq!(reads(&*union, "f").expect("read")[5 * BLOCK..6 * BLOCK], [0xaa; BLOCK]);
    close(union);
}

#[test]
fn one_fallocate_of_a_huge_file_is_made_good_after_a_death() {
    let lower = Memory::new();
    put(&*lower, "f", b"the beginning");
    let size = 15 << 40;
    resize(&*lower, "f", size);
    let mortal = Mortal::new(vec![lower], AMPLE);
    let union = mortal.open();
    let handle = open(&*union, "f", OpenFlags::READ_WRITE).expect("open");
    union
        .fallocate(ROOT, handle, AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE, 0, size)
        .expect("holes take no room");
    union.release(handle);
    let union = mortal.die_and_open(union);
    let handle = open(&*union, "f", OpenFlags::READ_ONLY).expect("open");
    let mut read = [1; 13];
    union.read(ROOT, handle, 0, &mut read).expect("read");
    assert_eq!(read, [0; 13]);
    union.release(handle);
    close(union);
}
