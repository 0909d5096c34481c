//! The credentials of a client, from what the kernel tells of its process.

use crate::access::Credentials;
use poolfs_ipc::service::PeerFacts;
use poolfs_libservice::types::NO_ID;

/// As all other calls see the caller.
pub(super) fn effective_credentials(facts: &PeerFacts) -> Credentials {
    Credentials {
        uid: facts.uid,
        gid: facts.gid,
        groups: facts.groups.clone(),
        capabilities: facts.capabilities,
        user_namespace: facts.user_namespace.clone(),
    }
}

/// Somebody who owns nothing and may do nothing.
pub(super) fn least_credentials() -> Credentials {
    Credentials { uid: NO_ID, gid: NO_ID, groups: Vec::new(), capabilities: 0, user_namespace: None }
}

/// As `access(2)` sees the caller: its real ids, with all it may have as root and with nothing otherwise.
pub(super) fn real_credentials(effective: &Credentials, facts: &PeerFacts) -> Credentials {
    let root = match &facts.user_namespace {
        None => facts.real_uid == 0,
        Some((uids, _)) => uids.inside(facts.real_uid) == Some(0),
    };
    let capabilities = if root { facts.permitted } else { 0 };
    Credentials { uid: facts.real_uid, gid: facts.real_gid, capabilities, ..effective.clone() }
}
