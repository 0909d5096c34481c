//! The command `exec`: runs a program in a pool, with the library preloaded unless `--fuse` is given.

use crate::arguments::{EnterArguments, ExecArguments};
use crate::ceph::has_ceph;
use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::inherited::Descriptors;
use crate::mount::{Wanted, file_to_read, mount_instance, split_lowers};
use crate::outlived::{self, group_name};
use crate::pool::{self, NewPool};
use crate::record::{PoolRecord, ProcessRecord};
use crate::service;
use crate::signals::{Signals, status_code};
use crate::state::Locked;
use crate::text::{parse_upper_size, pasted};
use crate::unmount::unmount_flushed;
use poolfs_host::{CpuSet, Leaf};
use poolfs_service_protocol::{Coherence, StackSpec, Storage, UnmountMode, UpperFormat};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Memory and cache of a throw-away pool.
const THROW_AWAY_MEMORY: u64 = 2 << 30;
const THROW_AWAY_CACHE: u64 = 512 << 20;
/// Where a program on the host finds the sockets of its mounts.
const LIBRARY_RUN_DIRECTORY: &str = "/run/poolfs";
/// The exit statuses by which shells say that a program could not be started.
const STATUS_NOT_FOUND: u8 = 127;
const STATUS_NOT_STARTED: u8 = 126;

/// Run a program; its exit status.
pub fn execute(context: &Context, arguments: &ExecArguments, inherited: &Descriptors) -> Result<u8> {
    let mounts = arguments.mounts.iter().map(|text| parse_spec(text)).collect::<Result<Vec<_>>>()?;
    if !arguments.legacy && context.run != Path::new(LIBRARY_RUN_DIRECTORY) {
        let cause = format!("the library looks for sockets in {LIBRARY_RUN_DIRECTORY} only");
        let thing = format!("--run-dir {}", context.run.display());
        return Err(Failure::new(thing, cause, "leave --run-dir out, or use --fuse"));
    }
    // From here on a signal is kept until the program runs, so that everything can be removed again.
    let mut signals = Signals::catch()?;
    let own = ProcessRecord::of(&*context.host, std::process::id())
        .ok_or_else(|| Failure::new("exec", "this process is not in /proc", "mount /proc"))?;
    let name = match &arguments.pool {
        Some(name) => name.clone(),
        None => throw_away_pool(context, own.clone())?,
    };
    let mut mounted = Vec::new();
    let result = mount_all(context, &name, mounts, arguments, &own, &mut mounted)
        .and_then(|()| run_in_pool(context, arguments, &name, &own, inherited, &mut signals));
    let cleaned = clean_up(context, &name, &mounted, &own, arguments.pool.is_none());
    result.and_then(|status| cleaned.map(|()| status))
}

/// Make a pool that goes with the command it is for: its name.
pub fn throw_away_pool(context: &Context, owner: ProcessRecord) -> Result<String> {
    let name = group_name(&owner.identity());
    // On a small host a part of it.
    let total = pool::host_memory_bytes(&*context.host).unwrap_or(u64::MAX);
    pool::create(
        context,
        NewPool {
            name: name.clone(),
            cpus: None,
            memory_bytes: THROW_AWAY_MEMORY.min(total),
            cache_bytes: THROW_AWAY_CACHE.min(total / 4),
            owner: Some(owner),
        },
    )?;
    Ok(name)
}

fn mount_all(
    context: &Context,
    name: &str,
    mounts: Vec<(PathBuf, StackSpec)>,
    arguments: &ExecArguments,
    own: &ProcessRecord,
    mounted: &mut Vec<String>,
) -> Result<()> {
    let stacks: Vec<&StackSpec> = mounts.iter().map(|(_, stack)| stack).collect();
    let ceph = arguments.ceph.access(&stacks, |path| file_to_read(context, path))?;
    for (mount_point, stack) in mounts {
        let wanted = Wanted {
            ceph: ceph.clone().filter(|_| has_ceph(&stack)),
            owner: Some(own.clone()),
            transport: arguments.fuse_transport.chosen(),
            wait_for_writes: arguments.wait_for_writes,
            timeout: arguments.timeout,
            ..Wanted::new(mount_point, stack)
        };
        mounted.push(mount_instance(context, name, wanted)?.instance);
    }
    let pool = pool::lock(context, name)?;
    // Also without a mount the program runs on the pool's cores and in its memory.
    let groups = context.groups()?;
    groups.make_pool(&*context.host, name, &pool.record.limits()?)?;
    groups.make_container(&*context.host, name, &group_name(&own.identity()), None)?;
    Ok(())
}

fn run_in_pool(
    context: &Context,
    arguments: &ExecArguments,
    pool: &str,
    own: &ProcessRecord,
    inherited: &Descriptors,
    signals: &mut Signals,
) -> Result<u8> {
    let mut command = Command::new(context.program());
    command.arg("--state").arg(&context.state).arg("--run-dir").arg(&context.run);
    if context.json {
        command.arg("--json");
    }
    command.args(["__enter", "--pool", pool, "--group", &group_name(&own.identity())]);
    if !arguments.legacy {
        command.arg("--preload").arg(context.preload_library()?);
    }
    command.arg("--").args(&arguments.command);
    if signals.end_was_asked() {
        return Err(Failure::interrupted("exec", "it was asked to end before the command began"));
    }
    let mut child = inherited.spawn(&mut command).map_err(|error| Failure::file(&context.program(), error))?;
    let ended = signals.wait(&*context.host, &mut child, |_| Ok(()));
    context.begin_anew();
    ended.map(status_code)
}

fn clean_up(context: &Context, name: &str, mounted: &[String], own: &ProcessRecord, throw_away: bool) -> Result<()> {
    let groups = context.groups()?;
    // What the program left running in the background stays in the pool as long as it lives.
    let is_over = outlived::remove_if_empty(context, &groups, name, &group_name(&own.identity()));
    let mut result = Ok(());
    let flushed: Vec<_> = mounted.iter().map(|instance| service::flush(context, name, instance, false)).collect();
    // Somebody may have removed the pool by force, with the program.
    let mut pool = match context.pools()?.try_lock::<PoolRecord>(name) {
        Ok(Some(pool)) => pool,
        Ok(None) => return Ok(()),
        // What the flushes said may never be said again.
        Err(failure) => return flushed.into_iter().collect::<Result<()>>().and(Err(failure)),
    };
    for (instance, flushed) in mounted.iter().zip(flushed).rev() {
        let unmounted = unmount_flushed(context, &mut pool, instance, UnmountMode::Detached, flushed);
        result = result.and(unmounted.or_else(|failure| hand_over(&mut pool, instance, failure)));
    }
    if throw_away && pool.record.owner.is_some() {
        result = result.and(service::end(context, &mut pool));
        // Else the next command removes it, when the last of them has ended.
        return if is_over { result.and(outlived::remove_pool(context, pool)) } else { result };
    }
    if pool.record.instances.is_empty() {
        outlived::clear_groups(context, name);
    }
    result
}

/// A mount that could not be unmounted is from now on the user's, and so is a throw-away pool that has it.
fn hand_over(pool: &mut Locked<PoolRecord>, instance: &str, failure: Failure) -> Result<()> {
    let name = pool.record.name.clone();
    let Some(kept) = pool.record.instances.iter_mut().find(|known| known.spec.instance == instance) else {
        return Err(failure);
    };
    kept.owner = None;
    let mut next = format!("`poolfs umount {name} {}`", pasted(&kept.spec.mount_point));
    if pool.record.owner.take().is_some() {
        next += &format!(", and `poolfs pool rm {name}`");
    }
    pool.note()?;
    Err(failure.then(&next))
}

/// The step between `exec` and its program: enter the pool's group, then become the program.
pub fn enter(context: &Context, arguments: &EnterArguments, inherited: &Descriptors) -> Result<u8> {
    let pools = context.pools()?;
    let pool: PoolRecord = pools.peek(&arguments.pool)?.ok_or_else(|| pools.absent(&arguments.pool))?;
    let groups = context.groups()?;
    groups.attach(&*context.host, &pool.name, Leaf::Container(&arguments.group), std::process::id())?;
    bind_to(&CpuSet::parse(&pool.cpus)?)?;
    let [program, rest @ ..] = arguments.command.as_slice() else {
        return Err(Failure::new("exec", "there is no command", "give one after --"));
    };
    let mut command = Command::new(program);
    command.args(rest);
    if let Some(library) = &arguments.preload {
        command.env("LD_PRELOAD", preloaded(library, std::env::var_os("LD_PRELOAD")));
    }
    let error = inherited.exec(&mut command);
    Err(not_executed(program, &error))
}

fn not_executed(program: &str, error: &std::io::Error) -> Failure {
    let (code, status) = match error.kind() {
        std::io::ErrorKind::NotFound => (Code::NotFound, STATUS_NOT_FOUND),
        _ => (Code::File, STATUS_NOT_STARTED),
    };
    let remedy = "check the command's name and that it is executable";
    Failure::new(program, error, remedy).with_code(code).with_status(status)
}

/// The library first, so that whatever else is preloaded calls it.
fn preloaded(library: &Path, others: Option<OsString>) -> OsString {
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = others.filter(|others| !others.is_empty() && others != library) {
        list.push(":");
        list.push(others);
    }
    list
}

/// Where the host has no cpuset controller this keeps the program on the pool's cores.
fn bind_to(cpus: &CpuSet) -> Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus.numbers().iter().filter(|cpu| (**cpu as usize) < rustix::thread::CpuSet::MAX_CPU) {
        set.set(*cpu as usize);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|errno| {
        Failure::new("exec", format!("CPUs {cpus} cannot be taken: {errno}"), "check the pool's --cpus")
    })
}

/// The parts between commas. `\,` is a comma in a name; what else follows a backslash is left to whoever reads the part.
fn split_parts(text: &str) -> Vec<String> {
    let (mut parts, mut part) = (Vec::new(), String::new());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            ',' => parts.push(std::mem::take(&mut part)),
            '\\' => match characters.next() {
                Some(escaped @ (',' | '\\')) => part.push(escaped),
                next => part.extend([character].into_iter().chain(next)),
            },
            _ => part.push(character),
        }
    }
    parts.push(part);
    parts
}

/// Understand `at=DIR,dir=DIR[,shared=yes]` or `at=DIR,upper=DIR,lower=DIR[:DIR...][,immutable=yes][,upper-format=FORMAT][,upper-size=SIZE]`.
fn parse_spec(text: &str) -> Result<(PathBuf, StackSpec)> {
    let wrong = |cause: &str| {
        let remedy = "write at=DIR,dir=DIR[,shared=yes|,coherence=MODE] or at=DIR,upper=DIR,lower=DIR[:DIR...][,immutable=yes][,upper-format=FORMAT][,upper-size=SIZE]";
        Failure::usage(format!("--mount {text}"), cause, remedy)
    };
    let (mut at, mut dir, mut upper, mut lower, mut format, mut size) = (None, None, None, None, None, None);
    let (mut shared, mut immutable, mut coherence) = (None, None, None);
    let parts = split_parts(text);
    for part in &parts {
        let (key, value) = part.split_once('=').ok_or_else(|| wrong(&format!("{part:?} in it has no =")))?;
        let place = match key {
            "at" => &mut at,
            "dir" => &mut dir,
            "shared" | "immutable" if value != "yes" => {
                return Err(wrong(&format!("{key}={value} is neither {key}=yes nor left out")));
            }
            "shared" => &mut shared,
            "immutable" => &mut immutable,
            "coherence" | "consistency" => &mut coherence,
            "upper" => &mut upper,
            "lower" => &mut lower,
            "upper-format" => &mut format,
            "upper-size" => &mut size,
            _ => return Err(wrong(&format!("there is no {key}="))),
        };
        if value.is_empty() || place.replace(value).is_some() {
            return Err(wrong(&format!("{key}= is empty or given twice")));
        }
    }
    let at = at.map(PathBuf::from).ok_or_else(|| wrong("at= is missing"))?;
    match (dir, upper, lower, format.or(size)) {
        (Some(dir), None, None, None) if immutable.is_none() => {
            let coherence = match (shared, coherence) {
                (None, None) => Coherence::Exclusive,
                (Some(_), None) => Coherence::Uncoordinated,
                (None, Some(mode)) => mode.parse().map_err(|error| wrong(&format!("coherence={mode}: {error}")))?,
                (Some(_), Some(_)) => return Err(wrong("shared= and coherence= exclude each other")),
            };
            Ok((at, StackSpec::Directory { directory: dir.into(), coherence, size_bytes: None }))
        }
        (None, Some(upper), Some(lower), _) if shared.or(coherence).is_none() => {
            let format = format.map_or(Ok(UpperFormat::default()), str::parse);
            let format = format.map_err(|error| wrong(&format!("upper-format: {error}")))?;
            let size_bytes = size.map(parse_upper_size).transpose();
            let size_bytes = size_bytes.map_err(|cause| wrong(&format!("upper-size: {cause}")))?;
            let storage = Storage { format, size_bytes };
            let (upper, lowers, immutable_lowers) = (upper.into(), split_lowers(lower), immutable.is_some());
            Ok((at, StackSpec::Union { upper, lowers, storage, immutable_lowers }))
        }
        _ => Err(wrong("neither dir=, nor upper= and lower=")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_else_is_preloaded_stays() {
        let library = Path::new("/l.so");
        for (others, all) in
            [(None, "/l.so"), (Some(""), "/l.so"), (Some("/l.so"), "/l.so"), (Some("a.so"), "/l.so:a.so")]
        {
            assert_eq!(preloaded(library, others.map(OsString::from)), all);
        }
    }

    #[test]
    fn mounts_are_understood() {
        let (at, stack) = parse_spec("at=/a,dir=/b").expect("a directory");
        assert_eq!((at, stack), ("/a".into(), StackSpec::directory("/b")));
        let (_, stack) = parse_spec("at=/a,dir=/b,shared=yes").expect("a directory");
        let with = |coherence| StackSpec::Directory { directory: "/b".into(), coherence, size_bytes: None };
        assert_eq!(stack, with(Coherence::Uncoordinated));
        assert_eq!(parse_spec("at=/a,dir=/b,consistency=strict").expect("a directory").1, with(Coherence::Strict));
        let (_, stack) = parse_spec("at=/a,dir=/b,coherence=timed:2s").expect("a directory");
        assert_eq!(stack, with(Coherence::Timed { milliseconds: 2000 }));
        let (at, stack) = parse_spec(r"at=/a\\,dir=/c\\\,d").expect("a directory");
        assert_eq!((at, stack), (r"/a\".into(), StackSpec::directory(r"/c\,d")));
        let (at, stack) = parse_spec(r"at=/a\,b,dir=/c\d\,e=f").expect("a directory");
        assert_eq!((at, stack), ("/a,b".into(), StackSpec::directory(r"/c\d,e=f")));
        let (_, stack) = parse_spec(r"at=/a,upper=/u,lower=/l\:1:/m\,n").expect("a union");
        assert_eq!(stack, StackSpec::union("/u", vec!["/l:1".into(), "/m,n".into()]));
        let (_, stack) = parse_spec("upper=/u,lower=/l:/m,at=/a").expect("a union");
        assert_eq!(stack, StackSpec::union("/u", vec!["/l".into(), "/m".into()]));
        let (_, stack) = parse_spec("at=/a,upper=/u,lower=/l,upper-format=bcow-space,upper-size=1G").expect("a union");
        let storage = Storage { format: UpperFormat::BcowSpace, size_bytes: Some(1 << 30) };
        assert_eq!(
            stack,
            StackSpec::Union { upper: "/u".into(), lowers: vec!["/l".into()], storage, immutable_lowers: false }
        );
        let (_, stack) = parse_spec("at=/a,upper=/u,lower=/l,immutable=yes").expect("a union");
        assert!(matches!(stack, StackSpec::Union { immutable_lowers: true, .. }));
        for bad in ["at=/a,dir=/d,immutable=yes", "at=/a,upper=/u,lower=/l,immutable=no"] {
            assert!(parse_spec(bad).is_err(), "{bad}");
        }
        for bad in ["upper-format=x", "upper-size=x", "upper-size=4K"] {
            assert!(parse_spec(&format!("at=/a,upper=/u,lower=/l,{bad}")).is_err(), "{bad}");
        }
        assert!(parse_spec("at=/a,dir=/b,upper-format=bcow").is_err());
        assert!(parse_spec("at=/a,dir=/b,upper-size=1G").is_err());
        for (bad, cause) in [
            ("at=/a,dir=/b,shared=maybe", "shared=maybe is neither"),
            ("at=/a,dir=/b,share=yes", "there is no share="),
            ("at=/a,dir=/b,at=/c", "at= is empty or given twice"),
            ("at=/a,there", "\"there\" in it has no ="),
        ] {
            let told = parse_spec(bad).expect_err("wrong").summary();
            assert!(told.contains(cause), "{told}");
        }
        for bad in [
            "",
            "at=/a",
            "dir=/b",
            "at=/a,dir=/b,upper=/c",
            "at=/a,upper=/u",
            "at=,dir=/b",
            "at=/a,at=/b,dir=/c",
            "x=y",
            "at=/a,dir=/b,shared=no",
            "at=/a,upper=/u,lower=/l,shared=yes",
        ] {
            assert!(parse_spec(bad).is_err(), "{bad}");
        }
    }
}
