//! The dispatcher over the in-memory layer: what it adds to the layers. Permissions are compared with the kernel's elsewhere.

use super::*;
use crate::access::Credentials;
use crate::handles::OpenFile;
use crate::notify::KernelCache;
use crate::request::{Kind, WriteMode};
use crate::stack::Stack;
use poolfs_libservice::types::{AllocateMode, Name, OpenFlags, RenameFlags, SetAttributes};
use poolfs_libservice::{Durability, Memory};
use poolfs_service_protocol::{MountSpec, OperationPath, StackSpec};
use std::sync::{Arc, Mutex};

#[derive(Clone, Default)]
struct Kernel(Arc<Mutex<Vec<String>>>);

impl Kernel {
    fn told(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("unpoisoned"))
    }
}

impl KernelCache for Kernel {
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
        let stack = StackSpec::Directory { directory: "/".into() };
        let spec = MountSpec { instance: "x".into(), mount_point: "/".into(), stack, devices: true, is_root: true };
        let instance = Instance::new(spec, Stack::of(Memory::new()));
        let kernel = Kernel::default();
        instance.attach_kernel(Arc::new(kernel.clone())).expect("a thread");
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
        let mut buffer = vec![0; 100];
        match self.instance.dispatch(context, Request::Read { file, offset: 0, buffer: &mut buffer })? {
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
    let number = fixture.instance.layer().getattr(&poolfs_libservice::types::Caller::ROOT, file.node()).unwrap().inode;
    fixture.write(&fixture.library(), &file, 0, b"one").expect("written");
    assert!(fixture.kernel.told().is_empty(), "the kernel has read nothing yet");
    assert_eq!(fixture.read(&Fixture::fuse(), &file).expect("read"), b"one");
    fixture.write(&fixture.library(), &file, 0, b"two").expect("written");
    assert_eq!(fixture.kernel.told(), [format!("drop {number} 0 -1")]);
    fixture.write(&fixture.library(), &file, 0, b"six").expect("written");
    assert!(fixture.kernel.told().is_empty(), "it holds nothing any more");

    fixture.read(&Fixture::fuse(), &file).expect("read");
    let truncate = SetAttributes { size: Some(1), ..SetAttributes::default() };
    let change = Request::Change { node: file.node(), changes: truncate, file: Some(&file) };
    fixture.instance.dispatch(&fixture.library(), change).expect("truncated");
    assert_eq!(fixture.kernel.told().len(), 1);

    fixture.write(&Fixture::fuse(), &file, 0, b"by FUSE").expect("written");
    assert!(fixture.kernel.told().is_empty(), "the kernel knows what it did itself");
    let mode = AllocateMode::KEEP_SIZE | AllocateMode::PUNCH_HOLE;
    let punch = Request::Allocate { file: &file, mode, offset: 0, length: 2 };
    fixture.instance.dispatch(&fixture.library(), punch).expect("punched");
    assert_eq!(fixture.kernel.told().len(), 1);
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
