//! A fake host in memory that records every change it is asked to make.

use crate::{Host, HostError, ProcessIdentity, ProcessSignal, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The boot identifier of every recorded host.
const BOOT_ID: &str = "00000000-0000-0000-0000-000000000001";

#[derive(Debug, Default)]
struct Recorded {
    files: BTreeMap<PathBuf, String>,
    directories: BTreeSet<PathBuf>,
    processes: BTreeMap<u32, u64>,
    attributes: BTreeMap<(PathBuf, String), String>,
    log: Vec<String>,
}

/// A host that answers from a recorded tree and writes down every change.
#[derive(Debug, Default)]
pub struct RecordingHost {
    recorded: Mutex<Recorded>,
}

impl RecordingHost {
    /// An empty host.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A host with the files of a recorded tree: one `PATH<tab>CONTENT` a line, `\n` in the content meaning a line end.
    #[must_use]
    pub fn from_tree(tree: &str) -> Self {
        let host = Self::new();
        for (path, content) in tree.lines().filter_map(|line| line.split_once('\t')) {
            host.set_file(path, &content.replace("\\n", "\n"));
        }
        host
    }

    /// Give a file a content.
    pub fn set_file(&self, path: impl AsRef<Path>, content: &str) {
        let path = path.as_ref();
        let mut recorded = self.lock();
        recorded.directories.extend(path.ancestors().skip(1).map(Path::to_path_buf));
        recorded.files.insert(path.to_path_buf(), content.to_owned());
    }

    /// Let a process exist.
    pub fn set_process(&self, pid: u32, start_ticks: u64) {
        self.lock().processes.insert(pid, start_ticks);
    }

    /// What was changed, in order.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.lock().log.clone()
    }

    /// The directories that exist below a path, itself included.
    #[must_use]
    pub fn directories_below(&self, path: impl AsRef<Path>) -> Vec<PathBuf> {
        self.lock().directories.iter().filter(|d| d.starts_with(path.as_ref())).cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn absent(action: &'static str, path: &Path) -> HostError {
    HostError::io(action, path, std::io::Error::from(std::io::ErrorKind::NotFound))
}

impl Host for RecordingHost {
    fn read_text(&self, path: &Path) -> Result<String> {
        self.lock().files.get(path).cloned().ok_or_else(|| absent("read", path))
    }

    fn write_text(&self, path: &Path, text: &str) -> Result<()> {
        let mut recorded = self.lock();
        // The kernel makes the control files of a new group: a file is there when its directory is.
        if !path.parent().is_some_and(|parent| recorded.directories.contains(parent)) {
            return Err(absent("write", path));
        }
        recorded.files.insert(path.to_path_buf(), text.to_owned());
        recorded.log.push(format!("write {} {text}", path.display()));
        Ok(())
    }

    fn attribute(&self, path: &Path, name: &str) -> Option<String> {
        self.lock().attributes.get(&(path.to_path_buf(), name.to_owned())).cloned()
    }

    fn create_attribute(&self, path: &Path, name: &str, value: &str) -> Result<bool> {
        let mut recorded = self.lock();
        if !recorded.directories.contains(path) {
            return Err(absent("mark", path));
        }
        let place = (path.to_path_buf(), name.to_owned());
        let is_new = !recorded.attributes.contains_key(&place);
        if is_new {
            recorded.attributes.insert(place, value.to_owned());
        }
        Ok(is_new)
    }

    /// One that is there has its path for that.
    fn directory_id(&self, path: &Path) -> Option<String> {
        self.lock().directories.contains(path).then(|| path.display().to_string())
    }

    fn make_directory(&self, path: &Path) -> Result<()> {
        let mut recorded = self.lock();
        if !path.parent().is_some_and(|parent| recorded.directories.contains(parent)) {
            return Err(absent("make", path));
        }
        if recorded.directories.insert(path.to_path_buf()) {
            recorded.log.push(format!("make {}", path.display()));
        }
        Ok(())
    }

    fn remove_directory(&self, path: &Path) -> Result<()> {
        let mut recorded = self.lock();
        if recorded.directories.iter().any(|d| d.parent() == Some(path)) {
            return Err(HostError::io("remove", path, std::io::Error::from(std::io::ErrorKind::DirectoryNotEmpty)));
        }
        if recorded.directories.remove(path) {
            recorded.files.retain(|file, _| file.parent() != Some(path));
            recorded.attributes.retain(|(marked, _), _| marked != path);
            recorded.log.push(format!("remove {}", path.display()));
        }
        Ok(())
    }

    fn list_directories(&self, path: &Path) -> Result<Vec<String>> {
        let recorded = self.lock();
        let children = recorded.directories.iter().filter(|d| d.parent() == Some(path));
        Ok(children.filter_map(|d| d.file_name()).map(|name| name.to_string_lossy().into_owned()).collect())
    }

    fn detach(&self, mount_point: &Path) -> Result<()> {
        self.lock().log.push(format!("detach {}", mount_point.display()));
        Ok(())
    }

    fn identify(&self, pid: u32) -> Option<ProcessIdentity> {
        let start_ticks = *self.lock().processes.get(&pid)?;
        Some(ProcessIdentity { pid, start_ticks, boot_id: BOOT_ID.to_owned() })
    }

    fn signal(&self, process: &ProcessIdentity, signal: ProcessSignal) -> Result<bool> {
        let alive = process.is_alive(self);
        if alive {
            let mut recorded = self.lock();
            recorded.log.push(format!("signal {} {signal:?}", process.pid));
            if signal == ProcessSignal::Kill {
                recorded.processes.remove(&process.pid);
            }
        }
        Ok(alive)
    }

    fn wait_end(&self, process: &ProcessIdentity, _limit: Duration) -> Result<bool> {
        Ok(!process.is_alive(self))
    }
}
