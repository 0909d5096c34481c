//! Sealed memory files and their mappings, which a forked child does not have.

use core::ffi::{CStr, c_void};
use core::ptr::{NonNull, null_mut};
use poolfs_types::Errno;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

/// The unit of mapping.
pub const PAGE: usize = 4096;

/// What the kernel can map by one entry, where it has so much together: with pages of 4 KiB, 2 MiB on x86-64 and on ARM.
pub const HUGE_PAGE: usize = 2 << 20;

/// What every session's memory is sealed with: it never changes its size, so that nobody's access can fault.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// An error of the kernel in the project's own type.
pub(crate) fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// Makes a memory file of `length` bytes, mode 0600, sealed.
///
/// # Errors
/// Those of `memfd_create(2)`, `ftruncate(2)` and `fcntl(2)`.
pub fn create_sealed(name: &CStr, length: usize) -> Result<OwnedFd, Errno> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(errno)?;
    fchmod(&file, Mode::RUSR | Mode::WUSR).map_err(errno)?;
    ftruncate(&file, length as u64).map_err(errno)?;
    fcntl_add_seals(&file, SEALS).map_err(errno)?;
    Ok(file)
}

/// A shared mapping of a whole memory file.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory owned by this value; all access to it goes by atomics and by raw copies that
// tolerate concurrent writers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file`, which must be sealed against changes of its size and at least that long.
    /// With `dont_fork` a forked child does not inherit the mapping.
    ///
    /// # Errors
    /// `EPROTO` for a file of another kind, else those of `mmap(2)`.
    pub fn of_sealed(file: impl AsFd, length: usize, dont_fork: bool) -> Result<Self, Errno> {
        let file = file.as_fd();
        let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SEALS));
        let size = fstat(file).map_err(errno)?.st_size;
        if !sealed || length == 0 || u64::try_from(size).is_ok_and(|size| size < length as u64) {
            return Err(Errno::EPROTO);
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap(null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        let mapping = Self::owning(base, length)?;
        if dont_fork {
            mapping.advise(Advice::LinuxDontFork)?;
        }
        Ok(mapping)
    }

    /// Maps `length` bytes of a file of the service's own tmpfs, which nobody makes shorter: clients have only a read-only way to
    /// it. `writable` as the service. A forked child does not inherit the mapping.
    ///
    /// # Errors
    /// `EPROTO` for a file that is shorter, else those of `mmap(2)`.
    pub fn of_segment(file: impl AsFd, length: usize, writable: bool) -> Result<Self, Errno> {
        let file = file.as_fd();
        let size = fstat(file).map_err(errno)?.st_size;
        if length == 0 || u64::try_from(size).is_ok_and(|size| size < length as u64) {
            return Err(Errno::EPROTO);
        }
        let mapping = Self::of_range(file, 0, length, writable)?;
        mapping.advise(Advice::LinuxDontFork)?;
        Ok(mapping)
    }

    /// As [`Self::of_segment`], to read it. Of a file that is shorter only its pages are mapped: the mapping's length says which.
    ///
    /// # Errors
    /// `EPROTO` for an empty file, else those of `mmap(2)`.
    pub fn of_segment_as_far_as_it_goes(file: impl AsFd, length: usize) -> Result<Self, Errno> {
        let file = file.as_fd();
        let size = usize::try_from(fstat(file).map_err(errno)?.st_size).unwrap_or(0);
        let length = length.min(size.next_multiple_of(PAGE));
        if length == 0 {
            return Err(Errno::EPROTO);
        }
        let mapping = Self::of_range(file, 0, length, false)?;
        mapping.advise(Advice::LinuxDontFork)?;
        Ok(mapping)
    }

    /// Maps a part of a file. What is long enough is placed so that the kernel can map it by huge pages.
    ///
    /// # Errors
    /// Those of `mmap(2)`.
    pub(crate) fn of_range(file: impl AsFd, offset: u64, length: usize, writable: bool) -> Result<Self, Errno> {
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        if length < HUGE_PAGE {
            // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
            return Self::owning(unsafe { mmap(null_mut(), length, access, flags, file, offset) }, length);
        }
        let room = length.checked_add(HUGE_PAGE).ok_or(Errno::ENOMEM)?;
        // SAFETY: as above.
        let reserved =
            unsafe { mmap_anonymous(null_mut(), room, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE) };
        let reserved = Self::owning(reserved, room)?;
        let before = reserved.base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `before` is less than a huge page, which the room has beside `length`.
        let place = unsafe { reserved.base.add(before) };
        // SAFETY: the mapping replaces a part of the reserved range, which nobody has the address of.
        let base = unsafe { mmap(place.as_ptr().cast(), length, access, flags | MapFlags::FIXED, file, offset) };
        base.map_err(errno)?;
        let (start, end) = (core::mem::ManuallyDrop::new(reserved).base, length.next_multiple_of(PAGE));
        for (at, rest) in [(0, before), (before + end, room.next_multiple_of(PAGE) - before - end)] {
            if rest > 0 {
                // SAFETY: what is left of the reserved range on this side, which is whole pages.
                let unmapped = unsafe { munmap(start.add(at).as_ptr().cast(), rest) };
                debug_assert!(unmapped.is_ok());
            }
        }
        Ok(Self { base: place, length })
    }

    fn owning(base: Result<*mut c_void, rustix::io::Errno>, length: usize) -> Result<Self, Errno> {
        let base = NonNull::new(base.map_err(errno)?.cast()).ok_or(Errno::ENOMEM)?;
        Ok(Self { base, length })
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this mapping; the advices used here leave its bytes alone, or make them
        // zeros as any other user of the memory may at any time.
        unsafe { madvise(self.base.as_ptr().cast(), self.length, advice) }.map_err(errno)
    }

    /// Gives the memory back to the kernel, for all who have mapped it: its bytes are zeros until somebody touches them
    /// again, who then pays for them.
    pub fn discard(&self) {
        // It can fail only for a file that cannot have holes, which these are not.
        let discarded = self.advise(Advice::LinuxRemove);
        debug_assert!(discarded.is_ok());
    }

    /// Its first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Its length in bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value, and whatever was derived from it borrows the value.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok());
    }
}

/// A page that is zero in every forked child: tells whose the session is.
#[derive(Debug)]
pub struct ForkMarker(Mapping);

impl ForkMarker {
    /// A marker of this process.
    ///
    /// # Errors
    /// Those of `mmap(2)` and `madvise(2)`.
    pub fn new() -> Result<Self, Errno> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let base = unsafe { mmap_anonymous(null_mut(), PAGE, access, MapFlags::PRIVATE) };
        let mapping = Mapping::owning(base, PAGE)?;
        mapping.advise(Advice::LinuxWipeOnFork)?;
        // SAFETY: the page is mapped, writable and not yet shared with another thread.
        unsafe { mapping.base.as_ptr().write_volatile(1) };
        Ok(Self(mapping))
    }

    /// Whether this is the process that made the marker.
    pub fn is_ours(&self) -> bool {
        // SAFETY: the page is mapped as long as `self` lives, in children too.
        unsafe { self.0.base.as_ptr().read_volatile() != 0 }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_long_enough_is_aligned_for_huge_pages_and_leaves_nothing_mapped_beside_it() {
        let length = HUGE_PAGE + 5 * PAGE;
        let file = create_sealed(c"test", length).expect("memory file");
        let mapping = Mapping::of_segment(&file, length, true).expect("mapping");
        assert_eq!(mapping.base().as_ptr().addr() % HUGE_PAGE, 0);
        let address_space = || {
            let status = std::fs::read_to_string("/proc/self/status").expect("read");
            let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("there is one");
            line.trim_end_matches(" kB").trim().parse::<usize>().expect("a number") * 1024
        };
        let before = address_space();
        for _ in 0..1000 {
            Mapping::of_segment(&file, length, false).expect("mapping");
        }
        assert!(address_space() < before + 500 * HUGE_PAGE, "{before} before");
    }

    #[test]
    fn a_memory_file_is_private_sealed_and_mapped() {
        let file = create_sealed(c"test", 2 * PAGE).expect("memory file");
        assert_eq!(fstat(&file).expect("stat").st_mode & 0o7777, 0o600);
        assert!(ftruncate(&file, 0).is_err());
        assert!(fcntl_add_seals(&file, SealFlags::WRITE).is_err());
        let mapping = Mapping::of_sealed(&file, 2 * PAGE, true).expect("mapping");
        assert_eq!(mapping.length(), 2 * PAGE);
        assert_eq!(Mapping::of_sealed(&file, 3 * PAGE, true).err(), Some(Errno::EPROTO));
        let plain = memfd_create(c"plain", MemfdFlags::CLOEXEC).expect("memory file");
        ftruncate(&plain, PAGE as u64).expect("truncate");
        assert_eq!(Mapping::of_sealed(&plain, PAGE, true).err(), Some(Errno::EPROTO));
    }
}
