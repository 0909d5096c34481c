//! Posted writes: calls that return before the service has seen them, where nobody can tell.
//!
//! A grant guarantees what a number stands for, except for changes made without the library at this moment. So the kernel is asked for the
//! number's inode and flags, and the description's offset is moved. As soon as another process may have the description, or the file is
//! read in another way, the grant is gone, and the write is an ordinary request. While posts are outstanding, what this process knows of a
//! file without asking (its segment, its attributes) is not used.

use super::limits::{may_be_written, transfer};
use super::sort_error;
use crate::descriptors::{Adopted, EndChange, Known, Seen};
use crate::files;
use crate::memory::UserMemory;
use crate::outcome::Served;
use crate::session::Session;
use crate::state::Call;
use crate::trace::{self, Unposted};
use crate::{kernel_size, process, raw};
use linux_raw_sys::general as sys;
use poolfs_ipc::posts::{POST_BYTES_MAX, PostGrant};
use poolfs_ipc::wire::Reply;
use poolfs_ipc::{PostAt, Posting};

/// A number by which a write may be posted.
pub(super) struct Poster<'a> {
    call: Call,
    descriptor: i32,
    seen: Seen,
    adopted: Adopted,
    grant: PostGrant,
    session: Session<'a>,
}

/// The right to post a write of so many bytes by a number; nothing: send an ordinary request.
pub(super) fn poster<'a>(call: Call, descriptor: i32, memory: UserMemory) -> Option<Poster<'a>> {
    let descriptors = &call.state.descriptors;
    let seen = descriptors.look(descriptor)?;
    let Known::Adopted(adopted) = seen.known else { return None };
    if !may_be_written(call, &adopted) || memory.length() == 0 {
        return None;
    }
    if memory.length() > POST_BYTES_MAX {
        return waiting(Unposted::TooLong);
    }
    if !is_private(&seen) {
        return waiting(Unposted::Shared);
    }
    let Some((grant, is_verified)) = descriptors.grant(descriptor, &adopted) else {
        return waiting(Unposted::NoGrant);
    };
    let session = call.state.sessions.enter_for(call.began, &adopted)?;
    if !session.may_post(grant) {
        // Also forgets it, if nothing is on the way any more.
        files::is_settled(call, descriptor, &session);
        return waiting(Unposted::GrantLost);
    }
    if !is_verified && !files::verifies_grant(call, descriptor, &adopted, grant) {
        return waiting(Unposted::GrantLost);
    }
    // The grant vouches for the description, and not for what a number stands for that was given another one, or other flags, past the library just now.
    if !files::is_still(descriptor, &adopted) {
        return waiting(Unposted::GrantLost);
    }
    memory.is_readable().then_some(Poster { call, descriptor, seen, adopted, grant, session })
}

/// Counts why a write is not posted.
fn waiting<'a>(reason: Unposted) -> Option<Poster<'a>> {
    trace::unposted(reason);
    None
}

impl<'a> Poster<'a> {
    /// Whether every write goes to the file's end.
    pub fn appends(&self) -> bool {
        self.adopted.appends()
    }

    /// The number, and the session in use.
    pub fn place(&self) -> (i32, &Session<'a>) {
        (self.descriptor, &self.session)
    }

    /// Writes as `pwrite` does: at an offset, or behind the end of a file that is appended to. How much was written; nothing when
    /// it takes an ordinary request.
    pub fn write_at(&self, memory: UserMemory, offset: u64) -> Served<Option<usize>> {
        transfer(memory, offset)?;
        if self.appends() {
            return Ok(self.post_behind(memory)?.map(|(count, _)| count));
        }
        Ok(match self.post(PostAt::Offset(offset), memory)? {
            Posting::Posted => Some(memory.length()),
            Posting::Answered(reply) => Some(count_of(&reply, memory)),
            Posting::NotPosted => None,
        })
    }

    /// Writes behind the end, and moves the description's offset there. How much was written; nothing when it takes an ordinary
    /// request.
    pub fn append(&self, memory: UserMemory) -> Served<Option<usize>> {
        transfer(memory, 0)?;
        if !self.call.state.descriptors.knows_end(self.descriptor) {
            trace::unposted(Unposted::UnknownEnd);
            return Ok(None);
        }
        let Some((count, end)) = self.post_behind(memory)? else { return Ok(None) };
        // It was counted, and appended to by somebody else at the same time: of both only the service knows who came first.
        if let Some(end) = end.or_else(|| self.size()).and_then(|end| i64::try_from(end).ok()) {
            raw::seek(self.descriptor, end, sys::SEEK_SET).ok();
        }
        Ok(Some(count))
    }

    /// Posts behind the end. How much was written, and where the file ends then, if that is known.
    fn post_behind(&self, memory: UserMemory) -> Served<Option<(usize, Option<u64>)>> {
        let descriptors = &self.call.state.descriptors;
        let Some(change) = descriptors.end_changes(self.descriptor, &self.adopted) else { return Ok(None) };
        let end = |posting: &Posting, EndChange { before, .. }| match posting {
            Posting::Posted => before?.checked_add(memory.length() as u64),
            Posting::Answered(reply) => reply.value.checked_add(count_of(reply, memory) as u64),
            Posting::NotPosted => before,
        };
        descriptors.appended(self.descriptor);
        let posting = self.post(PostAt::End, memory);
        let end = posting.as_ref().ok().and_then(|posting| end(posting, change));
        let is_believed = descriptors.end_changed(self.descriptor, change, end);
        Ok(match posting? {
            Posting::Posted => Some((memory.length(), end.filter(|_| is_believed))),
            Posting::Answered(reply) => Some((count_of(&reply, memory), end)),
            Posting::NotPosted => None,
        })
    }

    fn post(&self, at: PostAt, memory: UserMemory) -> Served<Posting> {
        let descriptors = &self.call.state.descriptors;
        let posting = self.session.post(self.grant, self.adopted.handle, at, memory);
        let posting = posting.map_err(|error| sort_error(self.call, self.descriptor, error))?;
        match &posting {
            Posting::Posted => {
                trace::posted();
                // Whoever came to have the description by another number meanwhile reads there without asking.
                if !descriptors.is_unchanged(self.descriptor, &self.seen) {
                    self.size();
                }
            }
            Posting::Answered(reply) => {
                trace::unposted(Unposted::GrantLost);
                learn(self.call, (self.descriptor, &self.adopted), reply, memory.length());
            }
            Posting::NotPosted => {
                let holds = self.session.may_post(self.grant);
                trace::unposted(if holds { Unposted::NoRoom } else { Unposted::GrantLost });
            }
        }
        Ok(posting)
    }

    /// The file's size, as the service tells it to the kernel when it has all that was posted.
    #[cold]
    fn size(&self) -> Option<u64> {
        kernel_size::refresh(self.descriptor)
    }
}

/// Before the kernel appends to what a number stands for, it gets to know the end that was posted: it moves the description's offset by it.
pub(super) fn tell_end(descriptor: i32) {
    if Call::begin().is_some_and(|call| call.state.descriptors.is_untold(descriptor)) {
        kernel_size::refresh(descriptor);
    }
}

/// Notes what the reply to a write of so many bytes grants, if it is of any use: a file with a grant is not read as fast as others.
pub(super) fn learn(call: Call, (descriptor, adopted): (i32, &Adopted), reply: &Reply, length: usize) {
    let Some(grant) = PostGrant::of_reply(reply).filter(|_| length <= POST_BYTES_MAX) else { return };
    let descriptors = &call.state.descriptors;
    if descriptors.look(descriptor).is_some_and(|seen| is_private(&seen)) {
        descriptors.granted(descriptor, adopted, grant);
    }
}

/// Whether a description is this process's alone, by one number, and not mapped.
fn is_private(seen: &Seen) -> bool {
    seen.is_unshared(process::forks()) && !seen.is_duplicated()
}

fn count_of(reply: &Reply, memory: UserMemory) -> usize {
    reply.length.min(memory.length() as u64) as usize
}
