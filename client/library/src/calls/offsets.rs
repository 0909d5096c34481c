//! Reads and writes at the description's offset, and `lseek`. The offset is kept by the kernel and stays there.
//!
//! A transfer first moves the offset by its whole length, which is one atomic step of the kernel, works in the range reserved by this, and
//! gives back what it did not use. So a signal handler or a thread that uses the same descriptor in between works on a range of its own.
//! Served are only descriptions that are this process's alone; the kernel serves the others.
//!
//! A read that meets the end of the file uses only a part of its range, and two threads would have to give back in the right order: reads
//! are served in processes with one thread. A write uses all of its range in any process: what the service does not take goes through the
//! kernel to the same place. Only a failed write leaves a rest, and gives it back when nobody has moved the offset since.

use super::data::{
    each_vector, from_user, kernel_vectors, may_read, may_write, only_piece, read_at, read_direct, read_vectors_direct,
    readable, total_length, words, writable, write_at,
};
use super::posts::{poster, tell_end};
use super::stats::size_while_changing;
use super::{by_file, kernel, kernel_cancellable, on_descriptor, request};
use crate::files::{self, DirectFile, OpenFile, Purpose, direct_file, open_file, own_file_for};
use crate::memory::UserMemory;
use crate::outcome::{Refusal, Served, finish};
use crate::paths::Extra;
use crate::raw;
use crate::session::Session;
use crate::state::Call;
use crate::trace;
use linux_raw_sys::general as sys;
use poolfs_ipc::wire::Operation;
use poolfs_types::Errno;

/// Most bytes one copy between files moves before it returns: the caller goes on, and can be interrupted.
const COPY_MAX: u64 = 16 << 20;

/// `read`
pub fn read(descriptor: i32, memory: UserMemory) -> isize {
    let served = || {
        let call = on_descriptor(descriptor)?;
        let directly = own_direct_file(call, descriptor).and_then(|file| {
            at_offset(file.place(), memory.length(), |offset| read_direct(&file, memory, offset).ok_or(Refusal::Kernel))
                .ok()
        });
        if let Some(count) = directly {
            return Ok(count);
        }
        let file = may_read(own_file_for(call, descriptor, Purpose::Read(memory.length()))?)?;
        at_offset(place(&file), memory.length(), |offset| read_at(call, &file, memory, offset))
    };
    finish(served(), || {
        kernel_cancellable(sys::__NR_read, [descriptor as usize, memory.address(), memory.length(), 0, 0, 0])
    })
}

/// `write`
pub fn write(descriptor: i32, memory: UserMemory) -> isize {
    let served = || {
        let call = on_descriptor(descriptor)?;
        if let Some(count) = write_posted(call, descriptor, memory)? {
            return Ok(count);
        }
        let file = own_writable(call, descriptor, memory)?;
        if file.appends() {
            let (count, first) = write_at(call, &file, memory, 0)?;
            let end = first.checked_add(count as u64).and_then(|end| i64::try_from(end).ok());
            if let Some(end) = end {
                raw::seek(descriptor, end, sys::SEEK_SET).ok();
            }
            return Ok(count);
        }
        at_offset(place(&file), memory.length(), |offset| {
            let written = write_at(call, &file, memory, offset).map(|(count, _)| count);
            written_in_range(written, descriptor, memory, offset)
        })
    };
    finish(served(), || {
        tell_end(descriptor);
        kernel_cancellable(sys::__NR_write, [descriptor as usize, memory.address(), memory.length(), 0, 0, 0])
    })
}

/// `write` by a post; nothing when it takes an ordinary request, and has not begun.
fn write_posted(call: Call, descriptor: i32, memory: UserMemory) -> Served<Option<usize>> {
    let Some(poster) = poster(call, descriptor, memory) else { return Ok(None) };
    if poster.appends() {
        return poster.append(memory);
    }
    let written = at_offset(poster.place(), memory.length(), |offset| {
        let written = poster.write_at(memory, offset).and_then(|posted| match posted {
            Some(count) => Ok(count),
            // In the range that is taken already, of what the number now stands for.
            None => {
                let file = own_writable(call, descriptor, memory)?;
                write_at(call, &file, memory, offset).map(|(count, _)| count)
            }
        });
        written_in_range(written, descriptor, memory, offset)
    });
    written.map(Some)
}

fn own_writable<'a>(call: Call, descriptor: i32, memory: UserMemory) -> Served<OpenFile<'a>> {
    may_write(call, own_file_for(call, descriptor, Purpose::Write(memory.length()))?)
}

/// `readv`
pub fn readv(descriptor: i32, vectors: UserMemory) -> isize {
    let served = || {
        let call = on_descriptor(descriptor)?;
        let length = readable_length(vectors)?;
        let directly = own_direct_file(call, descriptor).and_then(|file| {
            let read = |offset| read_vectors_direct(&file, vectors, offset).ok_or(Refusal::Kernel);
            at_offset(file.place(), length, read).ok()
        });
        if let Some(count) = directly {
            return Ok(count);
        }
        let file = may_read(own_file_for(call, descriptor, Purpose::Read(0))?)?;
        at_offset(place(&file), length, |offset| {
            let mut at = offset;
            each_vector(vectors, |memory| {
                let count = read_at(call, &file, memory, at)?;
                at += count as u64;
                Ok(count)
            })
        })
    };
    finish(served(), || kernel_vector(sys::__NR_readv, descriptor, vectors))
}

/// `writev`
pub fn writev(descriptor: i32, vectors: UserMemory) -> isize {
    let served = || {
        let call = on_descriptor(descriptor)?;
        if let Some(memory) = only_piece(vectors)
            && let Some(count) = write_posted(call, descriptor, memory)?
        {
            return Ok(count);
        }
        let file = may_write(call, own_file_for(call, descriptor, Purpose::Write(0))?)?;
        if file.appends() {
            return Err(Refusal::Kernel);
        }
        at_offset(place(&file), readable_length(vectors)?, |offset| {
            let mut at = offset;
            let written = each_vector(vectors, |memory| {
                let (count, _) = write_at(call, &file, memory, at)?;
                at += count as u64;
                Ok(count)
            });
            let numbers = (sys::__NR_pwritev, sys::__NR_pwritev2);
            in_range(written, || kernel_vectors(numbers, descriptor, vectors, offset as i64, None))
        })
    };
    finish(served(), || {
        tell_end(descriptor);
        kernel_vector(sys::__NR_writev, descriptor, vectors)
    })
}

/// Bytes of all pieces of a vector, unless it is the kernel's to refuse.
fn readable_length(vectors: UserMemory) -> Served<usize> {
    const VECTORS_BYTES_MAX: usize = 1024 * size_of::<[usize; 2]>();
    if vectors.length() > VECTORS_BYTES_MAX || !vectors.is_readable() {
        return Err(Refusal::Kernel);
    }
    Ok(total_length(vectors))
}

fn kernel_vector(number: u32, descriptor: i32, vectors: UserMemory) -> isize {
    let count = vectors.length() / size_of::<[usize; 2]>();
    kernel_cancellable(number, [descriptor as usize, vectors.address(), count, 0, 0, 0])
}

/// A file that can be read without a request, at an offset that is this process's alone.
fn own_direct_file<'a>(call: Call, descriptor: i32) -> Option<DirectFile<'a>> {
    direct_file(call, descriptor).filter(|file| file.owns_offset)
}

fn place<'a, 'b>(file: &'b OpenFile<'a>) -> (i32, &'b Session<'a>) {
    (file.descriptor, &file.session)
}

/// What was written, or what `kernel` has written at the same place when it was left to it.
fn in_range(written: Served<usize>, kernel: impl FnOnce() -> isize) -> Served<usize> {
    match written {
        Err(Refusal::Kernel | Refusal::Foreign) => {
            trace::kernel();
            let written = kernel();
            usize::try_from(written).map_err(|_| Refusal::Failed(Errno::from_raw(-written as i32)))
        }
        served => served,
    }
}

/// As [`in_range`], of one piece of memory.
fn written_in_range(written: Served<usize>, descriptor: i32, memory: UserMemory, offset: u64) -> Served<usize> {
    in_range(written, || kernel_cancellable(sys::__NR_pwrite64, words(descriptor, memory, offset as i64)))
}

/// Runs a transfer of up to `length` bytes in the range that the offset of a descriptor is moved over, which is a file's of
/// a session.
fn at_offset(
    (descriptor, session): (i32, &Session<'_>),
    length: usize,
    transfer: impl FnOnce(u64) -> Served<usize>,
) -> Served<usize> {
    let whole = i64::try_from(length).ok().filter(|&length| length > 0).ok_or(Refusal::Kernel)?;
    if length > super::limits::TRANSFER_MAX {
        return Err(Refusal::Kernel);
    }
    let end = raw::seek(descriptor, whole, sys::SEEK_CUR).map_err(|_| Refusal::Kernel)?;
    let result = transfer(end - whole as u64);
    let unused = whole - result.as_ref().map_or(0, |&count| count as i64);
    // The child of a handler that forked in between leaves its parent the range, and so does whoever was followed by another transfer.
    if unused > 0 && !session.connection().is_inherited() && raw::seek(descriptor, 0, sys::SEEK_CUR) == Ok(end) {
        raw::seek(descriptor, -unused, sys::SEEK_CUR).ok();
    }
    result
}

/// `lseek`; data, holes and the end of what this process may be changing by requests are asked of the service, the rest the kernel
/// knows.
pub fn lseek(descriptor: i32, offset: i64, whence: i32) -> isize {
    let moved = |to: u64| {
        let to = i64::try_from(to).map_err(|_| Refusal::Kernel)?;
        raw::seek(descriptor, to, sys::SEEK_SET).map(|offset| offset as usize).map_err(|_| Refusal::Kernel)
    };
    let served = || {
        if whence as u32 == sys::SEEK_END {
            let size = size_while_changing(descriptor)?;
            return moved(size.checked_add_signed(offset).ok_or(Refusal::Kernel)?);
        }
        if !matches!(whence as u32, sys::SEEK_DATA | sys::SEEK_HOLE) {
            return Err(Refusal::Foreign);
        }
        let call = on_descriptor(descriptor)?;
        let file = open_file(call, descriptor)?;
        if !file.is_regular() {
            return Err(Refusal::Kernel);
        }
        let mut request = request(Operation::Seek);
        request.offset = from_user(offset)?;
        request.mode = whence as u32;
        let reply = by_file(call, &file, &request, &Extra::default(), &mut |_, _, _| {})?;
        moved(reply.value)
    };
    finish(served(), || kernel(sys::__NR_lseek, [descriptor as usize, offset as usize, whence as usize, 0, 0, 0]))
}

/// Where one side of a copy stands: at a number of the caller's, or at the description's offset.
enum Position {
    Given(UserMemory, i64),
    Offset(i64),
}

impl Position {
    fn of(file: &OpenFile<'_>, given: UserMemory) -> Served<Self> {
        if !given.is_null() {
            return given.get::<i64>().map(|offset| Self::Given(given, offset)).ok_or(Refusal::Kernel);
        }
        if !file.owns_offset {
            return Err(Refusal::Kernel);
        }
        let offset = raw::seek(file.descriptor, 0, sys::SEEK_CUR).map_err(|_| Refusal::Kernel)?;
        Ok(Self::Offset(offset as i64))
    }

    fn offset(&self) -> Served<u64> {
        let (Self::Given(_, offset) | Self::Offset(offset)) = self;
        from_user(*offset)
    }

    fn advance(&self, descriptor: i32, count: u64) {
        match self {
            Self::Given(memory, offset) => {
                // It was read from there a moment ago: whoever makes it constant meanwhile keeps the old one.
                memory.put(offset + count as i64);
            }
            Self::Offset(_) => {
                raw::seek(descriptor, count as i64, sys::SEEK_CUR).ok();
            }
        }
    }
}

/// Copies between two adopted files of one session, without the bytes passing through this process.
fn copy(from: (i32, UserMemory), to: (i32, UserMemory), length: usize) -> Served<usize> {
    let call = on_descriptor(from.0)?;
    let source = readable(call, from.0, length)?;
    let target = writable(call, to.0, length)?;
    let same =
        source.adopted.instance == target.adopted.instance && source.session.generation == target.session.generation;
    if !same || target.appends() || length == 0 {
        return Err(Refusal::Kernel);
    }
    let (at, to_at) = (Position::of(&source, from.1)?, Position::of(&target, to.1)?);
    let mut request = request(Operation::CopyRange);
    request.second_handle = target.adopted.handle;
    request.offset = at.offset()?;
    request.second_offset = to_at.offset()?;
    request.length = (length as u64).min(COPY_MAX);
    let reply = by_file(call, &source, &request, &Extra::default(), &mut |_, _, _| {})?;
    let count = reply.value.min(request.length);
    at.advance(from.0, count);
    to_at.advance(to.0, count);
    Ok(count as usize)
}

/// Before the kernel copies from a file by the size it knows.
pub fn refresh_size(descriptor: i32) {
    if let Some(call) = Call::begin() {
        files::refresh_size(call, descriptor);
    }
}

/// `copy_file_range`; the offsets are where the caller keeps them, or null.
pub fn copy_file_range(from: (i32, UserMemory), to: (i32, UserMemory), length: usize, flags: u32) -> isize {
    let served = if flags == 0 { copy(from, to, length) } else { Err(Refusal::Foreign) };
    finish(served, || {
        refresh_size(from.0);
        let arguments = [from.0 as usize, from.1.address(), to.0 as usize, to.1.address(), length, flags as usize];
        kernel_cancellable(sys::__NR_copy_file_range, arguments)
    })
}

/// `sendfile`; between two files of an instance a copy there, else (to a socket or pipe) the kernel's.
pub fn sendfile(to: i32, from: i32, offset: UserMemory, length: usize) -> isize {
    // SAFETY: null.
    let none = unsafe { UserMemory::new(core::ptr::null_mut(), 0) };
    finish(copy((from, offset), (to, none), length), || {
        refresh_size(from);
        kernel_cancellable(sys::__NR_sendfile, [to as usize, from as usize, offset.address(), length, 0, 0])
    })
}
