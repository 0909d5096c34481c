//! Comparison of the permission function with the kernel: the same operations, as the same random users, on twin trees.
//!
//! One twin is changed by system calls of processes that really have those credentials, the other by requests to the dispatcher.
//! Error numbers and the resulting files must be the same.

use crate::harness::isolated;
use poolfs_libservice::types::{FileType, RenameFlags, SetAttributes, SetTime, Timestamp, XattrFlags};
use poolfs_service::access::{Capability, Credentials};
use poolfs_service::stack::StackBuilder;
use poolfs_service::{Context, Instance, Request, WalkError};
use poolfs_service_protocol::{IdMap, MountSpec, StackSpec};
use rustix::fs::{AtFlags, CWD, Mode};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

const CHILD: &str = "POOLFS_ACCESS_CHILD";
const CASES_EACH: usize = 250;
const IDS: [u32; 3] = [1000, 1001, 0];
const GROUPS: [u32; 4] = [1000, 1001, 2000, 0];

/// A small generator of repeatable numbers (xorshift).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    pub fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Operation {
    Access(u32),
    Mode(u32),
    Truncate,
    TimesNow,
    TimesAt,
    Unlink,
    RemoveDirectory,
    MakeDirectory(u32),
    MakeFile(u32),
    MakeDevice,
    MakeExisting,
    Symlink,
    Link,
    Rename,
    Replace,
    GetXattr(String),
    SetXattr(String),
    RemoveXattr(String),
    /// By the kernel alone, as `SetList`.
    Owner(u32, u32),
    SetList(Vec<u8>),
}

pub fn random_operation(random: &mut Random) -> Operation {
    let names = ["user.x", "trusted.x", "security.x", "system.posix_acl_access"];
    match random.below(20) {
        0..=3 => Operation::Access(random.below(8) as u32),
        4..=6 => Operation::Mode(random.below(0o10000) as u32),
        7 => Operation::Truncate,
        8 => Operation::TimesNow,
        9 => Operation::TimesAt,
        10 => Operation::Unlink,
        11 => Operation::RemoveDirectory,
        12 => Operation::MakeDirectory(random.below(0o2000) as u32),
        13 => Operation::MakeFile(random.below(0o10000) as u32),
        14 => [Operation::MakeDevice, Operation::MakeExisting][random.below(2)].clone(),
        15 => Operation::Symlink,
        16 => Operation::Link,
        17 => Operation::Rename,
        18 => Operation::Replace,
        _ => match random.below(3) {
            0 => Operation::GetXattr(random.one(&names).into()),
            1 => Operation::SetXattr(random.one(&names[..3]).into()),
            _ => Operation::RemoveXattr(random.one(&names[..3]).into()),
        },
    }
}

/// Builds the tree of one case: two directories, a victim in the first, an object to replace in the second. Twins get the
/// same random numbers.
pub fn build(folder: &Path, random: &mut Random, users: &[u32], groups: &[u32]) {
    let (from, to) = (folder.join("from"), folder.join("to"));
    fs::create_dir_all(&from).expect("mkdir");
    fs::create_dir_all(&to).expect("mkdir");
    let victim = from.join("victim");
    if random.below(4) == 0 {
        fs::create_dir(&victim).expect("mkdir");
    } else {
        fs::write(&victim, b"content").expect("write");
    }
    fs::write(to.join("other"), b"other").expect("write");
    for path in [&victim, &to.join("other"), &from, &to] {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(path, "user.x", b"1", flags).expect("setxattr");
        rustix::fs::setxattr(path, "trusted.x", b"1", flags).expect("setxattr");
        chown(path, Some(random.one(users)), Some(random.one(groups))).expect("chown");
        let directory = path == &from || path == &to;
        let likely = if directory && random.below(3) > 0 { 0o333 } else { 0 };
        let mode = random.below(0o10000) as u32 | likely;
        if random.below(3) == 0 {
            rustix::fs::setxattr(path, "system.posix_acl_access", &random_list(random), flags).expect("ACL");
            let kept = fs::metadata(path).expect("stat").mode() & 0o777;
            fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7000 | kept)).expect("chmod");
        } else {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
        }
    }
}

/// An access list with a named user, two named groups and a mask.
pub fn random_list(random: &mut Random) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    let entries =
        [(1, u32::MAX), (2, 1000), (2, 1001), (4, u32::MAX), (8, 1001), (8, 2000), (16, u32::MAX), (32, u32::MAX)];
    for (tag, id) in entries {
        value.extend((tag as u16).to_le_bytes());
        value.extend((random.below(8) as u16).to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

fn by_system_call(folder: &Path, operation: &Operation) -> rustix::io::Result<()> {
    let (victim, new) = (folder.join("from/victim"), folder.join("from/new"));
    let other = folder.join("to/other");
    match operation {
        Operation::Access(mask) => {
            let mask = rustix::fs::Access::from_bits_retain(*mask);
            rustix::fs::accessat(CWD, &victim, mask, AtFlags::EACCESS)
        }
        Operation::Mode(mode) => rustix::fs::chmod(&victim, Mode::from_raw_mode(*mode)),
        Operation::Truncate => {
            nix::unistd::truncate(&victim, 3).map_err(|errno| rustix::io::Errno::from_raw_os_error(errno as i32))
        }
        Operation::TimesNow => times(&victim, rustix::fs::UTIME_NOW as _),
        Operation::TimesAt => times(&victim, 0),
        Operation::Unlink => rustix::fs::unlink(&victim),
        Operation::RemoveDirectory => rustix::fs::rmdir(&victim),
        Operation::MakeDirectory(mode) => rustix::fs::mkdir(&new, Mode::from_raw_mode(*mode)),
        Operation::MakeFile(mode) => make_node(&new, rustix::fs::FileType::RegularFile, *mode, 0),
        Operation::MakeDevice => make_node(&new, rustix::fs::FileType::CharacterDevice, 0o600, 0x103),
        Operation::MakeExisting => make_node(&victim, rustix::fs::FileType::RegularFile, 0o600, 0),
        Operation::Symlink => rustix::fs::symlink("target", &new),
        Operation::Link => rustix::fs::link(&victim, folder.join("to/new")),
        Operation::Rename => rustix::fs::rename(&victim, folder.join("to/new")),
        Operation::Replace => rustix::fs::rename(&victim, &other),
        Operation::GetXattr(name) => rustix::fs::getxattr(&victim, name.as_str(), &mut [0; 256]).map(|_| ()),
        Operation::SetXattr(name) => {
            rustix::fs::setxattr(&victim, name.as_str(), b"2", rustix::fs::XattrFlags::empty())
        }
        Operation::RemoveXattr(name) => rustix::fs::removexattr(&victim, name.as_str()),
        Operation::Owner(uid, gid) => {
            let (uid, gid) = (rustix::fs::Uid::from_raw(*uid), rustix::fs::Gid::from_raw(*gid));
            rustix::fs::chown(&victim, Some(uid), Some(gid))
        }
        Operation::SetList(list) => {
            rustix::fs::setxattr(&victim, "system.posix_acl_access", list, rustix::fs::XattrFlags::empty())
        }
    }
}

fn times(path: &Path, nanoseconds: i64) -> rustix::io::Result<()> {
    let time = rustix::fs::Timespec { tv_sec: 77, tv_nsec: nanoseconds as _ };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())
}

fn make_node(path: &Path, kind: rustix::fs::FileType, mode: u32, device: u64) -> rustix::io::Result<()> {
    rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(mode), device)
}

/// The same by requests.
pub fn by_request(
    instance: &Instance,
    context: &Context<'_>,
    case: &str,
    operation: &Operation,
) -> Result<(), WalkError> {
    let path = |rest: &str| format!("{case}/{rest}").into_bytes();
    let (victim, new) = (path("from/victim"), path("from/new"));
    let root = poolfs_libservice::types::NodeId::ROOT;
    let found = || instance.walk(context, root, &victim, true);
    let send = |request: Request<'_>| {
        let reply = instance.dispatch(context, request).map_err(WalkError::Failure)?;
        if let poolfs_service::Reply::Entry(entry) = reply {
            instance.layer().forget(entry.node, 1);
        }
        Ok(())
    };
    let change = |changes: SetAttributes| send(Request::Change { node: found()?.node.node(), changes, file: None });
    let both_times =
        |time: SetTime| SetAttributes { accessed: Some(time), modified: Some(time), ..SetAttributes::default() };
    match operation {
        Operation::Access(mask) => send(Request::Access { node: found()?.node.node(), mask: *mask }),
        Operation::Mode(mode) => change(SetAttributes { permissions: Some(*mode), ..SetAttributes::default() }),
        Operation::Truncate => change(SetAttributes { size: Some(3), ..SetAttributes::default() }),
        Operation::TimesNow => change(both_times(SetTime::Now)),
        Operation::TimesAt => change(both_times(SetTime::At(Timestamp { seconds: 77, nanoseconds: 0 }))),
        Operation::GetXattr(name) => send(Request::GetXattr { node: found()?.node.node(), name: name.as_bytes() }),
        Operation::SetXattr(name) => {
            let (name, value, flags) = (name.as_bytes(), b"2".as_slice(), XattrFlags::empty());
            send(Request::SetXattr { node: found()?.node.node(), name, value, flags })
        }
        Operation::RemoveXattr(name) => {
            send(Request::RemoveXattr { node: found()?.node.node(), name: name.as_bytes() })
        }
        Operation::Owner(..) | Operation::SetList(_) => Err(WalkError::Failure(poolfs_service::Failure::UseKernel)),
        Operation::Unlink | Operation::RemoveDirectory => {
            let place = instance.walk_to_parent(context, root, &victim)?;
            let (parent, name) = (place.parent.node(), place.name);
            send(match operation {
                Operation::Unlink => Request::Unlink { parent, name },
                _ => Request::RemoveDirectory { parent, name },
            })
        }
        Operation::Link => {
            let source = instance.walk(context, root, &victim, false)?;
            let to = path("to/new");
            let place = instance.walk_to_parent(context, root, &to)?;
            send(Request::Link { node: source.node.node(), parent: place.parent.node(), name: place.name })
        }
        Operation::Rename | Operation::Replace => {
            let to = path(if matches!(operation, Operation::Rename) { "to/new" } else { "to/other" });
            let from = instance.walk_to_parent(context, root, &victim)?;
            let place = instance.walk_to_parent(context, root, &to)?;
            let (parent, name, flags) = (from.parent.node(), from.name, RenameFlags::empty());
            send(Request::Rename { parent, name, new_parent: place.parent.node(), new_name: place.name, flags })
        }
        Operation::MakeDirectory(_)
        | Operation::MakeFile(_)
        | Operation::MakeDevice
        | Operation::MakeExisting
        | Operation::Symlink => {
            let at = if matches!(operation, Operation::MakeExisting) { &victim } else { &new };
            let place = instance.walk_to_parent(context, root, at)?;
            let (parent, name) = (place.parent.node(), place.name);
            let node =
                |file_type, permissions, device| Request::MakeNode { parent, name, file_type, permissions, device };
            send(match operation {
                Operation::MakeDirectory(mode) => Request::MakeDirectory { parent, name, permissions: *mode },
                Operation::MakeFile(mode) => node(FileType::Regular, *mode, 0),
                Operation::MakeDevice => node(FileType::CharDevice, 0o600, 0x103),
                Operation::MakeExisting => node(FileType::Regular, 0o600, 0),
                _ => Request::SymbolicLink { parent, name, target: b"target" },
            })
        }
    }
}

/// What a twin looks like: names, types, modes, owners, sizes.
pub fn picture(folder: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    for directory in ["from", "to"] {
        for entry in fs::read_dir(folder.join(directory)).expect("listed").flatten() {
            let metadata = fs::symlink_metadata(entry.path()).expect("stat");
            let (mode, uid, gid) = (metadata.mode(), metadata.uid(), metadata.gid());
            let size = if metadata.is_dir() { 0 } else { metadata.size() };
            let name = entry.file_name();
            lines.push(format!("{directory}/{} {mode:o} {uid}:{gid} {size}", name.to_string_lossy()));
        }
    }
    lines.sort();
    lines
}

/// The credentials that are tried, and how `setpriv` makes them.
fn identities() -> Vec<(Credentials, Vec<String>)> {
    use Capability as C;
    let make = identity;
    vec![
        make(1000, 1000, &[], &[]),
        make(1000, 1001, &[2000], &[]),
        make(1001, 1001, &[1000, 2000], &[]),
        make(0, 0, &[], &[]),
        make(1000, 1000, &[], &[(C::DacOverride, "dac_override")]),
        make(1001, 2000, &[], &[(C::DacReadSearch, "dac_read_search")]),
        make(1001, 1001, &[], &[(C::FileOwner, "fowner"), (C::DacOverride, "dac_override")]),
        make(1001, 1000, &[], &[(C::FileSetId, "fsetid"), (C::DacOverride, "dac_override")]),
        make(1001, 1000, &[], &[(C::SystemAdmin, "sys_admin"), (C::DacOverride, "dac_override")]),
    ]
}

/// One of them.
pub fn identity(uid: u32, gid: u32, groups: &[u32], capabilities: &[(Capability, &str)]) -> (Credentials, Vec<String>) {
    let bits = capabilities.iter().fold(0, |bits, (capability, _)| bits | 1u64 << (*capability as u32));
    let all: Vec<String> = capabilities.iter().map(|(_, name)| format!("+{name}")).collect();
    let list = std::iter::once("-all".to_owned()).chain(all).collect::<Vec<_>>().join(",");
    let mut arguments = vec!["setpriv".into(), format!("--reuid={uid}"), format!("--regid={gid}")];
    arguments.push(match groups {
        [] => "--clear-groups".into(),
        some => format!("--groups={}", some.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
    });
    arguments.push(format!("--inh-caps={list}"));
    if uid == 0 {
        arguments.push(format!("--bounding-set={list}"));
    } else {
        arguments.push(format!("--ambient-caps={list}"));
    }
    let credentials = Credentials { uid, gid, groups: groups.to_vec(), capabilities: bits, user_namespace: None };
    (credentials, arguments)
}

/// The part that runs with other credentials: one case a line in, one error number a line out.
fn child() {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    for line in std::io::stdin().lines() {
        let line = line.expect("readable");
        let (folder, operation): (String, Operation) = serde_json::from_str(&line).expect("ours");
        let errno = by_system_call(Path::new(&folder), &operation).map_or_else(|errno| errno.raw_os_error(), |()| 0);
        println!("\nerrno={errno}");
    }
}

/// What the kernel says to them, by a program that `become_somebody` makes somebody else.
pub fn run_as(become_somebody: &[String], program: &Path, cases: &[(String, Operation)]) -> Vec<i32> {
    let mut child = Command::new(&become_somebody[0])
        .args(&become_somebody[1..])
        .arg(program)
        .args(["--exact", "access::decides_as_the_kernel_does", "--nocapture"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("setpriv and nsenter (package util-linux) run");
    let mut input = child.stdin.take().expect("a pipe");
    let lines: Vec<String> = cases.iter().map(|case| serde_json::to_string(case).expect("serializable")).collect();
    let writer = std::thread::spawn(move || lines.iter().for_each(|line| writeln!(input, "{line}").expect("read")));
    let output = child.wait_with_output().expect("ends");
    writer.join().expect("written");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.strip_prefix("errno=")).map(|errno| errno.parse().expect("a number")).collect()
}

#[test]
fn decides_as_the_kernel_does() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    isolated("access::decides_as_the_kernel_does", |folder| {
        let program = own_program(folder);
        for (n, (credentials, arguments)) in identities().iter().enumerate() {
            let seed = 0x9e37_79b9_7f4a_7c15 ^ (n as u64 + 1);
            compare(&folder.join(format!("{n}")), seed, credentials, |cases| run_as(arguments, &program, cases));
        }
    });
}

/// This program in a place that everybody can reach.
pub fn own_program(folder: &Path) -> PathBuf {
    let program = folder.join("program");
    fs::copy(std::env::current_exe().expect("own path"), &program).expect("copied");
    for open in [folder, &program] {
        fs::set_permissions(open, fs::Permissions::from_mode(0o755)).expect("ours");
    }
    program
}

fn compare(
    folder: &Path,
    seed: u64,
    credentials: &Credentials,
    kernel: impl FnOnce(&[(String, Operation)]) -> Vec<i32>,
) {
    let (theirs, ours) = (folder.join("kernel"), folder.join("poolfs"));
    let mut random = Random(seed);
    let mut cases = Vec::new();
    for n in 0..CASES_EACH {
        let case_seed = random.below(usize::MAX) as u64 | 1;
        for twin in [&theirs, &ours] {
            build(&twin.join(n.to_string()), &mut Random(case_seed), &IDS, &GROUPS);
        }
        cases.push((theirs.join(n.to_string()).display().to_string(), random_operation(&mut random)));
    }
    let errnos = kernel(&cases);
    assert_eq!(errnos.len(), cases.len(), "the child did not answer all cases");

    let instance = instance_over(&ours, None);
    let context = Context::library(credentials, 0o022);
    let mut wrong = Vec::new();
    for (n, ((_, operation), kernel)) in cases.iter().zip(errnos).enumerate() {
        let case = n.to_string();
        let before = picture(&ours.join(&case));
        let own = match by_request(&instance, &context, &case, operation) {
            Ok(()) => 0,
            // What is left to the kernel is right by definition.
            Err(WalkError::Failure(poolfs_service::Failure::UseKernel)) => continue,
            Err(WalkError::Failure(failure)) => failure.errno().raw(),
            Err(WalkError::Redirect(_)) => panic!("there are no links"),
        };
        let (a, b) = (picture(&theirs.join(&case)), picture(&ours.join(&case)));
        if own != kernel || a != b {
            wrong.push(format!(
                "{operation:?}: kernel {kernel}, poolfs {own}\n  before {before:?}\n  kernel {a:?}\n  poolfs {b:?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{credentials:?}: {} of {CASES_EACH}:\n{}", wrong.len(), wrong.join("\n"));
}

pub fn instance_over(directory: &Path, ids: Option<IdMap>) -> Arc<Instance> {
    let stack = StackSpec::directory(directory.to_owned());
    let layers = StackBuilder::new(64 << 20, None).expect("a cache").build(&stack).expect("a directory");
    let layers = layers.with_ids(ids.as_ref());
    Instance::new(
        MountSpec { devices: true, suid: true, is_root: true, ids, ..MountSpec::new("x", directory, stack) },
        layers,
    )
}
