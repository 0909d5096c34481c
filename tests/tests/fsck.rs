//! Upper branches are checked and repaired: after a service was killed, and with damage that must not be guessed away.

use poolfs_tests::{Cluster, Pool, Way, checksum, isolated, name_of, program, run, shell};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

const FORMATS: [&str; 2] = ["sparse", "bcow"];

/// Writes, cuts, renames and syncs files of the directory in its argument without an end.
const WRITER: &str = r#"
import os, random, sys
directory = sys.argv[1]
while True:
    path = os.path.join(directory, "f%d" % random.randrange(20))
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    kind = random.randrange(12)
    if kind == 0:
        os.ftruncate(file, random.randrange(400000))
    elif kind < 4:
        os.fsync(file)
    elif kind == 4:
        os.rename(path, os.path.join(directory, "f%d" % random.randrange(20)))
    else:
        os.pwrite(file, os.urandom(random.choice([1, 4096, 30000])), random.randrange(300000))
    os.close(file)
    os.write(1, b".")
"#;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The findings and the summary that `poolfs fsck --json` told.
fn lines(out: &str) -> (Vec<Value>, Value) {
    let mut all: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let summary = all.pop().expect("a summary");
    (all, summary)
}

#[test]
fn what_a_killed_service_has_left_is_repaired() {
    isolated("what_a_killed_service_has_left_is_repaired", |folder| {
        let lower = folder.join("lower");
        fs::create_dir(&lower).expect("a folder");
        for number in 0..20 {
            fs::write(lower.join(format!("f{number}")), vec![number; 300_000]).expect("a file");
        }
        let script = folder.join("writer.py");
        fs::write(&script, WRITER).expect("a file");
        for format in FORMATS {
            let (upper, at) = (folder.join(format!("upper-{format}")), folder.join("mnt"));
            fs::create_dir(&upper).expect("a folder");
            let pool = Pool::named(folder, &format!("{}-{format}", name_of(folder)), "16M");
            let check = |more: &[&str]| {
                let mut arguments = vec!["fsck", text(&upper), "--lower", text(&lower), "--json"];
                arguments.extend_from_slice(more);
                pool.poolfs(&arguments)
            };
            for round in 0..3 {
                let mount = pool.mount_stored(&at, &upper, &lower, format);
                let in_use = check(&[]);
                assert!(in_use.code == 8 && in_use.err.contains("has it mounted at"), "{}", in_use.err);
                let mut writer = Command::new("python3");
                let mut writer = writer.arg(&script).arg(&at).stdout(Stdio::piped()).spawn().expect("a writer");
                let mut done = vec![0; 200 + 100 * round];
                writer.stdout.as_mut().expect("piped").read_exact(&mut done).expect("it writes");
                pool.kill_service();
                let _ = writer.wait().expect("its end");
                mount.keep();
                let _ = pool.poolfs(&["umount", pool.name(), text(&at)]);
                let waiting = check(&["--repair"]);
                assert!(waiting.code == 8 && waiting.err.contains("mount it once"), "{format}: {waiting:?}");
                // What waits goes with the power.
                let _ = shell(&format!("umount /run/poolfs/{}.memory/*", pool.name())).expect("unmounted");

                let before = checksum(&upper);
                let found = check(&[]);
                assert_eq!(found.code, 4, "{format}: {} {}", found.out, found.err);
                assert_eq!(checksum(&upper), before, "{format}: a check without --repair writes nothing");
                let (findings, summary) = lines(&found.out);
                assert!(findings.iter().any(|one| one["problem"] == "unclean-end"), "{format}: {}", found.out);
                assert_eq!(summary["damaged"], 0, "{format}: {}", found.out);
                let repaired = check(&["--repair"]);
                assert_eq!(repaired.code, 1, "{format}: {} {}", repaired.out, repaired.err);
                let again = check(&[]);
                assert_eq!((again.code, lines(&again.out).0.len()), (0, 0), "{format}: {}", again.out);
                let mount = pool.mount_stored(&at, &upper, &lower, format);
                let read = format!("cat {}/f* | wc -c", at.display());
                let by_library = pool.shell(Way::Library, &read).expect("all of it can be read");
                assert_eq!(pool.shell(Way::Fuse, &read).expect("read"), by_library, "{format}");
                let _ = mount.unmount().expect("unmounted");
                assert_eq!(check(&[]).code, 0, "{format}: after an orderly end");
            }
        }
    });
}

#[test]
fn a_branch_at_a_cluster_is_checked_and_repaired() {
    isolated("a_branch_at_a_cluster_is_checked_and_repaired", |folder| {
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["lower", "upper-sparse", "upper-bcow"]);
        let pool = Pool::create(folder, "16M");
        let at = folder.join("mnt");
        let with_access = |arguments: &[&str]| [arguments, &cluster.access()[..]].concat().join("\n");
        let mount = |arguments: &[&str]| pool.mount(&at, &with_access(arguments).lines().collect::<Vec<_>>());
        let filled = mount(&["--dir", "ceph:/lower"]);
        for number in 0..20 {
            fs::write(filled.path().join(format!("f{number}")), vec![number; 300_000]).expect("a file");
        }
        let _ = filled.unmount().expect("umount");
        let script = folder.join("writer.py");
        fs::write(&script, WRITER).expect("a file");
        for format in FORMATS {
            let upper = format!("ceph:/upper-{format}");
            let check = |more: &[&str]| {
                let arguments = ["fsck", &upper, "--lower", "ceph:/lower", "--json"];
                pool.poolfs(&with_access(&[&arguments[..], more].concat()).lines().collect::<Vec<_>>())
            };
            let stack = ["--upper", &upper, "--lower", "ceph:/lower", "--upper-format", format];
            let mounted = mount(&stack);
            let in_use = check(&[]);
            assert!(in_use.code == 8 && in_use.err.contains("has it mounted at"), "{in_use:?}");
            let mut writer = Command::new("python3");
            let mut writer = writer.arg(&script).arg(&at).stdout(Stdio::piped()).spawn().expect("a writer");
            writer.stdout.as_mut().expect("piped").read_exact(&mut [0; 200]).expect("it writes");
            pool.kill_service();
            let _ = writer.wait().expect("its end");
            mounted.keep();
            let _ = pool.poolfs(&["umount", pool.name(), text(&at)]);
            if format == FORMATS[0] {
                let held = check(&[]);
                assert!(held.code == 8 && held.err.contains("after a minute"), "{held:?}");
            }
            let _ = cluster.script(&["evict"]).expect("evicted");

            let found = check(&[]);
            assert_eq!(found.code, 4, "{format}: {} {}", found.out, found.err);
            let (findings, summary) = lines(&found.out);
            assert!(findings.iter().any(|one| one["problem"] == "unclean-end"), "{format}: {}", found.out);
            assert_eq!(summary["damaged"], 0, "{format}: {}", found.out);
            let repaired = check(&["--repair"]);
            assert_eq!(repaired.code, 1, "{format}: {} {}", repaired.out, repaired.err);
            let again = check(&[]);
            assert_eq!((again.code, lines(&again.out).0.len()), (0, 0), "{format}: {}", again.out);
            let mounted = mount(&stack);
            let read = format!("cat {}/f* | wc -c", at.display());
            let by_library = pool.shell(Way::Library, &read).expect("all of it can be read");
            assert_eq!(pool.shell(Way::Fuse, &read).expect("read"), by_library, "{format}");
            let _ = mounted.unmount().expect("unmounted");
            assert_eq!(check(&[]).code, 0, "{format}: after an orderly end");
        }
        let plain = pool.poolfs(&[&["fsck", "ceph:/lower"][..], &cluster.access()].concat());
        assert!(plain.code == 0 && plain.out.contains("nothing of poolfs"), "{plain:?}");
    });
}

#[test]
fn damage_is_named_and_never_guessed_away() {
    isolated("damage_is_named_and_never_guessed_away", |folder| {
        let (lower, upper, at) = (folder.join("lower"), folder.join("upper"), folder.join("mnt"));
        fs::create_dir(&upper).expect("a folder");
        fs::create_dir_all(lower.join("deep/down")).expect("folders");
        for file in ["deep/down/broken", "foreign", "sound"] {
            fs::write(lower.join(file), vec![1; 100_000]).expect("a file");
        }
        let pool = Pool::create(folder, "16M");
        let plain = pool.poolfs(&["fsck", text(&lower)]);
        assert!(plain.code == 0 && plain.out.contains("nothing of poolfs"), "{} {}", plain.out, plain.err);
        let mount = pool.mount_union(&at, &upper, &[&lower]);
        let write = "for f in deep/down/broken foreign sound; do printf x | dd of=$f bs=1 seek=50000 conv=notrunc,fsync status=none; done";
        let _ = pool.shell(Way::Library, &format!("cd {}; {write}", at.display())).expect("written");
        let _ = mount.unmount().expect("unmounted");
        let broken = upper.join("deep/down/broken");
        let value = "0sUEZTSwEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA==";
        let mut setfattr = Command::new("setfattr");
        let _ = run(setfattr.args(["-n", "trusted.poolfs.sketch", "-v", value]).arg(&broken)).expect("set");
        fs::write(lower.join("foreign"), vec![2; 100_000]).expect("another file");
        for arguments in [&[][..], &["--repair"]] {
            let mut all = vec!["fsck", text(&upper), "--lower", text(&lower)];
            all.extend_from_slice(arguments);
            let found = pool.poolfs(&all);
            assert_eq!(found.code, 4, "{} {}", found.out, found.err);
            for wanted in ["damaged: deep/down/broken: ", "damaged: foreign: ", "has changed"] {
                assert!(found.out.contains(wanted), "{wanted}: {}", found.out);
            }
            assert!(!found.out.contains("sound:"), "{}", found.out);
        }
        let absent = pool.poolfs(&["fsck", text(&folder.join("absent"))]);
        assert!(absent.code == 8 && absent.err.contains("absent"), "{} {}", absent.code, absent.err);
        let file = pool.poolfs(&["fsck", text(&lower.join("sound"))]);
        assert_eq!(file.code, 8, "{}", file.err);
    });
}

#[test]
fn what_a_check_logs_is_json_too() {
    isolated("what_a_check_logs_is_json_too", |folder| {
        let upper = folder.join("upper");
        fs::create_dir(&upper).expect("a folder");
        // It says that it cannot give up all that it wants to.
        let mut check = Command::new("setpriv");
        check.args(["--bounding-set", "-setpcap"]).arg(program("poolfs")).args(["--json", "fsck"]).arg(&upper);
        let outcome = run(&mut check);
        assert!(outcome.code == 0 && outcome.err.contains("CAP_SETPCAP"), "{outcome:?}");
        for line in outcome.err.lines() {
            let told: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {outcome:?}"));
            assert!(told["note"].is_string(), "{told}");
        }
    });
}
