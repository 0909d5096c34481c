//! Images whose layers are at a Ceph cluster.

use poolfs_tests::{Cluster, Mounted, Pool, checksum, isolated, name_of, run, small_root, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Bytes of the file that no container reads as a whole.
const BIG_BYTES: usize = 24 << 20;
/// Moments at which an import is killed.
const MOMENTS: u64 = 8;
/// Files of such an import, and their length.
const FILES: u64 = 200;
const FILE_BYTES: u64 = 20_000;

/// A cluster, and two hosts that know nothing of each other.
struct Place<'a> {
    folder: &'a Path,
    cluster: Cluster,
    hosts: [Pool; 2],
    /// Of the first host: mounts what the test looks at.
    looker: Pool,
}

impl<'a> Place<'a> {
    fn make(folder: &'a Path) -> Self {
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["images", "containers/web"]);
        let other = folder.join("other");
        fs::create_dir(&other).expect("made");
        let hosts = [
            Pool::create(folder, "64M").patient(),
            Pool::named(&other, &format!("{}-other", name_of(folder)), "64M").patient(),
        ];
        let looker = Pool::named(folder, &format!("{}-looker", name_of(folder)), "16M");
        Self { folder, cluster, hosts, looker }
    }

    /// The root file system of a small image: a source of `import`.
    fn root(&self, name: &str, more: impl FnOnce(&Path)) -> String {
        let root = self.folder.join(format!("root-{name}"));
        small_root(&root, &[]);
        more(&root);
        format!("dir:{}", root.display())
    }

    /// Arguments of a command, with how the cluster is reached.
    fn ceph<'b>(&'b self, arguments: &[&'b str]) -> Vec<&'b str> {
        [arguments, &self.cluster.access()].concat()
    }

    fn import(&self, host: &Pool, name: &str, source: &str) {
        let _ = host.poolfs(&self.ceph(&["image", "import", name, source, "--to", "ceph:/images"])).expect("import");
    }

    /// A directory of the cluster. Containers may use layers in it meanwhile.
    fn look_at(&self, name: &str) -> Mounted<'_> {
        self.looker.mount(&self.folder.join("looked-at"), &self.ceph(&["--dir", name, "--shared"]))
    }

    /// The names in a directory of the store.
    fn stored(&self, directory: &str) -> Vec<String> {
        let mounted = self.look_at(&format!("ceph:/images/{directory}"));
        let listed = fs::read_dir(mounted.path()).expect("listed").map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<String> = listed.map(|name| name.into_string().expect("text")).collect();
        names.sort();
        let _ = mounted.unmount().expect("umount");
        names
    }
}

/// Waits until a command has written so many bytes, or has ended.
fn wait_for_bytes(child: &mut Child, bytes: u64) {
    let place = format!("/proc/{}/io", child.id());
    let written = || {
        let text = fs::read_to_string(&place).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse::<u64>().ok())
    };
    wait_until("a command has written", || {
        child.try_wait().expect("ours").is_some() || written().is_some_and(|written| written >= bytes)
    });
}

/// The names of a host's images.
fn images(host: &Pool) -> Vec<String> {
    let said = host.poolfs(&["image", "ls", "--json"]).expect("image ls");
    let images: Vec<Value> = serde_json::from_str(&said).expect("JSON");
    images.iter().map(|image| image["name"].as_str().expect("a name").to_owned()).collect()
}

fn run_script(host: &Pool, image: &str, more: &[&str], script: &str) -> String {
    let arguments = [&["run", host.name(), image, "--rm"], more, &["--", "/bin/sh", "-euc", script]].concat();
    host.poolfs(&arguments).expect(script)
}

#[test]
fn an_image_is_at_a_cluster_once_and_every_host_runs_it() {
    isolated("an_image_is_at_a_cluster_once_and_every_host_runs_it", |folder| {
        let place = Place::make(folder);
        let [one, other] = &place.hosts;
        let mut big: String = (0..BIG_BYTES / 16).map(|line| format!("{line:015x}\n")).collect();
        let source = place.root("web", |root| {
            fs::write(root.join("etc/motd"), "of the image").expect("written");
            fs::write(root.join("big"), &big).expect("written");
        });
        place.import(one, "web", &source);
        assert!(fs::read_dir(folder.join("state/layers")).expect("listed").next().is_none(), "nothing is here");
        let told = one.poolfs(&["image", "ls"]).expect("image ls");
        assert!(told.contains("ceph:/images"), "{told}");
        assert!(one.poolfs(&["image", "inspect", "web"]).expect("inspect").contains("ceph:/images"));
        assert_eq!(one.poolfs(&["pool", "ls", "--json"]).expect("pool ls").matches("\"name\"").count(), 2);

        // A start fetches what it uses.
        let before = place.cluster.bytes_read();
        assert_eq!(
            run_script(one, "web", &[], "cat /etc/motd; head -c 16 /big"),
            format!("of the image{}", &big[..16])
        );
        let fetched = place.cluster.bytes_read() - before;
        assert!(fetched > 0 && fetched < BIG_BYTES as u64 / 3, "{fetched} bytes were fetched");

        // What a container wrote, another host goes on with.
        let upper = ["--upper-dir", "ceph:/containers/web"];
        run_script(one, "web", &upper, "echo -n CHANGED 1<>/big; rm /etc/motd; echo more > /etc/more");
        assert_eq!(images(other), [""; 0]);
        let add = place.ceph(&["image", "add", "web", "--from", "ceph:/images"]);
        let _ = other.poolfs(&add).expect("image add");
        assert_eq!(images(other), ["web"]);
        assert_eq!(run_script(other, "web", &[], "cat /etc/motd"), "of the image");
        big.replace_range(..7, "CHANGED");
        let seen = run_script(other, "web", &upper, "cat /etc/more /big; test ! -e /etc/motd");
        assert!(seen.strip_prefix("more\n") == Some(big.as_str()), "the rest of a changed file is in the layer");
        let again = other.poolfs(&add);
        assert!(again.code != 0 && again.err.contains("exists already"), "{again:?}");

        // Other images come and go while it is in use.
        let sleep = ["--", "/bin/sh", "-c", "echo of the second > /root/own; while :; do sleep 1; done"];
        for (host, name) in [(one, "first"), (other, "second")] {
            let _ =
                host.poolfs(&[&["run", host.name(), "web", "-d", "--name", name][..], &sleep].concat()).expect("run");
            wait_until("it runs", || host.poolfs(&["diff", host.name(), name]).expect("diff").contains("/root/own"));
        }
        place.import(one, "beside", &source);
        assert_eq!(run_script(one, "beside", &[], "cat /etc/motd"), "of the image");
        assert_eq!(place.stored("layers").len(), 1, "the same layer");
        let _ = one.poolfs(&["image", "rm", "beside"]).expect("image rm");
        for (host, name) in [(one, "first"), (other, "second")] {
            let refused = host.poolfs(&["image", "rm", "web"]);
            assert!(refused.code != 0 && refused.err.contains(name), "{refused:?}");
            let _ = host.poolfs(&["stop", "--time", "0", name]).expect("stop");
            let refused = host.poolfs(&["image", "rm", "web"]);
            assert!(refused.code != 0 && refused.err.contains(name), "one that has ended goes on with it: {refused:?}");
        }
        // A layer of what one has written is where those below it are.
        let commit = |host: &Pool, name| host.poolfs(&["commit", host.name(), name, "web:mine"]);
        let told = commit(other, "second").expect("commit");
        assert!(told.contains("2 layers"), "{told}");
        let refused = commit(one, "first");
        assert!(refused.code != 0 && refused.err.contains("image add web:mine --from"), "{refused:?}");
        let _ = one.poolfs(&place.ceph(&["image", "add", "web:mine", "--from", "ceph:/images"])).expect("image add");
        assert_eq!(run_script(one, "web:mine", &[], "cat /root/own /etc/motd"), "of the second\nof the image");
        for host in [one, other] {
            let _ = host.poolfs(&["image", "rm", "web:mine"]).expect("image rm");
        }
        assert_eq!(place.stored("layers").len(), 1, "it took its layer with it");
        // It goes with the last host that has it.
        let _ = one.poolfs(&["rm", "first"]).expect("rm");
        let told = one.poolfs(&["image", "rm", "web"]).expect("image rm");
        assert!(told.contains("stays at ceph:/images for") && told.contains("other/state"), "{told}");
        assert_eq!((images(one).len(), place.stored("layers").len()), (0, 1));
        assert_eq!(run_script(other, "web", &[], "cat /etc/motd"), "of the image");
        let _ = other.poolfs(&["rm", "second"]).expect("rm");
        let told = other.poolfs(&["image", "rm", "web"]).expect("image rm");
        assert!(told.contains("1 layer"), "{told}");
        for directory in ["layers", "hosts"] {
            assert_eq!(place.stored(directory), [""; 0], "{directory}");
        }
        assert_eq!(place.stored("images"), [".lock"]);
    });
}

/// The extended attributes of everything in a tree.
fn attributes(root: &Path) -> BTreeMap<String, String> {
    let script = "import os, sys
for folder, folders, files in os.walk(sys.argv[1]):
    for path in [folder] + [os.path.join(folder, name) for name in files + folders]:
        for name in sorted(os.listxattr(path, follow_symlinks=False)):
            value = os.getxattr(path, name, follow_symlinks=False).hex()
            print(os.path.relpath(path, sys.argv[1]) + '|' + name, value)";
    let listed = run(Command::new("python3").args(["-c", script]).arg(root)).expect("python3");
    let pairs = listed.lines().map(|line| line.rsplit_once(' ').expect("a pair"));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn a_layer_at_a_cluster_is_as_on_a_disk() {
    isolated("a_layer_at_a_cluster_is_as_on_a_disk", |folder| {
        let place = Place::make(folder);
        let [host, _] = &place.hosts;
        let archive = folder.join("all.tar");
        let script = "import tarfile, io, sys
tar = tarfile.open(sys.argv[1], 'w', format=tarfile.PAX_FORMAT)
def add(name, type=tarfile.REGTYPE, content=b'', target='', mode=0o644, headers={}, **more):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname, member.mode, member.pax_headers = type, len(content), target, mode, headers
    member.mtime, member.uid, member.gid = 1234567.25, 7, 8
    for key, value in more.items(): setattr(member, key, value)
    tar.addfile(member, io.BytesIO(content))
add('d', tarfile.DIRTYPE, mode=0o1750)
add('d/f', content=b'x' * 300001, headers={'SCHILY.xattr.user.note': 'of a file'})
add('d/hard', tarfile.LNKTYPE, target='d/f')
add('d/soft', tarfile.SYMTYPE, target='../no/where')
add('d/suid', content=b'program', mode=0o6755)
capability = b'\\x01\\x00\\x00\\x02\\x00\\x20\\x00\\x00' + bytes(12)
add('d/capable', content=b'program', mode=0o755, headers={'SCHILY.xattr.security.capability': capability.decode('latin-1')})
add('d/null', tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666)
add('d/block', tarfile.BLKTYPE, devmajor=7, devminor=300, mode=0o660)
add('d/pipe', tarfile.FIFOTYPE)
add('d/.wh.gone')
add('opaque', tarfile.DIRTYPE, mode=0o755)
add('opaque/.wh..wh..opq')
add('opaque/new', content=b'new')
add('\\u00e4 name', content=b'', mode=0o000)
tar.close()";
        let _ = run(Command::new("python3").args(["-c", script]).arg(&archive)).expect("python3");
        let source = format!("tar:{}", archive.display());
        let _ = host.poolfs(&["image", "import", "here", &source]).expect("import");
        place.import(host, "there", &source);
        let layers = place.stored("layers");
        assert_eq!(layers.len(), 1, "{layers:?}");
        let here = folder.join("state/layers").join(&layers[0]);
        let name = format!("ceph:/images/layers/{}", layers[0]);
        let there = host.mount(&folder.join("mnt"), &place.ceph(&["--dir", &name]));
        let [expected, found] = [&here, there.path()].map(|tree| {
            let mut found = checksum(tree);
            // A whiteout has no time of the image's.
            let whiteout = found.get_mut("d/gone").expect("a whiteout");
            whiteout.truncate(whiteout.find(" mtime").expect("a time"));
            found
        });
        assert_eq!(expected, found);
        assert!(expected.len() > 12 && expected["d/suid"].starts_with("106755 7:8"), "{expected:#?}");
        assert!(expected["d/gone"].ends_with("dev 0"), "{expected:#?}");
        let (expected, found) = (attributes(&here), attributes(there.path()));
        assert_eq!(expected, found);
        for name in ["d/f|user.note", "d/capable|security.capability", "opaque|trusted.overlay.opaque"] {
            assert!(expected.contains_key(name), "{name} in {expected:#?}");
        }
        let _ = there.unmount().expect("umount");
    });
}

#[test]
fn an_import_to_a_cluster_that_is_killed_leaves_no_image() {
    isolated("an_import_to_a_cluster_that_is_killed_leaves_no_image", |folder| {
        let place = Place::make(folder);
        let [host, other] = &place.hosts;
        let source = place.root("small", |root| {
            for number in 0..FILES {
                fs::write(root.join(format!("file{number}")), vec![number as u8; FILE_BYTES as usize])
                    .expect("written");
            }
        });
        let import = place.ceph(&["image", "import", "small", &source, "--to", "ceph:/images"]);
        let add = place.ceph(&["image", "add", "small", "--from", "ceph:/images"]);
        // How much the command writes, until it is done with all of it.
        let _ = host.poolfs(&import).expect("import");
        let _ = host.poolfs(&["image", "rm", "small"]).expect("image rm");
        let whole = FILES * FILE_BYTES;
        let mut was_killed = 0;
        for moment in 0..MOMENTS {
            let mut command = host.command();
            command.args(&import).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().expect("it starts");
            wait_for_bytes(&mut child, whole * moment / MOMENTS);
            child.kill().expect("ours");
            let is_done = child.wait().expect("ours").success();
            // Or when it had only to clean up.
            let is_listed = !images(host).is_empty();
            assert!(is_listed || !is_done, "{moment}/{MOMENTS} of {whole} bytes");
            was_killed += u32::from(!is_listed);
            // Of what it was, another host sees nothing, or the whole. Whoever was killed still has the store until the next command on its host.
            let _ = host.poolfs(&["pool", "ls"]).expect("the next command");
            let added = other.poolfs(&add);
            let is_absent = added.err.contains("has no such image");
            assert!(added.code == 0 || is_absent, "{moment}/{MOMENTS} of {whole} bytes: {added:?}");
            if added.code == 0 {
                assert_eq!(run_script(other, "small", &[], "head -c 1 /file199"), "\u{fffd}");
                let _ = other.poolfs(&["image", "rm", "small"]).expect("image rm");
            }
            if !is_listed {
                let again = host.poolfs(&import);
                if again.code != 0 {
                    assert!(
                        !is_absent && again.err.contains("poolfs image add small --from ceph:/images"),
                        "{again:?}"
                    );
                    let _ = host.poolfs(&add).expect("as it says");
                }
            }
            assert_eq!(run_script(host, "small", &[], "ls / | tail -n 1"), "tmp\n");
            let _ = host.poolfs(&["image", "rm", "small"]).expect("image rm");
        }
        assert!(was_killed >= 2, "only {was_killed} were killed");
        // Whoever is asked to end leaves nothing to others.
        let mut was_ended = 0;
        for moment in 1..MOMENTS {
            let mut command = host.command();
            let mut child =
                command.args(&import).stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts");
            wait_for_bytes(&mut child, whole * moment / MOMENTS);
            let pid = Pid::from_raw(child.id().cast_signed()).expect("a number");
            kill_process(pid, Signal::INT).expect("ours");
            let status = child.wait().expect("ours");
            if status.success() {
                let _ = host.poolfs(&["image", "rm", "small"]).expect("image rm");
                continue;
            }
            was_ended += 1;
            let pools =
                fs::read_dir(folder.join("state/pools")).expect("listed").map(|entry| entry.expect("one").file_name());
            let left: Vec<_> = pools.filter(|name| name.to_string_lossy().starts_with("exec-")).collect();
            // Before it has caught the signal, it is killed by it.
            assert!(left.is_empty() || status.code().is_none(), "{moment}/{MOMENTS}: {status:?} {left:?}");
            assert_eq!(images(host), [""; 0]);
        }
        assert!(was_ended >= 2, "only {was_ended} were ended");
        // One that was killed has nothing of what another host imports then.
        let mut command = host.command();
        command.args(&import).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("it starts");
        wait_for_bytes(&mut child, whole / 2);
        child.kill().expect("ours");
        assert!(!child.wait().expect("ours").success());
        let _ = host.poolfs(&["image", "ls"]).expect("the next command");
        let _ = other.poolfs(&import).expect("the last");
        let _ = other.poolfs(&["image", "rm", "small"]).expect("image rm");
        for directory in ["layers", "hosts"] {
            assert_eq!(place.stored(directory), [""; 0], "{directory}");
        }
    });
}

#[test]
fn two_hosts_import_one_layer_at_once() {
    isolated("two_hosts_import_one_layer_at_once", |folder| {
        let place = Place::make(folder);
        let source = place.root("small", |_| {});
        let imports = place.hosts.iter().zip(["one", "two"]).map(|(host, name)| {
            let mut command = host.command();
            command.args(place.ceph(&["image", "import", name, &source, "--to", "ceph:/images"]));
            command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts")
        });
        for mut import in imports.collect::<Vec<_>>() {
            assert!(import.wait().expect("ours").success());
        }
        for (host, name) in place.hosts.iter().zip(["one", "two"]) {
            assert_eq!(run_script(host, name, &[], "echo runs"), "runs\n");
        }
        assert_eq!(place.stored("layers").len(), 1);
        let [one, two] = &place.hosts;
        let _ = one.poolfs(&["image", "rm", "one"]).expect("image rm");
        assert_eq!(run_script(two, "two", &[], "echo runs"), "runs\n", "its layer is another image's, too");
        let _ = two.poolfs(&["image", "rm", "two"]).expect("image rm");
        assert_eq!(place.stored("layers"), [""; 0]);
    });
}

#[test]
fn a_tenant_runs_images_that_it_may_only_read() {
    isolated("a_tenant_runs_images_that_it_may_only_read", |folder| {
        let place = Place::make(folder);
        let [host, _] = &place.hosts;
        let source = place.root("web", |root| fs::write(root.join("etc/motd"), "of the image").expect("written"));
        place.import(host, "web", &source);
        let rights = "allow r path=/images, allow rw path=/containers/web";
        let key = place.cluster.authorize_as("tenant", rights);
        let tenant = ["--ceph-user", "tenant", "--ceph-keyring", key.to_str().expect("text")];
        let upper = [&["--upper-dir", "ceph:/containers/web"], &tenant[..]].concat();
        assert_eq!(run_script(host, "web", &upper, "cat /etc/motd; echo new > /etc/motd"), "of the image");
        assert_eq!(run_script(host, "web", &upper, "cat /etc/motd"), "new\n");
        assert_eq!(run_script(host, "web", &tenant, "cat /etc/motd"), "of the image");
        let refused = host.poolfs(
            &place.ceph(&[&["image", "import", "mine", &source, "--to", "ceph:/images"], &tenant[..]].concat()),
        );
        assert!(refused.code != 0 && refused.err.contains("remedy"), "{refused:?}");
        // Another cluster, by its configuration.
        let text = fs::read_to_string(place.cluster.configuration()).expect("readable");
        let elsewhere = folder.join("elsewhere.conf");
        let lines = text.lines().map(|line| if line.starts_with("fsid") { "fsid = another" } else { line });
        fs::write(&elsewhere, lines.collect::<Vec<_>>().join("\n")).expect("written");
        let elsewhere = elsewhere.to_str().expect("text");
        let refused = host.poolfs(&["run", host.name(), "web", "--ceph-conf", elsewhere, "--", "/bin/sh"]);
        assert!(refused.code != 0 && refused.err.contains("another cluster"), "{refused:?}");
        let _ = host.poolfs(&["image", "rm", "web"]).expect("image rm");
    });
}

#[test]
fn what_keeps_an_image_from_a_cluster_is_named_with_a_remedy() {
    isolated("what_keeps_an_image_from_a_cluster_is_named_with_a_remedy", |folder| {
        let place = Place::make(folder);
        let [host, _] = &place.hosts;
        let source = place.root("web", |root| fs::write(root.join("big"), vec![7; BIG_BYTES]).expect("written"));
        let import = |to: &str| host.poolfs(&place.ceph(&["image", "import", "web", &source, "--to", to]));
        for (refused, part) in [
            (import("/images"), "ceph:/PATH"),
            (import("ceph:/no/such"), "there is no such directory"),
            (import("ceph:/images/../x"), "goes up"),
            (host.poolfs(&place.ceph(&["image", "import", "web", &source])), "no branch is at a cluster"),
            (
                host.poolfs(&place.ceph(&["image", "add", "web", "--from", "ceph:/images"])),
                "no image was ever imported",
            ),
        ] {
            assert!(refused.code != 0 && refused.err.contains(part) && refused.err.contains("remedy"), "{refused:?}");
        }
        // Whoever writes there as into any directory keeps imports out.
        let mounted = host.mount(&folder.join("mnt"), &place.ceph(&["--dir", "ceph:/images"]));
        let hasty = folder.join("hasty");
        fs::create_dir(&hasty).expect("made");
        let hasty = Pool::named(&hasty, &format!("{}-hasty", name_of(folder)), "16M");
        let mut command = hasty.command();
        command.args(["--wait", "1"]).args(place.ceph(&["image", "import", "web", &source, "--to", "ceph:/images"]));
        let refused = run(&mut command);
        assert!(refused.code != 0 && refused.err.contains("\n  remedy: wait until"), "{refused:?}");
        let _ = mounted.unmount().expect("umount");
        // A quota, which the import sees, and one that only the cluster enforces. The cluster counts late.
        let other = place.root("other", |root| fs::write(root.join("big"), vec![8; BIG_BYTES]).expect("written"));
        place.import(&place.hosts[1], "other", &other);
        for directory in ["/images", "/images/layers"] {
            let _ = place.cluster.script(&["quota", directory, "20000000"]).expect("a quota");
            let mounted = place.look_at(&format!("ceph:{directory}"));
            wait_until("it is full", || rustix::fs::statvfs(mounted.path()).expect("told").f_bavail == 0);
            let _ = mounted.unmount().expect("umount");
            let refused = import("ceph:/images");
            assert!(refused.code != 0 && refused.err.contains("make room"), "{directory}: {refused:?}");
            assert_eq!((images(host).len(), place.stored("layers").len()), (0, 1), "{directory}");
            let _ = place.cluster.script(&["quota", directory, "0"]).expect("no quota");
        }
        let _ = place.hosts[1].poolfs(&["image", "rm", "other"]).expect("image rm");
        let _ = import("ceph:/images").expect("as soon as there is room");
        assert_eq!(run_script(host, "web", &[], "head -c 1 /big"), "\u{7}");
        let absent = host.poolfs(&place.ceph(&["image", "add", "other", "--from", "ceph:/images"]));
        assert!(absent.code != 0 && absent.err.contains("it has web"), "{absent:?}");
        // With --force only this host forgets it.
        let told = host.poolfs(&["image", "rm", "web", "--force"]).expect("image rm");
        assert!(told.contains("stays at ceph:/images"), "{told}");
        assert_eq!((images(host).len(), place.stored("layers").len()), (0, 1));
        let refused = import("ceph:/images");
        assert!(refused.code != 0 && refused.err.contains("image add"), "{refused:?}");
        let _ = host.poolfs(&place.ceph(&["image", "add", "web", "--from", "ceph:/images"])).expect("image add");
        let _ = host.poolfs(&["image", "rm", "web"]).expect("image rm");
        assert_eq!(place.stored("layers"), [""; 0]);
    });
}
