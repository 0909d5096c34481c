//! Interoperability tests: upper branches in real directories, read by the kernel's overlayfs.

use crate::support::*;
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{FileType, NodeId, RenameFlags};
use poolfs_local::{Local, LocalOptions};
use poolfs_union::{Lower, Union, UnionConfig};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Tells a test that it already runs in its namespace.
const INSIDE: &str = "POOLFS_TEST_NAMESPACE";

/// Runs `body` of the test `name` in a mount namespace of its own, which takes what is mounted there along when it ends.
fn in_namespace(name: &str, body: impl FnOnce()) {
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

fn layer(path: &Path, read_only: bool) -> Arc<dyn Libservice> {
    Local::open(path, LocalOptions { read_only, ..LocalOptions::default() }).expect("the directory opens")
}

fn union(top: &Path) -> Arc<Union> {
    let lowers = vec![Lower { layer_id: "base".into(), layer: layer(&top.join("lower"), true), is_union: false }];
    Union::open(UnionConfig::new(layer(&top.join("upper"), false), lowers)).expect("the union opens")
}

/// A directory with `lower`, `upper` and `merged`, on an ext4 of its own size.
fn place() -> tempfile::TempDir {
    let top = tempfile::tempdir().expect("a directory");
    for name in ["lower", "upper", "merged"] {
        fs::create_dir(top.path().join(name)).expect("made");
    }
    top
}

/// Mounts what the union wrote, as the topmost lower layer of an overlay.
fn mount_overlay(top: &Path) {
    let options = format!(
        "lowerdir={}:{},redirect_dir=follow,metacopy=off",
        top.join("upper").display(),
        top.join("lower").display()
    );
    let merged = top.join("merged");
    let output = Command::new("mount")
        .args(["-t", "overlay", "overlay", "-o", &options])
        .arg(&merged)
        .output()
        .expect("mount is there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn unmount_overlay(top: &Path) {
    assert!(Command::new("umount").arg(top.join("merged")).status().expect("umount is there").success());
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(path)
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .filter(|name| name != ".poolfs")
        .collect();
    names.sort();
    names
}

/// Every path of the union with its content, compared with what overlayfs shows.
fn agrees(union: &Union, merged: &Path) {
    let mut pending = vec![(NodeId::ROOT, merged.to_path_buf())];
    let mut files = 0;
    while let Some((directory, path)) = pending.pop() {
        let listed = list(union, directory);
        let shown: Vec<_> = listed.iter().map(|(name, _)| String::from_utf8_lossy(name).into_owned()).collect();
        assert_eq!(names(&path), shown, "{}", path.display());
        for (name, file_type) in listed {
            let text = String::from_utf8_lossy(&name).into_owned();
            let node = union.lookup(ROOT, directory, crate::support::name(&text)).expect("listed").node;
            match file_type {
                FileType::Directory => pending.push((node, path.join(&text))),
                FileType::Regular => {
                    let content = read_node(union, node);
                    assert_eq!(fs::read(path.join(&text)).expect("read"), content, "{text}");
                    files += 1;
                }
                _ => {}
            }
        }
    }
    assert!(files > 3);
}

fn read_node(union: &Union, node: NodeId) -> Vec<u8> {
    let size = union.getattr(ROOT, node).expect("attributes").size;
    let handle = union.open(ROOT, node, poolfs_libservice::types::OpenFlags::READ_ONLY).expect("opened");
    let mut content = vec![0; size as usize];
    let count = union.read(ROOT, handle, 0, &mut content).expect("read");
    union.release(handle);
    assert_eq!(count, content.len());
    content
}

fn populate(lower: &Path) {
    for directory in ["d/e", "opaque/old", "gone", "moved/deep", "kept"] {
        fs::create_dir_all(lower.join(directory)).expect("made");
    }
    for file in
        ["d/a", "d/b", "d/e/c", "opaque/old/x", "opaque/y", "gone/z", "moved/deep/m", "moved/n", "kept/k", "big"]
    {
        fs::write(lower.join(file), file.repeat(3000)).expect("written");
    }
}

#[test]
fn overlayfs_reads_whiteouts_opaque_directories_and_redirects() {
    in_namespace("overlay::overlayfs_reads_whiteouts_opaque_directories_and_redirects", || {
        let top = place();
        let top = top.path();
        populate(&top.join("lower"));
        let union = union(top);
        let root = NodeId::ROOT;
        let d = node(&*union, "d").unwrap();
        union.unlink(ROOT, d, name("a")).unwrap();
        for path in ["opaque/old/x", "opaque/y", "gone/z"] {
            let (parent, last) = split(&*union, path);
            union.unlink(ROOT, parent, last).unwrap();
        }
        let (opaque, _) = split(&*union, "opaque/old");
        union.rmdir(ROOT, opaque, name("old")).unwrap();
        union.rmdir(ROOT, root, name("opaque")).unwrap();
        union.rmdir(ROOT, root, name("gone")).unwrap();
        mkdir(&*union, "opaque");
        put(&*union, "opaque/new", b"new");
        union.rename(ROOT, root, name("moved"), d, name("here"), RenameFlags::empty()).unwrap();
        put(&*union, "d/here/deep/added", b"added");
        union.rename(ROOT, d, name("e"), d, name("f"), RenameFlags::empty()).unwrap();
        union.sync().unwrap();
        mount_overlay(top);
        agrees(&union, &top.join("merged"));
        assert!(!top.join("merged/gone").exists() && !top.join("merged/moved").exists());
        unmount_overlay(top);
    });
}

#[test]
fn overlayfs_refuses_a_sketch_and_takes_it_when_whole() {
    in_namespace("overlay::overlayfs_refuses_a_sketch_and_takes_it_when_whole", || {
        let top = place();
        let top = top.path();
        populate(&top.join("lower"));
        {
            let union = union(top);
            write_at(&*union, "big", 1, b"changed");
            fsync(&*union, "big");
        }
        mount_overlay(top);
        let refused = fs::read(top.join("merged/big")).expect_err("a sketch is refused");
        assert_eq!(refused.raw_os_error(), Some(poolfs_libservice::types::Errno::EPERM.raw()), "{refused}");
        unmount_overlay(top);
        let union = union(top);
        let whole = get(&*union, "big").unwrap();
        assert_eq!(&whole[..10], b"bchangedgb");
        write_at(&*union, "big", 0, &whole);
        fsync(&*union, "big");
        mount_overlay(top);
        agrees(&union, &top.join("merged"));
        unmount_overlay(top);
    });
}

#[test]
fn the_union_reads_what_overlayfs_wrote() {
    in_namespace("overlay::the_union_reads_what_overlayfs_wrote", || {
        let top = place();
        let top = top.path();
        populate(&top.join("lower"));
        for name in ["middle", "work"] {
            fs::create_dir(top.join(name)).expect("made");
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=on,metacopy=off",
            top.join("lower").display(),
            top.join("middle").display(),
            top.join("work").display()
        );
        let merged = top.join("merged");
        let mounted = Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged).status();
        assert!(mounted.expect("mount is there").success());
        fs::remove_file(merged.join("d/a")).unwrap();
        fs::remove_dir_all(merged.join("opaque")).unwrap();
        fs::create_dir(merged.join("opaque")).unwrap();
        fs::write(merged.join("opaque/new"), "new").unwrap();
        fs::rename(merged.join("moved"), merged.join("d/here")).unwrap();
        fs::rename(merged.join("d/e"), merged.join("d/f")).unwrap();
        fs::write(merged.join("kept/k"), "changed").unwrap();
        let branch =
            |id: &str, path: &str| Lower { layer_id: id.into(), layer: layer(&top.join(path), true), is_union: false };
        let lowers = vec![branch("middle", "middle"), branch("base", "lower")];
        let union = Union::open(UnionConfig::new(layer(&top.join("upper"), false), lowers)).expect("the union opens");
        agrees(&union, &merged);
        unmount_overlay(top);
    });
}
