//! Comparison of owner translation with the kernel's idmapped mounts: the same operations, as the same users of a user namespace
//! and of the host.
//!
//! They are done on an idmapped mount, on an instance by requests of the dispatcher, and on an instance by its mount. Error
//! numbers and the resulting files must be the same.

use crate::access::{
    Operation, Random, build, by_request, identity, instance_over, own_program, picture, random_list, random_operation,
    run_as,
};
use crate::harness::{Running, isolated, make};
use poolfs_service::access::{Capability as C, Credentials};
use poolfs_service::{Context, Failure, WalkError};
use poolfs_service_protocol::{Answer, Command as Order, IdMap, MountSpec, StackSpec};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CASES_EACH: usize = 80;
const MAP: &str = "0 100000 65536";
const EPERM: i32 = 1;
const EACCES: i32 = 13;
const EOVERFLOW: i32 = 75;

/// Who owns what is there: one of them is nobody in the map.
const STORED_USERS: [u32; 5] = [1000, 1001, 0, 1000, 70_000];
const STORED_GROUPS: [u32; 6] = [1000, 1001, 2000, 0, 1000, 70_000];
/// Who is named as a new owner: some are nobody in the namespace, or to the host's root in the map.
const NAMED: [u32; 6] = [0, 1000, 1001, 65_535, 65_536, 101_000];

fn map() -> IdMap {
    IdMap::parse_proc(MAP).expect("a map")
}

/// A user namespace, held by a process.
struct UserNamespace(Child);

impl UserNamespace {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        // It ends with its input.
        let child = command.args(["--user", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let namespace = Self(child.expect("unshare (package util-linux) runs"));
        let own = fs::read_link("/proc/self/ns/user").expect("readable");
        let deadline = Instant::now() + Duration::from_secs(20);
        while fs::read_link(namespace.path()).is_ok_and(|other| other == own) {
            assert!(Instant::now() < deadline, "no user namespace");
            std::thread::sleep(Duration::from_millis(2));
        }
        for file in ["uid_map", "gid_map"] {
            fs::write(format!("/proc/{}/{file}", namespace.0.id()), MAP).expect("root maps what it likes");
        }
        namespace
    }

    fn path(&self) -> String {
        format!("/proc/{}/ns/user", self.0.id())
    }

    /// The same identity of this namespace: its ids are of the host, its command enters first.
    fn of(&self, (inside, command): (Credentials, Vec<String>)) -> (Credentials, Vec<String>) {
        let host = |id| map().host(id).expect("mapped");
        let credentials = Credentials {
            uid: host(inside.uid),
            gid: host(inside.gid),
            groups: inside.groups.into_iter().map(host).collect(),
            capabilities: inside.capabilities,
            user_namespace: Some((map(), map())),
        };
        let enter = ["nsenter".to_owned(), "--target".into(), self.0.id().to_string(), "--user".into(), "--".into()];
        (credentials, enter.into_iter().chain(command).collect())
    }
}

impl Drop for UserNamespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Shows `directory` at `at` with the ids of a user namespace.
fn mount_idmapped(directory: &Path, at: &Path, namespace: &UserNamespace) {
    let tree = open_tree(CWD, directory, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC);
    let tree = tree.expect("a directory");
    let ids = File::open(namespace.path()).expect("held");
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: ids.as_raw_fd() as u64,
    };
    // SAFETY: the path is empty and ends with a NUL, and the attributes are as large as is said.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    assert_eq!(result, 0, "this filesystem has no idmapped mounts: {}", std::io::Error::last_os_error());
    move_mount(tree, "", CWD, at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).expect("mounted");
}

fn random_case(random: &mut Random) -> Operation {
    match random.below(10) {
        0 | 1 => Operation::Owner(random.one(&NAMED), random.one(&NAMED)),
        2 => Operation::SetList(random_list(random)),
        _ => random_operation(random),
    }
}

#[test]
fn decides_as_an_idmapped_mount_does() {
    isolated("idmapped::decides_as_an_idmapped_mount_does", |folder| {
        let program = own_program(folder);
        let namespace = UserNamespace::new();
        let all = [(C::DacOverride, "dac_override"), (C::FileOwner, "fowner"), (C::FileSetId, "fsetid")];
        let container = |uid, gid, groups: &[u32], some: &[_]| (true, namespace.of(identity(uid, gid, groups, some)));
        let identities = [
            container(0, 0, &[], &all),
            container(1000, 1000, &[2000], &[]),
            container(1001, 1001, &[], &[]),
            // Of the host: its root, and users that are nobody there.
            (false, identity(0, 0, &[], &all)),
            (false, identity(1000, 1000, &[2000], &[])),
            // Whoever has an id of the map has its rights, but no capabilities.
            (false, identity(101_000, 101_000, &[], &[])),
        ];
        for (n, (is_mapped, who)) in identities.iter().enumerate() {
            let folder = make(&folder.join(format!("{n}")));
            compare(&folder, 0x9e37_79b9_7f4a_7c15 ^ (n as u64 + 1), &namespace, *is_mapped, who, &program);
        }
    });
}

fn compare(
    folder: &Path,
    seed: u64,
    namespace: &UserNamespace,
    is_mapped: bool,
    (credentials, command): &(Credentials, Vec<String>),
    program: &Path,
) {
    let [theirs, by_library, by_mount] = ["kernel", "library", "fuse"].map(|twin| make(&folder.join(twin)));
    let mut random = Random(seed);
    let mut cases = Vec::new();
    for n in 0..CASES_EACH {
        let case_seed = random.below(usize::MAX) as u64 | 1;
        for twin in [&theirs, &by_library, &by_mount] {
            build(&twin.join(n.to_string()), &mut Random(case_seed), &STORED_USERS, &STORED_GROUPS);
        }
        cases.push(random_case(&mut random));
    }
    let at = |place: &Path| -> Vec<(String, Operation)> {
        let path = |n: usize| place.join(n.to_string()).display().to_string();
        cases.iter().enumerate().map(|(n, operation)| (path(n), operation.clone())).collect()
    };
    let befores: Vec<_> = (0..CASES_EACH).map(|n| picture(&theirs.join(n.to_string()))).collect();

    let shown = make(&folder.join("shown"));
    mount_idmapped(&theirs, &shown, namespace);
    let kernel = run_as(command, program, &at(&shown));

    let service = Running::start(folder);
    let stack = StackSpec::directory(by_mount.clone());
    let spec = MountSpec { ids: Some(map()), ..service.spec("x", stack) };
    assert_eq!(service.order(&Order::Mount(spec.clone())), Answer::Done);
    let mount = run_as(command, program, &at(&spec.mount_point));
    assert_eq!(service.unmount("x"), Answer::Done);
    drop(service);
    assert_eq!((kernel.len(), mount.len()), (CASES_EACH, CASES_EACH), "a child did not answer all cases");

    let instance = instance_over(&by_library, Some(map()));
    let context = Context::library(credentials, 0o022);
    let (mut wrong, mut by_library_alone) = (Vec::new(), 0);
    for (n, operation) in cases.iter().enumerate() {
        let case = n.to_string();
        let after = picture(&theirs.join(&case));
        let mut judge = |way: &str, errno: i32, twin: &Path| {
            let (own, before) = (picture(&twin.join(&case)), &befores[n]);
            // Whether somebody may and whether its ids can be stored is asked in another order: of several reasons against it
            // another one may be told.
            let for_the_same = !is_mapped && kernel[n] == EOVERFLOW && [EPERM, EACCES].contains(&errno);
            if kernel[n] != errno && !for_the_same || after != own {
                let errnos = format!("kernel {}, {way} {errno}", kernel[n]);
                wrong
                    .push(format!("{operation:?}: {errnos}\n  before {before:?}\n  kernel {after:?}\n  {way} {own:?}"));
            }
        };
        judge("mount", mount[n], &by_mount);
        match by_request(&instance, &context, &case, operation) {
            // What is left to the kernel comes by the mount.
            Err(WalkError::Failure(Failure::UseKernel)) => continue,
            Err(WalkError::Failure(failure)) => judge("library", failure.errno().raw(), &by_library),
            Err(WalkError::Redirect(_)) => panic!("there are no links"),
            Ok(()) => judge("library", 0, &by_library),
        }
        by_library_alone += 1;
    }
    assert!(wrong.is_empty(), "{credentials:?}: {} of {CASES_EACH}:\n{}", wrong.len(), wrong.join("\n"));
    assert!(by_library_alone > CASES_EACH / 3, "the library was hardly asked");
}
