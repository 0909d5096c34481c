//! A disk that records what is done to it, as a file for a loop device.
//!
//! The kernel's own recording device (dm-log-writes) is not available everywhere, so this one is the only file of a small FUSE filesystem
//! that the test serves itself. It is opened for direct I/O: no page cache stands between the loop device and the recording, each write
//! arrives as it was issued, and each flush of the disk as an FSYNC.
//!
//! When the process that serves it is killed, nothing may wait for its answers for ever. So that process never uses what is mounted over
//! the device, and the threads that serve have descriptors and a mount namespace of their own: the process that unmounts what is over the
//! device at its end must not be the one that has it open.

use super::Content;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, MountOption,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use rustix::mount::{UnmountFlags, unmount};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, UNIX_EPOCH};

const DISK: INodeNo = INodeNo(2);
const NAME: &str = "disk";
/// How long the kernel may remember names and attributes: nothing changes.
const FOREVER: Duration = Duration::from_secs(3600);
/// Until the loop device has let go of the file.
const RELEASE_WAIT: Duration = Duration::from_secs(10);

/// What was done to the disk.
#[derive(Clone, Debug)]
pub enum Event {
    /// bytes were written at an offset
    Write(usize, Vec<u8>),
    /// a barrier: all before it is on the disk
    Flush,
}

#[derive(Default)]
struct Recording {
    /// what the disk holds now
    image: Content,
    events: Vec<Event>,
}

type Shared = Arc<Mutex<Recording>>;

fn lock(recording: &Shared) -> MutexGuard<'_, Recording> {
    recording.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device, served until it is dropped.
pub struct RecordingDevice {
    at: PathBuf,
    recording: Shared,
    serving: Option<JoinHandle<io::Result<()>>>,
}

impl RecordingDevice {
    /// A device that holds `image`, below a directory that is made for it.
    ///
    /// # Panics
    /// When it cannot be mounted.
    #[must_use]
    pub fn serve(at: &Path, image: Content) -> Self {
        std::fs::create_dir_all(at).expect("a folder");
        let recording = Shared::new(Mutex::new(Recording { image, events: Vec::new() }));
        let (is_ready, ready) = channel();
        let (place, served) = (at.to_path_buf(), Served(Arc::clone(&recording)));
        let serving = std::thread::spawn(move || {
            let session = mount_apart(&place, served)?;
            is_ready.send(()).map_err(io::Error::other)?;
            session.run()
        });
        if ready.recv().is_err() {
            panic!("a FUSE mount: {:?}", serving.join());
        }
        Self { at: at.to_path_buf(), recording, serving: Some(serving) }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.at.join(NAME)
    }

    /// How many events there have been.
    #[must_use]
    pub fn position(&self) -> usize {
        lock(&self.recording).events.len()
    }

    /// Ends it; all that was recorded.
    ///
    /// # Panics
    /// When it is still used, or what served it ended with an error.
    #[must_use]
    pub fn end(mut self) -> Vec<Event> {
        self.unmount().expect("the device ends");
        std::mem::take(&mut lock(&self.recording).events)
    }

    fn unmount(&mut self) -> io::Result<()> {
        let Some(serving) = self.serving.take() else { return Ok(()) };
        let deadline = Instant::now() + RELEASE_WAIT;
        while let Err(errno) = unmount(&self.at, UnmountFlags::empty()) {
            if Instant::now() > deadline {
                // With the mount namespace it goes for good.
                let _ = unmount(&self.at, UnmountFlags::DETACH);
                return Err(io::Error::new(io::Error::from(errno).kind(), format!("still used: {errno}")));
            }
            std::thread::park_timeout(Duration::from_millis(5));
        }
        match serving.join().map_err(|_| io::Error::other("the serving thread panicked"))? {
            // So the kernel may say of a connection that its unmount has ended. One that ended earlier has failed what was written since.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            ended => ended,
        }
    }
}

impl Drop for RecordingDevice {
    fn drop(&mut self) {
        let ended = self.unmount();
        assert!(ended.is_ok() || std::thread::panicking(), "the device ends: {ended:?}");
    }
}

/// Mounts the device for all, and gives the calling thread, and those it will start, a mount namespace of their own in which it is not mounted,
/// and descriptors that nobody else has.
fn mount_apart(at: &Path, served: Served) -> io::Result<Session<Served>> {
    // SAFETY: this thread uses none of the descriptors it had in common with others.
    unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("poolfs-test-disk".into())];
    let session = Session::new(served, at, &config)?;
    // SAFETY: only paths are looked up elsewhere from here on.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    unmount(at, UnmountFlags::DETACH)?;
    Ok(session)
}

struct Served(Shared);

impl Served {
    fn attributes(&self, node: INodeNo) -> FileAttr {
        let is_disk = node == DISK;
        let size = if is_disk { lock(&self.0).image.size() as u64 } else { 0 };
        FileAttr {
            ino: node,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_disk { FileType::RegularFile } else { FileType::Directory },
            perm: if is_disk { 0o600 } else { 0o700 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && name == NAME {
            reply.entry(&FOREVER, &self.attributes(DISK), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &self.attributes(node));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(&lock(&self.0).image.read(offset as usize, size as usize));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let offset = offset as usize;
        let mut recording = lock(&self.0);
        if offset + data.len() > recording.image.size() {
            return reply.error(Errno::ENOSPC);
        }
        recording.image.write(offset, data);
        recording.events.push(Event::Write(offset, data.to_vec()));
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        lock(&self.0).events.push(Event::Flush);
        reply.ok();
    }
}
