//! The file operations, in the kernel's convention: a result, or a negative errno.
//!
//! Each function decides as the system call of the same name would, and makes that call when the user-level path does not serve it. The
//! names of libc and of the C API forward to these functions and do nothing else.

mod attributes;
mod data;
mod descriptors;
mod limits;
mod names;
mod offsets;
mod posts;
mod stats;
mod sync;
mod xattrs;

pub use attributes::*;
pub use data::*;
pub use descriptors::*;
pub use names::*;
pub use offsets::*;
pub use stats::*;
pub use sync::*;
pub use xattrs::*;

use crate::files::{OpenFile, open_file};
use crate::memory::UserPath;
use crate::outcome::{Refusal, Served};
use crate::paths::{self, Extra, Take};
use crate::state::{Call, state};
use crate::{process, raw};
use poolfs_ipc::wire::{Operation, Reply, Request, RequestFlags};
use poolfs_types::Errno;

/// The same call, by the kernel, with the application's own arguments.
#[inline]
fn kernel(number: u32, arguments: [usize; 6]) -> isize {
    // SAFETY: the arguments are those of the application's call, whose promises they keep: the argument types of
    // `memory` were made from them under that condition.
    unsafe { raw::system_call(number, arguments) }
}

/// As [`kernel`], for calls that may wait and in which libc lets a thread be cancelled.
#[inline]
fn kernel_cancellable(number: u32, arguments: [usize; 6]) -> isize {
    process::cancellable(|| kernel(number, arguments))
}

/// The call, or the refusal that leaves it to the kernel. To be asked by the function that does all the rest.
#[inline(always)]
fn on() -> Served<Call> {
    Call::begin().ok_or(Refusal::Foreign)
}

/// As [`on`], for a call by path. Refused at once when the path leads elsewhere.
#[inline(always)]
fn on_path(at: (i32, UserPath)) -> Served<Call> {
    let state = state().ok_or(Refusal::Foreign)?;
    if paths::is_elsewhere(state, at) { Err(Refusal::Foreign) } else { on() }
}

/// As [`on`], for a call by descriptor. Refused at once when that is known not to be ours.
#[inline(always)]
fn on_descriptor(descriptor: i32) -> Served<Call> {
    let state = state().ok_or(Refusal::Foreign)?;
    if state.descriptors.is_foreign(descriptor) { Err(Refusal::Foreign) } else { on() }
}

/// A request for an operation, all else zero.
fn request(operation: Operation) -> Request {
    Request { operation: operation as u32, ..Request::default() }
}

/// The flag that says not to follow a final symbolic link, when `flags` of an `*at` call do.
fn no_follow(flags: i32) -> u32 {
    let flag = flags as u32 & linux_raw_sys::general::AT_SYMLINK_NOFOLLOW != 0;
    if flag { RequestFlags::NO_FOLLOW.bits() } else { 0 }
}

/// A request by path that brings nothing but its success.
fn change_by_path(at: (i32, UserPath), request: &Request) -> Served<usize> {
    change_by_path_with(at, request, &Extra::default())
}

fn change_by_path_with(at: (i32, UserPath), request: &Request, extra: &Extra<'_>) -> Served<usize> {
    paths::by_path(on_path(at)?, at, true, request, extra, &mut |_, _, _| {}).map(|_| 0)
}

/// A request that changes a file's attributes by descriptor.
fn change_by_descriptor(descriptor: i32, request: &Request, extra: &Extra<'_>) -> Served<usize> {
    let call = on_descriptor(descriptor)?;
    let file = open_file(call, descriptor)?;
    if file.mount.is_read_only() {
        return Err(Refusal::Kernel);
    }
    by_file(call, &file, request, extra, &mut |_, _, _| {}).map(|_| 0)
}

/// One request on an adopted file.
///
/// A handle the service does not know (any more) is forgotten, and the kernel serves.
fn by_file(call: Call, file: &OpenFile<'_>, template: &Request, extra: &Extra<'_>, take: Take<'_>) -> Served<Reply> {
    let mut borrowed = file.session.borrow()?;
    let mut request = *template;
    request.handle = file.adopted.handle;
    borrowed.put_data(0, extra.second).map_err(|_| Refusal::Kernel)?;
    request.second_length = extra.second.len() as u32;
    paths::put_value(&mut borrowed, extra.second.len(), extra, &mut request)?;
    let reply =
        file.session.execute(&mut borrowed, &request).map_err(|error| sort_error(call, file.descriptor, error))?;
    take(&reply, &borrowed, &file.mount);
    Ok(reply)
}

/// What a failed request on an adopted file means.
fn sort_error(call: Call, descriptor: i32, error: Refusal) -> Refusal {
    match error {
        Refusal::Failed(Errno::EBADF | Errno::ESTALE) => {
            call.state.descriptors.clear(descriptor);
            Refusal::Kernel
        }
        _ => error,
    }
}
