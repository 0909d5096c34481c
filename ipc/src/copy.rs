//! Copies to and from memory that a peer may be writing at the same moment.
//!
//! No Rust reference is ever made to such memory. On x86-64 the bytes are moved by instructions that are opaque to the compiler,
//! elsewhere byte by byte as volatile accesses. So a concurrent change can tear data but mislead no optimizer.

/// Copies `length` bytes.
///
/// # Safety
/// `source` must be readable and `target` writable for `length` bytes, and the two must not overlap. Either may change
/// under the copy, through another mapping.
#[inline]
pub unsafe fn copy(source: *const u8, target: *mut u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    if length >= LINES * LINE && is_aliased(source, target) {
        // SAFETY: the caller's promise.
        return unsafe { copy_by_lines(source, target, length) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_by_bytes(source, target, length) }
}

/// As [`copy`], byte after byte.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_by_bytes(source: *const u8, target: *mut u8, length: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `rep movsb` reads and writes exactly the bytes the caller vouches for; the direction flag is clear by the ABI.
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") length => _, inout("rsi") source => _, inout("rdi") target => _,
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    for i in 0..length {
        // SAFETY: within the bytes the caller vouches for.
        unsafe { target.add(i).write_volatile(source.add(i).read_volatile()) };
    }
}

#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Lines that [`copy_by_lines`] moves at a time.
#[cfg(target_arch = "x86_64")]
const LINES: usize = 2;

/// Whether `rep movsb` is 20 times slower than it should be: AMD's processors take its loads for loads of what it has just stored when the
/// target is 1 to 31 bytes behind the source, both taken modulo 4096. It is so for reads of whole pages into memory that malloc has mapped,
/// which begins 16 bytes behind a page. Measured, and reported in glibc's bug 30994.
#[cfg(target_arch = "x86_64")]
#[inline]
fn is_aliased(source: *const u8, target: *const u8) -> bool {
    const PAGE: usize = 4096;
    const NEAR: usize = 32;
    (1..NEAR).contains(&(target.addr().wrapping_sub(source.addr()) % PAGE))
}

/// As [`copy`], without string instructions: each step loads 128 bytes before it stores any of them.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn copy_by_lines(source: *const u8, target: *mut u8, length: usize) {
    let steps = length / (LINES * LINE);
    let moved = steps * LINES * LINE;
    // SAFETY: the steps and what is left after them together are the `length` bytes the caller vouches for.
    unsafe {
        if steps > 0 {
            core::arch::asm!(
                "2:",
                "movdqu xmm0, [{s}]",
                "movdqu xmm1, [{s} + 16]",
                "movdqu xmm2, [{s} + 32]",
                "movdqu xmm3, [{s} + 48]",
                "movdqu xmm4, [{s} + 64]",
                "movdqu xmm5, [{s} + 80]",
                "movdqu xmm6, [{s} + 96]",
                "movdqu xmm7, [{s} + 112]",
                "movdqu [{t}], xmm0",
                "movdqu [{t} + 16], xmm1",
                "movdqu [{t} + 32], xmm2",
                "movdqu [{t} + 48], xmm3",
                "movdqu [{t} + 64], xmm4",
                "movdqu [{t} + 80], xmm5",
                "movdqu [{t} + 96], xmm6",
                "movdqu [{t} + 112], xmm7",
                "add {s}, 128",
                "add {t}, 128",
                "dec {n}",
                "jnz 2b",
                s = inout(reg) source => _,
                t = inout(reg) target => _,
                n = inout(reg) steps => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                options(nostack),
            );
        }
        copy_by_bytes(source.add(moved), target.add(moved), length - moved);
    }
}

/// Copies `length` bytes as the papers' shared-memory-optimized copy (SMO): non-temporal prefetch of two cache lines,
/// then non-temporal stores of two lines, and a store fence, without which a state word published afterwards could
/// overtake the data (release ordering does not order non-temporal stores).
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
pub unsafe fn copy_streaming(source: *const u8, target: *mut u8, length: usize) {
    const TWO_LINES: usize = 128;
    let head = target.align_offset(64).min(length);
    let blocks = (length - head) / TWO_LINES;
    // SAFETY: head, blocks and tail together are the `length` bytes the caller vouches for; prefetching beyond the
    // source's end never faults; the streaming stores need the 16-byte alignment that `head` established.
    unsafe {
        copy_by_bytes(source, target, head);
        if blocks > 0 {
            core::arch::asm!(
                "2:",
                "prefetchnta [{s} + 256]",
                "prefetchnta [{s} + 320]",
                "movdqu xmm0, [{s}]",
                "movdqu xmm1, [{s} + 16]",
                "movdqu xmm2, [{s} + 32]",
                "movdqu xmm3, [{s} + 48]",
                "movdqu xmm4, [{s} + 64]",
                "movdqu xmm5, [{s} + 80]",
                "movdqu xmm6, [{s} + 96]",
                "movdqu xmm7, [{s} + 112]",
                "movntdq [{t}], xmm0",
                "movntdq [{t} + 16], xmm1",
                "movntdq [{t} + 32], xmm2",
                "movntdq [{t} + 48], xmm3",
                "movntdq [{t} + 64], xmm4",
                "movntdq [{t} + 80], xmm5",
                "movntdq [{t} + 96], xmm6",
                "movntdq [{t} + 112], xmm7",
                "add {s}, 128",
                "add {t}, 128",
                "dec {n}",
                "jnz 2b",
                "sfence",
                s = inout(reg) source.add(head) => _,
                t = inout(reg) target.add(head) => _,
                n = inout(reg) blocks => _,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                options(nostack),
            );
        }
        let moved = head + blocks * TWO_LINES;
        copy_by_bytes(source.add(moved), target.add(moved), length - moved);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn copies_to_just_behind_the_source_within_a_page_move_every_byte_and_no_other() {
        const PAGE: usize = 4096;
        let source: Vec<u8> = (0..4 * PAGE).map(|i| (i * 7 + i / 251) as u8).collect();
        for behind in 0..40 {
            for length in [0, 1, 127, 128, 129, 255, 256, 4096, 5003] {
                let mut target = vec![0xEE; 4 * PAGE];
                let at = (source.as_ptr().addr() + behind).wrapping_sub(target.as_ptr().addr()) % PAGE;
                assert_eq!(is_aliased(source.as_ptr(), target[at..].as_ptr()), (1..32).contains(&behind));
                // SAFETY: both vectors are longer than the largest offset and length together.
                unsafe { copy(source.as_ptr(), target.as_mut_ptr().add(at), length) };
                assert_eq!(target[at..at + length], source[..length], "{length} bytes, {behind} behind");
                assert!(target[..at].iter().chain(&target[at + length..]).all(|&byte| byte == 0xEE));
            }
        }
    }

    #[test]
    fn both_copies_move_every_byte_and_no_other() {
        let source: Vec<u8> = (0..5000u32).map(|i| (i * 7 + i / 251) as u8).collect();
        for (offset, length) in [(0, 0), (0, 1), (3, 127), (1, 128), (5, 129), (0, 4096), (63, 4097), (17, 4900)] {
            let mut plain = vec![0xEE; 5200];
            // SAFETY: both vectors are longer than the largest offset and length together.
            unsafe { copy(source.as_ptr().add(offset), plain.as_mut_ptr().add(64 - offset % 64), length) };
            let at = 64 - offset % 64;
            assert_eq!(plain[at..at + length], source[offset..offset + length]);
            assert!(plain[..at].iter().chain(&plain[at + length..]).all(|&b| b == 0xEE));
            #[cfg(target_arch = "x86_64")]
            {
                let mut streamed = vec![0xEE; 5200];
                // SAFETY: as above.
                unsafe { copy_streaming(source.as_ptr().add(offset), streamed.as_mut_ptr().add(at), length) };
                assert_eq!(streamed, plain, "offset {offset}, length {length}");
            }
        }
    }
}
