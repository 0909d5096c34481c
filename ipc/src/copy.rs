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
        copy(source, target, head);
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
        copy(source.add(moved), target.add(moved), length - moved);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

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
