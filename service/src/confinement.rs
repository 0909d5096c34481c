//! Confinement: the process gives up capabilities, new privileges, and the system calls that it has no use for, before it serves
//! anybody.
//!
//! ```text
//! prepare (limits, CPUs, control groups) -> enter -> threads, sockets, mounts
//! ```
//!
//! [`enter`] is called while there is one thread, so every later thread begins confined. What stays allowed is listed here and in
//! [`calls`] alone; docs/threat-model.md says what the confinement is worth.

mod calls;
mod root;

use crate::outside::Outside;
use crate::{bare_threads, outside, stack};
use anyhow::Context;
use rustix::io::Errno;
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};
use seccompiler::{SeccompAction, SeccompFilter, apply_filter};
use std::path::Path;
use tracing::warn;

/// The capabilities that stay, each with what it is for.
pub const CAPABILITIES: [(CapabilitySet, &str); 10] = [
    (CapabilitySet::CHOWN, "gives new files the owner that made them, and stores changes of owner"),
    (CapabilitySet::DAC_OVERRIDE, "reads and writes files of a branch whoever owns them; who may is decided before"),
    (CapabilitySet::DAC_READ_SEARCH, "finds files again by their handles (open_by_handle_at)"),
    (CapabilitySet::FOWNER, "changes modes, times, access lists and attributes of files that others own"),
    (CapabilitySet::FSETID, "keeps set-group-id bits of files whose group it is not in"),
    (
        CapabilitySet::SETUID,
        "has a filesystem give what is stored for a user no more room than the user has (setfsuid)",
    ),
    (CapabilitySet::MKNOD, "makes the device files of images"),
    (CapabilitySet::SETFCAP, "stores capabilities of programs (security.capability)"),
    (CapabilitySet::SYS_ADMIN, "mounts, reads and writes trusted attributes, gives the kernel programs to map"),
    (CapabilitySet::SYS_PTRACE, "reads of its clients' processes which root, namespaces and mounts they have"),
];

/// All of [`CAPABILITIES`].
#[must_use]
pub fn kept() -> CapabilitySet {
    CAPABILITIES.iter().map(|(capability, _)| *capability).collect()
}

/// Confines the calling process, which has one thread, for good. From here on there is next to nothing at any path; what is at
/// `sockets` is one of the exceptions. Two threads stay where the host's files are, for `outside`, and one has no descriptors, for
/// `bare_threads`.
///
/// # Errors
/// When the kernel cannot do it: nothing unconfined is to serve anybody.
pub fn enter(sockets: Option<&Path>) -> anyhow::Result<()> {
    give_up_rights()?;
    stack::keep_own_descriptors().map_err(anyhow::Error::msg)?;
    let stay = |place, paths| outside::stay(place, move || refuse_calls(paths));
    stay(Outside::Host, Paths::OfHost).context("leaving a thread where the host's files are")?;
    stay(Outside::Network, Paths::OfNetwork).context("leaving a thread that may use the network")?;
    root::leave(sockets).context("leaving the host's files behind")?;
    bare_threads::leave_one(|| refuse_calls(Paths::Own)).context("leaving a thread without descriptors")?;
    refuse_calls(Paths::Own)
}

/// The same for a job that is done with files of the host: it has no root of its own.
///
/// # Errors
/// As with [`enter`].
pub fn enter_on_host() -> anyhow::Result<()> {
    give_up_rights()?;
    refuse_calls(Paths::OfHost)
}

/// The same for the guard, which has its descriptors and needs no rights.
///
/// # Errors
/// As with [`enter`].
pub(crate) fn enter_as_guard() -> anyhow::Result<()> {
    give_up_rights()?;
    root::leave(None).context("leaving the host's files behind")?;
    let none = CapabilitySet::empty();
    rustix::thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .context("giving up all capabilities")?;
    refuse_calls(Paths::Own)
}

/// Which root the calling thread has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Paths {
    /// the host's: it may mount
    OfHost,
    /// the host's: it may connect by network, and load libraries
    OfNetwork,
    /// one in which there is nothing to do but to look
    Own,
}

fn give_up_rights() -> anyhow::Result<()> {
    give_up_capabilities().context("giving up capabilities")?;
    rustix::thread::set_no_new_privs(true).context("giving up new privileges")?;
    // Its memory is full of what tenants store: no core file may have it, and no process without capabilities look into it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).context("forbidding core files")
}

fn give_up_capabilities() -> rustix::io::Result<()> {
    let held = rustix::thread::capabilities(None)?.permitted;
    for capability in CapabilitySet::from_bits_retain(u64::MAX).iter().filter(|one| !kept().contains(*one)) {
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            // EINVAL: the kernel has none of this number.
            Ok(()) | Err(Errno::INVAL) => {}
            // The bound counts for programs that are executed, which none can be.
            Err(Errno::PERM) => {
                warn!("the bounding set of capabilities stays, as CAP_SETPCAP is not held");
                break;
            }
            Err(errno) => return Err(errno),
        }
    }
    match rustix::thread::clear_ambient_capability_set() {
        Ok(()) | Err(Errno::INVAL) => {}
        Err(errno) => return Err(errno),
    }
    // With another user for filesystems (CAP_SETUID) a thread keeps its capabilities.
    let bits = rustix::thread::capabilities_secure_bits()? | CapabilitiesSecureBits::NO_SETUID_FIXUP;
    if let Err(errno) = rustix::thread::set_capabilities_secure_bits(bits) {
        warn!(%errno, "users can take room of a disk that it keeps for root, as CAP_SETPCAP is not held");
    }
    let kept = held & kept();
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets)
}

/// Two filters; of two answers the kernel takes the stricter one. Calls that only an intruder makes end the process, and the kernel's
/// log says which it was. The others that are not listed fail as on a kernel that does not have them: libraries are ready for that,
/// so that a new version of one costs no pool its service.
fn refuse_calls(paths: Paths) -> anyhow::Result<()> {
    let architecture = std::env::consts::ARCH.try_into()?;
    let fatal = SeccompFilter::new(calls::fatal(), SeccompAction::Allow, SeccompAction::KillProcess, architecture)?;
    let unknown = SeccompAction::Errno(Errno::NOSYS.raw_os_error().unsigned_abs());
    let allowed = SeccompFilter::new(calls::allowed(paths)?, unknown, SeccompAction::Allow, architecture)?;
    for filter in [fatal, allowed] {
        let program: seccompiler::BpfProgram = filter.try_into()?;
        apply_filter(&program).context("refusing system calls (is CONFIG_SECCOMP_FILTER in the kernel?)")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_has_a_reason_and_what_is_not_used_goes() {
        assert!(
            CAPABILITIES.iter().all(|(capability, reason)| capability.bits().count_ones() == 1 && !reason.is_empty())
        );
        for gone in [CapabilitySet::SYS_RESOURCE, CapabilitySet::SYS_MODULE, CapabilitySet::SYS_CHROOT] {
            assert!(!kept().intersects(gone), "{gone:?}");
        }
        assert_eq!(kept().iter().count(), CAPABILITIES.len());
    }

    #[test]
    fn the_lists_make_programs_the_kernel_takes() {
        let fatal = calls::fatal();
        let all =
            [Paths::OfHost, Paths::OfNetwork, Paths::Own].map(|paths| calls::allowed(paths).expect("valid rules"));
        assert!(
            all.iter().all(|allowed| fatal.keys().all(|call| !allowed.contains_key(call))),
            "a call is in one list"
        );
        let mounting = all.each_ref().map(|allowed| allowed.contains_key(&libc::SYS_mount));
        assert_eq!(mounting, [true, false, false]);
    }
}
