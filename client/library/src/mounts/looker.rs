//! Detection of mount changes by `poll` on mountinfo files: the kernel reports a change to each open file once.
//!
//! One caller at a time uses a looker, so that no report is lost between two callers. There are a few, so that a caller that is stopped
//! does not send all others to the kernel.

use crate::signals::SignalsHeld;
use crate::{process, raw};
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use linux_raw_sys::general as sys;
use poolfs_ipc::OWN_DESCRIPTOR_MIN;
use poolfs_ipc::hold::{Frame, Hold};

/// Lookers of one process; the second and further ones are opened only when threads meet.
pub const LOOKERS: usize = 4;

/// Descriptors (plus one) and inodes of this process's mountinfo files, which a forked child still has although its state
/// is gone.
static INHERITABLE: [(AtomicI32, AtomicU64); LOOKERS] = [const { (AtomicI32::new(0), AtomicU64::new(0)) }; LOOKERS];

/// One open mountinfo file.
#[repr(C)]
pub struct Looker {
    used: Hold,
    /// The descriptor, plus one.
    file: AtomicI32,
    inode: AtomicU64,
}

/// A looker in use by one caller.
pub struct Look<'a> {
    looker: &'a Looker,
    index: usize,
}

/// A free looker, if there is one.
pub fn take(lookers: &[Looker; LOOKERS], frame: Frame) -> Option<Look<'_>> {
    let mut all = lookers.iter().enumerate();
    let taken = all.clone().find(|(_, looker)| looker.used.take(frame));
    let taken = taken.or_else(|| all.find(|(_, looker)| looker.used.take_or_recover(frame)));
    taken.map(|(index, looker)| Look { looker, index })
}

impl Looker {
    /// Its descriptor, if it has one.
    pub fn descriptor(&self) -> Option<i32> {
        self.file.load(Ordering::Relaxed).checked_sub(1).filter(|&file| file >= 0)
    }
}

impl Look<'_> {
    /// Whether mounts may have changed since this looker was last asked; also when it cannot tell.
    pub fn sees_change(&self) -> bool {
        let Some(file) = self.looker.descriptor() else { return true };
        // The program may have closed our number and got it back for something else.
        let inode = self.looker.inode.load(Ordering::Relaxed);
        if !raw::statx_descriptor(file).is_ok_and(|found| found.stx_ino == inode) {
            self.looker.file.store(0, Ordering::Relaxed);
            return true;
        }
        let changed = (sys::POLLPRI | sys::POLLERR) as i16;
        raw::poll_now(file, changed).is_ok_and(|events| events & changed != 0)
    }

    /// The open mountinfo file, opened when there is none.
    pub fn file(&self) -> Option<i32> {
        if let Some(file) = self.looker.descriptor() {
            return Some(file);
        }
        // A file that is left by a jump before it is written down stays open for good.
        let _held = SignalsHeld::hold();
        let opened = raw::open_read(c"/proc/self/mountinfo").ok()?;
        let file = raw::move_up(opened, OWN_DESCRIPTOR_MIN).unwrap_or(opened);
        let Ok(found) = raw::statx_descriptor(file) else {
            raw::close(file);
            return None;
        };
        process::note_own_descriptor(file);
        self.looker.inode.store(found.stx_ino, Ordering::Relaxed);
        self.looker.file.store(file + 1, Ordering::Relaxed);
        let (number, inode) = &INHERITABLE[self.index];
        inode.store(found.stx_ino, Ordering::Relaxed);
        number.store(file + 1, Ordering::Relaxed);
        Some(file)
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        self.looker.used.give_back();
    }
}

/// Closes the mountinfo files that a forked child inherited: they share their offsets with the parent's.
pub fn close_inherited() {
    for (number, inode) in &INHERITABLE {
        let number = number.swap(0, Ordering::Relaxed) - 1;
        let inode = inode.load(Ordering::Relaxed);
        if number >= 0 && raw::statx_descriptor(number).is_ok_and(|found| found.stx_ino == inode) {
            raw::close(number);
        }
    }
}
