//! Crash recovery of an upper branch: data that a dead service had accepted and not brought to disk is found by a mark on the
//! branch, and brought to disk before anything else by the next service that mounts it.
//!
//! A branch may come from elsewhere, so its mark is trusted in one thing only: it is a key. The state with that key is searched
//! for below the services' own directory, and it counts only if it says itself that it is of this very directory.

mod identity;
mod states;

pub use states::StateRoot;

use super::sources::ENDING;
use crate::outside::{Deed, outside};
use identity::{BranchIdentity, Kinship, Whereabouts, born};
use poolfs_cache::{BranchKey, Cache, CrashRecovery, Salvaged, StateDirectory, Waiting};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{NodeId, Timestamp};
use rustix::fs::{Mode, OFlags, ResolveFlags, XattrFlags, fgetxattr, fremovexattr, fsetxattr, openat2};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// Of an upper branch that is in use: the key of its files in a ledger.
const MARK: &str = "trusted.poolfs.kept";
/// Releases before this one stored a path behind the key.
const MARK_BYTES_MAX: usize = 8192;
const PAUSE: Duration = Duration::from_millis(5);

/// The root of an upper branch: open, and how people call it.
#[derive(Clone, Copy)]
pub(super) struct UpperRoot<'a> {
    pub directory: BorrowedFd<'a>,
    pub path: &'a Path,
}

impl UpperRoot<'_> {
    /// The key that it is marked with; nothing where no service has left one.
    fn key(&self) -> io::Result<Option<BranchKey>> {
        let mut value = vec![0; MARK_BYTES_MAX];
        let count = match fgetxattr(self.directory, MARK, &mut value) {
            Ok(count) => count,
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            Err(Errno::RANGE) => 0,
            Err(errno) => return Err(errno.into()),
        };
        let key = value.get(..count).and_then(|value| value.first_chunk()).copied();
        if key.is_none() {
            warn!(upper = %self.path.display(), "its attribute {MARK} is none that a service makes; it is passed over");
        }
        Ok(key)
    }

    /// When the file of a path was made, where that is known.
    fn born(&self, path: &[u8]) -> Option<Timestamp> {
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        let file = openat2(self.directory, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve).ok()?;
        born(file).ok()?
    }
}

/// A key for what is written in an upper branch from now on, and what is kept beside that.
pub(super) fn new_key(upper: UpperRoot<'_>) -> io::Result<(BranchKey, Vec<u8>)> {
    let identity = BranchIdentity::of(upper.directory, upper.path)?;
    let mut key = BranchKey::default();
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    Ok((key, identity.to_bytes()))
}

/// Marks an upper branch: what is written in it is kept by this key.
pub(super) fn mark(upper: UpperRoot<'_>, key: &BranchKey) -> io::Result<()> {
    Ok(fsetxattr(upper.directory, MARK, key, XattrFlags::empty())?)
}

/// Nothing of the branch is kept any more.
pub(super) fn unmark(upper: UpperRoot<'_>) {
    if let Err(errno) = fremovexattr(upper.directory, MARK)
        && errno != Errno::NODATA
    {
        warn!(upper = %upper.path.display(), %errno, "a mark of what was kept stays");
    }
}

/// Whether the state with a branch's key is that branch's; the cause when nobody can say.
fn is_of(upper: UpperRoot<'_>, key: &BranchKey, state: &StateDirectory) -> Result<bool, String> {
    let place = state.path().display();
    let unreadable = |cause: &dyn std::fmt::Display| {
        format!("what the last service had accepted is in {place}, which cannot be used: {cause}")
    };
    let noted = match state.branch(key) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        noted => noted.map_err(|error| unreadable(&error))?,
    };
    let another =
        "another release kept it; mount the branch once with that one, or unmount that directory, which gives it up";
    let noted = BranchIdentity::from_bytes(&noted).ok_or_else(|| unreadable(&another))?;
    let found = BranchIdentity::of(upper.directory, upper.path).map_err(|errno| unreadable(&errno))?;
    match noted.compare(&found) {
        Kinship::Same => Ok(true),
        Kinship::Other => {
            let (upper, other) = (upper.path.display(), noted.path.display());
            warn!(%upper, %other, "its attribute {MARK} is a copy of another branch's; it is passed over");
            Ok(false)
        }
        Kinship::Unclear => Err(format!(
            "what a service had accepted of {} waits in {place}, and this may be that directory, on another device than it was, \
             or a copy of it; mount it where it was, or remove the attribute {MARK}, which makes it a copy",
            noted.path.display()
        )),
    }
}

/// The state that the last service has left of an upper branch, with the branch's key there; nothing where it has left none.
fn left(
    upper: UpperRoot<'_>,
    states: &StateRoot,
    own: Option<&Path>,
) -> Result<Option<(BranchKey, StateDirectory)>, String> {
    let Some(key) = upper.key().map_err(|error| format!("its attribute {MARK} cannot be read: {error}"))? else {
        return Ok(None);
    };
    let found = states.find(&key).map_err(|error| format!("what was kept of it cannot be looked for: {error}"))?;
    // A use by this process has ended with all on disk, or has said what it lost.
    Ok(found.filter(|state| Some(state.path()) != own).map(|state| (key, state)))
}

/// The same, opened. Waits for a moment for one that is about to end.
fn remains(
    upper: UpperRoot<'_>,
    states: &StateRoot,
    own: Option<&Path>,
) -> Result<Option<(BranchKey, CrashRecovery)>, String> {
    let begun = Instant::now();
    loop {
        let Some((key, state)) = left(upper, states, own)? else { return Ok(None) };
        if !is_of(upper, &key, &state)? {
            return Ok(None);
        }
        let directory = state.path().to_owned();
        let error = match CrashRecovery::open(state) {
            Ok(remains) => return Ok(remains.map(|remains| (key, remains))),
            Err(error) => error,
        };
        let is_busy = error.kind() == io::ErrorKind::WouldBlock;
        if !is_busy || begun.elapsed() >= ENDING {
            let directory = directory.display();
            return Err(format!("what the last service had accepted is in {directory}, which cannot be used: {error}"));
        }
        std::thread::sleep(PAUSE);
    }
}

/// What the last service had accepted of some files of an upper branch that cannot be brought to disk. As long as this is there, nobody else deals with
/// what that service has left.
pub(super) struct Stuck {
    key: BranchKey,
    remains: CrashRecovery,
    waiting: Vec<Waiting>,
}

/// One of these files, as the cache has it that carries it on.
pub(super) struct Carried {
    pub node: NodeId,
    pub path: String,
    pub cause: String,
}

impl Stuck {
    /// Has a cache over the branch carry all of it on; the files that are the cause.
    pub fn carry_on(&self, upper: UpperRoot<'_>, cache: &Arc<Cache>) -> Result<Vec<Carried>, String> {
        let mut carried = Vec::new();
        for waiting in &self.waiting {
            let path = waiting.path.escape_ascii().to_string();
            let (directory, upper) = (self.remains.directory().path().display(), upper.path.display());
            let node = self.remains.carry_on(waiting, cache).map_err(|error| {
                let cause = waiting.cause.as_deref().unwrap_or("it follows others");
                format!(
                    "what the last service had accepted before it died of the file {path} is in {directory}, and can neither be brought to disk ({cause}) nor \
                     be taken into the cache ({error}); mount it in a pool with more cache, or remove {upper}/{path}, which gives up what waits \
                     for that file alone"
                )
            })?;
            if let Some(cause) = waiting.cause.clone() {
                error!(%upper, path, cause, "what the last service had accepted of a file cannot be brought to disk: it waits");
                carried.push(Carried { node, path, cause });
            }
        }
        Ok(carried)
    }

    /// The cache has all of it, and keeps it by `key`, if it does.
    pub fn give_up(self, upper: UpperRoot<'_>, key: Option<&BranchKey>) {
        if let Some(Err(error)) = key.map(|key| mark(upper, key)) {
            does_not_outlive(upper, &error);
        }
        give_up(self.key, self.remains);
    }
}

/// Says that what is accepted in an upper branch is lost with this process.
pub(super) fn does_not_outlive(upper: UpperRoot<'_>, error: &io::Error) {
    warn!(path = %upper.path.display(), %error, "what is accepted here does not outlive the service");
}

fn give_up(key: BranchKey, remains: CrashRecovery) {
    let directory = remains.directory().path().to_owned();
    // What is mounted is seen where it is.
    let ended = outside(Deed::Memory, move || remains.forget(&key).and_then(|()| remains.end())).flatten();
    if let Err(error) = ended {
        warn!(directory = %directory.display(), %error, "what was brought to disk could not be given up in memory");
    }
}

/// Brings to disk, by the layer over which it was cached, what the last service had accepted of an upper branch. `own` is where this
/// process keeps what it accepts. Returns what waits, because something is wrong with single files.
pub(super) fn salvage(
    upper: UpperRoot<'_>,
    below: &Arc<dyn Libservice>,
    states: &StateRoot,
    own: Option<&Path>,
) -> Result<Option<Stuck>, String> {
    if left(upper, states, own)?.is_none() {
        return Ok(None);
    }
    let _one_at_a_time = states.salvaging();
    let Some((key, remains)) = remains(upper, states, own)? else { return Ok(None) };
    let failed = |error: &dyn std::fmt::Display| {
        let directory = remains.directory().path().display();
        format!(
            "what the last service had accepted before it died is in {directory} and cannot be brought to disk: {error}; correct \
             that and mount it again. Unmounting {directory} gives up all that waits there, also of other branches"
        )
    };
    let born = |path: &[u8]| upper.born(path);
    let Salvaged { files, bytes, nameless, waiting } =
        remains.bring_below(&key, below, &born).map_err(|error| failed(&super::with_causes(&error)))?;
    if files + nameless > 0 {
        let upper = upper.path.display();
        info!(%upper, files, bytes, nameless, "what the last service had accepted before it died is on disk");
    }
    if waiting.is_empty() {
        give_up(key, remains);
        return Ok(None);
    }
    Ok(Some(Stuck { key, remains, waiting }))
}

/// How many files of an upper branch wait for the next service; where.
pub(super) fn waiting(upper: UpperRoot<'_>, states: &StateRoot) -> Result<Option<(u64, PathBuf)>, String> {
    let Some((key, remains)) = remains(upper, states, None)? else { return Ok(None) };
    let files = remains.files(&key);
    Ok((files > 0).then(|| (files, remains.directory().path().to_owned())))
}

/// Gives back the memory of what dead services have left in directories of `place` and nobody is going to want: what was not dirty, and what is of branches
/// that are gone or were used since. Returns the branches of which something is kept, with how many files each.
///
/// # Errors
/// Those of reading `place`.
pub fn sweep(place: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut kept = Vec::new();
    let (Some(root), Some(name)) = (place.parent(), place.file_name()) else { return Ok(kept) };
    let Some(root) = StateRoot::open(root)? else { return Ok(kept) };
    let Some(pool) = root.pool(name)? else { return Ok(kept) };
    for name in pool.names()? {
        let swept = match pool.state(&name) {
            Ok(state) => sweep_state(state, &mut kept),
            // A process died before it had mounted anything there.
            Err(_) => pool.remove(&name),
        };
        match swept {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => warn!(directory = %place.join(&name).display(), %error, "what a dead service has left stays"),
            Ok(()) => {}
        }
    }
    Ok(kept)
}

/// The same, and writes a line for each such branch.
///
/// # Errors
/// Those of [`sweep`], and of writing.
pub fn sweep_and_tell(place: &Path, output: &mut dyn io::Write) -> anyhow::Result<()> {
    for (upper, files) in sweep(place)? {
        writeln!(output, "{files} files of {}", upper.display())?;
    }
    Ok(())
}

fn sweep_state(state: StateDirectory, kept: &mut Vec<(PathBuf, u64)>) -> io::Result<()> {
    let Some(remains) = CrashRecovery::open(state)? else { return Ok(()) };
    for key in remains.directory().branches()? {
        let noted = BranchIdentity::from_bytes(&remains.directory().branch(&key)?);
        let noted = noted.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "another release kept it"))?;
        let files = if is_wanted(&noted, &key)? { remains.files(&key) } else { 0 };
        if files == 0 {
            remains.forget(&key)?;
        } else {
            kept.push((noted.path, files));
        }
    }
    remains.drop_clean()?;
    remains.end()
}

/// Whether the branch may be used again, and was not since. One that was moved, or whose filesystem is not mounted now, may be.
fn is_wanted(noted: &BranchIdentity, key: &BranchKey) -> io::Result<bool> {
    match noted.find()? {
        Whereabouts::Removed => Ok(false),
        Whereabouts::Unknown => Ok(true),
        Whereabouts::Known(directory, found) => {
            let upper = UpperRoot { directory: directory.as_fd(), path: &found.path };
            Ok(upper.key()? == Some(*key))
        }
    }
}
