//! Images made by other tools, and hostile images.

use poolfs_tests::{Outcome, Pool, isolated, run, shell, small_root};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The digests of an image's layers.
fn layers(pool: &Pool, image: &str) -> Vec<String> {
    let text = pool.poolfs(&["image", "inspect", image, "--json"]).expect("inspect");
    let image: Value = serde_json::from_str(&text).expect("JSON");
    let layers = image["layers"].as_array().expect("layers").iter();
    layers.map(|layer| layer["digest"].as_str().expect("a digest").to_owned()).collect()
}

#[test]
fn images_of_other_tools_are_imported_and_run() {
    isolated("images_of_other_tools_are_imported_and_run", |folder| {
        let at = folder.display();
        small_root(&folder.join("first"), &[]);
        fs::write(folder.join("first/etc/gone"), "of the first layer").expect("a file");
        // Two layers, the second of which hides and adds.
        let _ = shell(&format!(
            "cd {at}; umoci init --layout l; umoci new --image l:two
            umoci unpack --image l:two bundle; cp -a first/. bundle/rootfs/; umoci repack --image l:two bundle; rm -r bundle
            umoci unpack --image l:two bundle; rm bundle/rootfs/etc/gone; echo new > bundle/rootfs/etc/new
            umoci repack --image l:two bundle; rm -r bundle
            umoci config --image l:two --config.cmd /bin/sh --config.cmd -c --config.cmd 'echo \"$GREETING\"' \
                --config.env GREETING=hello --config.user www
            skopeo --insecure-policy copy -q oci:l:two oci-archive:oci.tar:two
            skopeo --insecure-policy copy -q oci:l:two docker-archive:docker.tar:two:latest
            skopeo --insecure-policy copy -q --dest-compress-format zstd --dest-compress docker-archive:docker.tar oci:z:two
            gzip -k docker.tar oci.tar; zstd -q docker.tar oci.tar"
        ))
        .expect("umoci and skopeo");
        let packed =
            shell(&format!("for f in {at}/z/blobs/sha256/*; do head -c 4 $f | od -An -tx1; done")).expect("od");
        assert!(packed.contains("28 b5 2f fd"), "skopeo made layers with zstd: {packed}");
        let pool = Pool::create(folder, "64M");
        let mut known = Vec::new();
        for source in [
            "oci:l:two",
            "oci:l",
            "oci:z:two",
            "oci-archive:oci.tar",
            "oci-archive:oci.tar.gz",
            "oci-archive:oci.tar.zst",
            "docker-archive:docker.tar",
            "docker-archive:docker.tar.gz",
            "docker-archive:docker.tar.zst",
        ] {
            let (kind, place) = source.split_once(':').expect("a source");
            let source = format!("{kind}:{at}/{place}");
            let _ = pool.poolfs(&["image", "import", "image", &source]).expect(&source);
            let made_of = layers(&pool, "image");
            assert_eq!(made_of.len(), 2, "{source}");
            if known.is_empty() {
                known = made_of.clone();
            }
            assert_eq!(made_of, known, "{source}: the same layers, however packed");
            let run =
                |more: &[&str]| pool.poolfs(&[&["run", pool.name(), "image", "--rm"], more].concat()).expect(&source);
            assert_eq!(run(&[]), "hello\n", "{source}");
            let script = "cat /etc/new; test -e /etc/gone || echo hidden";
            assert_eq!(run(&["--", "/bin/sh", "-c", script]), "new\nhidden\n", "{source}");
            let _ = pool.poolfs(&["image", "rm", "image"]).expect("image rm");
        }
    });
}

/// Makes an archive by a script in Python, which finds `tar` (a `tarfile` to write to) and `add(name, type, content, target)`.
fn archive(folder: &Path, name: &str, script: &str) -> String {
    let path = folder.join(name);
    let frame = format!(
        "import tarfile, io
tar = tarfile.open({path:?}, 'w', format=tarfile.PAX_FORMAT)
def add(name, type=tarfile.REGTYPE, content=b'', target='', **more):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname, member.mode = type, len(content), target, 0o755
    for key, value in more.items(): setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))
{script}
tar.close()
"
    );
    let _ = run(Command::new("python3").args(["-c", &frame])).expect("python3");
    path.display().to_string()
}

fn import(pool: &Pool, files_max: u32, name: &str, source: &str) -> Outcome {
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={files_max}")).arg(pool.command().get_program()).args(pool.command().get_args());
    run(command.args(["image", "import", name, source]))
}

fn left_in(folder: &Path) -> Vec<String> {
    let listed = fs::read_dir(folder.join("state/layers")).expect("readable");
    listed.map(|entry| entry.expect("readable").file_name().into_string().expect("text")).collect()
}

#[test]
fn images_made_to_do_harm_do_none() {
    isolated("images_made_to_do_harm_do_none", |folder| {
        let pool = Pool::create(folder, "64M");
        // Directories far deeper than there are descriptors, and than a path may be long.
        let deep = archive(
            folder,
            "deep.tar",
            "add('a/' * 1500, tarfile.DIRTYPE)
add('l', tarfile.SYMTYPE, target='a/' * 1500)
add('l/' + 'b/' * 1500 + 'file', content=b'deep')",
        );
        let imported = import(&pool, 64, "deep", &format!("tar:{deep}"));
        assert_eq!(imported.code, 0, "{imported:?}");
        let _ = pool.poolfs(&["image", "rm", "deep"]).expect("image rm");
        assert!(left_in(folder).is_empty(), "{:?}", left_in(folder));

        // What steers terminals does not reach them.
        let bells = archive(folder, "bells.tar", "add('\\x1b]0;owned\\x07/x/..')");
        let refused = import(&pool, 64, "bells", &format!("tar:{bells}"));
        assert!(refused.code != 0 && !refused.err.contains('\x1b') && refused.err.contains("owned"), "{refused:?}");
        let json = pool.poolfs(&["image", "import", "bells", &format!("tar:{bells}"), "--json"]);
        let error: Value = serde_json::from_str(&json.err).unwrap_or_else(|error| panic!("{error}: {}", json.err));
        assert!(error["error"]["cause"].as_str().is_some_and(|cause| cause.contains("..")), "{error}");

        // A description that is a device or a pipe is not even opened.
        let strange = archive(
            folder,
            "strange.tar",
            "add('oci-layout', content=b'{\"imageLayoutVersion\":\"1.0.0\"}')
add('index.json', tarfile.FIFOTYPE)",
        );
        let refused = import(&pool, 64, "strange", &format!("oci-archive:{strange}"));
        assert!(refused.code != 0 && refused.err.contains("not a file"), "{refused:?}");
        assert!(left_in(folder).is_empty(), "{:?}", left_in(folder));
    });
}

#[test]
fn a_bomb_leaves_room_on_the_disk() {
    isolated("a_bomb_leaves_room_on_the_disk", |folder| {
        let state = folder.join("state");
        fs::create_dir(&state).expect("a folder");
        let _ = shell(&format!("mount -t tmpfs -o size=200M tmpfs {}", state.display())).expect("a small disk");
        let pool = Pool::create(folder, "64M");
        let at = folder.display();
        let script = "class Zeros:
    def read(self, count=-1): return bytes(count)
member = tarfile.TarInfo('zeros')
member.size = 400 << 20
tar.addfile(member, Zeros())";
        let bomb = archive(folder, "bomb.tar", script);
        let _ = shell(&format!("gzip {bomb}; mkdir {at}/tree; truncate -s 400M {at}/tree/sparse")).expect("gzip");
        assert!(fs::metadata(folder.join("bomb.tar.gz")).expect("made").len() < 2 << 20);
        // Whether it was ever nearly full is seen by the most that was in use.
        let watched = std::sync::atomic::AtomicBool::new(true);
        let least_free = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut least = u64::MAX;
                while watched.load(std::sync::atomic::Ordering::Relaxed) {
                    let disk = rustix::fs::statvfs(&state).expect("a disk");
                    least = least.min(disk.f_bavail * disk.f_frsize);
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                least
            });
            for source in [format!("tar:{bomb}.gz"), format!("docker-archive:{bomb}.gz"), format!("dir:{at}/tree")] {
                let refused = pool.poolfs(&["image", "import", "bomb", &source]);
                assert!(refused.code != 0 && refused.err.contains("make room"), "{source}: {refused:?}");
                assert!(left_in(folder).is_empty(), "{source}: {:?}", left_in(folder));
            }
            watched.store(false, std::sync::atomic::Ordering::Relaxed);
            watcher.join().expect("no panic")
        });
        assert!(least_free >= 4 << 20, "only {least_free} bytes were left to others");
        drop(pool);
        let _ = shell(&format!("umount {}", state.display())).expect("umount");
    });
}

#[test]
fn a_bomb_of_names_leaves_room_on_the_disk() {
    isolated("a_bomb_of_names_leaves_room_on_the_disk", |folder| {
        let (state, at) = (folder.join("state"), folder.display());
        fs::create_dir(&state).expect("a folder");
        // Blocks for fewer directories than it has inodes.
        let make = "truncate -s 64M disk; mkfs.ext4 -q -F -m 0 -b 4096 -N 40000 disk; mount -o loop disk state";
        let _ = shell(&format!("cd {at}; {make}")).expect("a disk");
        let pool = Pool::create(folder, "64M");
        for (kind, wanting) in [("DIRTYPE", "bytes"), ("FIFOTYPE", "inodes")] {
            let script = format!("for n in range(45000): add('d%d/e%d' % (n // 10000, n), tarfile.{kind})");
            let bomb = archive(folder, kind, &script);
            let refused = pool.poolfs(&["image", "import", "bomb", &format!("tar:{bomb}")]);
            let told = format!("{wanting} are left");
            assert!(refused.code != 0 && refused.err.contains(&told), "{kind}: {refused:?}");
            assert!(refused.err.contains("make room"), "{kind}: {refused:?}");
            assert!(left_in(folder).is_empty(), "{kind}: {:?}", left_in(folder));
        }
        drop(pool);
        let _ = shell(&format!("umount {}", state.display())).expect("umount");
    });
}
