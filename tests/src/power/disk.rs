//! Disks of a test: ext4 in a file, mounted by a loop device.

use super::Content;
use crate::{run, shell};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Waits for the writes that were begun of all files below (`SYNC_FILE_RANGE_WAIT_BEFORE`).
const WAIT_FOR_WRITES: &str = r#"
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for place, _, names in os.walk("."):
    for path in (os.path.join(place, name) for name in names):
        if os.path.isfile(path) and not os.path.islink(path):
            file = os.open(path, os.O_RDONLY)
            assert libc.sync_file_range(file, ctypes.c_int64(0), ctypes.c_int64(0), 1) == 0, (path, ctypes.get_errno())
            os.close(file)
"#;

/// The directory that an empty disk has, for an upper branch.
const BRANCH: &str = "upper";

/// An ext4 of so many MiB, in blocks of so many bytes, that holds nothing but an empty directory. `folder` is for what making it needs.
///
/// # Panics
/// When it cannot be made.
#[must_use]
pub fn empty_disk(folder: &Path, mebibytes: u32, block_bytes: u32) -> Content {
    let (image, tree) = (folder.join("new.ext4"), folder.join("new"));
    fs::create_dir_all(tree.join(BRANCH)).expect("a folder");
    // Nothing of it is left to be written by the kernel later, which would only make the recording longer.
    let options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard";
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-b", &block_bytes.to_string(), "-E", options, "-d"]).arg(tree);
    let _ = run(command.arg(&image).arg(format!("{mebibytes}M"))).expect("mkfs.ext4 (package e2fsprogs)");
    let content = Content::new(&fs::read(&image).expect("readable"));
    fs::remove_file(image).expect("removed");
    content
}

/// A mounted disk.
pub struct Disk {
    at: PathBuf,
    is_mounted: bool,
}

impl Disk {
    /// Mounts the ext4 in a file. The kernel commits its journal every second; the loop device goes with the mount.
    ///
    /// # Errors
    /// What `mount` says.
    pub fn mount(file: &Path, at: &Path) -> Result<Self, String> {
        fs::create_dir_all(at).map_err(|error| error.to_string())?;
        let mounted = run(Command::new("mount").args(["-t", "ext4", "-o", "loop,commit=1"]).args([file, at]));
        if mounted.code == 0 { Ok(Self { at: at.to_path_buf(), is_mounted: true }) } else { Err(mounted.err) }
    }

    /// The directory for an upper branch.
    #[must_use]
    pub fn branch(&self) -> PathBuf {
        self.at.join(BRANCH)
    }

    /// Has the kernel write whatever it has cached of this disk; by another process, see the recording device.
    pub fn write_back(&self) {
        let _ = shell(&format!("sync -f {}", self.at.display())).expect("sync");
    }

    /// Has the filesystem commit its journal: all names are on the disk, and of content what has blocks by now. By another process, as
    /// above.
    ///
    /// ext4 commits that blocks are the file's before it commits that they were written (`dioread_nolock`): until what it has begun to write
    /// is written, some milliseconds unless the machine is busy, its own files show zeros there after a cut, too. That is waited for, and
    /// no write is begun.
    pub fn commit(&self) {
        let other = self.at.join("other");
        let _ = shell(&format!(
            "cd {}; python3 -c '{WAIT_FOR_WRITES}'; echo x >>{1}; sync {1}",
            self.at.display(),
            other.display()
        ))
        .expect("sync");
    }

    /// Unmounts it.
    ///
    /// # Panics
    /// When it is in use.
    pub fn unmount(mut self) {
        self.is_mounted = false;
        let _ = run(Command::new("umount").arg(&self.at)).expect("umount");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if self.is_mounted {
            // On a failure the service may still use it.
            let way = if std::thread::panicking() { "--lazy" } else { "--verbose" };
            let unmounted = run(Command::new("umount").arg(way).arg(&self.at));
            assert!(unmounted.code == 0 || std::thread::panicking(), "umount: {}", unmounted.err);
        }
    }
}
