//! What the library transfers by itself: how much at once, and of which files.

use crate::descriptors::Adopted;
use crate::memory::UserMemory;
use crate::outcome::{Refusal, Served};
use crate::state::Call;
use poolfs_types::limits::FILE_SIZE_MAX;

/// Most bytes of one read or write, as in the kernel.
pub const TRANSFER_MAX: usize = 0x7fff_f000;

/// Whether a file may be written without the kernel.
pub(super) fn may_be_written(call: Call, adopted: &Adopted) -> bool {
    adopted.is_regular() && adopted.is_writable() && !call.state.file_size_limited()
}

/// The bytes of a transfer; nothing to transfer and impossible offsets are the kernel's to judge.
pub(super) fn transfer(memory: UserMemory, offset: u64) -> Served<usize> {
    let length = memory.length().min(TRANSFER_MAX);
    let fits = offset.checked_add(length as u64).is_some_and(|end| end <= FILE_SIZE_MAX);
    if memory.is_impossible() || length == 0 || !fits { Err(Refusal::Kernel) } else { Ok(length) }
}
