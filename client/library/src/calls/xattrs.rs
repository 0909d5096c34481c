//! Extended attributes, by path and by descriptor.

use super::{by_file, change_by_descriptor, change_by_path_with, kernel, on_descriptor, on_path, request};
use crate::files::open_file;
use crate::memory::{UserMemory, UserPath};
use crate::outcome::{Refusal, Served, finish};
use crate::paths::{self, Extra, WORKING_DIRECTORY};
use crate::state::Call;
use linux_raw_sys::general as sys;
use poolfs_ipc::Borrowed;
use poolfs_ipc::wire::{Operation, Reply, Request, RequestFlags};
use poolfs_types::Errno;
use poolfs_types::limits::XATTR_VALUE_MAX;

/// Whose attributes are meant.
#[derive(Clone, Copy)]
pub enum Of {
    /// the file a path leads to
    Path(UserPath),
    /// the same, or a symbolic link itself
    Link(UserPath),
    /// an open file
    Descriptor(i32),
}

impl Of {
    fn address(self) -> usize {
        match self {
            Of::Path(path) | Of::Link(path) => path.address(),
            Of::Descriptor(descriptor) => descriptor as usize,
        }
    }

    /// The number of the system call among the three of a kind.
    fn number(self, numbers: [u32; 3]) -> u32 {
        match self {
            Of::Path(_) => numbers[0],
            Of::Link(_) => numbers[1],
            Of::Descriptor(_) => numbers[2],
        }
    }

    fn flags(self) -> u32 {
        if matches!(self, Of::Link(_)) { RequestFlags::NO_FOLLOW.bits() } else { 0 }
    }
}

/// `getxattr`, `lgetxattr`, `fgetxattr`
pub fn getxattr(of: Of, name: UserPath, out: UserMemory) -> isize {
    let served = || {
        on(of)?;
        let second = attribute_name(&name)?;
        fetch(of, request(Operation::GetXattr), second, out)
    };
    finish(served(), || {
        let number = of.number([sys::__NR_getxattr, sys::__NR_lgetxattr, sys::__NR_fgetxattr]);
        kernel(number, [of.address(), name.address(), out.address(), out.length(), 0, 0])
    })
}

/// `listxattr`, `llistxattr`, `flistxattr`
pub fn listxattr(of: Of, out: UserMemory) -> isize {
    finish(fetch(of, request(Operation::ListXattr), b"", out), || {
        let number = of.number([sys::__NR_listxattr, sys::__NR_llistxattr, sys::__NR_flistxattr]);
        kernel(number, [of.address(), out.address(), out.length(), 0, 0, 0])
    })
}

/// `setxattr`, `lsetxattr`, `fsetxattr`
pub fn setxattr(of: Of, name: UserPath, value: UserMemory, flags: i32) -> isize {
    let served = || {
        on(of)?;
        if value.length() > XATTR_VALUE_MAX || !value.is_readable() {
            return Err(Refusal::Foreign);
        }
        let mut request = request(Operation::SetXattr);
        request.mode = flags as u32;
        request.flags = of.flags();
        change(of, &request, &Extra { second: attribute_name(&name)?, third: Some(value) })
    };
    finish(served(), || {
        let number = of.number([sys::__NR_setxattr, sys::__NR_lsetxattr, sys::__NR_fsetxattr]);
        kernel(number, [of.address(), name.address(), value.address(), value.length(), flags as usize, 0])
    })
}

/// `removexattr`, `lremovexattr`, `fremovexattr`
pub fn removexattr(of: Of, name: UserPath) -> isize {
    let served = || {
        on(of)?;
        let mut request = request(Operation::RemoveXattr);
        request.flags = of.flags();
        change(of, &request, &Extra { second: attribute_name(&name)?, third: None })
    };
    finish(served(), || {
        let number = of.number([sys::__NR_removexattr, sys::__NR_lremovexattr, sys::__NR_fremovexattr]);
        kernel(number, [of.address(), name.address(), 0, 0, 0, 0])
    })
}

/// The call on what is meant, when that may be ours.
#[inline(always)]
fn on(of: Of) -> Served<Call> {
    match of {
        Of::Path(path) | Of::Link(path) => on_path((WORKING_DIRECTORY, path)),
        Of::Descriptor(descriptor) => on_descriptor(descriptor),
    }
}

/// A name the kernel would accept; it has its own errnos for others.
fn attribute_name(name: &UserPath) -> Served<&[u8]> {
    name.bytes().filter(|name| (1..=255).contains(&name.len())).ok_or(Refusal::Foreign)
}

fn change(of: Of, request: &Request, extra: &Extra<'_>) -> Served<usize> {
    match of {
        Of::Path(path) | Of::Link(path) => change_by_path_with((WORKING_DIRECTORY, path), request, extra),
        Of::Descriptor(descriptor) => change_by_descriptor(descriptor, request, extra),
    }
}

/// A value or a list of names into `out`; a length of 0 asks for the size.
fn fetch(of: Of, mut request: Request, second: &[u8], out: UserMemory) -> Served<usize> {
    let call = on(of)?;
    request.flags = of.flags();
    request.length = out.length().min(XATTR_VALUE_MAX) as u64;
    if out.is_impossible() && out.length() > 0 {
        return Err(Refusal::Foreign);
    }
    let mut result = Err(Refusal::Kernel);
    let mut take = |reply: &Reply, borrowed: &Borrowed<'_>| {
        result = if out.length() == 0 {
            Ok(reply.value as usize)
        } else if reply.value > out.length() as u64 {
            Err(Refusal::Failed(Errno::ERANGE))
        } else {
            let length = (reply.value as usize).min(out.length());
            if !out.part(0, length).is_writable() {
                return;
            }
            // SAFETY: the application's own memory, to be filled by this call.
            let copied = unsafe { borrowed.get_data_raw(0, out.address() as *mut u8, length) };
            copied.map(|()| length).map_err(|_| Refusal::Kernel)
        };
    };
    let extra = Extra { second, third: None };
    match of {
        Of::Path(path) | Of::Link(path) => {
            let at = (WORKING_DIRECTORY, path);
            paths::by_path(call, at, false, &request, &extra, &mut |reply, borrowed, _| take(reply, borrowed))?;
        }
        Of::Descriptor(descriptor) => {
            let file = open_file(call, descriptor)?;
            by_file(call, &file, &request, &extra, &mut |reply, borrowed, _| take(reply, borrowed))?;
        }
    }
    result
}
