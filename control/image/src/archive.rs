//! A streaming reader of tar archives: every header is bounded, nothing is trusted.
//!
//! The `tar` crate understands single headers; the walk from member to member is done here, because extended attributes are binary (a PAX
//! value may contain line ends) and a header may announce any size.

use crate::pax::{self, PaxRecords};
use crate::{ImageError, Limits, Result};
use std::io::{Error, ErrorKind, Read};
use tar::{EntryType, Header};

const BLOCK: usize = 512;
/// Most bytes of one extended header: attribute values of 64 KiB, base64 in some tools, and long names fit many times over.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;

/// A time of a member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

/// What a member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberKind {
    File,
    Directory,
    Symlink,
    HardLink,
    Character { major: u32, minor: u32 },
    Block { major: u32, minor: u32 },
    Fifo,
}

/// One member of an archive; the content of a file follows in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub path: Vec<u8>,
    pub target: Vec<u8>,
    pub kind: MemberKind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub modified: Time,
    pub attributes: Vec<(String, Vec<u8>)>,
}

/// Walks over an archive.
pub(crate) struct ArchiveReader<R> {
    inner: R,
    /// Bytes of the present member's content that were not read.
    content_left: u64,
    /// Bytes after the content up to the next block.
    padding: u64,
    members_left: u64,
    members_max: u64,
    global: PaxRecords,
}

impl<R: Read> ArchiveReader<R> {
    pub(crate) fn new(inner: R, limits: &Limits) -> Self {
        ArchiveReader {
            inner,
            content_left: 0,
            padding: 0,
            members_left: limits.layer_members,
            members_max: limits.layer_members,
            global: PaxRecords::default(),
        }
    }

    /// The next member, or none at the end.
    pub(crate) fn next_member(&mut self) -> Result<Option<Member>> {
        let mut local = PaxRecords::default();
        let mut long_name = None;
        let mut long_target = None;
        loop {
            self.skip_content()?;
            let Some(header) = self.next_header()? else { return Ok(None) };
            if self.members_left == 0 {
                return Err(ImageError::TooLarge { what: "the number of archive members", limit: self.members_max });
            }
            self.members_left -= 1;
            let size = header.entry_size().map_err(malformed)?;
            match header.entry_type() {
                EntryType::XHeader => local = pax::parse(&self.extension(size)?)?,
                EntryType::XGlobalHeader => self.global = pax::parse(&self.extension(size)?)?,
                EntryType::GNULongName => long_name = Some(without_terminator(self.extension(size)?)),
                EntryType::GNULongLink => long_target = Some(without_terminator(self.extension(size)?)),
                _ => {
                    let mut member = self.member(&header, size, local)?;
                    member.path = long_name.unwrap_or(member.path);
                    member.target = long_target.unwrap_or(member.target);
                    return Ok(Some(member));
                }
            }
        }
    }

    /// The stream behind the archive.
    pub(crate) fn into_inner(self) -> R {
        self.inner
    }

    fn member(&mut self, header: &Header, size: u64, local: PaxRecords) -> Result<Member> {
        let records = self.global.overlaid_with(local);
        let path = records.path.unwrap_or_else(|| header.path_bytes().into_owned());
        if records.sparse {
            return Err(ImageError::member(&path, "sparse members are not supported: repack without --sparse"));
        }
        let device = || {
            let major = header.device_major().map_err(malformed)?.unwrap_or(0);
            let minor = header.device_minor().map_err(malformed)?.unwrap_or(0);
            Ok::<_, ImageError>((major, minor))
        };
        let kind = match header.entry_type() {
            // An old archive marks a directory by a slash only.
            EntryType::Regular | EntryType::Continuous if path.ends_with(b"/") => MemberKind::Directory,
            EntryType::Regular | EntryType::Continuous => MemberKind::File,
            EntryType::Directory => MemberKind::Directory,
            EntryType::Symlink => MemberKind::Symlink,
            EntryType::Link => MemberKind::HardLink,
            EntryType::Fifo => MemberKind::Fifo,
            EntryType::Char => device().map(|(major, minor)| MemberKind::Character { major, minor })?,
            EntryType::Block => device().map(|(major, minor)| MemberKind::Block { major, minor })?,
            other => {
                let kind = char::from(other.as_byte());
                return Err(ImageError::member(&path, format!("members of type {kind:?} are not supported")));
            }
        };
        let size = records.size.unwrap_or(size);
        self.enter(size);
        let own = |value: u64| u32::try_from(value).ok().filter(|id| *id != u32::MAX);
        let uid = own(records.uid.map_or_else(|| header.uid(), Ok).map_err(malformed)?);
        let gid = own(records.gid.map_or_else(|| header.gid(), Ok).map_err(malformed)?);
        let (Some(uid), Some(gid)) = (uid, gid) else {
            return Err(ImageError::member(&path, "its owner is not a valid user or group number"));
        };
        let seconds = i64::try_from(header.mtime().map_err(malformed)?).unwrap_or(i64::MAX);
        Ok(Member {
            target: records
                .target
                .or_else(|| header.link_name_bytes().map(|name| name.into_owned()))
                .unwrap_or_default(),
            kind,
            mode: header.mode().map_err(malformed)? & 0o7777,
            uid,
            gid,
            size: if kind == MemberKind::File { size } else { 0 },
            modified: records.modified.unwrap_or(Time { seconds, nanoseconds: 0 }),
            attributes: records.attributes.into_iter().collect(),
            path,
        })
    }

    /// The next header; none at the end of the archive.
    fn next_header(&mut self) -> Result<Option<Header>> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut block[filled..]) {
                // An archive may end without its two empty blocks.
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(ImageError::Archive("it ends in the middle of a header".into())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(malformed(error)),
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block).clone();
        let blanked = block.iter().enumerate().map(|(at, byte)| if (148..156).contains(&at) { b' ' } else { *byte });
        let sum: u32 = blanked.map(u32::from).sum();
        if header.cksum().ok() != Some(sum) {
            return Err(ImageError::Archive(
                "a header's checksum is wrong: this is no tar archive, or it is damaged".into(),
            ));
        }
        Ok(Some(header))
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > EXTENSION_BYTES_MAX {
            return Err(ImageError::TooLarge { what: "an archive's extended header", limit: EXTENSION_BYTES_MAX });
        }
        self.enter(size);
        let mut bytes = Vec::new();
        self.read_to_end(&mut bytes).map_err(malformed)?;
        Ok(bytes)
    }

    fn enter(&mut self, size: u64) {
        self.content_left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    fn skip_content(&mut self) -> Result<()> {
        std::io::copy(self, &mut std::io::sink()).map_err(malformed)?;
        let padding = std::mem::take(&mut self.padding);
        let skipped = std::io::copy(&mut (&mut self.inner).take(padding), &mut std::io::sink()).map_err(malformed)?;
        // The padding of the very last member may be missing.
        if skipped != padding && skipped != 0 {
            return Err(ImageError::Archive("it ends in the middle of a member".into()));
        }
        Ok(())
    }
}

/// The content of the present member.
impl<R: Read> Read for ArchiveReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let wanted = usize::try_from(self.content_left).unwrap_or(usize::MAX).min(buffer.len());
        if wanted == 0 {
            return Ok(0);
        }
        let count = self.inner.read(&mut buffer[..wanted])?;
        if count == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "it ends in the middle of a member"));
        }
        self.content_left -= count as u64;
        Ok(count)
    }
}

fn malformed(error: Error) -> ImageError {
    // The rest is what stands in the place of a header, whatever that is.
    ImageError::Archive(error.to_string().split(": ").next().unwrap_or_default().to_owned())
}

fn without_terminator(mut bytes: Vec<u8>) -> Vec<u8> {
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(build: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        build(&mut builder);
        builder.into_inner().expect("in memory")
    }

    fn plain_header(size: u64) -> Header {
        let mut header = Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o4755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        header
    }

    #[test]
    fn binary_attributes_and_long_names_come_through() {
        let long = "d/".repeat(80) + "file";
        let bytes = archive(|builder| {
            let value = b"a\nb=c\0d";
            builder
                .append_pax_extensions([("SCHILY.xattr.user.x", &value[..]), ("mtime", b"-1.25"), ("size", b"3")])
                .expect("in memory");
            let mut header = plain_header(3);
            builder.append_data(&mut header, &long, &b"abc"[..]).expect("in memory");
        });
        let mut reader = ArchiveReader::new(&bytes[..], &Limits::default());
        let member = reader.next_member().expect("valid").expect("a member");
        assert_eq!(member.path, long.as_bytes());
        assert_eq!(member.attributes, vec![("user.x".to_owned(), b"a\nb=c\0d".to_vec())]);
        assert_eq!(member.modified, Time { seconds: -2, nanoseconds: 750_000_000 });
        assert_eq!(member.mode, 0o4755);
        let mut content = Vec::new();
        reader.read_to_end(&mut content).expect("read");
        assert_eq!(content, b"abc");
        assert!(reader.next_member().expect("valid").is_none());
    }

    #[test]
    fn hostile_headers_are_named_errors() {
        let mut huge = Header::new_ustar();
        huge.set_entry_type(EntryType::XHeader);
        huge.set_size(1 << 40);
        huge.set_cksum();
        let mut reader = ArchiveReader::new(&huge.as_bytes()[..], &Limits::default());
        assert!(matches!(reader.next_member(), Err(ImageError::TooLarge { .. })));

        let mut cut = plain_header(4000);
        cut.set_path("a").expect("short");
        cut.set_cksum();
        let mut reader = ArchiveReader::new(&cut.as_bytes()[..], &Limits::default());
        assert!(reader.next_member().expect("the header is fine").is_some());
        assert!(reader.next_member().is_err());

        let mut reader = ArchiveReader::new(&[b'x'; 512][..], &Limits::default());
        let Err(ImageError::Archive(cause)) = reader.next_member() else { panic!("no header") };
        assert!(!cause.contains("xx"), "{cause}");
        let mut reader = ArchiveReader::new(&[0; 100][..], &Limits::default());
        assert!(reader.next_member().is_err());
    }

    #[test]
    fn the_number_of_members_is_bounded() {
        let bytes = archive(|builder| {
            for name in ["a", "b", "c"] {
                builder.append_data(&mut plain_header(0), name, &b""[..]).expect("in memory");
            }
        });
        let limits = Limits { layer_members: 2, ..Limits::default() };
        let mut reader = ArchiveReader::new(&bytes[..], &limits);
        assert!(reader.next_member().is_ok() && reader.next_member().is_ok());
        assert!(matches!(reader.next_member(), Err(ImageError::TooLarge { .. })));
    }
}
