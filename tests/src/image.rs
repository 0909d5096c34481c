//! Small test images: a few programs of this machine with the libraries they need.

use crate::{Pool, run};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What shell scripts in a small image have.
const TOOLS: &[&str] = &["sh", "cat", "head", "ls", "rm", "sleep", "stty", "tail"];

/// Makes a root file system in `root`: a shell, the tools above, `programs` in `/bin`, `/etc/passwd`.
///
/// # Panics
/// When this machine lacks one of them, or the disk says no.
pub fn small_root(root: &Path, programs: &[&Path]) {
    for folder in ["bin", "etc", "tmp", "root"] {
        fs::create_dir_all(root.join(folder)).expect("a folder");
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nwww:x:33:33::/:/bin/sh\n").expect("a file");
    let tools: Vec<PathBuf> = TOOLS.iter().map(|name| Path::new("/bin").join(name)).collect();
    for program in tools.iter().map(PathBuf::as_path).chain(programs.iter().copied()) {
        put(program, &root.join("bin").join(program.file_name().expect("a name")));
        for library in libraries(program) {
            put(&library, &root.join(library.strip_prefix("/").expect("absolute")));
        }
    }
}

/// Imports such an image as `name`, with more files when `more` puts them into its root.
///
/// # Panics
/// When that fails.
pub fn import_small(pool: &Pool, folder: &Path, name: &str, programs: &[&Path], more: impl FnOnce(&Path)) {
    let root = folder.join(format!("root-{name}"));
    small_root(&root, programs);
    more(&root);
    let _ = pool.poolfs(&["image", "import", name, &format!("dir:{}", root.display())]).expect("import");
    fs::remove_dir_all(&root).expect("removed");
}

/// Copies a file into a root, if nothing is there: a link of the root would lead to this machine's own files.
pub(crate) fn put(file: &Path, to: &Path) {
    if to.symlink_metadata().is_err() {
        fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
        fs::copy(file, to).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

/// The libraries of a program, its interpreter included; none of a static one.
pub(crate) fn libraries(program: &Path) -> Vec<PathBuf> {
    let listed = run(Command::new("ldd").arg(program)).out;
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    listed.lines().filter_map(path).collect()
}
