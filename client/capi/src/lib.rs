//! libpoolfs.so: the front driver's functions under names of their own, `poolfs_*`, for programs that can be recompiled.
//!
//! They do what the functions of libc with the rest of the name do, on every file: those of an instance by the user-level
//! path, others by the kernel. Descriptors are real ones. `cargo xtask header` writes `include/poolfs.h` from the functions of this crate
//! and their comments; `tests/declared.sh` compares it with the built library and compiles the example.
//!
//! A program that uses this library announces what only libc could tell the preload library: it calls
//! `poolfs_before_fork` before it makes a process, and `poolfs_before_identity` before it changes its user or groups.
#![no_std]

mod files;
mod names;
mod process;
mod types;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    process::abort()
}
