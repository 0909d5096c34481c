//! The commands `ps`, `logs`, `stop` and `rm`.

use crate::container::monitor::old_log;
use crate::container::record::{Condition, ContainerRecord, ContainerState};
use crate::container::runtime::Runtime;
use crate::container::supervise::{self, Places, Start};
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::pool;
use crate::record::PoolRecord;
use crate::service::control_socket;
use crate::text::{age, print_json, print_table, table};
use crate::waiting;
use poolfs_host::{Leaf, ProcessSignal};
use poolfs_service_protocol::UnmountMode;
use std::fs::File;
use std::io::ErrorKind;
use std::time::{Duration, Instant, SystemTime};

/// Most characters of a command in a table.
const COMMAND_WIDTH: usize = 40;
/// How often it is looked, while a container is cleaned up, whether whoever does that can.
const CLEAN_UP_PAUSE: Duration = Duration::from_millis(500);

/// A container as `ps` shows it.
struct Listed<'a> {
    record: &'a ContainerRecord,
    condition: Condition,
    status: String,
}

impl Listed<'_> {
    fn of<'a>(context: &Context, record: &'a ContainerRecord) -> Listed<'a> {
        let condition = record.condition(context);
        Listed { record, condition, status: record.described(condition) }
    }

    /// What is recorded, with the state that the table shows instead of the recorded one.
    fn json(&self) -> Result<serde_json::Value> {
        let failed = |error| Failure::new("output", error, "");
        let mut object = serde_json::to_value(self.record).map_err(failed)?;
        object["state"] = serde_json::to_value(self.condition).map_err(failed)?;
        object["status"] = self.status.as_str().into();
        Ok(object)
    }
}

/// List the containers.
pub fn list(context: &Context) -> Result<()> {
    let records: Vec<ContainerRecord> = context.containers()?.peek_all()?;
    let listed: Vec<Listed<'_>> = records.iter().map(|record| Listed::of(context, record)).collect();
    if context.json {
        return print_json(&listed.iter().map(Listed::json).collect::<Result<Vec<_>>>()?);
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut table = table(&["name", "pool", "image", "status", "path", "age", "command"]);
    for Listed { record, status, .. } in &listed {
        let command: String = record.command.join(" ").chars().take(COMMAND_WIDTH).collect();
        let path = if record.legacy { "FUSE" } else { "library" };
        let age = age(now.saturating_sub(record.created_seconds));
        table.add_row([&record.name, &record.pool, &record.image, status, path, &age, &command]);
    }
    print_table(&table)
}

/// Print what a container wrote.
pub fn logs(context: &Context, name: &str) -> Result<()> {
    let containers = context.containers()?;
    containers.peek::<ContainerRecord>(name)?.ok_or_else(|| containers.absent(name))?;
    let log = Places::of(&containers.path(name)).log;
    for path in [old_log(&log), log] {
        match File::open(&path) {
            Ok(mut file) => {
                let copied = std::io::copy(&mut file, &mut std::io::stdout().lock());
                if let Err(error) = copied
                    && error.kind() != ErrorKind::BrokenPipe
                {
                    return Err(Failure::file(&path, error));
                }
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::file(&path, error)),
        }
    }
    Ok(())
}

/// Ask a container to end; kill it when it has not after `wait`.
pub fn stop(context: &Context, name: &str, wait: Duration) -> Result<()> {
    let containers = context.containers()?;
    let record: ContainerRecord = containers.peek(name)?.ok_or_else(|| containers.absent(name))?;
    if recover(context, &record, UnmountMode::Detached)? {
        return Ok(());
    }
    let runtime = Runtime::find(context)?;
    // Before it runs the runtime does not know it.
    let running = record.instance.clone().filter(|_| record.state != ContainerState::Created);
    let Some(instance) = running else {
        if let Some(monitor) = &record.monitor {
            context.host.signal(&monitor.identity(), ProcessSignal::Terminate)?;
        }
        if has_ended(context, name, wait)? {
            return Ok(());
        }
        let remedy = "wait a moment and try again";
        return Err(Failure::in_use(format!("container {name}"), "it is only just being started", remedy));
    };
    let signal = stop_signal(context, name);
    let asked = runtime.kill(&instance, &signal);
    if has_ended(context, name, wait)? {
        return Ok(());
    }
    if let Err(failure) = runtime.kill(&instance, "KILL") {
        // Neither signal was delivered and it still counts as running: say why. What the runtime has forgotten is being cleaned up.
        let least = Duration::from_secs(1);
        let wait = if runtime.knows(&instance) { least } else { context.patience.left().max(least) };
        if let (Err(_), false) = (asked, has_ended(context, name, wait)?) {
            return Err(failure.of(format!("container {name}")));
        }
    }
    // It is cleaned up by who watches over it, who may have much to write back.
    while !has_ended(context, name, CLEAN_UP_PAUSE)? {
        if let Err(failure) = waiting::ping(context, &record.pool)
            && listens(context, &record.pool)?
        {
            return Err(failure.of(format!("container {name}")));
        }
        if let Some(monitor) =
            record.monitor.as_ref().filter(|monitor| waiting::is_stopped(&*context.host, monitor.pid))
        {
            let pid = monitor.pid;
            let cause = format!("process {pid}, which watches over it, is stopped");
            let remedy =
                format!("`kill -CONT {pid}` lets it go on; `kill -KILL {pid}`, then `poolfs stop {name}`, end it");
            return Err(Failure::new(format!("container {name}"), cause, remedy));
        }
    }
    Ok(())
}

/// Remove a container that has ended; with `force` also when what it wrote could not be put on the disk.
pub fn remove(context: &Context, name: &str, force: bool) -> Result<()> {
    let containers = context.containers()?;
    let record: ContainerRecord = containers.peek(name)?.ok_or_else(|| containers.absent(name))?;
    if !force {
        refuse_running(context, &record)?;
    }
    recover(context, &record, if force { UnmountMode::Forced } else { UnmountMode::Detached })?;
    let Some(locked) = containers.try_lock::<ContainerRecord>(name)? else { return Ok(()) };
    if locked.record.state != ContainerState::Ended {
        let remedy = format!("end it first with `poolfs stop {name}`");
        return Err(Failure::in_use(format!("container {name}"), "it is running", remedy));
    }
    // A command that asked what is in it, and was killed, may have left its root mounted.
    if context.pools()?.peek::<PoolRecord>(&locked.record.pool)?.is_some() {
        drop(pool::lock(context, &locked.record.pool)?);
    }
    supervise::remove_root(&Places::of(locked.path()).root)?;
    locked.remove()
}

/// That nothing runs in a container that nobody watches over any more.
fn refuse_running(context: &Context, record: &ContainerRecord) -> Result<()> {
    if record.state != ContainerState::Running || record.is_watched(context) {
        return Ok(());
    }
    let processes = context.groups()?.members(&*context.host, &record.pool, Leaf::Container(&record.name)).len();
    if processes == 0 {
        return Ok(());
    }
    let name = &record.name;
    let cause = format!("it still runs ({processes} of its processes live), and nobody watches over it");
    let remedy = format!("end it first with `poolfs stop {name}`; `poolfs rm --force {name}` kills them");
    Err(Failure::in_use(format!("container {name}"), cause, remedy))
}

/// Clean up after a container whose monitor was killed or could not write back; whether the container has ended now.
fn recover(context: &Context, record: &ContainerRecord, ending: UnmountMode) -> Result<bool> {
    if record.state == ContainerState::Ended {
        return Ok(true);
    }
    if record.is_watched(context) {
        return Ok(false);
    }
    let Some(container) = context.containers()?.try_lock::<ContainerRecord>(&record.name)? else { return Ok(true) };
    // While the lock was waited for, its monitor may have come, or somebody else may have cleaned up.
    match container.record.state {
        ContainerState::Ended => Ok(true),
        _ if container.record.is_watched(context) => Ok(false),
        _ => supervise::finish(context, container, None, ending).map(|()| true),
    }
}

/// Wait until the monitor has cleaned up.
fn has_ended(context: &Context, name: &str, wait: Duration) -> Result<bool> {
    let containers = context.containers()?;
    let end = Instant::now() + wait;
    loop {
        let ended = match containers.peek::<ContainerRecord>(name)? {
            None => true,
            Some(record) => recover(context, &record, UnmountMode::Detached)?,
        };
        if ended || Instant::now() >= end {
            return Ok(ended);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether a pool has a service that should answer: with the last container it ends, too.
fn listens(context: &Context, pool: &str) -> Result<bool> {
    let record = context.pools()?.peek::<PoolRecord>(pool)?;
    let is_alive = record.is_some_and(|record| record.service_alive(&*context.host) == Some(true));
    Ok(is_alive && control_socket(context, pool).exists())
}

/// The signal the image wants to be asked with.
fn stop_signal(context: &Context, name: &str) -> String {
    let path = context.containers().map(|containers| containers.path(name).join(crate::container::START_NAME));
    let text = path.ok().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    let start: Option<Start> = serde_json::from_str(&text).ok();
    start.and_then(|start| start.image.stop_signal).unwrap_or_else(|| "TERM".to_owned())
}
