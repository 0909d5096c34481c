//! The program of the fuzz target `hostile_branch`: run by `cargo fuzz run hostile_branch`, or by itself (see ../README.md).
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| poolfs_fuzz::hostile_branch(bytes));

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    let code = poolfs_fuzz::run(poolfs_fuzz::hostile_branch);
    poolfs_fuzz::clear_ground();
    code
}
