//! Test support: filesystems of several kinds in a mount namespace of their own, and short forms of calls.

use poolfs_libservice::Libservice;
use poolfs_local::{Local, LocalOptions};
use poolfs_types::{Caller, HandleId, Name, NodeId, OpenFlags};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Tells a test that it already runs in its namespace.
const INSIDE: &str = "POOLFS_TEST_NAMESPACE";

pub const ROOT: Caller = Caller::ROOT;

/// Runs `body` of the test `name` in a mount namespace of its own, which takes everything mounted there along when
/// it ends, however it ends.
pub fn in_namespace(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let test = std::env::current_exe().expect("the test's own path");
    let output = Command::new("unshare")
        .args(["-mpf", "--kill-child", "--propagation", "private", "--"])
        .arg(test)
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .output()
        .expect("unshare is there");
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "no such test {name}: {text}");
}

/// Runs a command that must succeed.
pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// A fresh filesystem of `kind`, mounted below a temporary directory. Call it inside the namespace only.
pub struct Filesystem {
    directory: tempfile::TempDir,
    is_overlay: bool,
}

impl Filesystem {
    pub fn new(kind: &str, mebibytes: u64) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mount = directory.path().join("mount");
        std::fs::create_dir(&mount).expect("a mount point");
        let image = directory.path().join("image");
        match kind {
            "tmpfs" => run("mount", &["-t", "tmpfs", "-o", &format!("size={mebibytes}m"), "tmpfs", text(&mount)]),
            "overlay" => {
                let base = directory.path().join("base");
                std::fs::create_dir(&base).expect("a mount point");
                let at = text(&base);
                run("mount", &["-t", "tmpfs", "tmpfs", at]);
                for name in ["lower", "upper", "work"] {
                    std::fs::create_dir(base.join(name)).expect("a branch");
                }
                let options = format!("lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work");
                run("mount", &["-t", "overlay", "-o", &options, "overlay", text(&mount)]);
            }
            _ => {
                let file = std::fs::File::create(&image).expect("an image");
                file.set_len(mebibytes << 20).expect("room for an image");
                // Small ext4 images get small blocks, and with them small xattrs, unless told otherwise.
                let options: &[&str] = if kind == "ext4" { &["-q", "-F", "-b", "4096"] } else { &["-q", "-f"] };
                run(&format!("mkfs.{kind}"), &[options, &[text(&image)]].concat());
                run("mount", &["-t", kind, "-o", "loop", text(&image), text(&mount)]);
            }
        }
        let magic = match kind {
            "tmpfs" => 0x0102_1994,
            "overlay" => 0x794C_7630,
            "ext4" => 0xEF53,
            "xfs" => 0x5846_5342,
            _ => 0x9123_683E,
        };
        assert_eq!(rustix::fs::statfs(&mount).expect("statfs").f_type, magic, "{kind} is not mounted");
        Self { directory, is_overlay: kind == "overlay" }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("mount")
    }
}

impl Drop for Filesystem {
    fn drop(&mut self) {
        for point in ["mount", "base"].into_iter().take(1 + usize::from(self.is_overlay)) {
            let unmounted = Command::new("umount").arg("-l").arg(self.directory.path().join(point)).status();
            let done = unmounted.is_ok_and(|status| status.success());
            assert!(done || std::thread::panicking(), "cannot unmount {point}");
        }
    }
}

pub fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a valid name")
}

pub fn open(directory: &Path) -> Arc<Local> {
    Local::open(directory, LocalOptions::default()).expect("the directory opens")
}

pub fn create(layer: &Local, parent: NodeId, at: &str) -> (NodeId, HandleId) {
    let (entry, handle) =
        layer.create(&ROOT, parent, name(at), 0o644, OpenFlags::READ_WRITE).unwrap_or_else(|e| panic!("{at}: {e}"));
    (entry.node, handle)
}

pub fn write(layer: &Local, handle: HandleId, offset: u64, data: &[u8]) {
    let written = layer.write(&ROOT, handle, offset, data).expect("a write");
    assert_eq!((written.count, written.offset), (data.len(), offset));
}

pub fn read(layer: &Local, handle: HandleId, offset: u64, length: usize) -> Vec<u8> {
    let mut buffer = vec![0xAA; length];
    let got = layer.read(&ROOT, handle, offset, &mut buffer).expect("a read");
    buffer.truncate(got);
    buffer
}
