//! The INIT handshake: the first message of a connection and its answer, by which kernel and service agree on features.

use super::abi::{self, init};
use super::device::{Buffer, Device, TRANSFER_BYTES_MAX};
use super::incoming::{Message, Offer, Operation};
use super::rings::{self, Entries};
use crate::transfers::MountTransfers;
use poolfs_libservice::types::Errno;
use poolfs_service_protocol::Transport;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tracing::debug;
use zerocopy::IntoBytes;

/// The oldest protocol that has all messages relied on: Linux 5.4.
const VERSION_MINOR_MIN: u32 = 31;

/// What is used where the kernel has it.
///
/// Locks are not among them: every descriptor being a real one, the kernel keeps them. The cache for writing back is not,
/// because what a program has written must be known here at once. Truncation by open is not, because the kernel finds out
/// only afterwards that the file is a program that runs. Direct writes that the kernel goes on from before they are answered
/// (`FUSE_ASYNC_DIO`) are not: it drops its pages before them and not again after them, so that what somebody reads meanwhile stays
/// in its cache, old, for good.
const WANTED: &[(u64, &str)] = &[
    (init::ASYNC_READ, "reads side by side"),
    (init::BIG_WRITES, "writes of more than a page"),
    (init::DONT_MASK, "umasks left to the service"),
    (init::HAS_IOCTL_DIR, "ioctl on directories"),
    (init::DO_READDIRPLUS, "listings with attributes"),
    (init::READDIRPLUS_AUTO, "listings with attributes where they pay"),
    (init::PARALLEL_DIROPS, "look-ups side by side"),
    (init::POSIX_ACL, "access lists"),
    (init::MAX_PAGES, "requests of more than 128 KiB"),
    (init::HANDLE_KILLPRIV_V2, "set-id bits left to the service"),
    (init::INIT_EXT, "more than 32 capabilities"),
    (init::HAS_EXPIRE_ONLY, "names that expire"),
    (init::DIRECT_IO_ALLOW_MMAP, "mappings of files open for direct access"),
];

/// The same where nobody else changes anything.
const WANTED_ALONE: &[(u64, &str)] = &[
    // Where a link leads never changes: another target is another link, with a number of its own.
    (init::CACHE_SYMLINKS, "targets of links kept"),
    (init::EXPLICIT_INVAL_DATA, "pages dropped only when told"),
];

/// The same where others may change files: nobody tells the kernel.
const WANTED_TIMED: &[(u64, &str)] = &[(init::AUTO_INVAL_DATA, "pages dropped when a file's size or time has changed")];

/// The oldest protocol by which the kernel can be asked to forget nodes: Linux 6.18. Before, it could keep what it maps by itself for
/// good.
const VERSION_MINOR_PRUNES: u32 = 45;

/// How deep the kernel takes this filesystem to be stacked when it maps files from another one: another one may be put on top.
const STACK_DEPTH: u32 = 1;

/// Requests the kernel has under way on nobody's behalf, and when it takes the service for congested.
const BACKGROUND_MAX: u16 = 64;
const CONGESTED: u16 = BACKGROUND_MAX / 4 * 3;

/// Connects with the kernel, which has sent its first message when the mount was made. Where it was agreed that requests come
/// by rings, there are entries for all its queues, which it waits for; not where it is to be `/dev/fuse`. What they take is of `transfers`.
///
/// # Errors
/// Those of the device, and `EPROTO` when the kernel speaks another protocol.
pub(super) fn connect(
    descriptor: OwnedFd,
    cpus: &[u32],
    transfers: &Arc<MountTransfers>,
    transport: Option<Transport>,
    is_timed: bool,
) -> io::Result<(Device, Entries)> {
    let mut device = Device::new(descriptor);
    let mut buffer = Buffer::new(transfers);
    let length = buffer.receive(&device, false)?.unwrap_or(0);
    let (message, _) = buffer.split(length);
    let Ok(Message::Call(call)) = Message::parse(message) else {
        return Err(io::Error::from_raw_os_error(Errno::EPROTO.raw()));
    };
    let mut entries = Entries::default();
    let agreed = match call.operation {
        Ok(Operation::Init(offer)) => {
            if offer.flags & init::OVER_IO_URING != 0 && transport != Some(Transport::DevFuse) {
                entries = rings::entries(&device, cpus, transfers);
            }
            agree(&offer, !entries.all.is_empty(), is_timed)
        }
        _ => Err(Errno::EPROTO),
    };
    device.answer(call.unique, agreed.as_ref().map(IntoBytes::as_bytes).map_err(|&errno| errno))?;
    let agreed = agreed.map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
    let flags = u64::from(agreed.flags_high) << 32;
    device.set_expires_names(flags & init::HAS_EXPIRE_ONLY != 0);
    device.set_takes_backings(flags & init::PASSTHROUGH != 0);
    Ok((device, entries))
}

fn agree(offer: &Offer, by_rings: bool, is_timed: bool) -> Result<abi::InitOut, Errno> {
    if offer.major != abi::VERSION_MAJOR || offer.minor < VERSION_MINOR_MIN {
        return Err(Errno::EPROTO);
    }
    let mut flags = if by_rings { init::OVER_IO_URING } else { 0 };
    for &(flag, what) in WANTED.iter().chain(if is_timed { WANTED_TIMED } else { WANTED_ALONE }) {
        if offer.flags & flag != 0 {
            flags |= flag;
        } else {
            debug!(what, "the kernel lacks a FUSE capability");
        }
    }
    let passes_through = !is_timed && offer.minor >= VERSION_MINOR_PRUNES && offer.flags & init::PASSTHROUGH != 0;
    if passes_through {
        flags |= init::PASSTHROUGH;
    }
    Ok(abi::InitOut {
        major: abi::VERSION_MAJOR,
        minor: abi::VERSION_MINOR,
        read_ahead_max: offer.read_ahead_max,
        flags: flags as u32,
        flags_high: (flags >> 32) as u32,
        background_max: BACKGROUND_MAX,
        congestion_threshold: CONGESTED,
        write_max: TRANSFER_BYTES_MAX as u32,
        time_granularity: 1,
        pages_max: (TRANSFER_BYTES_MAX / 4096) as u16,
        stack_depth_max: if passes_through { STACK_DEPTH } else { 0 },
        ..abi::InitOut::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(major: u32, minor: u32, flags: u64) -> Offer {
        Offer { major, minor, read_ahead_max: 1 << 17, flags }
    }

    #[test]
    fn only_what_the_kernel_offers_is_agreed_on() {
        let all = agree(&offer(7, 45, u64::MAX), false, false).expect("agreed");
        let flags = |out: &abi::InitOut| u64::from(out.flags) | u64::from(out.flags_high) << 32;
        let wanted = WANTED.iter().chain(WANTED_ALONE).fold(init::PASSTHROUGH, |flags, (flag, _)| flags | flag);
        assert_eq!(flags(&all), wanted);
        let timed = agree(&offer(7, 45, u64::MAX), false, true).expect("agreed");
        let kept_back = init::PASSTHROUGH | init::CACHE_SYMLINKS | init::EXPLICIT_INVAL_DATA;
        assert_eq!(flags(&timed), wanted & !kept_back | init::AUTO_INVAL_DATA);
        assert_eq!((all.write_max, all.pages_max, all.read_ahead_max), (1 << 20, 256, 1 << 17));
        let rings = agree(&offer(7, 45, u64::MAX), true, false).expect("agreed");
        assert_eq!((rings.flags, rings.flags_high), (all.flags, all.flags_high | 1 << (41 - 32)));
        let few = agree(&offer(7, 31, init::BIG_WRITES | 1 << 1), false, false).expect("agreed");
        assert_eq!((u64::from(few.flags), few.flags_high), (init::BIG_WRITES, 0));
    }

    #[test]
    fn programs_are_mapped_from_the_cache_where_the_kernel_can_give_them_back() {
        let agreed = |minor, flags| {
            let out = agree(&offer(7, minor, flags), false, false).expect("agreed");
            (u64::from(out.flags_high) << 32 & init::PASSTHROUGH != 0, out.stack_depth_max)
        };
        assert_eq!(agreed(45, u64::MAX), (true, 1));
        assert_eq!(agreed(44, u64::MAX), (false, 0));
        assert_eq!(agreed(45, !init::PASSTHROUGH), (false, 0));
    }

    #[test]
    fn another_protocol_is_refused() {
        for (major, minor) in [(8, 0), (6, 45), (7, 30)] {
            assert_eq!(agree(&offer(major, minor, u64::MAX), false, false).err(), Some(Errno::EPROTO));
        }
    }
}
