//! Tests of images from end to end, honest and hostile ones. They make device nodes and set owners: they need root.

use crate::{Digest, ImageError, ImageStore, Limits, Silent};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

mod layouts;

use layouts::oci_layout;

struct Place {
    directory: tempfile::TempDir,
    store: ImageStore,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(&directory.path().join("state")).expect("opened");
        Place { directory, store }
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        fs::write(&path, bytes).expect("written");
        path
    }

    fn import_tar(&self, name: &str, bytes: &[u8]) -> crate::Result<PathBuf> {
        let path = self.file(&format!("{name}.tar"), bytes);
        let source = format!("tar:{}", path.display());
        let image = self.store.import(name, &source, &Limits::default(), &mut Silent)?;
        Ok(self.store.layer_path(&image.layers[0].digest))
    }

    fn removed(&self, name: &str, in_use: &[Digest]) -> u64 {
        let lock = self.store.lock(true).expect("locked");
        self.store.remove(&lock, name, in_use).expect("removed").layers
    }

    fn leftovers(&self) -> Vec<String> {
        let names = |path: &str| {
            let listed = fs::read_dir(self.directory.path().join("state").join(path)).expect("listed");
            listed.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        names("layers").into_iter().chain(names("images")).filter(|name| name != ".lock").collect()
    }
}

fn entry(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(7);
    header.set_gid(8);
    header.set_mtime(1_000_000);
    header
}

fn file(builder: &mut Builder<Vec<u8>>, path: &str, content: &[u8]) {
    builder.append_data(&mut entry(EntryType::Regular, 0o640, content.len() as u64), path, content).expect("in memory");
}

fn directory(builder: &mut Builder<Vec<u8>>, path: &str) {
    builder.append_data(&mut entry(EntryType::Directory, 0o750, 0), path, &b""[..]).expect("in memory");
}

fn link(builder: &mut Builder<Vec<u8>>, kind: EntryType, path: &str, target: &str) {
    let mut header = entry(kind, 0o777, 0);
    builder.append_link(&mut header, path, target).expect("in memory");
}

/// A member whose name is written as it is: the crate's own functions refuse hostile ones.
fn raw(builder: &mut Builder<Vec<u8>>, path: &str, content: &[u8]) {
    let mut header = entry(EntryType::Regular, 0o644, content.len() as u64);
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.set_cksum();
    builder.append(&header, content).expect("in memory");
}

fn archive(build: impl FnOnce(&mut Builder<Vec<u8>>)) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    build(&mut builder);
    builder.into_inner().expect("in memory")
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 256];
    let length = rustix::fs::lgetxattr(path, name, &mut value).ok()?;
    value.truncate(length);
    Some(value)
}

#[test]
fn everything_of_a_layer_comes_through() {
    let place = Place::new();
    let root = place
        .import_tar(
            "all",
            &archive(|b| {
                directory(b, "d/");
                let pax =
                    [("SCHILY.xattr.user.note", &b"a\nb"[..]), ("SCHILY.xattr.trusted.overlay.redirect", b"/etc")];
                b.append_pax_extensions(pax.into_iter().chain([("mtime", &b"12.000000345"[..])])).expect("in memory");
                file(b, "d/f", b"content");
                link(b, EntryType::Link, "d/hard", "d/f");
                link(b, EntryType::Symlink, "d/soft", "/no/where");
                let mut device = entry(EntryType::Char, 0o666, 0);
                device.set_device_major(1).expect("fits");
                device.set_device_minor(3).expect("fits");
                b.append_data(&mut device, "null", &b""[..]).expect("in memory");
                b.append_data(&mut entry(EntryType::Fifo, 0o600, 0), "pipe", &b""[..]).expect("in memory");
                b.append_data(&mut entry(EntryType::Regular, 0o4755, 1), "deep/not/listed/suid", &b"x"[..])
                    .expect("ok");
            }),
        )
        .expect("imported");
    let status = fs::metadata(root.join("d/f")).expect("there");
    assert_eq!((status.uid(), status.gid(), status.mode() & 0o7777), (7, 8, 0o640));
    assert_eq!((status.mtime(), status.mtime_nsec(), status.nlink()), (12, 345, 2));
    assert_eq!(attribute(&root.join("d/f"), "user.note").expect("kept"), b"a\nb");
    assert_eq!(attribute(&root.join("d/f"), "trusted.overlay.redirect"), None);
    assert_eq!(fs::metadata(root.join("d")).expect("there").mtime(), 1_000_000, "set after its entries");
    assert_eq!(fs::read_link(root.join("d/soft")).expect("a link"), Path::new("/no/where"));
    assert!(fs::metadata(root.join("pipe")).expect("there").file_type().is_fifo());
    assert_eq!(fs::metadata(root.join("null")).expect("there").rdev(), 0x103);
    assert_eq!(fs::metadata(root.join("deep/not/listed/suid")).expect("there").mode() & 0o7777, 0o4755);
}

#[test]
fn whiteouts_take_the_form_of_lower_branches() {
    let place = Place::new();
    let root = place
        .import_tar(
            "white",
            &archive(|b| {
                file(b, "etc/.wh.gone", b"");
                file(b, "var/.wh..wh..opq", b"");
                file(b, "etc/.wh.back", b"");
                directory(b, "etc/back/");
                file(b, "etc/both", b"new");
                file(b, "etc/.wh.both", b"");
                let mut zero = entry(EntryType::Char, 0o666, 0);
                zero.set_device_major(0).expect("fits");
                zero.set_device_minor(0).expect("fits");
                b.append_data(&mut zero, "zero", &b""[..]).expect("in memory");
            }),
        )
        .expect("imported");
    let gone = fs::symlink_metadata(root.join("etc/gone")).expect("a whiteout");
    assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
    assert_eq!(attribute(&root.join("var"), "trusted.overlay.opaque").expect("opaque"), b"y");
    assert_eq!(attribute(&root.join("etc/back"), "trusted.overlay.opaque").expect("opaque"), b"y");
    assert_eq!(fs::read(root.join("etc/both")).expect("the new one"), b"new");
    assert!(!root.join("zero").exists());
}

#[test]
fn nothing_outside_is_reached() {
    let outside = tempfile::tempdir().expect("a directory");
    let target = outside.path().to_str().expect("plain");
    let refused: Vec<(&str, Vec<u8>)> = vec![
        ("dots", archive(|b| raw(b, "a/../../x", b"evil"))),
        ("link-up", archive(|b| link(b, EntryType::Link, "x", "../../../etc/passwd"))),
        (
            "through-link",
            archive(|b| {
                link(b, EntryType::Symlink, "out", target);
                file(b, "out/x", b"evil");
            }),
        ),
        ("absent-link", archive(|b| link(b, EntryType::Link, "x", "/etc/passwd"))),
        ("whiteout-of-dots", archive(|b| raw(b, ".wh...", b""))),
        ("whiteout-directory", archive(|b| raw(b, ".wh.x/y", b""))),
        ("root-link", archive(|b| link(b, EntryType::Symlink, "./.", "/etc"))),
        (
            "strange-type",
            archive(|b| {
                let mut header = entry(EntryType::new(b'Q'), 0o644, 0);
                header.set_cksum();
                b.append(&header, &b""[..]).expect("in memory");
            }),
        ),
    ];
    for (name, bytes) in refused {
        let place = Place::new();
        let result = place.import_tar(name, &bytes);
        assert!(result.is_err(), "{name} was taken");
        assert!(place.leftovers().is_empty(), "{name} left {:?}", place.leftovers());
    }
    assert_eq!(fs::read_dir(outside.path()).expect("listed").count(), 0);
}

#[test]
fn no_layer_passes_for_an_upper_branch() {
    let round = |b: &mut Builder<Vec<u8>>, target: &str| {
        directory(b, "d/");
        link(b, EntryType::Symlink, "d/round", target);
    };
    let special = |kind: EntryType| {
        archive(|b| {
            let mut header = entry(kind, 0o600, 0);
            header.set_device_major(0).expect("fits");
            header.set_device_minor(0).expect("fits");
            b.append_data(&mut header, ".poolfs", &b""[..]).expect("in memory");
        })
    };
    // The member that is refused, and the archive.
    let refused: Vec<(&str, Vec<u8>)> = vec![
        (".poolfs/format", archive(|b| raw(b, ".poolfs/format", b"poolfs-union 9\n"))),
        ("./.poolfs/x", archive(|b| raw(b, "./.poolfs/x", b""))),
        ("/.poolfs/format", archive(|b| raw(b, "/.poolfs/format", b""))),
        (".//.poolfs/./x/", archive(|b| raw(b, ".//.poolfs/./x/", b""))),
        (".poolfs/a/b", archive(|b| file(b, ".poolfs/a/b", b""))),
        (".poolfs/", archive(|b| directory(b, ".poolfs/"))),
        (".poolfs", archive(|b| file(b, ".poolfs", b""))),
        (".poolfs", archive(|b| link(b, EntryType::Symlink, ".poolfs", "d"))),
        (
            ".poolfs",
            archive(|b| {
                file(b, "f", b"");
                link(b, EntryType::Link, ".poolfs", "f");
            }),
        ),
        (".poolfs", special(EntryType::Fifo)),
        (".poolfs", special(EntryType::Char)),
        (".poolfs/.wh.x", archive(|b| raw(b, ".poolfs/.wh.x", b""))),
        (".poolfs/.wh..wh..opq", archive(|b| raw(b, ".poolfs/.wh..wh..opq", b""))),
        (
            "./.poolfs/pax",
            archive(|b| {
                b.append_pax_extensions([("path", &b"./.poolfs/pax"[..])]).expect("in memory");
                file(b, "innocent", b"");
            }),
        ),
        // Links of the layer itself that lead back to its root.
        (
            "d/round/.poolfs/format",
            archive(|b| {
                round(b, "/");
                file(b, "d/round/.poolfs/format", b"");
            }),
        ),
        (
            "d/round/.poolfs",
            archive(|b| {
                round(b, "../../d/..");
                link(b, EntryType::Symlink, "d/round/.poolfs", "d");
            }),
        ),
        (
            "d/round/d/round/.poolfs/.poolfs/x",
            archive(|b| {
                round(b, "..");
                file(b, "d/round/d/round/.poolfs/.poolfs/x", b"");
            }),
        ),
    ];
    for (member, bytes) in refused {
        let place = Place::new();
        let error = place.import_tar("upper", &bytes).expect_err(member).to_string();
        assert!(error.contains("/upper.tar: ") && error.contains(&format!("{member:?}")), "{member}: {error}");
        assert!(place.leftovers().is_empty(), "{member} left {:?}", place.leftovers());
    }
    // Nor does the second layer of an image, nor a directory.
    let place = Place::new();
    let layers = [archive(|b| file(b, "a", b"")), archive(|b| file(b, ".poolfs/format", b""))];
    let layout = oci_layout(&place, &layers, false);
    let tree = place.directory.path().join("tree");
    fs::create_dir_all(tree.join(".poolfs")).expect("made");
    for (source, at) in [(format!("oci:{}", layout.display()), &layout), (format!("dir:{}", tree.display()), &tree)] {
        let error = place.store.import("app", &source, &Limits::default(), &mut Silent).expect_err("upper").to_string();
        assert!(error.contains(&format!("{}: ", at.display())) && error.contains("\".poolfs"), "{source}: {error}");
        assert!(place.leftovers().is_empty(), "{source} left {:?}", place.leftovers());
    }
}

#[test]
fn names_like_an_upper_branchs_are_taken_where_they_mean_nothing() {
    let place = Place::new();
    let root = place
        .import_tar(
            "like",
            &archive(|b| {
                file(b, "home/.poolfs/format", b"deeper");
                file(b, ".poolfs2", b"longer");
                link(b, EntryType::Symlink, "to-home", "home");
                file(b, "to-home/.poolfs/second", b"by a link");
                raw(b, "absent/.poolfs/.poolfs", b"its directory is not there before");
                raw(b, ".wh..poolfs", b"");
                // The second takes the link away by which it was reached: the third is not in the root any more.
                link(b, EntryType::Symlink, "swap", "/");
                file(b, "swap/swap", b"");
                file(b, "swap/.poolfs", b"in the new directory");
                raw(b, "home/.wh..poolfs2", b"");
            }),
        )
        .expect("imported");
    assert_eq!(fs::read(root.join("home/.poolfs/format")).expect("there"), b"deeper");
    assert_eq!(fs::read(root.join("home/.poolfs/second")).expect("there"), b"by a link");
    assert_eq!(fs::read(root.join("swap/.poolfs")).expect("there"), b"in the new directory");
    assert!(root.join(".poolfs2").exists() && root.join("absent/.poolfs/.poolfs").exists());
    assert!(fs::symlink_metadata(root.join(".poolfs")).is_err(), "there is nothing that it could hide");
    assert!(fs::symlink_metadata(root.join("home/.poolfs2")).expect("a whiteout").file_type().is_char_device());
    // The root of a layout is not the root of an image.
    let layout = oci_layout(&place, &[archive(|b| file(b, "a", b""))], false);
    fs::create_dir(layout.join(".poolfs")).expect("made");
    let packed = archive(|b| b.append_dir_all(".", &layout).expect("in memory"));
    let source = format!("oci-archive:{}", place.file("packed.tar", &packed).display());
    place.store.import("packed", &source, &Limits::default(), &mut Silent).expect("imported");
}

#[test]
fn a_malformed_archive_is_named() {
    let plain = archive(|b| {
        file(b, "a", &[7; 3000]);
        file(b, "b", b"second");
    });
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    gzip.write_all(&plain).expect("in memory");
    let gzip = gzip.finish().expect("in memory");
    let zstd = zstd::encode_all(&plain[..], 1).expect("in memory");
    // Multiplied by an odd number, the bytes come in no order that any format has.
    let random: Vec<u8> = (1_u32..4000).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let archives = [
        ("random", &random[..]),
        ("short-random", &random[..100]),
        ("random-gzip", &[&[0x1f, 0x8b, 8, 0][..], &random].concat()),
        ("random-zstd", &[&[0x28, 0xb5, 0x2f, 0xfd][..], &random].concat()),
        ("bzip2", b"BZh91AY"),
        ("cut-header", &plain[..300]),
        ("cut-content", &plain[..2000]),
        ("cut-second-header", &plain[..512 + 3072 + 100]),
        ("gzip-cut-header", &gzip[..5]),
        ("gzip-cut", &gzip[..gzip.len() / 2]),
        ("gzip-cut-sum", &gzip[..gzip.len() - 3]),
        ("zstd-cut", &zstd[..zstd.len() / 2]),
    ];
    for (name, bytes) in archives {
        let place = Place::new();
        let path = place.file(name, bytes);
        for kind in ["tar", "oci-archive", "docker-archive"] {
            let source = format!("{kind}:{}", path.display());
            let error = place.store.import("app", &source, &Limits::default(), &mut Silent).expect_err(&source);
            let told = error.to_string();
            assert_eq!(told.matches(&path.display().to_string()).count(), 1, "{source}: {told}");
            // An archive of documents and blobs is not read beyond its last member: they have digests of their own.
            assert!(kind != "tar" || told.contains("malformed archive"), "{source}: {told}");
            assert!(!name.ends_with("random") || told.contains("header"), "{source}: {told}");
            assert!(place.leftovers().is_empty(), "{source} left {:?}", place.leftovers());
        }
    }
    // An archive that is whole, with a layer that is not; and one that is no image.
    let place = Place::new();
    let layout = oci_layout(&place, std::slice::from_ref(&random), false);
    let packed = place.file("packed.tar", &archive(|b| b.append_dir_all(".", &layout).expect("in memory")));
    let rootfs = place.file("rootfs.tar", &plain);
    let layer = Digest::of(&random).hex().to_owned();
    for (path, named) in [(packed, layer.as_str()), (rootfs, "index.json")] {
        let source = format!("oci-archive:{}", path.display());
        let error = place.store.import("app", &source, &Limits::default(), &mut Silent).expect_err(&source);
        let told = error.to_string();
        assert!(told.contains(&path.display().to_string()) && told.contains(named), "{source}: {told}");
    }
}

#[test]
fn links_and_absolute_names_stay_inside() {
    let outside = tempfile::tempdir().expect("a directory");
    fs::write(outside.path().join("victim"), "safe").expect("written");
    let victim = outside.path().join("victim");
    let victim = victim.to_str().expect("plain");
    let place = Place::new();
    let root = place
        .import_tar(
            "inside",
            &archive(|b| {
                raw(b, "/absolute", b"here");
                // A later file of the same name replaces the link and never follows it.
                link(b, EntryType::Symlink, "swap", victim);
                file(b, "swap", b"mine");
                directory(b, "usr/lib/");
                link(b, EntryType::Symlink, "lib", "/usr/lib");
                file(b, "lib/so", b"merged");
                // A directory replaced by a link: what follows goes through the link, inside.
                directory(b, "dir/");
                file(b, "dir/old", b"old");
                link(b, EntryType::Symlink, "dir", "usr");
                file(b, "dir/new", b"new");
            }),
        )
        .expect("imported");
    assert_eq!(fs::read(root.join("absolute")).expect("inside"), b"here");
    assert_eq!(fs::read(root.join("swap")).expect("inside"), b"mine");
    assert_eq!(fs::read_to_string(victim).expect("there"), "safe");
    assert_eq!(fs::read(root.join("usr/lib/so")).expect("inside"), b"merged");
    assert_eq!(fs::read(root.join("usr/new")).expect("inside"), b"new");
}

#[test]
fn compressed_archives_share_one_layer_and_bounds_hold() {
    let place = Place::new();
    let bytes = archive(|b| file(b, "zeros", &vec![0; 1 << 20]));
    let plain = place.import_tar("plain", &bytes).expect("imported");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&bytes).expect("in memory");
    assert_eq!(place.import_tar("gzip", &gzip.finish().expect("in memory")).expect("imported"), plain);
    let packed = zstd::encode_all(&bytes[..], 1).expect("in memory");
    assert_eq!(place.import_tar("zstd", &packed).expect("imported"), plain);
    assert!(matches!(place.import_tar("zstd", &packed), Err(ImageError::Exists(_))));

    let bomb = place.file("bomb", &packed);
    let limits = Limits { layer_bytes: 100_000, ..Limits::default() };
    place.store.import("bomb", &format!("tar:{}", bomb.display()), &limits, &mut Silent).expect_err("too large");
    place.import_tar("cut", &packed[..packed.len() / 2]).expect_err("cut off");

    assert_eq!(place.removed("plain", &[]), 0);
    assert_eq!(place.removed("gzip", &[]), 0);
    let digest = place.store.get("zstd").expect("there").layers[0].digest.clone();
    assert_eq!(place.removed("zstd", &[digest]), 0, "a container has it");
    place.import_tar("again", &bytes).expect("imported");
    assert_eq!(place.removed("again", &[]), 1);
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

#[test]
fn what_is_left_out_of_a_directory_may_have_several_names() {
    let place = Place::new();
    let tree = place.directory.path().join("tree");
    fs::create_dir(&tree).expect("made");
    // As overlayfs has whiteouts in its upper directories.
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(rustix::fs::CWD, tree.join("a"), kind, rustix::fs::Mode::empty(), 0).expect("made");
    fs::hard_link(tree.join("a"), tree.join("b")).expect("linked");
    drop(std::os::unix::net::UnixListener::bind(tree.join("c")).expect("bound"));
    fs::hard_link(tree.join("c"), tree.join("d")).expect("linked");
    fs::write(tree.join("f"), "kept").expect("written");
    let source = format!("dir:{}", tree.display());
    let image = place.store.import("tree", &source, &Limits::default(), &mut Silent).expect("imported");
    let root = place.store.layer_path(&image.layers[0].digest);
    let names: Vec<_> = fs::read_dir(root).expect("listed").map(|e| e.expect("an entry").file_name()).collect();
    assert_eq!(names, ["f"]);
}

#[test]
fn a_directory_becomes_a_layer_with_its_links() {
    let place = Place::new();
    let tree = place.directory.path().join("tree");
    fs::create_dir_all(tree.join("a/b")).expect("made");
    fs::write(tree.join("a/b/f"), "text").expect("written");
    fs::hard_link(tree.join("a/b/f"), tree.join("second")).expect("linked");
    std::os::unix::fs::symlink("a/b", tree.join("s")).expect("linked");
    fs::set_permissions(tree.join("a"), fs::Permissions::from_mode(0o711)).expect("set");
    let source = format!("dir:{}", tree.display());
    let image = place.store.import("tree", &source, &Limits::default(), &mut Silent).expect("imported");
    let root = place.store.layer_path(&image.layers[0].digest);
    assert_eq!(fs::read(root.join("s/f")).expect("there"), b"text");
    assert_eq!(fs::metadata(root.join("second")).expect("there").nlink(), 2);
    assert_eq!(fs::metadata(root.join("a")).expect("there").mode() & 0o7777, 0o711);
    let again = place.store.import("again", &source, &Limits::default(), &mut Silent).expect("imported");
    assert_eq!(again.layers, image.layers, "the same content is the same layer");
}

#[test]
fn imports_at_once_do_not_disturb_each_other() {
    let place = Place::new();
    let bytes = archive(|b| (0..200).for_each(|n| file(b, &format!("d/{n}"), &[n as u8; 1000])));
    place.file("shared.tar", &bytes);
    let source = format!("tar:{}", place.directory.path().join("shared.tar").display());
    std::thread::scope(|scope| {
        let store = &place.store;
        let source = &source;
        for n in 0..4 {
            scope.spawn(move || {
                store.import(&format!("i{n}"), source, &Limits::default(), &mut Silent).expect("imported");
            });
        }
    });
    assert_eq!(place.leftovers().len(), 5, "one layer, four images: {:?}", place.leftovers());
}

/// Gives up when it has been told of a part.
#[derive(Default)]
struct Impatient {
    told: bool,
}

impl crate::Progress for Impatient {
    fn begin(&mut self, _what: &str, _bytes: u64) {}

    fn advance(&mut self, _bytes: u64) {
        self.told = true;
    }

    fn end(&mut self) {}

    fn is_cancelled(&mut self) -> bool {
        self.told
    }
}

#[test]
fn an_import_that_is_given_up_is_no_broken_archive() {
    let place = Place::new();
    let plain = archive(|builder| file(builder, "f", &[7; 100_000]));
    let compressed = zstd::encode_all(&plain[..], 1).expect("compressed");
    let tree = place.directory.path().join("tree");
    std::fs::create_dir(&tree).expect("made");
    std::fs::write(tree.join("f"), "content").expect("written");
    let archives = [("plain", plain), ("compressed", compressed)];
    let mut sources: Vec<String> =
        archives.iter().map(|(name, bytes)| format!("tar:{}", place.file(name, bytes).display())).collect();
    sources.push(format!("dir:{}", tree.display()));
    for source in sources {
        let error = place.store.import("app", &source, &Limits::default(), &mut Impatient::default());
        assert!(matches!(error, Err(ImageError::Interrupted)), "{source}: {error:?}");
        assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
    }
}
