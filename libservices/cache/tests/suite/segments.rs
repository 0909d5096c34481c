//! Tests of reads without a request: clients read from a segment what the cache would have answered.

use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_ipc::segment::SegmentView;
use poolfs_libservice::{Lease, Libservice, Memory, SharedContent};
use poolfs_types::{AllocateMode, Caller, Errno, HandleId, Name, NodeId, OpenFlags, SetAttributes};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ROOT: &Caller = &Caller::ROOT;
const BLOCK: usize = 4096;

struct Forever;

impl Lease for Forever {
    fn revoke(&self) {}
}

pub fn lease() -> Arc<dyn Lease> {
    Arc::new(Forever)
}

fn cache(limit_bytes: u64) -> (Arc<Cache>, HandleId, NodeId) {
    let cache = Cache::new(&CachePool::new(CacheConfig::with_limit(limit_bytes)).expect("a pool"), Memory::new());
    let name = Name::new(b"file").expect("a name");
    let (entry, handle) = cache.create(ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).expect("created");
    (cache, handle, entry.node)
}

fn view(cache: &Cache, handle: HandleId) -> SegmentView {
    let segment = cache.segment(handle, &lease()).expect("a segment");
    SegmentView::new(&segment.map, &segment.data, segment.capacity).expect("a view")
}

/// What is read without asking, as far as that goes.
pub fn read(view: &SegmentView, offset: u64, length: usize) -> (Vec<u8>, bool) {
    let mut bytes = vec![0xEE; length];
    // SAFETY: the vector has that many bytes.
    let read = unsafe { view.read(offset, bytes.as_mut_ptr(), length, || true) };
    bytes.truncate(read.count);
    (bytes, read.is_whole)
}

fn set_size(cache: &Cache, node: NodeId, size: u64) {
    let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
    cache.setattr(ROOT, node, &changes, None).expect("truncated");
}

#[test]
fn a_view_follows_every_change() {
    let (cache, handle, node) = cache(64 << 20);
    cache.write(ROOT, handle, 0, b"small").expect("written");
    let seen = view(&cache, handle);
    assert_eq!(read(&seen, 0, 100), (b"small".to_vec(), true), "of a file that was on the heap");
    cache.write(ROOT, handle, 3, b"rter").expect("written");
    assert_eq!(read(&seen, 1, 100), (b"marter"[..6].to_vec(), true));
    cache.write(ROOT, handle, 20_000, &[7; 10_000]).expect("written");
    assert!(!read(&seen, 0, 40_000).1, "nobody has looked at what is between");
    let mut all = vec![0; 30_000];
    assert_eq!(cache.read(ROOT, handle, 0, &mut all).expect("read"), 30_000);
    let (bytes, whole) = read(&seen, 0, 40_000);
    assert!(whole && bytes.len() == 30_000 && bytes[20_000..].iter().all(|&byte| byte == 7), "it grew");
    assert!(bytes[7..20_000].iter().all(|&byte| byte == 0));
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    cache.fallocate(ROOT, handle, punch, 21_000, 5_000).expect("punched");
    let mut all = vec![0; 30_000];
    assert_eq!(cache.read(ROOT, handle, 0, &mut all).expect("read"), 30_000);
    let (bytes, whole) = read(&seen, 0, 40_000);
    assert!(!whole || bytes == all, "a punched range is asked for, or zeros");
    set_size(&cache, node, 21_500);
    set_size(&cache, node, 30_000);
    let mut all = vec![0; 30_000];
    assert_eq!(cache.read(ROOT, handle, 0, &mut all).expect("read"), 30_000);
    assert!(all[21_000..].iter().all(|&byte| byte == 0));
    assert_eq!(read(&seen, 0, 40_000), (all, true), "after all of it was read in again");
    cache.release(handle);
    // A thread that reads ahead may keep it for a moment.
    let released = Instant::now();
    while read(&seen, 0, 10) != (vec![], false) {
        assert!(released.elapsed() < Duration::from_secs(20), "nobody keeps it");
        std::thread::yield_now();
    }
    let writer = cache.open(ROOT, node, OpenFlags::WRITE_ONLY).expect("opened");
    assert_eq!(cache.segment(writer, &lease()).expect_err("not readable").errno(), Errno::EBADF);
    cache.release(writer);
}

#[test]
fn a_file_of_which_nothing_is_cached_has_a_view_too() {
    let (cache, handle, node) = cache(64 << 20);
    set_size(&cache, node, 10_000);
    let seen = view(&cache, handle);
    assert_eq!(read(&seen, 0, 100), (vec![], false));
    let mut all = vec![1; 10_000];
    assert_eq!(cache.read(ROOT, handle, 0, &mut all).expect("read"), 10_000);
    assert_eq!(read(&seen, 0, 20_000), (all, true));
    cache.release(handle);
}

#[test]
fn a_block_that_changes_otherwise_than_by_a_write_gets_another_generation() {
    use std::os::unix::fs::FileExt;
    let (cache, handle, node) = cache(64 << 20);
    cache.write(ROOT, handle, 0, &[1; 4 * BLOCK]).expect("written");
    let map = std::fs::File::from(cache.segment(handle, &lease()).expect("a segment").map);
    let word = |block: u64| {
        let mut word = [0; 4];
        map.read_exact_at(&mut word, 4096 + block * 4).expect("a word");
        u32::from_le_bytes(word)
    };
    let changed = |change: &dyn Fn()| {
        let before = [0, 1, 2, 3].map(word);
        change();
        [0, 1, 2, 3].map(|block| word(block) != before[block as usize])
    };
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    let written = changed(&|| assert_eq!(cache.write(ROOT, handle, 100, &[2; 5000]).expect("written").count, 5000));
    assert_eq!(written, [false; 4]);
    let punched = changed(&|| cache.fallocate(ROOT, handle, punch, 5000, 100).expect("punched"));
    assert_eq!(punched, [false, true, false, false], "a part of a block that stays");
    let cut = changed(&|| set_size(&cache, node, 3 * BLOCK as u64 - 10));
    assert_eq!(cut, [false, false, true, true]);
    cache.release(handle);
}

#[test]
fn a_file_that_outgrows_its_map_gets_another_one() {
    let (cache, handle, _) = cache(64 << 20);
    cache.write(ROOT, handle, 0, &[1; BLOCK]).expect("written");
    let old = view(&cache, handle);
    cache.write(ROOT, handle, 5 << 20, &[2; BLOCK]).expect("written");
    assert_eq!(read(&old, 5 << 20, 10), (vec![], false), "beyond the map");
    assert!(old.is_over(5 << 20) && !old.is_over(0));
    let new = view(&cache, handle);
    assert_eq!(read(&new, 5 << 20, 10), (vec![2; 10], true));
    assert_eq!(read(&old, 0, 10), (vec![], false));
    assert!(old.is_over(0));
    assert_eq!(read(&new, 0, 10), (vec![1; 10], true));
}

#[test]
fn what_clients_get_cannot_be_written_and_what_their_faults_bring_back_goes_again() {
    let (cache, handle, _) = cache(64 << 20);
    cache.write(ROOT, handle, 0, &[1; 1 << 20]).expect("written");
    cache.fsync(ROOT, handle, poolfs_libservice::Durability::All).expect("synced");
    let segment = cache.segment(handle, &lease()).expect("a segment");
    let refused = |file: &dyn std::os::fd::AsRawFd| {
        let again = std::fs::OpenOptions::new().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()));
        again.expect_err("a way to write").raw_os_error()
    };
    assert_eq!([refused(&segment.map), refused(&segment.data)], [Some(libc::EROFS); 2]);
    let length = 4 << 20;
    // SAFETY: a new mapping; its bytes are only read.
    let mapped = unsafe {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&segment.data);
        libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, fd, 0)
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    // Behind the file there are holes as far as the map reaches: whoever touches them makes pages of them.
    for at in (0..length).step_by(BLOCK) {
        // SAFETY: within the mapping, which is as long as the file.
        let _ = unsafe { mapped.cast::<u8>().add(at).read_volatile() };
    }
    let file = std::fs::File::from(segment.data.as_fd().try_clone_to_owned().expect("a descriptor"));
    let held = || file.metadata().expect("metadata").blocks() * 512;
    assert!(held() >= 4 << 20, "the test brought nothing back");
    let deadline = Instant::now() + Duration::from_secs(20);
    while held() > 2 << 20 {
        assert!(Instant::now() < deadline, "{} bytes are held", held());
        std::thread::sleep(Duration::from_millis(50));
    }
    cache.release(handle);
    // SAFETY: mapped above, and not used after this.
    unsafe { libc::munmap(mapped, length) };
}

/// Bytes of the mapping at `address` that are mapped by huge pages.
fn huge_bytes_at(address: usize) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("read");
    let mapping = smaps.split_once(&format!("{address:x}-")).expect("mapped").1;
    let line = mapping.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

#[test]
fn what_is_left_alone_is_held_in_huge_pages_until_it_is_taken_away() {
    const HUGE: usize = poolfs_ipc::memory::HUGE_PAGE;
    if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        eprintln!("this kernel has no huge pages");
        return;
    }
    let (cache, handle, _) = cache(64 << 20);
    let bytes: Vec<u8> = (0..(2 * HUGE + 5 * BLOCK) as u64).map(|at| (at % 251 + at / 4096) as u8).collect();
    cache.write(ROOT, handle, 0, &bytes).expect("written");
    cache.fsync(ROOT, handle, poolfs_libservice::Durability::All).expect("synced");
    let seen = view(&cache, handle);
    let (data, _) = seen.ranges().data;
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(read(&seen, 0, bytes.len()) == (bytes.clone(), true));
        if huge_bytes_at(data) == 2 * HUGE as u64 {
            break;
        }
        assert!(Instant::now() < deadline, "{} bytes in huge pages", huge_bytes_at(data));
        std::thread::sleep(Duration::from_millis(100));
    }
    let segment = std::fs::File::from(cache.segment(handle, &lease()).expect("a segment").data);
    let held = || segment.metadata().expect("metadata").blocks() * 512;
    assert_eq!(held(), bytes.len() as u64, "no more than was there");
    // An ordinary write changes bytes, and takes none away.
    cache.write(ROOT, handle, 100, b"written").expect("written");
    assert_eq!((read(&seen, 100, 7), huge_bytes_at(data)), ((b"written".to_vec(), true), 2 * HUGE as u64));
    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
    cache.fallocate(ROOT, handle, punch, HUGE as u64 + 8192, 4096).expect("punched");
    assert_eq!(held(), (bytes.len() - BLOCK) as u64);
    let (before, after) = (HUGE + 8192, HUGE + 12288);
    assert_eq!(read(&seen, HUGE as u64, 8192), (bytes[HUGE..before].to_vec(), true));
    let (hole, whole) = read(&seen, before as u64, BLOCK);
    assert!(!whole || hole == [0; BLOCK]);
    assert!(read(&seen, after as u64, bytes.len()) == (bytes[after..].to_vec(), true));
    assert_eq!(huge_bytes_at(data), HUGE as u64, "the other one stays");
}

/// Block `block` when it was written `version` times: every byte tells the block or the version, because a copy of bytes that are just
/// being changed may end between any two of them.
fn content(block: u64, version: u64) -> Vec<u8> {
    let version = u64::from(u32::from_le_bytes([version as u8; 4]));
    // No word is zero: that is what a hole reads as.
    ((block + 1) << 32 | version).to_le_bytes().repeat(BLOCK / 8)
}

struct Written {
    begun: Vec<AtomicU64>,
    done: Vec<AtomicU64>,
}

/// Whether a word can be of `block`, each byte written between the two versions.
fn is_of(word: u64, block: u64, oldest: u64, newest: u64) -> bool {
    let is_new = |byte: u8| u64::from(byte.wrapping_sub(oldest as u8)) <= newest - oldest;
    word >> 32 == block + 1 && (word as u32).to_le_bytes().into_iter().all(is_new)
}

fn race(blocks: u64, cuts: bool, time: Duration) -> u64 {
    let (cache, handle, node) = cache(1 << 20);
    for block in 0..blocks {
        cache.write(ROOT, handle, block * BLOCK as u64, &content(block, 0)).expect("written");
    }
    let count = || (0..blocks).map(|_| AtomicU64::new(0)).collect();
    let written = Written { begun: count(), done: count() };
    let stop = AtomicBool::new(false);
    let direct = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (cache, written, stop, direct) = (&cache, &written, &stop, &direct);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(reader);
                let mut seen = view(cache, handle);
                while !stop.load(Ordering::Relaxed) {
                    let (block, many) = (random.u64(0..blocks), random.u64(1..=8));
                    let many = many.min(blocks - block);
                    let oldest: Vec<u64> =
                        (block..block + many).map(|at| written.done[at as usize].load(Ordering::SeqCst)).collect();
                    let offset = block * BLOCK as u64;
                    let (mut bytes, whole) = read(&seen, offset, many as usize * BLOCK);
                    direct.fetch_add(u64::from(whole), Ordering::Relaxed);
                    if !whole {
                        if seen.is_over(offset) {
                            seen = view(cache, handle);
                        }
                        let mut rest = vec![0; many as usize * BLOCK - bytes.len()];
                        let got = cache.read(ROOT, handle, offset + bytes.len() as u64, &mut rest).expect("read");
                        bytes.extend(&rest[..got]);
                    }
                    assert!(cuts || bytes.len() == many as usize * BLOCK, "short: {}", bytes.len());
                    for (index, part) in bytes.chunks_exact(BLOCK).enumerate() {
                        let at = block + index as u64;
                        let newest = written.begun[at as usize].load(Ordering::SeqCst);
                        let zeros = part.chunks_exact(8).filter(|word| *word == [0; 8]).count();
                        assert!(zeros == 0 || zeros == BLOCK / 8, "block {at} was cut while it was copied");
                        for word in part.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight")))
                        {
                            let fits = is_of(word, at, oldest[index], newest) || (cuts && word == 0);
                            assert!(fits, "block {at}: {:x} is not within {} and {newest}", word, oldest[index]);
                        }
                    }
                }
            });
        }
        let mut random = fastrand::Rng::with_seed(77);
        let end = Instant::now() + time;
        let mut writes = 0u64;
        while Instant::now() < end {
            writes += 1;
            let block = random.u64(0..blocks);
            let times = written.begun[block as usize].fetch_add(1, Ordering::SeqCst) + 1;
            cache.write(ROOT, handle, block * BLOCK as u64, &content(block, times)).expect("written");
            written.done[block as usize].store(times, Ordering::SeqCst);
            if cuts && writes.is_multiple_of(64) {
                let half = blocks * BLOCK as u64 / 2;
                set_size(&cache, node, half);
                set_size(&cache, node, blocks * BLOCK as u64);
            }
            if writes.is_multiple_of(256) {
                let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                let block = random.u64(0..blocks);
                if cuts {
                    cache.fallocate(ROOT, handle, punch, block * BLOCK as u64, BLOCK as u64).expect("punched");
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    cache.release(handle);
    direct.into_inner()
}

fn race_time() -> Duration {
    Duration::from_secs(if std::env::var_os("POOLFS_SOAK").is_some() { 30 * 60 } else { 3 })
}

#[test]
fn readers_see_whole_blocks_while_the_cache_is_too_small_and_others_write() {
    // Twice as much as fits: every other read finds something evicted.
    let direct = race(512, false, race_time());
    println!("soak: {direct} reads without a request of a file twice as large as the cache");
    assert!(direct > 100, "hardly a read went without a request");
}

#[test]
fn readers_see_blocks_or_zeros_while_others_cut_and_punch() {
    let direct = race(200, true, race_time());
    println!("soak: {direct} reads without a request of a file that others cut and punch");
    assert!(direct > 100, "hardly a read went without a request");
}

#[test]
fn maps_of_sparse_files_are_charged_and_take_no_memory_for_what_is_not_there() {
    let limit = 16 << 20;
    let pool = CachePool::new(CacheConfig::with_limit(limit)).expect("a pool");
    let cache = Cache::new(&pool, Memory::new());
    let (mut opened, mut maps) = (Vec::new(), Vec::new());
    for number in 0..40 {
        let name = format!("file{number}");
        let name = Name::new(name.as_bytes()).expect("a name");
        let (entry, handle) = cache.create(ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).expect("created");
        set_size(&cache, entry.node, 8 << 30);
        opened.push((entry.node, handle));
        maps.push(std::fs::File::from(cache.segment(handle, &lease()).expect("a segment").map));
    }
    let held = || maps.iter().map(|map| map.metadata().expect("attributes").blocks() * 512).sum::<u64>();
    assert!(held() <= 40 * 8192, "{} bytes of maps in which nothing is", held());
    // A block of each page of each map, which are 160 MiB.
    let mut bytes = [1; 10];
    for &(_, handle) in &opened {
        for at in 0..1024 {
            assert_eq!(cache.read(ROOT, handle, at << 22, &mut bytes).expect("read"), 10);
        }
    }
    assert_eq!(bytes, [0; 10]);
    assert!(held() > 40 * 8192, "some have found room");
    assert!(held() <= 40 * 8192 + limit / 16, "{} bytes of maps", held());
    let charged = pool.statistics().used_bytes;
    assert!(charged >= held().min(limit / 4), "{charged} bytes are charged");
    opened.iter().for_each(|&(node, _)| set_size(&cache, node, 1));
    assert!(held() <= 40 * 8192 + limit / 16, "{} bytes of maps whose files were cut", held());
    opened.iter().for_each(|&(_, handle)| cache.release(handle));
    let released = Instant::now();
    while held() > 0 {
        assert!(released.elapsed() < Duration::from_secs(20), "{} bytes of maps that have ended", held());
        std::thread::yield_now();
    }
}

#[test]
fn what_readers_bring_back_of_a_map_goes_again() {
    use std::os::unix::fs::FileExt;
    let (cache, handle, node) = cache(64 << 20);
    set_size(&cache, node, 8 << 30);
    let segment = cache.segment(handle, &lease()).expect("a segment");
    let seen = SegmentView::new(&segment.map, &segment.data, segment.capacity).expect("a view");
    for at in 0..1024 {
        assert_eq!(read(&seen, at << 22, 1), (vec![], false), "a look at its word");
    }
    let map = std::fs::File::from(segment.map);
    let begun = Instant::now();
    while map.metadata().expect("attributes").blocks() * 512 > 128 << 10 {
        assert!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::yield_now();
    }
    let mut byte = [0];
    assert_eq!(cache.read(ROOT, handle, 1 << 30, &mut byte).expect("read"), 1);
    assert_eq!(read(&seen, 1 << 30, 1), (vec![0], true), "its words still are those that the service writes");
    map.read_exact_at(&mut byte, 0).expect("its head");
    cache.release(handle);
}
