//! Tests of mounts that others take away, by `umount(8)` or by aborting the connection: the instance behind ends in order, and
//! its branch is free again.

use crate::harness::{Running, eventually, give, isolated, make, mounts};
use poolfs_service_protocol::{Answer, Command as Order, StackSpec, UnmountMode};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn umount(arguments: &[&str], at: &Path) {
    let status = Command::new("umount").args(arguments).arg(at).status().expect("umount (package mount) runs");
    assert!(status.success(), "umount {arguments:?} {}", at.display());
}

fn instances(service: &Running) -> Vec<String> {
    match service.order(&Order::Instances) {
        Answer::Instances { instances } => instances,
        other => panic!("{other:?}"),
    }
}

/// The descriptors and the threads of a service.
fn held(service: &Running) -> (usize, usize) {
    let count = |what: &str| fs::read_dir(format!("/proc/{}/{what}", service.pid())).expect("it runs").count();
    (count("fd"), count("task"))
}

/// A mount namespace that has what is mounted now.
struct Elsewhere(Child);

impl Elsewhere {
    fn open() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", "echo; exec sleep 600"]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("unshare (package util-linux) runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it says that it is there");
        Self(child)
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_instance_whose_mount_is_unmounted_by_others_ends_by_itself() {
    isolated("taken_away::an_instance_whose_mount_is_unmounted_by_others_ends_by_itself", |folder| {
        let service = Running::start(folder);
        let (upper, lower) = (make(&folder.join("upper")), make(&folder.join("lower")));
        let union = || StackSpec::union(upper.clone(), vec![lower.clone()]);
        // What the first mount makes for all later ones.
        let at = service.mount("first", union());
        assert_eq!(service.unmount("first"), Answer::Done);
        let before = held(&service);
        for round in 0..5 {
            let name = format!("one-{round}");
            assert_eq!(service.mount(&name, union()).parent(), at.parent());
            let at = folder.join(format!("mnt-{name}"));
            fs::write(at.join("f"), &name).expect("written");
            umount(&[], &at);
            // Nobody asks: it ends by itself.
            let is_given_back = || {
                let now = held(&service);
                now.0 <= before.0 && now.1 <= before.1
            };
            eventually(&format!("it gives everything back, {before:?}: {:?}", held(&service)), is_given_back);
            assert_eq!(fs::read_to_string(upper.join("f")).expect("flushed"), name);
            assert!(service.status().instances.is_empty());
            assert!(!folder.join(format!("run/{name}.sock")).exists());
        }
    });
}

#[test]
fn what_others_have_unmounted_is_free_at_once() {
    isolated("taken_away::what_others_have_unmounted_is_free_at_once", |folder| {
        let service = Running::start(folder);
        let (upper, lower) = (make(&folder.join("upper")), make(&folder.join("lower")));
        for round in 0..20 {
            // Its name, its place and its upper branch are those of the last round.
            let at = service.mount("one", StackSpec::union(upper.clone(), vec![lower.clone()]));
            fs::write(at.join(format!("f{round}")), b"kept").expect("written");
            umount(&[], &at);
        }
        assert_eq!(instances(&service), [""; 0]);
        assert!((0..20).all(|round| fs::read(upper.join(format!("f{round}"))).expect("flushed") == b"kept"));
        // Something else that is mounted there now is not taken for it.
        let at = service.mount("one", StackSpec::union(upper.clone(), vec![lower.clone()]));
        umount(&[], &at);
        let status = Command::new("mount").args(["-t", "tmpfs", "other"]).arg(&at).status().expect("mount runs");
        assert!(status.success());
        assert_eq!(
            service.order(&Order::Unmount { instance: "one".into(), ending: UnmountMode::Detached }),
            Answer::Done
        );
        let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
        assert!(table.lines().any(|line| line.contains(at.to_str().expect("text"))), "{table}");
        umount(&[], &at);
    });
}

#[test]
fn an_instance_lives_as_long_as_anybody_has_its_mount() {
    isolated("taken_away::an_instance_lives_as_long_as_anybody_has_its_mount", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        let elsewhere = Elsewhere::open();
        umount(&[], &at);
        assert_eq!(instances(&service), ["one"], "another namespace has it");
        let there = format!("/proc/{}/root{}/f", elsewhere.0.id(), at.display());
        fs::write(&there, b"from elsewhere").expect("it works there");
        assert_eq!(fs::read(&there).expect("it works there"), b"from elsewhere");
        drop(elsewhere);
        eventually("it ends with its last user", || service.status().instances.is_empty());
        assert_eq!(fs::read(directory.join("f")).expect("flushed"), b"from elsewhere");

        // The same with a file that is open.
        let (at, directory) = service.mount_directory("two");
        let mut file = File::create(at.join("f")).expect("created");
        umount(&["--lazy"], &at);
        assert_eq!(instances(&service), ["two"]);
        file.write_all(b"by a descriptor").expect("written");
        drop(file);
        eventually("it ends with the file", || service.status().instances.is_empty());
        assert_eq!(fs::read(directory.join("f")).expect("flushed"), b"by a descriptor");
        assert!(mounts(folder).is_empty());
    });
}

#[test]
fn an_instance_whose_connection_is_cut_ends_with_its_mount() {
    isolated("taken_away::an_instance_whose_connection_is_cut_ends_with_its_mount", |folder| {
        let service = Running::start(folder);
        let (at, directory) = service.mount_directory("one");
        fs::write(at.join("f"), b"accepted").expect("written");
        use std::os::unix::fs::MetadataExt;
        let device = fs::metadata(&at).expect("served").dev();
        let connections = folder.join("connections");
        fs::create_dir(&connections).expect("a folder");
        let mounted = Command::new("mount").args(["-t", "fusectl", "none"]).arg(&connections).status();
        assert!(mounted.expect("mount runs").success());
        fs::write(connections.join(format!("{}/abort", rustix::fs::minor(device))), b"1").expect("cut");
        eventually("it ends", || service.status().instances.is_empty());
        eventually("its mount goes", || mounts(folder).is_empty());
        assert_eq!(fs::read(directory.join("f")).expect("flushed"), b"accepted");
        umount(&[], &connections);
    });
}

#[test]
fn nothing_is_done_for_whoever_has_gone_before_its_turn() {
    isolated("taken_away::nothing_is_done_for_whoever_has_gone_before_its_turn", |folder| {
        let service = Running::start(folder);
        let spec = service.spec("one", StackSpec::directory(make(&folder.join("dir"))));
        // A service that stands still meanwhile.
        let pid = rustix::process::Pid::from_raw(i32::try_from(service.pid()).expect("a number")).expect("a number");
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("ours");
        let stream = std::os::unix::net::UnixStream::connect(service.control_socket()).expect("it listens");
        give(&stream, &Order::Mount(spec));
        drop(stream);
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("ours");
        assert_eq!(service.order(&Order::Ping), Answer::Done);
        assert_eq!(instances(&service), [""; 0]);
        // What comes later finds the place free, and nothing comes from behind.
        let (at, _) = service.mount_directory("one");
        assert_eq!(mounts(folder).len(), 1, "{}", at.display());
        assert_eq!(service.unmount("one"), Answer::Done);
    });
}
