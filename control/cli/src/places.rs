//! The identity of the directories of a mount: which ones they are, and which ones they are in, whatever path names them.
//!
//! A directory has as many paths as bind mounts make, and a path leads to another directory after a rename. So a directory is opened once,
//! everything that follows is done with that descriptor, and directories are compared by device and inode. The ancestors of a directory are
//! looked up in its filesystem, through the mount that shows most of it: a bind mount shows nothing above its root.

use crate::ceph::CephPlace;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::waiting;
use poolfs_host::{MountEntry, parse_mount_table};
use poolfs_local::{DirectoryId, LastingName, OpenError, Place, PrivateMount};
use poolfs_service_protocol::{self as service_protocol, Branch, CephAccess};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::io;
use std::path::Path;

/// What is noted of the directory of a branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Whereabouts {
    /// It is a directory of the host.
    Host(HostPlace),
    /// It is at a cluster.
    Ceph(CephPlace),
}

/// What is noted of a directory of the host, so that it is known by whatever path somebody comes to it. In records it is one line: `DEVICE:INODE` of each
/// directory of the lineage, and `TYPE-BYTES` of the lasting name, bytes in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlace {
    /// The directory, and then those that it was in when it was mounted, as far up as its filesystem is mounted anywhere.
    pub lineage: Vec<DirectoryId>,
    /// What finds it after it was moved; none where its filesystem has no such names.
    pub lasting_name: Option<LastingName>,
}

/// A record has something else where it should say where a directory lies.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} does not say where a directory lies")]
pub struct NoWhereabouts(String);

impl From<Whereabouts> for String {
    fn from(whereabouts: Whereabouts) -> String {
        let whereabouts = match whereabouts {
            Whereabouts::Host(place) => place,
            Whereabouts::Ceph(place) => return place.noted(),
        };
        let mut words: Vec<String> =
            whereabouts.lineage.iter().map(|(device, inode)| format!("{device}:{inode}")).collect();
        if let Some((kind, bytes)) = whereabouts.lasting_name {
            let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            words.push(format!("{kind}-{digits}"));
        }
        words.join(" ")
    }
}

impl TryFrom<String> for Whereabouts {
    type Error = NoWhereabouts;

    fn try_from(text: String) -> std::result::Result<Self, NoWhereabouts> {
        let directory = |word: &str| -> Option<DirectoryId> {
            let (device, inode) = word.split_once(':')?;
            Some((device.parse().ok()?, inode.parse().ok()?))
        };
        let name = |word: &str| -> Option<LastingName> {
            let (kind, digits) = word.rsplit_once('-')?;
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
            Some((kind.parse().ok()?, digits.as_bytes().chunks(2).map(byte).collect::<Option<_>>()?))
        };
        if let Some(place) = CephPlace::of_noted(&text) {
            return Ok(Whereabouts::Ceph(place));
        }
        let mut words: Vec<&str> = text.split(' ').collect();
        let lasting_name = words.last().and_then(|word| name(word));
        if lasting_name.is_some() {
            words.pop();
        }
        let lineage: Option<Vec<DirectoryId>> = words.into_iter().map(directory).collect();
        match lineage.filter(|lineage| !lineage.is_empty()) {
            Some(lineage) => Ok(Whereabouts::Host(HostPlace { lineage, lasting_name })),
            None => Err(NoWhereabouts(text)),
        }
    }
}

impl Whereabouts {
    /// Which directory of the host it is, if it is one.
    pub fn id(&self) -> Option<DirectoryId> {
        match self {
            Whereabouts::Host(place) => place.id(),
            Whereabouts::Ceph(_) => None,
        }
    }
}

impl HostPlace {
    /// Which directory it is, when it is known.
    pub fn id(&self) -> Option<DirectoryId> {
        self.lineage.first().copied()
    }

    fn is(&self, id: DirectoryId) -> bool {
        self.id() == Some(id)
    }
}

/// How two directories lie to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// They are one.
    Same,
    /// One is in the other.
    Nested,
}

/// The directory of a branch of a mount that is to be made.
pub enum Found {
    /// One of the host, opened.
    Host(Box<FoundOnHost>),
    /// One at a cluster, which the service looks for.
    Ceph(CephPlace),
}

impl Found {
    /// What is to be noted of it.
    pub fn whereabouts(&self) -> Whereabouts {
        match self {
            Found::Host(found) => Whereabouts::Host(found.place.clone()),
            Found::Ceph(place) => Whereabouts::Ceph(place.clone()),
        }
    }

    /// The directory of the host, if it is one.
    pub fn on_host(&self) -> Option<&FoundOnHost> {
        match self {
            Found::Host(found) => Some(found),
            Found::Ceph(_) => None,
        }
    }

    /// The instance on whose mount it lies.
    pub fn served_by(&self) -> Option<&String> {
        self.on_host()?.served_by.as_ref()
    }

    /// How it lies to another one, which may have been moved since it was noted.
    pub fn relation(&self, other: &Whereabouts) -> Option<Relation> {
        match (self, other) {
            (Found::Host(found), Whereabouts::Host(other)) => found.relation(other),
            (Found::Ceph(place), Whereabouts::Ceph(other)) if place == other => Some(Relation::Same),
            (Found::Ceph(place), Whereabouts::Ceph(other)) => place.overlaps(other).then_some(Relation::Nested),
            (Found::Host(_), Whereabouts::Ceph(_)) | (Found::Ceph(_), Whereabouts::Host(_)) => None,
        }
    }
}

/// An open directory of a mount that is to be made.
pub struct FoundOnHost {
    /// What is to be noted of it.
    place: HostPlace,
    /// The instance on whose mount it lies.
    pub served_by: Option<String>,
    /// The mount that it is on, when it is in the mount table.
    pub mount: Option<MountEntry>,
    id: DirectoryId,
    given: Place,
    /// The same directory by the mount that shows most of its filesystem.
    view: Option<Place>,
}

impl FoundOnHost {
    /// The directory at a path.
    fn open(path: &Path, table: &[MountEntry]) -> std::result::Result<Self, OpenError> {
        let failed = |source: io::Error| OpenError::Directory { directory: path.into(), source };
        let given = Place::open(path)?;
        let (id, mount) = (given.id().map_err(failed)?, given.mount_id().map_err(failed)?);
        let own = table.iter().find(|entry| entry.id == mount);
        let view = own.and_then(|own| widest_view(&given, id, own, table));
        let lineage = view.as_ref().unwrap_or(&given).lineage().map_err(failed)?;
        let place = HostPlace { lineage, lasting_name: given.lasting_name() };
        let served_by = own.and_then(MountEntry::instance).map(str::to_owned);
        Ok(Self { place, served_by, mount: own.cloned(), id, given, view })
    }

    /// Where it lies.
    pub fn lineage(&self) -> &[DirectoryId] {
        &self.place.lineage
    }

    fn relation(&self, other: &HostPlace) -> Option<Relation> {
        let is_in = |inner: &[DirectoryId], outer| inner.iter().skip(1).any(|above| Some(above) == outer);
        if other.is(self.id) {
            Some(Relation::Same)
        } else if is_in(&self.place.lineage, other.lineage.first())
            || is_in(self.lineage_now(other).as_ref().unwrap_or(&other.lineage), Some(&self.id))
        {
            Some(Relation::Nested)
        } else {
            None
        }
    }

    /// What another directory of the same filesystem is in now; nothing where it is not found.
    fn lineage_now(&self, other: &HostPlace) -> Option<Vec<DirectoryId>> {
        let found = self.view.as_ref().unwrap_or(&self.given).find(other.lasting_name.as_ref()?).ok()?;
        // On another filesystem the name may stand for anything.
        found.lineage().ok().filter(|lineage| lineage.first() == other.lineage.first())
    }

    /// Which directory it is.
    pub fn id(&self) -> DirectoryId {
        self.id
    }

    /// The directory itself, for calls that take a path.
    pub fn place(&self) -> &Place {
        &self.given
    }
}

/// The directory on a copy of the mount that shows most of its filesystem; nothing when no mount leads to it.
fn widest_view(given: &Place, id: DirectoryId, own: &MountEntry, table: &[MountEntry]) -> Option<Place> {
    let path = std::fs::read_link(given.path_of_descriptor()).ok()?;
    let inside = own.root.join(path.strip_prefix(&own.mount_point).ok()?);
    let shows_it = |entry: &MountEntry| entry.device == own.device && inside.starts_with(&entry.root);
    let mut views: Vec<_> = table.iter().filter(|entry| shows_it(entry)).collect();
    views.sort_by_key(|entry| entry.root.components().count());
    views.into_iter().find_map(|entry| {
        let root = Place::open(&entry.mount_point).ok()?;
        // Something else may be mounted over it.
        let bare = root.mount_id().ok().filter(|&found| found == entry.id).and_then(|_| root.bare().ok())?;
        let place = bare.below(inside.strip_prefix(&entry.root).ok()?).ok()?;
        place.id().is_ok_and(|found| found == id).then_some(place)
    })
}

/// The directories of a mount: those of the host opened, with private mounts of these for its service.
pub fn find(
    context: &Context,
    branches: Vec<Branch<'_>>,
    ceph: Option<&CephAccess>,
) -> Result<(Vec<Found>, Vec<PrivateMount>)> {
    let text = context.host.read_text(Path::new("/proc/self/mountinfo"))?;
    let table = std::sync::Arc::new(parse_mount_table(&text));
    let (mut all, mut mounts) = (Vec::new(), Vec::new());
    for branch in branches {
        let path = match branch.place() {
            service_protocol::Place::Directory(path) => path,
            service_protocol::Place::Ceph(path) => {
                all.push(Found::Ceph(CephPlace::new(path, ceph.unwrap_or(&CephAccess::default()))));
                continue;
            }
        };
        let (looked_at, read_only, table) = (path.to_owned(), branch.read_only, table.clone());
        let found = waiting::within(context, path, move || {
            let found = FoundOnHost::open(&looked_at, &table)?;
            let mount = found.given.private_mount(&looked_at, read_only)?;
            Ok::<_, OpenError>((found, mount))
        })?;
        let (found, mount) = found.map_err(|error| {
            let cause = error.source().map_or_else(|| error.to_string(), |cause| format!("{error} ({cause})"));
            Failure::file(path, cause)
        })?;
        all.push(Found::Host(Box::new(found)));
        mounts.push(mount);
    }
    Ok((all, mounts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &Path) -> FoundOnHost {
        let text = std::fs::read_to_string("/proc/self/mountinfo").expect("/proc");
        FoundOnHost::open(path, &parse_mount_table(&text)).expect("a directory")
    }

    #[test]
    fn what_is_noted_is_understood_again() {
        for lasting_name in [None, Some((1, vec![0, 255])), Some((-1, Vec::new()))] {
            let whereabouts = Whereabouts::Host(HostPlace { lineage: vec![(1, u64::MAX), (2, 3)], lasting_name });
            let text = serde_json::to_string(&whereabouts).expect("text");
            assert_eq!(serde_json::from_str::<Whereabouts>(&text).expect(&text), whereabouts);
        }
        for wrong in ["", "1", "1:x", "1:2 x-ff", "1:2 1-zz", "1-00", "1:2  3:4"] {
            assert!(Whereabouts::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_mounted_is_what_was_compared() {
        let folder = tempfile::tempdir().expect("a folder");
        let [path, moved] = ["a", "moved"].map(|name| folder.path().join(name));
        std::fs::create_dir(&path).expect("a folder");
        let found = found(&path);
        std::fs::rename(&path, moved).and_then(|()| std::fs::create_dir(&path)).expect("another one");
        let mount = found.given.private_mount(&path, false).expect("a mount");
        assert_eq!(mount.identity().expect("known"), found.id());
    }

    #[test]
    fn directories_are_compared_as_they_lie_now() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().canonicalize().expect("a path").join(name);
        for name in ["a/b/c", "other", "ab"] {
            std::fs::create_dir_all(at(name)).expect("folders");
        }
        let noted = |name: &str| found(&at(name)).place;
        let [a, b, c] = ["a", "a/b", "a/b/c"].map(noted);
        assert_eq!(found(&at("a/b")).relation(&b), Some(Relation::Same));
        assert_eq!(found(&at("a/b")).relation(&a), Some(Relation::Nested));
        assert_eq!(found(&at("a/b")).relation(&c), Some(Relation::Nested));
        assert_eq!(found(&at("ab")).relation(&a), None);
        std::fs::rename(at("a/b"), at("other/b")).expect("moved");
        std::fs::create_dir(at("a/b")).expect("another one");
        assert_eq!(found(&at("a/b")).relation(&b), None);
        assert_eq!(found(&at("other/b")).relation(&b), Some(Relation::Same));
        if b.lasting_name.is_some() {
            assert_eq!(found(&at("other")).relation(&c), Some(Relation::Nested));
            assert_eq!(found(&at("a")).relation(&c), None);
        }
        // Nothing is known of where it is now.
        let nameless = HostPlace { lasting_name: None, ..c };
        assert_eq!(found(&at("a")).relation(&nameless), Some(Relation::Nested));
    }
}
