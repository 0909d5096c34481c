//! The definitions of the next library in the search order (libc's own), for what only libc can do.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use poolfs_client::weak_symbol;

/// `RTLD_NEXT`: the first definition after the calling library's.
const NEXT: *mut c_void = -1_isize as *mut c_void;

/// A function of the next library, looked up once.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// The function of that name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// Its address; null when there is none.
    pub fn address(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        let dlsym = weak_symbol!("dlsym");
        if dlsym.is_null() {
            return core::ptr::null_mut();
        }
        // SAFETY: the loader's function of that name has this type.
        let dlsym: extern "C" fn(*mut c_void, *const c_char) -> *mut c_void = unsafe { core::mem::transmute(dlsym) };
        let found = dlsym(NEXT, self.name.as_ptr());
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Defines names of libc that first run `$hook` (with the call's first three arguments) and then go on in libc itself, with
/// stack and registers as the caller left them: so `vfork` may return twice, and `clone` on another stack.
macro_rules! announce_and_go_on {
    ($hook:path: $($name:ident $text:literal),+ $(,)?) => {
        $(
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name() {
                extern "C" fn enter(a: usize, b: usize, c: usize) -> *mut core::ffi::c_void {
                    static NEXT: $crate::next::Next = $crate::next::Next::new($text);
                    $hook(a, b, c);
                    let next = NEXT.address();
                    if next.is_null() { $crate::next::missing as *mut core::ffi::c_void } else { next }
                }
                core::arch::naked_asm!(
                    "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                    "call {enter}",
                    "mov r11, rax",
                    "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                    "jmp r11",
                    enter = sym enter,
                )
            }
        )+
    };
}
pub(crate) use announce_and_go_on;

/// What a function does that no library behind ours has.
pub extern "C" fn missing() -> isize {
    const ENOSYS: isize = 38;
    poolfs_client::errno::convert(-ENOSYS)
}
