//! Tests of the owner and mode of new objects: they are what the call says, whatever the directory on disk would impose.

use crate::support::{Filesystem, in_namespace, name, open, run};
use poolfs_libservice::Libservice;
use poolfs_types::{Attributes, Caller, FileType, NodeId, OpenFlags, SetAttributes};
use rustix::fs::Mode;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

const KINDS: [&str; 4] = ["tmpfs", "ext4", "xfs", "btrfs"];

/// One object of every type, made by `caller` below `parent`.
fn one_of_each(layer: &dyn Libservice, caller: &Caller, parent: NodeId, permissions: u32) -> Vec<Attributes> {
    let (file, handle) =
        layer.create(caller, parent, name("file"), permissions, OpenFlags::WRITE_ONLY).expect("create");
    layer.release(handle);
    let fifo = layer.mknod(caller, parent, name("fifo"), FileType::Fifo, permissions, 0).expect("mknod");
    let node = layer.mknod(caller, parent, name("node"), FileType::Regular, permissions, 0).expect("mknod");
    let directory = layer.mkdir(caller, parent, name("directory"), permissions).expect("mkdir");
    let made = [file, fifo, node, directory];
    for entry in made {
        assert_eq!(layer.getattr(caller, entry.node).expect("getattr"), entry.attributes);
    }
    made.iter().map(|entry| entry.attributes).collect()
}

#[test]
fn a_set_group_id_directory_decides_nothing() {
    in_namespace("ownership::a_set_group_id_directory_decides_nothing", || {
        for kind in KINDS {
            let filesystem = Filesystem::new(kind, 320);
            let layer = open(&filesystem.path());
            let parent = layer.mkdir(&Caller::ROOT, NodeId::ROOT, name("parent"), 0o755).expect("mkdir").node;
            let shared = SetAttributes { gid: Some(500), permissions: Some(0o2775), ..Default::default() };
            layer.setattr(&Caller::ROOT, parent, &shared, None).expect("setattr");
            let caller = Caller { uid: 1000, gid: 1001, umask: 0o027 };
            for made in one_of_each(&*layer, &caller, parent, 0o777) {
                assert_eq!((made.uid, made.gid, made.permissions), (1000, 1001, 0o750), "{kind} {:?}", made.file_type);
            }
        }
    });
}

#[test]
fn set_id_bits_are_what_the_call_says() {
    in_namespace("ownership::set_id_bits_are_what_the_call_says", || {
        for kind in KINDS {
            let filesystem = Filesystem::new(kind, 320);
            let layer = open(&filesystem.path());
            let foreign = Caller { uid: 1000, gid: 1001, umask: 0o022 };
            for (at, caller) in [Caller::ROOT, foreign].into_iter().enumerate() {
                let text = format!("parent {at}");
                let parent = layer.mkdir(&Caller::ROOT, NodeId::ROOT, name(&text), 0o755).expect("mkdir").node;
                for made in one_of_each(&*layer, &caller, parent, 0o7777) {
                    let wanted = 0o7777 & !caller.umask;
                    assert_eq!((made.uid, made.permissions), (caller.uid, wanted), "{kind} {:?}", made.file_type);
                }
            }
        }
    });
}

#[test]
fn a_new_owner_leaves_set_id_bits_alone() {
    in_namespace("ownership::a_new_owner_leaves_set_id_bits_alone", || {
        let filesystem = Filesystem::new("ext4", 64);
        let layer = open(&filesystem.path());
        let made = layer.mknod(&Caller::ROOT, NodeId::ROOT, name("f"), FileType::Regular, 0o6755, 0).expect("mknod");
        let owner = SetAttributes { uid: Some(7), ..Default::default() };
        let now = layer.setattr(&Caller::ROOT, made.node, &owner, None).expect("setattr");
        assert_eq!((now.uid, now.permissions), (7, 0o6755));
    });
}

/// Compared with what the kernel itself does for a process with that umask, in a directory with a default ACL.
#[test]
fn a_default_list_overrules_the_umask() {
    in_namespace("ownership::a_default_list_overrules_the_umask", || {
        for kind in KINDS {
            let filesystem = Filesystem::new(kind, 320);
            let layer = open(&filesystem.path());
            let parent = layer.mkdir(&Caller::ROOT, NodeId::ROOT, name("parent"), 0o755).expect("mkdir").node;
            // u::rwx,u:1:rw-,g::r-x,m::rwx,o::r--
            let entries = [(1u16, 7u16, !0u32), (2, 6, 1), (4, 5, !0), (0x10, 7, !0), (0x20, 4, !0)];
            let mut list = 2u32.to_le_bytes().to_vec();
            for (tag, permissions, id) in entries {
                list.extend(tag.to_le_bytes());
                list.extend(permissions.to_le_bytes());
                list.extend(id.to_le_bytes());
            }
            let flags = poolfs_types::XattrFlags::empty();
            layer.setxattr(&Caller::ROOT, parent, b"system.posix_acl_default", &list, flags).expect("setxattr");
            let at = filesystem.path().join("parent");
            let script = format!("umask 0077; cd '{}'; mkdir kernel-directory; : > kernel-file", at.display());
            run("sh", &["-c", &script]);
            let caller = Caller { uid: 1000, gid: 1001, umask: 0o077 };
            let made = one_of_each(&*layer, &caller, parent, 0o777);
            let look = |text| layer.lookup(&caller, parent, name(text)).expect("lookup").attributes.permissions;
            assert_eq!((made[3].permissions, made[3].uid), (look("kernel-directory"), 1000), "{kind}");
            assert_eq!(made[0].permissions, 0o774, "{kind}");
            assert_eq!(look("kernel-file"), 0o664, "{kind}");
        }
    });
}

/// The umask of one thread's call is not another's.
#[test]
fn umasks_of_threads_do_not_mix() {
    in_namespace("ownership::umasks_of_threads_do_not_mix", || {
        let filesystem = Filesystem::new("tmpfs", 64);
        let layer = open(&filesystem.path());
        std::thread::scope(|scope| {
            for umask in [0o000, 0o022, 0o077, 0o137] {
                let layer = &layer;
                scope.spawn(move || {
                    let caller = Caller { umask, ..Caller::ROOT };
                    for round in 0..500 {
                        let text = format!("{umask:o}-{round}");
                        let made = layer.mkdir(&caller, NodeId::ROOT, name(&text), 0o777).expect("mkdir");
                        assert_eq!(made.attributes.permissions, 0o777 & !umask);
                        layer.forget(made.node, 1);
                    }
                });
            }
        });
    });
}

/// Where threads go on with a umask, it is never one of whoever they work for next.
#[test]
fn callers_of_one_thread_have_their_own_umasks() {
    in_namespace("ownership::callers_of_one_thread_have_their_own_umasks", || {
        poolfs_local::leave_umasks();
        let filesystem = Filesystem::new("tmpfs", 64);
        let layer = open(&filesystem.path());
        let umask_now = || {
            let now = rustix::process::umask(Mode::empty());
            rustix::process::umask(now);
            now.bits()
        };
        let own = tempfile::tempdir().expect("a folder");
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (layer, own, umask_now) = (&layer, own.path(), &umask_now);
                scope.spawn(move || {
                    let mut left = 0;
                    // The two threads never have the same one at a time.
                    let umasks = [0o022, 0o022, 0o077, 0o777, 0o077, 0o000, 0o137, 0o027];
                    for round in 0..400 {
                        let umask = umasks[(round + thread * 4) % umasks.len()];
                        let caller = Caller { uid: 1000, gid: 1001, umask };
                        let text = format!("{thread}-{round}");
                        let made = if round % 3 == 0 {
                            let made = layer.create(&caller, NodeId::ROOT, name(&text), 0o777, OpenFlags::READ_WRITE);
                            let (entry, handle) = made.expect("create");
                            layer.release(handle);
                            entry
                        } else {
                            layer.mkdir(&caller, NodeId::ROOT, name(&text), 0o777).expect("mkdir")
                        };
                        assert_eq!(made.attributes.permissions, 0o777 & !umask, "{umask:o}");
                        layer.forget(made.node, 1);
                        if umask & 0o700 == 0 {
                            left = umask;
                        }
                        assert_eq!(umask_now(), left, "after {umask:o}");
                        let file =
                            std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(own.join(&text));
                        let mode = file.and_then(|file| file.metadata()).expect("a file of the process's own").mode();
                        assert_eq!(mode & 0o7777, 0o600, "after {umask:o}");
                    }
                });
            }
        });
    });
}

/// A process that has not said that it can bear that finds its threads' umasks as they were.
#[test]
fn no_umask_stays_behind_unasked() {
    in_namespace("ownership::no_umask_stays_behind_unasked", || {
        let filesystem = Filesystem::new("tmpfs", 64);
        let layer = open(&filesystem.path());
        rustix::process::umask(Mode::from_raw_mode(0o026));
        let caller = Caller { umask: 0o077, ..Caller::ROOT };
        layer.mkdir(&caller, NodeId::ROOT, name("d"), 0o777).expect("mkdir");
        assert_eq!(rustix::process::umask(Mode::empty()).bits(), 0o026);
    });
}
