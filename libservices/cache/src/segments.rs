//! Segments: the cached content of larger files, as named files of a private tmpfs.
//!
//! **Lifetime.** Without a place the mount exists only through this process's descriptor: when the process ends, however it ends,
//! the kernel frees it. With a place the tmpfs is mounted there, in a directory of its own, and only the orderly end of the
//! process unmounts it. Dirty data of a process that died is found there ([`CrashRecovery`](crate::CrashRecovery)).
//!
//! **Descriptors.** Files are opened on demand and only a bounded number stays open, because the limit of descriptors is far
//! below the number of files worth caching. A file that clients may have is different. A client with a descriptor of it could
//! take a lease (`F_SETLEASE`), and the next open here would wait for tens of seconds, with locks held. The kernel grants no
//! lease on a file that somebody has open for writing. So this process keeps such a file open as long as anybody else has it
//! ([`Segment::hold`]), and never has to open it again.

use crate::config::CacheError;
use crate::state_directory::{StateDirectory, check_private};
use poolfs_ipc::segment::{FileNotice, NOTICE_LENGTH, is_used_by_others, read_only_clone};
use quick_cache::sync::Cache as Recent;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Most directories of one place, each what a process has left or uses.
const DIRECTORIES_MAX: u32 = 1024;

/// The tmpfs and the descriptors open in it.
pub(crate) struct SegmentStore {
    root: OwnedFd,
    /// Where it is mounted, if it is: until its process has no use for that any more.
    mounted: Option<PathBuf>,
    is_detached: AtomicBool,
    /// The same for clients: what they open through it they cannot change, whoever they are. Not on every kernel.
    shared: Option<OwnedFd>,
    open: Recent<u64, Arc<File>>,
    /// Files that are kept open, and most of them.
    holds: AtomicUsize,
    holds_max: usize,
    next: AtomicU64,
    /// Whether the kernel tells who has its files open.
    tells_use: OnceLock<bool>,
}

impl SegmentStore {
    /// Mounts the private tmpfs; in a new directory of `place`, if there is one.
    pub(crate) fn new(descriptors_max: usize, holds_max: usize, place: Option<&Path>) -> Result<Self, CacheError> {
        let root = mount_private().map_err(|errno| CacheError::Mount(errno.into()))?;
        let mounted = place.map(|place| attach(&root, place)).transpose().map_err(CacheError::Mount)?;
        let shared = read_only_clone(&root).inspect_err(
            |error| tracing::info!(%error, "no client reads the cache by itself: it cannot be shown read-only"),
        );
        Ok(Self {
            root,
            mounted,
            is_detached: AtomicBool::new(false),
            shared: shared.ok(),
            open: Recent::new(descriptors_max.max(1)),
            holds: AtomicUsize::new(0),
            holds_max,
            next: AtomicU64::new(1),
            tells_use: OnceLock::new(),
        })
    }

    /// The name of a segment.
    pub(crate) fn name(id: u64) -> String {
        format!("{id:016x}")
    }

    /// Where the tmpfs is mounted, if it is.
    pub(crate) fn mounted(&self) -> Option<&Path> {
        self.mounted.as_deref()
    }

    /// Nobody is to find it any more. This process goes on with it.
    pub(crate) fn detach(&self) {
        if let Some(directory) = &self.mounted
            && !self.is_detached.swap(true, Ordering::AcqRel)
            && let Err(error) = self.root.try_clone().and_then(|root| StateDirectory::of(root, directory)?.detach())
        {
            tracing::warn!(directory = %directory.display(), %error, "the cache's memory stays mounted");
        }
    }

    /// Makes a file that is no segment.
    pub(crate) fn named(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(File::from(rustix::fs::openat(&self.root, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    /// Removes such a file.
    pub(crate) fn remove_named(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.root, name, AtFlags::empty())?)
    }

    /// Makes an empty segment.
    pub(crate) fn create(self: &Arc<Self>) -> io::Result<Segment> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.insert(id, Arc::new(self.named(&Self::name(id))?));
        let is_shared = AtomicBool::new(false);
        Ok(Segment { id, store: Arc::clone(self), is_shared, has_the_files_length: false, held: None })
    }

    /// Makes a segment that is as long as its file, for good.
    pub(crate) fn create_with_length(self: &Arc<Self>, length: u64) -> io::Result<Segment> {
        let mut segment = self.create()?;
        segment.with_file(|file| file.set_len(length))?;
        segment.has_the_files_length = true;
        Ok(segment)
    }

    /// Whether clients can be given segments, and the kernel tells when they have let them go.
    pub(crate) fn tells_use(self: &Arc<Self>) -> bool {
        let told = || self.is_shared() && self.create().and_then(|segment| segment.is_used()).is_ok_and(|used| !used);
        *self.tells_use.get_or_init(told)
    }

    /// Whether clients can be given segments.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// A file of `length` zeros without a name, and a read-only descriptor of it. Nothing when clients cannot be given any.
    pub(crate) fn anonymous(self: &Arc<Self>, length: u64) -> io::Result<Option<(File, OwnedFd)>> {
        if !self.is_shared() {
            return Ok(None);
        }
        let segment = self.create()?;
        let file = segment.with_file(|file| {
            file.set_len(length)?;
            file.try_clone()
        })?;
        Ok(Some((file, segment.reader()?)))
    }

    fn file(&self, id: u64) -> io::Result<Arc<File>> {
        if let Some(file) = self.open.get(&id) {
            return Ok(file);
        }
        // No open waits for somebody else's lease.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = Arc::new(File::from(rustix::fs::openat(&self.root, Self::name(id), flags, Mode::empty())?));
        self.open.insert(id, Arc::clone(&file));
        Ok(file)
    }
}

/// A detached tmpfs: huge pages stay off, because a huge page under a partly filled file would hold memory that
/// nobody accounts for.
fn mount_private() -> rustix::io::Result<OwnedFd> {
    let context = mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    mount::fsconfig_set_string(context.as_fd(), "source", "poolfs-memory")?;
    mount::fsconfig_set_string(context.as_fd(), "mode", "0700")?;
    // The budget is the bound. What a reader's fault brings back of a punched range is charged to that reader, and must not
    // take the room of others.
    mount::fsconfig_set_string(context.as_fd(), "size", "0")?;
    mount::fsconfig_set_string(context.as_fd(), "nr_inodes", "0")?;
    // A kernel without transparent huge pages knows no such option, and needs none.
    let _ = mount::fsconfig_set_string(context.as_fd(), "huge", "never");
    mount::fsconfig_create(context.as_fd())?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOATIME;
    mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

impl Drop for SegmentStore {
    fn drop(&mut self) {
        self.detach();
    }
}

/// Mounts the tmpfs in a new directory of `place`, which it names.
fn attach(root: &OwnedFd, place: &Path) -> io::Result<PathBuf> {
    let mut builder = DirBuilder::new();
    builder.mode(0o700).recursive(true).create(place)?;
    builder.recursive(false);
    // Else nobody believes what is found in it.
    check_private(&rustix::fs::lstat(place)?, place)?;
    for number in 1..=DIRECTORIES_MAX {
        let directory = place.join(number.to_string());
        match builder.create(&directory) {
            Ok(()) => {
                let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
                mount::move_mount(root, "", rustix::fs::CWD, &directory, flags)?;
                return Ok(directory);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    let cause = format!("{} has more than {DIRECTORIES_MAX} directories", place.display());
    Err(io::Error::new(io::ErrorKind::QuotaExceeded, cause))
}

/// One file of the tmpfs; removed when dropped.
pub(crate) struct Segment {
    id: u64,
    store: Arc<SegmentStore>,
    /// Clients may have it.
    is_shared: AtomicBool,
    /// Who maps it finds the file's end where it is.
    has_the_files_length: bool,
    /// Keeps it open, by the only description there is that can write.
    held: Option<Hold>,
}

/// A file that is kept open; counted.
struct Hold {
    file: Arc<File>,
    store: Arc<SegmentStore>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.store.holds.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Segment {
    /// What names it in its tmpfs.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file()?.write_all_at(data, offset)
    }

    /// Makes it `length` bytes long, most of them holes, and fit to be mapped by clients: it is never made shorter. One that has its
    /// file's length keeps it.
    pub(crate) fn share(&self, length: u64) -> io::Result<()> {
        self.is_shared.store(true, Ordering::Relaxed);
        if self.has_the_files_length {
            return Ok(());
        }
        self.with_file(|file| if file.metadata()?.len() < length { file.set_len(length) } else { Ok(()) })
    }

    /// Leaves its memory to those who have it mapped, when it is dropped.
    pub(crate) fn leave(&self) {
        self.is_shared.store(false, Ordering::Relaxed);
    }

    /// Keeps it open from here on: to be called before a client has a descriptor of it, unless it is mapped for writing as long as clients
    /// may be given any.
    ///
    /// # Errors
    /// `Unsupported` when as many are kept open as may be; those of opening it.
    pub(crate) fn hold(&mut self) -> io::Result<()> {
        if self.held.is_none() {
            let room = |count: usize| (count < self.store.holds_max).then_some(count + 1);
            let taken = self.store.holds.fetch_update(Ordering::AcqRel, Ordering::Acquire, room);
            taken.map_err(|_| io::ErrorKind::Unsupported)?;
            let store = Arc::clone(&self.store);
            match self.store.file(self.id) {
                Ok(file) => self.held = Some(Hold { file, store }),
                Err(error) => {
                    store.holds.fetch_sub(1, Ordering::AcqRel);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Need not be kept open any more, if nobody else has it. Nobody may be about to get a descriptor of it.
    pub(crate) fn let_go(&mut self) {
        if self.held.is_some() && self.is_used().is_ok_and(|used| !used) {
            self.held = None;
        }
    }

    /// Its file, which is opened if it is not.
    pub(crate) fn file(&self) -> io::Result<Arc<File>> {
        self.held.as_ref().map_or_else(|| self.store.file(self.id), |held| Ok(Arc::clone(&held.file)))
    }

    /// A descriptor that nobody can write by.
    pub(crate) fn reader(&self) -> io::Result<OwnedFd> {
        let shared = self.store.shared.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let reader = rustix::fs::openat(shared, SegmentStore::name(self.id), flags, Mode::empty())?;
        // What was right for the open is none of the client's flags.
        rustix::fs::fcntl_setfl(&reader, OFlags::empty())?;
        Ok(reader)
    }

    /// Whether anybody else has it open or mapped. Not while a descriptor of it is opened: that would fail.
    pub(crate) fn is_used(&self) -> io::Result<bool> {
        self.with_file(|file| is_used_by_others(file))
    }

    /// Bytes of memory that it takes.
    pub(crate) fn allocated(&self) -> io::Result<u64> {
        self.with_file(|file| Ok(file.metadata()?.blocks() * 512))
    }

    /// Uses the file itself.
    pub(crate) fn with_file<R>(&self, use_it: impl FnOnce(&File) -> io::Result<R>) -> io::Result<R> {
        use_it(&*self.file()?)
    }

    pub(crate) fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let file = self.file()?;
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&*file, mode, offset, length)?)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Clients that have mapped it may keep the file, but not its memory.
        if *self.is_shared.get_mut()
            && let Err(error) = self.punch(0, i64::MAX as u64)
        {
            tracing::warn!(segment = self.id, %error, "freeing a cache segment that clients have failed");
        }
        self.store.open.remove(&self.id);
        // Nothing else names the file; a failure would leave memory behind, which the log should tell.
        if let Err(error) = rustix::fs::unlinkat(&self.store.root, SegmentStore::name(self.id), AtFlags::empty()) {
            tracing::warn!(segment = self.id, %error, "removing a cache segment failed");
        }
    }
}

/// A notice in a file of the tmpfs.
pub struct SharedNotice {
    /// Before the mapping, which keeps it open.
    file: Segment,
    notice: FileNotice,
}

impl SharedNotice {
    pub(crate) fn new(store: &Arc<SegmentStore>) -> io::Result<Self> {
        let file = store.create()?;
        file.share(NOTICE_LENGTH as u64)?;
        let notice = file
            .with_file(|file| FileNotice::new(file, true).map_err(|errno| io::Error::from_raw_os_error(errno.raw())))?;
        Ok(Self { file, notice })
    }

    /// The notice.
    #[must_use]
    pub fn notice(&self) -> &FileNotice {
        &self.notice
    }

    /// A descriptor for clients.
    ///
    /// # Errors
    /// Those of opening it.
    pub fn reader(&self) -> io::Result<OwnedFd> {
        self.file.reader()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_libservice::read_with_zeros;

    #[test]
    fn segments_outlive_their_descriptor_and_punched_ranges_read_as_zeros() {
        let store = Arc::new(SegmentStore::new(2, 4, None).unwrap());
        let segments: Vec<_> = (0..40).map(|_| store.create().unwrap()).collect();
        for (n, segment) in segments.iter().enumerate() {
            segment.write(4096, &[n as u8 + 1; 8192]).unwrap();
        }
        assert!(store.open.len() <= 8, "the descriptors are bounded");
        segments[7].punch(4096, 4096).unwrap();
        let mut buffer = [9; 12288];
        read_with_zeros(&segments[7].file().unwrap(), &mut buffer, 0).unwrap();
        assert!(buffer[..8192].iter().all(|&b| b == 0));
        assert!(buffer[8192..].iter().all(|&b| b == 8));
    }
}
