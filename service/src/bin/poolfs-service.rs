//! The filesystem service of one pool. It reads its configuration (JSON) from standard input; see `poolfs-service-protocol`.
//!
//! With the argument `check` it checks an upper branch instead, as a job on standard input says, and exits, and with `probe` it looks whether
//! branches at a cluster can be had. With `sweep PLACE` it
//! frees the memory of state that dead services have left there and nobody is going to want, and reports what stays. With `guard` it is what a service
//! starts to have its mounts cut off should it die.

use std::io::Write;
use std::path::Path;
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
    let mut arguments = std::env::args_os().skip(1);
    let outcome = match (arguments.next(), arguments.next()) {
        (None, _) => poolfs_service::process::read_config(std::io::stdin()).and_then(poolfs_service::process::run),
        (Some(job), None) if job == poolfs_service::guard::JOB => poolfs_service::guard::run(),
        (Some(job), None) if job == "check" => {
            poolfs_service::stack::check::run(std::io::stdin(), &mut std::io::stdout().lock())
        }
        (Some(job), None) if job == "probe" => {
            poolfs_service::stack::probe::run(std::io::stdin(), &mut std::io::stdout().lock())
        }
        (Some(job), Some(place)) if job == "sweep" => {
            let sweep = |()| {
                poolfs_service::stack::crash_state::sweep_and_tell(Path::new(&place), &mut std::io::stdout().lock())
            };
            poolfs_service::confinement::enter_on_host().and_then(sweep)
        }
        (Some(other), _) => {
            Err(anyhow::anyhow!("there is no job \"{}\"; they are check, probe, and sweep PLACE", other.display()))
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody may be listening.
            let _ = writeln!(std::io::stderr(), "poolfs-service: {error:#}");
            ExitCode::FAILURE
        }
    }
}
