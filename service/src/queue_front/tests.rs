//! Tests of the queue front: requests from a client's connection to an instance over the in-memory layer, and [`serve`] alone for
//! clients that this process cannot be.

mod posts;

use super::{
    DataArea, HANDLES_OF_SESSIONS_MAX, HANDLES_PER_SESSION_MAX, QueueFront, SERVICE_THREADS_PER_GROUP_MAX,
    ServiceThreads, SessionState, serve,
};
use crate::access::Credentials;
use crate::handles::OpenFile;
use crate::instance::{Adopter, Instance};
use crate::mount_table::{Mount, MountTable};
use crate::queue_front::lifecycle::admit;
use crate::queue_front::view::View;
use crate::request::{Context, Reply as Outcome, Request as Asked};
use crate::shares::PoolShares;
use crate::shares::tests::Memory as PoolMemory;
use crate::stack::Stack;
use poolfs_ipc::area::DATA_BYTES;
use poolfs_ipc::service::{DataError, PeerFacts};
use poolfs_ipc::wire::{Adopt, Operation, Reply, Request, RequestFlags, Status, WireStatfs, WireTime};
use poolfs_ipc::{CallError, Connection};
use poolfs_libservice::types::{Caller, Errno, IdMap, Name, NodeId, OpenFlags, SetAttributes};
use poolfs_libservice::{Memory, read_with_zeros};
use poolfs_service_protocol::{MountSpec, StackSpec};
use std::cell::RefCell;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::ops::Range;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How old the last look at a client may be when it asks for something.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Where something is mounted that is shown as a whole and has no mounts in it: clients see the instance there.
fn mounted() -> PathBuf {
    let text = std::fs::read("/proc/self/mountinfo").expect("readable");
    let table = MountTable::parse(&text);
    let is_free = |mount: &&Mount<'_>| {
        let is_whole = mount.root == b"/" && table.is_reachable(mount) && !mount.is_read_only;
        is_whole && table.mounted_on(|other| other.device == mount.device).next().is_none()
    };
    let place = table.mounts().iter().find(is_free).expect("a mount, as of devpts").place.clone();
    OsString::from_vec(place).into()
}

fn instance() -> Arc<Instance> {
    instance_over(Memory::new())
}

fn instance_over(layer: Arc<Memory>) -> Arc<Instance> {
    let spec = MountSpec {
        devices: true,
        suid: true,
        ..MountSpec::new("test-1", mounted(), StackSpec::directory("/nowhere"))
    };
    Instance::new(spec, Stack::of(layer))
}

/// A process may be in as many groups as it likes, and have as much mounted: what is kept of that is of the memory of the instance's sessions.
#[test]
fn a_client_of_whom_more_is_to_be_kept_than_there_is_room_for_is_refused() {
    const GROUPS: usize = 1000;
    let instance = instance();
    let shares = PoolShares::new(64 << 20, None, Arc::new(PoolMemory::default())).join();
    let memory = shares.session_memory();
    let all = std::iter::repeat_with(|| memory.take(1)).take_while(|&is_taken| is_taken).count();
    assert!(all > 0);
    let admit = |groups: usize| {
        let facts = PeerFacts {
            process: std::process::id(),
            uid: 0,
            gid: 0,
            real_uid: 0,
            real_gid: 0,
            groups: vec![7; groups],
            capabilities: u64::MAX,
            permitted: u64::MAX,
            user_namespace: None,
        };
        admit(&facts, &Arc::default(), &Arc::downgrade(&instance), Some(&*shares))
    };
    // What is set aside for its mounts, and three times four bytes of each group.
    for (groups, pages) in [(0, 2), (GROUPS, 5)] {
        memory.give(pages - 1);
        assert_eq!(admit(groups).map(|_| ()).unwrap_err(), Errno::ENOMEM);
        memory.give(1);
        let admitted = admit(groups).expect("there is room");
        assert!(!memory.take(1), "it takes none");
        drop(admitted);
        assert!(memory.take(pages) && !memory.take(1), "it gives back what it took");
    }
}

struct Served {
    instance: Arc<Instance>,
    front: Arc<QueueFront>,
    threads: Arc<ServiceThreads>,
    connection: Connection,
    directory: tempfile::TempDir,
}

fn served() -> Served {
    served_over(Memory::new())
}

fn served_over(layer: Arc<Memory>) -> Served {
    let directory = tempfile::tempdir().expect("directory");
    let instance = instance_over(layer);
    let threads = ServiceThreads::start(&[0, 1]).expect("threads");
    let front = QueueFront::start(&instance, directory.path(), &threads).expect("front");
    let connection = connect(&directory);
    Served { instance, front, threads, connection, directory }
}

fn connect(directory: &tempfile::TempDir) -> Connection {
    let path = directory.path().join("test-1.sock");
    Connection::open(&CString::new(path.to_str().expect("text")).expect("no NUL")).expect("session")
}

impl Drop for Served {
    fn drop(&mut self) {
        self.front.close(&self.threads);
        self.threads.stop();
        assert_eq!(self.threads.count(), 0);
    }
}

fn request(operation: Operation, path: &str, second: &str) -> Request {
    Request {
        operation: operation as u32,
        path_length: path.len() as u32,
        second_length: second.len() as u32,
        umask: 0o022,
        ..Request::default()
    }
}

fn open(instance: &Instance, path: &str, flags: OpenFlags) -> Arc<OpenFile> {
    let context = Context::fuse(0, 0, 0, 0);
    let name = Name::new(path.as_bytes()).expect("a name");
    let opened = match instance.dispatch(&context, Asked::Lookup { parent: NodeId::ROOT, name }) {
        Ok(Outcome::Entry(entry)) => instance.dispatch(&context, Asked::Open { node: entry.node, flags }),
        _ => instance.dispatch(&context, Asked::Create { parent: NodeId::ROOT, name, permissions: 0o644, flags }),
    };
    match opened {
        Ok(Outcome::Opened { file, .. }) => file,
        other => panic!("{path}: {other:?}"),
    }
}

impl Served {
    fn call(&self, request: &Request, input: &[&[u8]], room: usize) -> (Reply, Vec<u8>) {
        let mut output = vec![0; room];
        let reply = self.connection.call(request, input, &mut output).expect("a reply");
        output.truncate(reply.length as usize);
        (reply, output)
    }

    fn by_path(&self, operation: Operation, path: &str, change: impl FnOnce(&mut Request)) -> Reply {
        let mut request = request(operation, path, "");
        change(&mut request);
        self.call(&request, &[path.as_bytes()], 0).0
    }

    fn by_two(&self, operation: Operation, path: &str, second: &str, change: impl FnOnce(&mut Request)) -> Reply {
        let mut request = request(operation, path, second);
        change(&mut request);
        self.call(&request, &[path.as_bytes(), second.as_bytes()], 0).0
    }

    fn asked(&self) -> Adopt {
        Adopt::asking(self.connection.session())
    }

    fn adopt(&self, file: &Arc<OpenFile>) -> Adopt {
        self.front.adopt(&own_context(), file, self.asked()).expect("an answer")
    }
}

/// This thread, as the kernel says who asks.
fn own_context() -> Context<'static> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    Context::fuse(rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw(), 0, thread)
}

fn failed(reply: &Reply) -> Errno {
    assert_eq!(reply.status, Status::Failed as u32, "{reply:?}");
    Errno::from_raw(reply.errno)
}

fn done(reply: &Reply) {
    assert_eq!(reply.status, Status::Done as u32, "{reply:?}");
}

fn kernel(reply: &Reply) {
    assert_eq!(reply.status, Status::UseKernel as u32, "{reply:?}");
}

#[test]
fn names_are_made_found_moved_and_removed() {
    let served = served();
    let made = served.by_path(Operation::MakeDirectory, "d", |request| request.mode = 0o777);
    done(&made);
    assert_eq!(made.attributes.mode, 0o040_755);
    done(&served.by_path(Operation::MakeNode, "d/f", |request| request.mode = 0o100_666));
    assert_eq!(failed(&served.by_path(Operation::MakeNode, "d/f", |request| request.mode = 0o644)), Errno::EEXIST);
    assert_eq!(served.by_path(Operation::Stat, "/d//./f", |_| {}).attributes.mode, 0o100_644);
    done(&served.by_two(Operation::Link, "d/f", "g", |_| {}));
    assert_eq!(served.by_path(Operation::Stat, "g", |_| {}).attributes.links, 2);
    done(&served.by_two(Operation::Rename, "g", "d/h", |_| {}));
    assert_eq!(failed(&served.by_two(Operation::Rename, "d/f", "d/h", |request| request.mode = 1)), Errno::EEXIST);
    assert_eq!(failed(&served.by_path(Operation::Stat, "g", |_| {})), Errno::ENOENT);
    assert_eq!(failed(&served.by_path(Operation::Unlink, "d", |_| {})), Errno::EISDIR);
    assert_eq!(failed(&served.by_path(Operation::Stat, "d/f/x", |_| {})), Errno::ENOTDIR);
    done(&served.by_path(Operation::Unlink, "d/h", |_| {}));
    done(&served.by_path(Operation::Access, "d/f", |request| request.mode = 6));
    let statfs = served.call(&request(Operation::Statfs, "d", ""), &[b"d"], 100);
    done(&statfs.0);
    assert_eq!(statfs.1.len(), size_of::<WireStatfs>());
}

#[test]
fn attributes_and_extended_attributes_are_changed() {
    let served = served();
    done(&served.by_path(Operation::MakeNode, "f", |request| request.mode = 0o644));
    assert_eq!(
        served.by_path(Operation::ChangeMode, "f", |request| request.mode = 0o100_600).attributes.mode,
        0o100_600
    );
    assert_eq!(served.by_path(Operation::Truncate, "f", |request| request.offset = 77).attributes.size, 77);
    let times = [
        WireTime { seconds: -5, nanoseconds: 7, reserved: 0 },
        WireTime { seconds: 0, nanoseconds: 0x3fff_fffe, reserved: 0 },
    ];
    let timed = served.by_path(Operation::SetTimes, "f", |request| request.times = times).attributes;
    assert_eq!((timed.seconds[0], timed.nanoseconds[0]), (-5, 7));
    let bad = WireTime { nanoseconds: 1_000_000_000, ..times[0] };
    assert_eq!(failed(&served.by_path(Operation::SetTimes, "f", |request| request.times = [bad; 2])), Errno::EINVAL);
    let set = Request { third_length: 5, ..request(Operation::SetXattr, "f", "user.a") };
    done(&served.call(&set, &[b"f", b"user.a", b"value"], 0).0);
    let get = Request { length: 100, ..request(Operation::GetXattr, "f", "user.a") };
    let (reply, value) = served.call(&get, &[b"f", b"user.a"], 100);
    assert_eq!((reply.value, value.as_slice()), (5, &b"value"[..]));
    let size = served.call(&Request { length: 0, ..get }, &[b"f", b"user.a"], 100).0;
    assert_eq!((size.value, size.length), (5, 0));
    assert_eq!(failed(&served.call(&Request { length: 4, ..get }, &[b"f", b"user.a"], 100).0), Errno::ERANGE);
    let list = Request { length: 100, ..request(Operation::ListXattr, "f", "") };
    assert_eq!(served.call(&list, &[b"f"], 100).1, b"user.a\0");
    done(&served.by_two(Operation::RemoveXattr, "f", "user.a", |_| {}));
    assert_eq!(failed(&served.by_two(Operation::RemoveXattr, "f", "user.a", |_| {})), Errno::ENODATA);
}

#[test]
fn links_lead_on_and_what_leaves_the_instance_is_the_kernels() {
    let served = served();
    done(&served.by_path(Operation::MakeDirectory, "d", |request| request.mode = 0o755));
    done(&served.by_path(Operation::MakeNode, "f", |request| request.mode = 0o644));
    done(&served.by_two(Operation::SymbolicLink, "l", "d/deep", |_| {}));
    done(&served.by_two(Operation::SymbolicLink, "a", "/etc", |_| {}));
    assert_eq!(served.call(&request(Operation::ReadLink, "l", ""), &[b"l"], 100).1, b"d/deep");
    let (reply, path) = served.call(&request(Operation::Stat, "l/x", ""), &[b"l/x"], 100);
    assert_eq!((reply.status, path.as_slice()), (Status::Redirect as u32, &b"d/deep/x"[..]));
    let (reply, path) = served.call(&request(Operation::Stat, "d/../a/x", ""), &[b"d/../a/x"], 100);
    assert_eq!((reply.status, path.as_slice()), (Status::Redirect as u32, &b"/etc/x"[..]));
    let (reply, path) = served.call(&request(Operation::Rename, "f", "a/g"), &[b"f", b"a/g"], 100);
    assert_eq!((reply.status, path.as_slice()), (Status::RedirectSecond as u32, &b"/etc/g"[..]));
    let no_follow = |request: &mut Request| request.flags = RequestFlags::NO_FOLLOW.bits();
    assert_eq!(served.by_path(Operation::Stat, "l", no_follow).attributes.mode & 0o170_000, 0o120_000);
    kernel(&served.by_path(Operation::ChangeMode, "l", no_follow));
    done(&served.by_path(Operation::MakeNode, "p", |request| request.mode = 0o755));
    kernel(&served.by_path(Operation::Truncate, "p", |_| {}));
    kernel(&served.by_path(Operation::Stat, "../x", |_| {}));
    kernel(&served.by_path(Operation::MakeDirectory, "e/", |request| request.mode = 0o755));
    kernel(&served.by_two(Operation::Rename, "d", "e", |_| {}));
    kernel(&served.by_two(Operation::RemoveXattr, "f", "system.posix_acl_access", |_| {}));
}

#[test]
fn adopted_files_are_read_and_written_until_the_kernel_closes_them() {
    let served = served();
    let file = open(&served.instance, "f", OpenFlags::READ_WRITE);
    let adopted = served.adopt(&file);
    assert_ne!(adopted.handle, 0);
    assert_eq!((adopted.open_flags, adopted.mode), (OpenFlags::READ_WRITE.bits(), 0o100_644));
    let of = |operation: Operation, offset: u64, length: u64| Request {
        handle: adopted.handle,
        offset,
        length,
        ..request(operation, "", "")
    };
    let data: Vec<u8> = (0..DATA_BYTES).map(|n| (n / 7) as u8).collect();
    let written = served.call(&of(Operation::Write, 3, DATA_BYTES as u64), &[&data], 0).0;
    assert_eq!((written.value, written.length), (3, DATA_BYTES as u64));
    let (reply, back) = served.call(&of(Operation::Read, 4, DATA_BYTES as u64), &[], DATA_BYTES);
    assert_eq!((reply.length, back.as_slice()), (DATA_BYTES as u64 - 1, &data[1..]));
    assert_eq!(served.call(&of(Operation::Stat, 0, 0), &[], 0).0.attributes.size, DATA_BYTES as u64 + 3);
    // Only the kernel can get to know that what it has open has shrunk.
    kernel(&served.call(&of(Operation::Truncate, 10, 0), &[], 0).0);
    let longer = DATA_BYTES as u64 + 10;
    assert_eq!(served.call(&of(Operation::Truncate, longer, 0), &[], 0).0.attributes.size, longer);
    done(&served.call(&of(Operation::Sync, 0, 0), &[], 0).0);
    done(&served.call(&of(Operation::Allocate, 0, 100), &[], 0).0);
    assert_eq!(served.call(&Request { mode: 3, ..of(Operation::Seek, 0, 0) }, &[], 0).0.value, 0);
    let copy_to = |second_handle: u64| {
        let request = Request { second_handle, second_offset: 50, ..of(Operation::CopyRange, 0, 10) };
        served.call(&request, &[], 0).0
    };
    let other = open(&served.instance, "g", OpenFlags::READ_WRITE);
    assert_eq!(copy_to(served.adopt(&other).handle).value, 10);
    kernel(&copy_to(adopted.handle));
    served.instance.release(other.key());
    served.instance.release(file.key());
    kernel(&served.call(&of(Operation::Read, 0, 1), &[], 1).0);
}

#[test]
fn appends_go_to_the_end_and_directories_start_paths() {
    let served = served();
    let file = open(&served.instance, "f", OpenFlags::WRITE_ONLY | OpenFlags::APPEND);
    let handle = served.adopt(&file).handle;
    for expected in [0, 5] {
        let append = Request { handle, offset: 77, length: 5, ..request(Operation::Write, "", "") };
        assert_eq!(served.call(&append, &[b"12345"], 0).0.value, expected);
    }
    assert_eq!(
        failed(&served.call(&Request { handle, length: 1, ..request(Operation::Read, "", "") }, &[], 1).0),
        Errno::EBADF
    );
    done(&served.by_path(Operation::MakeDirectory, "d", |request| request.mode = 0o755));
    let context = Context::fuse(0, 0, 0, 0);
    let entry = served.instance.layer().lookup(&context.caller, NodeId::ROOT, Name::new(b"d").expect("name"));
    let opened = served.instance.dispatch(&context, Asked::OpenDirectory { node: entry.expect("there").node });
    let Ok(Outcome::Opened { file: directory, .. }) = opened else { panic!("{opened:?}") };
    let start = served.adopt(&directory).handle;
    done(&served.by_path(Operation::MakeNode, "x", |request| (request.directory, request.mode) = (start, 0o600)));
    done(&served.by_path(Operation::Stat, "d/x", |_| {}));
    assert_eq!(failed(&served.by_path(Operation::Stat, "x", |request| request.directory = handle)), Errno::ENOTDIR);
    kernel(&served.by_path(Operation::Stat, "../f", |request| request.directory = start));
}

#[test]
fn adoption_is_for_the_sessions_own_threads_and_ends_with_it() {
    let served = served();
    let file = open(&served.instance, "f", OpenFlags::READ_WRITE);
    let adopted = served.adopt(&file);
    let asked = Adopt { handle: 0, ..adopted };
    let own = own_context();
    let refused = |context: &Context<'_>, asked: Adopt, why: &str| {
        assert_eq!(served.front.adopt(context, &file, asked).expect("an answer").handle, 0, "{why}");
    };
    refused(&Context { thread: 1, ..own }, asked, "another process's thread");
    refused(&Context { thread: 0, ..own }, asked, "nobody's thread");
    refused(&own, Adopt { session: asked.session ^ 1 << 20, ..asked }, "another session");
    refused(&Context { caller: Caller { uid: own.caller.uid + 1, ..own.caller }, ..own }, asked, "another user");
    refused(&Context { caller: Caller { gid: own.caller.gid + 1, ..own.caller }, ..own }, asked, "another group");
    assert!(file.is_adopted());
    // Another session of the process knows nothing of the handle.
    let other = connect(&served.directory);
    let read = Request { handle: adopted.handle, length: 1, ..request(Operation::Read, "", "") };
    assert_eq!(other.call(&read, &[], &mut [0]).expect("a reply").status, Status::UseKernel as u32);
    assert_eq!(served.front.sessions(), 2);
    served.connection.close();
    let start = Instant::now();
    while file.is_adopted() || served.front.sessions() > 1 {
        assert!(start.elapsed() < Duration::from_secs(5), "the session's handles stay");
        std::thread::sleep(Duration::from_millis(2));
    }
    drop(other);
}

#[test]
fn handles_of_all_sessions_together_are_bounded() {
    let served = served();
    let sessions = HANDLES_OF_SESSIONS_MAX / HANDLES_PER_SESSION_MAX;
    let mut connections: Vec<Connection> = (0..sessions).map(|_| connect(&served.directory)).collect();
    let files: Vec<_> =
        (0..HANDLES_PER_SESSION_MAX).map(|_| open(&served.instance, "f", OpenFlags::READ_ONLY)).collect();
    let adopt = |connection: &Connection, file: &Arc<OpenFile>| {
        let asked = Adopt { session: connection.session(), ..served.asked() };
        served.front.adopt(&own_context(), file, asked).expect("an answer").handle
    };
    for connection in &connections {
        assert!(files.iter().all(|file| adopt(connection, file) != 0));
    }
    let own = open(&served.instance, "g", OpenFlags::READ_WRITE);
    assert_eq!(adopt(&served.connection, &own), 0);
    assert!(!own.is_adopted(), "the kernel's, as before");
    assert_ne!(adopt(&connections[0], &files[0]), 0, "one it has");
    served.instance.release(files[0].key());
    assert_ne!(adopt(&served.connection, &own), 0);
    drop(connections.pop());
    let other = open(&served.instance, "h", OpenFlags::READ_WRITE);
    let start = Instant::now();
    while (0..sessions).any(|_| adopt(&served.connection, &other) == 0) {
        assert!(start.elapsed() < Duration::from_secs(5), "the handles of an ended session stay");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_the_kernel_may_have_changed_is_the_kernels() {
    let served = served();
    let adopted = open(&served.instance, "f", OpenFlags::READ_WRITE);
    let handle = served.adopt(&adopted).handle;
    let read = Request { handle, length: 1, ..request(Operation::Read, "", "") };
    done(&served.call(&read, &[], 1).0);
    let writer = open(&served.instance, "f", OpenFlags::WRITE_ONLY);
    kernel(&served.call(&read, &[], 1).0);
    kernel(&served.by_path(Operation::Truncate, "f", |_| {}));
    served.instance.release(writer.key());
    drop(writer);
    done(&served.call(&read, &[], 1).0);
}

#[test]
fn a_description_that_is_given_up_stays_the_kernels() {
    let served = served();
    let file = open(&served.instance, "f", OpenFlags::READ_WRITE);
    let adopted = served.adopt(&file);
    let read = Request { handle: adopted.handle, length: 1, ..request(Operation::Read, "", "") };
    done(&served.call(&read, &[], 1).0);
    assert_eq!(served.front.adopt(&own_context(), &file, adopted).expect("an answer").handle, 0);
    kernel(&served.call(&read, &[], 1).0);
    assert_eq!(served.adopt(&file).handle, 0);
    assert!(!file.is_adopted());
    let other = open(&served.instance, "f", OpenFlags::READ_ONLY);
    let other = served.adopt(&other).handle;
    kernel(&served.call(&Request { handle: other, ..read }, &[], 1).0);
}

/// A data area of this process's own.
struct Plain(RefCell<Vec<u8>>);

impl DataArea for Plain {
    fn bytes(&self) -> usize {
        self.0.borrow().len()
    }

    fn get(&self, offset: usize, target: &mut [u8]) -> Result<(), DataError> {
        target.copy_from_slice(self.0.borrow().get(offset..offset + target.len()).ok_or(DataError::OutOfBounds)?);
        Ok(())
    }

    fn put(&self, offset: usize, source: &[u8]) -> Result<(), DataError> {
        self.0
            .borrow_mut()
            .get_mut(offset..offset + source.len())
            .ok_or(DataError::OutOfBounds)?
            .copy_from_slice(source);
        Ok(())
    }

    fn put_file(&self, range: Range<usize>, file: &File, at: u64) -> Result<(), DataError> {
        let mut area = self.0.borrow_mut();
        let part = area.get_mut(range).ok_or(DataError::OutOfBounds)?;
        read_with_zeros(file, part, at).map_err(|_| DataError::Unreadable)
    }
}

#[test]
fn who_may_not_is_told_so() {
    let instance = instance();
    let user = Credentials { uid: 1000, gid: 1000, groups: vec![], capabilities: 0, user_namespace: None };
    let sessions = [SessionState::of(Credentials::root()), SessionState::of(user)];
    let mut scratch = vec![0; DATA_BYTES];
    let mut ask = |who: usize, operation: Operation, path: &str, mode: u32| {
        let area = Plain(RefCell::new(vec![0; DATA_BYTES]));
        let (path, second) = path.split_once(' ').unwrap_or((path, ""));
        area.put(0, path.as_bytes()).expect("room");
        area.put(path.len(), second.as_bytes()).expect("room");
        let request = Request { mode, ..request(operation, path, second) };
        serve(&instance, &sessions[who], &request, &area, &mut scratch)
    };
    done(&ask(0, Operation::MakeDirectory, "private", 0o700));
    done(&ask(0, Operation::MakeNode, "private/f", 0o666));
    done(&ask(0, Operation::MakeNode, "f", 0o640));
    done(&ask(1, Operation::Stat, "f", 0));
    assert_eq!(failed(&ask(1, Operation::Access, "f", 4)), Errno::EACCES);
    assert_eq!(failed(&ask(1, Operation::Stat, "private/f", 0)), Errno::EACCES);
    assert_eq!(failed(&ask(1, Operation::Unlink, "f", 0)), Errno::EACCES);
    assert_eq!(failed(&ask(1, Operation::MakeDirectory, "mine", 0o755)), Errno::EACCES);
    assert_eq!(failed(&ask(1, Operation::ChangeMode, "f", 0o777)), Errno::EPERM);
    kernel(&ask(1, Operation::Link, "f g", 0));
    done(&ask(0, Operation::Link, "f g", 0));
}

#[test]
fn ids_are_those_of_the_callers_user_namespace() {
    let instance = instance();
    let map = IdMap::parse_proc("0 1000 1").expect("a map");
    let inside = Credentials { uid: 1000, gid: 1000, user_namespace: Some((map.clone(), map)), ..Credentials::root() };
    let sessions = [SessionState::of(Credentials::root()), SessionState::of(inside)];
    let mut scratch = vec![0; DATA_BYTES];
    let mut ask = |who: usize, operation: Operation, path: &str, second: &str| {
        let area = Plain(RefCell::new(vec![0; DATA_BYTES]));
        area.put(0, path.as_bytes()).expect("room");
        area.put(path.len(), second.as_bytes()).expect("room");
        let request = Request { mode: 0o777, length: 100, ..request(operation, path, second) };
        serve(&instance, &sessions[who], &request, &area, &mut scratch)
    };
    let ids = |reply: Reply| (reply.attributes.uid, reply.attributes.gid);
    done(&ask(0, Operation::MakeDirectory, "d", ""));
    let context = Context::fuse(0, 0, 0, 0);
    let entry = instance.layer().lookup(&context.caller, NodeId::ROOT, Name::new(b"d").expect("a name")).expect("d");
    let changes = SetAttributes { uid: Some(1000), gid: Some(5), ..SetAttributes::default() };
    instance.dispatch(&context, Asked::Change { node: entry.node, changes, file: None }).expect("root's");
    assert_eq!(ids(ask(0, Operation::Stat, "d", "")), (1000, 5));
    assert_eq!(ids(ask(1, Operation::Stat, "d", "")), (0, 65534));
    assert_eq!(ids(ask(1, Operation::MakeDirectory, "d/e", "")), (0, 0));
    assert_eq!(failed(&ask(0, Operation::GetXattr, "d", "system.posix_acl_access")), Errno::ENODATA);
    kernel(&ask(1, Operation::GetXattr, "d", "system.posix_acl_access"));
    kernel(&ask(1, Operation::GetXattr, "d", "security.capability"));
    assert_eq!(failed(&ask(1, Operation::GetXattr, "d", "user.x")), Errno::ENODATA);
}

#[test]
fn callers_at_once_get_threads_up_to_the_bound_and_the_end_comes_to_all() {
    let mut served = served();
    done(&served.by_path(Operation::MakeDirectory, "d", |request| request.mode = 0o755));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..200 {
                    done(&served.by_path(Operation::Stat, "d", |_| {}));
                }
            });
        }
    });
    let groups = served.threads.groups().count();
    assert!((2 * groups..=SERVICE_THREADS_PER_GROUP_MAX * groups).contains(&served.threads.count()));
    served.front.close(&served.threads);
    let late = served.connection.call(&request(Operation::Echo, "", ""), &[], &mut []);
    assert!(matches!(late, Err(CallError::Dead | CallError::NoSession)), "{late:?}");
    assert!(!served.directory.path().join("test-1.sock").exists());
    served.connection = {
        served.front = QueueFront::start(&served.instance, served.directory.path(), &served.threads).expect("again");
        connect(&served.directory)
    };
    done(&served.by_path(Operation::Stat, "d", |_| {}));
}

#[test]
fn threads_that_a_rush_called_for_are_there_for_the_next() {
    const CALLERS: usize = 6;
    let served = served();
    done(&served.by_path(Operation::MakeDirectory, "d", |request| request.mode = 0o755));
    let rush = || {
        let names: Vec<_> = (0..CALLERS).map(|caller| format!("f{caller}")).collect();
        for name in &names {
            done(&served.by_path(Operation::MakeNode, name, |request| request.mode = 0o100_644));
        }
        std::thread::scope(|scope| {
            // Nothing is removed from the directory, so each request keeps a thread.
            let blocking = served.instance.lock_removals(NodeId::ROOT, NodeId::ROOT);
            for name in &names {
                scope.spawn(|| done(&served.by_path(Operation::Unlink, name, |_| {})));
            }
            let start = Instant::now();
            while served.threads.count() <= CALLERS {
                assert!(start.elapsed() < Duration::from_secs(10), "{} threads", served.threads.count());
                std::thread::sleep(Duration::from_millis(2));
            }
            drop(blocking);
        });
        for _ in 0..100 {
            done(&served.by_path(Operation::Stat, "d", |_| {}));
            std::thread::sleep(Duration::from_millis(1));
        }
        served.threads.count()
    };
    let (first, started) = (rush(), served.threads.started());
    assert!(first > CALLERS, "{first} threads are left after the rush");
    for _ in 0..3 {
        assert!(rush() >= first);
    }
    assert!(served.threads.started() < started + CALLERS, "a rush starts its threads again");
}

#[test]
fn requests_of_one_instance_that_block_leave_threads_for_another() {
    const CALLERS: usize = 16;
    let served = served();
    let directory = tempfile::tempdir().expect("directory");
    let other = instance();
    let front = QueueFront::start(&other, directory.path(), &served.threads).expect("front");
    let connection = connect(&directory);
    let names: Vec<_> = (0..CALLERS).map(|caller| format!("f{caller}")).collect();
    for name in &names {
        done(&served.by_path(Operation::MakeNode, name, |request| request.mode = 0o100_644));
    }
    std::thread::scope(|scope| {
        // Nothing is removed from the directory, so each request keeps a thread.
        let blocking = served.instance.lock_removals(NodeId::ROOT, NodeId::ROOT);
        for name in &names {
            scope.spawn(|| done(&served.by_path(Operation::Unlink, name, |_| {})));
        }
        let start = Instant::now();
        while served.threads.count() <= CALLERS / 4 * 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "{} threads", served.threads.count());
            std::thread::sleep(Duration::from_millis(2));
        }
        for _ in 0..100 {
            done(&connection.call(&request(Operation::Echo, "", ""), &[], &mut []).expect("served"));
        }
        drop(blocking);
    });
    front.close(&served.threads);
}

#[test]
fn looks_at_the_clients_of_one_instance_leave_threads_for_another() {
    const CLIENTS: usize = 16;
    let served = served();
    let directory = tempfile::tempdir().expect("directory");
    let other = instance();
    let front = QueueFront::start(&other, directory.path(), &served.threads).expect("front");
    let connection = connect(&directory);
    let clients: Vec<_> = (0..CLIENTS).map(|_| connect(&served.directory)).collect();
    let sessions = served.front.endpoint().sessions();
    std::thread::scope(|scope| {
        let held: Vec<_> =
            sessions.iter().filter_map(|session| session.content().view()).map(View::hold_looks).collect();
        assert_eq!(held.len(), CLIENTS + 1);
        // From then on a request of each has its client looked at first, which keeps a thread.
        std::thread::sleep(LOOK_EVERY + LOOK_EVERY / 5);
        for client in &clients {
            scope.spawn(|| {
                done(&client.call(&request(Operation::Echo, "", ""), &[], &mut []).expect("served in the end"));
            });
        }
        let start = Instant::now();
        while served.threads.count() <= CLIENTS / 4 * 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "{} threads", served.threads.count());
            std::thread::sleep(Duration::from_millis(2));
        }
        for _ in 0..100 {
            done(&connection.call(&request(Operation::Echo, "", ""), &[], &mut []).expect("served"));
        }
        drop(held);
    });
    front.close(&served.threads);
}
