//! Confinement of a running service: every thread has given up the capabilities and paths that it does not need.

use poolfs_tests::{Pool, Way, isolated, populate};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The capabilities of docs/threat-model.md: chown, dac_override, dac_read_search, fowner, fsetid, setuid, sys_ptrace, sys_admin, mknod, setfcap.
const CAPABILITIES: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 7 | 1 << 19 | 1 << 21 | 1 << 27 | 1 << 31;

fn field<'s>(status: &'s str, name: &str) -> &'s str {
    field_or_none(status, name).unwrap_or_else(|| panic!("no {name} in {status}"))
}

fn field_or_none<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn set(status: &str, name: &str) -> u64 {
    u64::from_str_radix(field(status, name), 16).expect("a set of capabilities")
}

#[test]
fn every_thread_of_a_service_is_confined() {
    isolated("every_thread_of_a_service_is_confined", |folder| {
        for name in ["upper", "lower"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        populate(&folder.join("lower"));
        let pool = Pool::create(folder, "64M");
        let _mounted = pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&folder.join("lower")]);
        let at = folder.join("mnt").display().to_string();
        for way in [Way::Library, Way::Fuse] {
            let _ = pool
                .shell(way, &format!("cd {at}; cat etc/passwd > copy; mv copy moved; ls -l > /dev/null"))
                .expect("served");
        }
        let threads = fs::read_dir(format!("/proc/{}/task", pool.service_pid())).expect("alive");
        let mut count = 0;
        for thread in threads {
            let thread = thread.expect("listed").path();
            let Ok(status) = fs::read_to_string(thread.join("status")) else { continue };
            confined(&status);
            if field(&status, "Name") != "outside" {
                sees_nothing(&thread);
                count += 1;
            }
        }
        assert!(count > 4, "{count} threads");
        let guard = guard_of(pool.service_pid());
        for thread in fs::read_dir(guard.join("task")).expect("alive") {
            let thread = thread.expect("listed").path();
            let status = fs::read_to_string(thread.join("status")).expect("alive");
            for (name, value) in [("NoNewPrivs", "1"), ("Seccomp", "2")] {
                assert_eq!(field(&status, name), value, "{status}");
            }
            for name in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
                assert_eq!(set(&status, name), 0, "{name} of {status}");
            }
            sees(&thread, &["proc", "sys"]);
        }
    });
}

/// The guard of a service.
fn guard_of(service: i32) -> PathBuf {
    let is_guard = |process: &PathBuf| {
        let read = |file| fs::read_to_string(process.join(file)).unwrap_or_default();
        field_or_none(&read("status"), "PPid") == Some(service.to_string().as_str())
            && read("cmdline").contains("\0guard")
    };
    let processes = fs::read_dir("/proc").expect("mounted").filter_map(|entry| Some(entry.ok()?.path()));
    let guards: Vec<PathBuf> = processes.filter(is_guard).collect();
    let [guard] = &guards[..] else { panic!("guards of the service: {guards:?}") };
    guard.clone()
}

/// A thread has a root of its own in which no path of the host leads anywhere.
fn sees_nothing(thread: &Path) {
    sees(thread, &["proc", "run", "sys"]);
}

/// The same, with just this in its root.
fn sees(thread: &Path, wanted: &[&str]) {
    let namespace = |process: &Path| fs::read_link(process.join("ns/mnt")).expect("a namespace");
    assert_ne!(namespace(thread), namespace(Path::new("/proc/self")), "{}", thread.display());
    let root = thread.join("root");
    let mut there: Vec<_> =
        fs::read_dir(&root).expect("listed").map(|entry| entry.expect("read").file_name()).collect();
    there.sort();
    assert_eq!(there, wanted);
    for path in ["etc/passwd", "proc/1/root/etc/passwd", "work", "dev/null"] {
        assert!(fs::symlink_metadata(root.join(path)).is_err(), "{path}");
    }
}

/// From the branches of a service no way leads up to the host's files, by whatever descriptor.
#[test]
fn branches_lead_nowhere_else() {
    isolated("branches_lead_nowhere_else", |folder| {
        for name in ["upper", "lower", "directory"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        populate(&folder.join("lower"));
        let pool = Pool::create(folder, "64M");
        let _union = pool.mount_union(&folder.join("union"), &folder.join("upper"), &[&folder.join("lower")]);
        let _directory = pool.mount_directory(&folder.join("mnt"), &folder.join("directory"));
        let at = folder.join("union").display().to_string();
        let _ = pool.shell(Way::Fuse, &format!("cd {at}; cat etc/passwd > copy; ls -lR > /dev/null")).expect("served");
        let branches = folder.metadata().expect("there").dev();
        let mut count = 0;
        for descriptor in fs::read_dir(format!("/proc/{}/fd", pool.service_pid())).expect("alive") {
            let descriptor = descriptor.expect("listed").path();
            let Ok(status) = fs::metadata(&descriptor) else { continue };
            if !status.is_dir() || status.dev() != branches {
                continue;
            }
            let up = descriptor.join("../".repeat(40));
            for path in ["proc/self", "usr/bin/env", "dev/null"] {
                assert!(fs::symlink_metadata(up.join(path)).is_err(), "{path} from {:?}", fs::read_link(&descriptor));
            }
            count += 1;
        }
        assert!(count >= 3, "{count} directories");
    });
}

fn confined(status: &str) {
    assert_eq!(field(status, "NoNewPrivs"), "1", "{status}");
    assert_eq!(field(status, "Seccomp"), "2", "{status}");
    for name in ["CapEff", "CapPrm", "CapBnd"] {
        assert_eq!(set(status, name), CAPABILITIES, "{name} of {status}");
    }
    for name in ["CapInh", "CapAmb"] {
        assert_eq!(set(status, name), 0, "{name} of {status}");
    }
}
