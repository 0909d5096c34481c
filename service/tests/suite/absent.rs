//! Memory that does not come: with it a program can keep what it does in the kernel for any time.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

const PAGE: usize = 4096;

/// Memory that does not come until it is let.
pub struct Absent {
    faults: Mutex<Option<OwnedFd>>,
    page: *mut libc::c_void,
}

// SAFETY: the page belongs to whoever has this, and only the kernel reads and writes it: no reference to it is ever made.
unsafe impl Send for Absent {}
// SAFETY: as above; the kernel may be asked for both at once.
unsafe impl Sync for Absent {}

impl Absent {
    pub fn new() -> Self {
        const API: libc::c_ulong = 0xc018_aa3f;
        const REGISTER: libc::c_ulong = 0xc020_aa00;
        const MISSING: u64 = 1;
        // SAFETY: the call takes no pointers.
        let faults = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        assert!(faults >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: a new descriptor, which nothing else has.
        let faults = unsafe { OwnedFd::from_raw_fd(faults as i32) };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) };
        assert_ne!(page, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let mut api = [0xaa_u64, 0, 0];
        let mut register = [page.addr() as u64, PAGE as u64, MISSING, 0];
        // SAFETY: both calls read and write exactly these words.
        let done = unsafe {
            [
                libc::ioctl(faults.as_raw_fd(), API, api.as_mut_ptr()),
                libc::ioctl(faults.as_raw_fd(), REGISTER, register.as_mut_ptr()),
            ]
        };
        assert_eq!(done, [0, 0], "{}", std::io::Error::last_os_error());
        Self { faults: Mutex::new(Some(faults)), page }
    }

    /// Comes back when somebody waits for it.
    pub fn await_fault(&self) {
        let faults = self.faults.lock().expect("unpoisoned");
        let mut waiting = [PollFd::new(faults.as_ref().expect("it does not come yet"), PollFlags::IN)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut waiting, Some(&limit)).expect("polled"), 1, "nobody waits for it");
        assert_eq!(waiting[0].revents(), PollFlags::IN);
    }

    pub fn let_come(&self) {
        self.faults.lock().expect("unpoisoned").take();
    }

    /// Writes a byte from there to the beginning of `file`; how many were written.
    pub fn write_to(&self, file: &File) -> isize {
        // SAFETY: the page is mapped as long as `self` lives, and the kernel only reads it.
        unsafe { libc::pwrite(file.as_raw_fd(), self.page, 1, 0) }
    }

    /// Lists the directory `file` into it; how many bytes came.
    pub fn list(&self, file: &File) -> isize {
        // SAFETY: the page is mapped as long as `self` lives, and nobody refers to what the kernel writes there.
        unsafe { libc::syscall(libc::SYS_getdents64, file.as_raw_fd(), self.page, PAGE) as isize }
    }
}

impl Drop for Absent {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing refers to it any more.
        unsafe { libc::munmap(self.page, PAGE) };
    }
}
