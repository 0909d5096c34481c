//! [`Source`]: which directory of which Ceph filesystem, and as whom.

use std::path::PathBuf;

/// A directory of a CephFS, and how it is reached. What is left out is what Ceph's own programs take then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The directory, from the root of the filesystem.
    pub path: PathBuf,
    /// The file that says where the cluster is: Ceph's `ceph.conf`.
    pub configuration: Option<PathBuf>,
    /// The user, without `client.`.
    pub user: Option<String>,
    /// The file with the user's key.
    pub keyring: Option<PathBuf>,
    /// The filesystem's name, where the cluster has several.
    pub filesystem: Option<String>,
    /// Who mounts it, by a name that nobody else alive has, on any host: the session of an earlier client of this name and user is ended first, if there
    /// is one, and what that client does from there on fails.
    pub holder: Option<String>,
    /// Refuse every change with `EROFS`.
    pub read_only: bool,
    /// Others change the tree meanwhile, by this layer. Nothing above it keeps content then: libcephfs does, in step with the other clients, in up to
    /// [`KEPT_BYTES`] of memory. Appends go to the end that is there, and changes of names and attributes are stored before they are answered.
    pub is_shared: bool,
}

/// Most content that libcephfs keeps of one mount.
pub const KEPT_BYTES: u64 = 16 << 20;
