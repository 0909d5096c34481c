//! The one permission function: may these credentials do this to that object?
//!
//! It decides as Linux does for a filesystem mounted in the initial user namespace. FUSE requests are not checked here: the
//! kernel decides those (`default_permissions`), and a test compares the two.
//!
//! What belongs to the host's policy and not to the filesystem stays outside: LSMs, Landlock, seccomp, immutable flags. Of the
//! `protected_*` sysctls, the one for hard links is asked. What the one for symbolic links may forbid is left to the kernel.
//! Those for files and pipes are about opening, which the kernel does.

mod acl;
mod credentials;
mod rules;

pub use acl::{Acl, AclEntry, AclTag};
pub use credentials::{Capability, Credentials};
pub use rules::{
    EXECUTE, READ, WRITE, XattrUse, host_protects_hard_links, is_harmless_link_source, is_sticky, may_access, may_own,
    strips_set_group_id, without_set_id, xattr_rule,
};
