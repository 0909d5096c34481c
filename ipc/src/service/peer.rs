//! The identity of a connected client, as the kernel vouches for it.
//!
//! `SO_PEERCRED`, `SO_PEERGROUPS` and `SO_PEERPIDFD` are facts of the moment of `connect`. Capabilities and id maps are read from
//! `/proc` afterwards, so a process that connects and then changes its credentials must be detected. What was read has to name
//! the same ids and groups, the process must still be the one of the pidfd, and only a root of its own user namespace is believed
//! to have capabilities. (It could regain those by `exec` anyway; a program with file capabilities that the process became could
//! not be told from it.)

use poolfs_types::{Errno, IdMap};
use std::fs;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What the kernel vouches for about a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerFacts {
    /// The process, in this process's pid namespace.
    pub process: u32,
    /// Effective (and filesystem) user, as this namespace sees it.
    pub uid: u32,
    /// Effective (and filesystem) group.
    pub gid: u32,
    /// Real user.
    pub real_uid: u32,
    /// Real group.
    pub real_gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Effective capabilities in its own user namespace.
    pub capabilities: u64,
    /// Permitted capabilities, from which `access` by the real ids is decided for root.
    pub permitted: u64,
    /// Its user namespace's maps of users and groups; `None` in ours.
    pub user_namespace: Option<(IdMap, IdMap)>,
}

fn last_errno() -> Errno {
    Errno::from_raw(io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int, values: &mut [T]) -> Result<usize, Errno> {
    let mut length = std::mem::size_of_val(values) as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `values`, which holds plain integers (the two callers').
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, values.as_mut_ptr().cast(), &raw mut length)
    };
    if result == 0 { Ok(length as usize / size_of::<T>()) } else { Err(last_errno()) }
}

/// Process, user and group of the peer when it connected.
fn peer_credentials(socket: BorrowedFd<'_>) -> Result<[u32; 3], Errno> {
    let mut credentials = [0u32; 3];
    match option(socket, libc::SO_PEERCRED, &mut credentials)? {
        3 => Ok(credentials),
        _ => Err(Errno::EPROTO),
    }
}

/// Most supplementary groups of a client. The kernel writes all of them into the status of each of its threads, which is read again and
/// again; at this number that takes about twice as long as without any, at the most that Linux allows several hundred times.
const GROUPS_MAX: usize = 256;

fn peer_groups(socket: BorrowedFd<'_>) -> Result<Vec<u32>, Errno> {
    let mut groups = [0u32; GROUPS_MAX];
    match option(socket, libc::SO_PEERGROUPS, &mut groups) {
        Ok(count) => Ok(groups[..count].to_vec()),
        Err(Errno::ERANGE) => Err(Errno::E2BIG),
        Err(error) => Err(error),
    }
}

/// The number of the process that connected, which may have ended since; none when it is in no namespace of ours.
pub(super) fn process(socket: BorrowedFd<'_>) -> Option<u32> {
    peer_credentials(socket).ok().map(|[process, ..]| process).filter(|&process| process != 0)
}

/// A descriptor of the process that connected.
pub(super) fn peer_process(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    /// Linux's `SO_PEERPIDFD`.
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut number = [-1i32];
    option(socket, SO_PEERPIDFD, &mut number)?;
    if number[0] < 0 {
        return Err(Errno::ESRCH);
    }
    // SAFETY: the kernel just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(number[0]) })
}

/// Whether the process still is the one with this number.
pub(super) fn is_alive(process: BorrowedFd<'_>, number: u32) -> bool {
    process_number(process) == Ok(number)
}

/// The process's number as long as it lives: from the kernel's text about the pidfd.
fn process_number(process: BorrowedFd<'_>) -> Result<u32, Errno> {
    // Not by way of `self`: a process may be confined to a /proc in which no link is followed.
    let path = format!("/proc/{}/fdinfo/{}", std::process::id(), process.as_raw_fd());
    let text = fs::read_to_string(path).map_err(|_| Errno::ESRCH)?;
    let number: i64 = field(&text, "Pid").and_then(|value| value.parse().ok()).ok_or(Errno::ESRCH)?;
    u32::try_from(number).ok().filter(|&number| number > 0).ok_or(Errno::ESRCH)
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Whether what was read in `/proc` failed because the process or thread has ended.
pub(super) fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// What `/proc/PID/status` says: ids (real, effective, saved, filesystem), groups, capabilities.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StatusFile {
    uids: [u32; 4],
    gids: [u32; 4],
    groups: Vec<u32>,
    permitted: u64,
    effective: u64,
}

impl StatusFile {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let numbers = |name: &str| -> Option<Vec<u32>> {
            field(text, name)?.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
        };
        let hexadecimal = |name: &str| u64::from_str_radix(field(text, name)?, 16).ok();
        Some(Self {
            uids: numbers("Uid")?.try_into().ok()?,
            gids: numbers("Gid")?.try_into().ok()?,
            groups: numbers("Groups")?,
            permitted: hexadecimal("CapPrm")?,
            effective: hexadecimal("CapEff")?,
        })
    }
}

impl PeerFacts {
    /// The facts about the peer of a connected socket, whose process `process` is.
    ///
    /// # Errors
    /// `ESRCH` when the process is gone; `E2BIG` when it has too many groups; `EPERM` when it has changed since it connected, or has capabilities
    /// nobody can vouch for.
    pub(super) fn of(socket: BorrowedFd<'_>, process: BorrowedFd<'_>) -> Result<Self, Errno> {
        let [_, uid, gid] = peer_credentials(socket)?;
        let groups = peer_groups(socket)?;
        let number = process_number(process)?;
        let read = |file: &str| fs::read_to_string(format!("/proc/{number}/{file}")).map_err(|_| Errno::ESRCH);
        let status = StatusFile::parse(&read("status")?).ok_or(Errno::EPROTO)?;
        let namespace = |process: u32| fs::read_link(format!("/proc/{process}/ns/user")).map_err(|_| Errno::ESRCH);
        let user_namespace = if namespace(number)? == namespace(std::process::id())? {
            None
        } else {
            let map = |file: &str| IdMap::parse_proc(&read(file)?).ok_or(Errno::EPROTO);
            Some((map("uid_map")?, map("gid_map")?))
        };
        // As long as the pidfd names a live process, the number was its all the time.
        if process_number(process)? != number {
            return Err(Errno::ESRCH);
        }
        let facts = Self {
            process: number,
            uid,
            gid,
            real_uid: status.uids[0],
            real_gid: status.gids[0],
            groups,
            capabilities: status.effective,
            permitted: status.permitted,
            user_namespace,
        };
        if facts.agree_with(&status) { Ok(facts) } else { Err(Errno::EPERM) }
    }

    /// Whether who has this status has the rights that the process had.
    pub(super) fn are_those_of(&self, status: &StatusFile) -> bool {
        self.agree_with(status) && self.fit_into(status)
    }

    /// Whether the rights are none but those of the status.
    fn fit_into(&self, status: &StatusFile) -> bool {
        (status.uids[0], status.gids[0]) == (self.real_uid, self.real_gid)
            && self.capabilities & !status.effective == 0
            && self.permitted & !status.permitted == 0
    }

    fn agree_with(&self, status: &StatusFile) -> bool {
        let sorted = |groups: &[u32]| {
            let mut groups = groups.to_vec();
            groups.sort_unstable();
            groups
        };
        status.uids[1] == self.uid
            && status.uids[3] == self.uid
            && status.gids[1] == self.gid
            && status.gids[3] == self.gid
            && sorted(&status.groups) == sorted(&self.groups)
            && (status.effective == 0 || self.is_root())
    }

    /// Whether it is the root of its user namespace.
    fn is_root(&self) -> bool {
        match &self.user_namespace {
            None => self.uid == 0,
            Some((uids, _)) => uids.inside(self.uid) == Some(0),
        }
    }

    /// Whether a message with these credentials (process, real user, real group) comes from the same process with the
    /// same rights.
    pub(super) fn sent(&self, credentials: [u32; 3]) -> bool {
        credentials == [self.process, self.real_uid, self.real_gid]
    }
}

/// Has the kernel refuse descriptors that are sent to `socket`, and to those accepted from it, on their way: the last close
/// of a descriptor can wait for as long as whoever sent it likes (a connection that lingers, a file of a filesystem that
/// does not answer). Kernels before 6.16 cannot.
pub(super) fn refuse_descriptors(socket: BorrowedFd<'_>) {
    /// Linux's `SO_PASSRIGHTS`.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let off = 0i32;
    let length = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the option's value is an integer that is valid for the call. A kernel that does not know it says so.
    unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const off).cast(), length);
    }
}

/// Receives one message of at most `bytes.len()` bytes with its sender's credentials. `None`: the peer hung up.
///
/// # Errors
/// `EAGAIN` when there is none yet, `EPROTO` for a longer one, one without credentials or one with descriptors.
pub(super) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Option<(usize, [u32; 3])>, Errno> {
    // Room for the credentials alone: the kernel drops what does not fit, and says so.
    let mut control = [0u64; 4];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: all-zero is a valid msghdr.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = std::mem::size_of_val(&control);
    // SAFETY: the header names `bytes` and `control`, both valid for the call.
    let length =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) };
    let length = usize::try_from(length).map_err(|_| last_errno())?;
    let mut credentials = None;
    // SAFETY: the kernel filled the header; the macros walk the control bytes it wrote.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !message.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return headers inside the control bytes, with their data behind them.
        let (kind, data, end) = unsafe {
            let data = libc::CMSG_DATA(message);
            let bytes = (*message).cmsg_len.saturating_sub(data.offset_from(message.cast()) as usize);
            (((*message).cmsg_level, (*message).cmsg_type), data, bytes)
        };
        if kind == (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) && end >= 12 {
            // SAFETY: twelve bytes of plain integers lie there.
            credentials = Some(unsafe { data.cast::<[u32; 3]>().read_unaligned() });
        }
        // SAFETY: as above.
        message = unsafe { libc::CMSG_NXTHDR(&raw const header, message) };
    }
    if length == 0 {
        return Ok(None);
    }
    match credentials {
        Some(credentials) if header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0 => {
            Ok(Some((length, credentials)))
        }
        _ => Err(Errno::EPROTO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nUid:\t1\t2\t2\t2\nGid:\t5\t6\t7\t6\nGroups:\t9 8 \nCapPrm:\t00000000000000ff\n\
                          CapEff:\t0000000000000000\n";

    fn facts() -> PeerFacts {
        PeerFacts {
            process: 4,
            uid: 2,
            gid: 6,
            real_uid: 1,
            real_gid: 5,
            groups: vec![8, 9],
            capabilities: 0,
            permitted: 0xff,
            user_namespace: None,
        }
    }

    #[test]
    fn a_process_that_became_another_is_told_apart() {
        let status = |text: &str| StatusFile::parse(text).expect("well-formed");
        assert!(facts().agree_with(&status(STATUS)));
        assert!(!facts().agree_with(&status(&STATUS.replace("1\t2\t2\t2", "1\t0\t0\t0"))), "set-user-id program");
        assert!(!facts().agree_with(&status(&STATUS.replace("9 8", "9 8 0"))), "more groups");
        assert!(!facts().agree_with(&status(&STATUS.replace("CapEff:\t00000000000000", "CapEff:\t000000000000ff"))));
        assert!(facts().fit_into(&status(STATUS)));
        assert!(!facts().fit_into(&status(&STATUS.replace("Uid:\t1", "Uid:\t2"))), "another real user");
        assert!(!facts().fit_into(&status(&STATUS.replace("00ff", "007f"))), "a capability less");
        assert!(facts().sent([4, 1, 5]) && !facts().sent([4, 2, 6]) && !facts().sent([5, 1, 5]));
    }

    #[test]
    fn root_of_a_namespace_is_found_by_its_map() {
        let map = IdMap::parse_proc("0 100000 65536").expect("a map");
        let root = PeerFacts { uid: 100_000, user_namespace: Some((map.clone(), map)), ..facts() };
        assert!(root.is_root());
        assert!(!PeerFacts { uid: 0, ..root.clone() }.is_root());
        assert!(!PeerFacts { uid: 100_001, ..root }.is_root());
    }

    #[test]
    fn malformed_texts_give_nothing() {
        assert_eq!(StatusFile::parse("Uid:\t1 2 3"), None);
    }
}
