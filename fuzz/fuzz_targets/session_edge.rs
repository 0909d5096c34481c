//! The program of the fuzz target `session_edge`: run by `cargo fuzz run session_edge`, or by itself (see ../README.md).
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| poolfs_fuzz::session_edge(bytes));

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    poolfs_fuzz::run(poolfs_fuzz::session_edge)
}
