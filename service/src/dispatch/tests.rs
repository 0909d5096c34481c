//! Tests of the dispatcher over the in-memory layer: what it adds to the layers. Permissions are compared with the kernel's
//! elsewhere.

use super::*;
use crate::access::Credentials;
use crate::handles::OpenFile;
use crate::notify::KernelCache;
use crate::request::{Kind, WriteMode};
use crate::stack::Stack;
use poolfs_libservice::types::{AllocateMode, Caller, FileType, Name, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Durability, Libservice, Memory};
use poolfs_service_protocol::{MountSpec, OperationPath, StackSpec};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

mod durability;

#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Vec<String>>>);

impl Kernel {
    fn told(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("unpoisoned"))
    }
}

impl KernelCache for Kernel {
    fn expires_names(&self) -> bool {
        true
    }

    fn drop_attributes(&self, number: u64) -> std::io::Result<bool> {
        self.0.lock().expect("unpoisoned").push(format!("drop attributes {number}"));
        Ok(true)
    }

    fn invalidate(&self, number: u64, offset: i64, length: i64) -> std::io::Result<()> {
        self.0.lock().expect("unpoisoned").push(format!("drop {number} {offset} {length}"));
        Ok(())
    }

    fn store(&self, number: u64, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.0.lock().expect("unpoisoned").push(format!("store {number} {offset} {bytes:?}"));
        Ok(())
    }

    fn invalidate_name(&self, parent: u64, name: &[u8]) -> std::io::Result<()> {
        self.0.lock().expect("unpoisoned").push(format!("drop {parent} {name:?}"));
        Ok(())
    }

    fn expire_name(&self, parent: u64, name: &[u8]) -> std::io::Result<()> {
        self.0.lock().expect("unpoisoned").push(format!("expire {parent} {name:?}"));
        Ok(())
    }

    fn await_unlocked(&self, number: u64) -> std::io::Result<()> {
        self.0.lock().expect("unpoisoned").push(format!("await {number}"));
        Ok(())
    }

    fn prune(&self, numbers: &[u64]) -> std::io::Result<()> {
        self.0.lock().expect("unpoisoned").push(format!("prune {numbers:?}"));
        Ok(())
    }
}

struct Fixture {
    instance: Arc<Instance>,
    kernel: Kernel,
    root: Credentials,
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

impl Fixture {
    fn new() -> Self {
        Self::over(Memory::new())
    }

    fn over(layer: Arc<dyn Libservice>) -> Self {
        let stack = StackSpec::directory("/");
        let spec = MountSpec { devices: true, suid: true, is_root: true, ..MountSpec::new("x", "/", stack) };
        let instance = Instance::new(spec, Stack::of(layer));
        let kernel = Kernel::default();
        instance.attach_kernel(Arc::new(kernel.clone()), &[]);
        Self { instance, kernel, root: Credentials::root() }
    }

    fn library(&self) -> Context<'_> {
        Context::library(&self.root, 0)
    }

    fn fuse() -> Context<'static> {
        Context::fuse(0, 0, 0, 0)
    }

    /// A file the kernel has created and opened.
    fn create(&self, text: &str, flags: OpenFlags) -> Arc<OpenFile> {
        let request = Request::Create { parent: NodeId::ROOT, name: name(text), permissions: 0o644, flags };
        match self.instance.dispatch(&Self::fuse(), request) {
            Ok(Reply::Opened { file, entry: Some(entry) }) => {
                self.instance.nodes.enter(entry.node, entry.attributes.inode);
                file
            }
            other => panic!("{other:?}"),
        }
    }

    fn write(&self, context: &Context<'_>, file: &OpenFile, offset: u64, data: &[u8]) -> Result<Reply, Failure> {
        let mode = WriteMode { append: file.flags().contains(OpenFlags::APPEND), ..WriteMode::default() };
        self.instance.dispatch(context, Request::Write { file, offset, data, mode })
    }

    fn read(&self, context: &Context<'_>, file: &OpenFile) -> Result<Vec<u8>, Failure> {
        let mut buffer = [0; 100];
        match self.instance.dispatch(context, Request::Read { file, offset: 0, target: &mut &mut buffer[..] })? {
            Reply::Count(count) => Ok(buffer[..count].to_vec()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_change_by_the_library_is_told_before_it_is_answered_and_only_when_the_kernel_may_know() {
    let fixture = Fixture::new();
    let file = fixture.create("a", OpenFlags::READ_WRITE);
    assert!(file.set_adopted(true));
    file.vouch_unshared();
    let number = fixture.instance.layer().getattr(&poolfs_libservice::types::Caller::ROOT, file.node()).unwrap().inode;
    fixture.write(&fixture.library(), &file, 0, b"one").expect("written");
    assert!(fixture.kernel.told().is_empty(), "the kernel has read nothing yet");
    assert_eq!(fixture.read(&Fixture::fuse(), &file).expect("read"), b"one");
    fixture.write(&fixture.library(), &file, 0, b"two").expect("written");
    assert_eq!(fixture.kernel.told(), [format!("drop {number} 0 -1")]);
    fixture.write(&fixture.library(), &file, 0, b"six").expect("written");
    assert!(fixture.kernel.told().is_empty(), "it holds nothing any more");

    fixture.read(&Fixture::fuse(), &file).expect("read");
    let truncate = |size| {
        let changes = SetAttributes { size: Some(size), ..SetAttributes::default() };
        let change = Request::Change { node: file.node(), changes, file: Some(&file) };
        fixture.instance.dispatch(&fixture.library(), change)
    };
    assert_eq!(truncate(1).err(), Some(Failure::UseKernel), "nobody else can have it know a smaller size");
    truncate(5).expect("grown");
    assert_eq!(fixture.kernel.told().len(), 1);

    fixture.write(&Fixture::fuse(), &file, 0, b"by FUSE").expect("written");
    assert!(fixture.kernel.told().is_empty(), "the kernel knows what it did itself");
    let mode = AllocateMode::KEEP_SIZE | AllocateMode::PUNCH_HOLE;
    let punch = Request::Allocate { file: &file, mode, offset: 0, length: 2 };
    fixture.instance.dispatch(&fixture.library(), punch).expect("punched");
    assert_eq!(fixture.kernel.told().len(), 1);
}

#[test]
fn growth_is_stored_as_long_as_somebody_may_go_by_the_size() {
    let fixture = Fixture::new();
    let file = fixture.create("a", OpenFlags::READ_WRITE);
    let grow = |offset| {
        fixture.write(&fixture.library(), &file, offset, b"abc").expect("written");
        fixture.kernel.told().iter().any(|told| told.starts_with("store"))
    };
    assert!(file.set_adopted(true));
    assert!(grow(0), "nobody vouches for it");
    file.vouch_unshared();
    assert!(!grow(3));
    assert!(file.share());
    fixture.instance.tell_size(file.node());
    let told = fixture.kernel.told();
    assert!(told[0].starts_with("store") && told[0].ends_with("5 [99]"), "{told:?}");
    fixture.instance.tell_size(file.node());
    assert!(fixture.kernel.told().is_empty(), "it knows");
    assert!(!grow(0), "nothing has grown");
    assert!(grow(6));
}

#[test]
fn growth_is_stored_when_the_kernel_has_applied_what_it_was_answered_before() {
    let fixture = Fixture::new();
    let file = fixture.create("a", OpenFlags::READ_WRITE);
    assert!(file.set_adopted(true));
    let told_of_size = || {
        let is_of_size = |told: &String| told.starts_with("await") || told.starts_with("store");
        let what = |told: String| told.split(' ').next().map(str::to_owned);
        fixture.kernel.told().into_iter().filter(is_of_size).filter_map(what).collect::<Vec<_>>()
    };
    let change = |context: &Context<'_>| {
        let changes = SetAttributes { permissions: Some(0o600), ..SetAttributes::default() };
        let change = Request::Change { node: file.node(), changes, file: None };
        fixture.instance.dispatch(context, change).expect("changed");
    };
    let grow = |offset| fixture.write(&fixture.library(), &file, offset, b"abc").expect("written");
    change(&fixture.library());
    grow(0);
    assert_eq!(told_of_size(), ["store"], "the kernel was answered nothing");
    change(&Fixture::fuse());
    assert_eq!(told_of_size(), [""; 0]);
    grow(3);
    assert_eq!(told_of_size(), ["await", "store"]);
    grow(6);
    assert_eq!(told_of_size(), ["store"], "all is applied");
    change(&Fixture::fuse());
    let opened = Request::Open { node: file.node(), flags: OpenFlags::READ_ONLY };
    drop(fixture.instance.dispatch(&Fixture::fuse(), opened).expect("opened"));
    assert_eq!(told_of_size(), ["await", "store"], "it goes by the size without asking");
}

#[test]
fn what_was_appended_behind_another_end_than_the_kernel_knew_is_dropped_there() {
    let fixture = Fixture::new();
    let file = fixture.create("a", OpenFlags::READ_WRITE);
    assert!(file.set_adopted(true));
    file.vouch_unshared();
    fixture.write(&fixture.library(), &file, 0, b"abc").expect("written");
    let appends = WriteMode { append: true, ..WriteMode::default() };
    let write = |offset| {
        let request = Request::Write { file: &file, offset, data: b"d", mode: appends };
        fixture.instance.dispatch(&Fixture::fuse(), request).expect("written");
    };
    write(3);
    write(1);
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(30);
    let mut told = Vec::new();
    while told.len() < 3 {
        assert!(std::time::Instant::now() < give_up, "{told:?}");
        told.extend(fixture.kernel.told());
    }
    assert!(told[0].starts_with("drop") && told[1].starts_with("store") && told[1].ends_with("4 [100]"), "{told:?}");
}

#[test]
fn growth_under_a_kernel_that_appends_is_stored() {
    let fixture = Fixture::new();
    let file = fixture.create("a", OpenFlags::READ_WRITE | OpenFlags::APPEND);
    assert!(file.set_adopted(true));
    fixture.write(&fixture.library(), &file, 0, b"abc").expect("written");
    let told = fixture.kernel.told();
    assert!(told[0].starts_with("store") && told[0].ends_with("2 [99]"), "{told:?}");
    assert!(told[1].starts_with("drop"), "{told:?}");
    fixture.write(&Fixture::fuse(), &file, 0, b"de").expect("written");
    assert_eq!(fixture.read(&Fixture::fuse(), &file).expect("read"), b"abcde", "an append goes to our end");
}

#[test]
fn content_the_kernel_may_have_changed_is_left_to_it() {
    let fixture = Fixture::new();
    let file = fixture.create("a", OpenFlags::READ_WRITE);
    let library = fixture.library();
    assert_eq!(fixture.write(&library, &file, 0, b"x").err(), Some(Failure::UseKernel));
    assert_eq!(fixture.read(&library, &file).err(), Some(Failure::UseKernel));
    assert!(file.set_adopted(true));
    fixture.write(&library, &file, 0, b"xy").expect("written");
    let mapped = WriteMode { from_mapping: true, append: true, ..WriteMode::default() };
    let request = Request::Write { file: &file, offset: 0, data: b"z", mode: mapped };
    fixture.instance.dispatch(&Fixture::fuse(), request).expect("written back at its offset");
    assert_eq!(fixture.read(&library, &file).err(), Some(Failure::UseKernel));
    assert_eq!(fixture.read(&Fixture::fuse(), &file).expect("read"), b"zy");
    fixture.instance.release(file.key());
    assert!(fixture.instance.handles().is_empty());
}

#[test]
fn directories_are_not_renamed_behind_the_kernels_back() {
    let fixture = Fixture::new();
    for text in ["d", "e"] {
        let request = Request::MakeDirectory { parent: NodeId::ROOT, name: name(text), permissions: 0o755 };
        fixture.instance.dispatch(&fixture.library(), request).expect("made");
    }
    fixture.create("f", OpenFlags::READ_WRITE);
    let rename = |from, to, flags| {
        let (parent, new_parent) = (NodeId::ROOT, NodeId::ROOT);
        let request = Request::Rename { parent, name: name(from), new_parent, new_name: name(to), flags };
        fixture.instance.dispatch(&fixture.library(), request).map(|_| ())
    };
    assert_eq!(rename("d", "x", RenameFlags::empty()), Err(Failure::UseKernel));
    assert_eq!(rename("f", "d", RenameFlags::EXCHANGE), Err(Failure::UseKernel));
    assert_eq!(rename("missing", "x", RenameFlags::empty()), Err(Errno::ENOENT.into()));
    assert_eq!(rename("f", "g", RenameFlags::empty()), Ok(()));
}

#[test]
fn reading_and_writing_ask_for_the_right_handle() {
    let fixture = Fixture::new();
    let read_only = fixture.create("a", OpenFlags::READ_ONLY);
    let write_only = fixture.create("b", OpenFlags::WRITE_ONLY);
    for context in [Fixture::fuse(), fixture.library()] {
        assert_eq!(fixture.write(&context, &read_only, 0, b"x").err(), Some(Errno::EBADF.into()));
        let far = u64::MAX - 1;
        write_only.set_adopted(true);
        assert_eq!(fixture.write(&context, &write_only, far, b"xyz").err(), Some(Errno::EFBIG.into()));
        assert_eq!(fixture.read(&context, &write_only).err(), Some(Errno::EBADF.into()));
        let empty = Request::Allocate { file: &write_only, mode: AllocateMode::empty(), offset: 0, length: 0 };
        assert_eq!(fixture.instance.dispatch(&context, empty).err(), Some(Errno::EINVAL.into()));
    }
    let sync = Request::Sync { file: &write_only, durability: Durability::All };
    fixture.instance.dispatch(&Fixture::fuse(), sync).expect("synced");
}

#[test]
fn everything_is_counted_and_nothing_is_served_after_the_end() {
    let fixture = Fixture::new();
    let stat = || fixture.instance.dispatch(&fixture.library(), Request::Stat { node: NodeId::ROOT });
    stat().expect("the root");
    let missing = fixture.instance.dispatch(&fixture.library(), Request::Stat { node: NodeId(999) });
    assert_eq!(missing.err(), Some(Errno::ESTALE.into()));
    let status = fixture.instance.status();
    let counted = &status.operations[&OperationPath::Library]["stat"];
    assert_eq!((counted.count, counted.errors), (2, 1));
    assert_eq!(fixture.instance.statistics().count(OperationPath::Fuse, Kind::Stat), 0);
    fixture.instance.refuse();
    assert_eq!(stat().err(), Some(Errno::ENOTCONN.into()));
}

const ROUNDS: u32 = 30_000;
const TIME_MAX: Duration = Duration::from_secs(3);

/// Two requests at once, again and again, after `reset`, for a while; the first round after which `wrong` says so.
fn race(rounds: u32, reset: impl Fn(), both: [&(dyn Fn() + Sync); 2], wrong: impl Fn() -> bool) -> Option<u32> {
    let (turn, ended) = (AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        for call in both {
            let (turn, ended) = (&turn, &ended);
            scope.spawn(move || {
                for round in 1..=rounds {
                    let mut spins = 0;
                    while turn.load(Ordering::Acquire) < round {
                        spins += 1;
                        if spins < 20_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
                    }
                    if turn.load(Ordering::Acquire) > rounds {
                        return;
                    }
                    call();
                    ended.fetch_add(1, Ordering::AcqRel);
                }
            });
        }
        let start = Instant::now();
        let failed = (1..=rounds).take_while(|_| start.elapsed() < TIME_MAX).find(|&round| {
            reset();
            turn.store(round, Ordering::Release);
            while ended.load(Ordering::Acquire) != 2 * round {
                std::thread::yield_now();
            }
            wrong()
        });
        turn.store(rounds + 1, Ordering::Release);
        failed
    })
}

fn user() -> Credentials {
    Credentials { uid: 1000, gid: 1000, groups: vec![], capabilities: 0, user_namespace: None }
}

impl Fixture {
    fn change(&self, context: &Context<'_>, node: NodeId, changes: SetAttributes) -> Result<Reply, Failure> {
        self.instance.dispatch(context, Request::Change { node, changes, file: None })
    }

    fn now(&self, node: NodeId) -> Attributes {
        self.instance.layer().getattr(&Caller::ROOT, node).expect("there")
    }
}

#[test]
fn a_mode_that_was_the_owners_to_give_is_not_set_on_another_owners_file() {
    let fixture = Fixture::new();
    let node = fixture.create("f", OpenFlags::READ_ONLY).node();
    let (user, own) = (user(), SetAttributes::default());
    let library = Context::library(&user, 0);
    let attributes = |uid, permissions| SetAttributes { uid, permissions, ..own };
    let give_away = || {
        fixture.change(&Fixture::fuse(), node, attributes(Some(0), None)).expect("root's");
    };
    let set_user_id = || {
        let _ = fixture.change(&library, node, attributes(None, Some(0o4755)));
    };
    let reset = || {
        fixture.change(&Fixture::fuse(), node, attributes(Some(1000), Some(0o755))).expect("root's");
    };
    let wrong = race(ROUNDS, reset, [&give_away, &set_user_id], || {
        let now = fixture.now(node);
        now.uid != 0 || now.permissions & 0o4000 != 0
    });
    assert_eq!(wrong, None, "a program of root's that it never made");
}

#[test]
fn nobody_looks_for_privileges_of_what_was_just_made_unless_it_was_given_some() {
    let fixture = Fixture::new();
    let knows = |node| fixture.instance.nodes.privileges(node).none;
    let made = fixture.create("f", OpenFlags::READ_WRITE).node();
    assert!(knows(made));
    let changes = SetAttributes { permissions: Some(0o4755), ..SetAttributes::default() };
    fixture.change(&Fixture::fuse(), made, changes).expect("root's");
    assert!(!knows(made));
    let request =
        Request::Create { parent: NodeId::ROOT, name: name("g"), permissions: 0o4755, flags: OpenFlags::READ_WRITE };
    let Ok(Reply::Opened { file, .. }) = fixture.instance.dispatch(&Fixture::fuse(), request) else { panic!("made") };
    assert!(!knows(file.node()));
}

#[test]
fn a_set_user_id_bit_that_comes_while_somebody_writes_is_taken_away_by_the_next_write() {
    let fixture = Fixture::new();
    let file = fixture.create("f", OpenFlags::READ_WRITE);
    assert!(file.set_adopted(true));
    let user = user();
    let library = Context::library(&user, 0);
    let mode = |permissions| {
        let changes = SetAttributes { permissions: Some(permissions), ..SetAttributes::default() };
        fixture.change(&Fixture::fuse(), file.node(), changes).expect("root's");
    };
    let write = || {
        fixture.write(&library, &file, 0, b"x").expect("room");
    };
    let wrong = race(
        ROUNDS,
        || mode(0o666),
        [&write, &|| mode(0o4777)],
        || {
            write();
            fixture.now(file.node()).permissions & 0o4000 != 0
        },
    );
    assert_eq!(wrong, None);
}

#[test]
fn a_mode_is_not_undone_by_a_write_that_takes_set_id_bits_away() {
    let fixture = Fixture::new();
    let file = fixture.create("f", OpenFlags::READ_WRITE);
    assert!(file.set_adopted(true));
    let user = user();
    let library = Context::library(&user, 0);
    let mode = |permissions| {
        let changes = SetAttributes { permissions: Some(permissions), ..SetAttributes::default() };
        fixture.change(&Fixture::fuse(), file.node(), changes).expect("root's");
    };
    let write = || {
        fixture.write(&library, &file, 0, b"x").expect("room");
    };
    let wrong =
        race(ROUNDS, || mode(0o4777), [&write, &|| mode(0o600)], || fixture.now(file.node()).permissions != 0o600);
    assert_eq!(wrong, None, "the old mode came back");
}

#[test]
fn in_sticky_directories_and_of_devices_the_kernel_decides() {
    let fixture = Fixture::new();
    let (root, kernel) = (NodeId::ROOT, Err(Failure::UseKernel));
    fixture.create("f", OpenFlags::READ_ONLY);
    let failure = |request: Request<'_>| fixture.instance.dispatch(&fixture.library(), request).map(|_| ());
    let unlink = |text: &'static str| Request::Unlink { parent: root, name: name(text) };
    let make =
        |file_type| Request::MakeNode { parent: root, name: name("n"), file_type, permissions: 0o600, device: 0x103 };
    assert_eq!(failure(make(FileType::CharDevice)), kernel);
    assert_eq!(failure(make(FileType::BlockDevice)), kernel);
    let changes = SetAttributes { permissions: Some(0o1777), ..SetAttributes::default() };
    fixture.change(&Fixture::fuse(), root, changes).expect("root's");
    assert_eq!(failure(unlink("f")), kernel);
    assert_eq!(failure(unlink("absent")), Err(Errno::ENOENT.into()));
    assert_eq!(failure(make(FileType::Regular)), kernel);
    assert_eq!(failure(Request::MakeDirectory { parent: root, name: name("n"), permissions: 0o700 }), kernel);
    assert_eq!(failure(Request::SymbolicLink { parent: root, name: name("n"), target: b"f" }), kernel);
    let rename = |new: &'static str| Request::Rename {
        parent: root,
        name: name("f"),
        new_parent: root,
        new_name: name(new),
        flags: RenameFlags::empty(),
    };
    assert_eq!(failure(rename("g")), kernel);
    assert!(fixture.instance.dispatch(&Fixture::fuse(), rename("g")).is_ok(), "the kernel has decided");
}
