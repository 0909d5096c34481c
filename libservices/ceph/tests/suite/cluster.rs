//! A cluster that ends with its test, and with it what is mounted of it.

use poolfs_ceph::{Ceph, Source};
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Caller, Name, NodeId};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tempfile::TempDir;

/// A cluster of one monitor, one OSD and one metadata server.
pub struct Cluster {
    folder: TempDir,
    made: AtomicU64,
    /// All that were mounted: to unmount one takes a second.
    mounted: Mutex<Vec<Arc<Ceph>>>,
}

impl Cluster {
    pub fn new() -> Self {
        let cluster =
            Self { folder: tempfile::tempdir().expect("a folder"), made: AtomicU64::new(0), mounted: Mutex::default() };
        cluster.run(&["create"]);
        cluster.run(&["quota", "/tests", &(1u64 << 30).to_string()]);
        cluster
    }

    fn place(&self) -> PathBuf {
        self.folder.path().join("cluster")
    }

    /// Runs a command of the script that makes clusters.
    pub fn run(&self, command: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/ceph-cluster.sh");
        let (command, arguments) = command.split_first().expect("a command");
        let ran = Command::new(script).arg(command).arg(self.place()).args(arguments).status().expect("bash");
        assert!(ran.success(), "ceph-cluster.sh {command}: {ran}");
    }

    /// A directory of its filesystem.
    pub fn source(&self, path: &str) -> Source {
        let configuration = Some(self.place().join("ceph.conf"));
        Source { path: path.into(), configuration, ..Source::default() }
    }

    pub fn mount(&self, path: &str) -> Arc<Ceph> {
        self.mounted(&self.source(path))
    }

    /// Mounts it until the test ends.
    pub fn mounted(&self, source: &Source) -> Arc<Ceph> {
        let mounted = Ceph::mount(source).expect("mounted");
        self.mounted.lock().expect("no panic").push(Arc::clone(&mounted));
        mounted
    }

    /// A fresh directory, mounted; others may change it meanwhile, or not.
    pub fn fresh(&self, is_shared: bool) -> Arc<Ceph> {
        let name = format!("fresh-{}", self.made.fetch_add(1, Ordering::Relaxed));
        let first = self.mounted.lock().expect("no panic").first().map(Arc::clone);
        let root = first.unwrap_or_else(|| self.mount("/tests"));
        let made = root.mkdir(&Caller::ROOT, NodeId::ROOT, Name::new(name.as_bytes()).expect("a name"), 0o755);
        root.forget(made.expect("made").node, 1);
        self.mounted(&Source { is_shared, ..self.source(&format!("/tests/{name}")) })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let mounted = std::mem::take(self.mounted.get_mut().unwrap_or_else(PoisonError::into_inner));
        std::thread::scope(|scope| {
            for layer in mounted {
                scope.spawn(|| drop(layer));
            }
        });
        self.run(&["destroy"]);
    }
}
