//! Fuzz target: the session edge, with greetings, doorbells and requests of a client that may send anything.
//!
//! An input is a list of steps: one byte of choice, a request as it lies in shared memory, a length, the data area's first bytes. Random
//! bytes would seldom pass the check of a request's form, so the choice byte may bring the operation and the lengths into range; the rest
//! stays as the client made it.

use crate::take;
use poolfs_ipc::area::DATA_BYTES;
use poolfs_ipc::queue::Doorbell;
use poolfs_ipc::service::DataError;
use poolfs_ipc::wire::{Hello, Operation, Reply, Request, Status, Welcome};
use poolfs_libservice::types::{Name, NodeId, OpenFlags};
use poolfs_libservice::{Libservice, Memory, read_with_zeros};
use poolfs_service::access::Credentials;
use poolfs_service::queue_front::{DataArea, SessionState, serve};
use poolfs_service::stack::Stack;
use poolfs_service::{Context, Instance, Reply as Outcome, Request as Asked};
use poolfs_service_protocol::{MountSpec, StackSpec};
use std::cell::RefCell;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::FromBytes;

/// Steps of one input; more are ignored.
const STEPS_MAX: usize = 64;

/// Content of all files together.
const CAPACITY: u64 = 1 << 22;

/// A data area of this process's own.
struct Area(RefCell<Vec<u8>>);

impl DataArea for Area {
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

struct World {
    memory: Arc<Memory>,
    instance: Arc<Instance>,
    sessions: [SessionState; 2],
    handles: Vec<u64>,
    area: Area,
    scratch: Vec<u8>,
}

impl World {
    fn new() -> Self {
        let memory = Memory::with_capacity(CAPACITY);
        let spec = MountSpec {
            devices: true,
            suid: true,
            is_root: true,
            ..MountSpec::new("fuzz", "/", StackSpec::directory("/"))
        };
        let instance = Instance::new(spec, Stack::of(Arc::clone(&memory) as Arc<dyn Libservice>));
        let user = Credentials { uid: 1000, gid: 1000, groups: vec![5], capabilities: 0, user_namespace: None };
        let sessions = [SessionState::of(Credentials::root()), SessionState::of(user)];
        let area = Area(RefCell::new(vec![0; DATA_BYTES]));
        let mut world = Self { memory, instance, sessions, handles: Vec::new(), area, scratch: vec![0; DATA_BYTES] };
        world.open(b"a", OpenFlags::READ_WRITE);
        world.open(b"b", OpenFlags::WRITE_ONLY | OpenFlags::APPEND);
        world
    }

    /// Opens a new file as the kernel would, and adopts it for both sessions.
    fn open(&mut self, name: &[u8], flags: OpenFlags) {
        let name = Name::new(name).expect("a name");
        let create = Asked::Create { parent: NodeId::ROOT, name, permissions: 0o666, flags };
        let Ok(Outcome::Opened { file, entry }) = self.instance.dispatch(&Context::fuse(0, 0, 0, 0), create) else {
            panic!("an empty filesystem takes a file");
        };
        assert!(file.set_adopted(true));
        for session in &self.sessions {
            self.handles.extend(session.adopt(&file));
        }
        self.memory.forget(entry.expect("created").node, 1);
    }

    fn step(&mut self, choice: u8, mut request: Request, data: &[u8]) {
        if choice & 1 == 1 {
            request.operation = request.operation % (Operation::ALL.len() as u32 + 1) + 1;
            request.flags &= 7;
            request.path_length %= 64;
            request.second_length %= 32;
            request.third_length %= 128;
            request.length %= 1 << 18;
            for position in [&mut request.offset, &mut request.second_offset] {
                *position %= 1 << 21;
            }
            for handle in [&mut request.handle, &mut request.directory, &mut request.second_handle] {
                let index = *handle as usize % (self.handles.len() + 2);
                *handle = self.handles.get(index).copied().unwrap_or(0);
            }
            request.second_directory = 0;
        }
        let session = &self.sessions[usize::from(choice >> 1 & 1)];
        self.area.put(0, data).expect("shorter than the area");
        let reply = serve(&self.instance, session, &request, &self.area, &mut self.scratch);
        check(&request, &reply);
    }
}

fn check(request: &Request, reply: &Reply) {
    let status = Status::from_number(reply.status).expect("a status");
    assert_eq!(status == Status::Failed, (1..=4095).contains(&reply.errno), "{request:?} {reply:?}");
    assert!(reply.length <= DATA_BYTES as u64, "{request:?} {reply:?}");
    if matches!(status, Status::Redirect | Status::RedirectSecond) {
        assert!((1..=4095).contains(&reply.length), "{request:?} {reply:?}");
    }
}

/// Feeds `bytes` to everything that reads what a client sent.
///
/// # Panics
/// When a reply is malformed, or references or handles are left over.
pub fn session_edge(mut bytes: &[u8]) {
    if let Ok((hello, _)) = Hello::read_from_prefix(bytes) {
        let _ = hello.is_valid();
    }
    if let Ok((welcome, _)) = Welcome::read_from_prefix(bytes) {
        let _ = welcome.is_valid();
    }
    let word = u64::from_le_bytes(take::<8>(&mut { bytes }));
    if let Some(doorbell) = Doorbell::decode(word) {
        assert_eq!(doorbell.encode(), word);
    }
    let mut world = World::new();
    let before = world.memory.outstanding();
    for _ in 0..STEPS_MAX {
        if bytes.is_empty() {
            break;
        }
        let [choice] = take(&mut bytes);
        let request = Request::read_from_bytes(&take::<{ size_of::<Request>() }>(&mut bytes)).expect("its size");
        let length = usize::from(u16::from_le_bytes(take(&mut bytes))) % 512;
        let (data, rest) = bytes.split_at(length.min(bytes.len()));
        bytes = rest;
        world.step(choice, request, data);
    }
    assert_eq!(world.memory.outstanding(), before, "references or handles are left over");
}
