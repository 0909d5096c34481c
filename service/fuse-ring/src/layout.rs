//! The layout of FUSE rings' headers, from `linux/fuse.h`, as far as it is used here.

use io_uring::squeue::Entry128;

/// `struct fuse_uring_req_header`: the header of request or answer, what is specific to the operation, and what says how much
/// data there is.
pub const HEADERS: usize = 288;

/// Where in it the header is.
pub const HEADER: usize = 0;
pub const IN_HEADER_BYTES: usize = 40;
pub const OUT_HEADER_BYTES: usize = 16;

/// Where the operation's own part is.
pub const OPERATION: usize = 128;
pub const OPERATION_BYTES_MAX: usize = 128;

/// In `struct fuse_uring_ent_in_out`, which comes last: the number to be repeated, and how long the data is (32 bits, and as
/// many of filling).
pub const COMMIT_ID_AT: usize = 256 + 8;
pub const PAYLOAD_BYTES_AT: usize = 256 + 16;

/// Of an entry's memory: headers and data.
pub const SEGMENTS: u32 = 2;

/// `enum fuse_uring_cmd`, and `struct fuse_uring_cmd_req`.
pub mod command {
    pub const REGISTER: u32 = 1;
    pub const COMMIT_AND_FETCH: u32 = 2;

    pub fn bytes(request: u64, queue: u16) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[8..16].copy_from_slice(&request.to_ne_bytes());
        bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
        bytes
    }
}

/// The 64 bits at `at`.
pub fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |number| u64::from_ne_bytes(*number))
}

pub fn out_header(request: u64, error: i32, body: usize) -> [u8; OUT_HEADER_BYTES] {
    let mut header = [0; OUT_HEADER_BYTES];
    header[..4].copy_from_slice(&((OUT_HEADER_BYTES + body) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..].copy_from_slice(&request.to_ne_bytes());
    header
}

/// Sets `len` of `struct io_uring_sqe`, for which the crate has no way.
pub fn set_length(entry: &mut Entry128, length: u32) {
    const LENGTH_AT: usize = 24;
    const _: () = assert!(size_of::<Entry128>() == 128 && align_of::<Entry128>() >= 4);
    // SAFETY: the type is the kernel's structure with nothing before it; these four bytes of it are a plain number.
    unsafe { (&raw mut *entry).byte_add(LENGTH_AT).cast::<u32>().write(length) }
}
