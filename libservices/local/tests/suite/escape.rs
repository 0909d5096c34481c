//! Confinement tests: the layer never leaves its directory, whatever others do to the tree meanwhile.

use crate::support::{Filesystem, ROOT, in_namespace, name, open, read, run};
use poolfs_libservice::Libservice;
use poolfs_local::{Local, LocalOptions, OpenError};
use poolfs_types::{Errno, FileType, NodeId, OpenFlags};
use std::ops::ControlFlow;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// `served` is what the layer serves, beside `outside` on the same filesystem.
fn scene(filesystem: &Filesystem) -> (std::path::PathBuf, std::path::PathBuf) {
    let (served, outside) = (filesystem.path().join("served"), filesystem.path().join("outside"));
    std::fs::create_dir(&served).expect("a directory");
    std::fs::create_dir(&outside).expect("a directory");
    std::fs::write(outside.join("secret"), b"secret").expect("a file");
    (served, outside)
}

fn on_each(test: &str, check: impl Fn(&Path, &Path)) {
    in_namespace(test, || {
        for kind in ["tmpfs", "ext4", "xfs", "btrfs", "overlay"] {
            let filesystem = Filesystem::new(kind, 320);
            let (served, outside) = scene(&filesystem);
            check(&served, &outside);
        }
    });
}

#[test]
fn symbolic_links_are_never_followed() {
    on_each("escape::symbolic_links_are_never_followed", |served, outside| {
        symlink(outside, served.join("link")).expect("a link");
        symlink(outside.join("secret"), served.join("file")).expect("a link");
        let layer = open(served);
        let link = layer.lookup(&ROOT, NodeId::ROOT, name("link")).expect("lookup");
        assert_eq!(link.attributes.file_type, FileType::Symlink);
        assert_eq!(layer.lookup(&ROOT, link.node, name("secret")).expect_err("a link").errno(), Errno::ENOTDIR);
        assert_eq!(layer.opendir(&ROOT, link.node).expect_err("a link").errno(), Errno::ENOTDIR);
        let file = layer.lookup(&ROOT, NodeId::ROOT, name("file")).expect("lookup").node;
        assert_eq!(layer.open(&ROOT, file, OpenFlags::READ_ONLY).expect_err("a link").errno(), Errno::ELOOP);
        let owner = poolfs_types::SetAttributes { uid: Some(12), ..Default::default() };
        assert_eq!(layer.setattr(&ROOT, file, &owner, None).expect("chown of the link").uid, 12);
        let secret = std::fs::metadata(outside.join("secret")).expect("metadata");
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&secret), 0);
    });
}

/// A directory is swapped with a link to the outside as fast as possible, while names below it are looked up and made.
#[test]
fn swapped_links_lead_nowhere() {
    on_each("escape::swapped_links_lead_nowhere", |served, outside| {
        std::fs::create_dir(served.join("d")).expect("a directory");
        symlink(outside, served.join("evil")).expect("a link");
        let layer = open(served);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let swapper = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let (from, to) = (served.join("d"), served.join("evil"));
                    let flags = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(rustix::fs::CWD, &from, rustix::fs::CWD, &to, flags).expect("swap");
                }
            });
            let mut directories = 0;
            for round in 0..2000 {
                let entry = layer.lookup(&ROOT, NodeId::ROOT, name("d")).expect("lookup");
                directories += u32::from(entry.attributes.is_directory());
                assert!(layer.lookup(&ROOT, entry.node, name("secret")).is_err(), "out by a link");
                let at = round.to_string();
                if let Ok(made) = layer.mkdir(&ROOT, entry.node, name(&at), 0o755) {
                    assert!(entry.attributes.is_directory());
                    layer.forget(made.node, 1);
                }
                layer.forget(entry.node, 1);
            }
            done.store(true, Ordering::Relaxed);
            swapper.join().expect("the swapper");
            assert!(directories > 0);
        });
        let left: Vec<_> = std::fs::read_dir(outside).expect("outside").collect();
        assert_eq!(left.len(), 1, "something was made outside");
    });
}

#[test]
fn a_directory_moved_out_is_refused() {
    on_each("escape::a_directory_moved_out_is_refused", |served, outside| {
        std::fs::create_dir_all(served.join("a/b")).expect("directories");
        std::fs::write(served.join("a/b/f"), b"bytes").expect("a file");
        let layer = open(served);
        let a = layer.lookup(&ROOT, NodeId::ROOT, name("a")).expect("lookup").node;
        let b = layer.lookup(&ROOT, a, name("b")).expect("lookup").node;
        let f = layer.lookup(&ROOT, b, name("f")).expect("lookup").node;
        std::fs::rename(served.join("a"), outside.join("a")).expect("moved out");
        std::fs::write(outside.join("a/b/new"), b"not ours").expect("a file");
        let refused = [
            layer.lookup(&ROOT, b, name("new")).map(drop),
            layer.lookup(&ROOT, a, name("b")).map(drop),
            layer.opendir(&ROOT, b).map(drop),
            layer.mkdir(&ROOT, b, name("made"), 0o755).map(drop),
            layer.unlink(&ROOT, b, name("new")),
            layer.link(&ROOT, f, b, name("link")).map(drop),
        ];
        for result in refused {
            assert_eq!(result.expect_err("outside").errno(), Errno::ESTALE);
        }
        // A held file is as good as an open descriptor.
        let handle = layer.open(&ROOT, f, OpenFlags::READ_ONLY).expect("open");
        assert_eq!(read(&layer, handle, 0, 10), b"bytes");
        std::fs::rename(outside.join("a"), served.join("again")).expect("moved in");
        layer.lookup(&ROOT, b, name("new")).expect("inside again");
    });
}

#[test]
fn mount_points_below_are_not_entered() {
    on_each("escape::mount_points_below_are_not_entered", |served, outside| {
        for early in [true, false] {
            let point = served.join(if early { "early" } else { "late" });
            std::fs::create_dir(&point).expect("a mount point");
            std::fs::write(point.join("covered"), b"below").expect("a file");
            let mount = || run("mount", &["--bind", outside.to_str().expect("UTF-8"), point.to_str().expect("UTF-8")]);
            if early {
                mount();
            }
            let layer = open(served);
            if !early {
                mount();
            }
            let text = point.file_name().expect("a name").to_str().expect("UTF-8");
            let d = layer.lookup(&ROOT, NodeId::ROOT, name(text)).expect("lookup").node;
            assert_eq!(layer.lookup(&ROOT, d, name("secret")).expect_err("not entered").errno(), Errno::ENOENT);
            layer.lookup(&ROOT, d, name("covered")).expect("what the mount covers");
            let listing = layer.opendir(&ROOT, d).expect("opendir");
            let mut names = Vec::new();
            let mut visit = |entry: poolfs_libservice::DirectoryEntry<'_>| {
                names.push(entry.name.to_string());
                ControlFlow::Continue(())
            };
            layer.readdir(&ROOT, listing, 0, &mut visit).expect("readdir");
            assert_eq!(names, ["covered"]);
            run("umount", &[point.to_str().expect("UTF-8")]);
        }
    });
}

#[test]
fn what_is_no_directory_is_named() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let error = Local::open(file.path(), LocalOptions::default()).err().expect("no directory");
    assert!(matches!(error, OpenError::Directory { .. }));
    assert!(error.to_string().contains(file.path().to_str().expect("UTF-8")));
}
