//! Parser tests: messages as the kernel makes them, truncated ones, and ones that no kernel makes.

use super::fields::SHORT;
use super::*;
use poolfs_libservice::types::{SetTime, Timestamp};
use zerocopy::{Immutable, IntoBytes};

const UNIQUE: u64 = 1 << 63 | 42;

fn message(opcode: u32, parts: &[&[u8]]) -> Vec<u8> {
    extended(opcode, parts, 0)
}

fn extended(opcode: u32, parts: &[&[u8]], extensions: u16) -> Vec<u8> {
    let body = parts.concat();
    let length = (size_of::<abi::InHeader>() + body.len()) as u32;
    let (node, uid, gid, thread) = (7, 1000, 100, 4711);
    let header = abi::InHeader { length, opcode, unique: UNIQUE, node, uid, gid, thread, extensions, padding: 0 };
    [header.as_bytes(), &body].concat()
}

fn with<'a>(head: &'a (impl IntoBytes + Immutable), rest: &'a [u8]) -> [&'a [u8]; 2] {
    [head.as_bytes(), rest]
}

fn call(bytes: &[u8]) -> Call<'_> {
    match Message::parse(bytes) {
        Ok(Message::Call(call)) => call,
        other => panic!("{other:?}"),
    }
}

fn error(bytes: &[u8]) -> Option<Errno> {
    call(bytes).operation.err()
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

/// One well-formed message of each kind that has a body.
fn examples() -> Vec<Vec<u8>> {
    let forget = abi::BatchForgetIn { count: 2, padding: 0 };
    let ones = [abi::ForgetOne { node: 7, count: 3 }, abi::ForgetOne { node: 8, count: 1 }];
    vec![
        message(opcode::LOOKUP, &[b"name\0"]),
        message(opcode::FORGET, &[abi::ForgetIn { count: 3 }.as_bytes()]),
        message(opcode::BATCH_FORGET, &with(&forget, ones.as_bytes())),
        message(opcode::SETATTR, &[abi::SetAttributesIn { valid: u32::MAX, ..Default::default() }.as_bytes()]),
        message(opcode::SYMLINK, &[b"name\0", b"../target\0"]),
        message(opcode::MKNOD, &with(&abi::MakeNodeIn { mode: 0o010_644, ..Default::default() }, b"fifo\0")),
        message(opcode::MKDIR, &with(&abi::MakeDirectoryIn { mode: 0o40755, umask: 0o22 }, b"d\0")),
        message(opcode::UNLINK, &[b"name\0"]),
        message(opcode::RMDIR, &[b"name\0"]),
        message(opcode::RENAME, &with(&abi::RenameIn { new_parent: 9 }, b"old\0new\0")),
        message(opcode::RENAME2, &with(&abi::Rename2In { new_parent: 9, flags: 2, padding: 0 }, b"old\0new\0")),
        message(opcode::LINK, &with(&abi::LinkIn { node: 9 }, b"name\0")),
        message(opcode::CREATE, &with(&abi::CreateIn { flags: 2, ..Default::default() }, b"name\0")),
        message(opcode::OPEN, &[abi::OpenIn { flags: 0o2001, open_flags: 0 }.as_bytes()]),
        message(opcode::READ, &[abi::ReadIn { size: 4096, ..Default::default() }.as_bytes()]),
        message(opcode::READDIR, &[abi::ReadIn { size: 4096, ..Default::default() }.as_bytes()]),
        message(opcode::READDIRPLUS, &[abi::ReadIn { size: 4096, ..Default::default() }.as_bytes()]),
        message(opcode::WRITE, &with(&abi::WriteIn { size: 5, write_flags: 5, ..Default::default() }, b"hello")),
        message(opcode::RELEASE, &[abi::ReleaseIn::default().as_bytes()]),
        message(opcode::RELEASEDIR, &[abi::ReleaseIn::default().as_bytes()]),
        message(opcode::FLUSH, &[abi::FlushIn::default().as_bytes()]),
        message(opcode::FSYNC, &[abi::SyncIn { handle: 3, flags: 1, padding: 0 }.as_bytes()]),
        message(opcode::FSYNCDIR, &[abi::SyncIn::default().as_bytes()]),
        message(opcode::SETXATTR, &with(&abi::SetXattrIn { size: 1, flags: 1 }, b"user.x\0v")),
        message(opcode::GETXATTR, &with(&abi::GetXattrIn { size: 9, padding: 0 }, b"user.x\0")),
        message(opcode::LISTXATTR, &[abi::GetXattrIn { size: 9, padding: 0 }.as_bytes()]),
        message(opcode::REMOVEXATTR, &[b"user.x\0"]),
        message(opcode::IOCTL, &with(&abi::IoctlIn { in_size: 4, out_size: 4, ..Default::default() }, b"abcd")),
        message(opcode::FALLOCATE, &[abi::AllocateIn { mode: 3, ..Default::default() }.as_bytes()]),
        message(opcode::LSEEK, &[abi::SeekIn { whence: 4, ..Default::default() }.as_bytes()]),
        message(opcode::COPY_FILE_RANGE, &[abi::CopyRangeIn::default().as_bytes()]),
        message(opcode::COPY_FILE_RANGE_64, &[abi::CopyRangeIn::default().as_bytes()]),
    ]
}

#[test]
fn every_well_formed_message_is_understood() {
    for example in examples() {
        match Message::parse(&example) {
            Ok(Message::Call(call)) => {
                call.operation.unwrap_or_else(|errno| panic!("{example:?}: {errno:?}"));
            }
            Ok(Message::Forget(forgets)) => assert!(forgets.count() >= 1),
            other => panic!("{other:?}"),
        }
    }
    for number in [opcode::GETATTR, opcode::STATX, opcode::READLINK, opcode::STATFS, opcode::OPENDIR, opcode::DESTROY] {
        assert!(call(&message(number, &[])).operation.is_ok());
    }
    assert!(matches!(Message::parse(&message(opcode::INTERRUPT, &[&[0; 8]])), Ok(Message::Interrupt)));
    assert!(matches!(Message::parse(&message(opcode::NOTIFY_REPLY, &[&[0; 40]])), Ok(Message::Nothing)));
}

#[test]
fn a_message_cut_anywhere_is_refused() {
    for example in examples() {
        for length in 0..example.len() {
            let mut short = example[..length].to_vec();
            assert_eq!(Message::parse(&short).err(), Some(Malformed), "it says that it is longer");
            if let Some(own) = short.first_chunk_mut::<4>() {
                *own = (length as u32).to_ne_bytes();
            }
            match Message::parse(&short) {
                Ok(Message::Call(call)) => assert_eq!(call.operation.err(), Some(SHORT), "{length} of {example:?}"),
                Ok(other) => panic!("{other:?}"),
                Err(Malformed) => {}
            }
        }
    }
}

#[test]
fn the_caller_and_the_number_come_along() {
    let bytes = message(opcode::MKDIR, &with(&abi::MakeDirectoryIn { mode: 0o41777, umask: 0o27 }, b"d\0"));
    let call = call(&bytes);
    assert_eq!((call.unique, call.node, call.thread), (UNIQUE, 7, 4711), "also of one that is sent again");
    let context = call.context();
    assert_eq!((context.caller.uid, context.caller.gid, context.caller.umask, context.thread), (1000, 100, 0o27, 4711));
    let Ok(Operation::Node(NodeOperation::MakeDirectory { name: asked, permissions })) = call.operation else {
        panic!("{call:?}");
    };
    assert_eq!((asked, permissions), (name("d"), 0o1777));
}

#[test]
fn what_is_no_name_is_the_callers_error() {
    for (text, errno) in [("\0", Errno::ENOENT), (".\0", Errno::EINVAL), ("a/b\0", Errno::EINVAL), ("abc", SHORT)] {
        assert_eq!(error(&message(opcode::LOOKUP, &[text.as_bytes()])), Some(errno), "{text:?}");
    }
    let long = [&[b'x'; 256][..], b"\0"].concat();
    assert_eq!(error(&message(opcode::UNLINK, &[&long])), Some(Errno::ENAMETOOLONG));
}

#[test]
fn what_is_not_served_says_so() {
    const POLL: u32 = 40;
    const SETLKW: u32 = 33;
    for number in [POLL, SETLKW, 0, u32::MAX] {
        assert_eq!(error(&message(number, &[&[0; 64]])), Some(Errno::ENOSYS));
    }
    let flags = abi::Rename2In { new_parent: 9, flags: 8, padding: 0 };
    assert_eq!(error(&message(opcode::RENAME2, &with(&flags, b"a\0b\0"))), Some(Errno::EINVAL));
    let mode = abi::AllocateIn { mode: 0x40, ..Default::default() };
    assert_eq!(error(&message(opcode::FALLOCATE, &[mode.as_bytes()])), Some(Errno::EOPNOTSUPP));
    let behind = abi::SeekIn { offset: 1 << 63, whence: 3, ..Default::default() };
    assert_eq!(error(&message(opcode::LSEEK, &[behind.as_bytes()])), Some(Errno::ENXIO));
    let whence = abi::SeekIn { whence: 0, ..Default::default() };
    assert_eq!(error(&message(opcode::LSEEK, &[whence.as_bytes()])), Some(Errno::EINVAL));
}

#[test]
fn a_file_without_a_name_needs_none() {
    const TMPFILE: u32 = 0o20_200_000;
    let head = abi::CreateIn { flags: TMPFILE | 0o2, mode: 0o100_640, umask: 0o22, open_flags: 0 };
    let bytes = message(opcode::TMPFILE, &with(&head, b"/\0"));
    let Ok(Operation::Node(NodeOperation::CreateNameless { permissions, flags })) = call(&bytes).operation else {
        panic!("{:?}", call(&bytes));
    };
    assert_eq!((permissions, flags), (0o640, OpenFlags::READ_WRITE));
    assert_eq!(call(&bytes).context().caller.umask, 0o22);
    assert_eq!(error(&message(opcode::TMPFILE, &[&[0; 12]])), Some(SHORT));
}

#[test]
fn times_are_the_kernels_own_numbers() {
    use abi::set_attributes as bit;
    let change = |head: abi::SetAttributesIn| match call(&message(opcode::SETATTR, &[head.as_bytes()])).operation? {
        Operation::Change { changes, handle } => Ok((changes, handle)),
        other => panic!("{other:?}"),
    };
    let head = abi::SetAttributesIn {
        valid: bit::ACCESSED | bit::MODIFIED | bit::MODIFIED_NOW | bit::HANDLE,
        handle: 5,
        accessed: i64::MIN,
        accessed_nanoseconds: 999_999_999,
        modified_nanoseconds: u32::MAX,
        ..Default::default()
    };
    let at = SetTime::At(Timestamp { seconds: i64::MIN, nanoseconds: 999_999_999 });
    let changes = SetAttributes { accessed: Some(at), modified: Some(SetTime::Now), ..SetAttributes::default() };
    assert_eq!(change(head), Ok((changes, Some(5))));
    let too_many = abi::SetAttributesIn { accessed_nanoseconds: 1_000_000_000, ..head };
    assert_eq!(change(too_many), Err(Errno::EINVAL));
    let nothing = abi::SetAttributesIn { valid: 0, ..too_many };
    assert_eq!(change(nothing), Ok((SetAttributes::default(), None)));
}

#[test]
fn extensions_are_left_aside() {
    let extension = [0xff; 16];
    let bytes = extended(opcode::SETXATTR, &[&[8, 0, 0, 0, 0, 0, 0, 0], b"user.x\0", b"value", &extension], 2);
    assert_eq!(error(&bytes), Some(SHORT), "the value does not reach into them");
    let bytes = extended(opcode::LOOKUP, &[b"name\0", &extension], 2);
    assert!(
        matches!(call(&bytes).operation, Ok(Operation::Node(NodeOperation::Lookup { name: found })) if found == name("name"))
    );
    assert_eq!(Message::parse(&extended(opcode::LOOKUP, &[b"name\0"], 9)).err(), Some(Malformed));
}

#[test]
fn many_references_are_given_back_one_by_one() {
    let ones = [abi::ForgetOne { node: 7, count: 3 }, abi::ForgetOne { node: 8, count: 1 }];
    let bytes = message(opcode::BATCH_FORGET, &with(&abi::BatchForgetIn { count: 2, padding: 0 }, ones.as_bytes()));
    let Ok(Message::Forget(forgets)) = Message::parse(&bytes) else { panic!("it is one") };
    assert_eq!(forgets.collect::<Vec<_>>(), [(7, 3), (8, 1)]);
    for count in [3, u32::MAX] {
        let head = abi::BatchForgetIn { count, padding: 0 };
        assert!(Message::parse(&message(opcode::BATCH_FORGET, &with(&head, ones.as_bytes()))).is_err(), "{count}");
    }
}

#[test]
fn an_offer_of_an_older_kernel_is_shorter() {
    let head = abi::InitIn { major: 7, minor: 31, read_ahead_max: 1, flags: 5, flags_high: 1, ..Default::default() };
    let Ok(Operation::Init(offer)) = call(&message(opcode::INIT, &[&head.as_bytes()[..16]])).operation else {
        panic!("it is one");
    };
    assert_eq!((offer.major, offer.minor, offer.flags), (7, 31, 5));
    let head = abi::InitIn { flags: abi::init::INIT_EXT as u32, ..head };
    let bytes = message(opcode::INIT, &[head.as_bytes()]);
    assert!(matches!(call(&bytes).operation, Ok(Operation::Init(offer)) if offer.flags == 1 << 32 | 1 << 30));
}

#[test]
fn a_write_says_itself_where_it_goes_and_how_durable_it_is_to_be() {
    let write = |flags: OpenFlags| {
        let head = abi::WriteIn { size: 5, flags: flags.bits(), ..Default::default() };
        match call(&message(opcode::WRITE, &with(&head, b"hello"))).operation {
            Ok(Operation::File { operation: FileOperation::Write { mode, .. }, .. }) => (mode.append, mode.durability),
            other => panic!("{other:?}"),
        }
    };
    let (append, data) = (OpenFlags::WRITE_ONLY | OpenFlags::APPEND, OpenFlags::DATA_SYNC);
    assert_eq!(write(append), (true, None));
    assert_eq!(write(append | data), (true, Some(Durability::Data)));
    assert_eq!(write(data | OpenFlags::FILE_SYNC), (false, Some(Durability::All)));
}
