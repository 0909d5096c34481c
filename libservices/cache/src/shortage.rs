//! Memory shortage: the cache works with less memory, and gives no segments to clients.
//!
//! **Retiring.** A client that has a segment can keep its pages (in a pipe, by `splice`) after they are taken away: the kernel
//! goes on charging them to this process. So while memory is short no segment is given, and those that were given are *retired*:
//! their views end, nothing more enters them, their clean blocks are dropped, dirty ones as soon as they are clean, and then the
//! segment goes. From then on the content of their files is cached in other segments, of which no client has a descriptor.
//!
//! **Measuring.** The cache measures whether the memory came back, and reports it to the holders whose clients had the segment
//! ([`crate::weighing`]). It does so as well whenever a large part of such a file is truncated, punched or removed.
//!
//! **Pinned files.** Programs that the kernel was given, and files that were lent ([`crate::text`]), are such segments, too:
//! their readers may keep pages in the same way. They stay as long as they are pinned. Once they are not, nobody can come to keep
//! more of their pages, but their memory may have been reused before anybody measures. So for a while after each measurement,
//! what is no longer pinned is taken away at once.

use crate::blocks::BLOCK;
use crate::budget::Look;
use crate::cache_pool::CachePool;
use crate::content::Content;
use crate::limits::Weigh;
use crate::node::Node;
use crate::pool::Pool;
use crate::sync::read;
use crate::weighing::Kept;
use std::sync::Weak;
use std::sync::atomic::Ordering;

/// Most of all files at a time.
const PROBES_BYTES_MAX: u64 = 64 << 20;
/// So much of what is let go after that is taken away as well.
const WEIGHED_AFTER_PROBE: u64 = 64 << 20;

impl Pool {
    /// Takes away what exceeds what may be used, as far as it is clean.
    fn fit(&self) {
        let beyond = self.budget.used().saturating_sub(self.budget.allowed());
        if beyond > 0 && self.budget.evict(beyond) < beyond {
            self.hurry();
        }
    }
}

impl Node {
    /// Ends what clients read by themselves, and drops what is clean of it. `kept` is what the process is counted for.
    fn retire(&self, kept: &Kept<'_>) {
        let (given, before) = self.update(None, |state| {
            // A segment that came after the one that clients were given is known to none of them.
            let was_given = state.huge.is_some() || !state.given.is_empty();
            if state.is_pinned() || !was_given || !matches!(state.content, Content::Segment(_)) {
                return (Vec::new(), 0);
            }
            let (given, before) = (state.given.clone(), state.blocks.counts().resident * BLOCK);
            state.is_retiring = true;
            state.end_view();
            (given, before)
        });
        if before > 0 {
            self.take_away(&given, kept, 0, u64::MAX);
        }
    }

    /// Whether somebody has the segment who keeps what is taken away.
    fn is_kept(&self) -> bool {
        read(&self.state).given.iter().filter_map(Weak::upgrade).any(|holder| holder.is_suspended())
    }
}

impl CachePool {
    /// Has `look` called, by whoever comes to use more, when as much more is used as was last said by [`CachePool::look_after`]; once.
    pub fn watch(&self, look: Look) {
        self.pool.budget.watch(look);
    }

    /// Has `kept` say what the process is counted for, and the kernel cannot drop by itself, when content is taken away that clients have; once.
    pub fn weigh_by(&self, kept: Box<Weigh>) {
        let _ = self.pool.kept.set(kept);
    }

    /// When so many more bytes are used somebody is to look.
    pub fn look_after(&self, bytes: u64) {
        self.pool.budget.look_after(bytes);
    }

    /// So many more bytes of the process's memory are used, which are not charged to the cache.
    pub fn grew(&self, bytes: u64) {
        self.pool.budget.grew(bytes);
    }

    /// The cache may use so much from here on, but never less than what it works with, nor more than its limit. What it has beyond that leaves
    /// as soon as it can. Returns what it may use.
    pub fn allow(&self, bytes: u64) -> u64 {
        let allowed = self.pool.budget.allow(bytes);
        self.pool.fit();
        allowed
    }

    /// From here on clients and the kernel are given none of the cache's memory, or may be again.
    pub fn set_short(&self, is_short: bool) {
        self.pool.is_short.store(is_short, Ordering::Release);
        if is_short {
            self.pool.hurry();
        }
    }

    /// Whether nothing of the cache's memory is given away.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.pool.is_short()
    }

    /// Retires the segments that clients have, as far as what is in them is clean; the rest when this is called again. `kept` is what the process is
    /// counted for.
    pub fn retire_segments(&self, kept: &Kept<'_>) {
        self.background.lists.viewed_files().iter().for_each(|node| node.retire(kept));
    }

    /// The same of those only that somebody has who keeps what is taken away ([`Holder::is_suspended`](poolfs_libservice::Holder::is_suspended)).
    pub fn retire_kept_segments(&self, kept: &Kept<'_>) {
        self.background.lists.viewed_files().iter().filter(|node| node.is_kept()).for_each(|node| node.retire(kept));
    }

    /// Takes away a little of what clients have, and tells whose clients have it whether its memory came back; so it does with what the kernel and
    /// processes let go next. `turn`: others each time.
    pub fn probe_segments(&self, turn: usize, kept: &Kept<'_>) {
        self.pool.weighing_due.store(WEIGHED_AFTER_PROBE, Ordering::Relaxed);
        let mut viewed = self.background.lists.viewed_files();
        let count = viewed.len();
        viewed.rotate_left(turn.checked_rem(count).unwrap_or(0));
        let mut taken = 0;
        for node in viewed {
            taken += node.probe(turn, kept);
            if taken >= PROBES_BYTES_MAX {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::CHUNK_BLOCKS;
    use crate::cache::Cache;
    use crate::config::CacheConfig;
    use crate::weighing::PIECE_BYTES;
    use poolfs_libservice::{Durability, Holder, Lease, Libservice, Memory, SharedContent};
    use poolfs_types::{AllocateMode, Caller, HandleId, Name, NodeId, OpenFlags, SetAttributes};
    use std::cell::Cell;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    const ROOT: Caller = Caller::ROOT;
    const FILE_BYTES: u64 = 6 << 20;
    const CHUNK_BYTES: u64 = CHUNK_BLOCKS * BLOCK;
    /// What the process is counted for besides the cache.
    const BASE: u64 = 100 << 20;

    #[derive(Default)]
    struct Clients {
        taken: AtomicU64,
        stayed: AtomicU64,
    }

    impl Holder for Clients {
        fn stayed(&self, taken: u64, stayed: u64) {
            self.taken.fetch_add(taken, Ordering::Relaxed);
            self.stayed.fetch_add(stayed, Ordering::Relaxed);
        }

        fn is_suspended(&self) -> bool {
            false
        }
    }

    struct Given(Arc<Clients>);

    impl Lease for Given {
        fn revoke(&self) {}

        fn holder(&self) -> Option<Arc<dyn Holder>> {
            Some(Arc::clone(&self.0) as Arc<dyn Holder>)
        }
    }

    /// What is told of the clients of a file when it is taken away, and `kept` says what the process is counted for: by how often it was asked, and what the
    /// cache uses.
    fn told(kept: impl Fn(u64, u64) -> u64) -> (u64, u64) {
        let asked = Cell::new(0);
        told_by(&|pool, _, _| {
            pool.retire_segments(&|| {
                asked.set(asked.get() + 1);
                Some(kept(asked.get(), pool.pool.budget.used()))
            });
        })
    }

    fn told_by(take: &dyn Fn(&CachePool, &Cache, HandleId)) -> (u64, u64) {
        let (pool, cache) = idle();
        let (entry, handle) = cache.create(&ROOT, NodeId::ROOT, name(), 0o644, OpenFlags::READ_WRITE).unwrap();
        cache.write(&ROOT, handle, 0, &vec![7; FILE_BYTES as usize]).unwrap();
        cache.fsync(&ROOT, handle, Durability::All).unwrap();
        let clients = Arc::new(Clients::default());
        let lease: Arc<dyn Lease> = Arc::new(Given(Arc::clone(&clients)));
        drop(cache.segment(handle, &lease).unwrap());
        cache.forget(entry.node, 1);
        take(&pool, &cache, handle);
        (clients.taken.load(Ordering::Relaxed), clients.stayed.load(Ordering::Relaxed))
    }

    /// A cache whose threads do nothing by themselves.
    fn idle() -> (Arc<CachePool>, Arc<Cache>) {
        let hour = Duration::from_secs(3600);
        let pool =
            CachePool::new(CacheConfig { tick: hour, expire: hour, ..CacheConfig::with_limit(64 << 20) }).unwrap();
        let cache = Cache::new(&pool, Memory::new());
        (pool, cache)
    }

    /// Retires what clients have. `kept` says, by how often it was asked, what the process is counted for.
    fn retire_by(pool: &CachePool, kept: impl Fn(u64) -> u64) {
        let asked = Cell::new(0);
        pool.retire_segments(&|| {
            asked.set(asked.get() + 1);
            Some(kept(asked.get()))
        });
    }

    /// Another file of the same length, all of which is cached.
    fn another(cache: &Cache) -> HandleId {
        let name = Name::new(b"another").unwrap();
        let (_, handle) = cache.create(&ROOT, NodeId::ROOT, name, 0o644, OpenFlags::READ_WRITE).unwrap();
        cache.write(&ROOT, handle, 0, &vec![7; FILE_BYTES as usize]).unwrap();
        handle
    }

    fn name() -> Name<'static> {
        Name::new(b"f").unwrap()
    }

    #[test]
    fn who_keeps_pages_of_what_is_cut_punched_or_removed_is_known() {
        type Take = dyn Fn(&Cache, HandleId);
        let takes: [&Take; 3] = [
            &|cache, handle| {
                let node = cache.lookup(&ROOT, NodeId::ROOT, name()).unwrap().node;
                let changes = SetAttributes { size: Some(0), ..SetAttributes::default() };
                cache.setattr(&ROOT, node, &changes, Some(handle)).unwrap();
            },
            &|cache, handle| {
                let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                cache.fallocate(&ROOT, handle, punch, 0, FILE_BYTES).unwrap();
            },
            &|cache, handle| {
                cache.unlink(&ROOT, NodeId::ROOT, name()).unwrap();
                cache.release(handle);
            },
        ];
        for take in takes {
            for stays in [false, true] {
                let (taken, stayed) = told_by(&|pool, cache, handle| {
                    let inner = Arc::clone(&pool.pool);
                    let most = inner.budget.used();
                    pool.weigh_by(Box::new(move || Some(if stays { most } else { inner.budget.used() })));
                    take(cache, handle);
                });
                assert_eq!((taken, stayed), (FILE_BYTES, if stays { FILE_BYTES } else { 0 }));
            }
        }
    }

    #[test]
    fn who_keeps_pages_is_told_from_who_does_not() {
        assert_eq!(told(|_, used| BASE + used), (FILE_BYTES, 0), "all of it comes back");
        assert_eq!(told(|_, _| BASE), (FILE_BYTES, FILE_BYTES), "all of it stays");
    }

    /// What leaves the cache elsewhere at that moment, and stays in memory because others keep it, is not counted for who has this file.
    #[test]
    fn nobody_is_taken_for_one_who_keeps_pages_because_others_do() {
        // From the second question on: in the middle of the first piece.
        let others = |asked: u64, used: u64| BASE + used + if asked >= 2 { 50 << 20 } else { 0 };
        assert_eq!(told(others), (FILE_BYTES, 0));
    }

    /// In each piece as much comes into the cache as is taken away, or leaves it and stays.
    #[test]
    fn nobody_is_taken_for_one_who_keeps_pages_because_of_what_comes_and_goes_elsewhere() {
        let comes = told_by(&|pool, cache, _| {
            let another = another(cache);
            retire_by(pool, |asked| {
                if asked % 2 == 0 {
                    let end = FILE_BYTES + asked * PIECE_BYTES;
                    cache.write(&ROOT, another, end, &vec![8; PIECE_BYTES as usize]).unwrap();
                }
                BASE + pool.pool.budget.used()
            });
        });
        assert_eq!(comes, (FILE_BYTES, 0));
        let leaves = told_by(&|pool, cache, _| {
            let (another, stays) = (another(cache), Cell::new(0));
            retire_by(pool, |asked| {
                if asked % 2 == 0 {
                    let before = pool.pool.budget.used();
                    let punch = AllocateMode::PUNCH_HOLE | AllocateMode::KEEP_SIZE;
                    cache.fallocate(&ROOT, another, punch, (asked / 2 - 1) * PIECE_BYTES, PIECE_BYTES).unwrap();
                    stays.set(stays.get() + before - pool.pool.budget.used());
                }
                BASE + pool.pool.budget.used() + stays.get()
            });
        });
        assert_eq!(leaves, (FILE_BYTES, 0));
    }

    #[test]
    fn the_piece_counts_of_which_least_stays_wherever_it_is() {
        for back in 1..=FILE_BYTES / PIECE_BYTES {
            let told = told_by(&|pool, _, _| {
                let had = pool.pool.budget.used();
                // Only of one piece memory comes back: between two questions.
                retire_by(pool, |asked| BASE + if asked < 2 * back { had } else { had - PIECE_BYTES });
            });
            assert_eq!(told, (FILE_BYTES, 0), "the piece {back}");
        }
    }

    #[test]
    fn a_small_piece_does_not_hide_who_keeps_large_ones() {
        let first_is_clean = |cache: &Cache, handle| {
            cache.write(&ROOT, handle, CHUNK_BYTES, &vec![8; (FILE_BYTES - CHUNK_BYTES) as usize]).unwrap();
        };
        let told = told_by(&|pool, cache, handle| {
            first_is_clean(cache, handle);
            let had = pool.pool.budget.used();
            retire_by(pool, |asked| {
                if asked == 3 {
                    cache.fsync(&ROOT, handle, Durability::All).unwrap();
                }
                BASE + if asked < 2 { had } else { had - CHUNK_BYTES }
            });
        });
        assert_eq!(told, (FILE_BYTES, FILE_BYTES));
        let told = told_by(&|pool, cache, handle| {
            first_is_clean(cache, handle);
            retire_by(pool, |_| BASE);
        });
        assert_eq!(told, (CHUNK_BYTES, CHUNK_BYTES), "there is no other");
    }

    #[test]
    fn known_zeros_do_not_hide_who_keeps_what_is_behind_them() {
        let told = told_by(&|pool, cache, _| {
            let node = cache.lookup(&ROOT, NodeId::ROOT, name()).unwrap().node;
            let size = FILE_BYTES + 6000 * CHUNK_BYTES;
            cache.setattr(&ROOT, node, &SetAttributes { size: Some(size), ..SetAttributes::default() }, None).unwrap();
            let zeros = FILE_BYTES / BLOCK..size / BLOCK;
            let node = cache.core.get(node).unwrap();
            node.update(None, |state| state.blocks.change(zeros, |chunk, mask| chunk.zero |= mask));
            pool.probe_segments((FILE_BYTES / CHUNK_BYTES) as usize, &|| Some(BASE));
        });
        assert_eq!(told, (FILE_BYTES, FILE_BYTES));
    }

    #[test]
    fn no_huge_pages_are_made_while_memory_is_short() {
        for is_short in [false, true] {
            let (pool, cache) = idle();
            let (entry, handle) = cache.create(&ROOT, NodeId::ROOT, name(), 0o644, OpenFlags::READ_WRITE).unwrap();
            cache.write(&ROOT, handle, 0, &vec![7; FILE_BYTES as usize]).unwrap();
            let lease: Arc<dyn Lease> = Arc::new(Given(Arc::default()));
            drop(cache.segment(handle, &lease).unwrap());
            pool.set_short(is_short);
            pool.background.visit_segments();
            let node = cache.core.get(entry.node).unwrap();
            // What is whole at two visits is to be in huge pages: this is the first or the second.
            let due = node.update(None, |state| state.huge.as_mut().unwrap().visit(&state.blocks));
            assert_eq!(due.is_empty(), is_short);
        }
    }
}
