//! Test support: a limited branch as the service builds it (a backend, its account, optionally compact files, a cache, the
//! limit).

use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_cache::{Cache, CacheConfig, CachePool};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Caller, Errno, HandleId, Name, NodeId, OpenFlags};
use poolfs_local::{Local, LocalOptions};
use poolfs_quota::{Accepted, Account, QuotaLimit, UsageAccounting};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

pub const ROOT: &Caller = &Caller::ROOT;
pub const BLOCK: u64 = 4096;

pub struct Stack {
    pub top: Arc<dyn Libservice>,
    pub account: Arc<Account>,
    /// Done beside the next wait for room.
    pub meanwhile: Arc<Mutex<Option<Meanwhile>>>,
    _pool: Arc<CachePool>,
}

type Meanwhile = Box<dyn FnOnce() + Send>;

struct Below {
    cache: Arc<Cache>,
    meanwhile: Arc<Mutex<Option<Meanwhile>>>,
}

impl Accepted for Below {
    fn dirty_bytes(&self) -> u64 {
        self.cache.dirty_bytes()
    }

    fn wait_for_room(&self, enough: &mut dyn FnMut() -> bool) -> bool {
        let meanwhile = self.meanwhile.lock().unwrap().take();
        std::thread::scope(|scope| {
            meanwhile.into_iter().for_each(|meanwhile| drop(scope.spawn(meanwhile)));
            self.cache.wait_for_room(enough)
        })
    }
}

impl Stack {
    pub fn over(backend: Arc<dyn Libservice>, limit: u64) -> Self {
        Self::with(backend, limit, |measured| measured)
    }

    /// Over a directory, in which files are compact where a layout is given.
    pub fn at(directory: &Path, layout: Option<Layout>, limit: u64) -> Self {
        let local = Local::open(directory, LocalOptions::default()).expect("a directory");
        Self::with(local, limit, |measured| match layout {
            Some(_) => Bcow::new(BcowConfig { layout, ..BcowConfig::new(measured) }),
            None => measured,
        })
    }

    fn with(
        backend: Arc<dyn Libservice>,
        limit: u64,
        between: impl FnOnce(Arc<dyn Libservice>) -> Arc<dyn Libservice>,
    ) -> Self {
        Self::counted(backend, Account::new(limit), between)
    }

    /// Over a directory of a filesystem in memory.
    pub fn in_memory(directory: &Path, limit: u64) -> Self {
        let local = Local::open(directory, LocalOptions::default()).expect("a directory");
        Self::counted(local, Account::in_memory(limit), |measured| measured)
    }

    fn counted(
        backend: Arc<dyn Libservice>,
        account: Arc<Account>,
        between: impl FnOnce(Arc<dyn Libservice>) -> Arc<dyn Libservice>,
    ) -> Self {
        let measured = UsageAccounting::open(backend, &account).expect("counted");
        let pool = CachePool::new(CacheConfig::with_limit(32 << 20)).expect("a cache");
        let cache = Cache::new(&pool, between(measured));
        let meanwhile = Arc::default();
        let accepted = Box::new(Below { cache: Arc::clone(&cache), meanwhile: Arc::clone(&meanwhile) });
        let top = QuotaLimit::new(cache, &account, accepted);
        Stack { top, account, meanwhile, _pool: pool }
    }

    pub fn create(&self, name: &str) -> (NodeId, HandleId) {
        let (entry, handle) = self
            .top
            .create(ROOT, NodeId::ROOT, self::name(name), 0o644, OpenFlags::READ_WRITE)
            .expect("room for a name");
        (entry.node, handle)
    }

    /// Writes one byte in each block of a new file until there is no room, or `most` are written; returns how many.
    pub fn fill(&self, handle: HandleId, first: u64, most: u64) -> u64 {
        for block in 0..most {
            match self.top.write(ROOT, handle, (first + block) * BLOCK, &[7]) {
                Ok(written) => assert_eq!(written.count, 1),
                Err(error) => {
                    assert_eq!(error.errno(), Errno::ENOSPC, "{error}");
                    return block;
                }
            }
        }
        most
    }
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

/// What `du` counts, bytes.
pub fn on_disk(directory: &Path) -> u64 {
    let mut seen = std::collections::HashSet::new();
    let mut sum = 0;
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = path.symlink_metadata().expect("there");
        sum += if seen.insert(metadata.ino()) { metadata.blocks() * 512 } else { 0 };
        if metadata.is_dir() {
            left.extend(path.read_dir().expect("readable").map(|entry| entry.expect("readable").path()));
        }
    }
    sum
}
