//! The local-directory backend: one directory tree of the host as a layer that never leaves that tree.
//!
//! It assumes a mounted `/proc` and the right to make private mounts. Others may change the tree at the same time. Begin reading
//! with [`PrivateMount`] (the served directory) and [`Local`] (the layer over it).
//!
//! # How the tree is held
//!
//! [`PrivateMount::of`] clones the mount of the directory, that directory alone, into a *private detached mount*, which may be
//! sent to another process. Everything afterwards is relative to it. So the kernel itself enforces the boundaries:
//! - **Mount points below the directory are not entered**: the clone does not have them. What shows instead is the directory they
//!   cover. Mounts made later do not appear either (the clone's propagation is private).
//! - `..` cannot leave the clone, symbolic links are never followed in it (`MOUNT_ATTR_NOSYMFOLLOW`, and every name is resolved
//!   alone with `RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV`), device files never open (`MOUNT_ATTR_NODEV`), and
//!   access times are never updated.
//! - A directory that is moved out of the tree while a node of it is held is refused (`ESTALE`) from then on: each use of a
//!   directory first asks the kernel whether it is still below the root of the clone. A *file* that is held and moved out stays
//!   readable and writable, as an open descriptor would.
//! - A read-only [`Local`] uses a read-only clone: no code path can change anything below it.
//!
//! # Nodes
//!
//! A node is an inode, named by the filesystem's file handle; see `nodes`. Filesystems without lasting handles (FUSE, most
//! network filesystems, overlayfs) keep a descriptor per node, and answer `ENFILE` beyond a limit. If somebody else removes a
//! file behind the layer's back while no descriptor of it is open here, it is `ESTALE` afterwards.
//!
//! The number of open files is not limited by descriptors: those that can be opened again are closed when there are too many, see
//! `descriptors`.
//!
//! # Bytes
//!
//! Whole pages of files of 64 KiB and more move by `O_DIRECT`; everything else goes through the kernel's page cache with
//! `RWF_DONTCACHE` where the filesystem offers it. The kernel keeps the two coherent as long as they never share a page in one
//! request, which `transfer` ensures. The layer caches no bytes itself. Pieces that are written together go to the disk at once
//! (`rings`).
//!
//! # Lasting state
//!
//! Only the directory is lasting state. Nodes and handles live as long as the [`Local`].

#![deny(unsafe_code)]

mod attributes;
mod backing;
mod bounce;
mod budget;
mod descriptors;
mod directories;
mod error;
mod files;
mod filesystem;
mod layer;
mod listing;
mod local;
mod mount;
mod names;
mod nodes;
mod open_directory;
mod open_file;
mod ownership;
mod place;
mod renames;
#[allow(unsafe_code)]
mod rings;
#[allow(unsafe_code)]
mod sys;
mod transfer;
mod xattrs;

pub use backing::keep_own_descriptors;
pub use descriptors::Descriptors;
pub use error::OpenError;
pub use local::{Local, LocalOptions};
pub use mount::{InMemory, PrivateMount};
pub use ownership::leave_umasks;
pub use place::{DirectoryId, LastingName, Place, lasting_name};
pub use xattrs::needs_links_of_proc;
