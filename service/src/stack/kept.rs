//! What a service had accepted and not brought to disk when it died: marked on the upper branch itself, so that whoever mounts it next
//! finds it, and brought to disk first of all.

use super::claim::ENDING;
use poolfs_cache::{BranchKey, Remains, Salvaged};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::Timestamp;
use rustix::fs::{AtFlags, CWD, StatxFlags, XattrFlags, statx};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Of an upper branch that is in use: the key of its files in a ledger, and in which directory that is.
const MARK: &str = "trusted.poolfs.kept";
const MARK_BYTES_MAX: usize = 8192;
const PAUSE: Duration = Duration::from_millis(5);

/// A mark.
struct Mark {
    key: BranchKey,
    directory: PathBuf,
}

impl Mark {
    fn of(upper: &Path) -> io::Result<Option<Self>> {
        let mut value = vec![0; MARK_BYTES_MAX];
        match rustix::fs::getxattr(upper, MARK, &mut value) {
            Ok(count) => value.truncate(count),
            Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
        let (Some(key), Some(path)) = (value.first_chunk(), value.get(size_of::<BranchKey>()..)) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("its attribute {MARK} is too short")));
        };
        Ok(Some(Self { key: *key, directory: PathBuf::from(OsString::from_vec(path.to_vec())) }))
    }
}

/// Marks an upper branch: what is written in it is kept in `directory`, by the key that is returned.
pub(super) fn mark(upper: &Path, directory: &Path) -> io::Result<BranchKey> {
    let mut key = BranchKey::default();
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    let value = [&key, directory.as_os_str().as_bytes()].concat();
    rustix::fs::setxattr(upper, MARK, &value, XattrFlags::empty())?;
    Ok(key)
}

/// Nothing of the branch is kept any more.
pub(super) fn unmark(upper: &Path) {
    if let Err(errno) = rustix::fs::removexattr(upper, MARK)
        && errno != Errno::NODATA
    {
        warn!(upper = %upper.display(), %errno, "a mark of what was kept stays");
    }
}

/// What the last service has left of an upper branch. Waits for a moment for one that is about to end.
fn remains(mark: &Mark) -> Result<Option<Remains>, String> {
    let begun = Instant::now();
    // Another process may have made a directory of this name since.
    while Remains::has(&mark.directory, &mark.key) {
        let error = match Remains::open(&mark.directory) {
            Ok(remains) => return Ok(remains),
            Err(error) => error,
        };
        let is_busy = error.kind() == io::ErrorKind::WouldBlock;
        if !is_busy || begun.elapsed() >= ENDING {
            let directory = mark.directory.display();
            return Err(format!("what the last service had accepted is in {directory}, which cannot be used: {error}"));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(None)
}

/// When the file of a path was made, where the filesystem says that.
fn born(path: &Path) -> Option<Timestamp> {
    let status = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BTIME).ok()?;
    let made = status.stx_btime;
    let is_told = status.stx_mask & StatxFlags::BTIME.bits() != 0;
    is_told.then_some(Timestamp { seconds: made.tv_sec, nanoseconds: made.tv_nsec })
}

/// Brings to disk, by the layer over which it was cached, what the last service had accepted of an upper branch. `own` is where this
/// process keeps what it accepts.
pub(super) fn salvage(upper: &Path, below: &Arc<dyn Libservice>, own: Option<&Path>) -> Result<(), String> {
    let mark = Mark::of(upper).map_err(|error| error.to_string())?;
    // A use by this process has ended with all on disk, or has said what it lost.
    let Some(mark) = mark.filter(|mark| Some(mark.directory.as_path()) != own) else { return Ok(()) };
    let Some(remains) = remains(&mark)? else { return Ok(()) };
    let directory = mark.directory.display();
    let failed = |error: &dyn std::fmt::Display| {
        format!(
            "what the last service had accepted before it died is in {directory} and cannot be brought to disk: {error}; correct \
             that and mount it again, or unmount {directory}, which gives it up"
        )
    };
    let born = |path: &[u8]| born(&upper.join(OsStr::from_bytes(path)));
    let Salvaged { files, bytes, nameless } =
        remains.bring_below(&mark.key, below, &born).map_err(|error| failed(&super::with_causes(&error)))?;
    let ended = remains.forget(&mark.key).and_then(|()| remains.end());
    if let Err(error) = ended {
        warn!(%directory, %error, "what was brought to disk could not be given up in memory");
    }
    if files + nameless > 0 {
        let upper = upper.display();
        info!(%upper, files, bytes, nameless, "what the last service had accepted before it died is on disk");
    }
    Ok(())
}

/// How many files of an upper branch wait for the next service; where.
pub(super) fn waiting(upper: &Path) -> io::Result<Option<(u64, PathBuf)>> {
    let Some(mark) = Mark::of(upper)?.filter(|mark| Remains::has(&mark.directory, &mark.key)) else {
        return Ok(None);
    };
    let Some(remains) = Remains::open(&mark.directory)? else { return Ok(None) };
    let files = remains.files(&mark.key);
    Ok((files > 0).then_some((files, mark.directory)))
}

/// Gives back the memory of what dead services have left in directories of `place` and nobody is going to want: what was not dirty, and what is of branches
/// that are gone or were used since. Returns the branches of which something is kept, with how many files each.
///
/// # Errors
/// Those of reading `place`.
pub fn sweep(place: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut kept = Vec::new();
    let directories = match std::fs::read_dir(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(kept),
        directories => directories?,
    };
    for directory in directories {
        let directory = directory?.path();
        let swept = sweep_directory(&directory, &mut kept);
        match swept {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => warn!(directory = %directory.display(), %error, "what a dead service has left stays"),
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

fn sweep_directory(directory: &Path, kept: &mut Vec<(PathBuf, u64)>) -> io::Result<()> {
    let Some(remains) = Remains::open(directory)? else {
        // A process died before it had mounted anything there.
        return match std::fs::remove_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            removed => removed,
        };
    };
    for (key, upper) in remains.branches()? {
        let is_wanted = Mark::of(&upper)?.is_some_and(|mark| mark.key == key && mark.directory == directory);
        let files = if is_wanted { remains.files(&key) } else { 0 };
        if files == 0 {
            remains.forget(&key)?;
        } else {
            kept.push((upper, files));
        }
    }
    remains.drop_clean()?;
    remains.end()
}
