//! The service's own mount namespace, with an almost empty root.

use crate::stack::needs_links_of_proc;
use rustix::fs::{CWD, Mode};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, mount_change, mount_remount,
    move_mount, open_tree, unmount,
};
use std::ffi::CStr;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// What there is of the host's files, by the paths that they have there.
struct Shown {
    path: PathBuf,
    flags: MountFlags,
}

/// Where the root is made: any directory does that is there on every host.
const PLACE: &str = "/proc";

/// A path is a name, and no symbolic link on it is followed.
const NO_LINKS: MountFlags = MountFlags::from_bits_retain(256);
const HARMLESS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// The directory of sockets; processes, where no link leads to what they see; which CPUs there are.
fn shown(sockets: Option<&Path>) -> Vec<Shown> {
    let seen = HARMLESS | NO_LINKS | MountFlags::RDONLY;
    let links = if needs_links_of_proc() { NO_LINKS } else { MountFlags::empty() };
    let looked_at = [("/proc", seen - links), ("/sys/devices/system/cpu", seen)];
    let looked_at = looked_at.map(|(path, flags)| Shown { path: path.into(), flags });
    let sockets = sockets.map(|path| Shown { path: path.to_owned(), flags: HARMLESS | NO_LINKS });
    looked_at.into_iter().chain(sockets).collect()
}

/// Leaves the host's files behind for the calling thread and all that it starts. `sockets` exists.
pub(super) fn leave(sockets: Option<&Path>) -> anyhow::Result<()> {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    // What happens here does not reach the host.
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let shown = shown(sockets);
    let trees = shown.iter().map(|shown| open_tree(CWD, &shown.path, clone)).collect::<Result<Vec<_>, _>>()?;
    let options: &CStr = c"size=64k,nr_inodes=64,mode=0555";
    mount("poolfs-root", PLACE, "tmpfs", HARMLESS, options)?;
    for (shown, tree) in shown.iter().zip(trees) {
        let place = Path::new(PLACE).join(shown.path.strip_prefix("/")?);
        DirBuilder::new().recursive(true).mode(0o555).create(&place)?;
        move_mount(&tree, c"", CWD, &place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        mount_remount(&place, MountFlags::BIND | shown.flags, c"")?;
    }
    rustix::process::chdir(PLACE)?;
    rustix::process::pivot_root(".", ".")?;
    // What was the root is on top of the new one, in the same place.
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    mount_remount("/", MountFlags::BIND | HARMLESS | NO_LINKS | MountFlags::RDONLY, c"")?;
    // Nothing is to be found that was not put there.
    match rustix::fs::openat(CWD, c"/etc", rustix::fs::OFlags::PATH, Mode::empty()) {
        Err(Errno::NOENT) => Ok(()),
        _ => anyhow::bail!("the root of the service is not empty"),
    }
}
