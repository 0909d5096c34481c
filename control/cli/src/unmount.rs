//! The command `umount`: unmounts an instance, in order or by force. Also drops instances that others have unmounted from the record.

use crate::context::Context;
use crate::failure::{Code, Failure, Result};
use crate::mount::{instance_at, is_recorded};
use crate::record::{InstanceRecord, PoolRecord};
use crate::state::Locked;
use crate::text::{complain, pasted};
use crate::{pool, service, users, waiting};
use poolfs_host::{Host, MountEntry, mount_table, mounted_inside, mounted_over, pool_mounts};
use poolfs_service_protocol::{Command, MountSpec, StackSpec, UnmountMode};
use std::path::Path;

/// What is said of a mount that is unmounted by force before its branch has taken everything.
const LATE: &str = "not all that was written was on the disk in time; what its branch has not taken since is lost";

/// The command `umount`.
pub fn umount(context: &Context, name: &str, mount_point: &Path, force: bool) -> Result<()> {
    let pool = pool::lock(context, name)?;
    let instance = instance_at(context, &pool.record, mount_point)?;
    if let Some(container) = &instance.container {
        let remedy = format!("end the container with `poolfs stop {container}`");
        let cause = format!("it is the root of the container {container}");
        return Err(Failure::in_use(mount_point.display().to_string(), cause, remedy));
    }
    if let Some(mounter) = instance.mounter.as_ref().filter(|mounter| mounter.is_alive(&*context.host)) {
        let cause = format!("process {} is about to mount it", mounter.pid);
        let remedy = format!("wait until it is mounted; `kill {}` gives that up", mounter.pid);
        return Err(Failure::in_use(mount_point.display().to_string(), cause, remedy));
    }
    let (instance, place, device) =
        (instance.spec.instance.clone(), instance.spec.mount_point.clone(), instance.device.clone());
    // Force would not help, and what is written would be flushed for nothing.
    refuse_foreign(context, &instance)?;
    if pool.record.service_alive(&*context.host) == Some(true) {
        // What such a service has stays its own, also by force: only its end would give it back.
        if let Err(failure) = waiting::ping(context, name)
            && !service::is_ending(context, &pool.record)?
        {
            return Err(failure);
        }
    }
    // What there is to flush may take long, and its branch may never answer. Others go on meanwhile.
    drop(pool);
    let mut flushed = service::flush(context, name, &instance, force);
    let gives_up = force && matches!(&flushed, Err(failure) if failure.code() == Code::NoAnswer);
    if gives_up {
        refuse_foreign(context, &instance)?;
        // The flush has had its time.
        context.patience.renew();
        if waiting::ping(context, name).is_ok() {
            let failure = Failure::new(mount_point.display().to_string(), LATE, "").with_code(Code::NoAnswer);
            // A branch that is only slow may have time.
            let command = Command::Unmount { instance: instance.clone(), ending: UnmountMode::Forced };
            flushed = service::tell(context, name, &command).and(Err(failure));
        }
    }
    let mut pool = match pool::lock(context, name) {
        Ok(pool) => pool,
        // What the flush said may never be said again.
        Err(failure) => return flushed.and(Err(failure)),
    };
    let has_died = |failure: &Failure, pool: &Locked<PoolRecord>| {
        failure.code() == Code::NoAnswer
            && is_recorded(pool, &instance)
            && pool.record.service_alive(&*context.host) != Some(true)
    };
    let unmounted = match flushed {
        Err(failure) if gives_up => Err(failure),
        Err(failure) if has_died(&failure, &pool) => {
            // What was written last may be lost with the service: that it is unmounted is not all there is to say.
            return unmount_instance(context, &mut pool, &instance, UnmountMode::Orderly).and(Err(failure));
        }
        flushed => unmount_flushed(context, &mut pool, &instance, UnmountMode::Orderly, flushed),
    };
    match unmounted {
        Err(failure) if force => {
            if is_recorded(&pool, &instance) {
                // Its flush may have taken long.
                refuse_foreign(context, &instance)?;
            }
            let ended = unmount_instance(context, &mut pool, &instance, UnmountMode::Forced);
            if !is_recorded(&pool, &instance) {
                complain(&format!("poolfs: unmounted all the same: {}", failure.summary()));
            }
            ended
        }
        Err(failure) if !is_recorded(&pool, &instance) => Err(failure),
        other => other.map_err(|failure| {
            let is_used = failure.code() == Code::InUse;
            // Gone from its place: the service ends it when the last user has let it go.
            let is_gone = mount_table(&*context.host).is_ok_and(|table| pool_mounts(&table, &instance).is_empty());
            let find = || match device.filter(|_| is_gone) {
                Some(device) => {
                    users::of_device(&device, |pid| pool_of(context, pid)).or_else(|| users::elsewhere(&instance))
                }
                None => users::described(&*context.host, &place).or_else(|| users::elsewhere(&instance)),
            };
            let failure = match is_used.then(find).flatten() {
                Some(who) => failure.because(format!("used by: {who}")),
                None => failure,
            };
            let again = format!("`poolfs umount {name} {}`", pasted(mount_point));
            let force = "with --force its users lose it, and what is not on the disk is lost";
            match is_used && is_gone {
                true => failure.with_remedy(format!(
                    "end what uses it: the mount ends by itself then, and {again} finds none there; {force}"
                )),
                false => failure.then(&format!("{again} again; {force}")),
            }
        }),
    }
}

/// The pool whose service a process is.
fn pool_of(context: &Context, pid: u32) -> Option<String> {
    let pools: Vec<PoolRecord> = context.pools().ok()?.peek_all().ok()?;
    let is_its = |pool: &PoolRecord| {
        pool.service.as_ref().is_some_and(|service| service.pid == pid && service.is_alive(&*context.host))
    };
    pools.into_iter().find(is_its).map(|pool| pool.name)
}

/// Unmount an instance; the service ends with its last one. When it fails and the instance is still in the pool's record, it
/// is still mounted.
pub fn unmount_instance(
    context: &Context,
    pool: &mut Locked<PoolRecord>,
    instance: &str,
    ending: UnmountMode,
) -> Result<()> {
    let (mut result, mut is_left) = (Ok(()), false);
    // After a service's death its successor knows nothing of the old instances, and neither does the record.
    if is_recorded(pool, instance) && pool.record.service_alive(&*context.host) == Some(true) {
        let name = pool.record.name.clone();
        result = service::unmount(context, &name, instance, ending).map(|left| is_left = left);
        if result.is_err() {
            match service::instances(context, &name) {
                Ok(served) if !ending.is_forced() && served.iter().any(|known| known == instance) => return result,
                // What it has is not known: it stays in the record until that is.
                Err(_) if !service::is_ending(context, &pool.record)? => return result,
                _ => {}
            }
        }
    }
    // The service has let it go, or is dead, or is not to be waited for: nothing of it may stay mounted.
    let table = mount_table(&*context.host)?;
    for entry in pool_mounts(&table, instance) {
        uncovered(&table, entry)?;
        context.host.detach(&entry.mount_point)?;
    }
    let is_it = |known: &mut InstanceRecord| known.spec.instance == instance;
    let gone: Vec<InstanceRecord> = pool.record.instances.extract_if(.., is_it).collect();
    for known in &gone {
        // Absent is what is wanted.
        let _ = std::fs::remove_file(known.spec.socket(&context.run));
    }
    let noted = pool.note();
    // Those who end with the service are not found any more.
    let find = || {
        let device = gone.first().and_then(|known| known.device.as_deref());
        let having_open = || users::of_device(device?, |pid| pool_of(context, pid));
        users::elsewhere(instance).map(|who| format!("processes in other mount namespaces: {who}")).or_else(having_open)
    };
    let who = is_left.then(find).flatten();
    if pool.record.instances.is_empty() {
        result = result.and(service::end(context, pool));
    }
    if is_left {
        let is_served = pool.record.service.is_some();
        gone.iter().for_each(|known| {
            complain(&format!("poolfs: note: {}", left_text(&known.spec, who.as_deref(), is_served)))
        });
    }
    result.and(noted)
}

/// What is said of an instance that is gone from its place, and that others have all the same.
fn left_text(spec: &MountSpec, who: Option<&str>, is_served: bool) -> String {
    let place = spec.mount_point.display();
    let who = who.unwrap_or("programs in other mount namespaces, or that have files of it open or work in it");
    let upper = match &spec.stack {
        StackSpec::Union { upper, .. } => Some(upper),
        _ => None,
    };
    match (is_served, upper) {
        (true, upper) => {
            let branch = upper.map_or_else(
                || "its directory stays in use".to_owned(),
                |upper| format!("its upper branch {} is not closed, and stays in use,", upper.display()),
            );
            format!("{place} is unmounted here, and still used by {who}; {branch} until they end, or unmount it there")
        }
        (false, upper) => {
            let branch = upper.map_or_else(String::new, |upper| {
                format!(
                    "; its upper branch {0} is not closed: mount it once more with --upper, or check it with `poolfs fsck {1} --repair`, \
                     before it becomes a lower branch",
                    upper.display(),
                    pasted(upper)
                )
            });
            format!(
                "{place} is unmounted, and the pool's service has ended with it, though it was still used by {who}: they have lost it{branch}"
            )
        }
    }
}

/// The same after a flush without the pool's lock. What was wrong with that the service may have been told only once; and whoever has ended the wait for it does not
/// wait for it again with the lock.
pub fn unmount_flushed(
    context: &Context,
    pool: &mut Locked<PoolRecord>,
    instance: &str,
    ending: UnmountMode,
    flushed: Result<()>,
) -> Result<()> {
    match flushed {
        Err(failure) if failure.code() != Code::NoAnswer => Err(failure),
        _ => unmount_instance(context, pool, instance, ending),
    }
}

/// Refuse to unmount what somebody has mounted over a mount of an instance, or inside: it would go with it.
fn refuse_foreign(context: &Context, instance: &str) -> Result<()> {
    let table = mount_table(&*context.host)?;
    pool_mounts(&table, instance).into_iter().try_for_each(|entry| {
        uncovered(&table, entry)?;
        let inside = mounted_inside(&table, entry);
        // The last mounted one can be unmounted before all others.
        let Some(last) = inside.last() else { return Ok(()) };
        let (kind, at) = (named(last), last.mount_point.display());
        let cause = match inside.len() - 1 {
            0 => format!("something else is mounted inside it, {kind} at {at}"),
            more => format!("something else is mounted inside it, {kind} at {at}, and {more} more"),
        };
        let remedy = format!("unmount that first, with `umount {}`", pasted(&last.mount_point));
        Err(Failure::in_use(entry.mount_point.display().to_string(), cause, remedy))
    })
}

/// What a mount is of.
fn named(entry: &MountEntry) -> String {
    // Filesystems without a device have any word for it.
    let source = Some(&entry.source).filter(|source| source.starts_with('/')).map(|source| format!(" of {source}"));
    format!("a {}{}", entry.kind, source.unwrap_or_default())
}

/// That unmounting by its path takes this mount, and not somebody else's.
pub fn uncovered(table: &[MountEntry], entry: &MountEntry) -> Result<()> {
    match mounted_over(table, entry) {
        None => Ok(()),
        Some(over) => {
            let place = entry.mount_point.display();
            let cause = format!("something else is mounted over it, {}", named(over));
            Err(Failure::in_use(
                place.to_string(),
                cause,
                format!("unmount that first, with `umount {}`", pasted(&entry.mount_point)),
            ))
        }
    }
}

/// Whether the record has instances that are mounted nowhere here, nor are to be: their service may not have them any more.
pub fn has_suspects(host: &dyn Host, table: &[MountEntry], pool: &PoolRecord) -> bool {
    let is_suspect = |known: &InstanceRecord| pool_mounts(table, &known.spec.instance).is_empty();
    pool.instances.iter().any(|known| is_suspect(known) && !known.is_being_mounted(host))
}

/// Forget the instances that the pool's service does not have any more: their unmount was not noted, because the command that asked for it
/// was killed, or because somebody else has unmounted them.
pub fn forget_unserved(context: &Context, pool: &mut Locked<PoolRecord>) -> Result<()> {
    let is_alive = pool.record.service_alive(&*context.host) == Some(true);
    if is_alive && has_suspects(&*context.host, &mount_table(&*context.host)?, &pool.record) {
        let served = service::instances(context, &pool.record.name)?;
        let settled = pool.record.instances.iter().filter(|known| !known.is_being_mounted(&*context.host));
        let names = settled.map(|known| known.spec.instance.clone());
        let gone: Vec<String> = names.filter(|name| !served.contains(name)).collect();
        for instance in gone {
            unmount_instance(context, pool, &instance, UnmountMode::Orderly)?;
        }
    }
    Ok(())
}
