//! libpoolfs.so: the front driver's functions under names of their own, `poolfs_*`, for programs that can be recompiled.
//!
//! Each does what the libc function with the rest of its name does, on every file: files of an instance are served by the user-level path,
//! all others by the kernel. Descriptors are real ones. `cargo xtask header` writes `include/poolfs.h` from the functions of this crate and
//! their comments; `tests/declared.sh` compares it with the built library and compiles the example.
//!
//! **Assumptions.** A program that uses this library announces what only libc could tell the preload library. It calls `poolfs_before_fork`
//! before it creates a process, executes a program or sends a descriptor to a process, `poolfs_before_identity` before it changes its user,
//! groups or capabilities, and `poolfs_before_view` before `chroot`, `unshare`, `setns`, Landlock or seccomp.
//!
//! Begin with `files.rs`; `process.rs` has the announcements.
#![no_std]

mod files;
mod names;
mod process;
mod types;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    process::abort()
}
