//! Reads and writes at given offsets, and the other calls on the content of an open file: sync, truncation, allocation.

use super::limits::{TRANSFER_MAX, may_be_written, transfer};
use super::posts::{learn, poster};
use super::{by_file, kernel, kernel_cancellable, on_descriptor, refresh_size, request, sort_error};
use crate::files::{DirectFile, OpenFile, Purpose, direct_file, open_file, open_file_for};
use crate::memory::UserMemory;
use crate::outcome::{Refusal, Served, finish, refused_at};
use crate::pages;
use crate::paths::Extra;
use crate::state::{Call, state};
use linux_raw_sys::general as sys;
use poolfs_ipc::segment::OptimisticRead;
use poolfs_ipc::wire::{Operation, Request, RequestFlags, Status};
use poolfs_types::Errno;

/// A file's segment is asked for at this read or look at attributes by request: mapping it costs as much as a few of them.
const SEGMENT_AT_LOOK: u32 = 8;

/// This write goes to the end of the file, as the kernel knows it.
const RWF_APPEND: u32 = 16;

/// `pread`
pub fn pread(descriptor: i32, memory: UserMemory, offset: i64) -> isize {
    if let Some(count) = optimistic_read(descriptor, memory, offset) {
        return count as isize;
    }
    let served = || {
        let call = on_descriptor(descriptor)?;
        let at = from_user(offset)?;
        if let Some(count) = direct_file(call, descriptor).and_then(|file| read_direct(&file, memory, at)) {
            return Ok(count);
        }
        let file = readable(call, descriptor, memory.length())?;
        read_at(call, &file, memory, at)
    };
    finish(served(), || kernel_cancellable(sys::__NR_pread64, words(descriptor, memory, offset)))
}

/// `pwrite`
pub fn pwrite(descriptor: i32, memory: UserMemory, offset: i64) -> isize {
    let served = || {
        let call = on_descriptor(descriptor)?;
        if let (Some(poster), Ok(offset)) = (poster(call, descriptor, memory), from_user(offset))
            && let Some(count) = poster.write_at(memory, offset)?
        {
            return Ok(count);
        }
        let file = writable(call, descriptor, memory.length())?;
        let offset = from_user(offset)?;
        write_at(call, &file, memory, offset).map(|(count, _)| count)
    };
    finish(served(), || kernel_cancellable(sys::__NR_pwrite64, words(descriptor, memory, offset)))
}

pub(super) fn words(descriptor: i32, memory: UserMemory, offset: i64) -> [usize; 6] {
    [descriptor as usize, memory.address(), memory.length(), offset as usize, 0, 0]
}

/// An offset that is one; others get the kernel's errno from the kernel.
pub(super) fn from_user(offset: i64) -> Served<u64> {
    u64::try_from(offset).map_err(|_| Refusal::Kernel)
}

/// The adopted regular file behind a number, for reading so many bytes.
pub(super) fn readable<'a>(call: Call, descriptor: i32, bytes: usize) -> Served<OpenFile<'a>> {
    may_read(open_file_for(call, descriptor, Purpose::Read(bytes))?)
}

/// An adopted regular file that may be read.
pub(super) fn may_read(file: OpenFile<'_>) -> Served<OpenFile<'_>> {
    if file.is_regular() && file.is_readable() { Ok(file) } else { Err(Refusal::Kernel) }
}

/// The adopted regular file behind a number, for writing so many bytes.
pub(super) fn writable<'a>(call: Call, descriptor: i32, bytes: usize) -> Served<OpenFile<'a>> {
    may_write(call, open_file_for(call, descriptor, Purpose::Write(bytes))?)
}

/// An adopted regular file that may be written.
pub(super) fn may_write<'a>(call: Call, file: OpenFile<'a>) -> Served<OpenFile<'a>> {
    if may_be_written(call, &file.adopted) { Ok(file) } else { Err(Refusal::Kernel) }
}

/// Reads a little of a file that is read again and again, in so few instructions that the processor begins with the next read while
/// it waits for the memory of this one; nothing when it takes more.
#[inline]
fn optimistic_read(descriptor: i32, memory: UserMemory, offset: i64) -> Option<usize> {
    if memory.length() > OptimisticRead::LENGTH_MAX {
        return None;
    }
    let (state, offset) = (state()?, u64::try_from(offset).ok()?);
    let found = state.descriptors.found(descriptor)?;
    if state.is_own_process() { state.sessions.optimistic_read(&found, offset, memory) } else { None }
}

/// Reads without a request; nothing when it takes one, or is the kernel's to judge.
pub(super) fn read_direct(file: &DirectFile<'_>, memory: UserMemory, offset: u64) -> Option<usize> {
    let length = transfer(memory, offset).ok()?;
    file.read(memory.part(0, length), offset)
}

/// As [`read_direct`], into the pieces of a vector.
pub(super) fn read_vectors_direct(file: &DirectFile<'_>, vectors: UserMemory, offset: u64) -> Option<usize> {
    let (mut at, mut is_whole) = (offset, true);
    let read = each_vector(vectors, |memory| {
        let count = read_direct(file, memory, at);
        is_whole &= count.is_some();
        at += count.unwrap_or(0) as u64;
        count.ok_or(Refusal::Kernel)
    });
    read.ok().filter(|_| is_whole)
}

/// Reads into `memory` from `offset`, in as many requests as it takes.
pub(super) fn read_at(call: Call, file: &OpenFile<'_>, memory: UserMemory, offset: u64) -> Served<usize> {
    let length = transfer(memory, offset)?;
    let mut done = 0;
    if file.is_settled(call)
        && let Some(read) = file.session.read_segment(file.adopted.handle, offset, memory.part(0, length))
    {
        if read.is_whole {
            return Ok(read.count);
        }
        done = read.count;
    }
    let mut borrowed = file.session.borrow()?;
    let room = file.session.connection().data_bytes();
    while done < length {
        let mut request = request(Operation::Read);
        request.handle = file.adopted.handle;
        request.offset = offset + done as u64;
        request.length = (length - done).min(room) as u64;
        let reply = match file.session.execute(&mut borrowed, &request) {
            Ok(reply) => reply,
            Err(error) => return refused_at(done, sort_error(call, file.descriptor, error)),
        };
        let got = reply.length.min(request.length) as usize;
        let target = memory.part(done, got);
        if !target.is_writable() {
            return if done > 0 { Ok(done) } else { Err(Refusal::Kernel) };
        }
        // SAFETY: the application's own memory, to be filled by this call; `part` stays inside.
        let copied = unsafe { borrowed.get_data_raw(0, target.address() as *mut u8, target.length()) };
        if reply.status != Status::Done as u32 || copied.is_err() {
            return Err(Refusal::Kernel);
        }
        done += got;
        if (got as u64) < request.length {
            break;
        }
    }
    drop(borrowed);
    ask_for_segment(call, file);
    Ok(done)
}

/// After a read by request: a file that is read again and again is worth a segment. Where there is none to be had, it is asked
/// for less and less often.
fn ask_for_segment(call: Call, file: &OpenFile<'_>) {
    if is_worth_segment(call, file.descriptor) {
        obtain_segment(call, file);
    }
}

/// Counts a read or a look at attributes that took a request or the kernel; whether they are so many that a segment is worth
/// asking for.
pub(super) fn is_worth_segment(call: Call, descriptor: i32) -> bool {
    let looks = call.state.descriptors.count_look(descriptor);
    looks >= SEGMENT_AT_LOOK && looks.is_power_of_two()
}

/// Asks for a file's segment, if there is none.
pub(super) fn obtain_segment(call: Call, file: &OpenFile<'_>) {
    let handle = file.adopted.handle;
    if file.session.wants_segment(handle) && file.session.ask_segment(handle) {
        call.state.descriptors.recount_looks(file.descriptor);
    }
}

/// Writes `memory` at `offset`; returns how much, and the offset of the first byte (for appends, where that is).
pub(super) fn write_at(call: Call, file: &OpenFile<'_>, memory: UserMemory, offset: u64) -> Served<(usize, u64)> {
    let length = transfer(memory, offset)?;
    let mut borrowed = file.session.borrow()?;
    let room = file.session.connection().data_bytes();
    // One append is one request, or its pieces could be apart.
    if file.appends() && length > room {
        return Err(Refusal::Kernel);
    }
    let descriptors = &call.state.descriptors;
    // Left unknown by whoever does not come as far as its end.
    let mut change = if file.appends() { descriptors.end_changes(file.descriptor, &file.adopted) } else { None };
    let (mut done, mut first) = (0, offset);
    while done < length {
        let piece = memory.part(done, (length - done).min(room));
        if !piece.is_readable() {
            return if done > 0 { Ok((done, first)) } else { Err(Refusal::Kernel) };
        }
        // SAFETY: the application's own memory, readable for this call; `part` stays inside.
        let put = unsafe { borrowed.put_data_raw(0, piece.address() as *const u8, piece.length()) };
        put.map_err(|_| Refusal::Kernel)?;
        let mut request = request(Operation::Write);
        request.handle = file.adopted.handle;
        request.offset = offset + done as u64;
        request.length = piece.length() as u64;
        let reply = match file.session.execute(&mut borrowed, &request) {
            Ok(reply) => reply,
            Err(error) => return refused_at(done, sort_error(call, file.descriptor, error)).map(|done| (done, first)),
        };
        if done == 0 {
            first = reply.value;
        }
        let count = reply.length.min(request.length) as usize;
        if let Some(change) = change.take() {
            descriptors.end_changed(file.descriptor, change, reply.value.checked_add(count as u64));
        }
        learn(call, (file.descriptor, &file.adopted), &reply, length);
        done += count;
        if (count as u64) < request.length {
            break;
        }
    }
    Ok((done, first))
}

/// `preadv2`; `preadv` when there are no `flags`
pub fn preadv(descriptor: i32, vectors: UserMemory, offset: i64, flags: Option<i32>) -> isize {
    let served = || {
        if flags.unwrap_or(0) != 0 || offset < 0 {
            return Err(Refusal::Foreign);
        }
        let call = on_descriptor(descriptor)?;
        let mut at = from_user(offset)?;
        if let Some(count) = direct_file(call, descriptor).and_then(|file| read_vectors_direct(&file, vectors, at)) {
            return Ok(count);
        }
        let file = readable(call, descriptor, 0)?;
        each_vector(vectors, |memory| {
            let count = read_at(call, &file, memory, at)?;
            at += count as u64;
            Ok(count)
        })
    };
    finish(served(), || kernel_vectors((sys::__NR_preadv, sys::__NR_preadv2), descriptor, vectors, offset, flags))
}

/// `pwritev2`; `pwritev` when there are no `flags`
pub fn pwritev(descriptor: i32, vectors: UserMemory, offset: i64, flags: Option<i32>) -> isize {
    let served = || {
        if flags.unwrap_or(0) != 0 || offset < 0 {
            return Err(Refusal::Foreign);
        }
        let call = on_descriptor(descriptor)?;
        let mut at = from_user(offset)?;
        if let Some(memory) = only_piece(vectors)
            && let Some(poster) = poster(call, descriptor, memory)
            && let Some(count) = poster.write_at(memory, at)?
        {
            return Ok(count);
        }
        let file = writable(call, descriptor, 0)?;
        if file.appends() {
            return Err(Refusal::Kernel);
        }
        each_vector(vectors, |memory| {
            let (count, _) = write_at(call, &file, memory, at)?;
            at += count as u64;
            Ok(count)
        })
    };
    finish(served(), || {
        if flags.is_some_and(|flags| flags as u32 & RWF_APPEND != 0) {
            refresh_size(descriptor);
        }
        kernel_vectors((sys::__NR_pwritev, sys::__NR_pwritev2), descriptor, vectors, offset, flags)
    })
}

pub(super) fn kernel_vectors(
    numbers: (u32, u32),
    descriptor: i32,
    vectors: UserMemory,
    offset: i64,
    flags: Option<i32>,
) -> isize {
    let count = vectors.length() / size_of::<[usize; 2]>();
    let number = if flags.is_none() { numbers.0 } else { numbers.1 };
    let flags = flags.unwrap_or(0) as usize;
    kernel_cancellable(number, [descriptor as usize, vectors.address(), count, offset as usize, 0, flags])
}

/// Runs `transfer` on each piece of a vector until one is not done wholly; returns the sum.
pub(super) fn each_vector(vectors: UserMemory, mut transfer: impl FnMut(UserMemory) -> Served<usize>) -> Served<usize> {
    const VECTORS_MAX: usize = 1024;
    let size = size_of::<[usize; 2]>();
    let count = vectors.length() / size;
    if count == 0 || count > VECTORS_MAX || !vectors.is_readable() || total_length(vectors) > TRANSFER_MAX {
        return Err(Refusal::Kernel);
    }
    let mut done = 0;
    for index in 0..count {
        let [base, length] = vectors.part(index * size, size).get_readable::<[usize; 2]>().ok_or(Refusal::Kernel)?;
        if length == 0 {
            continue;
        }
        // SAFETY: a piece of the application's own vector, whose memory it gave for this call.
        let memory = unsafe { UserMemory::new(base as *mut u8, length) };
        match transfer(memory) {
            Ok(moved) => {
                done += moved;
                if moved < length {
                    break;
                }
            }
            Err(error) => return refused_at(done, error),
        }
    }
    if done == 0 && total_length(vectors) == 0 { Err(Refusal::Kernel) } else { Ok(done) }
}

/// The piece of a vector that has no other one.
pub(super) fn only_piece(vectors: UserMemory) -> Option<UserMemory> {
    let is_one = vectors.length() == size_of::<[usize; 2]>();
    let [base, length] = is_one.then(|| vectors.get::<[usize; 2]>()).flatten()?;
    // SAFETY: as in `each_vector`.
    Some(unsafe { UserMemory::new(base as *mut u8, length) })
}

/// Bytes of all pieces of a vector that can be read.
pub(super) fn total_length(vectors: UserMemory) -> usize {
    let size = size_of::<[usize; 2]>();
    (0..vectors.length() / size)
        .filter_map(|index| vectors.part(index * size, size).get_readable::<[usize; 2]>())
        .fold(0, |sum, [_, length]| sum.saturating_add(length))
}

/// `fsync` and, with `data_only`, `fdatasync`
pub fn sync(descriptor: i32, data_only: bool) -> isize {
    let served = || {
        let call = on_descriptor(descriptor)?;
        let file = open_file(call, descriptor)?;
        let mut request = request(Operation::Sync);
        request.flags = if data_only { RequestFlags::DATA_ONLY.bits() } else { 0 };
        by_file(call, &file, &request, &Extra::default(), &mut |_, _, _| {}).map(|_| 0)
    };
    let number = if data_only { sys::__NR_fdatasync } else { sys::__NR_fsync };
    finish(served(), || kernel_cancellable(number, [descriptor as usize, 0, 0, 0, 0, 0]))
}

/// `ftruncate`
pub fn ftruncate(descriptor: i32, length: i64) -> isize {
    // A mapping of a file that becomes shorter cannot be used any more.
    pages::forget();
    let served = || {
        let call = on_descriptor(descriptor)?;
        let file = writable(call, descriptor, 0)?;
        let mut request = request(Operation::Truncate);
        request.offset = from_user(length)?;
        resized(call, &file, &request)
    };
    finish(served(), || kernel(sys::__NR_ftruncate, [descriptor as usize, length as usize, 0, 0, 0, 0]))
}

/// `fallocate`
pub fn fallocate(descriptor: i32, mode: i32, offset: i64, length: i64) -> isize {
    finish(allocate(descriptor, mode, offset, length), || {
        kernel_cancellable(
            sys::__NR_fallocate,
            [descriptor as usize, mode as usize, offset as usize, length as usize, 0, 0],
        )
    })
}

/// `fallocate` by the user-level path alone; nothing when the kernel, or libc with it, is to do it.
pub fn allocate_in_instance(descriptor: i32, mode: i32, offset: i64, length: i64) -> Option<isize> {
    match allocate(descriptor, mode, offset, length) {
        Ok(_) => Some(0),
        Err(Refusal::Failed(Errno::EOPNOTSUPP)) => None,
        Err(Refusal::Failed(errno)) => Some(-(errno.raw() as isize)),
        Err(Refusal::Kernel | Refusal::Foreign) => None,
    }
}

fn allocate(descriptor: i32, mode: i32, offset: i64, length: i64) -> Served<usize> {
    let call = on_descriptor(descriptor)?;
    let file = writable(call, descriptor, 0)?;
    let mut request = request(Operation::Allocate);
    request.mode = mode as u32;
    request.offset = from_user(offset)?;
    request.length = from_user(length).ok().filter(|&length| length > 0).ok_or(Refusal::Kernel)?;
    resized(call, &file, &request)
}

/// A request that may change a file's size.
fn resized(call: Call, file: &OpenFile<'_>, request: &Request) -> Served<usize> {
    let resized = by_file(call, file, request, &Extra::default(), &mut |_, _, _| {});
    // What was appended until now is no longer the end.
    let _unknown = call.state.descriptors.end_changes(file.descriptor, &file.adopted);
    resized.map(|_| 0)
}
