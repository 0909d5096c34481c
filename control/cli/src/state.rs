//! Persistent state: JSON documents in one directory, changed under a lock and replaced by rename.
//!
//! A thing (a pool, a container) is a directory with a document in it. The lock is the directory itself (`flock`), so that it goes away
//! with the thing. Readers need no lock: a document is always complete. A thing appears and disappears by one rename. What a killed command
//! left half made or half removed has a name of its own, and the next command that makes something removes it.
//!
//! Updates that concern running processes only are written without waiting for the disk. After a crash of the host such a document may be
//! empty; then the last durable version counts, which is kept beside it.

use crate::failure::{Code, Failure, Result};
use crate::patience::{LIMIT_SECONDS, Patience};
use crate::waiting;
use poolfs_host::{LinuxHost, remove_tree};
use rustix::fs::{CWD, FallocateFlags, FlockOperation, RenameFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of one document.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;
/// Room on the disk that is kept for documents, so that a full disk can still be cleaned up: the file, and its bytes.
const RESERVE_NAME: &str = ".reserve";
const RESERVE_BYTES: u64 = 128 << 10;
/// What the directory of a thing that is being made or removed begins with.
const TEMPORARY_PREFIX: &str = ".tmp-";
/// What the lasting form of a document is called besides.
const KEPT_EXTENSION: &str = "kept";

/// Whether a document is on the disk before anybody sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durability {
    Lasting,
    Noted,
}

/// One kind of things: `STATE/pools` or `STATE/containers`.
#[derive(Clone, Debug)]
pub struct Collection {
    /// For messages: `pool`, `container`.
    kind: &'static str,
    directory: PathBuf,
    document: String,
    patience: Arc<Patience>,
}

/// A thing that nobody else changes while this lives.
#[derive(Debug)]
pub struct Locked<T> {
    /// Its document; [`Locked::save`] makes a change lasting.
    pub record: T,
    path: PathBuf,
    document: PathBuf,
    collection: Collection,
    _lock: File,
}

impl Collection {
    /// The things of one kind below a state directory, which only root may look into: it holds set-user-id programs.
    pub fn open(state: &Path, kind: &'static str) -> Result<Collection> {
        make_private(state)?;
        let directory = state.join(format!("{kind}s"));
        make_private(&directory)?;
        keep_reserve(&directory.join(RESERVE_NAME));
        let patience = Patience::new(Duration::from_secs(LIMIT_SECONDS));
        Ok(Collection { kind, directory, document: format!("{kind}.json"), patience })
    }

    /// The same, whose locks are waited for by a command with this patience.
    pub fn with_patience(self, patience: &Arc<Patience>) -> Collection {
        Collection { patience: Arc::clone(patience), ..self }
    }

    /// The directory of a thing.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Make a thing; `prepare` fills its directory before anybody sees it.
    pub fn create<T: Serialize>(
        &self,
        name: &str,
        record: &T,
        prepare: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        self.sweep()?;
        let (_in_use, place) = self.temporary()?;
        prepare(place.path())?;
        write_document(&place.path().join(&self.document), record, Durability::Lasting)?;
        let path = self.path(name);
        match rustix::fs::renameat_with(CWD, place.path(), CWD, &path, RenameFlags::NOREPLACE) {
            Ok(()) => sync_directory(&self.directory),
            Err(rustix::io::Errno::EXIST) => Err(Failure::new(
                format!("{} {name}", self.kind),
                "the name is taken",
                format!("choose another name, or remove the old {}", self.kind),
            )
            .with_code(Code::Exists)),
            Err(errno) => Err(Failure::file(&path, errno)),
        }
    }

    /// A directory that nobody sweeps away as long as the file beside it lives. Bound in this order, it has been removed when the file is closed.
    fn temporary(&self) -> Result<(File, tempfile::TempDir)> {
        let failed = |error| Failure::file(&self.directory, error);
        let in_use = File::open(&self.directory).map_err(failed)?;
        let in_use = self.wait_for(&self.directory, in_use, FlockOperation::LockShared)?;
        let place = tempfile::Builder::new().prefix(TEMPORARY_PREFIX).tempdir_in(&self.directory).map_err(failed)?;
        Ok((in_use, place))
    }

    fn wait_for(&self, path: &Path, file: File, operation: FlockOperation) -> Result<File> {
        waiting::lock(&self.patience, &LinuxHost, path, file, operation)
    }

    /// Take away what killed commands left, unless another command makes or removes something right now.
    fn sweep(&self) -> Result<()> {
        let failed = |error| Failure::file(&self.directory, error);
        let alone = File::open(&self.directory).map_err(failed)?;
        if rustix::fs::flock(&alone, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(());
        }
        for entry in std::fs::read_dir(&self.directory).map_err(failed)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(TEMPORARY_PREFIX) {
                remove_tree(&entry.path())?;
            }
        }
        Ok(())
    }

    /// The names of all things, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        let listed = std::fs::read_dir(&self.directory).map_err(|error| Failure::file(&self.directory, error))?;
        let mut names: Vec<String> = listed
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        Ok(names)
    }

    /// A thing as it was a moment ago; none when there is none.
    pub fn peek<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        if !poolfs_service_protocol::is_valid_name(name) {
            return Err(bad_name(self.kind, name));
        }
        read_document(&self.path(name).join(&self.document))
    }

    /// All things as they were a moment ago.
    pub fn peek_all<T: DeserializeOwned>(&self) -> Result<Vec<T>> {
        let mut all = Vec::new();
        for name in self.names()? {
            all.extend(self.peek(&name)?);
        }
        Ok(all)
    }

    /// Take a thing's lock, waiting for whoever changes it now.
    pub fn lock<T: DeserializeOwned>(&self, name: &str) -> Result<Locked<T>> {
        self.try_lock(name)?.ok_or_else(|| self.absent(name))
    }

    /// The same; none when there is no such thing (any more).
    pub fn try_lock<T: DeserializeOwned>(&self, name: &str) -> Result<Option<Locked<T>>> {
        self.lock_by(name, |path, lock| self.wait_for(path, lock, FlockOperation::LockExclusive).map(Some))
    }

    /// The same without waiting; none also when somebody changes it now.
    pub fn lock_now<T: DeserializeOwned>(&self, name: &str) -> Result<Option<Locked<T>>> {
        self.lock_by(name, |_, lock| {
            Ok(rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(lock))
        })
    }

    fn lock_by<T: DeserializeOwned>(
        &self,
        name: &str,
        take: impl Fn(&Path, File) -> Result<Option<File>>,
    ) -> Result<Option<Locked<T>>> {
        if !poolfs_service_protocol::is_valid_name(name) {
            return Err(bad_name(self.kind, name));
        }
        let path = self.path(name);
        loop {
            let lock = match File::open(&path) {
                Ok(lock) => lock,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(Failure::file(&path, error)),
            };
            let Some(lock) = take(&path, lock)? else { return Ok(None) };
            // While we waited the thing may have been removed, and another made under its name.
            let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
            let same = lock.metadata().ok().map(identity) == std::fs::metadata(&path).ok().map(identity);
            if same {
                let document = path.join(&self.document);
                let record = read_document(&document)?;
                let collection = self.clone();
                return Ok(record.map(|record| Locked { record, path, document, collection, _lock: lock }));
            }
        }
    }

    /// The failure that there is no such thing.
    pub fn absent(&self, name: &str) -> Failure {
        let kind = self.kind;
        let remedy = match kind {
            "pool" => "`poolfs pool ls` lists the pools, `poolfs pool create` makes one".to_owned(),
            _ => "`poolfs ps` lists the containers".to_owned(),
        };
        Failure::not_found(format!("{kind} {name}"), format!("there is no such {kind}"), remedy)
    }
}

impl<T: Serialize> Locked<T> {
    /// Make the record lasting.
    pub fn save(&self) -> Result<()> {
        write_document(&self.document, &self.record, Durability::Lasting)
    }

    /// Show the record to other commands. A crash of the host may bring back the one that was saved last: enough for what a crash ends.
    pub fn note(&self) -> Result<()> {
        write_document(&self.document, &self.record, Durability::Noted)
    }
}

impl<T> Locked<T> {
    /// The thing's directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Remove the thing with everything in its directory.
    pub fn remove(self) -> Result<()> {
        self.collection.sweep()?;
        let (_in_use, place) = self.collection.temporary()?;
        // From this rename on it is gone, and its name is free.
        std::fs::rename(&self.path, place.path()).map_err(|error| Failure::file(&self.path, error))?;
        Ok(remove_tree(place.path())?)
    }
}

/// Make a directory, with those above it, that only root may look into.
pub fn make_private(path: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
            let remedy = "name a directory that is there, or can be made, with --state and --run-dir";
            Failure::file(path, "it is not a directory, or something above it is none").with_remedy(remedy)
        }
        _ => Failure::file(path, error),
    })
}

/// The failure that a name is not allowed.
pub fn bad_name(kind: &str, name: &str) -> Failure {
    Failure::usage(
        format!("{kind} name {name:?}"),
        "it is not allowed",
        "use up to 48 letters, digits, '.', '_' and '-', beginning with a letter or digit",
    )
}

fn read_document<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let mut text = String::new();
    match File::open(path).and_then(|file| file.take(DOCUMENT_BYTES_MAX).read_to_string(&mut text)) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Failure::file(path, error)),
    }
    if text.bytes().all(|byte| byte == 0) {
        // It was noted shortly before a crash.
        text = std::fs::read_to_string(path.with_extension(KEPT_EXTENSION)).unwrap_or(text);
    }
    serde_json::from_str(&text).map(Some).map_err(|error| {
        let remedy = "it was changed by hand or by another version of poolfs: restore it, or remove its directory";
        Failure::new(path.display().to_string(), error, remedy).with_code(Code::Damaged)
    })
}

fn write_document<T: Serialize>(path: &Path, record: &T, durability: Durability) -> Result<()> {
    let failed = |error: std::io::Error| Failure::file(path, error);
    let directory = path.parent().unwrap_or(Path::new("/"));
    let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&text)?;
        if durability == Durability::Lasting {
            file.as_file().sync_all()?;
        }
        file.persist(path).map_err(|error| error.error).map(drop)
    };
    let written = match (write(), directory.parent()) {
        (Err(error), Some(collection)) if error.kind() == ErrorKind::StorageFull => {
            // Gone already means that the disk has been full for a while.
            let _ = std::fs::remove_file(collection.join(RESERVE_NAME));
            write()
        }
        (other, _) => other,
    };
    written.map_err(failed)?;
    if durability == Durability::Noted {
        return Ok(());
    }
    let kept = path.with_extension(KEPT_EXTENSION);
    match std::fs::remove_file(&kept) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    std::fs::hard_link(path, &kept).map_err(failed)?;
    sync_directory(directory)
}

/// Have the reserve again when there is room for it.
fn keep_reserve(path: &Path) {
    if path.exists() {
        return;
    }
    let made = File::create(path)
        .and_then(|file| Ok(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, RESERVE_BYTES)?));
    if made.is_err() {
        // Half a reserve must not be taken for a whole one.
        let _ = std::fs::remove_file(path);
    }
}

fn sync_directory(path: &Path) -> Result<()> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(|error| Failure::file(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_that_is_no_directory_is_called_that() {
        let place = tempfile::tempdir().expect("a directory");
        let file = place.path().join("file");
        std::fs::write(&file, "").expect("written");
        for state in [file.clone(), file.join("below")] {
            let failure = Collection::open(&state, "pool").expect_err("it is none");
            let text = failure.to_string();
            assert!(text.contains("not a directory") && text.contains("--state"), "{text}");
        }
    }

    #[test]
    fn changes_at_once_are_all_kept() {
        let place = tempfile::tempdir().expect("a directory");
        let pools = Collection::open(place.path(), "pool").expect("opened");
        pools.create("a", &0u64, |_| Ok(())).expect("made");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let mut locked = pools.lock::<u64>("a").expect("locked");
                        locked.record += 1;
                        locked.save().expect("saved");
                    }
                });
            }
        });
        assert_eq!(pools.peek::<u64>("a").expect("read"), Some(40));
    }

    #[test]
    fn a_name_is_given_once_and_free_again_after_removal() {
        let place = tempfile::tempdir().expect("a directory");
        let pools = Collection::open(place.path(), "pool").expect("opened");
        pools.create("a", &1u64, |_| Ok(())).expect("made");
        let failure = pools.create("a", &2u64, |_| Ok(())).expect_err("taken");
        assert!(failure.to_string().contains("pool a: the name is taken"), "{failure}");
        pools.lock::<u64>("a").expect("locked").remove().expect("removed");
        assert!(pools.try_lock::<u64>("a").expect("no failure").is_none());
        pools.create("a", &3u64, |_| Ok(())).expect("made again");
        assert_eq!(pools.names().expect("listed"), ["a"]);
    }

    #[test]
    fn what_a_killed_command_left_goes_and_its_names_are_free() {
        let place = tempfile::tempdir().expect("a directory");
        let pools = Collection::open(place.path(), "pool").expect("opened");
        let temporary = || {
            let all = std::fs::read_dir(place.path().join("pools")).expect("listed");
            let is_temporary = |name: std::ffi::OsString| name.to_string_lossy().starts_with(TEMPORARY_PREFIX);
            all.filter(|entry| entry.as_ref().is_ok_and(|entry| is_temporary(entry.file_name()))).count()
        };
        // Killed while it made one: what it made so far stays, without the lock.
        let (in_use, half) = pools.temporary().expect("made");
        std::fs::create_dir_all(half.keep().join("upper/x")).expect("made");
        pools.create("other", &0u64, |_| Ok(())).expect("made");
        assert_eq!(temporary(), 1, "its maker still has the lock");
        drop(in_use);
        pools.create("a", &1u64, |_| Ok(())).expect("made");
        assert_eq!(temporary(), 0);
        // Killed while it removed one, after the first step.
        let (in_use, gone) = pools.temporary().expect("made");
        std::fs::rename(pools.path("a"), gone.keep()).expect("renamed");
        drop(in_use);
        assert!(pools.try_lock::<u64>("a").expect("no failure").is_none());
        pools.create("a", &2u64, |_| Ok(())).expect("its name is free");
        assert_eq!((temporary(), pools.peek::<u64>("a").expect("read")), (0, Some(2)));
    }

    #[test]
    fn who_loses_a_name_hinders_nobody() {
        let place = tempfile::tempdir().expect("a directory");
        let pools = Collection::open(place.path(), "pool").expect("opened");
        pools.create("taken", &0u64, |_| Ok(())).expect("made");
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let losing = || {
                    while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                        let fill = |path: &Path| {
                            std::fs::write(path.join("x"), "").map_err(|error| Failure::file(path, error))
                        };
                        let failure = pools.create("taken", &0u64, fill).expect_err("it is taken");
                        assert_eq!(failure.code(), Code::Exists, "{failure}");
                    }
                };
                scope.spawn(losing);
            }
            let outcome = (0..300).try_for_each(|number| pools.create(&number.to_string(), &number, |_| Ok(())));
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            outcome.expect("their names are free");
        });
    }

    #[test]
    fn what_was_saved_is_back_when_a_crash_took_what_was_noted() {
        let place = tempfile::tempdir().expect("a directory");
        let pools = Collection::open(place.path(), "pool").expect("opened");
        pools.create("a", &1u64, |_| Ok(())).expect("made");
        let change = |record: u64, durability| {
            let locked = Locked { record, ..pools.lock::<u64>("a").expect("locked") };
            if durability == Durability::Lasting { locked.save() } else { locked.note() }.expect("written");
        };
        let seen = || pools.peek::<u64>("a").expect("read");
        // What some filesystems have of a file that was written and renamed just before.
        let crash = || std::fs::write(pools.path("a").join("pool.json"), [0; 10]).expect("written");
        change(2, Durability::Noted);
        assert_eq!(seen(), Some(2));
        crash();
        assert_eq!(seen(), Some(1));
        change(3, Durability::Lasting);
        change(4, Durability::Noted);
        assert_eq!(seen(), Some(4));
        crash();
        assert_eq!(seen(), Some(3));
    }

    #[test]
    fn a_damaged_document_is_named() {
        let place = tempfile::tempdir().expect("a directory");
        let pools = Collection::open(place.path(), "pool").expect("opened");
        pools.create("a", &"text", |_| Ok(())).expect("made");
        let failure = pools.lock::<u64>("a").expect_err("no number");
        assert!(failure.to_string().contains("pool.json"), "{failure}");
        assert!(pools.lock::<u64>("../a").is_err());
    }
}
