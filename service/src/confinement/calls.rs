//! The seccomp filter: the system calls that the service may make, and those of which one ends it.

use super::Paths;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::{Eq, MaskedEq, Ne};
use seccompiler::{BackendError, SeccompCondition, SeccompRule};
use std::collections::BTreeMap;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Files of branches and of the cache, `/proc` and `/sys`.
const FILES: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_close,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_copy_file_range,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_statfs,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fadvise64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_syncfs,
    libc::SYS_sync_file_range,
    SYS_CACHESTAT,
    libc::SYS_readlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_unlinkat,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_fchownat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_utimensat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_getdents64,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_umask,
    libc::SYS_setfsuid,
    libc::SYS_getxattr,
    libc::SYS_setxattr,
    libc::SYS_listxattr,
    libc::SYS_removexattr,
    libc::SYS_fgetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_flistxattr,
    libc::SYS_fremovexattr,
    // setxattrat, getxattrat, listxattrat, removexattrat: the same number everywhere.
    463,
    464,
    465,
    466,
];

/// `cachestat`, on every architecture: the crate for C's calls does not have it yet.
const SYS_CACHESTAT: i64 = 451;

/// Mounts: the pool's filesystems, private clones of branches, the cache's memory. Of threads with the host's root only.
const MOUNTS: &[i64] = &[
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_mount_setattr,
    libc::SYS_fspick,
    libc::SYS_fsconfig,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
];

/// What Ceph's library needs besides, of threads that may use the network only.
const NETWORK: &[i64] = &[libc::SYS_pipe2, libc::SYS_recvmmsg, libc::SYS_sendmmsg];

/// Sockets of sessions and of the control side, the kernel's requests, waiting for them.
const MESSAGES: &[i64] = &[
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_eventfd2,
    libc::SYS_pidfd_open,
];

/// Memory, threads, signals, time: what the Rust runtime and the C library need for themselves. Of memory that can be executed,
/// see [`allowed`].
const RUNTIME: &[i64] = &[
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_brk,
    libc::SYS_memfd_create,
    libc::SYS_membarrier,
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // For the end of the guard, the one child.
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrusage,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getcwd,
    libc::SYS_uname,
    libc::SYS_sysinfo,
];

/// Older forms of calls above, which the C library makes where there are such.
#[cfg(target_arch = "x86_64")]
const OLDER: &[i64] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_access,
    libc::SYS_chmod,
    libc::SYS_readlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_poll,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER: &[i64] = &[libc::SYS_newfstatat];

/// What has no innocent reason in a filesystem service.
const FATAL: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_setns,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_fanotify_init,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
];

/// Every namespace that a process can be put into.
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// `FUSE_DEV_IOC_BACKING_OPEN` and `FUSE_DEV_IOC_BACKING_CLOSE`; the last is how descriptors are made not to wait.
const CONTROLS: [u64; 3] = [0x4010_e501, 0x4004_e502, libc::FIONBIO];

/// Which signal a descriptor sends, and who gets it, as `F_SETOWN` says of a process: the same numbers everywhere.
const F_SETSIG: libc::c_int = 10;
const F_SETOWN_EX: libc::c_int = 15;

/// Those that end the process.
pub(super) fn fatal() -> Rules {
    FATAL.iter().map(|&call| (call, Vec::new())).collect()
}

/// All that are allowed; where there are rules, one of them has to fit.
pub(super) fn allowed(paths: Paths) -> Result<Rules, BackendError> {
    let own = match paths {
        Paths::OfHost => MOUNTS,
        Paths::OfNetwork => NETWORK,
        Paths::Own => &[],
    };
    let whole = [FILES, MESSAGES, RUNTIME, OLDER, own].into_iter().flatten();
    let mut rules: Rules = whole.map(|&call| (call, Vec::new())).collect();
    let word = |argument, value: u64| SeccompRule::new(vec![SeccompCondition::new(argument, Dword, Eq, value)?]);
    let masked = |argument, mask: libc::c_int, value: libc::c_int| {
        let mask = MaskedEq(u64::from(mask.cast_unsigned()));
        SeccompRule::new(vec![SeccompCondition::new(argument, Dword, mask, u64::from(value.cast_unsigned()))?])
    };
    // No memory is made executable after the start; a library that is loaded is a file, and not changed where it is executable.
    let mut mapped = vec![masked(2, libc::PROT_EXEC, 0)?];
    if paths == Paths::OfNetwork {
        let code = [(2, libc::PROT_EXEC | libc::PROT_WRITE, libc::PROT_EXEC), (3, libc::MAP_ANONYMOUS, 0)];
        let code = code.map(|(argument, mask, value): (u8, libc::c_int, libc::c_int)| {
            let mask = MaskedEq(u64::from(mask.cast_unsigned()));
            SeccompCondition::new(argument, Dword, mask, u64::from(value.cast_unsigned()))
        });
        mapped.push(SeccompRule::new(code.into_iter().collect::<Result<_, _>>()?)?);
    }
    rules.insert(libc::SYS_mmap, mapped);
    rules.insert(libc::SYS_mprotect, vec![masked(2, libc::PROT_EXEC, 0)?]);
    // Threads, but no processes and no namespaces. The arguments of clone3 are in memory, where no filter sees them: it is not
    // listed, and the C library does without.
    rules.insert(libc::SYS_clone, vec![masked(0, NAMESPACES | libc::CLONE_THREAD, libc::CLONE_THREAD)?]);
    // A thread's own umask.
    rules.insert(libc::SYS_unshare, vec![word(0, libc::CLONE_FS.cast_unsigned().into())?]);
    let family = |family: libc::c_int| word(0, family.cast_unsigned().into());
    let mut sockets = vec![family(libc::AF_UNIX)?];
    if paths == Paths::OfNetwork {
        // The C library asks by netlink which addresses this host has.
        let netlink = [(0, libc::AF_NETLINK), (2, libc::NETLINK_ROUTE)]
            .map(|(argument, value)| SeccompCondition::new(argument, Dword, Eq, u64::from(value.cast_unsigned())));
        let netlink = SeccompRule::new(netlink.into_iter().collect::<Result<_, _>>()?)?;
        sockets.extend([family(libc::AF_INET)?, family(libc::AF_INET6)?, netlink]);
    }
    rules.insert(libc::SYS_socket, sockets);
    rules.insert(libc::SYS_socketpair, vec![family(libc::AF_UNIX)?]);
    let controls = CONTROLS.iter().map(|&control| word(1, control)).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_ioctl, controls);
    // Names of threads and of memory; whether capabilities stay with another user for filesystems; what rustix wants to know of the
    // machine.
    const PR_GET_AUXV: libc::c_int = 0x4155_5856;
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA, libc::PR_GET_SECUREBITS, PR_GET_AUXV];
    let names = names.iter().map(|&name| word(0, name.cast_unsigned().into())).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_prctl, names);
    // Limits are looked at and not changed.
    rules.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![SeccompCondition::new(2, Qword, Eq, 0)?])?]);
    // Nor does a descriptor send signals to others, and to this process the one that tells of a lease of a segment, which does nothing.
    let signals = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX].map(|command| u64::from(command.cast_unsigned()));
    let others = signals.into_iter().map(|command| SeccompCondition::new(1, Dword, Ne, command));
    let of_leases = [(1, F_SETSIG), (2, libc::SIGURG)]
        .map(|(argument, value)| SeccompCondition::new(argument, Dword, Eq, value.cast_unsigned().into()));
    let of_leases = of_leases.into_iter().collect::<Result<_, _>>()?;
    rules.insert(
        libc::SYS_fcntl,
        vec![SeccompRule::new(others.collect::<Result<_, _>>()?)?, SeccompRule::new(of_leases)?],
    );
    // A panic that nobody catches ends this process; of other processes' threads it is only asked whether they are there.
    rules.insert(libc::SYS_tgkill, vec![word(0, std::process::id().into())?, word(2, 0)?]);
    Ok(rules)
}
