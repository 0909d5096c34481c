//! The FUSE mount of one instance: made without a helper, so that its type is `fuse.poolfs`, and never left behind.

use super::device::{Device, TRANSFER_BYTES_MAX};
use super::handshake;
use super::session::{OnEnd, Session, transfers_of};
use crate::guard;
use crate::instance::Instance;
use crate::mount_table::{Mount, MountTable};
use crate::notify::KernelCache;
use crate::outside::{Deed, outside};
use poolfs_ipc::wire::{MOUNT_SOURCE_PREFIX, MOUNT_TYPE};
use poolfs_service_protocol::{MountSpec, Transport};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MountFlags, UnmountFlags};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;
use tracing::warn;

/// Dead mounts stacked on one directory that are taken away before giving up.
const DEAD_MOUNTS_MAX: usize = 64;

/// The mount table of the calling thread: others may have another.
const OWN_TABLE: &str = "/proc/thread-self/mountinfo";

/// Most threads that serve the kernel: some wait for disks while others answer from the cache.
const THREADS_PER_CPU: usize = 2;
const THREADS_MIN: usize = 6;
const THREADS_MAX: usize = 32;

/// Why an instance cannot be mounted, or not be unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// No FUSE on this host.
    #[error("/dev/fuse cannot be opened ({0}); load the fuse module, and allow the device in the service's cgroup")]
    Device(io::Error),
    /// mount(2) says no.
    #[error(
        "{path} cannot be mounted on ({cause}); it must be an existing directory, and the service needs CAP_SYS_ADMIN"
    )]
    Mount {
        /// the mount point
        path: PathBuf,
        /// what the kernel said
        cause: io::Error,
    },
    /// The kernel and the service did not agree, or no thread was to be had.
    #[error("the FUSE session of {path} did not start ({cause})")]
    Session {
        /// the mount point
        path: PathBuf,
        /// what went wrong
        cause: io::Error,
    },
    /// The kernel's requests would come in another way than was asked for.
    #[error(
        "{path}: its requests cannot come by {}; `poolfs doctor` says how to have it, --fuse-transport auto does without", wanted.name()
    )]
    Transport {
        /// the mount point
        path: PathBuf,
        /// what was asked for
        wanted: Transport,
    },
    /// Files are open, or something is mounted below.
    #[error("{path} is in use; end the programs that use it, or unmount what is mounted below it")]
    Busy {
        /// the mount point
        path: PathBuf,
    },
    /// What would be unmounted is somebody else's.
    #[error("{by} is mounted over {path}; unmount that first")]
    Covered {
        /// the mount point
        path: PathBuf,
        /// what that mount was made from
        by: String,
    },
    /// umount(2) says no.
    #[error("{path} cannot be unmounted ({cause})")]
    Unmount {
        /// the mount point
        path: PathBuf,
        /// what the kernel said
        cause: io::Error,
    },
}

/// A live mount.
pub struct FuseMount {
    guard: MountGuard,
    device: Arc<Device>,
    /// What it is called in the mount table.
    instance: String,
    ended: Receiver<()>,
}

/// A mount that is detached when nobody says otherwise.
struct MountGuard {
    instance: String,
    path: PathBuf,
    mounted: bool,
}

impl MountGuard {
    fn detach(&mut self) -> Result<(), MountError> {
        if self.mounted {
            self.unmount(UnmountFlags::DETACH)?;
            self.mounted = false;
        }
        Ok(())
    }

    /// umount(2), where the mount is. It takes what is mounted last at a path, so it is asked for only where that is this one: somebody may
    /// have unmounted it, or mounted something over it.
    fn unmount(&self, flags: UnmountFlags) -> Result<(), MountError> {
        let (instance, path) = (self.instance.clone(), self.path.clone());
        let unmounted = outside(Deed::Mount, move || match standing(&instance, &path)? {
            Standing::Gone => Ok(()),
            Standing::Covered(by) => Err(MountError::Covered { path, by }),
            Standing::There => match rustix::mount::unmount(&path, flags | UnmountFlags::NOFOLLOW) {
                // EINVAL: somebody has unmounted it meanwhile.
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
                Err(Errno::BUSY) => Err(MountError::Busy { path }),
                Err(error) => Err(MountError::Unmount { path, cause: error.into() }),
            },
        });
        unmounted.unwrap_or_else(|cause| Err(MountError::Unmount { path: self.path.clone(), cause }))
    }
}

/// How a mount stands in its place.
enum Standing {
    /// it is not there
    Gone,
    There,
    /// by what was made from this
    Covered(String),
}

fn standing(instance: &str, path: &Path) -> Result<Standing, MountError> {
    let table = std::fs::read(OWN_TABLE).map_err(|cause| MountError::Unmount { path: path.to_owned(), cause })?;
    let table = MountTable::parse(&table);
    let source = format!("{MOUNT_SOURCE_PREFIX}{instance}");
    let is_own = |mount: &&Mount<'_>| {
        mount.file_system == MOUNT_TYPE.as_bytes()
            && mount.source == source.as_bytes()
            && mount.place == path.as_os_str().as_bytes()
    };
    let Some(own) = table.mounts().iter().rfind(is_own) else { return Ok(Standing::Gone) };
    let over = table.over(own).map(|other| String::from_utf8_lossy(&other.source).into_owned());
    Ok(over.map_or(Standing::There, Standing::Covered))
}

impl Drop for MountGuard {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            warn!(mount_point = %self.path.display(), %error, "a mount could not be detached");
        }
    }
}

/// Detaches mounts on `path` whose service has died. Other mounts stay.
///
/// # Errors
/// When the kernel refuses.
pub fn detach_dead(path: &Path) -> io::Result<usize> {
    let path = path.to_owned();
    outside(Deed::Mount, move || detach_dead_here(&path))?
}

fn detach_dead_here(path: &Path) -> io::Result<usize> {
    for detached in 0..DEAD_MOUNTS_MAX {
        // The kernel answers a stat from what it keeps, also when nobody is left to ask. Space it always asks for.
        match rustix::fs::statfs(path) {
            Err(Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED) => {
                rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
            }
            _ => return Ok(detached),
        }
    }
    Err(io::Error::from_raw_os_error(Errno::LOOP.raw_os_error()))
}

impl FuseMount {
    /// Mounts `instance` where its specification says, and serves it on these CPUs until the mount is gone: then `on_end` is called, by
    /// whichever of its threads is the last.
    ///
    /// # Errors
    /// Nothing is mounted then.
    pub fn start(instance: &Arc<Instance>, cpus: &[u32], on_end: OnEnd) -> Result<Self, MountError> {
        let spec = instance.spec();
        let path = spec.mount_point.clone();
        let (place, wanted) = (path.clone(), spec.clone());
        let failed = |cause| MountError::Session { path: path.clone(), cause };
        let device = outside(Deed::Mount, move || {
            let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
                .map_err(|error| MountError::Device(error.into()))?;
            mount(&device, &place, &wanted).map_err(|cause| MountError::Mount { path: place, cause })?;
            Ok(device)
        });
        let device = device.map_err(failed)??;
        let guard = MountGuard { instance: spec.instance.clone(), path: path.clone(), mounted: true };

        // There the number of requests that may be given up has no bound.
        let transport = spec.transport.or(spec.timeout.map(|_| Transport::DevFuse));
        let connected =
            handshake::connect(device, cpus, &transfers_of(instance), transport, instance.timed().is_some());
        let (device, entries) = connected.map_err(failed)?;
        let device = Arc::new(device);
        let place = (instance.name().to_owned(), path.clone());
        device.set_forget_unused(Box::new(move || {
            let (name, path) = place.clone();
            outside(Deed::Mount, move || forget_unused(&name, &path)).flatten()
        }));
        let name = instance.name().to_owned();
        match outside(Deed::Mount, move || abort_of(&name)).flatten().and_then(|abort| guard::watch(abort.as_fd())) {
            Ok(guarded) => device.set_guarded(guarded),
            Err(error) => {
                warn!(instance = instance.name(), %error, "should the service die while a program keeps a file of it locked, other users of it may wait until that program has ended");
            }
        }
        let kernel: Arc<dyn KernelCache> = device.clone();
        instance.attach_kernel(kernel, cpus);
        let threads = (cpus.len() * THREADS_PER_CPU).clamp(THREADS_MIN, THREADS_MAX);
        let ended = Session::start(instance, Arc::clone(&device), threads, entries, cpus, on_end).map_err(failed)?;
        if let Some(wanted) = spec.transport.filter(|&wanted| wanted != instance.transport()) {
            return Err(MountError::Transport { path, wanted });
        }
        let name = instance.name().to_owned();
        if let Err(error) = outside(Deed::Mount, move || raise_read_ahead(&name)).flatten() {
            warn!(instance = instance.name(), %error, "the kernel's read-ahead stays at its default: files are read by FUSE in small pieces");
        }
        Ok(Self { guard, device, instance: spec.instance.clone(), ended })
    }

    /// What the kernel caches of the mount.
    #[must_use]
    pub fn kernel(&self) -> &dyn KernelCache {
        self.device.as_ref()
    }

    /// Whether the kernel has let the mount go altogether, or somebody has cut its connection: from here on nobody comes by it.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.device.is_cut_off()
    }

    /// Unmounts, unless it is in use.
    ///
    /// # Errors
    /// [`MountError::Busy`] and others: it is still mounted then.
    pub fn unmount(&mut self) -> Result<(), MountError> {
        if self.is_over() {
            return self.clear_away();
        }
        self.guard.unmount(UnmountFlags::empty())?;
        self.guard.mounted = false;
        Ok(())
    }

    /// Takes the mount away whoever uses it: those keep what they have open until they close it or the service ends.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn detach(&mut self) -> Result<(), MountError> {
        self.guard.detach()
    }

    /// After its end: takes away what is left of it if only its connection was cut. Whatever else is mounted in its place stays.
    fn clear_away(&mut self) -> Result<(), MountError> {
        match is_in_table(&self.instance) {
            Ok(false) => self.guard.mounted = false,
            Ok(true) => self.detach()?,
            Err(cause) => return Err(MountError::Unmount { path: self.guard.path.clone(), cause }),
        }
        Ok(())
    }

    /// Waits until the kernel has let the mount go altogether; whether it has.
    #[must_use]
    pub fn wait(&self, time_max: Duration) -> bool {
        !matches!(self.ended.recv_timeout(time_max), Err(RecvTimeoutError::Timeout))
    }
}

/// Lets the kernel read ahead as much as one request can carry: a round trip costs the same for 4 KiB and for 1 MiB. The
/// mount is found in the table, because asking the file system itself would be a request.
fn raise_read_ahead(instance: &str) -> io::Result<()> {
    let device = device_of(instance)?.ok_or(io::ErrorKind::NotFound)?;
    let kibibytes = (TRANSFER_BYTES_MAX >> 10).to_string();
    std::fs::write(format!("/sys/class/bdi/{device}/read_ahead_kb"), kibibytes)
}

/// What the connection of an instance is aborted by. The filesystem that has it need not be mounted anywhere.
fn abort_of(instance: &str) -> io::Result<OwnedFd> {
    let device = device_of(instance)?.ok_or(io::ErrorKind::NotFound)?;
    let connection = device.rsplit(':').next().unwrap_or_default();
    let context = rustix::mount::fsopen(c"fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(context.as_fd())?;
    let connections = rustix::mount::fsmount(
        context.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    )?;
    let path = format!("{connection}/abort");
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(connections, path, flags, Mode::empty())?)
}

/// Has the kernel drop all names of an instance's filesystem that nobody uses, and what it knows behind them. Every remount begins with
/// that (`reconfigure_super` in Linux), also one that changes nothing.
fn forget_unused(instance: &str, path: &Path) -> io::Result<()> {
    let picked = rustix::mount::fspick(
        rustix::fs::CWD,
        path,
        FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_NO_AUTOMOUNT | FsPickFlags::FSPICK_SYMLINK_NOFOLLOW,
    );
    // What another filesystem covers is left alone, and the other as well.
    let found = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS)?;
    if device_of(instance)? != Some(format!("{}:{}", found.stx_dev_major, found.stx_dev_minor)) {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(rustix::mount::fsconfig_reconfigure(picked?.as_fd())?)
}

/// The device number, `MAJOR:MINOR`, of an instance that is in the table.
fn device_of(instance: &str) -> io::Result<Option<String>> {
    let table = std::fs::read(OWN_TABLE)?;
    let source = format!("{MOUNT_SOURCE_PREFIX}{instance}");
    let is_own = |mount: &&Mount<'_>| mount.file_system == MOUNT_TYPE.as_bytes() && mount.source == source.as_bytes();
    let table = MountTable::parse(&table);
    Ok(table.mounts().iter().rfind(is_own).map(|mount| String::from_utf8_lossy(mount.device).into_owned()))
}

fn is_in_table(instance: &str) -> io::Result<bool> {
    let instance = instance.to_owned();
    outside(Deed::Mount, move || Ok(device_of(&instance)?.is_some())).flatten()
}

fn mount(device: &OwnedFd, path: &Path, spec: &MountSpec) -> io::Result<()> {
    let options =
        format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions", device.as_raw_fd());
    let options = CString::new(options)?;
    let mut flags = MountFlags::NOATIME;
    flags.set(MountFlags::NODEV, !spec.devices);
    flags.set(MountFlags::NOSUID, !spec.suid);
    let source = format!("{MOUNT_SOURCE_PREFIX}{}", spec.instance);
    Ok(rustix::mount::mount(source, path, MOUNT_TYPE, flags, options.as_c_str())?)
}
