//! Start and end of the process, and libc's names that share its descriptions with others or change its rights.

use crate::macros::memory;
use crate::next::{Next, announce_and_go_on, missing};
use core::ffi::{c_int, c_void};
use linux_raw_sys::general as sys;
use poolfs_client::rights::{self, Change};
use poolfs_client::{raw, state};

/// Run by the loader before the program's own code, so that the first call finds everything set up.
extern "C" fn begin() {
    state::state();
}

extern "C" fn end() {
    state::report();
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

fn sharing(_: usize, _: usize, _: usize) {
    rights::before(Change::Sharing);
}

fn sharing_memory(_: usize, _: usize, _: usize) {
    rights::before(Change::SharingMemory);
}

fn sending(_: usize, message: usize, _: usize) {
    if rights::carries_control(memory(message as *const c_void, rights::MESSAGE_BYTES)) {
        rights::before(Change::Sharing);
    }
}

fn executing(_: usize, _: usize, _: usize) {
    rights::before(Change::Program);
}

fn view(_: usize, _: usize, _: usize) {
    rights::before(Change::View);
}

fn process_control(option: usize, _: usize, _: usize) {
    if rights::is_filter(option) {
        rights::before(Change::View);
    }
}

announce_and_go_on! { sharing:
    posix_spawn c"posix_spawn", posix_spawnp c"posix_spawnp", system c"system", popen c"popen",
    forkpty c"forkpty", daemon c"daemon", wordexp c"wordexp", sendmmsg c"sendmmsg",
}

announce_and_go_on! { executing:
    execve c"execve", execv c"execv", execvp c"execvp", execvpe c"execvpe", execl c"execl", execlp c"execlp", execle c"execle",
    execveat c"execveat", fexecve c"fexecve",
}

/// Functions that make a copy of the process.
macro_rules! forking {
    ($($name:ident $text:literal),+ $(,)?) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name() -> c_int {
                static NEXT: Next = Next::new($text);
                let next = NEXT.address();
                if next.is_null() {
                    return missing() as c_int;
                }
                // SAFETY: libc's function of this name takes nothing and returns an int.
                let next: extern "C" fn() -> c_int = unsafe { core::mem::transmute(next) };
                rights::before(Change::Sharing);
                state::forking(|| next())
            }
        )+
    };
}

forking! { fork c"fork", _Fork c"_Fork" }

announce_and_go_on! { sharing_memory:
    vfork c"vfork", __vfork c"__vfork", clone c"clone", __clone c"__clone",
}

announce_and_go_on! { sending: sendmsg c"sendmsg" }

/// Functions that change the ids of the whole process. They return once, and something is to be done after them.
macro_rules! identity {
    ($($name:ident $text:literal),+ $(,)?) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name(a: usize, b: usize, c: usize) -> c_int {
                static NEXT: Next = Next::new($text);
                let next = NEXT.address();
                if next.is_null() {
                    return missing() as c_int;
                }
                // SAFETY: libc's function of this name takes at most three numbers or pointers and returns an int.
                let next: extern "C" fn(usize, usize, usize) -> c_int = unsafe { core::mem::transmute(next) };
                rights::before(Change::Identity);
                let result = next(a, b, c);
                rights::after_identity();
                result
            }
        )+
    };
}

identity! {
    setuid c"setuid", setgid c"setgid", seteuid c"seteuid", setegid c"setegid", setreuid c"setreuid",
    setregid c"setregid", setresuid c"setresuid", setresgid c"setresgid", setgroups c"setgroups",
    initgroups c"initgroups",
}

announce_and_go_on! { view:
    setfsuid c"setfsuid", setfsgid c"setfsgid", capset c"capset", unshare c"unshare", setns c"setns",
    chroot c"chroot", pivot_root c"pivot_root",
}

announce_and_go_on! { process_control: prctl c"prctl" }

/// Ends the process at once, without a word to libc.
pub fn abort() -> ! {
    const SIGABRT: c_int = 6;
    // SAFETY: calls without pointers.
    unsafe { raw::system_call(sys::__NR_kill, [raw::process_id() as usize, SIGABRT as usize, 0, 0, 0, 0]) };
    exit_by_kernel(128 + SIGABRT)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _exit(status: c_int) -> ! {
    state::report();
    exit_by_kernel(status)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _Exit(status: c_int) -> ! {
    state::report();
    exit_by_kernel(status)
}

fn exit_by_kernel(status: c_int) -> ! {
    loop {
        // SAFETY: a call without pointers.
        unsafe { raw::system_call(sys::__NR_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
}
