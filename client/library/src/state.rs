//! The state of the library in one process: one mapping that a forked child finds empty.
//!
//! Everything that belongs to a session or follows from a description's history is in [`State`], which the kernel wipes at fork
//! (`MADV_WIPEONFORK`). So a child starts empty, whoever made it, and needs no handler that runs in it.
//!
//! A child of `vfork` shares this memory until it executes a program. It has its own descriptors, and may have other rights and another
//! root than its parent. It uses nothing of the state ([`State::is_own_process`]), but may clear entries.

use crate::descriptors::Descriptors;
use crate::life::{Began, Life, Turn};
use crate::mounts::{self, Mounts};
use crate::session::{self, Sessions};
use crate::signals::SignalsHeld;
use crate::{mapping_slots, off, process, raw, trace, window};
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use poolfs_ipc::hold::Frame;

/// Bit of [`State::umask`] that says the rest is known.
const KNOWN: u32 = 1 << 31;

/// The library's state. All zeros is a valid one: the state of a process that has done nothing yet.
#[repr(C)]
pub struct State {
    /// Which life of the mapping this is, once it is set up.
    life: Life,
    process: AtomicU32,
    umask: AtomicU32,
    file_size: AtomicU32,
    /// Sessions, one per instance.
    pub sessions: Sessions,
    /// Where instances are mounted.
    pub mounts: Mounts,
    /// What is known of each descriptor.
    pub descriptors: Descriptors,
}

/// One call under way: the state, and where the call stands, for what it takes while it runs.
#[derive(Clone, Copy)]
pub struct Call {
    /// The state.
    pub state: &'static State,
    /// Where it began.
    pub began: Began,
}

impl Call {
    /// The calling function's call, or nothing when the kernel is to do everything.
    #[inline(always)]
    #[must_use]
    pub fn begin() -> Option<Self> {
        let state = state().filter(|state| state.is_own_process())?;
        Began::now(Frame::here(), &state.life).map(|began| Self { state, began })
    }
}

static STATE: AtomicPtr<State> = AtomicPtr::new(core::ptr::null_mut());

/// The state, or nothing when the kernel is to do everything.
#[inline]
pub fn state() -> Option<&'static State> {
    let state = STATE.load(Ordering::Acquire);
    if !state.is_null() && off::is_on() {
        // SAFETY: the mapping is never given back, and zeros or what was stored there are a valid `State`.
        let state = unsafe { &*state };
        if state.is_set_up() {
            return Some(state);
        }
    }
    set_up()
}

/// The state as it stands, also when the library is off; nothing when there is none yet.
pub fn state_if_mapped() -> Option<&'static State> {
    // SAFETY: as in `state`.
    let state = unsafe { STATE.load(Ordering::Acquire).as_ref() }?;
    state.is_set_up().then_some(state)
}

/// Writes the report ([`trace::report`]) at the end of the process, not of one that only runs in its memory.
pub fn report() {
    if state_if_mapped().is_none_or(|state| state.is_own_process()) {
        trace::report();
    }
}

/// Runs `fork`, in a signal handler that may have interrupted a call of this library. The child goes on with that call, too: it
/// gets to know that the session is not its own, and leaves the call to the kernel, for which it needs what its parent's call
/// stood on. Everything after that call begins anew, as in any other child.
pub fn forking(fork: impl FnOnce() -> i32) -> i32 {
    let Some(state) = state_if_mapped().filter(|state| state.sessions.is_interrupted()) else { return fork() };
    let memory = core::ptr::from_ref(state).cast_mut().cast::<u8>();
    // Without it the child ends where it goes on, as it would anyway.
    let kept = raw::wipe_on_fork(memory, size_of::<State>(), false).is_ok();
    let result = fork();
    if result != 0 || !kept {
        // It was possible when the state was made.
        raw::wipe_on_fork(memory, size_of::<State>(), true).ok();
        return result;
    }
    for (address, length) in state.sessions.ranges() {
        // What is mapped there already is not the session's, and no call goes on there.
        raw::map_zeros(address, length).ok();
    }
    STATE.store(core::ptr::null_mut(), Ordering::Release);
    state.life.end();
    result
}

#[cold]
fn set_up() -> Option<&'static State> {
    if !off::settle(may_be_used) {
        return None;
    }
    // Nobody else ends what a jump left half set up.
    let _held = SignalsHeld::hold();
    let state = mapped()?;
    match state.life.begin() {
        Turn::Own => {
            session::close_inherited();
            mounts::close_inherited();
            window::clear_inherited();
            mapping_slots::clear_inherited();
            state.process.store(raw::process_id(), Ordering::Relaxed);
            trace::start();
            state.life.has_begun();
            Some(state)
        }
        // Nobody waits.
        Turn::Others => None,
        Turn::Nobodys => Some(state),
    }
}

/// Whether this program may use the library at all.
fn may_be_used() -> bool {
    process::environment("POOLFS_OFF").is_none_or(<[u8]>::is_empty) && !process::runs_secure()
}

fn mapped() -> Option<&'static State> {
    let mut state = STATE.load(Ordering::Acquire);
    if state.is_null() {
        let fresh = raw::map_wiped_on_fork(size_of::<State>()).ok()?.cast::<State>();
        match STATE.compare_exchange(core::ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => state = fresh,
            Err(others) => {
                // SAFETY: nobody has seen our mapping.
                unsafe { raw::unmap(fresh.cast(), size_of::<State>()) };
                state = others;
            }
        }
    }
    // SAFETY: page-aligned zeros of the right length, never unmapped.
    Some(unsafe { &*state })
}

impl State {
    #[inline]
    fn is_set_up(&self) -> bool {
        self.life.is_there()
    }

    /// Whether the caller is the process this state belongs to, and not its `vfork` child. A system call once there may be one.
    pub fn is_own_process(&self) -> bool {
        !process::shares_memory() || self.process.load(Ordering::Relaxed) == raw::process_id()
    }

    /// The file creation mask.
    pub fn umask(&self) -> Option<u32> {
        let known = self.umask.load(Ordering::Relaxed);
        if known & KNOWN != 0 {
            return Some(known & !KNOWN);
        }
        let mask = process::read_umask()?;
        // A change in between has set it back to unknown, and stays.
        self.umask.compare_exchange(known, mask | KNOWN, Ordering::Relaxed, Ordering::Relaxed).ok();
        Some(mask)
    }

    /// Says that the mask is about to change, or has.
    pub fn forget_umask(&self) {
        // Another value each time, so that a reader in between does not take the old mask for the new one.
        let before = self.umask.load(Ordering::Relaxed);
        self.umask.store(if before & KNOWN != 0 { 0 } else { (before + 1) & !KNOWN }, Ordering::Relaxed);
    }

    /// Whether writes have to go to the kernel because it limits the size of files.
    pub fn file_size_limited(&self) -> bool {
        const LIMITED: u32 = 1;
        const UNLIMITED: u32 = 2;
        match self.file_size.load(Ordering::Relaxed) {
            LIMITED => true,
            UNLIMITED => false,
            _ => {
                let limited = process::file_size_limited();
                self.file_size.store(if limited { LIMITED } else { UNLIMITED }, Ordering::Relaxed);
                limited
            }
        }
    }

    /// Says that a limit of resources changes.
    pub fn forget_limits(&self) {
        self.file_size.store(0, Ordering::Relaxed);
    }
}
