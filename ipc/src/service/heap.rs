//! What the C library keeps of memory that was freed.

/// Gives it back to the kernel, where the library can.
pub fn give_back_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes the allocator's own locks, and touches only what nobody has.
    unsafe {
        libc::malloc_trim(0);
    }
}
