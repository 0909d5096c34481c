//! Paths of open files, as `/proc` tells them.

use crate::raw;
use core::fmt::Write;

/// What the kernel calls the file behind a descriptor, when it has a path and that is shorter than `room`.
pub fn path_of(descriptor: i32, room: &mut [u8]) -> Option<&[u8]> {
    let mut link = LinkName { bytes: [0; 32], length: 0 };
    write!(link, "/proc/self/fd/{descriptor}\0").ok()?;
    let link = core::ffi::CStr::from_bytes_until_nul(&link.bytes).ok()?;
    let length = raw::read_link(link, room).ok().filter(|&length| length < room.len())?;
    room.get(..length).filter(|path| path.first() == Some(&b'/'))
}

struct LinkName {
    bytes: [u8; 32],
    length: usize,
}

impl Write for LinkName {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.length + text.len();
        self.bytes.get_mut(self.length..end).ok_or(core::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}
