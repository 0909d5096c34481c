//! Tests of mounts: mounting, file operations, failures, unmounting.

use crate::harness::{Running, isolated, make, message, mounts, spawn};
use crate::over_rings::is_over_rings;
use crate::views::bind;
use poolfs_service_protocol::{Answer, Command as Order, MountSpec, OperationPath, StackSpec};
use rustix::fs::{AtFlags, Mode, RenameFlags, SeekFrom, StatxFlags};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Stdio;

/// What any filesystem can do, by the path `at`.
fn basic_operations(at: &Path) {
    fs::create_dir(at.join("d")).expect("mkdir");
    fs::write(at.join("d/a"), b"hello").expect("write");
    assert_eq!(fs::read(at.join("d/a")).expect("read"), b"hello");
    fs::hard_link(at.join("d/a"), at.join("d/b")).expect("link");
    assert_eq!(fs::metadata(at.join("d/a")).expect("stat").nlink(), 2);
    symlink("d/a", at.join("l")).expect("symlink");
    assert_eq!(fs::read(at.join("l")).expect("read"), b"hello");
    fs::rename(at.join("d/b"), at.join("c")).expect("rename");
    assert_eq!(rename_flags(at, "c", "l", RenameFlags::NOREPLACE), Err(rustix::io::Errno::EXIST));
    rename_flags(at, "c", "l", RenameFlags::EXCHANGE).expect("exchange");
    assert!(fs::symlink_metadata(at.join("c")).expect("stat").is_symlink());
    rename_flags(at, "c", "l", RenameFlags::EXCHANGE).expect("exchange");
    fs::set_permissions(at.join("c"), fs::Permissions::from_mode(0o4755)).expect("chmod");
    assert_eq!(fs::metadata(at.join("c")).expect("stat").mode() & 0o7777, 0o4755);
    rustix::fs::setxattr(at.join("c"), "user.x", b"1", rustix::fs::XattrFlags::empty()).expect("setxattr");
    let mut value = [0; 8];
    assert_eq!(rustix::fs::getxattr(at.join("c"), "user.x", &mut value), Ok(1));
    listing_agrees_with_stat(at);
    data_operations(&at.join("f"));
    fs::remove_file(at.join("l")).expect("unlink");
    assert_eq!(fs::remove_dir(at.join("d")).expect_err("not empty").raw_os_error(), Some(39));
    fs::remove_dir_all(at.join("d")).expect("rmdir");
}

fn rename_flags(at: &Path, from: &str, to: &str, flags: RenameFlags) -> rustix::io::Result<()> {
    rustix::fs::renameat_with(rustix::fs::CWD, at.join(from), rustix::fs::CWD, at.join(to), flags)
}

fn listing_agrees_with_stat(at: &Path) {
    for n in 0..300 {
        File::create(at.join(format!("entry-{n:03}"))).expect("create");
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(at).expect("opendir") {
        let entry = entry.expect("readdir");
        use std::os::unix::fs::DirEntryExt;
        let inode = fs::symlink_metadata(entry.path()).expect("stat").ino();
        assert_eq!(entry.ino(), inode, "{:?}", entry.path());
        names.push(entry.file_name());
    }
    names.sort();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count, "a name is listed twice");
    assert!(count >= 300);
    for n in 0..300 {
        fs::remove_file(at.join(format!("entry-{n:03}"))).expect("unlink");
    }
}

fn data_operations(path: &Path) {
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("create");
    let pattern: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
    file.write_all(&pattern).expect("write");
    file.write_all_at(b"end", 2 << 20).expect("write beyond the end");
    let hole = rustix::fs::seek(&file, SeekFrom::Hole(0)).expect("seek");
    assert!((300_000..2 << 20).contains(&hole), "{hole}");
    assert_eq!(rustix::fs::seek(&file, SeekFrom::Data(hole)), Ok(2 << 20));
    file.seek(std::io::SeekFrom::Start(0)).expect("seek");
    let mut back = vec![0; 300_000];
    file.read_exact(&mut back).expect("read");
    assert_eq!(back, pattern);
    let target = File::create(path.with_extension("copy")).expect("create");
    let copied = rustix::fs::copy_file_range(&file, Some(&mut 1000), &target, Some(&mut 0), 5000).expect("copy");
    assert_eq!(fs::read(path.with_extension("copy")).expect("read"), pattern[1000..1000 + copied]);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, 4096).expect("punch");
    file.read_exact_at(&mut back[..8192], 0).expect("read");
    assert_eq!(back[..4096], [0; 4096]);
    assert_eq!(back[4096..8192], pattern[4096..8192]);
    file.set_len(5).expect("ftruncate");
    file.sync_all().expect("fsync");
    assert_eq!(file.metadata().expect("fstat").len(), 5);
    let mut log = OpenOptions::new().append(true).open(path).expect("open");
    log.write_all(b"!").expect("append");
    assert_eq!(fs::metadata(path).expect("stat").len(), 6);
}

#[test]
fn a_directory_is_mounted_works_and_is_unmounted() {
    isolated("mounts::a_directory_is_mounted_works_and_is_unmounted", |folder| {
        let mut service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let table = mounts(folder);
        assert!(table.len() == 1 && table[0].contains("fuse.poolfs poolfs:one"), "{table:?}");
        basic_operations(&at);
        fs::write(at.join("kept"), b"kept").expect("write");
        let status = service.status();
        let fuse = &status.instances[0].operations[&OperationPath::Fuse];
        assert!(fuse["write"].count > 0 && fuse["lookup"].errors > 0 && fuse["read"].p99_ns > 0, "{fuse:?}");
        assert!(status.instances[0].nodes > 0 && status.instances[0].kernel_cached_bytes > 0);
        assert_eq!(service.unmount("one"), Answer::Done);
        assert_eq!(fs::read(directory.join("kept")).expect("read"), b"kept");
        assert!(mounts(folder).is_empty());
        assert_eq!(service.order(&Order::Shutdown), Answer::Done);
        assert!(service.wait().success());
        assert!(!service.control_socket().exists());
    });
}

#[test]
fn a_union_is_mounted_works_and_leaves_its_lower_branches_alone() {
    isolated("mounts::a_union_is_mounted_works_and_leaves_its_lower_branches_alone", |folder| {
        let service = Running::start(folder);
        let [upper, first, second] = ["upper", "first", "second"].map(|name| make(&folder.join(name)));
        let content: Vec<u8> = (0..1_000_000u32).map(|n| (n % 253) as u8).collect();
        fs::write(first.join("big"), &content).expect("write");
        fs::write(first.join("both"), b"first").expect("write");
        fs::write(second.join("both"), b"second").expect("write");
        fs::write(second.join("gone"), b"").expect("write");
        let stack = StackSpec::union(upper.clone(), vec![first.clone(), second.clone()]);
        let at = service.mount("one", stack.clone());
        assert_eq!(fs::read(at.join("both")).expect("read"), b"first");
        fs::remove_file(at.join("gone")).expect("unlink");
        let file = OpenOptions::new().write(true).open(at.join("big")).expect("open");
        file.write_all_at(b"!", 500_000).expect("write");
        file.sync_all().expect("fsync");
        basic_operations(&at);
        let status = service.status();
        let union = status.instances[0].union.as_ref().expect("a union");
        assert_eq!((union.sketches, union.blocks_moved), (1, 1), "{union:?}");
        assert!(status.cache.used_bytes > 0 && status.cache.private_bytes > 0 && status.cache.shared_bytes == 0);
        let other = StackSpec::union(make(&folder.join("other")), vec![first.clone()]);
        let beside = service.mount("two", other);
        assert_eq!(fs::read(beside.join("big")).expect("read"), content);
        assert!(service.status().cache.shared_bytes > 0, "both stand on one lower branch");
        drop(file);
        assert_eq!(service.unmount("one"), Answer::Done);
        assert_eq!(service.mount("one", stack), at);
        let mut changed = content.clone();
        changed[500_000] = b'!';
        assert_eq!(fs::read(at.join("big")).expect("read"), changed);
        assert!(!at.join("gone").exists());
        assert_eq!(fs::read(first.join("big")).expect("read"), content);
        assert!(second.join("gone").exists());
    });
}

#[test]
fn set_id_bits_and_capabilities_go_as_on_the_disk() {
    isolated("mounts::set_id_bits_and_capabilities_go_as_on_the_disk", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let file = at.join("program");
        let mode = || fs::metadata(&file).expect("stat").mode() & 0o7777;
        let capabilities = || rustix::fs::getxattr(&file, "security.capability", &mut [0; 64]).is_ok();
        let set = || {
            fs::write(&file, b"x").expect("write");
            std::os::unix::fs::chown(&file, Some(1000), Some(1000)).expect("chown");
            let value = [1, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&file, "security.capability", &value, flags).expect("setxattr");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o6777)).expect("chmod");
            assert!(capabilities());
        };
        set();
        OpenOptions::new().append(true).open(&file).expect("open").write_all(b"y").expect("write");
        assert_eq!((mode(), capabilities()), (0o6777, false), "root keeps set-id bits, nobody keeps capabilities");
        set();
        std::os::unix::fs::chown(&file, Some(1001), None).expect("chown");
        assert_eq!((mode(), capabilities()), (0o777, false), "a change of owner takes both");
        for script in ["echo z >> $0", ": > $0", "truncate -s 1 $0"] {
            set();
            let as_user = ["--reuid", "1000", "--regid", "1000", "--clear-groups", "sh", "-c", script];
            make_reachable(folder);
            let status = std::process::Command::new("setpriv").args(as_user).arg(&file).status().expect("setpriv");
            assert!(status.success(), "{script}");
            assert_eq!((mode(), capabilities()), (0o777, false), "{script}");
        }
    });
}

fn make_reachable(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("ours");
}

#[test]
fn a_set_group_id_directory_passes_its_group_on() {
    isolated("mounts::a_set_group_id_directory_passes_its_group_on", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let directory = make(&at.join("shared"));
        std::os::unix::fs::chown(&directory, None, Some(4242)).expect("chown");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o2775)).expect("chmod");
        fs::write(directory.join("f"), b"").expect("create");
        make(&directory.join("d"));
        let of = |name: &str| fs::metadata(directory.join(name)).map(|m| (m.gid(), m.mode() & 0o7000)).expect("stat");
        assert_eq!(of("f"), (4242, 0));
        assert_eq!(of("d"), (4242, 0o2000));
    });
}

#[test]
fn times_keep_their_fraction_also_before_1970() {
    isolated("mounts::times_keep_their_fraction_also_before_1970", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        fs::write(at.join("f"), b"").expect("create");
        for seconds in [-5, 0, 1_700_000_000] {
            let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: 123_456_789 };
            let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
            rustix::fs::utimensat(rustix::fs::CWD, at.join("f"), &times, AtFlags::empty()).expect("utimensat");
            let stat = rustix::fs::statx(rustix::fs::CWD, at.join("f"), AtFlags::empty(), StatxFlags::MTIME);
            let stat = stat.expect("statx");
            assert_eq!((stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec), (seconds, 123_456_789));
        }
    });
}

#[test]
fn what_cannot_be_mounted_is_refused_by_name_and_nothing_is_left() {
    isolated("mounts::what_cannot_be_mounted_is_refused_by_name_and_nothing_is_left", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let spec = |name: &str, path: &Path| service.spec(name, StackSpec::directory(path));
        let refused = |spec: MountSpec, words: &str| {
            let said = message(service.order(&Order::Mount(spec)));
            assert!(said.contains(words), "{said}");
        };
        refused(MountSpec { instance: "../x".into(), ..spec("two", &directory) }, "is no name for an instance");
        refused(spec("one", &directory), "exists already");
        refused(spec("two", &folder.join("missing")), "descriptors of 0 directories for 1 branches");
        refused(spec("two", Path::new("relative")), "not absolute");
        refused(spec("two", &at.join("..").join("x")), "\"..\"");
        refused(spec("two", &at), "served by this pool itself");
        refused(MountSpec { mount_point: folder.join("nowhere"), ..spec("two", &directory) }, "does not exist");
        fs::write(folder.join("file"), b"").expect("write");
        refused(MountSpec { mount_point: folder.join("file"), ..spec("two", &directory) }, "no directory");
        let (upper, lower) = (make(&folder.join("u")), make(&folder.join("u/l")));
        refused(service.spec("two", StackSpec::union(upper.clone(), vec![lower])), "another branch");
        refused(service.spec("two", StackSpec::union(upper, vec![])), "0 lower branches");
        assert_eq!(service.unmount("two"), Answer::Done, "what is not there needs no unmount");
        assert!(message(service.send("{\"command\":\"dance\"}")).contains("not a command"));
        assert_eq!(mounts(folder).len(), 1);
        assert_eq!(service.status().instances.len(), 1);
    });
}

#[test]
fn uses_of_one_directory_that_exclude_each_other_are_refused() {
    isolated("mounts::uses_of_one_directory_that_exclude_each_other_are_refused", |folder| {
        let service = Running::start(folder);
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| make(&folder.join(name)));
        let union = |upper: &Path, lower: &Path| StackSpec::union(upper, vec![lower.into()]);
        let directory = |path: &Path| StackSpec::directory(path);
        let refused = |stack: StackSpec, words: &str| {
            let said = message(service.order(&Order::Mount(service.spec("other", stack))));
            assert!(said.contains(words), "{said}");
        };
        service.mount("one", union(&a, &b));
        refused(union(&a, &c), "cannot be the upper branch of a union while");
        refused(directory(&a), "cannot be a mounted directory while");
        refused(directory(&b), "is a lower branch of a union");
        refused(directory(folder), "cannot be a mounted directory while");
        refused(union(&c, &a), "is the upper branch of a union");
        service.mount("two", union(&c, &b));
        assert_eq!(service.unmount("two"), Answer::Done);
        refused(directory(&c), "it is the upper branch of a union");
        service.mount("three", directory(&d));
        let at = service.mount("four", directory(&d));
        fs::write(folder.join("mnt-three/f"), b"one").expect("write");
        assert_eq!(fs::read(at.join("f")).expect("read"), b"one");
        fs::write(folder.join("mnt-three/f"), b"two").expect("write");
        assert_eq!(fs::read(at.join("f")).expect("read"), b"two", "each open sees the other mount's changes");
        assert_eq!(mounts(folder).len(), 3);
    });
}

#[test]
fn directories_are_told_apart_by_where_they_lie_and_not_by_paths() {
    isolated("mounts::directories_are_told_apart_by_where_they_lie_and_not_by_paths", |folder| {
        let service = Running::start(folder);
        let [path, moved] = ["d", "moved"].map(|name| folder.join(name));
        let at = service.mount("one", StackSpec::directory(make(&path)));
        fs::rename(&path, &moved).expect("moved");
        // Another directory is at its path now.
        let beside = service.mount("two", StackSpec::directory(make(&path)));
        for (instance, place, directory) in [("one", &at, &moved), ("two", &beside, &path)] {
            fs::write(place.join("file"), b"written").expect("write");
            assert_eq!(service.order(&Order::Flush { instance: instance.into() }), Answer::Done);
            assert_eq!(fs::read(directory.join("file")).expect("there"), b"written");
            fs::remove_file(place.join("file")).expect("there");
        }
        let said = message(service.order(&Order::Mount(service.spec("three", StackSpec::directory(folder)))));
        assert!(said.contains("cannot be a mounted directory while"), "{said}");
        // What is mounted in a directory is not part of it.
        let hidden = make(&folder.join("around/hidden"));
        bind(&make(&folder.join("other")), &hidden);
        service.mount("four", StackSpec::directory(make(&hidden.join("below"))));
        service.mount("five", StackSpec::directory(folder.join("around")));
    });
}

#[test]
fn a_busy_mount_stays_until_it_is_left() {
    isolated("mounts::a_busy_mount_stays_until_it_is_left", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let file = File::create(at.join("f")).expect("create");
        assert!(message(service.unmount("one")).contains("in use"));
        assert_eq!(mounts(folder).len(), 1);
        drop(file);
        assert_eq!(service.unmount("one"), Answer::Done);
        assert!(mounts(folder).is_empty());
    });
}

#[test]
fn a_shutdown_by_signal_flushes_and_leaves_nothing_also_while_in_use() {
    isolated("mounts::a_shutdown_by_signal_flushes_and_leaves_nothing_also_while_in_use", |folder| {
        let mut service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let mut file = File::create(at.join("f")).expect("create");
        file.write_all(b"not synced").expect("write");
        let pid = rustix::process::Pid::from_raw(service.pid() as i32).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("alive");
        assert!(service.wait().success());
        assert!(mounts(folder).is_empty());
        assert!(!service.control_socket().exists());
        assert_eq!(fs::read(directory.join("f")).expect("read"), b"not synced");
        assert!(file.write_all(b"x").is_err());
    });
}

#[test]
fn a_killed_service_leaves_a_dead_mount_that_the_next_one_replaces() {
    isolated("mounts::a_killed_service_leaves_a_dead_mount_that_the_next_one_replaces", |folder| {
        let mut service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let mut file = File::create(at.join("f")).expect("create");
        file.write_all(b"promised").expect("write");
        file.sync_all().expect("fsync");
        service.kill();
        let error = fs::metadata(at.join("f")).expect_err("dead").raw_os_error();
        // By rings, the kernel may find out while it is being asked.
        let dying = is_over_rings() && matches!(error, Some(libc::ECONNABORTED | libc::ECANCELED));
        assert!(error == Some(libc::ENOTCONN) || dying, "{error:?}");
        assert_eq!(mounts(folder).len(), 1);
        let service = Running::start(folder);
        let stack = StackSpec::directory(directory);
        assert_eq!(service.mount("one", stack), at);
        assert_eq!(mounts(folder).len(), 1);
        assert_eq!(fs::read(at.join("f")).expect("read"), b"promised");
    });
}

#[test]
fn a_wrong_configuration_ends_the_service_with_its_name() {
    let mut wrong = Vec::new();
    wrong.push(("{}", "not a ServiceConfig"));
    let text = |pool: &str, cpus: &str| {
        format!(
            r#"{{"pool":"{pool}","cpus":{cpus},"cache_bytes":1048576,"control_socket":"/nowhere/c","socket_directory":"/nowhere"}}"#
        )
    };
    let (name, none, high) = (text("a/b", "[0]"), text("p", "[]"), text("p", "[70000]"));
    wrong.extend([(name.as_str(), "no name for a pool"), (none.as_str(), "no CPUs"), (high.as_str(), "no CPU 70000")]);
    for (config, words) in wrong {
        let output = spawn(config, Stdio::piped()).wait_with_output().expect("ends");
        assert!(!output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn the_socket_is_for_root_only_and_one_service_at_a_time() {
    isolated("mounts::the_socket_is_for_root_only_and_one_service_at_a_time", |folder| {
        let service = Running::start(folder);
        let mode = fs::metadata(service.control_socket()).expect("stat").mode() & 0o777;
        assert_eq!(Mode::from_raw_mode(mode), Mode::from_raw_mode(0o600));
        let config = serde_json::json!({
            "pool": "pool", "cpus": [0], "cache_bytes": 1 << 20,
            "control_socket": service.control_socket(), "socket_directory": folder.join("run"),
        });
        let output = spawn(&config.to_string(), Stdio::piped()).wait_with_output().expect("ends");
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains("another service listens"));
        assert!(service.status().instances.is_empty());
    });
}

#[test]
fn devices_and_set_id_programs_are_allowed_each_by_itself() {
    isolated("mounts::devices_and_set_id_programs_are_allowed_each_by_itself", |folder| {
        let service = Running::start(folder);
        for (name, devices, suid) in [("one", false, false), ("two", true, false), ("three", false, true)] {
            let directory = make(&folder.join(name));
            let spec = MountSpec { devices, suid, ..service.spec(name, StackSpec::directory(directory)) };
            assert_eq!(service.order(&Order::Mount(spec)), Answer::Done);
            let at = format!("mnt-{name} ");
            let mounts = mounts(folder);
            let line = mounts.iter().find(|line| line.contains(&at)).expect("mounted");
            assert_eq!((line.contains("nodev"), line.contains("nosuid")), (!devices, !suid), "{line}");
        }
        let opened = OpenOptions::new().custom_flags(0).read(true).open(folder.join("mnt-one/missing"));
        assert_eq!(opened.expect_err("missing").raw_os_error(), Some(2));
    });
}
