//! Preparations for changes of rights and for processes that come to share descriptions: made before the kernel is asked.

use crate::calls;
use crate::memory::UserMemory;
use crate::off::switch_off;
use crate::state::state;
use crate::{files, pages, process};
use linux_raw_sys::general as sys;
use linux_raw_sys::prctl;

/// Bytes of a `struct msghdr`.
pub const MESSAGE_BYTES: usize = 56;

/// What a call is about to do to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Other ids or groups for the whole process: sessions end, new ones are made with the new ids.
    Identity,
    /// Something that only the kernel will see rightly from now on: another root, other mounts, rules of a security
    /// module, rights of a single thread.
    View,
    /// Another process gets this one's descriptions.
    Sharing,
    /// The same, and runs in this one's memory.
    SharingMemory,
    /// Another program, which the library may not be in, gets this one's descriptions.
    Program,
}

/// To be called after a change of [`Change::Identity`]: another thread may have made a session meanwhile, with the rights
/// the process had until then.
pub fn after_identity() {
    end_sessions();
}

/// Whether a `sendmsg` may hand descriptors to another process: it carries control data.
pub fn carries_control(message: UserMemory) -> bool {
    const CONTROL_LENGTH: usize = 40;
    message.part(CONTROL_LENGTH, size_of::<usize>()).get::<usize>() != Some(0)
}

/// To be called before the change.
pub fn before(change: Change) {
    match change {
        Change::Identity => {
            files::share_all();
            end_sessions();
        }
        Change::View => {
            files::share_all();
            if is_own_process() {
                switch_off();
            }
            end_sessions();
        }
        Change::Sharing => sharing(),
        Change::SharingMemory => {
            sharing();
            process::note_shared_memory();
        }
        // Nothing for the child of a `vfork`, before which its parent has said it.
        Change::Program => {
            if process::vouched().is_some() && is_own_process() {
                sharing();
            }
        }
    }
}

fn sharing() {
    process::note_fork();
    files::share_all();
}

/// A child of `vfork` changes itself alone, and what is in this memory is its parent's.
fn is_own_process() -> bool {
    state_even_if_off().is_none_or(crate::state::State::is_own_process)
}

fn end_sessions() {
    if let Some(state) = state_even_if_off().filter(|state| state.is_own_process()) {
        state.sessions.end_all();
        state.mounts.distrust();
    }
}

fn state_even_if_off() -> Option<&'static crate::state::State> {
    state().or_else(crate::state::state_if_mapped)
}

/// To be called before a system call by number, as `syscall` makes them: what libc's names would have told us.
///
/// An answer stands for the call, which then is not made.
pub fn before_system_call(number: u32, arguments: [usize; 3]) -> Option<isize> {
    match number {
        // By number these change the calling thread alone.
        sys::__NR_setuid
        | sys::__NR_setgid
        | sys::__NR_setreuid
        | sys::__NR_setregid
        | sys::__NR_setresuid
        | sys::__NR_setresgid
        | sys::__NR_setgroups
        | sys::__NR_setfsuid
        | sys::__NR_setfsgid
        | sys::__NR_capset
        | sys::__NR_unshare
        | sys::__NR_setns
        | sys::__NR_chroot
        | sys::__NR_pivot_root
        | sys::__NR_seccomp
        | sys::__NR_landlock_restrict_self => before(Change::View),
        sys::__NR_prctl if is_filter(arguments[0]) => before(Change::View),
        sys::__NR_copy_file_range => calls::refresh_size(arguments[0] as i32),
        sys::__NR_sendfile => calls::refresh_size(arguments[1] as i32),
        sys::__NR_splice => calls::refresh_size(arguments[0] as i32),
        sys::__NR_pwritev2 => calls::refresh_size(arguments[0] as i32),
        sys::__NR_ioctl => calls::before_device_control(arguments[0] as i32, arguments[1]),
        sys::__NR_execve | sys::__NR_execveat => before(Change::Program),
        sys::__NR_fcntl => calls::before_control(arguments[0] as i32, arguments[1] as i32, arguments[2]),
        sys::__NR_fork => before(Change::Sharing),
        sys::__NR_vfork | sys::__NR_clone | sys::__NR_clone3 => before(Change::SharingMemory),
        sys::__NR_sendmsg => {
            // SAFETY: the program's own message header, which it gave for this call.
            let message = unsafe { UserMemory::new(arguments[1] as *mut u8, MESSAGE_BYTES) };
            if carries_control(message) {
                before(Change::Sharing);
            }
        }
        sys::__NR_sendmmsg => before(Change::Sharing),
        sys::__NR_sync => return Some(calls::sync_everything()),
        sys::__NR_syncfs => return Some(calls::syncfs(arguments[0] as i32)),
        sys::__NR_close => return Some(calls::close(arguments[0] as i32)),
        sys::__NR_close_range => {
            return Some(calls::close_range(arguments[0] as u32, arguments[1] as u32, arguments[2] as u32));
        }
        sys::__NR_dup2 => return Some(calls::dup2(arguments[0] as i32, arguments[1] as i32)),
        sys::__NR_dup3 => {
            return Some(calls::dup3(arguments[0] as i32, arguments[1] as i32, arguments[2] as i32));
        }
        sys::__NR_umask => {
            if let Some(state) = state() {
                state.forget_umask();
            }
        }
        sys::__NR_setrlimit | sys::__NR_prlimit64 => forget_limits(),
        sys::__NR_mmap
        | sys::__NR_munmap
        | sys::__NR_mprotect
        | sys::__NR_pkey_mprotect
        | sys::__NR_mremap
        | sys::__NR_shmdt
        | sys::__NR_brk
        | sys::__NR_madvise
        | sys::__NR_ftruncate
        | sys::__NR_truncate => pages::forget(),
        _ => {}
    }
    None
}

/// Whether a `prctl` puts system calls under a filter.
pub fn is_filter(option: usize) -> bool {
    option == prctl::PR_SET_SECCOMP as usize
}

/// To be called before a limit of resources changes, and after.
pub fn forget_limits() {
    if let Some(state) = state() {
        state.forget_limits();
    }
}
