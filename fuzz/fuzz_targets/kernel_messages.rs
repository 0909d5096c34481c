//! The program of the fuzz target `kernel_messages`: run by `cargo fuzz run kernel_messages`, or by itself (see ../README.md).
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| poolfs_fuzz::kernel_messages(bytes));

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    poolfs_fuzz::run(poolfs_fuzz::kernel_messages)
}
