//! File trees for tests: creating them, and checksums that show whether one changed.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// Everything a branch shows, one line an object: type, mode, owner, links, size, modification time, content. Two equal
/// answers mean that nothing in the tree was changed in between.
///
/// # Panics
/// When the tree cannot be read.
#[must_use]
pub fn checksum(root: &Path) -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    walk(root, root, &mut lines);
    lines
}

fn walk(root: &Path, folder: &Path, lines: &mut BTreeMap<String, String>) {
    let mut names: Vec<_> = fs::read_dir(folder).expect("readable").map(|e| e.expect("readable").path()).collect();
    names.sort();
    for path in names {
        let meta = fs::symlink_metadata(&path).expect("readable");
        let content = if meta.file_type().is_symlink() {
            xxh3_64(fs::read_link(&path).expect("readable").as_os_str().as_bytes())
        } else if meta.is_file() {
            xxh3_64(&fs::read(&path).expect("readable"))
        } else {
            0
        };
        let key = path.strip_prefix(root).expect("below the root").display().to_string();
        lines.insert(
            key,
            format!(
                "{:o} {}:{} links {} size {} dev {} mtime {}.{} {content:016x}",
                meta.mode(),
                meta.uid(),
                meta.gid(),
                meta.nlink(),
                if meta.is_dir() { 0 } else { meta.size() },
                meta.rdev(),
                meta.mtime(),
                meta.mtime_nsec()
            ),
        );
        if meta.is_dir() {
            walk(root, &path, lines);
        }
    }
}

/// Makes a small tree with all that a lower branch has: nested folders, files of odd sizes, links, modes.
///
/// # Panics
/// When the disk says no.
pub fn populate(root: &Path) {
    for folder in ["etc", "usr/bin", "usr/share/doc", "var/lib/empty"] {
        fs::create_dir_all(root.join(folder)).expect("a folder");
    }
    for (name, size) in
        [("etc/passwd", 900), ("usr/bin/tool", 70_001), ("usr/share/doc/big", 5_000_123), ("var/one", 1)]
    {
        fs::write(root.join(name), pattern(size)).expect("a file");
    }
    fs::set_permissions(root.join("usr/bin/tool"), fs::Permissions::from_mode(0o755)).expect("a mode");
    fs::hard_link(root.join("usr/bin/tool"), root.join("usr/bin/tool-alias")).expect("a hard link");
    symlink("../usr/bin/tool", root.join("etc/alternative")).expect("a link");
    symlink("/etc/passwd", root.join("var/absolute")).expect("a link");
}

/// Bytes that differ from block to block.
fn pattern(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[7] ^ (i >> 12) as u8).collect()
}
