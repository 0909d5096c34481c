//! Tests of an entry's messages, with the kernel's side simulated.

use super::*;
use layout::{HEADER, OPERATION, PAYLOAD_BYTES_AT};

const PAYLOAD_BYTES: usize = 4 * memory::PAGE;

fn entry() -> Entry {
    let device = Arc::new(OwnedFd::from(std::fs::File::open("/dev/zero").expect("there")));
    Entry::new(&device, 3, PAYLOAD_BYTES).expect("io_uring")
}

/// What the kernel does, by the window.
fn put(entry: &Entry, whole: u32, operation: &[u8], payload: &[u8], told: u32) {
    let [headers, data] = entry.window.lend();
    let write = |at: *mut libc::c_void, offset: usize, bytes: &[u8]| {
        // SAFETY: within the mapping of a window that nobody else uses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast::<u8>().add(offset), bytes.len()) }
    };
    write(headers.iov_base, HEADER, &whole.to_ne_bytes());
    write(headers.iov_base, HEADER + 8, &77u64.to_ne_bytes());
    write(headers.iov_base, OPERATION, operation);
    write(headers.iov_base, layout::COMMIT_ID_AT, &77u64.to_ne_bytes());
    write(headers.iov_base, PAYLOAD_BYTES_AT, &told.to_ne_bytes());
    // The kernel leaves the rest of the word as it was.
    write(headers.iov_base, PAYLOAD_BYTES_AT + 4, &[0xff; 4]);
    write(data.iov_base, 0, payload);
    entry.window.give_back();
}

fn take(entry: &mut Entry) {
    let (request, message) = entry.desk.message();
    (entry.request, entry.message) = (request, message.unwrap_or(PAYLOAD..PAYLOAD));
}

fn seen(entry: &Entry, segment: usize, at: usize, count: usize) -> Vec<u8> {
    let segment = entry.window.lend()[segment];
    entry.window.give_back();
    assert!(at + count <= segment.iov_len);
    // SAFETY: within the mapping of a window that nobody writes to meanwhile.
    unsafe { std::slice::from_raw_parts(segment.iov_base.cast::<u8>().add(at), count) }.to_vec()
}

#[test]
fn a_message_is_one_piece_and_its_answer_is_where_the_kernel_looks() {
    let mut entry = entry();
    put(&entry, 40 + 8 + 4, b"headhead", b"data", 4);
    take(&mut entry);
    assert_eq!(entry.request, 77);
    let (message, room) = entry.split();
    assert_eq!((message.len(), &message[40..]), (52, &b"headheaddata"[..]));
    assert_eq!(message[8..16], 77u64.to_ne_bytes());
    room[..3].copy_from_slice(b"yes");
    entry.desk.answer(77, entry.message.end, Ok(3));
    assert_eq!(seen(&entry, 1, 0, 3), b"yes");
    assert_eq!(seen(&entry, 0, 0, 16), *b"\x13\0\0\0\0\0\0\0\x4d\0\0\0\0\0\0\0");
    assert_eq!(seen(&entry, 0, PAYLOAD_BYTES_AT, 4), 3u32.to_ne_bytes());
    entry.desk.answer(77, entry.message.end, Err(2));
    assert_eq!(seen(&entry, 0, 4, 4), (-2i32).to_ne_bytes());
    assert_eq!(seen(&entry, 0, PAYLOAD_BYTES_AT, 4), [0; 4]);
}

#[test]
fn data_is_not_moved_and_the_answer_to_the_longest_message_has_room() {
    let mut entry = entry();
    put(&entry, 40 + 24, &[1; 24], b"", 0);
    take(&mut entry);
    let (_, room) = entry.split();
    assert_eq!(room.as_ptr().addr() % memory::PAGE, 0);
    room[..PAYLOAD_BYTES].fill(5);
    entry.desk.answer(77, entry.message.end, Ok(PAYLOAD_BYTES));
    assert_eq!(seen(&entry, 1, PAYLOAD_BYTES - 1, 1), [5]);
    put(&entry, (40 + 40 + PAYLOAD_BYTES) as u32, &[1; 40], &[6; PAYLOAD_BYTES], PAYLOAD_BYTES as u32);
    take(&mut entry);
    let (message, room) = entry.split();
    assert_eq!((message.len(), message[80..].as_ptr().addr() % memory::PAGE), (80 + PAYLOAD_BYTES, 0));
    assert!(room.len() >= memory::PAGE && message[80..].iter().all(|&byte| byte == 6));
}

#[test]
fn what_cannot_be_a_message_is_empty() {
    let mut entry = entry();
    for (whole, payload) in [(0, 0), (39, 0), (40, 1), (40 + 129, 0), (u32::MAX, 4), (52, u32::MAX)] {
        put(&entry, whole, b"", b"", payload);
        take(&mut entry);
        assert_eq!((entry.request, entry.split().0.len()), (77, 0), "{whole} {payload}");
    }
    let beyond = PAYLOAD_BYTES as u32 + 1;
    put(&entry, 40 + beyond, b"", b"", beyond);
    take(&mut entry);
    assert!(entry.split().0.is_empty());
}

#[test]
fn a_successor_leaves_its_predecessor_what_it_has() {
    let mut old = entry();
    put(&old, 40 + 4, b"", b"here", 4);
    take(&mut old);
    let mut new = old.heir().successor().expect("memory").step_in(77).expect("mapped");
    put(&old, 40 + 5, b"", b"there", 5);
    assert_eq!(&old.split().0[40..], b"here");
    take(&mut new);
    assert_eq!(&new.split().0[40..], b"there");
    old.desk.answer(77, PAYLOAD, Ok(4));
    assert_eq!(seen(&new, 1, 0, 5), b"there");
}

#[test]
fn who_is_no_fuse_device_registers_nothing() {
    let mut entry = entry();
    assert!(entry.register().is_err());
    refuse(&entry.device).expect("refused");
}
