//! `stat` in its forms, and `access`.
//!
//! Paths are left to the kernel. What it has cached of names and attributes is true (the service tells it of every change before it
//! answers), costs a tenth of a request, and serves the next `open` of the name. Descriptors are left to the kernel too, with two
//! exceptions. Files that this process may be changing by requests are asked for by request: otherwise the kernel would have to be told of
//! every change for the sake of the next `fstat`. For files that are looked at again and again, the service notes the attributes where the
//! library reads them by itself.

use super::data::{is_worth_segment, obtain_segment};
use super::descriptors::{EBADF, is_own};
use super::{by_file, kernel, on_descriptor, request};
use crate::descriptors::{Adopted, Known};
use crate::files::{Purpose, direct_file, open_file_for};
use crate::memory::{UserMemory, UserPath};
use crate::outcome::{Refusal, Served, finish};
use crate::paths::Extra;
use crate::state::{Call, state};
use crate::{raw, trace};
use core::sync::atomic::{AtomicU64, Ordering};
use linux_raw_sys::general as sys;
use poolfs_ipc::OWN_DESCRIPTOR_MIN;
use poolfs_ipc::wire::{Operation, WireAttributes};
use poolfs_types::limits::BLOCK_SIZE;

/// `fstat`. Who tries every number to find out what is open does not find our own descriptors.
pub fn fstat(descriptor: i32, out: UserMemory) -> isize {
    if let Some((attributes, device)) = optimistic_stat(descriptor)
        && out.put(stat_of(&attributes, device))
    {
        trace::direct_stat();
        return 0;
    }
    finish(served_stat(descriptor, out), || {
        if descriptor >= OWN_DESCRIPTOR_MIN && state().is_some_and(|state| is_own(state, descriptor)) {
            return -EBADF;
        }
        kernel(sys::__NR_fstat, [descriptor as usize, out.address(), 0, 0, 0, 0])
    })
}

/// What the service vouches for of the file that a number was found to stand for, and the device number of its mount.
#[inline]
fn optimistic_stat(descriptor: i32) -> Option<(WireAttributes, (u32, u32))> {
    let state = state()?;
    let found = state.descriptors.found(descriptor)?;
    if state.is_own_process() { state.sessions.optimistic_stat(&found) } else { None }
}

fn served_stat(descriptor: i32, out: UserMemory) -> Served<usize> {
    if out.is_impossible() {
        return Err(Refusal::Foreign);
    }
    let (attributes, device) = looked_at(descriptor)?;
    if out.put(stat_of(&attributes, device)) { Ok(0) } else { Err(Refusal::Kernel) }
}

/// The size of a file that this process may be changing by requests.
pub(super) fn size_while_changing(descriptor: i32) -> Served<u64> {
    let seen = on_descriptor(descriptor)?.state.descriptors.look(descriptor).ok_or(Refusal::Foreign)?;
    let is_changing = matches!(seen.known, Known::Adopted(adopted) if adopted.flags & sys::O_ACCMODE != sys::O_RDONLY);
    if !is_changing {
        return Err(Refusal::Foreign);
    }
    let found = optimistic_stat(descriptor).map_or_else(|| looked_at(descriptor), Ok)?;
    Ok(found.0.size)
}

/// The attributes without the kernel: from what the service vouches for, or by request of a file that this process may be changing
/// by requests, and of one for which the service will vouch from then on.
fn looked_at(descriptor: i32) -> Served<(WireAttributes, (u32, u32))> {
    let call = on_descriptor(descriptor)?;
    if let Some(file) = direct_file(call, descriptor)
        && let Some(attributes) = file.attributes()
    {
        return Ok((attributes, file.device()));
    }
    let seen = call.state.descriptors.look(descriptor).ok_or(Refusal::Foreign)?;
    let is_due = is_worth_segment(call, descriptor);
    let is_asked = match seen.known {
        Known::Adopted(adopted) if adopted.flags & sys::O_ACCMODE != sys::O_RDONLY => true,
        // Who has to verify each time what the number stands for is faster by the kernel.
        Known::Adopted(adopted) if adopted.announces_closing => is_due || has_lease(call, &adopted),
        Known::Unknown | Known::Candidate(_) => is_due,
        _ => false,
    };
    if !is_asked {
        return Err(Refusal::Foreign);
    }
    let purpose = if is_due { Purpose::Again } else { Purpose::Other };
    let file = open_file_for(call, descriptor, purpose)?;
    if !file.is_regular() || !file.adopted.announces_closing {
        return Err(Refusal::Kernel);
    }
    if is_due && file.is_readable() {
        file.session.end_segment_without_lease(file.adopted.handle);
        obtain_segment(call, &file);
    }
    if file.is_settled(call)
        && let Some(attributes) = file.session.noted_attributes(file.adopted.handle)
    {
        return Ok((attributes, file.mount.device));
    }
    let request = request(Operation::Stat);
    let mut found = Err(Refusal::Kernel);
    by_file(call, &file, &request, &Extra::default(), &mut |reply, _, mount| {
        file.session.note_owners(file.adopted.handle, reply);
        found = Ok((reply.attributes, mount.device));
    })?;
    found
}

/// Whether the service may vouch for an adopted file's attributes.
fn has_lease(call: Call, adopted: &Adopted) -> bool {
    let session = call.state.sessions.enter_for(call.began, adopted);
    session.is_some_and(|session| session.witness(adopted.handle).is_some())
}

/// `statx`; of an open file as [`fstat`], of others by the kernel.
pub fn statx(descriptor: i32, path: UserPath, flags: i32, mask: u32, out: UserMemory) -> isize {
    const INDIFFERENT: u32 = sys::AT_SYMLINK_NOFOLLOW | sys::AT_NO_AUTOMOUNT | sys::AT_STATX_DONT_SYNC;
    let by_kernel = || {
        let arguments = [descriptor as usize, path.address(), flags as usize, mask as usize, out.address(), 0];
        kernel(sys::__NR_statx, arguments)
    };
    let is_of_descriptor = flags as u32 & !INDIFFERENT == sys::AT_EMPTY_PATH && descriptor >= 0;
    if !is_of_descriptor {
        return by_kernel();
    }
    let now = raw::coarse_time_ns();
    if !path.is_empty_at(now) {
        return by_kernel();
    }
    let optimistic = optimistic_stat(descriptor).inspect(|_| trace::direct_stat());
    let found = optimistic.or_else(|| looked_at(descriptor).ok());
    let mount = state().and_then(|state| state.descriptors.look(descriptor)).and_then(|seen| match seen.known {
        Known::Adopted(adopted) => Some(adopted.mount),
        _ => None,
    });
    let (Some((attributes, device)), Some(mount)) = (found, mount) else { return by_kernel() };
    let form = &FORMS[(mount as usize ^ mask as usize) % FORMS.len()];
    if let Some(told) = form.told(mount, mask)
        && out.put(statx_of(&attributes, device, mount, told))
    {
        return 0;
    }
    let result = by_kernel();
    if let (0, Some(answer)) = (result, out.get::<[u64; STATX_WORDS]>()) {
        form.learn(mask, answer, |told| statx_of(&attributes, device, mount, told));
    }
    result
}

const STATX_WORDS: usize = size_of::<sys::statx>() / size_of::<u64>();

/// What the kernel says of all files of a mount beside their attributes: which fields it fills in, the size of a block, what it
/// knows of special attributes.
#[derive(Clone, Copy)]
struct Told {
    mask: u32,
    block_size: u32,
    special: u64,
    special_known: u64,
}

/// What it says when it is asked for these fields of files of this mount, as it was seen to. All zeros: nothing is known.
struct Form([AtomicU64; 6]);

static FORMS: [Form; 4] = [const { Form([const { AtomicU64::new(0) }; 6]) }; 4];

impl Form {
    /// Two threads may write at a time. Not 0 for zeros.
    fn sum(words: &[u64]) -> u64 {
        // FNV-1a, a word at a time.
        words.iter().fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3))
    }

    fn told(&self, mount: u64, asked: u32) -> Option<Told> {
        let words @ [of_mount, masks, block_size, special, special_known, sum] =
            self.0.each_ref().map(|word| word.load(Ordering::Relaxed));
        let is_it = (of_mount, (masks >> 32) as u32) == (mount, asked) && Self::sum(&words[..5]) == sum;
        is_it.then_some(Told { mask: masks as u32, block_size: block_size as u32, special, special_known })
    }

    /// Remembers what is in an answer, when that is all there is in it beside the attributes.
    #[cold]
    fn learn(&self, asked: u32, answer: [u64; STATX_WORDS], expected: impl FnOnce(Told) -> sys::statx) {
        // SAFETY: numbers only, any of which is valid, as many bytes.
        let found = unsafe { core::mem::transmute::<[u64; STATX_WORDS], sys::statx>(answer) };
        let told = Told {
            mask: found.stx_mask,
            block_size: found.stx_blksize,
            special: found.stx_attributes,
            special_known: found.stx_attributes_mask,
        };
        // SAFETY: numbers only, without any padding.
        if unsafe { core::mem::transmute::<sys::statx, [u64; STATX_WORDS]>(expected(told)) } != answer {
            return;
        }
        let masks = u64::from(asked) << 32 | u64::from(told.mask);
        let words = [found.stx_mnt_id, masks, told.block_size.into(), told.special, told.special_known];
        for (word, new) in self.0.iter().zip(words.into_iter().chain([Self::sum(&words)])) {
            word.store(new, Ordering::Relaxed);
        }
    }
}

fn statx_of(attributes: &WireAttributes, device: (u32, u32), mount: u64, told: Told) -> sys::statx {
    let times: [sys::statx_timestamp; 3] = core::array::from_fn(|at| sys::statx_timestamp {
        tv_sec: attributes.seconds[at],
        tv_nsec: attributes.nanoseconds[at],
        __reserved: 0,
    });
    let number = attributes.device;
    // SAFETY: numbers only, for which zeros are valid.
    let zeros: sys::statx = unsafe { core::mem::zeroed() };
    sys::statx {
        stx_mask: told.mask,
        stx_blksize: told.block_size,
        stx_attributes: told.special,
        stx_nlink: attributes.links,
        stx_uid: attributes.uid,
        stx_gid: attributes.gid,
        stx_mode: attributes.mode as u16,
        stx_ino: attributes.inode,
        stx_size: attributes.size,
        stx_blocks: attributes.blocks,
        stx_attributes_mask: told.special_known,
        stx_atime: times[0],
        stx_mtime: times[1],
        stx_ctime: times[2],
        stx_rdev_major: number >> 8 & 0xfff,
        stx_rdev_minor: number & 0xff | number >> 12 & 0xf_ff00,
        stx_dev_major: device.0,
        stx_dev_minor: device.1,
        stx_mnt_id: mount,
        ..zeros
    }
}

/// `fstatat`; `stat` and `lstat` are special cases
pub fn fstatat(descriptor: i32, path: UserPath, out: UserMemory, flags: i32) -> isize {
    kernel(sys::__NR_newfstatat, [descriptor as usize, path.address(), out.address(), flags as usize, 0, 0])
}

/// `faccessat` with the flags of the newer call; `access` and `euidaccess` are special cases
pub fn faccessat(descriptor: i32, path: UserPath, mode: i32, flags: i32) -> isize {
    if flags == 0 {
        return kernel(sys::__NR_faccessat, [descriptor as usize, path.address(), mode as usize, 0, 0, 0]);
    }
    kernel(sys::__NR_faccessat2, [descriptor as usize, path.address(), mode as usize, flags as usize, 0, 0])
}

/// The kernel's encoding of a device number, as `st_dev` has it.
fn device_number((major, minor): (u32, u32)) -> u64 {
    u64::from(minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12)
}

fn stat_of(attributes: &WireAttributes, device: (u32, u32)) -> sys::stat {
    let [accessed, modified, changed] = attributes.seconds.map(|seconds| seconds as u64);
    let [accessed_ns, modified_ns, changed_ns] = attributes.nanoseconds.map(u64::from);
    sys::stat {
        st_dev: device_number(device),
        st_ino: attributes.inode,
        st_nlink: u64::from(attributes.links),
        st_mode: attributes.mode,
        st_uid: attributes.uid,
        st_gid: attributes.gid,
        __pad0: 0,
        st_rdev: u64::from(attributes.device),
        st_size: attributes.size as i64,
        st_blksize: BLOCK_SIZE as i64,
        st_blocks: attributes.blocks as i64,
        st_atime: accessed,
        st_atime_nsec: accessed_ns,
        st_mtime: modified,
        st_mtime_nsec: modified_ns,
        st_ctime: changed,
        st_ctime_nsec: changed_ns,
        __unused: [0; 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_beside_attributes_is_learned_when_nothing_else_is_said() {
        let form = Form([const { AtomicU64::new(0) }; 6]);
        assert!(form.told(0, 0).is_none());
        let attributes = WireAttributes { inode: 7, nanoseconds: [1, 2, 3], ..WireAttributes::default() };
        let told = Told { mask: 0x17ff, block_size: 4096, special: 0, special_known: 5 };
        let expected = |told| statx_of(&attributes, (0, 9), 77, told);
        // SAFETY: as in `learn`.
        let words = |answer| unsafe { core::mem::transmute::<sys::statx, [u64; STATX_WORDS]>(answer) };
        form.learn(0xfff, words(sys::statx { stx_dio_mem_align: 512, ..expected(told) }), expected);
        form.learn(0xfff, words(sys::statx { stx_size: 1, ..expected(told) }), expected);
        assert!(form.told(77, 0xfff).is_none(), "there is more to say");
        form.learn(0xfff, words(expected(told)), expected);
        let learned = form.told(77, 0xfff).expect("it was learned");
        assert_eq!((learned.mask, learned.block_size, learned.special, learned.special_known), (0x17ff, 4096, 0, 5));
        assert!(form.told(77, 0x7ff).is_none() && form.told(78, 0xfff).is_none());
        form.0[2].store(1, Ordering::Relaxed);
        assert!(form.told(77, 0xfff).is_none(), "half written");
    }

    #[test]
    fn structures_have_libcs_layout() {
        assert_eq!(size_of::<sys::stat>(), size_of::<libc::stat>());
        assert_eq!(core::mem::offset_of!(sys::stat, st_size), core::mem::offset_of!(libc::stat, st_size));
        assert_eq!(core::mem::offset_of!(sys::stat, st_ctime_nsec), core::mem::offset_of!(libc::stat, st_ctime_nsec));
        assert_eq!(core::mem::offset_of!(sys::stat, st_rdev), core::mem::offset_of!(libc::stat, st_rdev));
    }

    #[test]
    fn device_numbers_are_encoded_as_libc_decodes_them() {
        for (major, minor) in [(0, 98), (8, 1), (259, 300), (0, 1_000_000)] {
            let number = device_number((major, minor));
            assert_eq!((libc::major(number), libc::minor(number)), (major, minor));
        }
    }
}
