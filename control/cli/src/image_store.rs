//! Stores of images in directories of a CephFS, mounted for as long as a command works on them.
//!
//! The command mounts the directory by a pool of its own, which nobody else uses, and works on it as on the store of a state directory. The mount
//! is an exclusive one: its claim at the cluster is the lock of the store, against the commands of all hosts. What a killed command leaves, the
//! next one removes as it removes a throw-away pool of `exec`.

use crate::context::Context;
use crate::execute::throw_away_pool;
use crate::failure::{Code, Failure, Result};
use crate::mount::{self, Wanted, mount_instance};
use crate::outlived;
use crate::pool;
use crate::record::{PoolRecord, ProcessRecord};
use crate::text::complain;
use crate::unmount::unmount_flushed;
use crate::{ceph, service, signals};
use poolfs_image::{ClusterStore, IMAGES_NAME, ImageStore, store_of};
use poolfs_service_protocol::{CephAccess, MountSpec, Place, StackSpec, Timeout, UnmountMode};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a request may take: a cluster that does not answer must not keep the command for good.
const REQUEST_LIMIT_MS: u64 = 120_000;
/// How often it is looked whether another command has ended.
const TURN_PAUSE: Duration = Duration::from_millis(200);
/// What the place is called where it is mounted, in the directory of its pool.
const MOUNT_POINT_NAME: &str = "images";

/// What the directory beside it is called in which archives are unpacked.
const SCRATCH_NAME: &str = "scratch";

/// The store at a cluster that has the lower branches of a union, if one has them all: reached as its images on this host are, if there are any.
pub fn of_union(local: &ImageStore, union: &MountSpec) -> Result<Option<ClusterStore>> {
    let (StackSpec::Union { lowers, .. }, Some(access)) = (&union.stack, &union.ceph) else { return Ok(None) };
    let Some(directory) = store_of(lowers).filter(|store| !Place::of(store).is_directory()) else { return Ok(None) };
    let mut known = local.list()?.into_iter().filter_map(|image| image.at);
    let known = known.find(|at| at.directory == directory && at.access.may_be_one(access));
    let as_mounted = || ClusterStore {
        directory: directory.to_path_buf(),
        access: CephAccess { holder: None, ..CephAccess::clone(access) },
    };
    Ok(Some(known.unwrap_or_else(as_mounted)))
}

/// The store that an option names.
pub fn named(context: &Context, option: &str, name: &Path, arguments: &ceph::CephArguments) -> Result<ClusterStore> {
    if Place::of(name).is_directory() {
        let remedy = "name a directory of a CephFS as ceph:/PATH; images of this host are in its --state directory, and need no such option";
        return Err(Failure::usage(format!("{option} {}", name.display()), "it is no directory of a cluster", remedy));
    }
    let directory = mount::branch(context, name)?;
    let access = arguments.access(&[&StackSpec::directory(&directory)], |path| mount::file_to_read(context, path))?;
    Ok(ClusterStore { directory, access: access.unwrap_or_default() })
}

/// Calls `act` with a store, which nobody else changes meanwhile, on whatever host. It makes durable what it does.
pub fn with_store<T>(context: &Context, at: &ClusterStore, act: impl FnOnce(&ImageStore) -> Result<T>) -> Result<T> {
    with_mounted(
        context,
        at,
        |place| match place.join(IMAGES_NAME).is_dir() {
            true => ImageStore::open(place).map_err(Failure::from),
            false => {
                let remedy = "check the path; `poolfs image import --to` makes a store of a directory";
                Err(Failure::not_found(at.directory.display().to_string(), "no image was ever imported to it", remedy))
            }
        },
        act,
    )
}

/// The same with a directory that may be none yet.
pub fn with_new_store<T>(
    context: &Context,
    at: &ClusterStore,
    act: impl FnOnce(&ImageStore) -> Result<T>,
) -> Result<T> {
    with_mounted(context, at, |place| Ok(ImageStore::open(place)?), act)
}

fn with_mounted<T>(
    context: &Context,
    at: &ClusterStore,
    open: impl FnOnce(&Path) -> Result<ImageStore>,
    act: impl FnOnce(&ImageStore) -> Result<T>,
) -> Result<T> {
    pool::sweep(context);
    let own = ProcessRecord::of(&*context.host, std::process::id())
        .ok_or_else(|| Failure::new("image", "this process is not in /proc", "mount /proc"))?;
    let pool = throw_away_pool(context, own.clone())?;
    let mounted = mount_store(context, &pool, own, at);
    let instance = mounted.as_ref().ok().map(|(instance, _)| instance.clone());
    let result = mounted.and_then(|(instance, place)| act(&settled(context, &pool, &instance, &place, open(&place)?)?));
    let ended = end(context, &pool, instance.as_deref(), result.is_ok());
    // Messages name the directory at the cluster, not the place where this command has mounted it.
    let place = mount_point(context, &pool)?;
    match (result, ended) {
        // What was done is durable.
        (Ok(done), Err(failure)) => {
            complain(&format!("poolfs: what this command has mounted stays for now: {}", failure.summary()));
            Ok(done)
        }
        (result, _) => result.map_err(|failure| failure.renamed(&place, &at.directory)),
    }
}

fn mount_point(context: &Context, pool: &str) -> Result<PathBuf> {
    Ok(context.pools()?.path(pool).join(MOUNT_POINT_NAME))
}

/// Mount a store as soon as no other command has it: the instance, and where it is.
fn mount_store(context: &Context, pool: &str, own: ProcessRecord, at: &ClusterStore) -> Result<(String, PathBuf)> {
    let place = mount_point(context, pool)?;
    std::fs::create_dir_all(&place).map_err(|error| Failure::file(&place, error))?;
    let wanted = Wanted {
        owner: Some(own),
        timeout: Timeout::try_from(REQUEST_LIMIT_MS).ok(),
        ceph: Some(at.access.clone()),
        is_store: true,
        ..Wanted::new(place.clone(), StackSpec::directory(&at.directory))
    };
    let wait = context.patience.begin();
    loop {
        match mount_instance(context, pool, wanted.clone()) {
            Ok(spec) => return Ok((spec.instance, place)),
            Err(failure) if failure.code() != Code::InUse => return Err(failure.of(at.directory.display().to_string())),
            Err(_) if !wait.is_over() && !signals::end_came() => std::thread::sleep(TURN_PAUSE),
            Err(failure) => {
                let remedy = "wait until whoever has it has ended, as another `poolfs image import`, here or on another host (--wait waits longer). What one \
                              that was killed has left, the next `poolfs image`, `mount` or `run` on its host ends";
                return Err(failure.of(at.directory.display().to_string()).with_remedy(remedy));
            }
        }
    }
}

/// A store for this command. No call of a program makes all of a FUSE filesystem durable: the service is asked for that.
fn settled(context: &Context, pool: &str, instance: &str, place: &Path, store: ImageStore) -> Result<ImageStore> {
    let (own, pool, instance) = (context.with_state(context.state.clone()), pool.to_owned(), instance.to_owned());
    let flush = move |path: &Path| {
        rustix::fs::syncfs(std::fs::File::open(path)?)?;
        service::flush(&own, &pool, &instance, false).map_err(|failure| match failure.code() {
            Code::NoSpace => ErrorKind::StorageFull.into(),
            _ => std::io::Error::other(failure.summary()),
        })
    };
    // It goes with the pool, also when this command is killed.
    let scratch = place.with_file_name(SCRATCH_NAME);
    std::fs::create_dir_all(&scratch).map_err(|error| Failure::file(&scratch, error))?;
    Ok(store.made_durable_by(flush).unpacking_in(scratch))
}

/// End what was mounted, and its pool.
fn end(context: &Context, name: &str, instance: Option<&str>, is_good: bool) -> Result<()> {
    // A signal that asked this command to end has had its effect: cleaning up has time of its own.
    context.begin_anew();
    // What a failed command has left unwritten is nothing that anybody waits for.
    let ending = if is_good { UnmountMode::Detached } else { UnmountMode::Forced };
    let flushed = match instance {
        Some(instance) if is_good => service::flush(context, name, instance, false),
        _ => Ok(()),
    };
    let Some(mut pool) = context.pools()?.try_lock::<PoolRecord>(name)? else { return flushed };
    let unmounted = match instance {
        Some(instance) => {
            unmount_flushed(context, &mut pool, instance, ending, flushed).or_else(|failure| {
                // It was to be made durable before: there is nothing to go on with.
                unmount_flushed(context, &mut pool, instance, UnmountMode::Forced, Ok(())).and(Err(failure))
            })
        }
        None => Ok(()),
    };
    let ended = service::end(context, &mut pool).and_then(|()| outlived::remove_pool(context, pool));
    unmounted.and(ended)
}
