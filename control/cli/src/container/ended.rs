//! Mounts the root of a container that has ended once more, for a command that examines it.

use crate::container::record::{ContainerRecord, ContainerState};
use crate::container::supervise::{remove_root, root_of};
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::mount::{Wanted, mount_instance};
use crate::record::ProcessRecord;
use crate::unmount::unmount_flushed;
use crate::{pool, service};
use poolfs_service_protocol::{MountSpec, UnmountMode};

/// Calls `act` with the root of a container of `pool` that has ended, mounted as long as that takes; nothing, when there is no
/// such container.
pub fn with_ended_root<T>(
    context: &Context,
    pool: &str,
    name: &str,
    act: impl FnOnce(&MountSpec) -> Result<T>,
) -> Result<Option<T>> {
    let containers = context.containers()?;
    let has_ended = |record: &ContainerRecord| record.pool == pool && record.state == ContainerState::Ended;
    if !name.contains('/') && containers.peek(name)?.as_ref().is_some_and(has_ended) {
        // Nobody removes it meanwhile.
        let container = containers.lock::<ContainerRecord>(name)?;
        // Should this process be killed, the next command on the pool unmounts it.
        let owner = ProcessRecord::of(&*context.host, std::process::id());
        // However the kernel's requests were to come while it ran: that may not be had any more.
        let transport = None;
        let of_container = root_of(context, &container)?;
        let wanted = Wanted { owner, container: None, suid: false, devices: false, transport, ..of_container };
        // It went when the container had ended, and goes again.
        let root = wanted.mount_point.clone();
        std::fs::create_dir_all(&root).map_err(|error| Failure::file(&root, error))?;
        let spec = mount_instance(context, pool, wanted)?;
        let result = act(&spec);
        // It may take long: nobody waits for the pool's lock meanwhile.
        let flushed = service::flush(context, pool, &spec.instance, false);
        let unmounted = match pool::lock(context, pool) {
            Ok(mut pool) => unmount_flushed(context, &mut pool, &spec.instance, UnmountMode::Orderly, flushed),
            Err(failure) => flushed.and(Err(failure)),
        };
        let removed = unmounted.and_then(|()| remove_root(&root));
        return result.and_then(|done| removed.map(|()| Some(done)));
    }
    Ok(None)
}
