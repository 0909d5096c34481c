//! libpoolfs_preload.so: the names of libc, which forward to the front driver. It decides nothing: [`poolfs_client`] does.
//!
//! Every function here forwards its arguments to the front driver's function of the same meaning and turns the result into C's convention.
//! What only libc can do (fork, system, setuid ...) is announced to the front driver and then jumped to. There is one file per family of
//! names; begin with `macros.rs` and `next.rs`, which define the two kinds.
//!
//! **Architecture invariants.** No std, no allocation, no lock, no thread-local storage. The library names no C library and takes from the
//! program's one what `allowed-imports.txt` lists. C-variadic functions are defined with fixed arguments, which the x86-64 calling
//! convention allows.
#![no_std]

mod attributes;
mod data;
mod descriptors;
mod macros;
mod names;
mod next;
mod process;
mod stats;
mod syscall;
mod xattrs;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    process::abort()
}
