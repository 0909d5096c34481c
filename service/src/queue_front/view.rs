//! A client's view of the instance through its mounts, and what the client may therefore do by request.
//!
//! A mount namespace can show the instance read-only, in part, below other mounts, or not at all, and that binds its processes.
//! Its mounts are in `/proc/PID/mountinfo` of the client, all of them if its root is the root of the namespace. What follows:
//!
//! - If the root is not the namespace's, or the instance is not mounted as a whole in a place that the client reaches
//!   ([`super::reach`]), there is no session.
//! - If all mounts of the whole instance that it reaches are read-only, the session changes nothing.
//! - If any mount of the instance is read-only, changes by descriptors are left to the kernel, which knows by which mount each
//!   was opened.
//! - Names on which something is mounted are left to the kernel too, with all that is behind them, whatever others rename them
//!   to.
//!
//! The kernel reports when mounts of a namespace have changed. Then the table is read again, with the session's next check of its
//! client's rights, and the session goes on with what the client sees now; it ends where the client would not be let in any more.
//! Changes that are made elsewhere are not reported: of the
//! filesystem, which all namespaces share, and of names of directories. Therefore the table is read again after a while in any
//! case.

use crate::instance::Instance;
use crate::mount_table::{Mount, MountTable};
use crate::queue_front::credentials::effective_credentials;
use crate::queue_front::reach::{Candidate, Walker};
use crate::sync::lock;
use hashbrown::HashMap;
use poolfs_ipc::service::PeerFacts;
use poolfs_libservice::types::{Errno, NodeId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::fs::File;
use std::hash::BuildHasher;
use std::io::{self, Read, Seek};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};
use tracing::debug;

/// Most bytes of a mount table: some 6,000 mounts. Who has more uses the kernel.
const TABLE_BYTES_MAX: u64 = 1 << 20;

/// Most names of an instance on which one namespace may have something mounted.
const MOUNTED_MAX: usize = 4096;

/// How long a table counts of which the kernel has told no change.
const UNTOLD_MAX: Duration = Duration::from_secs(4);

/// Filesystems that answer by themselves, whoever has mounted them: in a namespace of its own a user can mount those of a process, and
/// unions that lead to such.
const ANSWERING: [&[u8]; 12] = [
    b"ext2",
    b"ext3",
    b"ext4",
    b"xfs",
    b"btrfs",
    b"f2fs",
    b"zfs",
    b"tmpfs",
    b"ramfs",
    b"rootfs",
    b"squashfs",
    b"erofs",
];

/// Whether no process, of the client's or another service's, can let who reads an access list there wait.
fn answers(mount: &Mount<'_>, is_of_host: bool) -> bool {
    ANSWERING.contains(&mount.file_system) || is_of_host && !mount.file_system.starts_with(b"fuse")
}

/// Says which of the client's mounts it reaches first.
type Reached<'r> = &'r dyn Fn(&MountTable<'_>, Vec<Candidate>) -> Option<usize>;

/// What is set aside for the names on which a client comes to have something mounted.
const BYTES_MIN: usize = 8 << 10;

/// What a name on which something is mounted takes in memory beside its bytes, wherever it is kept.
const NAME_BYTES: usize = 256;

/// What a mount table says of the instance.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    is_read_only: bool,
    /// A mount of it is, of whichever part.
    is_read_only_somewhere: bool,
    /// By a mount of it, of whichever part, no symbolic link is followed.
    has_no_links_somewhere: bool,
    /// The paths on which something is mounted, from the instance's root on.
    mounted: BTreeSet<Vec<u8>>,
}

impl Seen {
    /// Nothing when the instance is not there as a whole, or the table contradicts itself.
    fn of(table: &[u8], device: [u32; 2], reached: Reached<'_>) -> Option<Self> {
        let device = format!("{}:{}", device[0], device[1]);
        let table = MountTable::parse(table);
        let is_own = |mount: &Mount<'_>| mount.device == device.as_bytes();
        let own = || table.mounts().iter().filter(|mount| is_own(mount));
        let mut whole: Vec<_> = own().filter(|mount| mount.root == b"/" && table.is_reachable(mount)).collect();
        // One that can be written is enough.
        whole.sort_by_key(|mount| mount.is_read_only);
        let candidate = |mount: &&Mount<'_>| Some(Candidate { id: mount.number()?, place: mount.place.clone() });
        let candidates = whole.iter().map(candidate).collect::<Option<_>>()?;
        let is_read_only = whole.get(reached(&table, candidates)?)?.is_read_only;
        let is_read_only_somewhere = own().any(|mount| mount.is_read_only);
        let has_no_links_somewhere = own().any(|mount| mount.has_no_links);
        let mounted: BTreeSet<_> = table.mounted_on(is_own).take(MOUNTED_MAX + 1).collect::<Option<_>>()?;
        (mounted.len() <= MOUNTED_MAX).then_some(Self {
            is_read_only,
            is_read_only_somewhere,
            has_no_links_somewhere,
            mounted,
        })
    }

    /// What it takes of memory: each name is in it, and in what is looked up by it.
    fn bytes(&self) -> usize {
        self.mounted.iter().map(|path| NAME_BYTES + 2 * path.len()).sum()
    }
}

/// Names on which something is mounted, and what has them. The directories they are in are held.
pub struct MountPoints {
    instance: Weak<Instance>,
    /// Symbolic links are left to the kernel, too.
    has_no_links: bool,
    names: HashMap<NodeId, HashSet<Box<[u8]>>>,
    /// Whatever it is called later, the kernel moves the mounts along. As long as something is mounted on it, the kernel knows the node, so that
    /// it needs no other reference.
    covered: hashbrown::HashSet<NodeId>,
    held: Vec<NodeId>,
}

impl fmt::Debug for MountPoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MountPoints").field("names", &self.names).finish_non_exhaustive()
    }
}

impl MountPoints {
    fn of(instance: &Arc<Instance>, seen: &Seen) -> Result<Self, Errno> {
        let (names, covered, has_no_links) = (HashMap::new(), hashbrown::HashSet::new(), seen.has_no_links_somewhere);
        let mut points = Self { instance: Arc::downgrade(instance), has_no_links, names, covered, held: Vec::new() };
        for path in &seen.mounted {
            let Some(at) = path.iter().rposition(|&byte| byte == b'/') else { continue };
            points.add(instance, &path[..at], &path[at + 1..]).map_err(|errno| match errno {
                // It has been renamed or removed since the table was read: the client is let in when it comes again.
                Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE => Errno::EACCES,
                errno => errno,
            })?;
        }
        Ok(points)
    }

    fn add(&mut self, instance: &Arc<Instance>, directory: &[u8], name: &[u8]) -> Result<(), Errno> {
        let directory = instance.hold_path(directory, &mut self.held)?;
        self.covered.insert(instance.peek_name(directory, name)?);
        self.names.entry(directory).or_default().insert(name.into());
        Ok(())
    }

    /// Whether symbolic links are left to the kernel: by a mount of the client, none is followed.
    #[must_use]
    pub fn forbid_links(&self) -> bool {
        self.has_no_links
    }

    /// Whether something is mounted on a name of a directory.
    #[must_use]
    pub fn has(&self, directory: NodeId, name: &[u8]) -> bool {
        !self.names.is_empty() && self.names.get(&directory).is_some_and(|names| names.contains(name))
    }

    /// Whether something is mounted on a node, by any of its names.
    #[must_use]
    pub fn cover(&self, node: NodeId) -> bool {
        !self.covered.is_empty() && self.covered.contains(&node)
    }
}

impl Drop for MountPoints {
    fn drop(&mut self) {
        if let Some(instance) = self.instance.upgrade() {
            self.held.iter().for_each(|&node| instance.layer().forget(node, 1));
        }
    }
}

/// What a client sees of the instance.
#[derive(Debug)]
pub struct Shown {
    /// Counts the readings of the table: by which it was seen.
    reading: u64,
    seen: Seen,
    points: MountPoints,
}

impl Shown {
    /// Whether the client may change nothing by request: it has the instance mounted read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.seen.is_read_only
    }

    /// Whether the client may have descriptors that were opened by a read-only mount, of a part of the instance or of all.
    #[must_use]
    pub fn is_read_only_somewhere(&self) -> bool {
        self.seen.is_read_only_somewhere
    }

    /// The names on which the client has something mounted.
    #[must_use]
    pub fn mount_points(&self) -> &MountPoints {
        &self.points
    }
}

/// How it is looked what a client sees of the instance.
pub(super) struct View {
    device: [u32; 2],
    client: Walker,
    instance: Weak<Instance>,
    /// What it saw at the last look.
    shown: RwLock<Arc<Shown>>,
    /// What that may take of memory.
    bytes_max: usize,
    /// It would not be let in any more.
    is_over: AtomicBool,
    /// Of the namespace that the client was in when its session was made.
    table: Mutex<Table>,
}

/// A mount table that was read.
struct Table {
    file: File,
    hashes: RandomState,
    /// Of its text.
    hash: u64,
    read_at: Instant,
    /// How often it was read.
    readings: u64,
}

impl View {
    /// What it takes of memory, at most.
    pub(super) fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// That of a process. `device` is the number of the instance's mounts.
    ///
    /// # Errors
    /// `ESRCH` when it is gone, `EACCES` when its root is not that of its namespace or the instance is not mounted as a whole where it reaches it, `E2BIG` when its mounts are too
    /// many to look at, and those of the layers.
    pub(super) fn of(facts: &PeerFacts, device: [u32; 2], instance: &Arc<Instance>) -> Result<Self, Errno> {
        let process = facts.process;
        let client = Walker { process, credentials: effective_credentials(facts), answering: HashSet::new() };
        let mut file = File::open(format!("/proc/{process}/mountinfo")).map_err(|_| Errno::ESRCH)?;
        let (read_at, text, hashes) = (Instant::now(), read(&mut file)?, RandomState::new());
        let hash = hashes.hash_one(&text);
        let seen = seen_by(&client, &text, device).ok_or(Errno::EACCES)?;
        let points = MountPoints::of(instance, &seen)?;
        let bytes_max = seen.bytes().max(BYTES_MIN);
        let shown = RwLock::new(Arc::new(Shown { reading: 0, seen, points }));
        let table = Mutex::new(Table { file, hashes, hash, read_at, readings: 0 });
        Ok(Self {
            device,
            client,
            instance: Arc::downgrade(instance),
            shown,
            bytes_max,
            is_over: AtomicBool::new(false),
            table,
        })
    }

    /// What the client saw at the last look.
    pub(super) fn shown(&self) -> Arc<Shown> {
        Arc::clone(&self.shown.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Until the value is dropped, whoever looks whether the client still sees that waits.
    #[cfg(test)]
    pub(super) fn hold_looks(&self) -> impl Sized {
        self.table()
    }

    /// Looks what the client sees now. Whether it would still be let in.
    pub(super) fn look(&self) -> bool {
        if self.is_over.load(Ordering::Relaxed) {
            return false;
        }
        let (reading, text) = {
            let mut table = self.table();
            let Some(text) = table.changed() else { return true };
            (table.readings, text)
        };
        // Names are looked up in branches, which may not answer: whoever looks meanwhile does not wait.
        let seen = text.ok().and_then(|text| seen_by(&self.client, &text, self.device));
        // A mount that was made anew may be on another directory of the same name: they are looked up again, too.
        let now = seen.filter(|seen| seen.bytes() <= self.bytes_max).and_then(|seen| {
            let points = MountPoints::of(&self.instance.upgrade()?, &seen).ok()?;
            Some(Shown { reading, seen, points })
        });
        let Some(now) = now else {
            debug!("a client's mounts have changed: its session ends");
            self.is_over.store(true, Ordering::Relaxed);
            return false;
        };
        debug!("a client's mounts have changed: they were looked at again");
        // What the one that is not shown holds is given back, which asks layers, when nothing is locked.
        let mut outdated = Arc::new(now);
        let mut shown = self.shown.write().unwrap_or_else(PoisonError::into_inner);
        if shown.reading < outdated.reading {
            std::mem::swap(&mut *shown, &mut outdated);
        }
        drop(shown);
        true
    }
}

impl Table {
    /// The text of the table if the kernel told of a change or it is another one than before. One and the same text may be of other
    /// mounts: numbers are used again.
    fn changed(&mut self) -> Option<Result<Vec<u8>, Errno>> {
        let mut polled = [PollFd::new(&self.file, PollFlags::PRI)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // What was not told is asked again the next time.
        let is_told = poll(&mut polled, Some(&at_once)).is_ok_and(|changed| changed > 0);
        let now = Instant::now();
        if !is_told && now.duration_since(self.read_at) < UNTOLD_MAX {
            return None;
        }
        let text = self.file.rewind().map_err(errno_of).and_then(|()| read(&mut self.file));
        let Ok(text) = text else { return Some(text) };
        self.read_at = now;
        self.readings += 1;
        let hash = self.hashes.hash_one(&text);
        (std::mem::replace(&mut self.hash, hash) != hash || is_told).then_some(Ok(text))
    }
}

/// What a client sees by this table.
fn seen_by(client: &Walker, table: &[u8], device: [u32; 2]) -> Option<Seen> {
    // A namespace of mounts that a user has made is of a namespace of users, and so are its processes.
    let is_of_host = client.credentials.user_namespace.is_none();
    Seen::of(table, device, &|table, candidates| {
        let root = table.root()?.number()?;
        let answering = table.mounts().iter().filter(|mount| answers(mount, is_of_host));
        let client = Walker { answering: answering.filter_map(Mount::number).collect(), ..client.clone() };
        client.first_of(candidates, root)
    })
}

fn errno_of(error: io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn read(table: &mut File) -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    let length = table.take(TABLE_BYTES_MAX + 1).read_to_end(&mut text).map_err(errno_of)?;
    if length as u64 > TABLE_BYTES_MAX { Err(Errno::E2BIG) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "1 0 8:1 / / rw - ext4 disk rw\n";

    fn seen(mounts: &str) -> Option<Seen> {
        seen_where(mounts, |_| true)
    }

    /// By who reaches only these places.
    fn seen_where(mounts: &str, reaches: impl Fn(&[u8]) -> bool) -> Option<Seen> {
        Seen::of(format!("{ROOT}{mounts}").as_bytes(), [0, 9], &|_, candidates| {
            candidates.iter().position(|candidate| reaches(&candidate.place))
        })
    }

    #[test]
    fn only_who_has_the_whole_instance_sees_it() {
        let whole = Seen {
            is_read_only: false,
            is_read_only_somewhere: false,
            has_no_links_somewhere: false,
            mounted: BTreeSet::new(),
        };
        assert_eq!(seen("2 1 0:9 / /a rw - fuse.poolfs poolfs:x rw\n"), Some(whole));
        assert_eq!(seen(""), None);
        assert_eq!(seen("2 1 0:8 / /a rw - fuse.poolfs poolfs:x rw\n"), None, "another that has its name");
        assert_eq!(seen("2 1 0:9 /usr /a rw - fuse.poolfs poolfs:x rw\n"), None);
        assert_eq!(seen("2 1 0:9 / /a/b rw - fuse.poolfs poolfs:x rw\n3 1 0:7 / /a rw - tmpfs t rw\n"), None);
    }

    #[test]
    fn one_mount_that_can_be_written_is_enough() {
        let read_only = |mounts: &str| seen(mounts).map(|seen| seen.is_read_only);
        let both = "2 1 0:9 / /a ro,nosuid - t s rw\n3 1 0:9 / /b rw - t s rw\n";
        assert_eq!(read_only("2 1 0:9 / /a ro,nosuid - t s rw\n"), Some(true));
        assert_eq!(read_only(both), Some(false));
        assert_eq!(read_only(&format!("{both}4 3 0:7 / /b rw - tmpfs t rw\n")), Some(true), "it is covered");
        let by = |places: &[&[u8]]| seen_where(both, |place| places.contains(&place)).map(|seen| seen.is_read_only);
        assert_eq!(by(&[b"/a", b"/b"]), Some(false));
        assert_eq!((by(&[b"/a"]), by(&[b"/b"]), by(&[])), (Some(true), Some(false), None));
    }

    #[test]
    fn a_part_that_is_read_only_is_told_of() {
        let whole = "2 1 0:9 / /a rw - t s rw\n";
        let somewhere = |mounts: &str| seen(&format!("{whole}{mounts}")).map(|seen| seen.is_read_only_somewhere);
        assert_eq!(somewhere("3 2 0:9 /etc /a/etc rw - t s rw\n"), Some(false));
        assert_eq!(somewhere("3 2 0:9 /etc /a/etc ro - t s rw\n"), Some(true));
        assert_eq!(somewhere("3 1 0:9 /etc /other ro - t s rw\n"), Some(true));
        assert_eq!(somewhere("3 1 0:7 / /other ro - tmpfs t rw\n"), Some(false), "of something else");
    }

    #[test]
    fn a_table_that_contradicts_itself_shows_nothing() {
        assert_eq!(seen("2 1 0:9 / /a rw - t s rw\n3 2 0:7 / /b/etc rw - tmpfs t rw\n"), None);
    }

    #[test]
    fn lists_are_read_where_no_process_has_to_answer() {
        let answers_of = |line: &str| {
            let text = line.as_bytes();
            let table = MountTable::parse(text);
            [false, true].map(|is_of_host| answers(&table.mounts()[0], is_of_host))
        };
        assert_eq!(answers_of("1 0 0:1 / / rw - ext4 disk rw"), [true, true]);
        assert_eq!(answers_of("1 0 0:1 / / rw - overlay o rw,lowerdir=/x"), [false, true]);
        assert_eq!(answers_of("1 0 0:1 / / rw - fuse s rw"), [false, false]);
        assert_eq!(answers_of("1 0 0:1 / / rw - fuse.sshfs s rw,user_id=1000"), [false, false]);
    }

    #[test]
    fn what_is_mounted_in_it_is_known_up_to_a_bound() {
        let with = |count: usize| {
            let on = |number: usize| format!("{} 2 0:7 / /a/{number} rw - tmpfs t rw\n", number + 10);
            seen(&format!("2 1 0:9 / /a rw - t s rw\n{}", (0..count).map(on).collect::<String>()))
        };
        assert_eq!(with(2).map(|seen| seen.mounted), Some([b"/0".to_vec(), b"/1".to_vec()].into()));
        assert!(with(MOUNTED_MAX).is_some() && with(MOUNTED_MAX + 1).is_none());
        let bytes = |count| with(count).map(|seen| seen.bytes());
        assert_eq!((bytes(0), bytes(2)), (Some(0), Some(2 * (NAME_BYTES + 2 * "/0".len()))), "and counted");
    }
}
