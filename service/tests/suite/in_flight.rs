//! Race tests of answers on their way to the kernel while what they say changes: they arrive too late to be kept.

use crate::harness::isolated;
use crate::kernel::{MOMENT, Mounted, kill, killed_in_time, shell};
use poolfs_libservice::types::{Caller, Name, NodeId, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Entry, Libservice};
use poolfs_service::access::Credentials;
use poolfs_service::{Context, Failure, Instance, Reply, Request};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::process::Signal;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::thread;

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

/// A request of the user-level path.
fn library(instance: &Instance, request: Request<'_>) -> Result<Reply, Failure> {
    instance.dispatch(&Context::library(&Credentials::root(), 0), request)
}

impl Mounted {
    /// The next answer waits; on the way to it nothing has to be asked of the directory.
    fn hold_back_next(&self) {
        fs::metadata(&self.at).expect("the root");
        self.trap.hold_back_next();
    }

    fn find(&self, text: &str) -> Entry {
        self.trap.memory.lookup(&Caller::ROOT, NodeId::ROOT, name(text)).expect("there")
    }
}

fn rename<'a>(from: &'a str, to: &'a str) -> Request<'a> {
    let (parent, new_parent, flags) = (NodeId::ROOT, NodeId::ROOT, RenameFlags::empty());
    Request::Rename { parent, name: name(from), new_parent, new_name: name(to), flags }
}

fn create(text: &str) -> Request<'_> {
    let (parent, flags) = (NodeId::ROOT, OpenFlags::READ_WRITE);
    Request::Create { parent, name: name(text), permissions: 0o644, flags }
}

#[test]
fn attributes_under_way_while_they_change_are_not_kept() {
    isolated("in_flight::attributes_under_way_while_they_change_are_not_kept", |folder| {
        let mounted = Mounted::new(folder);
        mounted.trap.make("f");
        let path = mounted.at.join("f");
        fs::metadata(&path).expect("there");
        for size in 1..20 {
            // The name is known, the attributes are not.
            let node = mounted.find("f").node;
            let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
            library(&mounted.instance, Request::Change { node, changes, file: None }).expect("truncated");
            let changes = SetAttributes { size: Some(100 + size), ..changes };
            mounted.hold_back_next();
            thread::scope(|scope| {
                let old = scope.spawn(|| fs::metadata(&path).expect("there").len());
                mounted.trap.wait_for(1);
                library(&mounted.instance, Request::Change { node, changes, file: None }).expect("truncated");
                mounted.trap.let_go();
                assert_eq!(old.join().expect("an answer"), size);
            });
            assert_eq!(fs::metadata(&path).expect("there").len(), 100 + size);
        }
    });
}

#[test]
fn attributes_under_way_while_the_kernel_changes_them_are_not_kept() {
    isolated("in_flight::attributes_under_way_while_the_kernel_changes_them_are_not_kept", |folder| {
        let mounted = Mounted::new(folder);
        let links = || fs::metadata(&mounted.at).expect("the root").nlink();
        assert_eq!(links(), 2);
        mounted.hold_back_next();
        let at = &mounted.at;
        thread::scope(|scope| {
            scope.spawn(|| {
                let asked = AtFlags::STATX_FORCE_SYNC;
                rustix::fs::statx(rustix::fs::CWD, at, asked, StatxFlags::BASIC_STATS).expect("the root");
            });
            mounted.trap.wait_for(1);
            fs::create_dir(at.join("d")).expect("mkdir");
            mounted.trap.let_go();
        });
        assert_eq!(links(), 3);
    });
}

#[test]
fn a_name_under_way_while_it_changes_is_not_kept() {
    isolated("in_flight::a_name_under_way_while_it_changes_is_not_kept", |folder| {
        let mounted = Mounted::new(folder);
        let (at, instance) = (&mounted.at, &mounted.instance);
        let inode = |text: &str| fs::metadata(at.join(text)).map(|found| found.ino());
        let changed_meanwhile = |text: &'static str, change: fn(&'static str) -> Request<'static>| {
            mounted.hold_back_next();
            thread::scope(|scope| {
                scope.spawn(|| drop(inode(text)));
                mounted.trap.wait_for(1);
                let change = scope.spawn(|| drop(library(instance, change(text)).expect("changed")));
                thread::sleep(MOMENT);
                assert!(!change.is_finished(), "the kernel could not be told yet");
                mounted.trap.let_go();
            });
        };
        for text in ["f", "g"] {
            changed_meanwhile(text, create);
            assert_eq!(inode(text).expect("made meanwhile"), mounted.find(text).attributes.inode);
        }
        drop(library(instance, create("n")).expect("created"));
        let moved = mounted.find("n").attributes.inode;
        changed_meanwhile("n", |name| rename(name, "f"));
        assert_eq!(inode("n").expect_err("gone").kind(), ErrorKind::NotFound);
        assert_eq!(inode("f").expect("replaced"), moved);
    });
}

#[test]
fn the_kernel_never_moves_what_a_name_has_stood_for_before() {
    isolated("in_flight::the_kernel_never_moves_what_a_name_has_stood_for_before", |folder| {
        let mounted = Mounted::new(folder);
        for text in ["old", "new"] {
            mounted.trap.make(text);
        }
        let (folder, instance) = (&mounted.at, &mounted.instance);
        let at = |text: &str| folder.join(text);
        let kept = fs::metadata(at("old")).expect("there").ino();
        let replacing = mounted.find("new").attributes.inode;
        assert_ne!(kept, replacing);
        // While the kernel looks for the new name, it has the directory locked and cannot be told.
        mounted.hold_back_next();
        thread::scope(|scope| {
            let moved = scope.spawn(|| fs::rename(at("old"), at("moved")));
            mounted.trap.wait_for(1);
            scope.spawn(|| drop(library(instance, rename("new", "old")).expect("renamed")));
            thread::sleep(MOMENT);
            mounted.trap.let_go();
            moved.join().expect("no panic").expect("renamed");
        });
        assert_eq!(fs::metadata(at("moved")).expect("moved").ino(), replacing);
        assert_eq!(fs::metadata(at("old")).expect_err("moved").kind(), ErrorKind::NotFound);
    });
}

#[test]
fn what_a_killed_caller_made_is_there() {
    isolated("in_flight::what_a_killed_caller_made_is_there", |folder| {
        let mounted = Mounted::new(folder);
        let path = mounted.at.join("wait");
        let look = || {
            thread::scope(|scope| {
                let look = scope.spawn(|| fs::metadata(&path));
                mounted.trap.wait_for(1);
                mounted.trap.let_go();
                look.join().expect("an answer")
            })
        };
        assert_eq!(look().expect_err("not yet").kind(), ErrorKind::NotFound);
        let mut child = shell(": > \"$1\"", &path);
        mounted.trap.wait_for(1);
        kill(&child, Signal::KILL);
        killed_in_time(&mut child);
        assert_eq!(fs::metadata(&path).expect_err("remembered").kind(), ErrorKind::NotFound);
        mounted.trap.let_go();
        thread::sleep(MOMENT);
        look().expect("made after all");
    });
}
