//! Returns freed memory that the C library retains to the kernel. The service asks for it when memory is short; it is here
//! because the service itself has no `unsafe` code.

/// Gives it back to the kernel, where the library can.
pub fn give_back_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes the allocator's own locks, and touches only what nobody has.
    unsafe {
        libc::malloc_trim(0);
    }
}
