//! Verification of descriptors: from a number to an adopted file, so that no operation reaches a number that was reused.
//!
//! Two system calls of about 0.2 us tell whether a number still is the file it was adopted as: `statx`, answered from what the kernel
//! already has (inode and mount), and the open flags. They cannot distinguish another description of the same file in the same mode. The
//! handle is as good for that one until the service has seen the release of the old description. Then the service no longer knows the
//! handle, and the kernel serves.
//!
//! Files that are read without requests need no system call. Where the kernel announces to the service every close of one of their
//! descriptors, and none was counted since a number was verified, it still is that file ([`direct_file`]). And while the service grants
//! posted writes, nobody has closed a descriptor of the only description of the file: a number that was verified while the grant held is
//! that description.

use crate::descriptors::{Adopted, Known, Seen};
use crate::memory::UserMemory;
use crate::mounts::{Freshness, MountPoint};
use crate::outcome::{Refusal, Served};
use crate::session::Session;
use crate::state::Call;
use crate::trace::Reason;
use crate::{kernel_size, process, raw};
use linux_raw_sys::general as sys;
use poolfs_ipc::posts::PostGrant;
use poolfs_ipc::wire::{Adopt, WireAttributes};
use poolfs_types::Errno;

/// A descriptor is adopted at this use of it: one that is used less often does not pay the ioctl.
const ADOPT_AT_USE: u32 = 2;

/// A transfer of so many bytes is reason enough to adopt at the first use: the ioctl costs less than it, and what the
/// kernel reads it keeps, and reads ahead, beside the service's own copy.
pub const ADOPT_AT_BYTES: usize = 64 << 10;

/// A shorter file that is open to be read only is adopted at this use of it: programs read such files in one or two calls when they
/// start, and at the next start the kernel has them.
const ADOPT_SHORT_AT_USE: u32 = 16;

/// What somebody is about to do with an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// read up to so many bytes
    Read(usize),
    /// write so many bytes
    Write(usize),
    /// what it has done many times
    Again,
    /// something else
    Other,
}

impl Purpose {
    /// Whether a file of so many bytes is to be adopted at this use of it.
    fn is_worth_adopting(self, uses: u32, size: u64, is_read_only: impl FnOnce() -> bool) -> bool {
        let is_enough = uses >= ADOPT_AT_USE;
        match self {
            Self::Read(_) if size < ADOPT_AT_BYTES as u64 => {
                uses >= ADOPT_SHORT_AT_USE || (is_enough && !is_read_only())
            }
            Self::Read(bytes) | Self::Write(bytes) => is_enough || bytes >= ADOPT_AT_BYTES,
            Self::Again => true,
            Self::Other => is_enough,
        }
    }
}

/// Flags of a description that both sides must agree on.
const FLAGS_THAT_COUNT: u32 = sys::O_ACCMODE | sys::O_APPEND | sys::O_DIRECT | sys::O_SYNC | sys::O_PATH;

impl Adopted {
    /// Whether it may be written.
    pub fn is_writable(&self) -> bool {
        self.flags & sys::O_ACCMODE != sys::O_RDONLY
    }

    /// Whether every write goes to its end.
    pub fn appends(&self) -> bool {
        self.flags & sys::O_APPEND != 0
    }

    /// Whether it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.mode & sys::S_IFMT == sys::S_IFREG
    }
}

/// An open file of an instance, verified for one call.
pub struct OpenFile<'a> {
    /// What it was adopted as.
    pub adopted: Adopted,
    /// The session its handle belongs to.
    pub session: Session<'a>,
    /// The mount it was opened through.
    pub mount: MountPoint,
    /// The number.
    pub descriptor: i32,
    /// Whether this thread alone moves the kernel's offset of it.
    pub owns_offset: bool,
}

impl OpenFile<'_> {
    /// Whether it may be read.
    pub fn is_readable(&self) -> bool {
        self.adopted.flags & sys::O_ACCMODE != sys::O_WRONLY
    }

    /// Whether it may be written.
    pub fn is_writable(&self) -> bool {
        self.adopted.is_writable()
    }

    /// Whether every write goes to its end.
    pub fn appends(&self) -> bool {
        self.adopted.appends()
    }

    /// Whether it is a regular file.
    pub fn is_regular(&self) -> bool {
        self.adopted.is_regular()
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.adopted.mode & sys::S_IFMT == sys::S_IFDIR
    }

    /// Whether what is known of it without a request is all that was written: no posted write is on the way.
    pub fn is_settled(&self, call: Call) -> bool {
        is_settled(call, self.descriptor, &self.session)
    }
}

/// An open file that can be read without a request, and that its number was found to stand for.
pub struct DirectFile<'a> {
    session: Session<'a>,
    handle: u64,
    descriptor: i32,
    /// Whether this thread alone moves the kernel's offset of it.
    pub owns_offset: bool,
}

impl<'a> DirectFile<'a> {
    /// Reads from `offset` on until `target` is full or the file ends; nothing when it takes a request.
    pub fn read(&self, target: UserMemory, offset: u64) -> Option<usize> {
        let read = self.session.read_segment(self.handle, offset, target)?;
        read.is_whole.then_some(read.count)
    }

    /// The file's attributes; nothing when it takes a request.
    pub fn attributes(&self) -> Option<WireAttributes> {
        self.session.noted_attributes(self.handle)
    }

    /// Device number (major, minor) of the mount it is on.
    pub fn device(&self) -> (u32, u32) {
        self.session.connection().device()
    }

    /// The number, and the session in use.
    pub fn place(&self) -> (i32, &Session<'a>) {
        (self.descriptor, &self.session)
    }
}

/// The file a number stands for, without a system call: when somebody has found that it does, and none of the file's
/// descriptors was closed since.
#[inline]
pub fn direct_file<'a>(call: Call, descriptor: i32) -> Option<DirectFile<'a>> {
    let state = call.state;
    if !state.descriptors.was_verified(descriptor) {
        return None;
    }
    let seen = state.descriptors.look(descriptor)?;
    let Known::Adopted(adopted) = seen.known else { return None };
    let session = state.sessions.enter_for(call.began, &adopted)?;
    if !is_settled(call, descriptor, &session) {
        return None;
    }
    let witness = session.witness(adopted.handle)?;
    let owns_offset = owns_offset(&seen);
    let is_verified = state.descriptors.is_verified(descriptor, witness);
    is_verified.then_some(DirectFile { session, handle: adopted.handle, descriptor, owns_offset })
}

/// Whether no write is on the way that was posted by a number, which stands for a file of a session. A grant that is over is
/// forgotten by this.
#[inline]
pub fn is_settled(call: Call, descriptor: i32, session: &Session<'_>) -> bool {
    let Some(grant) = call.state.descriptors.noted_grant(descriptor) else { return true };
    // In this order: what is posted when the grant is gone is waited for.
    let may_post = session.may_post(grant);
    if session.has_posts(grant) {
        return false;
    }
    if !may_post {
        call.state.descriptors.grant_over(descriptor, grant);
    }
    true
}

/// The adopted file a number stands for now.
///
/// # Errors
/// [`Refusal::Foreign`] when it is none of ours; [`Refusal::Kernel`] when it is, and is not adopted.
pub fn open_file<'a>(call: Call, descriptor: i32) -> Served<OpenFile<'a>> {
    open_file_for(call, descriptor, Purpose::Other)
}

/// As [`open_file`], for a purpose.
///
/// # Errors
/// As [`open_file`].
pub fn open_file_for<'a>(call: Call, descriptor: i32, purpose: Purpose) -> Served<OpenFile<'a>> {
    let state = call.state;
    if state.descriptors.is_foreign(descriptor) {
        return Err(Refusal::Foreign);
    }
    let seen = state.descriptors.look(descriptor).ok_or(Refusal::Foreign)?;
    if let Known::Adopted(adopted) = seen.known {
        return adopted_file(call, descriptor, &seen, adopted);
    }
    let found = raw::statx_descriptor(descriptor).map_err(|_| Refusal::Foreign)?;
    classify(call, descriptor, &seen, &found, purpose)
}

/// What a number was adopted as, and by which grant writes may have been posted by it.
pub fn posted_by(call: Call, descriptor: i32) -> Option<(Adopted, PostGrant)> {
    let descriptors = &call.state.descriptors;
    descriptors.noted_grant(descriptor)?;
    let Known::Adopted(adopted) = descriptors.look(descriptor)?.known else { return None };
    let grant = descriptors.grant(descriptor, &adopted).filter(|&(_, is_verified)| is_verified);
    grant.map(|(grant, _)| (adopted, grant))
}

/// Whether a number is found to stand for what it was adopted as, while the grant for that holds: from then on writes may be posted by it.
pub fn verifies_grant(call: Call, descriptor: i32, adopted: &Adopted, grant: PostGrant) -> bool {
    open_file(call, descriptor).is_ok() && call.state.descriptors.grant(descriptor, adopted) == Some((grant, true))
}

/// After a number was closed, which takes the grant of its description away: whether what was posted by this one is lost, because
/// the service that should have been told is no more.
pub fn are_posts_lost(call: Call, (adopted, grant): (Adopted, PostGrant)) -> bool {
    match call.state.sessions.enter_for(call.began, &adopted) {
        Some(session) => session.has_posts(grant) && session.is_lost(),
        None => call.state.sessions.have_lost(&adopted, grant),
    }
}

/// The file a number was adopted as, if it still stands for it.
fn adopted_file<'a>(call: Call, descriptor: i32, seen: &Seen, adopted: Adopted) -> Served<OpenFile<'a>> {
    let state = call.state;
    let session = state.sessions.enter_for(call.began, &adopted);
    // Taken before the kernel is asked: it does not cover what is closed in between.
    let announced = session.as_ref().filter(|_| adopted.announces_closing);
    let witness = announced.and_then(|session| session.witness(adopted.handle));
    let granted = state.descriptors.grant(descriptor, &adopted);
    let holds = |grant: &PostGrant| session.as_ref().is_some_and(|session| session.may_post(*grant));
    // As the witness: only a grant that holds from here on vouches for what the number is found to be.
    let held = granted.map(|(grant, _)| grant).filter(holds);
    let found = raw::statx_descriptor(descriptor).map_err(|_| Refusal::Foreign)?;
    if !is_same(descriptor, &adopted, &found) {
        state.descriptors.clear(descriptor);
        return Err(Refusal::Kernel);
    }
    let Some(mount) = look_up(call, &found).ok_or(Refusal::Kernel)? else {
        // Covered, or taken away: what is done by the file from here on, the kernel does, and goes by the size that it knows. Who has become
        // somebody else may only be kept from seeing the mount.
        if session.is_some() {
            leave_to_kernel(call, descriptor, seen);
            kernel_size::refresh(descriptor);
        }
        return Err(Refusal::Kernel);
    };
    if let Some(grant) = held.filter(holds) {
        state.descriptors.grant_verified(descriptor, &adopted, grant);
    }
    let Some(session) = session else {
        let has_lost = granted.is_some_and(|(grant, was_verified)| {
            // Without that nothing was posted by it.
            was_verified && state.sessions.have_lost(&adopted, grant)
        });
        // The handle is gone with its session; the description is still the one we know.
        state.descriptors.note(descriptor, seen, Known::Candidate(ADOPT_AT_USE));
        return Err(if has_lost { Refusal::Failed(Errno::EIO) } else { Refusal::Kernel });
    };
    if let Some(witness) = witness {
        state.descriptors.verified(descriptor, witness);
    }
    Ok(OpenFile { adopted, session, mount, descriptor, owns_offset: owns_offset(seen) })
}

/// As [`open_file_for`], for transfers at the description's offset: only where this process alone moves it, and to read only where no
/// other thread can.
///
/// # Errors
/// [`Refusal::Foreign`] or [`Refusal::Kernel`], without a system call, when it does not.
pub fn own_file_for<'a>(call: Call, descriptor: i32, purpose: Purpose) -> Served<OpenFile<'a>> {
    let state = call.state;
    if state.descriptors.is_foreign(descriptor) {
        return Err(Refusal::Foreign);
    }
    let seen = state.descriptors.look(descriptor).ok_or(Refusal::Foreign)?;
    let is_alone = matches!(purpose, Purpose::Write(_)) || process::single_threaded();
    if is_alone && seen.is_own(process::forks()) {
        return open_file_for(call, descriptor, purpose);
    }
    Err(if seen.known == Known::Unknown { Refusal::Foreign } else { Refusal::left(Reason::SharedOffset) })
}

/// Whether a number stands for what was adopted, as the kernel says now.
pub fn is_still(descriptor: i32, adopted: &Adopted) -> bool {
    raw::statx_descriptor(descriptor).is_ok_and(|found| is_same(descriptor, adopted, &found))
}

/// Whether a number still stands for what was adopted.
fn is_same(descriptor: i32, adopted: &Adopted, found: &sys::statx) -> bool {
    found.stx_ino == adopted.inode
        && found.stx_mnt_id == adopted.mount
        && raw::open_flags(descriptor).is_ok_and(|flags| (flags ^ adopted.flags) & FLAGS_THAT_COUNT == 0)
}

fn owns_offset(seen: &Seen) -> bool {
    seen.is_own(process::forks()) && process::single_threaded()
}

/// The instance's mount that what `statx` found is on.
fn mount_of(call: Call, found: &sys::statx) -> Option<MountPoint> {
    look_up(call, found).flatten()
}

/// The same; nothing when that cannot be told at the moment.
fn look_up(call: Call, found: &sys::statx) -> Option<Option<MountPoint>> {
    let device = (found.stx_dev_major, found.stx_dev_minor);
    let by_id = |freshness| {
        call.state.mounts.with(call.began.frame, freshness, |table| {
            table.by_id(found.stx_mnt_id).filter(|mount| mount.device == device).copied()
        })
    };
    // A number in the table on the right device is that mount; one that is missing may have been mounted just now.
    match by_id(Freshness::Lazy) {
        Some(Some(mount)) => Some(Some(mount)),
        _ if found.stx_dev_major == 0 => by_id(Freshness::Exact),
        _ => Some(None),
    }
}

fn classify<'a>(
    call: Call,
    descriptor: i32,
    seen: &Seen,
    found: &sys::statx,
    purpose: Purpose,
) -> Served<OpenFile<'a>> {
    let state = call.state;
    let kind = u32::from(found.stx_mode) & sys::S_IFMT;
    let mount = if kind == sys::S_IFREG || kind == sys::S_IFDIR { mount_of(call, found) } else { None };
    let Some((mount, instance)) = mount.and_then(|mount| Some((mount, *mount.instance()?))) else {
        state.descriptors.note(descriptor, seen, Known::NotOurs);
        return Err(Refusal::Foreign);
    };
    let uses = match seen.known {
        Known::Unknown => 1,
        Known::Candidate(uses) => uses + 1,
        _ => return Err(Refusal::left(Reason::NotAdopted)),
    };
    let is_read_only = || raw::open_flags(descriptor).is_ok_and(|flags| flags & sys::O_ACCMODE == sys::O_RDONLY);
    if !purpose.is_worth_adopting(uses, found.stx_size, is_read_only) {
        state.descriptors.note(descriptor, seen, Known::Candidate(uses));
        return Err(Refusal::left(Reason::FirstUse));
    }
    let flags = raw::open_flags(descriptor).map_err(|_| Refusal::Kernel)?;
    let session = state.sessions.enter(call.began, &instance).ok_or_else(|| Refusal::left(Reason::NoSession))?;
    if !session.serves(&mount) {
        state.descriptors.note(descriptor, seen, Known::NotOurs);
        return Err(Refusal::Foreign);
    }
    match adopt(call, descriptor, &session, seen, found, flags) {
        Some((handle, announces_closing)) => {
            let adopted = Adopted {
                handle,
                generation: session.generation,
                inode: found.stx_ino,
                mount: found.stx_mnt_id,
                flags,
                instance: session.index as u32,
                mode: u32::from(found.stx_mode),
                announces_closing,
            };
            state.descriptors.note(descriptor, seen, Known::Adopted(adopted));
            Ok(OpenFile { adopted, session, mount, descriptor, owns_offset: owns_offset(seen) })
        }
        None => {
            state.descriptors.note(descriptor, seen, Known::Refused);
            Err(Refusal::left(Reason::NotAdopted))
        }
    }
}

/// Asks the service for a handle on the description behind a number, and whether it hears of its closings. The process vouches that it
/// shares the description with nobody where it can.
fn adopt(
    call: Call,
    descriptor: i32,
    session: &Session<'_>,
    seen: &Seen,
    found: &sys::statx,
    flags: u32,
) -> Option<(u64, bool)> {
    if flags & sys::O_PATH != 0 {
        return None;
    }
    let is_regular = u32::from(found.stx_mode) & sys::S_IFMT == sys::S_IFREG;
    let mut is_unshared = is_regular && seen.is_unshared(process::forks());
    if is_unshared {
        process::note_vouched();
        is_unshared = seen.is_unshared(process::forks());
    }
    let mut message = Adopt { unshared: is_unshared.into(), ..Adopt::asking(session.connection().session()) };
    raw::adopt(descriptor, &mut message).ok()?;
    if is_unshared {
        take_back_unless_unshared(call, descriptor);
    }
    let Adopt { handle, inode, open_flags, announces_closing, .. } = message;
    if handle == 0 {
        return None;
    }
    if inode == found.stx_ino && (open_flags ^ flags) & FLAGS_THAT_COUNT == 0 {
        return Some((handle, announces_closing != 0));
    }
    // A description whose flags were changed is not adopted, and the service must not take it for one that is.
    raw::adopt(descriptor, &mut message).ok();
    None
}

/// After the process has vouched for a description: whoever came to share it, or to map it, before the service knew that, could not
/// take it back.
fn take_back_unless_unshared(call: Call, descriptor: i32) {
    let is_unshared = |seen: Seen| seen.is_unshared(process::forks());
    if !call.state.descriptors.look(descriptor).is_some_and(is_unshared) {
        raw::share(descriptor).ok();
        kernel_size::refresh(descriptor);
    }
}

/// Whether an open file is one of an instance. Its mount need not be anywhere any more, or may be covered by another: whoever has the file open
/// works on with it.
fn is_ours(call: Call, descriptor: i32) -> bool {
    let Ok(found) = raw::statx_descriptor(descriptor) else { return false };
    call.state.sessions.serve_device(call.began, (found.stx_dev_major, found.stx_dev_minor))
        || mount_of(call, &found).is_some_and(|mount| mount.instance().is_some())
}

/// The instance's mount that an open file lies on, adopted or not.
pub fn mount_behind(call: Call, descriptor: i32) -> Option<MountPoint> {
    let found = raw::statx_descriptor(descriptor).ok()?;
    mount_of(call, &found).filter(|mount| mount.instance().is_some())
}

/// Lets the kernel ask the service for the file's size, before it uses the size without asking: in a mapping or a splice,
/// where a size from before a change by the user-level path would cut the file short.
pub fn refresh_size(call: Call, descriptor: i32) {
    // Not by the table: a descriptor that was given up counts as foreign there.
    if is_ours(call, descriptor) {
        kernel_size::refresh(descriptor);
    }
}

/// Before the kernel maps what a number stands for: the mapping goes by the size that the kernel knows, from here on.
pub fn map_by_kernel(call: Call, descriptor: i32) {
    let descriptors = &call.state.descriptors;
    let seen = descriptors.look(descriptor);
    descriptors.mapped(descriptor);
    // One that nobody has vouched for, and that has no other number by which somebody may, needs no more than the note.
    let is_noted = seen.is_some_and(|seen| {
        let is_adopted = matches!(seen.known, Known::Adopted(_));
        !seen.is_unshared(process::forks()) || !(is_adopted || seen.is_duplicated())
    });
    if !is_noted && is_ours(call, descriptor) {
        raw::share(descriptor).ok();
    }
    refresh_size(call, descriptor);
}

/// Before other processes get this one's descriptions: the kernel knows the sizes of those that the process has vouched for when this
/// returns, and from then on.
pub fn share_all() {
    // Whoever makes a session from here on vouches for nothing that was open before.
    let (Some(vouched), Some(call)) = (process::vouched(), Call::begin()) else { return };
    let told = call.state.sessions.share_all(call.began);
    if !told {
        // By each number, then; what has none is closed.
        for descriptor in call.state.descriptors.unshared() {
            if is_ours(call, descriptor) {
                raw::share(descriptor).ok();
                refresh_size(call, descriptor);
            }
        }
    }
    process::note_shared(vouched);
}

/// Gives an adopted descriptor that may be written back to the kernel, before it is mapped shared.
///
/// Also later `mprotect` can make such a mapping writable, so that the protection asked for now does not matter.
pub fn give_up(call: Call, descriptor: i32) {
    let descriptors = &call.state.descriptors;
    let Some(seen) = descriptors.look(descriptor) else { return };
    let writable = || raw::open_flags(descriptor).is_ok_and(|flags| flags & sys::O_ACCMODE == sys::O_RDWR);
    match seen.known {
        Known::NotOurs => {}
        Known::Adopted(_) if writable() => leave_to_kernel(call, descriptor, &seen),
        _ if writable() => descriptors.note(descriptor, &seen, Known::NotOurs),
        _ => {}
    }
}

/// Before the flags of a description change: what it was adopted with no longer says how it is written, but the kernel tells nobody.
pub fn change_flags(call: Call, descriptor: i32, flags: u32) {
    let descriptors = &call.state.descriptors;
    let is_same = |adopted: Adopted| (adopted.flags ^ flags) & (sys::O_APPEND | sys::O_DIRECT) == 0;
    let seen = descriptors.look(descriptor);
    if seen.is_none_or(|seen| matches!(seen.known, Known::Adopted(adopted) if !is_same(adopted))) {
        descriptors.unpostable(descriptor);
    }
    if flags & sys::O_APPEND != 0 {
        append(call, descriptor);
    }
}

/// Gives a description back to the kernel that is to append from now on: what it writes then goes behind the end that the kernel
/// knows, which is told of changes of the size as long as somebody works by it.
fn append(call: Call, descriptor: i32) {
    let Some(seen) = call.state.descriptors.look(descriptor) else { return };
    let appends = matches!(seen.known, Known::Adopted(adopted) if adopted.flags & sys::O_APPEND != 0);
    if seen.known != Known::NotOurs && !appends && is_ours(call, descriptor) {
        leave_to_kernel(call, descriptor, &seen);
        refresh_size(call, descriptor);
    }
}

/// From here on no session works on the description behind a number of ours.
fn leave_to_kernel(call: Call, descriptor: i32, seen: &Seen) {
    /// Whoever has the description may give it up, whatever handles there are.
    const ANY_HANDLE: u64 = u64::MAX;
    let state = call.state;
    let mut message = Adopt::asking(0);
    message.handle = ANY_HANDLE;
    let given_up = raw::adopt(descriptor, &mut message).is_ok() && message.handle == 0;
    if let (false, Known::Adopted(adopted)) = (given_up, seen.known)
        && let Some(session) = state.sessions.enter_for(call.began, &adopted)
    {
        // A service that cannot do it lets go of everything when the session ends.
        session.end();
    }
    state.descriptors.note(descriptor, seen, Known::NotOurs);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_in_a_call_or_two_is_not_adopted() {
        const SHORT: u64 = ADOPT_AT_BYTES as u64 - 1;
        let first_use = |purpose: Purpose, size, is_read_only| {
            (1..100).find(|&uses| purpose.is_worth_adopting(uses, size, || is_read_only))
        };
        assert_eq!(first_use(Purpose::Read(4096), SHORT, true), Some(ADOPT_SHORT_AT_USE));
        assert_eq!(first_use(Purpose::Read(1 << 20), SHORT, true), Some(ADOPT_SHORT_AT_USE), "more than there is");
        assert_eq!(first_use(Purpose::Read(1 << 20), SHORT, false), Some(ADOPT_AT_USE));
        assert_eq!(first_use(Purpose::Read(4096), SHORT + 1, true), Some(ADOPT_AT_USE));
        assert_eq!(first_use(Purpose::Read(ADOPT_AT_BYTES), SHORT + 1, true), Some(1));
        assert_eq!(first_use(Purpose::Write(1), 0, false), Some(ADOPT_AT_USE));
        assert_eq!(first_use(Purpose::Write(ADOPT_AT_BYTES), 0, false), Some(1));
        assert_eq!(first_use(Purpose::Again, 0, true), Some(1));
        assert_eq!(first_use(Purpose::Other, 0, true), Some(ADOPT_AT_USE));
    }
}
