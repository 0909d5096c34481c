//! poolfs: the command line, which manages pools, mounts, images and containers.
//!
//! One invocation does one thing and ends; no daemon is needed. What must last (pools, images, containers) is kept in documents in the
//! state directory, changed under a lock and replaced by rename ([`state`]). A pool's filesystem service is started by the first mount and
//! ended by the last unmount ([`service`]); a container that runs detached is watched by a process of its own ([`container`]). What a
//! killed command left behind is recognised by the identity of the processes it named, and removed by the next command ([`pool`]).
//!
//! **Invariant:** no file data passes here, and the code of the service is never linked.

mod arguments;
mod branches;
mod ceph;
mod container;
mod context;
mod demo;
mod doctor;
mod execute;
mod failure;
mod fsck;
mod image_store;
mod images;
mod inherited;
mod memory;
mod mount;
mod outlived;
mod patience;
mod places;
mod pool;
mod record;
mod service;
mod signals;
mod state;
mod status;
mod text;
mod trace;
mod trees;
mod unmount;
mod users;
mod waiting;
mod watch;
mod why;

use arguments::{Arguments, Command, ImageCommand, PoolCommand};
use clap::Parser;
use context::Context;
use failure::{Failure, Result};
use inherited::Descriptors;
use patience::Patience;
use poolfs_service_protocol::TraceSpec;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return not_understood(error),
    };
    if arguments.json {
        text::complain_as_json();
    }
    // What programs read has no log lines in it, unless somebody wants them there.
    let usual = if arguments.json { "off" } else { "warn" };
    let filter = tracing_subscriber::EnvFilter::try_from_env("POOLFS_LOG");
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(usual)))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .log_internal_errors(false)
        .init();
    match dispatch(arguments) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            text::complain_of(&failure);
            ExitCode::from(failure.status())
        }
    }
}

/// A command line that is wrong, or asks for help. What follows `--` is another program's, and says nothing about how to complain.
fn not_understood(mut error: clap::Error) -> ExitCode {
    suggest_no_hidden(&mut error);
    let json = std::env::args_os().take_while(|argument| argument != "--").any(|argument| argument == "--json");
    if !error.use_stderr() || !json {
        error.exit();
    }
    use clap::error::ErrorKind::{DisplayHelpOnMissingArgumentOrSubcommand, MissingSubcommand};
    if matches!(error.kind(), MissingSubcommand | DisplayHelpOnMissingArgumentOrSubcommand) {
        return complained(&Failure::usage(
            "command line",
            "a command is missing",
            "`poolfs --help` lists the commands",
        ));
    }
    let text = error.to_string();
    let mut parts = text.split("\n\n").map(str::trim);
    let cause = parts.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    complained(&Failure::usage("command line", cause, parts.collect::<Vec<_>>().join("\n")))
}

/// Commands that poolfs gives to itself are no advice.
fn suggest_no_hidden(error: &mut clap::Error) {
    use clap::error::{ContextKind, ContextValue};
    let kind = ContextKind::SuggestedSubcommand;
    let suggested = match error.get(kind) {
        Some(ContextValue::Strings(names)) => names.clone(),
        Some(ContextValue::String(name)) => vec![name.clone()],
        _ => return,
    };
    let shown: Vec<String> = suggested.into_iter().filter(|name| !name.starts_with("__")).collect();
    let _ = error.remove(kind);
    if !shown.is_empty() {
        let _ = error.insert(kind, ContextValue::Strings(shown));
    }
}

fn complained(failure: &Failure) -> ExitCode {
    text::complain_as_json();
    text::complain_of(failure);
    ExitCode::from(failure.status())
}

/// Nearly everything needs root. Whoever is somebody else is told that, and not what it is refused first.
fn refuse_without_root(command: &Command, user: u32) -> Result<()> {
    if user == 0 || matches!(command, Command::Doctor { .. } | Command::Why { .. }) {
        return Ok(());
    }
    let failure = Failure::host(
        format!("user {user}"),
        "only root can do this",
        "run poolfs as root; `poolfs doctor` works without",
    );
    // As other failures of these commands before anything was done.
    Err(if matches!(command, Command::Fsck { .. }) { failure.with_status(fsck::NOT_CHECKED) } else { failure })
}

fn dispatch(arguments: Arguments) -> Result<u8> {
    let inherited = Descriptors::withhold()?;
    let limit = Duration::from_secs(arguments.wait);
    let left = match &arguments.command {
        Command::Monitor { left_ms: Some(left), .. } => Duration::from_millis(*left),
        _ => limit,
    };
    refuse_without_root(&arguments.command, rustix::process::geteuid().as_raw())?;
    let patience = Patience::with_left(limit, left);
    let context = Context::new(arguments.state, arguments.run_dir, arguments.json, patience)?;
    let context = &context;
    match arguments.command {
        Command::Pool(command) => pool_command(context, command)?,
        Command::Image(command) => {
            pool::sweep(context);
            image_command(context, command)?;
        }
        Command::Mount(arguments) => {
            pool::sweep(context);
            mount::mount(context, arguments)?;
        }
        Command::Umount { pool, mount_point, force } => unmount::umount(context, &pool, &mount_point, force)?,
        Command::Diff { pool, place, blocks } => trees::diff(context, &pool, &place, blocks)?,
        Command::Commit { pool, place, image } => trees::commit(context, &pool, &place, &image)?,
        Command::Flatten { pool, place } => trees::flatten(context, &pool, &place)?,
        Command::Fsck { upper, lower, repair, ceph } => {
            let lowers: Vec<_> = lower.iter().flat_map(|list| mount::split_lowers(list)).collect();
            return fsck::fsck(context, &upper, &lowers, repair, &ceph);
        }
        Command::Exec(arguments) => {
            pool::sweep(context);
            return execute::execute(context, &arguments, &inherited);
        }
        Command::Run(arguments) => {
            pool::sweep(context);
            return container::run(context, &arguments);
        }
        Command::Ps => container::list(context)?,
        Command::Logs { container } => container::logs(context, &container)?,
        Command::Stop { container, time } => container::stop(context, &container, Duration::from_secs(time))?,
        Command::Rm { container, force } => container::remove(context, &container, force)?,
        Command::Status { pool, watch: None } => {
            pool::sweep(context);
            status::status(context, pool.as_deref())?;
        }
        Command::Status { pool, watch: Some(seconds) } => watch::watch(context, pool.as_deref(), seconds)?,
        Command::Trace { pool, slower, seconds, summary } => {
            let slower_ns = u64::try_from(slower.as_nanos()).unwrap_or(u64::MAX);
            trace::trace(context, &pool, TraceSpec { slower_ns, seconds, summary })?;
        }
        Command::Why { pid, fd } => why::why(context, pid, fd)?,
        Command::Doctor { directory, ceph } => return doctor::doctor(context, directory.as_deref(), &ceph),
        Command::Demo(arguments) => return demo::demo(context, &arguments),
        Command::Monitor { container, .. } => return container::watch(context, &container),
        Command::Enter(arguments) => return execute::enter(context, &arguments, &inherited),
        Command::Tied { parent, show, command } => return container::tie(context, parent, &show, &command),
    }
    Ok(0)
}

fn pool_command(context: &Context, command: PoolCommand) -> Result<()> {
    match command {
        PoolCommand::Create { name, cpus, memory, cache } => {
            pool::sweep(context);
            let new = pool::NewPool { name, cpus, memory_bytes: memory, cache_bytes: cache, owner: None };
            pool::create(context, new)
        }
        PoolCommand::Ls => {
            pool::sweep(context);
            pool::list(context)
        }
        PoolCommand::Inspect { name } => {
            pool::sweep(context);
            pool::inspect(context, &name)
        }
        PoolCommand::Rm { name, force } => pool::remove(context, &name, force),
    }
}

fn image_command(context: &Context, command: ImageCommand) -> Result<()> {
    match command {
        ImageCommand::Import { name, source, to, ceph } => {
            images::import(context, &name, &source, to.as_deref(), &ceph)
        }
        ImageCommand::Add { name, from, ceph } => images::add(context, &name, &from, &ceph),
        ImageCommand::Ls => images::list(context),
        ImageCommand::Inspect { name } => images::inspect(context, &name),
        ImageCommand::Rm { name, force } => images::remove(context, &name, force),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_command_are_listed_before_those_of_all() {
        use clap::CommandFactory;
        let mut all = Arguments::command();
        all.build();
        let text = all.find_subcommand_mut("run").expect("a command").render_help().to_string();
        let at = |option: &str| text.find(option).unwrap_or_else(|| panic!("{option} in {text}"));
        assert!(at("--name") < at("--env") && at("--env") < at("--rm") && at("--rm") < at("--state"), "{text}");
        assert!(
            at("--state") < at("--run-dir") && at("--run-dir") < at("--json") && at("--json") < at("--wait <SECONDS>"),
            "{text}"
        );
    }

    #[test]
    fn a_hidden_command_is_never_suggested() {
        let mut error = Arguments::try_parse_from(["poolfs", "mounts"]).expect_err("no command");
        assert!(error.to_string().contains("mount"), "{error}");
        suggest_no_hidden(&mut error);
        let text = error.to_string();
        assert!(text.contains("'mount'") && !text.contains("__"), "{text}");
    }

    #[test]
    fn whoever_is_not_root_is_told_so() {
        let refused = |line: &str, user| {
            let arguments = Arguments::try_parse_from(line.split(' ')).expect("a command");
            refuse_without_root(&arguments.command, user).err().map(|failure| (failure.code().name(), failure.status()))
        };
        assert_eq!(refused("poolfs pool ls", 65_534), Some(("host", 1)));
        assert_eq!(refused("poolfs exec -- true", 65_534), Some(("host", 1)));
        assert_eq!(refused("poolfs fsck /u", 65_534), Some(("host", 8)));
        for (line, user) in [("poolfs doctor", 65_534), ("poolfs why 1", 65_534), ("poolfs pool ls", 0)] {
            assert_eq!(refused(line, user), None, "{line}");
        }
    }
}
