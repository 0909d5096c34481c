//! The filesystem service of one pool. Reads its configuration (JSON) from standard input; see `poolfs-service-protocol`.

use std::io::Write;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

fn main() -> ExitCode {
    let filter = EnvFilter::try_from_env("POOLFS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        // The only spans are those of requests (`POOLFS_LOG=info,poolfs::request=trace`), told of when they have ended.
        .with_span_events(FmtSpan::CLOSE)
        // It would tell of a log that cannot be written in that very log, and panic: a full disk must not end a thread.
        .log_internal_errors(false)
        .init();
    let outcome = poolfs_service::process::read_config(std::io::stdin()).and_then(poolfs_service::process::run);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may be listening.
            let _ = writeln!(std::io::stderr(), "poolfs-service: {error:#}");
            ExitCode::FAILURE
        }
    }
}
