//! The hosts that have an image of a store at a cluster: `hosts/NAME/HOST`, a file for each.
//!
//! A store at a cluster is used by hosts that know nothing of each other's containers. An image stays there as long as a host has it. Callers
//! hold the lock of the store that has the image.

use crate::record::check_name;
use crate::{ImageError, ImageStore, Result};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What the directory is called in a store.
const HOLDERS_NAME: &str = "hosts";
/// The file of a state directory that has its id.
const ID_NAME: &str = ".host-id";
/// Most hosts of one image that are looked at.
const HOLDERS_MAX: usize = 10_000;
/// Most bytes that are read of such files.
const FILE_BYTES_MAX: u64 = 4096;

/// A host that has an image: one of its state directories, to be exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What its file is called: no two state directories have the same.
    pub id: String,
    /// What people know it by.
    pub description: String,
}

impl ImageStore {
    /// The id by which stores at clusters know this state directory. It is made when it is first asked for, and lasting. A copy of the directory,
    /// here or on another host, gets one of its own: it is not to give up what the first one has.
    pub fn host_id(&self) -> Result<String> {
        let path = self.images().join(ID_NAME);
        let failed = |source| ImageError::io("look at", self.images(), source);
        let inode = std::fs::metadata(self.images()).map_err(failed)?.ino();
        let machine = read(Path::new("/etc/machine-id"))?.unwrap_or_default();
        let place = format!("-{inode:x}-{}", machine.trim());
        let known = || -> Result<Option<String>> {
            let Some(id) = read(&path)? else { return Ok(None) };
            let id = id.trim().to_owned();
            check_name(&id)?;
            Ok(Some(id))
        };
        let is_own = |id: &String| id.ends_with(&place);
        let before = known()?;
        if let Some(id) = before.clone().filter(is_own) {
            return Ok(id);
        }
        let source = Path::new("/proc/sys/kernel/random/uuid");
        let absent = |path: &Path| ImageError::io("read", path, std::io::Error::from(ErrorKind::NotFound));
        let id = read(source)?.ok_or_else(|| absent(source))?;
        // Of two that make it at once, the first one's counts.
        let replaces = if before.is_some() { Replaces::Anything } else { Replaces::Nothing };
        write(self.images(), &path, &format!("{}{place}", id.trim()), replaces)?;
        known()?.ok_or_else(|| absent(&path))
    }

    /// Note that a host is about to make the image `name`, which is not there. Whoever was noted for it before was killed while making it.
    pub fn hold_new(&self, name: &str, holder: &Holder) -> Result<()> {
        check_name(name)?;
        self.forget_all(name)?;
        self.hold(name, holder)
    }

    /// Note that a host has the image `name`.
    pub fn hold(&self, name: &str, holder: &Holder) -> Result<()> {
        check_name(name)?;
        check_name(&holder.id)?;
        let directory = self.holders_of(name);
        std::fs::create_dir_all(&directory).map_err(|source| ImageError::io("make", &directory, source))?;
        write(&directory, &directory.join(&holder.id), &holder.description, Replaces::Anything)
    }

    /// Note that a host does not have the image any more; one that had not is fine.
    pub fn release(&self, name: &str, id: &str) -> Result<()> {
        check_name(name)?;
        check_name(id)?;
        let path = self.holders_of(name).join(id);
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != ErrorKind::NotFound => return Err(ImageError::io("remove", &path, source)),
            _ => {}
        }
        // It goes with the last of them, and with what a killed command left in it.
        if self.holders(name)?.is_empty() { self.forget_all(name) } else { Ok(()) }
    }

    fn forget_all(&self, name: &str) -> Result<()> {
        let directory = self.holders_of(name);
        match std::fs::remove_dir_all(&directory) {
            Err(source) if source.kind() != ErrorKind::NotFound => Err(ImageError::io("remove", &directory, source)),
            _ => Ok(()),
        }
    }

    /// The hosts that have the image.
    pub fn holders(&self, name: &str) -> Result<Vec<Holder>> {
        check_name(name)?;
        let directory = self.holders_of(name);
        let failed = |source| ImageError::io("list", &directory, source);
        let listed = match std::fs::read_dir(&directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut holders = Vec::new();
        for (count, entry) in listed.enumerate() {
            let entry = entry.map_err(failed)?;
            if count == HOLDERS_MAX {
                // Whoever took a part for all of them would remove what others have.
                return Err(failed(std::io::Error::other(format!("it has more than {HOLDERS_MAX} files"))));
            }
            let id = entry.file_name().to_string_lossy().into_owned();
            if check_name(&id).is_ok() {
                let description = read(&entry.path())?.unwrap_or_default().trim().to_owned();
                holders.push(Holder { id, description });
            }
        }
        holders.sort_by(|one, other| one.id.cmp(&other.id));
        Ok(holders)
    }

    fn holders_of(&self, name: &str) -> PathBuf {
        self.images().with_file_name(HOLDERS_NAME).join(name)
    }
}

/// The text of a file, which others may have written; what is no regular file has none, and is not waited for.
fn read(path: &Path) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = rustix::fs::open(path, flags, Mode::empty()).map(File::from);
    let found = open.map_err(std::io::Error::from).and_then(|file| {
        if file.metadata()?.is_file() {
            file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
        }
        Ok(())
    });
    match found {
        Ok(()) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ImageError::io("read", path, source)),
    }
}

/// What a file may take the place of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Replaces {
    Anything,
    /// One that is there already stays.
    Nothing,
}

/// Write a small file as a whole, or not at all.
fn write(directory: &Path, path: &Path, text: &str, replaces: Replaces) -> Result<()> {
    let failed = |source: std::io::Error| ImageError::io("write", path, source);
    // What begins with a dot is nobody's id.
    let mut file =
        tempfile::Builder::new().prefix(crate::store::RECORD_PREFIX).tempfile_in(directory).map_err(failed)?;
    file.write_all(text.as_bytes()).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
    let persisted = match replaces {
        Replaces::Anything => file.persist(path).map(drop),
        Replaces::Nothing => file.persist_noclobber(path).map(drop),
    };
    match persisted {
        Err(error) if replaces == Replaces::Nothing && error.error.kind() == ErrorKind::AlreadyExists => {}
        other => other.map_err(|error| failed(error.error))?,
    }
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_held_by_each_host_once() {
        let place = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(place.path()).expect("opened");
        let holder = |id: &str| Holder { id: id.to_owned(), description: format!("host {id}") };
        assert!(store.holders("debian:12").expect("none").is_empty());
        for id in ["b", "a", "b"] {
            store.hold("debian:12", &holder(id)).expect("held");
        }
        assert_eq!(store.holders("debian:12").expect("two"), [holder("a"), holder("b")]);
        assert!(store.holders("debian").expect("none").is_empty(), "another image");
        for id in ["a", "a", "none"] {
            store.release("debian:12", id).expect("released");
        }
        assert_eq!(store.holders("debian:12").expect("one"), [holder("b")]);
        store.release("debian:12", "b").expect("released");
        assert!(!place.path().join("hosts/debian:12").exists());
        // Of one that was killed, and of a note that it had begun to write.
        store.hold("debian:12", &holder("killed")).expect("held");
        std::fs::write(place.path().join("hosts/debian:12/.tmp-x"), "").expect("written");
        store.hold_new("debian:12", &holder("b")).expect("held");
        assert_eq!(store.holders("debian:12").expect("one"), [holder("b")]);
        std::fs::write(place.path().join("hosts/debian:12/.tmp-x"), "").expect("written");
        store.release("debian:12", "b").expect("released");
        assert!(!place.path().join("hosts/debian:12").exists());
        assert!(store.hold("../x", &holder("a")).is_err() && store.hold("x", &holder("../a")).is_err());
    }

    #[test]
    fn a_state_directory_keeps_its_id() {
        let place = tempfile::tempdir().expect("a directory");
        let id = |name: &str| ImageStore::open(&place.path().join(name)).expect("opened").host_id().expect("an id");
        let first = std::thread::scope(|scope| {
            let made = [(); 4].map(|()| scope.spawn(|| id("one")));
            let made = made.map(|one| one.join().expect("an id"));
            assert!(made.iter().all(|one| *one == made[0]), "{made:?}");
            made[0].clone()
        });
        assert_eq!(id("one"), first);
        assert_ne!(id("two"), first);
        // Whoever has a copy is another one.
        let file = |name: &str| place.path().join(name).join("images").join(ID_NAME);
        let _ = std::fs::copy(file("one"), file("two")).expect("copied");
        assert_ne!(id("two"), first);
        assert_eq!(id("two"), id("two"));
        assert_eq!(id("one"), first);
    }
}
