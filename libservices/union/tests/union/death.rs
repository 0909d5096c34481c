//! Tests of the death of the service: the union's memory is lost, what it had stored in the layer above the upper branch stays,
//! and the next union shows what the last one did.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::random_operations::{Comparison, populate};
use poolfs_libservice::types::{AllocateMode, Errno, NodeId, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Libservice, Memory, Recorder, fail};
use poolfs_union::check::Check;
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const BLOCK: usize = 4096;
pub const AMPLE: u64 = 1 << 20;
/// A journal of a few records: it is renewed all the time.
const TINY: u64 = 240;

/// A union whose service can die.
pub struct Mortal {
    pub upper: Arc<Hooked>,
    pub lowers: Vec<Arc<Memory>>,
    pub journal_bytes: u64,
    pub deferred_copy_ups_max: usize,
}

pub fn lowers_of(lowers: &[Arc<Memory>]) -> Vec<Lower> {
    let lower = |(at, layer): (usize, &Arc<Memory>)| Lower {
        layer_id: format!("layer-{at}"),
        layer: layer.clone() as Arc<dyn Libservice>,
        is_union: false,
    };
    lowers.iter().enumerate().map(lower).collect()
}

fn open_journaled(upper: Arc<dyn Libservice>, lowers: &[Arc<Memory>], journal_bytes: u64) -> Arc<Union> {
    let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(upper, lowers_of(lowers)) };
    Union::open(UnionConfig { journal_bytes, ..config }).expect("the union opens")
}

impl Mortal {
    pub fn new(lowers: Vec<Arc<Memory>>, journal_bytes: u64) -> Self {
        Self { upper: Hooked::over(Memory::new()), lowers, journal_bytes, deferred_copy_ups_max: 1024 }
    }

    pub fn open(&self) -> Arc<Union> {
        self.upper.hook(|_| Ok(()));
        let lowers = lowers_of(&self.lowers);
        let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(self.upper.clone(), lowers) };
        let Mortal { journal_bytes, deferred_copy_ups_max, .. } = *self;
        Union::open(UnionConfig { journal_bytes, deferred_copy_ups_max, ..config }).expect("the union opens")
    }

    /// From here on the union changes nothing.
    pub fn die(&self) {
        self.upper.hook(|call| if call.changes() { fail(Errno::EIO) } else { Ok(()) });
    }

    pub fn die_and_open(&self, union: Arc<Union>) -> Arc<Union> {
        self.die();
        close(union);
        self.open()
    }

    /// The files of the journal.
    pub fn journals(&self) -> Vec<String> {
        ls(&*self.upper, ".poolfs").into_iter().filter(|name| name.starts_with("journal-")).collect()
    }
}

/// A lower branch with a file `f` of 20 blocks, each with its number.
pub fn lower() -> (Arc<Memory>, Vec<u8>) {
    let lower = Memory::new();
    let content: Vec<u8> = (0..20 * BLOCK).map(|at| (at / BLOCK) as u8 + 1).collect();
    put(&*lower, "f", &content);
    (lower, content)
}

#[test]
fn random_operations_with_deaths() {
    for (seed, journal_bytes) in (300..308).zip([AMPLE, TINY].into_iter().cycle()) {
        let lower = Memory::new();
        populate(&*lower, seed, 60);
        let reference = Memory::new();
        populate(&*reference, seed, 60);
        let before = fingerprint(&*lower);
        let mortal = Mortal::new(vec![lower.clone()], journal_bytes);
        let mut mounted = Remounted::default();
        let first = mounted.open(None, || mortal.open());
        let die = |layer| {
            mortal.die();
            mounted.open(Some(layer), || mortal.open())
        };
        let summary = Comparison::new(seed, 2000).starting_from(reference).dying(50, die).run(first);
        assert!(summary.succeeded > 500, "{summary:?}");
        assert_eq!(fingerprint(&*lower), before, "the lower branch has changed");
    }
}

#[test]
fn a_full_generation_of_the_journal_ends_by_itself() {
    let (lower, _) = lower();
    let mortal = Mortal::new(vec![lower], 400);
    let config = UnionConfig::new(mortal.upper.clone(), lowers_of(&mortal.lowers));
    let config = UnionConfig { flush_interval: Duration::from_secs(3600), transit_blocks_max: 0, ..config };
    let union = Union::open(UnionConfig { journal_bytes: 400, ..config }).expect("the union opens");
    // The tenth record is the first of the next generation, in which there is room for all others.
    for block in 0..12 {
        write_at(&*union, "f", block * BLOCK as u64 + 1, b"x");
    }
    let begun = Instant::now();
    while mortal.journals() != ["journal-2"] {
        assert!(begun.elapsed() < Duration::from_secs(20), "there are {:?}", mortal.journals());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_change_of_a_sketch_is_there_after_a_death() {
    for journal_bytes in [AMPLE, TINY] {
        let (lower, mut content) = lower();
        let mortal = Mortal::new(vec![lower], journal_bytes);
        let mut union = mortal.open();
        let mut write = |union: &Arc<Union>, offset: usize, data: &[u8]| {
            write_at(&**union, "f", offset as u64, data);
            content[offset..offset + data.len()].copy_from_slice(data);
            content.clone()
        };
        let expect = |union: &Arc<Union>, expected: &[u8], what: &str| {
            assert!(get(&**union, "f").unwrap() == expected, "{what}, {journal_bytes}");
        };
        let _ = write(&union, 100, b"in transit");
        let expected = write(&union, 110, b", and more of it");
        union = mortal.die_and_open(union);
        expect(&union, &expected, "grown in transit");
        // Completed by the reader above, and written anew outside of what the first record says.
        let _ = write(&union, 2000, b"anew");
        let _ = write(&union, 3 * BLOCK + 5, b"x");
        let _ = get(&*union, "f").unwrap();
        let _ = write(&union, 3 * BLOCK + 2000, b"y");
        let _ = write(&union, 5 * BLOCK, &[0xee; 3 * BLOCK]);
        let expected = write(&union, 12 * BLOCK - 7, &[0xdd; BLOCK]);
        union = mortal.die_and_open(union);
        expect(&union, &expected, "moved, and written after that");
        fsync(&*union, "f");
        let expected = write(&union, 15 * BLOCK + 9, b"after an fsync");
        union = mortal.die_and_open(union);
        expect(&union, &expected, "in transit after an fsync");

        let mut expected = expected;
        let resize = |union: &Arc<Union>, size: u64| {
            let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
            let _ = union.setattr(ROOT, node(&**union, "f").unwrap(), &changes, None).unwrap();
        };
        write_at(&*union, "f", 17 * BLOCK as u64 + 1, b"cut off in transit");
        resize(&union, 16 * BLOCK as u64 + 50);
        resize(&union, 19 * BLOCK as u64);
        expected.truncate(16 * BLOCK + 50);
        expected.resize(19 * BLOCK, 0);
        union = mortal.die_and_open(union);
        expect(&union, &expected, "cut and grown");
        let handle = open(&*union, "f", OpenFlags::READ_WRITE).unwrap();
        let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
        union.fallocate(ROOT, handle, punch, BLOCK as u64 + 10, 2 * BLOCK as u64).unwrap();
        union.release(handle);
        expected[BLOCK + 10..3 * BLOCK + 10].fill(0);
        let (parent, last) = split(&*union, "f");
        union.rename(ROOT, parent, last, parent, name("g"), RenameFlags::empty()).unwrap();
        union.link(ROOT, node(&*union, "g").unwrap(), parent, name("h")).unwrap();
        union = mortal.die_and_open(union);
        assert!(
            get(&*union, "g").unwrap() == expected && get(&*union, "h").unwrap() == expected,
            "punched and renamed"
        );
        write_at(&*union, "g", 9 * BLOCK as u64 + 1, b"removed in transit");
        for gone in ["g", "h"] {
            union.unlink(ROOT, parent, name(gone)).unwrap();
        }
        union = mortal.die_and_open(union);
        assert!(get(&*union, "g").is_err() && ls(&*union, "").is_empty());
        close(union);
        assert_eq!(mortal.journals(), [] as [&str; 0], "an orderly end leaves none");
    }
}

#[test]
fn what_was_written_by_a_name_that_is_gone_is_shown_by_the_others_after_a_death() {
    for (deferred_copy_ups_max, whole, replaced) in
        [(0, false, false), (0, true, false), (0, false, true), (1024, false, false), (1024, false, true)]
    {
        let (lower, mut content) = lower();
        lower.link(ROOT, node(&*lower, "f").unwrap(), NodeId::ROOT, name("other")).unwrap();
        put(&*lower, "new", b"new");
        let mut mortal = Mortal::new(vec![lower], AMPLE);
        mortal.deferred_copy_ups_max = deferred_copy_ups_max;
        let union = mortal.open();
        let data = if whole { vec![0xee; content.len()] } else { b"in transit".to_vec() };
        write_at(&*union, "f", 0, &data);
        content[..data.len()].copy_from_slice(&data);
        if replaced {
            union.rename(ROOT, NodeId::ROOT, name("new"), NodeId::ROOT, name("f"), RenameFlags::empty()).unwrap();
        } else {
            union.unlink(ROOT, NodeId::ROOT, name("f")).unwrap();
        }
        assert!(get(&*union, "other").unwrap() == content);
        let union = mortal.die_and_open(union);
        assert!(get(&*union, "other").unwrap() == content, "{deferred_copy_ups_max} {whole} {replaced}");
        assert_eq!(get(&*union, "f").ok(), replaced.then(|| b"new".to_vec()));
    }
}

/// Bytes of the files of the journal. The union's threads may remove one between listing and looking.
fn journal_sizes(mortal: &Mortal) -> Vec<u64> {
    let size = |name: String| {
        let found = node(&*mortal.upper, &format!(".poolfs/{name}")).ok()?;
        mortal.upper.getattr(ROOT, found).ok().map(|attributes| attributes.size)
    };
    mortal.journals().into_iter().filter_map(size).collect()
}

/// The odd blocks of a file of 500, from the last one on.
fn odd_blocks() -> impl Iterator<Item = u64> {
    (0..500).rev().step_by(2)
}

/// Bytes 3 to 5 of these blocks were written.
fn expect_written(union: &Arc<Union>, blocks: &[u64]) {
    let content = get(&**union, "f").unwrap();
    for (block, bytes) in (0..).zip(content.chunks(BLOCK)) {
        let expected = if blocks.contains(&block) { b"\x07\x07\x07new" } else { &[7; 6] };
        assert_eq!(&bytes[..6], expected, "block {block}");
    }
}

#[test]
fn the_journal_begins_anew_when_it_is_full() {
    let lower = Memory::new();
    put(&*lower, "f", &vec![7; 500 * BLOCK]);
    let mortal = Mortal::new(vec![lower], 4000);
    let union = mortal.open();
    for block in odd_blocks() {
        write_at(&*union, "f", block * BLOCK as u64 + 3, b"new");
        let sizes = journal_sizes(&mortal);
        assert!(sizes.len() <= 2 && sizes.iter().all(|&size| size <= 2 * mortal.journal_bytes), "{sizes:?}");
    }
    let union = mortal.die_and_open(union);
    expect_written(&union, &odd_blocks().collect::<Vec<_>>());
}

/// The thread that copies gets nothing done, so that the writer who finds the journal full has all to complete; and the service dies when the
/// writer has recorded that, and not yet anything else.
#[test]
fn a_full_journal_has_room_for_all_that_is_in_transit() {
    let lower = Memory::new();
    put(&*lower, "f", &vec![7; 500 * BLOCK]);
    let mortal = Mortal::new(vec![lower.clone()], 4000);
    let slow = Hooked::over(lower);
    let (writer, standstill) = (std::thread::current().id(), Arc::new(Mutex::new(())));
    let stands_still = standstill.lock().unwrap();
    let wait = standstill.clone();
    slow.hook(move |call| {
        if call == Call::Read && std::thread::current().id() != writer {
            drop(wait.lock());
        }
        Ok(())
    });
    mortal.upper.hook(|_| Ok(()));
    let lowers = vec![Lower { layer_id: "layer-0".into(), layer: slow, is_union: false }];
    let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(mortal.upper.clone(), lowers) };
    let union = Union::open(UnionConfig { journal_bytes: 4000, ..config }).expect("the union opens");
    let dead = Arc::new(AtomicBool::new(false));
    let mut written = Vec::new();
    for block in odd_blocks() {
        write_at(&*union, "f", block * BLOCK as u64 + 3, b"new");
        written.push(block);
        if written.len() == 10 {
            // There is an upper file now, and no sync any more before the journal is full.
            let died = dead.clone();
            mortal.upper.hook(move |call| {
                let dead = died.fetch_or(call == Call::SyncFile, Ordering::SeqCst) || call == Call::SyncFile;
                if dead && call.changes() { fail(Errno::EIO) } else { Ok(()) }
            });
        }
        if dead.load(Ordering::SeqCst) {
            break;
        }
    }
    assert!(written.len() > 100 && written.len() < 250, "{} writes filled no journal", written.len());
    drop(stands_still);
    let union = mortal.die_and_open(union);
    expect_written(&union, &written);
}

#[test]
fn what_cannot_be_made_good_now_waits() {
    // What is not copied up yet is not there without its lower file; what is cannot be read.
    for (deferred_copy_ups_max, without) in [(8, Errno::ENOENT), (0, Errno::EIO)] {
        let (lower, mut content) = lower();
        let mortal = Mortal { deferred_copy_ups_max, ..Mortal::new(vec![lower.clone()], AMPLE) };
        let union = mortal.open();
        write_at(&*union, "f", 100, b"accepted");
        content[100..108].copy_from_slice(b"accepted");
        mortal.die();
        close(union);
        // The lower branch is another one this time.
        let other = Mortal { upper: mortal.upper.clone(), ..Mortal::new(vec![Memory::new()], AMPLE) };
        let union = other.open();
        assert_eq!(get(&*union, "f").map_err(|error| error.errno()), Err(without));
        close(union);
        let mut found = Vec::new();
        let branch = mortal.upper.clone() as Arc<dyn Libservice>;
        let check = Check { upper: branch, lowers: None, repair: true, is_whole_below: true };
        let _ = check.run(&mut |finding| found.push(finding.problem.name())).unwrap();
        assert_eq!(found, ["journal"]);
        let union = mortal.open();
        assert!(get(&*union, "f").unwrap() == content);
        close(union);
        assert_eq!(mortal.journals(), [] as [&str; 0]);
    }
}

#[test]
fn an_entry_of_the_index_that_cannot_be_read_keeps_nobody_from_mounting() {
    let (lower, mut content) = lower();
    lower.link(ROOT, node(&*lower, "f").unwrap(), NodeId::ROOT, name("other")).unwrap();
    put(&*lower, "damaged", b"another file");
    lower.link(ROOT, node(&*lower, "damaged").unwrap(), NodeId::ROOT, name("of two names")).unwrap();
    let mortal = Mortal { deferred_copy_ups_max: 0, ..Mortal::new(vec![lower], AMPLE) };
    let union = mortal.open();
    write_at(&*union, "damaged", 0, b"X");
    union.unlink(ROOT, NodeId::ROOT, name("damaged")).unwrap();
    write_at(&*union, "f", 100, b"accepted");
    content[100..108].copy_from_slice(b"accepted");
    union.unlink(ROOT, NodeId::ROOT, name("f")).unwrap();
    mortal.die();
    close(union);
    // Each of the two entries in its turn, and then none.
    let indexed = ls(&*mortal.upper, ".poolfs/index");
    assert_eq!(indexed.len(), 2);
    for damaged in &indexed {
        mortal.upper.damage(damaged.as_bytes());
        let union = mortal.open();
        let shown = [get(&*union, "other").ok(), get(&*union, "of two names").ok()];
        assert!(shown.iter().any(Option::is_some), "the other one is there");
        mortal.die();
        close(union);
        mortal.upper.mend();
    }
    let union = mortal.open();
    assert!(get(&*union, "other").unwrap() == content);
    assert_eq!(get(&*union, "of two names").unwrap(), b"Xnother file");
}

#[test]
fn a_journal_that_cannot_be_written_is_void() {
    let (lower, mut content) = lower();
    let mortal = Mortal::new(vec![lower], AMPLE);
    let union = mortal.open();
    write_at(&*union, "f", 100, b"in transit");
    mortal.upper.limit(BLOCK as u64);
    // There is room for the block, and none for the record.
    let _ = get(&*union, "f").unwrap();
    mortal.upper.limit(u64::MAX);
    write_at(&*union, "f", 2000, b"after that");
    content[100..110].copy_from_slice(b"in transit");
    content[2000..2010].copy_from_slice(b"after that");
    let union = mortal.die_and_open(union);
    let shown = get(&*union, "f").unwrap();
    // What no record tells of is lost, and nothing that is older comes back.
    let old: Vec<u8> = content.iter().enumerate().map(|(at, _)| (at / BLOCK) as u8 + 1).collect();
    assert!(shown == content || shown == old, "{:?}", &shown[90..120]);
}

/// A name of a journal that is in no use would be found by whoever uses the branch next.
#[test]
fn a_journal_for_which_there_is_no_memory_leaves_no_name() {
    let (lower, mut content) = lower();
    let mortal = Mortal::new(vec![lower], AMPLE);
    let union = mortal.open();
    let attempts = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&attempts);
    mortal.upper.hook(move |call| match call {
        Call::Hold => {
            counted.fetch_add(1, Ordering::SeqCst);
            fail(Errno::ENOSPC)
        }
        _ => Ok(()),
    });
    for at in [100, 2 * BLOCK, 4 * BLOCK] {
        write_at(&*union, "f", at as u64, b"written");
        content[at..at + 7].copy_from_slice(b"written");
    }
    assert!(mortal.journals().is_empty(), "{:?}", mortal.journals());
    assert!(attempts.load(Ordering::SeqCst) > 0, "the test shows nothing");
    assert!(get(&*union, "f").unwrap() == content);
    mortal.upper.unhook();
    close(union);
    assert!(mortal.journals().is_empty(), "{:?}", mortal.journals());
    assert!(get(&*mortal.open(), "f").unwrap() == content);
}

/// Power is cut while a journal is made good, as often as that changes anything.
#[test]
fn a_replay_may_end_at_any_point() {
    // After the first step a copy-up waits; after the others, blocks do.
    for (seed, steps) in (0..6u64).flat_map(|seed| [(seed, 1), (seed, 10)]) {
        let (lower, mut content) = lower();
        let recorder = Recorder::new();
        let mortal = Mortal { upper: Hooked::over(recorder.clone()), ..Mortal::new(vec![lower.clone()], AMPLE) };
        let union = mortal.open();
        for step in 0..steps {
            let at = (step * 7919 + seed as usize * 3571) % (18 * BLOCK);
            let data = vec![0x80 + step as u8; [7, 3000, 9000][step % 3]];
            write_at(&*union, "f", at as u64, &data);
            content[at..at + data.len()].copy_from_slice(&data);
        }
        mortal.die();
        close(union);
        assert_eq!(mortal.journals(), ["journal-1"]);
        // As the next service finds it: all of it is durable.
        recorder.sync().unwrap();
        let died = recorder.len();
        drop(open_journaled(recorder.clone(), &mortal.lowers, 0));
        for count in died..=recorder.len() {
            for torn in [false, true].into_iter().filter(|&torn| !torn || count < recorder.len()) {
                let disk = recorder.crashed(count, seed ^ count as u64);
                if torn {
                    recorder.tear(&disk, count, seed * 37 + count as u64);
                }
                let union = open_journaled(disk, &mortal.lowers, 0);
                assert!(get(&*union, "f").unwrap() == content, "seed {seed}, change {count}, torn {torn}");
            }
        }
    }
}

#[test]
fn a_journal_of_the_last_number_has_none_after_it() {
    let (lower, mut content) = lower();
    let mortal = Mortal::new(vec![lower], AMPLE);
    close(mortal.open());
    put(&*mortal.upper, &format!(".poolfs/journal-{}", u64::MAX), &[0; 40]);
    let union = mortal.open();
    for at in [100, 9000] {
        write_at(&*union, "f", at, b"new");
        content[at as usize..at as usize + 3].copy_from_slice(b"new");
    }
    assert!(get(&*union, "f").unwrap() == content);
    close(union);
    assert!(get(&*mortal.open(), "f").unwrap() == content);
}

/// As a deployment that puts a directory in the place of another.
#[test]
fn a_first_write_was_made_good_where_its_path_shows_another_lower_file() {
    for is_second_layer in [false, true] {
        let (one, two) = (Memory::new(), Memory::new());
        mkdir(&*one, "app");
        put(&*one, "app/conf", &[1; 20_000]);
        let other = if is_second_layer { &two } else { &one };
        mkdir(&**other, "app.new");
        put(&**other, "app.new/conf", &[2; 20_000]);
        let mortal = Mortal::new(vec![one, two], AMPLE);
        let union = mortal.open();
        write_at(&*union, "app/conf", 100, b"xyz");
        fsync(&*union, "app/conf");
        let rename = |union: &Union, from, to| {
            let at = NodeId::ROOT;
            union.rename(ROOT, at, name(from), at, name(to), RenameFlags::empty()).expect("renamed");
        };
        rename(&union, "app", "app.old");
        rename(&union, "app.new", "app");
        let union = mortal.die_and_open(union);
        assert_eq!(get(&*union, "app.old/conf").unwrap()[99..104], *b"\x01xyz\x01");
        assert_eq!(get(&*union, "app/conf").unwrap()[99..104], [2; 5]);
        rename(&union, "app", "app.x");
        close(union);
        assert_eq!(mortal.journals(), [] as [&str; 0]);
    }
}
