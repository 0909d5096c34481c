//! The program `poolfs-init`: see the library.

#[cfg(not(target_feature = "crt-static"))]
compile_error!("it has to run in images without a libc: cargo rustc ... -- -C target-feature=+crt-static");

fn main() -> std::process::ExitCode {
    std::process::ExitCode::from(poolfs_init::run(std::env::args_os().skip(1)))
}
