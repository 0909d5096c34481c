//! The body of an answer under construction, in the thread's own buffer, and a record of what it gives to the kernel.

use super::abi;
use crate::handles::OpenFile;
use crate::nodes::notices::{UNSETTLED_COUNT, is_unsettled};
use poolfs_libservice::types::{Attributes, Errno, FileSystemStatistics, FileType, NodeId, Timestamp};
use std::time::Duration;
use zerocopy::{Immutable, IntoBytes};

const BLOCK_SIZE: u32 = 4096;

/// How long the kernel keeps what it may keep where nobody else changes anything: until it is told otherwise.
pub(super) const KEPT: Duration = Duration::from_secs(3600);

/// Bits of the mode by which programs run with others' rights. The kernel leaves it to the service to take them away, and
/// goes by the mode it knows: it never keeps one with such bits.
const SET_ID: u32 = 0o6000;

/// Less than the shortest name: with it the kernel shows that there are no more, as with an empty answer, but does not take what it
/// has kept for the whole listing.
const DOUBTFUL_END: [u8; 8] = [0; 8];

/// What an answer gives the kernel to keep. When the kernel does not take the answer, because the caller was killed
/// meanwhile, it is taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Given {
    /// that this name has changed, in a directory
    Name {
        /// the directory
        parent: NodeId,
        /// the name
        name: Box<[u8]>,
    },
    /// one reference to the node with this number
    Reference(u64),
    /// the open file with this handle
    File(u64),
}

/// For how long the kernel keeps what of an entry; what it may not keep, not at all.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Keeps {
    /// The name.
    pub name: Duration,
    /// The attributes.
    pub attributes: Duration,
}

/// An answer's body under construction.
pub struct Answer<'a> {
    room: &'a mut [u8],
    length: usize,
    given: &'a mut Vec<Given>,
}

impl<'a> Answer<'a> {
    /// An empty one. It grows in `room`; what it hands to the kernel is noted in `given`.
    #[must_use]
    pub fn new(room: &'a mut [u8], given: &'a mut Vec<Given>) -> Self {
        given.clear();
        Self { room, length: 0, given }
    }

    /// What there is of it.
    #[must_use]
    pub fn body(&self) -> &[u8] {
        &self.room[..self.length]
    }

    /// How many bytes more it takes.
    pub(super) fn left(&self) -> usize {
        self.room.len() - self.length
    }

    /// It takes `bytes` at most, all together.
    pub(super) fn limit(&mut self, bytes: usize) {
        let room = std::mem::take(&mut self.room);
        let most = bytes.clamp(self.length, room.len());
        self.room = &mut room[..most];
    }

    pub(super) fn give(&mut self, given: Given) {
        self.given.push(given);
    }

    pub(super) fn put(&mut self, value: &(impl IntoBytes + Immutable)) -> Result<(), Errno> {
        self.put_bytes(value.as_bytes())
    }

    pub(super) fn put_bytes(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        let target = self.room[self.length..].get_mut(..bytes.len()).ok_or(Errno::EIO)?;
        target.copy_from_slice(bytes);
        self.length += bytes.len();
        Ok(())
    }

    /// Lets `fill` write up to `bytes` bytes and say how many they are.
    pub(super) fn fill(
        &mut self,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<(), Errno> {
        let most = bytes.min(self.left());
        let filled = fill(&mut self.room[self.length..][..most])?;
        if filled > most {
            return Err(Errno::EIO);
        }
        self.length += filled;
        Ok(())
    }

    /// A value for which the caller has `room`: with none, its length is what was asked for.
    pub(super) fn put_sized(&mut self, bytes: &[u8], room: usize) -> Result<(), Errno> {
        if room == 0 {
            let size = u32::try_from(bytes.len()).map_err(|_| Errno::E2BIG)?;
            return self.put(&abi::GetXattrOut { size, padding: 0 });
        }
        if bytes.len() > room {
            return Err(Errno::ERANGE);
        }
        self.put_bytes(bytes)
    }

    /// Has the kernel keep what it was listed as the whole, if this was the end and it may.
    pub(super) fn end_listing(&mut self, file: &OpenFile) -> Result<(), Errno> {
        if self.body().is_empty() && file.listing_is_doubtful() { self.put_bytes(&DOUBTFUL_END) } else { Ok(()) }
    }

    /// One name of a listing, with its node when there is one; whether there was room.
    pub(super) fn put_name(&mut self, entry: Option<&abi::EntryOut>, name: &Listed<'_>) -> bool {
        let entry = entry.map(IntoBytes::as_bytes).unwrap_or_default();
        let length = size_of::<abi::Dirent>() + name.bytes.len();
        if entry.len() + length.next_multiple_of(8) > self.left() {
            return false;
        }
        let dirent = abi::Dirent {
            inode: name.inode,
            cookie: name.cookie,
            name_length: name.bytes.len() as u32,
            file_type: name.file_type.mode_bits() >> 12,
        };
        let filling = &[0; 8][..length.next_multiple_of(8) - length];
        [entry, dirent.as_bytes(), name.bytes, filling].iter().all(|part| self.put_bytes(part).is_ok())
    }
}

/// One name of a listing.
#[derive(Clone, Copy)]
pub(super) struct Listed<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) inode: u64,
    pub(super) file_type: FileType,
    pub(super) cookie: u64,
}

fn attr(from: &Attributes) -> abi::Attr {
    abi::Attr {
        inode: from.inode,
        size: from.size,
        blocks: from.blocks,
        accessed: from.accessed.seconds,
        modified: from.modified.seconds,
        changed: from.changed.seconds,
        accessed_nanoseconds: from.accessed.nanoseconds,
        modified_nanoseconds: from.modified.nanoseconds,
        changed_nanoseconds: from.changed.nanoseconds,
        mode: from.mode(),
        links: from.links,
        uid: from.uid,
        gid: from.gid,
        device: from.device,
        block_size: BLOCK_SIZE,
        flags: 0,
    }
}

/// For how long the kernel keeps these attributes, which it may keep for so long: seconds and nanoseconds.
fn attributes_kept(attributes: &Attributes, at_most: Duration) -> (u64, u32) {
    if attributes.permissions & SET_ID != 0 && attributes.file_type == FileType::Regular {
        return (0, 0);
    }
    let kept = if is_unsettled(attributes) { at_most.min(UNSETTLED_COUNT) } else { at_most };
    (kept.as_secs(), kept.subsec_nanos())
}

impl abi::AttrOut {
    /// Attributes, which the kernel may keep for so long.
    pub(super) fn new(attributes: &Attributes, kept: Duration) -> Self {
        let (valid_seconds, valid_nanoseconds) = attributes_kept(attributes, kept);
        Self { valid_seconds, valid_nanoseconds, attributes: attr(attributes), ..Self::default() }
    }
}

impl abi::EntryOut {
    /// A node by its FUSE number, by a name.
    pub(super) fn new(node: u64, attributes: &Attributes, keeps: Keeps) -> Self {
        let (attr_valid_seconds, attr_valid_nanoseconds) = attributes_kept(attributes, keeps.attributes);
        let attributes = attr(attributes);
        Self { node, attributes, attr_valid_seconds, attr_valid_nanoseconds, ..Self::missing(keeps.name) }
    }

    /// That there is no such name, which the kernel may keep for so long.
    pub(super) fn missing(kept: Duration) -> Self {
        let (entry_valid_seconds, entry_valid_nanoseconds) = (kept.as_secs(), kept.subsec_nanos());
        Self { entry_valid_seconds, entry_valid_nanoseconds, ..Self::default() }
    }
}

impl From<Timestamp> for abi::StatxTime {
    fn from(time: Timestamp) -> Self {
        Self { seconds: time.seconds, nanoseconds: time.nanoseconds, reserved: 0 }
    }
}

impl abi::StatxOut {
    /// Attributes, which the kernel may keep for so long.
    pub(super) fn new(from: &Attributes, kept: Duration) -> Self {
        let attributes = abi::Statx {
            mask: abi::STATX_BASIC_STATS,
            block_size: BLOCK_SIZE,
            links: from.links,
            uid: from.uid,
            gid: from.gid,
            mode: from.mode() as u16,
            inode: from.inode,
            size: from.size,
            blocks: from.blocks,
            accessed: from.accessed.into(),
            changed: from.changed.into(),
            modified: from.modified.into(),
            device_major: from.device >> 8 & 0xfff,
            device_minor: from.device & 0xff | from.device >> 12 & 0xf_ff00,
            ..abi::Statx::default()
        };
        let (valid_seconds, valid_nanoseconds) = attributes_kept(from, kept);
        Self { valid_seconds, valid_nanoseconds, attributes, ..Self::default() }
    }
}

impl From<&FileSystemStatistics> for abi::StatfsOut {
    fn from(from: &FileSystemStatistics) -> Self {
        Self {
            blocks: from.blocks,
            blocks_free: from.blocks_free,
            blocks_available: from.blocks_available,
            files: from.files,
            files_free: from.files_free,
            block_size: from.block_size,
            name_max: from.name_max,
            fragment_size: from.block_size,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    fn listed(bytes: &[u8]) -> Listed<'_> {
        Listed { bytes, inode: 7, file_type: FileType::Fifo, cookie: 9 }
    }

    #[test]
    fn an_answer_never_outgrows_its_room() {
        let (mut room, mut given) = ([0xff; 64], vec![Given::File(1)]);
        let mut answer = Answer::new(&mut room, &mut given);
        answer.limit(1000);
        answer.limit(40);
        assert_eq!(answer.put_bytes(&[1; 41]), Err(Errno::EIO));
        answer.put_bytes(&[1; 30]).expect("room");
        assert_eq!(answer.fill(100, |bytes| Ok(bytes.len() + 1)), Err(Errno::EIO));
        assert_eq!(answer.fill(100, |_| Err(Errno::ENOSPC)), Err(Errno::ENOSPC));
        answer.fill(100, |bytes| Ok(bytes.len())).expect("ten bytes");
        assert_eq!((answer.body().len(), answer.left()), (40, 0));
        assert!(given.is_empty(), "what the last answer gave does not count");
    }

    #[test]
    fn names_are_aligned_and_stop_where_the_room_ends() {
        let (mut room, mut given) = ([0xff; 64], Vec::new());
        let mut answer = Answer::new(&mut room, &mut given);
        assert!(answer.put_name(None, &listed(b"abc")));
        assert!(answer.put_name(None, &listed(b"12345678")));
        assert!(!answer.put_name(None, &listed(b"x")));
        let body = answer.body();
        assert_eq!((body.len(), &body[24..32], &body[56..]), (64, &b"abc\0\0\0\0\0"[..], &b"12345678"[..]));
        assert_eq!(body[..24], [7, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn values_are_measured_or_brought() {
        let (mut room, mut given) = ([0; 64], Vec::new());
        let mut answer = Answer::new(&mut room, &mut given);
        assert_eq!(answer.put_sized(b"value", 4), Err(Errno::ERANGE));
        answer.put_sized(b"value", 0).expect("room");
        assert_eq!(answer.body(), [5, 0, 0, 0, 0, 0, 0, 0]);
        let mut answer = Answer::new(&mut room, &mut given);
        answer.put_sized(b"value", 5).expect("room");
        assert_eq!(answer.body(), b"value");
    }

    #[test]
    fn device_numbers_are_taken_apart_as_linux_does() {
        // makedev(0x123, 0x45678)
        let attributes = Attributes { device: 0x4561_2378, ..example() };
        let out = abi::StatxOut::new(&attributes, Duration::ZERO);
        assert_eq!((out.attributes.device_major, out.attributes.device_minor), (0x123, 0x45678));
    }

    fn example() -> Attributes {
        let time = Timestamp { seconds: i64::MIN, nanoseconds: 1 };
        Attributes {
            inode: 3,
            file_type: FileType::CharDevice,
            permissions: 0o600,
            links: 1,
            uid: 1,
            gid: 2,
            device: 0,
            size: 0,
            blocks: 0,
            accessed: time,
            modified: time,
            changed: time,
            change: 0,
        }
    }

    #[test]
    fn attributes_are_kept_unless_they_may_change_by_themselves() {
        let kept = |permissions, file_type, changed| {
            let changed = Timestamp { seconds: changed, nanoseconds: 0 };
            attributes_kept(&Attributes { permissions, file_type, changed, ..example() }, KEPT).0
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("later").as_secs() as i64;
        assert_eq!(kept(0o755, FileType::Regular, now - 100), KEPT.as_secs());
        assert_eq!(kept(0o755, FileType::Regular, now), UNSETTLED_COUNT.as_secs());
        assert_eq!(kept(0o755, FileType::Regular, now + 100), UNSETTLED_COUNT.as_secs());
        assert_eq!(kept(0o3755, FileType::Directory, now), KEPT.as_secs());
        assert_eq!((kept(0o4755, FileType::Regular, 0), kept(0o2755, FileType::Regular, 0)), (0, 0));
        let little = Duration::from_millis(1500);
        for attributes in [Duration::ZERO, little, KEPT] {
            assert_eq!(attributes_kept(&example(), attributes), (attributes.as_secs(), attributes.subsec_nanos()));
            let entry = abi::EntryOut::new(1, &example(), Keeps { name: KEPT, attributes });
            assert_eq!((entry.attr_valid_seconds, entry.entry_valid_seconds), (attributes.as_secs(), KEPT.as_secs()));
            assert_eq!(entry.attr_valid_nanoseconds, attributes.subsec_nanos());
        }
        assert_eq!(abi::EntryOut::missing(little).entry_valid_nanoseconds, 500_000_000);
    }

    #[test]
    fn times_are_passed_on_as_they_are() {
        let out = abi::AttrOut::new(&example(), Duration::ZERO);
        assert_eq!((out.attributes.accessed, out.attributes.changed_nanoseconds), (i64::MIN, 1));
    }
}
