//! Memory that begins on a page, to read into and to write from.
//!
//! What malloc maps begins 16 bytes behind a page. Copies of a file's pages to such a place are 20 times slower on AMD's processors, the
//! kernel's as well as the service's own (`rep movsb` takes its loads for loads of what it has just stored). Most devices do not
//! transfer directly to such a place.

use poolfs_types::limits::BLOCK_SIZE;
use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; BLOCK_SIZE]);

/// Bytes that begin on a page. The default has none.
#[derive(Default)]
pub struct PageBuffer {
    pages: Vec<Page>,
    length: usize,
}

impl PageBuffer {
    /// So many bytes, all zero.
    #[must_use]
    pub fn zeroed(length: usize) -> Self {
        // Without touching what the kernel gives as zeros.
        let Ok(pages) = Page::new_vec_zeroed(length.div_ceil(BLOCK_SIZE)) else {
            handle_alloc_error(Layout::new::<Page>())
        };
        Self { pages, length }
    }

    /// Sets the length, bytes. Bytes that come into it are zero, or what they were when it was last that long.
    pub fn set_length(&mut self, length: usize) {
        let pages = length.div_ceil(BLOCK_SIZE);
        if self.pages.len() < pages {
            self.pages.resize(pages, Page([0; BLOCK_SIZE]));
        }
        self.length = length;
    }
}

impl fmt::Debug for PageBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageBuffer").field("length", &self.length).finish_non_exhaustive()
    }
}

impl Deref for PageBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.length]
    }
}

impl DerefMut for PageBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_on_a_page_and_is_as_long_as_asked() {
        let mut buffer = PageBuffer::default();
        assert!(buffer.is_empty());
        for length in [1, 4095, 4096, 4097, 256 << 10, 10, 0] {
            buffer.set_length(length);
            assert_eq!(buffer.len(), length);
            assert_eq!(buffer.as_ptr().addr() % BLOCK_SIZE, 0);
            buffer.fill(7);
            let fresh = PageBuffer::zeroed(length);
            assert!(fresh.len() == length && fresh.iter().all(|&byte| byte == 0));
            assert_eq!(fresh.as_ptr().addr() % BLOCK_SIZE, 0);
        }
    }
}
