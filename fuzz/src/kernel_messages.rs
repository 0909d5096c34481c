//! Fuzz target: the FUSE front, with messages of a kernel that may send anything, and callers that are killed meanwhile.
//!
//! An input is a list of steps: one byte of choice, a length, a message. Random bytes would seldom be a message, so the choice byte may
//! bring its head, its node and its open file into range; the rest stays as the sender made it.

use crate::take;
use poolfs_libservice::{Libservice, Memory};
use poolfs_service::Instance;
use poolfs_service::fuse::{Answer, Front, Given, Message};
use poolfs_service::stack::Stack;
use poolfs_service_protocol::{MountSpec, StackSpec};
use std::sync::Arc;

/// Steps of one input; more are ignored.
const STEPS_MAX: usize = 64;

/// Content of all files together.
const CAPACITY: u64 = 1 << 22;

/// Bytes of a message's head, and where in it stand length, opcode, node and extensions.
const HEAD: usize = 40;
const LENGTH: usize = 0;
const OPCODE: usize = 4;
const NODE: usize = 16;
const EXTENSIONS: usize = 36;

/// Higher than every opcode.
const OPCODES: u32 = 54;

/// Room for an answer: as much as the session has behind a message without data.
const ROOM: usize = 1 << 20;

struct World {
    front: Front,
    nodes: Vec<u64>,
    files: Vec<u64>,
    room: Vec<u8>,
    given: Vec<Given>,
}

impl World {
    fn step(&mut self, choice: u8, mut message: Vec<u8>) {
        if choice & 1 == 1 {
            message.resize(message.len().max(HEAD), 0);
            self.mend(&mut message);
        }
        match Message::parse(&message) {
            Ok(Message::Call(call)) => {
                let mut answer = Answer::new(&mut self.room, &mut self.given);
                let served = self.front.serve(call, &mut answer);
                if served.is_ok() {
                    check(word(&message, OPCODE), answer.body().len());
                }
                let is_taken = served.is_ok() && choice & 2 == 0;
                for given in self.given.drain(..) {
                    match given {
                        _ if !is_taken => self.front.take_back(given),
                        Given::Reference(number) => self.nodes.push(number),
                        Given::File(handle) => self.files.push(handle),
                        Given::Name { .. } => {}
                    }
                }
            }
            Ok(Message::Forget(forgets)) => self.front.forget(forgets),
            Ok(Message::Interrupt | Message::Nothing) | Err(_) => {}
        }
    }

    fn mend(&self, message: &mut [u8]) {
        let length = message.len() as u32;
        put(message, LENGTH, &length.to_ne_bytes());
        let opcode = word(message, OPCODE) % OPCODES;
        put(message, OPCODE, &opcode.to_ne_bytes());
        put(message, EXTENSIONS, &[0, 0]);
        let mut pick = |at: usize, from: &[u64]| {
            if let Some(old) = message.get(at..at + 8) {
                let old = u64::from_ne_bytes(old.try_into().expect("eight bytes"));
                let new = from.get(old as usize % (from.len() + 1)).copied().unwrap_or(old);
                put(message, at, &new.to_ne_bytes());
            }
        };
        pick(NODE, &self.nodes);
        match opcode {
            // RENAME, LINK, RENAME2: a second node.
            12 | 13 | 45 => pick(HEAD, &self.nodes),
            // SETATTR.
            4 => pick(HEAD + 8, &self.files),
            // COPY_FILE_RANGE in both forms.
            47 | 53 => [HEAD, HEAD + 24].into_iter().for_each(|at| pick(at, &self.files)),
            // READ, WRITE, RELEASE, FSYNC, FLUSH, READDIR, RELEASEDIR, FSYNCDIR, IOCTL, FALLOCATE, READDIRPLUS, LSEEK.
            15 | 16 | 18 | 20 | 25 | 28 | 29 | 30 | 39 | 43 | 44 | 46 => pick(HEAD, &self.files),
            _ => {}
        }
    }
}

fn word(message: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(message[at..at + 4].try_into().expect("four bytes"))
}

fn put(message: &mut [u8], at: usize, bytes: &[u8]) {
    message[at..at + bytes.len()].copy_from_slice(bytes);
}

/// The kernel takes an answer of a wrong length for a broken one.
fn check(opcode: u32, length: usize) {
    let right = match opcode {
        // LOOKUP, SYMLINK, MKNOD, MKDIR, LINK: an entry.
        1 | 6 | 8 | 9 | 13 => length == 128,
        // GETATTR, SETATTR.
        3 | 4 => length == 104,
        // READLINK: no more than a page.
        5 => length < 4096,
        // OPEN, OPENDIR.
        14 | 27 => length == 16,
        // CREATE, TMPFILE: an entry and an open file.
        35 | 51 => length == 144,
        // WRITE, COPY_FILE_RANGE, LSEEK.
        16 | 46 | 47 | 53 => length == 8,
        // STATFS, IOCTL of 64 bytes, STATX.
        17 | 39 => length == 80,
        52 => length == 288,
        // READ, GETXATTR, LISTXATTR, READDIR, READDIRPLUS: what there is room for.
        15 | 22 | 23 | 28 | 44 => length <= ROOM,
        _ => length == 0,
    };
    assert!(right, "{length} bytes in answer to {opcode}");
}

/// Feeds `bytes` to the front as if the kernel had sent them.
///
/// # Panics
/// When an answer is malformed, or references or handles are left over.
pub fn kernel_messages(mut bytes: &[u8]) {
    let memory = Memory::with_capacity(CAPACITY);
    let spec = MountSpec {
        devices: true,
        suid: true,
        is_root: true,
        ..MountSpec::new("fuzz", "/", StackSpec::directory("/"))
    };
    let instance = Instance::new(spec, Stack::of(Arc::clone(&memory) as Arc<dyn Libservice>));
    let front = Front::new(Arc::clone(&instance));
    let mut world = World { front, nodes: vec![1], files: Vec::new(), room: vec![0; ROOM], given: Vec::new() };
    for _ in 0..STEPS_MAX {
        if bytes.is_empty() {
            break;
        }
        let [choice] = take(&mut bytes);
        let length = usize::from(u16::from_le_bytes(take(&mut bytes))) % 1024;
        let (message, rest) = bytes.split_at(length.min(bytes.len()));
        bytes = rest;
        world.step(choice, message.to_vec());
    }
    // What the kernel was given it gives back; what nobody gave is not owed.
    let references = world.nodes.into_iter().map(Given::Reference);
    let files = world.files.into_iter().map(Given::File);
    references.chain(files).for_each(|given| world.front.take_back(given));
    assert_eq!((instance.nodes().len(), instance.handles().len()), (0, 0), "the kernel is thought to have more");
    assert_eq!(memory.outstanding(), (0, 0), "references or handles are left over");
}
