//! The command `run`: creates a container, and runs it in this process or starts a monitor for it.

use crate::arguments::RunArguments;
use crate::container::monitor;
use crate::container::record::{ContainerRecord, ContainerState};
use crate::container::supervise::{self, Places, Start};
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::mount;
use crate::record::{PoolRecord, ProcessRecord, RECORD_VERSION};
use crate::signals::Signals;
use crate::text::{print, print_json, size};
use poolfs_image::ImageRecord;
use poolfs_service_protocol::{IdMap, IdRange, StackSpec, Storage, is_valid_name};
use std::hash::{BuildHasher, RandomState};
use std::io::IsTerminal;
use std::process::Stdio;
use std::time::SystemTime;

/// Longest name, which is also the name of the container's host.
const NAME_BYTES_MAX: usize = 63;
/// What the start parameters are called in a container's directory.
pub const START_NAME: &str = "start.json";

/// Make and run a container; the exit status of its command.
pub fn run(context: &Context, arguments: &RunArguments) -> Result<u8> {
    if arguments.tty && !arguments.detach && !std::io::stdin().is_terminal() {
        let remedy = "leave -t out, or run it on a terminal";
        return Err(Failure::usage("run -t", "the standard input is no terminal", remedy));
    }
    let mut signals = Signals::catch()?;
    let (name, start) = create(context, arguments)?;
    if arguments.detach {
        monitor::launch(context, &name, &mut signals)?;
        if context.json {
            print_json(&serde_json::json!({"container": name}))?;
        } else {
            print(&format!("{name}\n"))?;
        }
        return Ok(0);
    }
    let interactive = arguments.interactive || arguments.tty;
    supervise::run(
        context,
        &name,
        &start,
        &mut signals,
        |command| {
            if !interactive {
                command.stdin(Stdio::null());
            }
            Ok(())
        },
        || {},
    )
}

fn create(context: &Context, arguments: &RunArguments) -> Result<(String, Start)> {
    let pools = context.pools()?;
    let pool: PoolRecord = pools.peek(&arguments.pool)?.ok_or_else(|| pools.absent(&arguments.pool))?;
    let containers = context.containers()?;
    let images = context.images()?;
    // Until the record names the layers nobody may remove them.
    let _lock = images.lock(false)?;
    let image = images.get(&arguments.image)?;
    let name = arguments.name.clone().unwrap_or_else(|| made_up_name(&pool.name));
    if !is_valid_name(&name) || name.len() > NAME_BYTES_MAX {
        return Err(crate::state::bad_name("container", &name));
    }
    mount::refuse_limited_ring(arguments.fuse_transport.chosen(), arguments.timeout)?;
    let upper = arguments.upper_dir.as_deref().map(|name| mount::branch(context, name)).transpose()?;
    let of_upper = upper.clone().map(StackSpec::directory);
    let file = |path: &std::path::Path| mount::file_to_read(context, path);
    let ceph = match &image.at {
        Some(at) => Some(arguments.ceph.access_over(&at.access, file)?),
        None => arguments.ceph.access(&of_upper.iter().collect::<Vec<_>>(), file)?,
    };
    let start = Start { image: image.config.clone(), env: checked_env(&arguments.env)?, init: arguments.init };
    let record = ContainerRecord {
        version: RECORD_VERSION,
        name: name.clone(),
        pool: pool.name.clone(),
        image: image.name.clone(),
        layers: image.layers.iter().map(|layer| layer.digest.clone()).collect(),
        layers_at: image.at.as_ref().map(|at| at.directory.clone()),
        command: command(&image, &arguments.command)?,
        memory_bytes: arguments.memory.map(|bytes| checked_memory(&pool, bytes)).transpose()?,
        legacy: arguments.legacy,
        upper,
        ceph: ceph.map(Box::new),
        storage: Storage { format: arguments.upper_format, size_bytes: arguments.upper_size },
        userns: user_namespace(&arguments.userns)?,
        transport: arguments.fuse_transport.chosen(),
        wait_for_writes: arguments.wait_for_writes,
        timeout: arguments.timeout,
        tty: arguments.tty,
        interactive: arguments.interactive,
        remove_at_end: arguments.rm,
        instance: None,
        created_seconds: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        monitor: ProcessRecord::of(&*context.host, std::process::id()),
        state: ContainerState::Created,
        exit_code: None,
    };
    containers.create(&name, &record, |directory| {
        let places = Places::of(directory);
        for path in [&places.upper, &places.root, &places.bundle] {
            std::fs::create_dir(path).map_err(|error| Failure::file(path, error))?;
        }
        // Seen by everybody in the container as its root directory.
        let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&places.upper, open_to_all).map_err(|error| Failure::file(&places.upper, error))?;
        let path = directory.join(START_NAME);
        let text = serde_json::to_vec(&start).map_err(|error| Failure::file(&path, error))?;
        std::fs::write(&path, text).map_err(|error| Failure::file(&path, error))
    })?;
    Ok((name, start))
}

/// Less than this no program can be started in.
const MEMORY_BYTES_MIN: u64 = 6 << 20;

/// A container's limit, which has to leave it room to start, and cannot be more than all containers of its pool have.
fn checked_memory(pool: &PoolRecord, bytes: u64) -> Result<u64> {
    let limits = pool.limits()?;
    let most = limits.memory_bytes.saturating_sub(limits.service_bytes);
    if (MEMORY_BYTES_MIN..=most).contains(&bytes) {
        return Ok(bytes);
    }
    let cause = if bytes < MEMORY_BYTES_MIN {
        format!("no program starts with {} of memory", size(bytes))
    } else {
        format!("the containers of pool {} have {} of memory together", pool.name, size(most))
    };
    let remedy = format!("give --memory between {} and {}", size(MEMORY_BYTES_MIN), size(most));
    Err(Failure::usage(format!("--memory {}", size(bytes)), cause, remedy))
}

/// What the image always runs, then what was asked for or else the image's default.
fn command(image: &ImageRecord, asked_for: &[String]) -> Result<Vec<String>> {
    let arguments = if asked_for.is_empty() { &image.config.cmd } else { asked_for };
    let command: Vec<String> = image.config.entrypoint.iter().chain(arguments).cloned().collect();
    if command.is_empty() {
        let remedy = "give one after --";
        return Err(Failure::usage(format!("image {}", image.name), "it has no default command", remedy));
    }
    Ok(command)
}

/// The map of these ranges; none when there are none.
fn user_namespace(ranges: &[IdRange]) -> Result<Option<IdMap>> {
    if ranges.is_empty() {
        return Ok(None);
    }
    let failed = |cause: &dyn std::fmt::Display| {
        Failure::usage(
            "run --userns",
            cause,
            "give ranges apart from each other that begin with the id 0, such as 0:100000:65536",
        )
    };
    let map = IdMap::new(ranges.iter().copied()).map_err(|error| failed(&error))?;
    if map.host(0).is_none() {
        return Err(failed(&"the container's root (0) would have no id of the host"));
    }
    Ok(Some(map))
}

/// `K=V`, or `K` for the value it has here.
fn checked_env(asked_for: &[String]) -> Result<Vec<String>> {
    let mut env = Vec::new();
    for variable in asked_for {
        match variable.split_once('=') {
            Some(("", _)) => {
                return Err(Failure::usage(format!("--env {variable}"), "it has no name", "write it as NAME=VALUE"));
            }
            Some(_) => env.push(variable.clone()),
            None => env.extend(std::env::var(variable).ok().map(|value| format!("{variable}={value}"))),
        }
    }
    Ok(env)
}

fn made_up_name(pool: &str) -> String {
    let random = RandomState::new().hash_one(std::process::id());
    format!("{}-{:08x}", &pool[..pool.len().min(48)], random >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_image::ImageConfig;

    fn image(entrypoint: &[&str], cmd: &[&str]) -> ImageRecord {
        let list = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let config = ImageConfig { entrypoint: list(entrypoint), cmd: list(cmd), ..ImageConfig::default() };
        ImageRecord {
            version: 1,
            name: "i".into(),
            source: String::new(),
            imported_seconds: 0,
            layers: Vec::new(),
            config,
            at: None,
        }
    }

    #[test]
    fn entrypoint_and_command_are_joined_as_elsewhere() {
        let asked = ["x".to_owned()];
        assert_eq!(command(&image(&["e"], &["c"]), &[]).expect("both"), ["e", "c"]);
        assert_eq!(command(&image(&["e"], &["c"]), &asked).expect("replaced"), ["e", "x"]);
        assert_eq!(command(&image(&[], &[]), &asked).expect("only asked"), ["x"]);
        assert!(command(&image(&[], &[]), &[]).is_err());
    }

    #[test]
    fn a_map_of_ids_has_the_containers_root_and_no_id_twice() {
        let map = |texts: &[&str]| {
            user_namespace(&texts.iter().map(|text| text.parse().expect("a range")).collect::<Vec<_>>())
        };
        assert_eq!(map(&[]).expect("none"), None);
        assert_eq!(map(&["5:1:1", "0:100000:5"]).expect("a map").and_then(|map| map.host(0)), Some(100_000));
        for (wrong, part) in [(&["1:100000:65536"][..], "root"), (&["0:100000:10", "10:100009:1"], "overlap")] {
            let text = map(wrong).expect_err(part).to_string();
            assert!(text.contains(part) && text.contains("remedy") && text.contains("--userns"), "{text}");
        }
    }

    #[test]
    fn made_up_names_are_valid_and_differ() {
        let (one, other) = (made_up_name("web"), made_up_name(&"x".repeat(48)));
        assert!(is_valid_name(&one) && is_valid_name(&other) && other.len() <= NAME_BYTES_MAX);
        assert_ne!(one, made_up_name("web"));
    }
}
