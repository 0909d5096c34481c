//! The program of the fuzz target `upper_branch`: run by `cargo fuzz run upper_branch`, or by itself (see ../README.md).
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| poolfs_fuzz::upper_branch(bytes));

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    poolfs_fuzz::run(poolfs_fuzz::upper_branch)
}
