//! Segments: the cached content of larger files, as named files of a tmpfs that is mounted nowhere.
//!
//! The mount exists only through this process's descriptor: when the process ends, however it ends, the kernel frees
//! it. Files are opened on demand and only a bounded number stays open, because the limit of descriptors is far below
//! the number of files worth caching.

use crate::config::CacheError;
use quick_cache::sync::Cache as Recent;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The tmpfs and the descriptors open in it.
pub(crate) struct SegmentStore {
    root: OwnedFd,
    open: Recent<u64, Arc<File>>,
    next: AtomicU64,
}

impl SegmentStore {
    /// Mounts the private tmpfs, large enough for `limit_bytes` of content.
    pub(crate) fn new(limit_bytes: u64, descriptors_max: usize) -> Result<Self, CacheError> {
        let root = mount_private(limit_bytes).map_err(|errno| CacheError::Mount(errno.into()))?;
        Ok(Self { root, open: Recent::new(descriptors_max.max(1)), next: AtomicU64::new(1) })
    }

    fn name(id: u64) -> String {
        format!("{id:016x}")
    }

    /// Makes an empty segment.
    pub(crate) fn create(self: &Arc<Self>) -> io::Result<Segment> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.root, Self::name(id), flags, Mode::RUSR | Mode::WUSR)?;
        self.open.insert(id, Arc::new(File::from(file)));
        Ok(Segment { id, store: Arc::clone(self) })
    }

    fn file(&self, id: u64) -> io::Result<Arc<File>> {
        if let Some(file) = self.open.get(&id) {
            return Ok(file);
        }
        let file = rustix::fs::openat(&self.root, Self::name(id), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let file = Arc::new(File::from(file));
        self.open.insert(id, Arc::clone(&file));
        Ok(file)
    }
}

/// A detached tmpfs: huge pages stay off, because a huge page under a partly filled file would hold memory that
/// nobody accounts for.
fn mount_private(limit_bytes: u64) -> rustix::io::Result<OwnedFd> {
    let context = mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    mount::fsconfig_set_string(context.as_fd(), "mode", "0700")?;
    // Page tables of the tmpfs itself are not counted by its size; the slack is for rounding only.
    mount::fsconfig_set_string(context.as_fd(), "size", (limit_bytes + (4 << 20)).to_string())?;
    mount::fsconfig_set_string(context.as_fd(), "nr_inodes", "0")?;
    // A kernel without transparent huge pages knows no such option, and needs none.
    let _ = mount::fsconfig_set_string(context.as_fd(), "huge", "never");
    mount::fsconfig_create(context.as_fd())?;
    let attributes =
        MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOATIME;
    mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// One file of the tmpfs; removed when dropped.
pub(crate) struct Segment {
    id: u64,
    store: Arc<SegmentStore>,
}

impl Segment {
    pub(crate) fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let file = self.store.file(self.id)?;
        let mut done = 0;
        while done < buffer.len() {
            match file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }

    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.store.file(self.id)?.write_all_at(data, offset)
    }

    pub(crate) fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let file = self.store.file(self.id)?;
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&*file, mode, offset, length)?)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.store.open.remove(&self.id);
        // Nothing else names the file; a failure would leave memory behind, which the log should tell.
        if let Err(error) = rustix::fs::unlinkat(&self.store.root, SegmentStore::name(self.id), AtFlags::empty()) {
            tracing::warn!(segment = self.id, %error, "removing a cache segment failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_outlive_their_descriptor_and_punched_ranges_read_as_zeros() {
        let store = Arc::new(SegmentStore::new(1 << 20, 2).unwrap());
        let segments: Vec<_> = (0..40).map(|_| store.create().unwrap()).collect();
        for (n, segment) in segments.iter().enumerate() {
            segment.write(4096, &[n as u8 + 1; 8192]).unwrap();
        }
        assert!(store.open.len() <= 8, "the descriptors are bounded");
        segments[7].punch(4096, 4096).unwrap();
        let mut buffer = [9; 12288];
        segments[7].read(0, &mut buffer).unwrap();
        assert!(buffer[..8192].iter().all(|&b| b == 0));
        assert!(buffer[8192..].iter().all(|&b| b == 8));
    }
}
