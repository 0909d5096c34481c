//! How libcephfs is set up.

use crate::source::KEPT_BYTES;

/// How libcephfs is set up. Failed answers of the cluster end in an error and never in the process.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    // The service has checked: one of the two is for each version's way to say that.
    ("fuse_default_permissions", "true"),
    ("client_permissions", "false"),
    ("client_acl_type", "posix_acl"),
    // A directory's size counts its names, and not all bytes below it.
    ("client_dirsize_rbytes", "false"),
    ("client_die_on_failed_dentry_invalidate", "false"),
    ("client_die_on_failed_remount", "false"),
    // No name is kept in memory for longer than somebody holds what it stands for, and so no directory counts as known with all its names: after a
    // rename over one of several links of a file, libcephfs 16.2 lists the directory of another link without that for good, and finds it no more.
    ("client_cache_size", "0"),
    ("client_mount_timeout", "30"),
    // Nobody commands the process by a socket of the library.
    ("admin_socket", ""),
    // It would write where the process does.
    ("log_to_stderr", "false"),
    ("err_to_stderr", "false"),
];

/// What a mount keeps of content that it keeps, as libcephfs counts it: most of all, most that is not written yet, and when it begins to write.
pub(crate) const KEEPING: &[(&str, u64)] = &[
    ("client_oc_size", KEPT_BYTES),
    ("client_oc_max_dirty", KEPT_BYTES / 2),
    ("client_oc_target_dirty", KEPT_BYTES / 4),
];
