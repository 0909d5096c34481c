//! Test of times at the ends of their range, set through the kernel: whatever a program sets, the service goes on.

use crate::harness::{Running, isolated};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

#[test]
fn no_time_that_a_program_sets_ends_a_thread_of_the_service() {
    isolated("times::no_time_that_a_program_sets_ends_a_thread_of_the_service", |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        let path = at.join("f");
        fs::write(&path, b"x").expect("write");
        let file = File::options().write(true).open(&path).expect("open");
        let seconds = [i64::MIN, i64::MIN + 1, -1, 0, i64::MAX - 1, i64::MAX];
        // More often than there are threads: one that ends each time would leave none.
        for _ in 0..40 {
            for tv_sec in seconds {
                for tv_nsec in [0, 1, 999_999_999] {
                    let times = [libc::timespec { tv_sec, tv_nsec }; 2];
                    // SAFETY: the call reads two times, which live here.
                    let result = unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) };
                    // The file system below may refuse them; EIO is what the kernel gets from a thread that has ended.
                    let error = std::io::Error::last_os_error().raw_os_error();
                    assert!(result == 0 || error != Some(libc::EIO), "{tv_sec} {tv_nsec}");
                    assert_eq!(fs::metadata(&path).expect("the service answers").size(), 1);
                }
            }
        }
        let times = [libc::timespec { tv_sec: -2, tv_nsec: 250_000_000 }; 2];
        // SAFETY: as above.
        assert_eq!(unsafe { libc::futimens(file.as_raw_fd(), times.as_ptr()) }, 0);
        let now = fs::metadata(&path).expect("stat");
        assert_eq!((now.mtime(), now.mtime_nsec()), (-2, 250_000_000));
    });
}
