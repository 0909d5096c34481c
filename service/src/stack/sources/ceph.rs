//! Directories of a CephFS as sources: each is mounted from the cluster by a client of its own, when it is first used.

use super::super::{StackError, with_causes};
use super::{Backend, BranchId, Claim, ClaimKind, ENDING_PAUSE, Lineage, Source, Unclaimed};
use crate::outside::{Deed, outside_later};
use crate::sync::lock;
use poolfs_ceph::{Ceph, KEPT_BYTES, MountError, Source as Tree};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Caller, FileSystemStatistics, NodeId};
use poolfs_local::Descriptors;
use poolfs_service_protocol::{CephAccess, Layer};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A directory of a CephFS.
pub(crate) struct CephDirectory {
    name: PathBuf,
    tree: Tree,
    access: Arc<CephAccess>,
    lineage: Lineage,
    /// The client, from when on it is first needed.
    mounted: Mutex<Option<Arc<Ceph>>>,
}

impl CephDirectory {
    /// The directory at a path of the filesystem that `access` leads to.
    pub(crate) fn new(name: &Path, path: &Path, access: &CephAccess, used: Used) -> Self {
        let read_only = used == Used::Read;
        let id = |path: &Path| BranchId::Ceph(Arc::new((access.clone(), path.to_owned())));
        let above = path.ancestors().skip(1).map(id).collect();
        let tree = Tree {
            path: path.to_owned(),
            configuration: access.configuration.clone(),
            user: access.user.clone(),
            keyring: access.keyring.clone(),
            filesystem: access.filesystem.clone(),
            holder: access.holder.as_ref().map(|pool| holder(pool, path, access, read_only)),
            read_only,
            is_shared: used == Used::ByAnybody,
        };
        let lineage = Lineage { own: id(path), above };
        Self { name: name.to_owned(), tree, access: Arc::new(access.clone()), lineage, mounted: Mutex::default() }
    }

    /// The client. Another process may still end the last one of this pool, which this ends at once.
    fn mounted(&self) -> Result<Arc<Ceph>, StackError> {
        let mut mounted = lock(&self.mounted);
        if let Some(mounted) = &*mounted {
            return Ok(Arc::clone(mounted));
        }
        let tree = self.tree.clone();
        let made = self.answered("mounted", move || Ceph::mount(&tree))?;
        let made = made.map_err(|error| self.failed(told(&error)))?;
        Ok(Arc::clone(mounted.insert(made)))
    }

    /// What it has room for.
    pub(crate) fn space(&self) -> Result<FileSystemStatistics, StackError> {
        let mounted = self.mounted()?;
        let space = self.answered("looked at", move || mounted.statfs(&Caller::ROOT, NodeId::ROOT))?;
        space.map_err(|error| self.failed(with_causes(&error)))
    }

    fn failed(&self, cause: String) -> StackError {
        StackError::Branch { path: self.name.clone(), cause }
    }

    /// What the cluster answers in time. Nothing ends a call that its metadata server has not answered; what comes of it later is given up there.
    fn answered<T: Send + 'static>(
        &self,
        doing: &str,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StackError> {
        let (done, answer) = channel();
        let Some(unanswered) = Unanswered::new(&UNANSWERED) else {
            return Err(self.failed(format!(
                "{UNANSWERED_MAX} calls of this pool's service wait for clusters that do not answer; look whether their monitors, metadata \
                 servers and OSDs work (ceph -s)"
            )));
        };
        let made = outside_later(Deed::Cluster, move || {
            let _ = done.send(call());
            drop(unanswered);
        });
        made.map_err(|error| self.failed(error.to_string()))?;
        answer.recv_timeout(ANSWER_WAIT).map_err(|_| {
            let seconds = ANSWER_WAIT.as_secs();
            self.failed(format!(
                "its cluster did not let it be {doing} in {seconds} s; look whether its monitors, metadata servers and OSDs work (ceph -s)"
            ))
        })
    }
}

/// Most calls that wait for clusters at once: each has a thread, and nothing ends it.
const UNANSWERED_MAX: usize = 16;
static UNANSWERED: AtomicUsize = AtomicUsize::new(0);

/// One of them, until it is dropped.
struct Unanswered(&'static AtomicUsize);

impl Unanswered {
    /// Nothing if there are too many.
    fn new(all: &'static AtomicUsize) -> Option<Self> {
        let more = |count| (count < UNANSWERED_MAX).then_some(count + 1);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(all))
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How the directory is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Used {
    /// Only read.
    Read,
    /// Written by one pool, or by several that do not care.
    Written,
    /// Written by anybody, so that nothing above the client keeps content.
    ByAnybody,
}

/// What a client takes of memory beside what it keeps of content: measured with Ceph 16.2.
const CLIENT_BYTES: u64 = 8 << 20;

/// Longest wait for a cluster by a mount: libcephfs itself gives up after 30 s where no monitor answers.
const ANSWER_WAIT: Duration = Duration::from_secs(45);

/// An error with what caused it, and then what to do.
fn told(error: &MountError) -> String {
    let text = with_causes(error);
    let without = error.to_string();
    let cause = text.strip_prefix(&without).unwrap_or_default();
    match without.rsplit_once("; ") {
        Some((what, remedy)) => format!("{what}{cause}; {remedy}"),
        None => text,
    }
}

/// What the client of a pool for a directory is called at the cluster.
///
/// A pool may use one lower branch in several ways at once, each by a client of its own: none of them may take another for its dead predecessor.
fn holder(pool: &str, path: &Path, access: &CephAccess, read_only: bool) -> String {
    let way = if read_only { "reads" } else { "writes" };
    let CephAccess { configuration, user, keyring, filesystem, cluster: _, holder: _ } = access;
    // Quoted, and so without zeros and clear where each ends.
    format!("poolfs {pool} {way} {path:?} {configuration:?} {user:?} {keyring:?} {filesystem:?}")
}

impl Source for CephDirectory {
    fn name(&self) -> &Path {
        &self.name
    }

    fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    fn access(&self) -> Option<Arc<CephAccess>> {
        Some(Arc::clone(&self.access))
    }

    fn layer(&self) -> Layer {
        Layer::Ceph
    }

    fn claim(&self, kind: ClaimKind, wait: Duration) -> Result<Claim, Unclaimed> {
        let mounted = self.mounted().map_err(Unclaimed::Failed)?;
        let wanted = match kind {
            ClaimKind::Alone => poolfs_ceph::ClaimKind::Alone,
            ClaimKind::Shared => poolfs_ceph::ClaimKind::Shared,
        };
        let begun = Instant::now();
        loop {
            let client = Arc::clone(&mounted);
            match self.answered("locked", move || client.claim(wanted)).map_err(Unclaimed::Failed)? {
                Ok(Some(claim)) => return Ok(Claim::of_ceph(claim)),
                Ok(None) if begun.elapsed() < wait => std::thread::sleep(ENDING_PAUSE),
                Ok(None) => {
                    return Err(Unclaimed::Held(
                        "another pool, here or on another host, has it mounted or uses it as a branch; unmount that first. Of a host that died, \
                         the cluster lets go after a minute",
                    ));
                }
                Err(errno) => {
                    let cause = format!("the cluster does not let it be locked: {errno}");
                    return Err(Unclaimed::Failed(StackError::Branch { path: self.name.clone(), cause }));
                }
            }
        }
    }

    fn is_in_memory(&self) -> Result<bool, StackError> {
        Ok(false)
    }

    fn memory_bytes(&self) -> u64 {
        CLIENT_BYTES + if self.tree.is_shared { KEPT_BYTES } else { 0 }
    }

    fn open(&self, _read_only: bool, _descriptors: &Arc<Descriptors>) -> Result<Arc<dyn Backend>, StackError> {
        Ok(self.mounted()?)
    }
}

impl Backend for Ceph {
    fn discard(&self) {
        Ceph::discard(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_calls_wait_for_clusters_than_there_may() {
        static ALL: AtomicUsize = AtomicUsize::new(0);
        let mut waiting: Vec<_> = std::iter::from_fn(|| Unanswered::new(&ALL)).collect();
        assert_eq!(waiting.len(), UNANSWERED_MAX);
        let _ = waiting.pop();
        assert!(Unanswered::new(&ALL).is_some_and(|one| Unanswered::new(one.0).is_none()));
    }

    #[test]
    fn directories_of_one_filesystem_overlap_by_their_paths() {
        let at = |path: &str, file: Option<&str>| {
            let access = CephAccess { configuration: file.map(PathBuf::from), ..CephAccess::default() };
            CephDirectory::new(Path::new("ceph:/x"), Path::new(path), &access, Used::Read).lineage
        };
        assert!(at("/a", None).overlaps(&at("/a", None)) && at("/a/b", None).overlaps(&at("/a", None)));
        assert!(at("/", None).overlaps(&at("/a/b", None)));
        assert!(!at("/a", None).overlaps(&at("/ab", None)) && !at("/a/b", None).overlaps(&at("/a/c", None)));
        assert!(at("/a", None).overlaps(&at("/a", Some("/etc/other.conf"))), "it may be a copy");
        let access = CephAccess::default();
        let others = [
            CephAccess { configuration: Some("/c".into()), ..access.clone() },
            CephAccess { user: Some("u".to_owned()), ..access.clone() },
            CephAccess { keyring: Some("/k".into()), ..access.clone() },
            CephAccess { filesystem: Some("f".to_owned()), ..access.clone() },
        ];
        let own = holder("p", Path::new("/a"), &access, true);
        assert_eq!(own, holder("p", Path::new("/a"), &access, true));
        assert_ne!(own, holder("p", Path::new("/a"), &access, false));
        assert!(others.iter().all(|other| holder("p", Path::new("/a"), other, true) != own));
    }
}
