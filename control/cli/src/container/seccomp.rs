//! The default seccomp filter of containers: a list of refused system calls.
//!
//! It is modelled on Docker's profile, but lists what is refused rather than what is allowed: kernel modules, other kernels, clocks, swap,
//! raw I/O, tracing of the kernel, keys, handles that escape a mount, new user namespaces, and io_uring, whose work neither this filter nor
//! the preloaded library would see. Most of it also needs capabilities that containers do not get; the filter holds when one of those
//! checks has a hole.

use serde_json::{Value, json};

/// Refused with EPERM.
const REFUSED: &[&str] = &[
    "_sysctl",
    "acct",
    "add_key",
    "afs_syscall",
    "bpf",
    "clock_adjtime",
    "clock_settime",
    "create_module",
    "delete_module",
    "fanotify_init",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "get_kernel_syms",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioperm",
    "iopl",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "mount",
    "mount_setattr",
    "move_mount",
    "nfsservctl",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "pivot_root",
    "query_module",
    "quotactl",
    "quotactl_fd",
    "reboot",
    "request_key",
    "setns",
    "settimeofday",
    "stime",
    "swapoff",
    "swapon",
    "sysfs",
    "umount",
    "umount2",
    "unshare",
    "uselib",
    "userfaultfd",
    "ustat",
    "vhangup",
    "vm86",
    "vm86old",
];
/// The bits of clone's first argument that make namespaces: cgroup, mount (NEWNS), UTS, IPC, user, PID, network.
const NAMESPACE_FLAGS: [u64; 7] =
    [0x0200_0000, 0x0002_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000];
const ENOSYS: u32 = 38;
const EPERM: u32 = 1;

/// The profile as an OCI runtime wants it.
pub fn profile() -> Value {
    let mut rules = vec![
        json!({"names": REFUSED, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM}),
        // Its flags lie in memory, where a filter cannot look; programs fall back to clone.
        json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}),
    ];
    rules.extend(NAMESPACE_FLAGS.iter().map(|flag| {
        let condition = json!({"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"});
        json!({"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM, "args": [condition]})
    }));
    json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_uring_and_new_namespaces_are_refused() {
        let text = profile().to_string();
        for call in ["io_uring_setup", "io_uring_enter", "unshare", "setns", "mount", "clone3"] {
            assert!(text.contains(&format!("\"{call}\"")), "{call}");
        }
        let all = NAMESPACE_FLAGS.iter().fold(0, |bits, flag| bits | flag);
        assert_eq!(all, 0x7e02_0000, "the mask of Docker's own profile");
        assert!(REFUSED.is_sorted());
    }
}
