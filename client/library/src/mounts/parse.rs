//! The parser of `/proc/self/mountinfo`, which fills a [`Table`].

use super::table::{New, Table, components};
use crate::instance_name::InstanceName;
use crate::raw;
use core::ffi::CStr;
use linux_raw_sys::general as sys;
use poolfs_ipc::wire::{MOUNT_SOURCE_PREFIX, MOUNT_TYPE};

/// Room for one piece of the file. Of a longer line (an overlay of many directories) only the beginning is looked at.
const PIECE: usize = 16 * 1024;

/// Longest path of a mount point that is taken.
const PATH_BYTES: usize = 1024;

/// The option of a FUSE filesystem that root has mounted, as every service does.
const OF_ROOT: &[u8] = b"user_id=0";

/// Working memory of one reading.
#[repr(C)]
pub struct Scratch {
    piece: [u8; PIECE],
    point: [u8; PATH_BYTES],
    root: [u8; PATH_BYTES],
}

/// One line.
#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    id: u64,
    device: (u32, u32),
    root: &'a [u8],
    point: &'a [u8],
    read_only: bool,
    /// The instance's name, when the mount is one of ours.
    instance: Option<&'a [u8]>,
}

/// Fills the table from the open mountinfo file; nothing when that is not possible.
///
/// The instances' mounts first, then whatever is mounted below them: those are in the way of a path.
pub fn fill(table: &mut Table, scratch: &mut Scratch, file: i32) -> Option<()> {
    table.clear();
    let Scratch { piece, point, root } = scratch;
    let mut ours = |line: &Line<'_>| -> Option<()> {
        let Some(instance) = line.instance.and_then(InstanceName::new) else { return Some(()) };
        // One at a place too long for the table is left to the kernel.
        let (Some(length), Some(root_length)) = (decode(line.point, point).whole(), decode(line.root, root).whole())
        else {
            return Some(());
        };
        if !is_reached(point, length, line.id) {
            return Some(());
        }
        let new = New {
            id: line.id,
            device: line.device,
            instance,
            read_only: line.read_only,
            point: &point[..length],
            root: &root[..root_length],
        };
        table.add(&new).ok()
    };
    let mut lines = Lines::of(file, piece);
    lines.for_each(&mut ours)?;
    let instances = table.points().len();
    let mut others = |line: &Line<'_>| -> Option<()> {
        let known = &table.points()[..instances];
        if known.iter().any(|ours| ours.id == line.id) {
            return Some(());
        }
        let decoded = decode(line.point, point);
        let below = known.iter().any(|ours| {
            let mut path = components(&point[..decoded.length]);
            let mut prefix = components(table.place(ours));
            prefix.all(|name| path.next() == Some(name)) && path.next().is_some()
        });
        if !below {
            return Some(());
        }
        let length = decoded.whole()?;
        let new = New {
            id: line.id,
            device: line.device,
            instance: InstanceName::NONE,
            read_only: false,
            point: &point[..length],
            root: b"/",
        };
        table.add(&new).ok()
    };
    if instances > 0 { lines.for_each(&mut others) } else { Some(()) }
}

/// Whether a path really leads to the mount, for this process: nothing is mounted over it, and it may search what
/// leads there. `point` has room for a NUL after `length`.
fn is_reached(point: &mut [u8; PATH_BYTES], length: usize, id: u64) -> bool {
    let Some(end) = point.get_mut(length) else { return false };
    *end = 0;
    let Ok(path) = CStr::from_bytes_until_nul(point) else { return false };
    let flags = sys::AT_NO_AUTOMOUNT | sys::AT_STATX_DONT_SYNC | sys::AT_SYMLINK_NOFOLLOW;
    raw::statx(sys::AT_FDCWD, path, flags).is_ok_and(|found| found.stx_mnt_id == id)
}

/// The lines of the file, which is read once only when there is room for all of it: the kernel goes through every mount of the machine
/// each time, also those that this process cannot reach.
struct Lines<'a> {
    file: i32,
    piece: &'a mut [u8; PIECE],
    /// Bytes of the whole file, which is in `piece`.
    whole: Option<usize>,
}

impl<'a> Lines<'a> {
    fn of(file: i32, piece: &'a mut [u8; PIECE]) -> Self {
        Self { file, piece, whole: None }
    }

    fn for_each(&mut self, take: &mut dyn FnMut(&Line<'_>) -> Option<()>) -> Option<()> {
        let mut taken = false;
        if let Some(length) = self.whole {
            return (take_lines(&self.piece[..length], &mut taken, take)? == length).then_some(());
        }
        raw::seek(self.file, 0, sys::SEEK_SET).ok()?;
        let mut is_begin = true;
        let mut held = 0;
        loop {
            let has_ended = loop {
                let room = self.piece.get_mut(held..)?;
                if room.is_empty() {
                    break false;
                }
                match raw::read(self.file, room).ok()? {
                    0 => break true,
                    got => held += got,
                }
            };
            let mut start = take_lines(&self.piece[..held], &mut taken, take)?;
            if has_ended {
                self.whole = is_begin.then_some(held);
                return (start == held).then_some(());
            }
            if start == 0 {
                if !taken {
                    take(&parse_line(&self.piece[..])?)?;
                }
                taken = true;
                start = held;
            }
            self.piece.copy_within(start..held, 0);
            held -= start;
            is_begin = false;
        }
    }
}

/// Has the whole lines taken, but for the first if that was `taken` already; the bytes they are.
fn take_lines(bytes: &[u8], taken: &mut bool, take: &mut dyn FnMut(&Line<'_>) -> Option<()>) -> Option<usize> {
    let mut start = 0;
    while let Some(length) = bytes[start..].iter().position(|&byte| byte == b'\n') {
        if !core::mem::replace(taken, false) {
            // A line this reader does not understand is no mount of ours, but may be in the way of one.
            take(&parse_line(&bytes[start..start + length])?)?;
        }
        start += length + 1;
    }
    Some(start)
}

/// `36 35 98:0 /root /point rw,noatime shared:1 - type source options`
fn parse_line(line: &[u8]) -> Option<Line<'_>> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = number(fields.next()?)?;
    fields.next()?;
    let mut device = fields.next()?.split(|&byte| byte == b':');
    let device = (number(device.next()?)? as u32, number(device.next()?)? as u32);
    let (root, point, options) = (fields.next()?, fields.next()?, fields.next()?);
    fields.find(|field| *field == b"-")?;
    let (kind, source, of_filesystem) = (fields.next()?, fields.next()?, fields.next()?);
    // Whoever is not root may give a mount of its own any type and name, by fusermount; this number it may not choose.
    let ours =
        kind == MOUNT_TYPE.as_bytes() && of_filesystem.split(|&byte| byte == b',').any(|option| option == OF_ROOT);
    Some(Line {
        id,
        device,
        root,
        point,
        read_only: options.split(|&byte| byte == b',').any(|option| option == b"ro"),
        instance: source.strip_prefix(MOUNT_SOURCE_PREFIX.as_bytes()).filter(|_| ours),
    })
}

fn number(digits: &[u8]) -> Option<u64> {
    core::str::from_utf8(digits).ok()?.parse().ok()
}

/// A decoded path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decoded {
    length: usize,
    whole: bool,
}

impl Decoded {
    /// Its length, unless it is only the beginning of a longer one.
    fn whole(self) -> Option<usize> {
        self.whole.then_some(self.length)
    }
}

/// Undoes the kernel's octal escapes, as far as there is room.
fn decode(escaped: &[u8], out: &mut [u8; PATH_BYTES]) -> Decoded {
    let (mut from, mut length) = (0, 0);
    while let Some(&byte) = escaped.get(from) {
        let octal = match (byte, escaped.get(from + 1..from + 4)) {
            (b'\\', Some(digits)) if digits.iter().all(|digit| (b'0'..=b'7').contains(digit)) => Some(digits),
            _ => None,
        };
        // One byte stays free for a NUL.
        let Some(place) = out[..PATH_BYTES - 1].get_mut(length) else { return Decoded { length, whole: false } };
        *place = match octal {
            Some(digits) => digits.iter().fold(0_u32, |value, digit| value << 3 | u32::from(digit - b'0')) as u8,
            None => byte,
        };
        from += if octal.is_some() { 4 } else { 1 };
        length += 1;
    }
    Decoded { length, whole: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn lines_are_understood() {
        let line = b"36 35 0:98 / /mnt/a\\040b rw,noatime shared:1 master:2 - fuse.poolfs poolfs:tree rw,user_id=0";
        let parsed = parse_line(line).expect("a line");
        assert_eq!(parsed.id, 36);
        assert_eq!(parsed.device, (0, 98));
        assert_eq!(parsed.instance, Some(&b"tree"[..]));
        assert!(!parsed.read_only);
        let foreign = parse_line(b"1 0 8:1 / / ro - ext4 poolfs:tree rw").expect("a line");
        assert!(foreign.instance.is_none() && foreign.read_only);
        for options in ["rw", "rw,user_id=1000,group_id=0", "rw,user_id=01", "rw,xuser_id=0", ""] {
            let line = std::format!("36 35 0:98 / /mnt/a rw - fuse.poolfs poolfs:tree {options}");
            assert_eq!(parse_line(line.as_bytes()).expect("a line").instance, None, "{options}");
        }
        assert_eq!(parse_line(b"1 0 8:1 / / ro ext4"), None);
        assert_eq!(parse_line(b""), None);
    }

    #[test]
    fn escapes_are_undone_and_lengths_bounded() {
        let mut out = [0; PATH_BYTES];
        let length = decode(b"/mnt/a\\040b\\134", &mut out).whole().expect("short");
        assert_eq!(&out[..length], b"/mnt/a b\\");
        assert_eq!(decode(b"/x\\04", &mut out).whole(), Some(5));
        assert_eq!(decode(&[b'a'; PATH_BYTES], &mut out), Decoded { length: PATH_BYTES - 1, whole: false });
    }

    #[test]
    fn a_line_longer_than_a_piece_hides_no_other() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let long = "x".repeat(3 * PIECE);
        writeln!(file, "20 1 0:5 / /over rw - overlay overlay rw,lowerdir={long}").expect("written");
        writeln!(file, "21 1 0:6 / /mnt/a rw - fuse.poolfs poolfs:a rw,user_id=0,group_id=0").expect("written");
        let mut lines = std::vec::Vec::new();
        let mut piece = std::boxed::Box::new([0; PIECE]);
        let mut read = Lines::of(file.as_file().as_raw_fd(), &mut piece);
        for _ in 0..2 {
            let mut push = |line: &Line<'_>| {
                lines.push((line.id, line.instance.is_some()));
                Some(())
            };
            read.for_each(&mut push).expect("readable");
        }
        assert_eq!(lines, [(20, false), (21, true)].repeat(2));
        assert_eq!(read.whole, None);
    }

    #[test]
    fn what_there_is_room_for_is_read_once() {
        for (count, is_once) in [(0, true), (300, true), (500, false)] {
            let mut file = tempfile::NamedTempFile::new().expect("a file");
            for id in 0..count {
                writeln!(file, "{id:03} 1 0:5 / /mnt/{id:03} rw - tmpfs tmpfs rw").expect("written");
            }
            let mut piece = std::boxed::Box::new([0; PIECE]);
            let mut read = Lines::of(file.as_file().as_raw_fd(), &mut piece);
            let mut again = |is_there: bool| {
                let mut ids = std::vec::Vec::new();
                let mut push = |line: &Line<'_>| {
                    ids.push(line.id);
                    Some(())
                };
                read.for_each(&mut push).expect("readable");
                assert_eq!(ids, if is_there { (0..count).collect() } else { std::vec![] });
            };
            again(true);
            again(true);
            file.as_file().set_len(0).expect("emptied");
            again(is_once);
        }
    }

    #[test]
    fn this_processes_mounts_are_read() {
        let file = raw::open_read(c"/proc/self/mountinfo").expect("mountinfo");
        let mut piece = std::boxed::Box::new([0; PIECE]);
        let mut lines = 0;
        let mut count = |_: &Line<'_>| {
            lines += 1;
            Some(())
        };
        Lines::of(file, &mut piece).for_each(&mut count).expect("readable");
        raw::close(file);
        assert!(lines > 0);
    }
}
