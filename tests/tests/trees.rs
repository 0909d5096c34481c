//! What a mounted union differs in from its lower branches: listed, made a layer, and completed. The kernel's overlayfs and other unions
//! show the same content.

use poolfs_tests::{Pool, Way, checksum, import_small, isolated, populate, run};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Changes of all kinds in a tree made by `populate`.
const CHANGES: &str = "
    printf x | dd of=usr/share/doc/big bs=1 seek=1000000 conv=notrunc status=none
    printf y >> etc/passwd
    chmod 600 var/one
    rm etc/alternative
    mkdir -p new/deep && echo fresh > new/deep/file && ln new/deep/file new/linked
    ln -s nowhere new/link && mkfifo new/pipe && mknod new/null c 1 3
    mv usr/share/doc usr/share/documents
    rmdir var/lib/empty && mkdir var/lib/empty && echo other > var/lib/empty/inside
    rm -r var/gone && echo 'no directory' > var/gone
    long=$(printf 'n%.0s' $(seq 200)); mkdir -p $long/$long && echo long > $long/$long/$long
    setfattr -n user.colour -v blue etc/passwd
    chown 4000000:5 new/deep/file
    truncate -s 100 usr/bin/cut && truncate -s 9000 usr/bin/cut
";

fn lower(folder: &Path) -> PathBuf {
    let lower = folder.join("lower");
    populate(&lower);
    for (name, size) in [("var/gone/a", 10), ("var/gone/b/c", 10), ("usr/bin/cut", 50_000)] {
        let path = lower.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, vec![7_u8; size]).expect("a file");
    }
    lower
}

/// What users see of a tree, but for how many links directories have: overlayfs does not count.
fn seen(root: &Path) -> BTreeMap<String, String> {
    let mut all = checksum(root);
    for line in all.values_mut().filter(|line| line.starts_with("40")) {
        let (before, after) = line.split_once(" links ").expect("links");
        *line = format!("{before}{}", after.trim_start_matches(|letter: char| letter.is_ascii_digit()));
    }
    all
}

/// The kernel's union of these branches, topmost first, at `at`; the namespace's end takes it away.
fn mount_overlay(at: &Path, lowers: &[&Path], upper: Option<&Path>) {
    fs::create_dir_all(at).expect("a mount point");
    let lowers: Vec<_> = lowers.iter().map(|lower| lower.display().to_string()).collect();
    let mut options = format!("lowerdir={},redirect_dir=on,metacopy=off", lowers.join(":"));
    if let Some(upper) = upper {
        let work = upper.with_extension("work");
        fs::create_dir_all(&work).expect("a folder");
        fs::create_dir_all(upper).expect("a folder");
        options = format!("{options},upperdir={},workdir={}", upper.display(), work.display());
    }
    let _ = run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(at)).expect("overlayfs");
}

/// The directory of an image's topmost layer.
fn top_layer(pool: &Pool, folder: &Path, image: &str) -> PathBuf {
    let text = pool.poolfs(&["image", "inspect", image, "--json"]).expect("inspect");
    let image: Value = serde_json::from_str(&text).expect("JSON");
    let layers = image["layers"].as_array().expect("layers");
    let digest = layers.last().expect("one")["digest"].as_str().expect("a digest");
    folder.join("state/layers").join(digest.strip_prefix("sha256:").expect("its kind"))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn differences_are_listed_and_make_a_layer_for_everybody() {
    isolated("differences_are_listed_and_make_a_layer_for_everybody", |folder| {
        let lower = lower(folder);
        let before = checksum(&lower);
        let pool = Pool::create(folder, "64M");
        for (number, format) in ["sparse", "bcow-space"].into_iter().enumerate() {
            let (upper, at) = (folder.join(format!("upper{number}")), folder.join(format!("mnt{number}")));
            fs::create_dir(&upper).expect("a folder");
            let mount = pool.mount_stored(&at, &upper, &lower, format);
            let _ = pool.shell(Way::Library, &format!("cd {}; {CHANGES}", at.display())).expect("changed");
            let expected = seen(&at);
            let listed = pool.poolfs(&["diff", pool.name(), text(&at), "--blocks"]).expect("diff");
            for wanted in [
                "C /etc/passwd\n    0 901\n",
                "D /etc/alternative\n",
                "A /new/deep/file\n",
                "A /usr/share/documents/big\n    999424 4096\n",
                "D /usr/share/doc\n",
                "R /var/lib/empty\n",
                "R /var/gone\n",
                "C /var/one\nA ",
                "C /usr/bin/cut\n    0 9000\n",
            ] {
                let wanted = wanted.strip_suffix("A ").unwrap_or(wanted);
                assert!(listed.contains(wanted), "{format}: {wanted:?} is not in\n{listed}");
            }
            let json = pool.poolfs(&["diff", pool.name(), text(&at), "--blocks", "--json"]).expect("diff");
            let all: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
            let passwd = all.iter().find(|one| one["path"] == "/etc/passwd").expect("told of");
            assert_eq!((&passwd["kind"], &passwd["size"]), (&"changed".into(), &901.into()));
            assert_eq!(passwd["parts"], serde_json::json!([[0, 901]]));

            let image = format!("made{number}");
            let _ = pool.poolfs(&["commit", pool.name(), text(&at), &image]).expect("commit");
            assert_eq!(seen(&at), expected, "{format}: committing changes nothing");
            let layer = top_layer(&pool, folder, &image);
            mount_overlay(&folder.join(format!("kernel{number}")), &[&layer, &lower], None);
            assert_eq!(
                seen(&folder.join(format!("kernel{number}"))),
                expected,
                "{format}: as overlayfs shows the layer"
            );
            let (own_upper, own) = (folder.join(format!("own-upper{number}")), folder.join(format!("own{number}")));
            fs::create_dir(&own_upper).expect("a folder");
            let shown = pool.mount_union(&own, &own_upper, &[&layer, &lower]);
            assert_eq!(seen(&own), expected, "{format}: as a union shows the layer");
            assert_eq!(pool.poolfs(&["diff", pool.name(), text(&own)]).expect("diff"), "", "{format}");
            let _ = shown.unmount().expect("unmounted");
            let again = pool.poolfs(&["commit", pool.name(), text(&at), &image]);
            assert!(again.code != 0 && again.err.contains("exists"), "{}", again.err);
            let _ = mount.unmount().expect("unmounted");
        }
        assert_eq!(checksum(&lower), before, "the lower branch");
    });
}

#[test]
fn the_root_is_listed_when_its_attributes_differ() {
    isolated("the_root_is_listed_when_its_attributes_differ", |folder| {
        let lower = lower(folder);
        let pool = Pool::create(folder, "64M");
        let (upper, at) = (folder.join("upper"), folder.join("mnt"));
        fs::create_dir(&upper).expect("a folder");
        let mount = pool.mount_union(&at, &upper, &[&lower]);
        let listed = |options: &[&str]| {
            let line = [&["diff", pool.name(), text(&at)], options].concat();
            pool.poolfs(&line).expect("diff")
        };
        assert_eq!((listed(&[]), listed(&["--json"])), (String::new(), String::new()));
        fs::set_permissions(&at, fs::Permissions::from_mode(0o711)).expect("changed");
        assert_eq!(listed(&[]), "C /\n");
        let json: Value = serde_json::from_str(&listed(&["--json"])).expect("one object");
        assert_eq!(json, serde_json::json!({"path": "/", "kind": "changed", "file_type": "directory"}));
        let _ = mount.unmount().expect("unmounted");
    });
}

#[test]
fn flattened_uppers_and_overlayfs_uppers_go_both_ways() {
    isolated("flattened_uppers_and_overlayfs_uppers_go_both_ways", |folder| {
        let lower = lower(folder);
        let pool = Pool::create(folder, "64M");
        let (upper, at) = (folder.join("upper"), folder.join("mnt"));
        fs::create_dir(&upper).expect("a folder");
        let mount = pool.mount_union(&at, &upper, &[&lower]);
        let _ = pool.shell(Way::Fuse, &format!("cd {}; {CHANGES}", at.display())).expect("changed");
        let expected = seen(&at);
        let told = pool.poolfs(&["flatten", pool.name(), text(&at)]).expect("flatten");
        assert!(told.contains("files completed"), "{told}");
        let again = pool.poolfs(&["flatten", pool.name(), text(&at), "--json"]).expect("flatten");
        let again: Value = serde_json::from_str(&again).expect("JSON");
        assert_eq!((&again["files"], &again["bytes"]), (&0.into(), &0.into()));
        assert_eq!(seen(&at), expected, "flattening is seen by nobody");
        let _ = mount.unmount().expect("unmounted");
        let kernel = folder.join("kernel");
        mount_overlay(&kernel, &[&upper, &lower], None);
        let mut shown = seen(&kernel);
        shown.retain(|path, _| !path.starts_with(".poolfs"));
        assert_eq!(shown, expected, "as overlayfs shows the flattened upper branch");

        // What overlayfs has written, as a branch of ours: below, and as the writable one.
        let (theirs, merged) = (folder.join("theirs"), folder.join("merged"));
        mount_overlay(&merged, &[&lower], Some(&theirs));
        let _ =
            run(Command::new("sh").args(["-euc", &format!("cd {}; {CHANGES}", merged.display())])).expect("changed");
        let expected = seen(&merged);
        let _ = run(Command::new("umount").arg(&merged)).expect("unmounted");
        let (top, ours) = (folder.join("top"), folder.join("ours"));
        fs::create_dir(&top).expect("a folder");
        let mount = pool.mount_union(&ours, &top, &[&theirs, &lower]);
        assert_eq!(seen(&ours), expected, "overlayfs' upper branch as a lower one");
        let _ = mount.unmount().expect("unmounted");
    });
}

#[test]
fn a_frozen_upper_branch_serves_clones_and_stays_as_it_is() {
    isolated("a_frozen_upper_branch_serves_clones_and_stays_as_it_is", |folder| {
        let lower = lower(folder);
        let pool = Pool::create(folder, "64M");
        for format in ["sparse", "bcow-space"] {
            let place = |name: &str| {
                let path = folder.join(format!("{name}-{format}"));
                fs::create_dir(&path).expect("a folder");
                path
            };
            let (first, at) = (place("first"), place("at"));
            let mount = pool.mount_stored(&at, &first, &lower, format);
            let _ = pool.shell(Way::Library, &format!("cd {}; {CHANGES}", at.display())).expect("changed");
            let expected = seen(&at);
            let other = place("other");
            let (in_use, lowers) = (place("in-use"), format!("{}:{}", first.display(), lower.display()));
            let refused =
                pool.poolfs(&["mount", pool.name(), text(&in_use), "--upper", text(&other), "--lower", &lowers]);
            assert!(refused.code != 0 && refused.err.contains("upper branch of a union"), "{}", refused.err);
            let _ = mount.unmount().expect("unmounted");
            let before = checksum(&first);

            let clones: Vec<_> = ["one", "two"]
                .iter()
                .map(|name| {
                    let (upper, at) = (place(&format!("upper-{name}")), place(name));
                    let mount = pool.mount_union(&at, &upper, &[&first, &lower]);
                    (upper, at, mount)
                })
                .collect();
            for (upper, at, _) in &clones {
                assert_eq!(seen(at), expected, "{format}");
                let read = format!("cd {}; cat usr/share/documents/big etc/passwd var/one | cksum", at.display());
                let by_kernel = pool.shell(Way::Fuse, &read).expect("read");
                assert_eq!(pool.shell(Way::Library, &read).expect("read"), by_kernel, "{format}");
                let write = format!(
                    "printf {} | dd of={}/usr/share/documents/big bs=1 seek=600000 conv=notrunc,fsync status=none",
                    upper.to_str().map_or(0, str::len) % 10,
                    at.display()
                );
                let _ = pool.shell(Way::Library, &write).expect("written");
                assert_ne!(pool.shell(Way::Library, &read).expect("read"), by_kernel, "{format}");
                let taken = run(Command::new("du").arg("-sk").arg(upper)).expect("du");
                let kilobytes: u64 = taken.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number");
                assert!(kilobytes < 100, "{format}: {kilobytes} KiB for a byte");
            }
            for (_, _, mount) in clones {
                let _ = mount.unmount().expect("unmounted");
            }
            assert_eq!(checksum(&first), before, "{format}: the frozen branch has changed");
            fs::write(first.join(".poolfs/open"), "").expect("as after a crash");
            let refused =
                pool.poolfs(&["mount", pool.name(), text(&in_use), "--upper", text(&other), "--lower", &lowers]);
            assert!(refused.code != 0 && refused.err.contains("mount it once"), "{}", refused.err);
        }
    });
}

#[test]
fn lower_branches_in_the_wrong_order_are_called_that() {
    isolated("lower_branches_in_the_wrong_order_are_called_that", |folder| {
        let lower = lower(folder);
        let pool = Pool::create(folder, "64M");
        let [first, top, at, elsewhere] = ["first", "top", "at", "elsewhere"].map(|name| {
            let path = folder.join(name);
            fs::create_dir(&path).expect("a folder");
            path
        });
        let mount = pool.mount_union(&at, &first, &[&lower]);
        let _ = pool.shell(Way::Library, &format!("cd {}; {CHANGES}", at.display())).expect("changed");
        let _ = mount.unmount().expect("unmounted");
        let told = |lowers: &[&Path]| {
            let lowers: Vec<&str> = lowers.iter().map(|path| text(path)).collect();
            let mut command = pool.command();
            command.args(["mount", pool.name(), text(&at), "--upper", text(&top), "--lower", &lowers.join(":")]);
            let mounted = run(&mut command);
            let _ = pool.poolfs(&["umount", pool.name(), text(&at)]).expect("unmounted");
            assert_eq!(mounted.code, 0, "{mounted:?}");
            mounted.err
        };
        let (named, order) = (lower.display(), "which --lower lists before it");
        let wrong = told(&[&lower, &first]);
        assert!(wrong.contains(&format!("in {named}, {order}")) && !wrong.contains("not among"), "{wrong}");
        let absent = told(&[&elsewhere, &first]);
        assert!(absent.contains("which is not among the lower branches") && !absent.contains(order), "{absent}");
        assert_eq!(told(&[&first, &lower]), "");
    });
}

#[test]
fn a_container_is_committed_and_run_again() {
    isolated("a_container_is_committed_and_run_again", |folder| {
        let pool = Pool::create(folder, "64M");
        let programs = [Path::new("/usr/bin/dd"), Path::new("/usr/bin/od")];
        import_small(&pool, folder, "small", &programs, |root| {
            fs::write(root.join("data"), vec![1; 100_000]).expect("a file");
            symlink("data", root.join("name")).expect("a link");
        });
        let script = "printf x | dd of=/data bs=1 seek=50000 conv=notrunc; echo kept > /kept; rm /name;
             i=0; while [ $i -lt 6000 ]; do : > /many-$i; i=$((i + 1)); done; echo done; sleep 1000";
        let arguments = ["run", pool.name(), "small", "--name", "c", "-d", "--", "sh", "-c", script];
        let _ = pool.poolfs(&arguments).expect("run");
        let is_done = || pool.poolfs(&["logs", "c"]).out.contains("done");
        while !is_done() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let listed = pool.poolfs(&["diff", pool.name(), "c"]).expect("diff");
        assert!(
            listed.contains("C /data\n") && listed.contains("A /kept\n") && listed.contains("D /name\n"),
            "{listed}"
        );
        let _ = pool.poolfs(&["commit", pool.name(), "c", "small:2"]).expect("commit");
        let _ = pool.poolfs(&["stop", "c", "--time", "0"]).expect("stopped");
        // The same of one that has ended; nothing stays mounted.
        assert_eq!(pool.poolfs(&["diff", pool.name(), "c"]).expect("diff"), listed);
        let _ = pool.poolfs(&["commit", pool.name(), "c", "small:3"]).expect("commit");
        assert_eq!(checksum(&top_layer(&pool, folder, "small:3")), checksum(&top_layer(&pool, folder, "small:2")));
        let _ = pool.poolfs(&["flatten", pool.name(), "c"]).expect("flatten");
        assert_eq!(pool.status()["state"], "not running");
        // One that nobody reads from, and that is killed, leaves it mounted, until the next command comes.
        let mut stuck = pool.command();
        stuck.args(["diff", pool.name(), "c"]).stdout(std::process::Stdio::piped());
        let mut stuck = stuck.spawn().expect("diff");
        while pool.status()["state"] != "running" {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        stuck.kill().expect("killed");
        let _ = stuck.wait().expect("ended");
        let _ = pool.poolfs(&["rm", "c"]).expect("removed");
        assert_eq!(pool.status()["state"], "not running");
        assert!(!folder.join("state/containers/c").exists());
        let script = "test ! -e /name && dd if=/data bs=1 skip=49999 count=3 status=none | od -c && cat /kept";
        let out = pool.poolfs(&["run", "--rm", pool.name(), "small:2", "--", "sh", "-c", script]).expect("run");
        assert!(out.contains("001   x 001") && out.contains("kept"), "{out}");
        let text = pool.poolfs(&["image", "inspect", "small:2", "--json"]).expect("inspect");
        let image: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(image["layers"].as_array().map(Vec::len), Some(2));
    });
}

#[test]
fn a_layer_is_of_one_moment_while_programs_write() {
    isolated("a_layer_is_of_one_moment_while_programs_write", |folder| {
        let lower = folder.join("lower");
        fs::create_dir(&lower).expect("a folder");
        for number in 0..200 {
            fs::write(lower.join(format!("f{number:03}")), vec![0; 40_000]).expect("a file");
        }
        let pool = Pool::create(folder, "64M");
        let (upper, at) = (folder.join("upper"), folder.join("mnt"));
        fs::create_dir(&upper).expect("a folder");
        let mount = pool.mount_union(&at, &upper, &[&lower]);
        // Each round writes its number into all files, in order: at one moment no file is behind one that comes after it.
        let writer = r#"
import os, sys
files = [os.open(os.path.join(sys.argv[1], name), os.O_RDWR) for name in sorted(os.listdir(sys.argv[1]))]
number = 0
while True:
    number += 1
    for file in files:
        os.pwrite(file, b"%08d" % number, 20000)
"#;
        let script = folder.join("writer.py");
        fs::write(&script, writer).expect("a file");
        let mut child = Command::new("python3").arg(&script).arg(&at).spawn().expect("the writer");
        while fs::read(at.join("f199")).expect("read")[20_000] == 0 {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        for round in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(150));
            let image = format!("moment{round}");
            let _ = pool.poolfs(&["commit", pool.name(), text(&at), &image]).expect("commit");
            let layer = top_layer(&pool, folder, &image);
            let number = |index: usize| -> u64 {
                let content = fs::read(layer.join(format!("f{index:03}"))).expect("in the layer");
                String::from_utf8_lossy(&content[20_000..20_008]).parse().expect("a number")
            };
            let numbers: Vec<u64> = (0..200).map(number).collect();
            assert!(numbers.is_sorted_by(|one, next| one >= next), "{numbers:?}");
            assert!(numbers[0] - numbers[199] <= 1, "{numbers:?}");
        }
        child.kill().expect("killed");
        let _ = child.wait().expect("its end");
        let _ = mount.unmount().expect("unmounted");
    });
}
