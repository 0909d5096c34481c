//! Control of a pool's filesystem service: starting it, sending it commands, ending it.

use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::inherited::with_used_variables;
use crate::patience::{MOMENT, Wait};
use crate::record::{PoolRecord, ProcessRecord};
use crate::state::Locked;
use crate::text::{complain, count, plain};
use crate::waiting::{self, Until, connect_within, silent};
use crate::{memory, outlived, signals};
use poolfs_host::{CpuSet, Leaf, ProcessSignal, mount_table, pool_mounts};
use poolfs_local::PrivateMount;
use poolfs_service_protocol::{
    ALLOCATOR, Answer, ClientStatus, Command, KindTimes, ServiceConfig, ServiceStatus, Span, TraceSpec, UnmountMode,
    kept_directory,
};
use std::fs::File;
use std::io::{BufRead, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Longest wait for a new service to listen.
const START_WAIT: Duration = Duration::from_secs(20);
/// How often it is asked until it does.
const START_PAUSE: Duration = Duration::from_millis(1);
/// Longest wait for a process that was asked to end.
const END_WAIT: Duration = Duration::from_secs(10);
/// Longest wait for a process that was killed, within what the command has left.
const DYING_WAIT: Duration = Duration::from_secs(5);
/// A log that is longer at the start of a service becomes the old one.
const LOG_BYTES_MAX: u64 = 1 << 20;
/// Most bytes of one line of a trace.
const SPAN_BYTES_MAX: u64 = 1 << 20;

/// Where a pool's service listens.
pub fn control_socket(context: &Context, pool: &str) -> PathBuf {
    context.run.join(format!("{pool}.control"))
}

fn log_path(pool: &Locked<PoolRecord>) -> PathBuf {
    pool.path().join("service.log")
}

/// Send one command and wait for its answer.
fn ask(context: &Context, pool: &str, command: &Command) -> Result<Answer> {
    ask_with(context, pool, command, &[])
}

/// The same with branches.
fn ask_with(context: &Context, pool: &str, command: &Command, branches: &[PrivateMount]) -> Result<Answer> {
    ask_within(context, pool, command, branches, &mut context.patience.begin())
}

fn ask_within(
    context: &Context,
    pool: &str,
    command: &Command,
    branches: &[PrivateMount],
    wait: &mut Wait<'_>,
) -> Result<Answer> {
    let until = match command {
        Command::Ping | Command::Status | Command::Client { .. } => Until::Answered,
        _ => Until::Done,
    };
    let mut input = waiting::send(context, pool, command, branches, wait)?;
    let answer = waiting::answer_line(context, pool, &mut input, (until, command), wait)?;
    understood(context, pool, &answer)
}

/// What an answer says: a failure, if that is what it is.
fn understood(context: &Context, pool: &str, line: &[u8]) -> Result<Answer> {
    if line.is_empty() {
        return Err(silent(context, pool, waiting::HUNG_UP));
    }
    match serde_json::from_slice(line).map_err(|error| silent(context, pool, error))? {
        Answer::Failed { code, message, remedy } => {
            let remedy = remedy.unwrap_or_default();
            Err(Failure::new(format!("service of pool {pool}"), message, remedy).with_code(code.into()))
        }
        answer => Ok(answer),
    }
}

/// The instances that a service has, those that are about to be mounted among them, when none is being ended.
pub fn instances(context: &Context, pool: &str) -> Result<Vec<String>> {
    match ask(context, pool, &Command::Instances)? {
        Answer::Instances { instances } => Ok(instances),
        _ => Err(unexpected(pool)),
    }
}

/// What a trace has come to.
pub struct Traced {
    /// Requests that were slow enough.
    pub requests: u64,
    /// Those of them that were not told of.
    pub lost: u64,
    /// All of them by kind, if asked for.
    pub summary: Vec<KindTimes>,
}

/// Have requests told to `tell` until the time is over, this process is asked to end, or `tell` answers false: then nothing is returned. It is asked
/// every now and then, with nothing, also while nothing happens.
pub fn trace(
    context: &Context,
    pool: &str,
    spec: TraceSpec,
    mut tell: impl FnMut(Option<Span>) -> Result<bool>,
) -> Result<Option<Traced>> {
    let mut wait = context.patience.begin();
    let mut input = waiting::send(context, pool, &Command::Trace(spec), &[], &wait)?;
    let mut line = Vec::new();
    let mut is_enough = false;
    loop {
        if signals::end_came() {
            if is_enough {
                return Err(Failure::interrupted("trace", "it was asked to end again before the service had answered"));
            }
            // The service says what it has come to when it sees that nobody wants more.
            is_enough = true;
            signals::forget_end();
            input.get_ref().shutdown(Shutdown::Write).map_err(|error| silent(context, pool, error))?;
        }
        let span = match input.by_ref().take(SPAN_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(_) => match understood(context, pool, &line)? {
                Answer::Span(span) => Some(*span),
                Answer::Traced { requests, lost, summary } => return Ok(Some(Traced { requests, lost, summary })),
                _ => return Err(unexpected(pool)),
            },
            // What there is of a line stays for the next time.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => None,
            Err(error) => return Err(silent(context, pool, error)),
        };
        if span.is_some() {
            line.clear();
            wait.heard();
        } else if wait.is_half_over() {
            // Nothing may be happening there, or nobody be there who could tell.
            waiting::ping_within(context, pool, &wait)?;
            wait.heard();
        }
        if !tell(span)? {
            return Ok(None);
        }
    }
}

/// Have a command carried out that may take its time, and is answered by one or several answers, until `take` says that it has got the last. It ends with
/// this process.
pub fn converse(
    context: &Context,
    pool: &str,
    command: &Command,
    mut take: impl FnMut(Answer) -> Result<bool>,
) -> Result<()> {
    let mut wait = context.patience.begin();
    let mut input = waiting::send(context, pool, command, &[], &wait)?;
    loop {
        let line = waiting::answer_line(context, pool, &mut input, (Until::Done, command), &mut wait)?;
        if !take(understood(context, pool, &line)?)? {
            return Ok(());
        }
    }
}

/// Send one command that is either done or not.
pub fn tell(context: &Context, pool: &str, command: &Command) -> Result<()> {
    tell_with(context, pool, command, &[])
}

/// The same with branches; what the service says of them is said.
pub fn tell_with(context: &Context, pool: &str, command: &Command, branches: &[PrivateMount]) -> Result<()> {
    match ask_with(context, pool, command, branches)? {
        Answer::Done | Answer::Lingers => Ok(()),
        Answer::Mounted { notes } => {
            notes.iter().for_each(|note| complain(&format!("poolfs: note: {note}")));
            Ok(())
        }
        _ => Err(unexpected(pool)),
    }
}

/// Have an instance unmounted. Whether somebody has its mount all the same, in another mount namespace or by what is open there: then it ends with the last of
/// them.
pub fn unmount(context: &Context, pool: &str, instance: &str, ending: UnmountMode) -> Result<bool> {
    match ask(context, pool, &Command::Unmount { instance: instance.to_owned(), ending })? {
        Answer::Done => Ok(false),
        Answer::Lingers => Ok(true),
        _ => Err(unexpected(pool)),
    }
}

/// The same, of what the service goes on with when it is not waited for any longer than for an answer at once.
pub fn tell_briefly(context: &Context, pool: &str, command: &Command) -> Result<()> {
    let mut wait = context.patience.begin();
    let mut input = waiting::send(context, pool, command, &[], &wait)?;
    let answer = waiting::answer_line(context, pool, &mut input, (Until::Answered, command), &mut wait)?;
    match understood(context, pool, &answer)? {
        Answer::Done | Answer::Lingers => Ok(()),
        _ => Err(unexpected(pool)),
    }
}

/// Have a service, if it lives, bring what an instance has accepted to the disk: before it is unmounted, and without the pool's lock, so that others go on however long
/// that takes. What does not have to succeed is not waited for any longer than for an answer at once.
pub fn flush(context: &Context, pool: &str, instance: &str, is_brief: bool) -> Result<()> {
    let is_alive = |record: PoolRecord| record.service_alive(&*context.host) == Some(true);
    if !context.pools()?.peek(pool)?.is_some_and(is_alive) {
        return Ok(());
    }
    let command = Command::Flush { instance: instance.to_owned() };
    if is_brief { tell_briefly(context, pool, &command) } else { tell(context, pool, &command) }
}

/// What a service tells of itself.
pub fn status(context: &Context, pool: &str) -> Result<ServiceStatus> {
    status_within(context, pool, &mut context.patience.begin())
}

/// The same as a part of a wait.
pub fn status_within(context: &Context, pool: &str, wait: &mut Wait<'_>) -> Result<ServiceStatus> {
    match ask_within(context, pool, &Command::Status, &[], wait)? {
        Answer::Status(status) => Ok(*status),
        _ => Err(unexpected(pool)),
    }
}

/// What a service knows of a process.
pub fn client(context: &Context, pool: &str, pid: u32) -> Result<Vec<ClientStatus>> {
    match ask(context, pool, &Command::Client { pid })? {
        Answer::Client { instances } => Ok(instances),
        _ => Err(unexpected(pool)),
    }
}

/// The failure that an answer is none to what was asked.
pub fn unexpected(pool: &str) -> Failure {
    let remedy = "use the poolfs and the poolfs-service of one build";
    Failure::new(format!("service of pool {pool}"), "it gave an answer to another question", remedy)
}

/// Whether a service is dead, or just ending: one that was killed is alive for a moment in which it answers nobody.
pub fn is_ending(context: &Context, record: &PoolRecord) -> Result<bool> {
    is_ending_within(context, record, &context.patience.begin())
}

/// The same as a part of a wait.
pub fn is_ending_within(context: &Context, record: &PoolRecord, wait: &Wait<'_>) -> Result<bool> {
    let Some(process) = record.service.as_ref().map(ProcessRecord::identity) else { return Ok(true) };
    if waiting::is_stopped(&*context.host, process.pid) {
        return Ok(false);
    }
    Ok(context.host.wait_end(&process, wait.left().clamp(MOMENT, DYING_WAIT))?)
}

/// Whether a service that is alive is there for commands. One that was killed is alive for a moment, and can still be connected with, but it does not
/// answer. One that gives no answer and does not end is there all the same: whoever tells it something says what is wrong.
fn is_there(context: &Context, record: &PoolRecord) -> Result<bool> {
    if record.service.as_ref().is_some_and(|service| waiting::is_stopped(&*context.host, service.pid)) {
        return Ok(true);
    }
    // Half of what the command has is left for what it is to tell.
    let wait = context.patience.begin_short(DYING_WAIT.min(context.patience.left() / 2));
    match waiting::ping_within(context, &record.name, &wait) {
        Ok(()) => Ok(true),
        Err(failure) if failure.code() != Code::NoAnswer => Err(failure),
        Err(_) => Ok(!is_ending_within(context, record, &wait)?),
    }
}

/// See to it that the pool's service runs. What a dead one left mounted is detached first.
pub fn ensure(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<()> {
    let name = pool.record.name.clone();
    let socket = control_socket(context, &name);
    match pool.record.service_alive(&*context.host) {
        Some(true) if is_there(context, &pool.record)? => return Ok(()),
        Some(_) => bury(context, pool)?,
        None => {}
    }
    let listens = connect_within(&socket, context.patience.begin().left());
    if listens.map_or_else(|error| error.kind() == ErrorKind::WouldBlock, |_| true) {
        return Err(Failure::in_use(
            format!("service of pool {name}"),
            format!("another one listens at {}", socket.display()),
            "a pool of this name runs from another state directory: choose another name",
        ));
    }
    let result = start(context, pool, socket);
    if result.is_err() {
        // The first failure is the one to report.
        let _ = end(context, pool);
    }
    result.map_err(|failure| failure.of(format!("service of pool {name}")))
}

fn start(context: &Context, pool: &mut Locked<PoolRecord>, socket: PathBuf) -> Result<()> {
    let name = pool.record.name.clone();
    let program = context.service_program()?;
    let _run_directory = context.make_run_directory()?;
    let groups = context.groups()?;
    let limits = pool.record.limits()?;
    groups.make_pool(&*context.host, &name, &limits)?;
    let config = ServiceConfig {
        pool: name.clone(),
        entrances: groups.entrances(&name, Leaf::Service).unwrap_or_default(),
        memory_group: groups.memory_place(&name, Leaf::Service),
        cpus: CpuSet::parse(&pool.record.cpus)?.numbers().to_vec(),
        cache_bytes: pool.record.cache_bytes,
        control_socket: socket,
        socket_directory: context.run.clone(),
    };
    let log = log_path(pool);
    if std::fs::metadata(&log).is_ok_and(|status| status.len() > LOG_BYTES_MAX) {
        std::fs::rename(&log, log.with_extension("old")).map_err(|error| Failure::file(&log, error))?;
    }
    let open_log = || File::options().create(true).append(true).open(&log).map_err(|error| Failure::file(&log, error));
    let mut child = with_used_variables(&mut std::process::Command::new(&program))
        .stdin(Stdio::piped())
        .stdout(open_log()?)
        .stderr(open_log()?)
        // A signal for the terminal's foreground group is not for the service.
        .process_group(0)
        .current_dir("/")
        // Whoever has settings of their own decides.
        .envs(std::env::var_os(ALLOCATOR.0).is_none().then_some(ALLOCATOR))
        .spawn()
        .map_err(|error| Failure::file(&program, error))?;
    // It is known, and in its group where it does not enter that first of all, before it is told what to do: should this command be killed
    // here, the service ends because its input does.
    pool.record.service = ProcessRecord::of(&*context.host, child.id());
    pool.note()?;
    if config.entrances.is_empty() {
        groups.attach(&*context.host, &name, Leaf::Service, child.id())?;
    }
    let text = serde_json::to_vec(&config).map_err(|error| Failure::new("service configuration", error, ""))?;
    let mut input = child.stdin.take().ok_or_else(|| Failure::new("service", "it has no standard input", ""))?;
    // One that has ended already did not take it: why is said below.
    let _ = input.write_all(&text);
    drop(input);
    let end = Instant::now() + START_WAIT;
    while let Err(failure) = waiting::ping(context, &name) {
        // It is there, and stands still.
        if failure.code() == Code::NoAnswer && waiting::is_stopped(&*context.host, child.id()) {
            return Err(failure);
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(Failure::new(
                "start",
                format!("it ended at once ({status}){}", last_lines(pool)),
                "see its log",
            ));
        }
        if Instant::now() > end {
            let cause = format!("it does not listen after {} s{}", START_WAIT.as_secs(), last_lines(pool));
            return Err(Failure::new("start", cause, "see its log"));
        }
        std::thread::sleep(START_PAUSE);
    }
    Ok(())
}

/// The end of the service's log, for a message.
fn last_lines(pool: &Locked<PoolRecord>) -> String {
    let text = std::fs::read_to_string(log_path(pool)).unwrap_or_default();
    let lines: Vec<&str> = text.lines().rev().take(5).collect();
    lines.iter().rev().map(|line| format!("\n    {line}")).collect()
}

/// Clean up after a service that died: detach its mounts, forget its instances.
fn bury(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<()> {
    let detached = detach_all(context, &pool.record)?;
    if !detached.is_empty() {
        let name = &pool.record.name;
        let mounts = count(detached.len() as u64, "dead mount");
        let places: Vec<String> = detached.iter().map(|place| plain(&place.display().to_string())).collect();
        let verb = if detached.len() == 1 { "was" } else { "were" };
        complain(&format!(
            "poolfs: the service of pool {name} had died: {mounts} {verb} detached: {}",
            places.join(", ")
        ));
    }
    remove_sockets(context, &pool.record);
    pool.record.instances.clear();
    pool.record.service = None;
    pool.note()
}

/// Detach whatever the mount table still has of a pool; where that was.
fn detach_all(context: &Context, record: &PoolRecord) -> Result<Vec<PathBuf>> {
    let table = mount_table(&*context.host)?;
    let mut detached = Vec::new();
    for instance in &record.instances {
        for entry in pool_mounts(&table, &instance.spec.instance) {
            // What is over it is somebody's, and stays.
            match crate::unmount::uncovered(&table, entry) {
                Ok(()) => {
                    context.host.detach(&entry.mount_point)?;
                    detached.push(entry.mount_point.clone());
                }
                Err(covered) => complain(&format!("poolfs: a dead mount stays: {}", covered.summary())),
            }
        }
    }
    Ok(detached)
}

fn remove_sockets(context: &Context, record: &PoolRecord) {
    let sockets = record.instances.iter().map(|instance| instance.spec.socket(&context.run));
    for socket in sockets.chain([control_socket(context, &record.name)]) {
        // Absent is what is wanted.
        let _ = std::fs::remove_file(socket);
    }
}

/// End a pool's service, in order if it answers, else by force; then its control groups.
pub fn end(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<()> {
    let name = pool.record.name.clone();
    let mut result = Ok(());
    if let Some(service) = pool.record.service.clone() {
        let process = service.identity();
        if process.is_alive(&*context.host) {
            result = tell(context, &name, &Command::Shutdown);
            let is_silent = result.as_ref().is_err_and(|failure| failure.code() == Code::NoAnswer);
            let orderly = result.is_ok() && context.host.wait_end(&process, END_WAIT)?;
            if !orderly {
                context.host.signal(&process, ProcessSignal::Terminate)?;
                // Who was waited for in vain before has had its time.
                let wait = if is_silent { context.patience.begin().left() } else { END_WAIT };
                if !context.host.wait_end(&process, wait)? {
                    context.host.signal(&process, ProcessSignal::Kill)?;
                    context.host.wait_end(&process, END_WAIT)?;
                }
            }
        }
        detach_all(context, &pool.record)?;
        remove_sockets(context, &pool.record);
        pool.record.service = None;
        pool.record.instances.clear();
        pool.note()?;
    }
    sweep(context, &name);
    outlived::clear_groups(context, &name);
    memory::forget(context, pool)?;
    context.remove_run_directory();
    result
}

/// Give the memory back of what dead services of a pool have left, and say what of it is kept.
fn sweep(context: &Context, pool: &str) {
    let place = kept_directory(&context.run, pool);
    if !place.is_dir() {
        return;
    }
    match swept(context, &place) {
        Ok(all) => {
            for line in all.lines() {
                complain(&format!(
                    "poolfs: {}, written before the service of pool {pool} died, wait in {}: mounting that once more brings them to \
                     disk, unmounting what is in {} gives them up",
                    plain(line),
                    place.display(),
                    place.display()
                ));
            }
        }
        Err(failure) if failure.code() == Code::NoAnswer => complain(&format!(
            "poolfs: what the service of pool {pool} has left in {} stays: a branch that it is of does not answer. Mounting that once more \
             brings it to disk, should it answer again",
            place.display()
        )),
        Err(failure) => complain(&failure.to_string()),
    }
}

/// What is kept, a line for each branch.
fn swept(context: &Context, place: &Path) -> Result<String> {
    let program = context.service_program()?;
    let failed = |error| Failure::file(&program, error);
    let mut command = std::process::Command::new(&program);
    with_used_variables(&mut command).arg("sweep").arg(place).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(failed)?;
    let output = child.stdout.take();
    // It looks at the branches.
    let read = waiting::within(context, place, move || output.map(std::io::read_to_string));
    match &read {
        Ok(_) => drop(child.wait()),
        Err(_) => waiting::end_child(context, &mut child),
    }
    read?.unwrap_or_else(|| Ok(String::new())).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_host::RecordingHost;
    use std::io::BufReader;
    use std::os::unix::net::UnixListener;

    /// A service that gives these answers, one to each who asks.
    fn answering(context: &Context, answers: &'static [&'static str]) -> std::thread::JoinHandle<Vec<String>> {
        std::fs::create_dir_all(&context.run).expect("made");
        let listener = UnixListener::bind(control_socket(context, "web")).expect("bound");
        std::thread::spawn(move || {
            let answer = |text: &&str| {
                let (stream, _) = listener.accept().expect("somebody asks");
                let mut question = String::new();
                BufReader::new(&stream).read_line(&mut question).expect("a line");
                (&stream).write_all(text.as_bytes()).expect("taken");
                question
            };
            answers.iter().map(answer).collect()
        })
    }

    #[test]
    fn a_service_that_can_be_connected_with_and_ends_is_not_there() {
        let place = tempfile::tempdir().expect("a directory");
        let mut context = Context::for_test(place.path(), RecordingHost::new());
        context.host = Box::new(poolfs_host::LinuxHost);
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("it starts");
        let record = PoolRecord::for_test(ProcessRecord::of(&*context.host, child.id()));
        let service = answering(&context, &["{\"answer\":\"done\"}\n"]);
        assert!(is_there(&context, &record).expect("a wait"));
        service.join().expect("no panic");
        std::fs::remove_file(control_socket(&context, "web")).expect("removed");
        let listener = UnixListener::bind(control_socket(&context, "web")).expect("bound");
        let dying = std::thread::spawn(move || {
            let connected = listener.accept().expect("somebody asks");
            child.kill().expect("ours");
            drop((connected, listener));
            child
        });
        assert!(!is_there(&context, &record).expect("a wait"));
        dying.join().expect("no panic").wait().expect("ours");
    }

    #[test]
    fn the_wait_for_the_end_of_a_service_counts() {
        let place = tempfile::tempdir().expect("a directory");
        let mut context = Context::for_test(place.path(), RecordingHost::new());
        context.host = Box::new(poolfs_host::LinuxHost);
        context.patience = crate::patience::Patience::new(Duration::from_millis(200));
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("it starts");
        let record = PoolRecord::for_test(ProcessRecord::of(&*context.host, child.id()));
        assert!(!is_ending(&context, &record).expect("a wait"));
        assert_eq!(context.patience.left(), Duration::ZERO, "others would wait once more");
        // A wait that is over does not begin anew.
        context.patience.renew();
        let wait = context.patience.begin();
        while !wait.is_over() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let begun = Instant::now();
        assert!(!is_ending_within(&context, &record, &wait).expect("a wait"));
        assert!(begun.elapsed() < DYING_WAIT);
        child.kill().expect("ours");
        assert!(is_ending(&context, &record).expect("a wait"));
        child.wait().expect("ours");
    }

    #[test]
    fn answers_become_results() {
        let place = tempfile::tempdir().expect("a directory");
        let context = Context::for_test(place.path(), RecordingHost::new());
        let failure = tell(&context, "web", &Command::Shutdown).expect_err("nobody listens");
        assert!(failure.to_string().contains("service of pool web"), "{failure}");
        let answers = &[
            "{\"answer\":\"done\"}\n",
            "{\"answer\":\"failed\",\"code\":\"in-use\",\"message\":\"no such directory\"}\n",
            "",
            "{}\n",
        ];
        let service = answering(&context, answers);
        tell(&context, "web", &Command::Unmount { instance: "web-1".into(), ending: UnmountMode::Orderly })
            .expect("done");
        let failure = tell(&context, "web", &Command::Shutdown).expect_err("failed");
        assert!(failure.to_string().contains("no such directory"), "{failure}");
        assert_eq!(failure.code(), Code::InUse);
        let failure = tell(&context, "web", &Command::Shutdown).expect_err("it died before it answered");
        assert!(failure.to_string().contains(waiting::HUNG_UP), "{failure}");
        assert!(status(&context, "web").is_err(), "no answer of this protocol");
        let asked = service.join().expect("no panic");
        assert_eq!(asked[0].trim(), "{\"command\":\"unmount\",\"instance\":\"web-1\",\"ending\":\"orderly\"}");
    }
}
