//! Validation of a client's request: the form of a message is checked once, on a copy.

use crate::request::Kind;
use poolfs_ipc::service::{Acquired, DataError};
use poolfs_ipc::wire::{Grant, Operation, Request, RequestFlags};
use poolfs_libservice::Segment;
use poolfs_libservice::types::Errno;
use poolfs_libservice::types::limits::{FILE_SIZE_MAX, PATH_MAX, XATTR_VALUE_MAX};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

/// The data area of a request: memory the client can change at any time, hence only ever copied.
pub trait DataArea {
    /// Its bytes.
    fn bytes(&self) -> usize;

    /// Copies out of it.
    ///
    /// # Errors
    /// [`DataError`], and nothing is copied.
    fn get(&self, offset: usize, target: &mut [u8]) -> Result<(), DataError>;

    /// Copies into it.
    ///
    /// # Errors
    /// [`DataError`], and nothing is copied.
    fn put(&self, offset: usize, source: &[u8]) -> Result<(), DataError>;

    /// Puts there what `file` has from `at` on; zeros behind its end.
    ///
    /// # Errors
    /// [`DataError`]; what is there then is undefined.
    fn put_file(&self, range: Range<usize>, file: &File, at: u64) -> Result<(), DataError>;

    /// Sends the client a segment with the notice of its lease, beside the area; returns the number of the grant.
    ///
    /// # Errors
    /// `EOPNOTSUPP` where nobody can be sent anything; `EAGAIN` when the client does not receive what it is sent.
    fn grant(&self, grant: Grant, segment: &Segment, notice: BorrowedFd<'_>) -> Result<u64, Errno> {
        let _ = (grant, segment, notice);
        Err(Errno::EOPNOTSUPP)
    }

    /// Sends the client a whole file, as [`DataArea::grant`].
    ///
    /// # Errors
    /// As there.
    fn lend(&self, file: BorrowedFd<'_>) -> Result<u64, Errno> {
        let _ = file;
        Err(Errno::EOPNOTSUPP)
    }
}

impl<C> DataArea for Acquired<C> {
    fn bytes(&self) -> usize {
        self.data_bytes()
    }

    fn get(&self, offset: usize, target: &mut [u8]) -> Result<(), DataError> {
        self.get_data(offset, target)
    }

    fn put(&self, offset: usize, source: &[u8]) -> Result<(), DataError> {
        self.put_data(offset, source)
    }

    fn put_file(&self, range: Range<usize>, file: &File, at: u64) -> Result<(), DataError> {
        Acquired::put_file(self, range.start, range.len(), file, at)
    }

    fn grant(&self, grant: Grant, segment: &Segment, notice: BorrowedFd<'_>) -> Result<u64, Errno> {
        self.session().grant(grant, &[segment.map.as_fd(), segment.data.as_fd(), notice])
    }

    fn lend(&self, file: BorrowedFd<'_>) -> Result<u64, Errno> {
        self.session().grant(Grant::of_whole_file(), &[file])
    }
}

/// A request whose form is right: its operation and flags exist, its strings fit into the data area, its numbers into their
/// ranges. Whether it makes sense is the dispatcher's question.
#[derive(Clone, Debug)]
pub struct Message {
    /// What is asked.
    pub operation: Operation,
    /// Its modifiers.
    pub flags: RequestFlags,
    /// The other fields.
    pub request: Request,
    path: usize,
    second: usize,
    third: usize,
}

/// What an operation carries in the data area of its request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carries {
    Nothing,
    Bytes,
    Strings,
}

fn carries(operation: Operation) -> Carries {
    match operation {
        Operation::Write => Carries::Bytes,
        Operation::Echo
        | Operation::Read
        | Operation::Sync
        | Operation::SyncAll
        | Operation::Segment
        | Operation::Lend
        | Operation::Share
        | Operation::Allocate
        | Operation::Seek
        | Operation::CopyRange => Carries::Nothing,
        _ => Carries::Strings,
    }
}

/// What an operation counts as, but for those that are none of the filesystem.
pub fn kind(operation: Operation) -> Option<Kind> {
    Some(match operation {
        Operation::Echo | Operation::Segment | Operation::Lend | Operation::Share => return None,
        Operation::Read => Kind::Read,
        Operation::Write => Kind::Write,
        Operation::Stat => Kind::Stat,
        Operation::Access => Kind::Access,
        Operation::Truncate | Operation::ChangeMode | Operation::SetTimes => Kind::Change,
        Operation::Sync => Kind::Sync,
        Operation::Allocate => Kind::Allocate,
        Operation::Seek => Kind::Seek,
        Operation::CopyRange => Kind::CopyRange,
        Operation::MakeDirectory => Kind::MakeDirectory,
        Operation::Unlink => Kind::Unlink,
        Operation::Rename => Kind::Rename,
        Operation::Link => Kind::Link,
        Operation::SymbolicLink => Kind::SymbolicLink,
        Operation::ReadLink => Kind::ReadLink,
        Operation::MakeNode => Kind::MakeNode,
        Operation::GetXattr => Kind::GetXattr,
        Operation::SetXattr => Kind::SetXattr,
        Operation::ListXattr => Kind::ListXattr,
        Operation::RemoveXattr => Kind::RemoveXattr,
        Operation::Statfs => Kind::Statfs,
        Operation::SyncAll => Kind::SyncAll,
    })
}

impl Message {
    /// Checks the form of `request`, with a data area of `data_bytes`.
    ///
    /// # Errors
    /// `EINVAL`; `ENAMETOOLONG` and `E2BIG` for strings and values beyond Linux's limits.
    pub fn check(request: &Request, data_bytes: usize) -> Result<Self, Errno> {
        let operation = Operation::from_number(request.operation).ok_or(Errno::EINVAL)?;
        let flags = RequestFlags::from_bits(request.flags).ok_or(Errno::EINVAL)?;
        let [path, second, third] =
            [request.path_length, request.second_length, request.third_length].map(|length| length as usize);
        if path > PATH_MAX || second > PATH_MAX {
            return Err(Errno::ENAMETOOLONG);
        }
        if third > XATTR_VALUE_MAX {
            return Err(Errno::E2BIG);
        }
        if path + second + third > data_bytes {
            return Err(Errno::EINVAL);
        }
        if carries(operation) != Carries::Strings && path + second + third > 0 {
            return Err(Errno::EINVAL);
        }
        let moves = matches!(operation, Operation::Read | Operation::Write);
        if moves && request.length > data_bytes as u64 {
            return Err(Errno::EINVAL);
        }
        let positions = operation != Operation::Echo;
        if positions && (request.offset > FILE_SIZE_MAX || request.second_offset > FILE_SIZE_MAX) {
            return Err(Errno::EINVAL);
        }
        Ok(Self { operation, flags, request: *request, path, second, third })
    }

    /// Whether it asks for a change, or whether one would be allowed: what a mount that is read-only refuses.
    #[must_use]
    pub fn changes(&self) -> bool {
        const WRITE: u32 = 2;
        match self.operation {
            Operation::Access => self.request.mode & WRITE != 0,
            Operation::Echo
            | Operation::Read
            | Operation::Stat
            | Operation::Sync
            | Operation::SyncAll
            | Operation::Segment
            | Operation::Lend
            | Operation::Share
            | Operation::Seek
            | Operation::ReadLink
            | Operation::GetXattr
            | Operation::ListXattr
            | Operation::Statfs => false,
            Operation::Write
            | Operation::Truncate
            | Operation::Allocate
            | Operation::CopyRange
            | Operation::MakeDirectory
            | Operation::Unlink
            | Operation::Rename
            | Operation::Link
            | Operation::SymbolicLink
            | Operation::MakeNode
            | Operation::ChangeMode
            | Operation::SetTimes
            | Operation::SetXattr
            | Operation::RemoveXattr => true,
        }
    }

    /// Whether it names what it changes by a descriptor that may have been opened by any mount, and need not be one that can be
    /// written: a file's own attributes, or names below a directory.
    #[must_use]
    pub fn goes_by_descriptor(&self) -> bool {
        match self.operation {
            Operation::Write | Operation::Allocate | Operation::CopyRange => false,
            Operation::Truncate if !self.has_path() => false,
            _ => !self.has_path() || self.request.directory != 0 || self.request.second_directory != 0,
        }
    }

    /// Bytes of the data area the request brings: the strings, or what is to be written.
    #[must_use]
    pub fn input_bytes(&self) -> usize {
        match carries(self.operation) {
            Carries::Nothing => 0,
            Carries::Bytes => self.request.length as usize,
            Carries::Strings => self.path + self.second + self.third,
        }
    }

    /// Whether the file is named by a path, not by a handle.
    #[must_use]
    pub fn has_path(&self) -> bool {
        self.path > 0
    }

    /// Where the path, the second string and the value lie in the input.
    #[must_use]
    pub fn strings(&self) -> [Range<usize>; 3] {
        let second = self.path + self.second;
        [0..self.path, self.path..second, second..second + self.third]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(change: impl FnOnce(&mut Request)) -> Result<Message, Errno> {
        let mut request = Request { operation: Operation::Stat as u32, ..Request::default() };
        change(&mut request);
        Message::check(&request, 128 << 10)
    }

    #[test]
    fn strings_lie_behind_each_other() {
        let message = checked(|request| {
            (request.path_length, request.second_length, request.third_length) = (5, 3, 7);
        });
        let message = message.expect("well-formed");
        assert_eq!(message.strings(), [0..5, 5..8, 8..15]);
        assert_eq!((message.input_bytes(), message.has_path()), (15, true));
    }

    #[test]
    fn malformed_requests_are_refused() {
        let refused = |change: fn(&mut Request)| checked(change).expect_err("malformed");
        assert_eq!(refused(|request| request.operation = 0), Errno::EINVAL);
        assert_eq!(refused(|request| request.operation = 29), Errno::EINVAL);
        assert_eq!(refused(|request| request.flags = 8), Errno::EINVAL);
        assert_eq!(refused(|request| request.path_length = 4096), Errno::ENAMETOOLONG);
        assert_eq!(refused(|request| request.second_length = u32::MAX), Errno::ENAMETOOLONG);
        assert_eq!(refused(|request| request.third_length = 65537), Errno::E2BIG);
        assert_eq!(refused(|request| request.offset = 1 << 63), Errno::EINVAL);
        assert_eq!(
            refused(|request| (request.operation, request.length) = (Operation::Read as u32, (128 << 10) + 1)),
            Errno::EINVAL
        );
        assert_eq!(
            refused(|request| (request.operation, request.path_length) = (Operation::Write as u32, 1)),
            Errno::EINVAL
        );
        let request =
            Request { operation: Operation::Stat as u32, path_length: 10, second_length: 7, ..Request::default() };
        assert_eq!(Message::check(&request, 16).expect_err("beyond the area"), Errno::EINVAL);
    }
}
