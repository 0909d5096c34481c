//! Memory of the application: the paths and buffers that it passed to libc's names.
//!
//! The kernel is asked which of it can be used before it is touched. What cannot be used is left to the kernel's own call, with its
//! `EFAULT` or its partial transfer.

use crate::raw::PAGE;
use crate::{pages, raw};
use core::ffi::{CStr, c_char};
use poolfs_types::limits::PATH_MAX;

/// Addresses below are never mapped, and those from the second on belong to the kernel.
const USABLE: core::ops::Range<usize> = 4096..1 << 47;

/// Whether something may be at an address.
fn is_usable(address: usize) -> bool {
    USABLE.contains(&address)
}

/// A path as the application passed it.
#[derive(Clone, Copy, Debug)]
pub struct UserPath(*const c_char);

impl UserPath {
    /// The path at `pointer`.
    ///
    /// # Safety
    /// `pointer` is null or leads to a string with a NUL, which nobody changes during the call.
    #[must_use]
    pub const unsafe fn new(pointer: *const c_char) -> Self {
        Self(pointer)
    }

    /// The bytes without their NUL; nothing for memory that cannot be read or a path longer than any the kernel takes.
    #[must_use]
    pub fn bytes(&self) -> Option<&[u8]> {
        self.bytes_at(raw::coarse_time_ns())
    }

    /// The same, at a time by [`raw::coarse_time_ns`].
    #[must_use]
    pub fn bytes_at(&self, now: u64) -> Option<&[u8]> {
        let start = self.address();
        let mut end = start;
        while is_usable(end) && end - start <= PATH_MAX && pages::is_readable_at(end, now) {
            let page_end = (end + 1).next_multiple_of(PAGE);
            // SAFETY: the page can be read, and `new` promised that nobody changes the string, which ends here or goes on
            // beyond the page.
            let bytes = unsafe { core::slice::from_raw_parts(end as *const u8, page_end - end) };
            if let Ok(text) = CStr::from_bytes_until_nul(bytes) {
                let length = end - start + text.to_bytes().len();
                // SAFETY: readable up to here, as above.
                let bytes = unsafe { core::slice::from_raw_parts(self.0.cast::<u8>(), length) };
                return (length <= PATH_MAX).then_some(bytes);
            }
            end = page_end;
        }
        None
    }

    /// What is in memory from the path's first byte to the end of its page, beyond its NUL or not as far; nothing for
    /// memory that cannot be read. At a time by [`raw::coarse_time_ns`].
    #[inline]
    #[must_use]
    pub fn head(&self, now: u64) -> Option<&[u8]> {
        let start = self.address();
        let can_be_read = is_usable(start) && pages::is_readable_at(start, now);
        can_be_read.then(|| self.rest_of_page())
    }

    /// Whether it is a string without a byte, which can be read, at a time by [`raw::coarse_time_ns`].
    #[inline]
    #[must_use]
    pub fn is_empty_at(&self, now: u64) -> bool {
        self.head(now).and_then(<[u8]>::first) == Some(&0)
    }

    /// The same as [`UserPath::head`]; nothing also when the kernel would have to be asked.
    #[inline(always)]
    #[must_use]
    pub fn head_known(&self, now: u64) -> Option<&[u8]> {
        let start = self.address();
        (is_usable(start) && pages::is_known_readable_at(start, now)).then(|| self.rest_of_page())
    }

    #[inline(always)]
    fn rest_of_page(&self) -> &[u8] {
        let length = PAGE - self.address() % PAGE;
        // SAFETY: the two callers found that the page can be read. Behind the string's NUL there may be other things that change: who
        // reads stops there.
        unsafe { core::slice::from_raw_parts(self.0.cast::<u8>(), length) }
    }

    /// The pointer, as an argument for the kernel.
    #[must_use]
    pub fn address(self) -> usize {
        self.0 as usize
    }
}

/// A range of the application's memory, to be read or filled.
#[derive(Clone, Copy, Debug)]
pub struct UserMemory {
    pointer: *mut u8,
    length: usize,
}

impl UserMemory {
    /// `length` bytes at `pointer`.
    ///
    /// # Safety
    /// The range is the application's to be used in the way of the call it is passed to: filled by reads, read by
    /// writes. A null pointer is allowed.
    #[must_use]
    pub const unsafe fn new(pointer: *mut u8, length: usize) -> Self {
        Self { pointer, length }
    }

    /// Bytes of the range.
    #[must_use]
    pub const fn length(self) -> usize {
        self.length
    }

    /// The pointer, as an argument for the kernel.
    #[must_use]
    pub fn address(self) -> usize {
        self.pointer as usize
    }

    /// Whether the pointer is null.
    #[must_use]
    pub fn is_null(self) -> bool {
        self.pointer.is_null()
    }

    /// Whether nothing can be there.
    #[must_use]
    pub fn is_impossible(self) -> bool {
        !is_usable(self.address()) || self.address().checked_add(self.length).is_none_or(|end| end > USABLE.end)
    }

    /// Whether all of it can be read.
    #[must_use]
    pub fn is_readable(self) -> bool {
        self.length == 0 || (!self.is_impossible() && pages::are_readable(self.address(), self.length))
    }

    /// Whether all of it can be written.
    #[inline]
    #[must_use]
    pub fn is_writable(self) -> bool {
        self.length == 0 || (!self.is_impossible() && pages::are_writable(self.address(), self.length))
    }

    /// The part from `offset` on, at most `length` bytes of it.
    #[must_use]
    pub fn part(self, offset: usize, length: usize) -> Self {
        let offset = offset.min(self.length);
        Self { pointer: self.pointer.wrapping_add(offset), length: length.min(self.length - offset) }
    }

    /// Writes one structure; says whether it fits and the memory can be written.
    #[inline]
    pub fn put<T: Copy>(self, value: T) -> bool {
        let length = size_of::<T>();
        let fits = length <= self.length && self.part(0, length).is_writable();
        if fits {
            // SAFETY: the range is writable by `new`; C structures may stand at any address here.
            unsafe { self.pointer.cast::<T>().write_unaligned(value) };
        }
        fits
    }

    /// Reads one structure of numbers, when the range holds one and can be read.
    #[must_use]
    pub fn get<T: zerocopy::FromBytes + Copy>(self) -> Option<T> {
        self.part(0, size_of::<T>()).is_readable().then(|| self.get_readable())?
    }

    /// The same, of memory that is known to be readable.
    #[must_use]
    pub fn get_readable<T: zerocopy::FromBytes + Copy>(self) -> Option<T> {
        if self.is_impossible() || size_of::<T>() > self.length {
            return None;
        }
        // SAFETY: the range is readable by `new`, and any bytes are a valid `T`.
        Some(unsafe { self.pointer.cast::<T>().read_unaligned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_stay_inside() {
        let mut bytes = [0_u8; 10];
        // SAFETY: a local array.
        let memory = unsafe { UserMemory::new(bytes.as_mut_ptr(), bytes.len()) };
        assert_eq!(memory.part(4, 100).length(), 6);
        assert_eq!(memory.part(11, 1).length(), 0);
        assert!(!memory.part(8, 2).put(7_u64));
        assert!(memory.part(8, 2).put(7_u8));
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 7, 0]);
    }

    #[test]
    fn a_path_of_4096_bytes_is_left_to_the_kernel() {
        let long = [vec![b'a'; PATH_MAX + 1], vec![0]].concat();
        // SAFETY: terminated.
        assert_eq!(unsafe { UserPath::new(long.as_ptr().cast()) }.bytes(), None);
        // SAFETY: terminated.
        assert_eq!(unsafe { UserPath::new(long[1..].as_ptr().cast()) }.bytes().map(<[u8]>::len), Some(PATH_MAX));
        // SAFETY: null is allowed.
        assert_eq!(unsafe { UserPath::new(core::ptr::null()) }.bytes(), None);
    }
}
