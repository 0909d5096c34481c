//! The Ceph backend client: a directory tree of a CephFS as a layer, by the low-level interface of libcephfs.
//!
//! Begin reading with [`Source`] (which tree of which cluster) and [`Ceph`] (the layer over it).
//!
//! # The library
//!
//! libcephfs is loaded when the first tree is mounted, and its functions are found by their names: neither a build nor a machine without Ceph
//! needs it. What is called exists from Ceph 16.2 on.
//!
//! # One mount for each tree
//!
//! Each [`Ceph`] has a libcephfs mount of its own, with a session at the metadata server. Names and content of a tree never go by two mounts: a file
//! created by one and written by another costs ten times as much. Calls are synchronous: they return when the cluster has answered,
//! and what is stopped there stops the caller. Whoever needs a limit for that puts a filter above that has one.
//!
//! libcephfs checks no permissions here, since the service has done that. What the calls make belongs to whom they say.
//!
//! A mount has a session at the metadata server, which that keeps for a minute after its client has died, with all that the client had. So a mount can
//! name its holder ([`Source::holder`]): what an earlier client of this name has left is taken from it before anything else is done. A [`Claim`]
//! keeps other clients from a tree, wherever they are.
//!
//! # Nodes
//!
//! A node is an inode of libcephfs, which is one object for each inode number and snapshot for as long as somebody holds it. Names and attributes
//! are libcephfs's to keep, by the capabilities that its session has. Snapshots (`.snap` in every directory) can be read, and
//! not changed: nobody makes or removes one by a name there.
//!
//! # What CephFS lacks
//!
//! Files without a name, `EXCHANGE` and `WHITEOUT` of a rename, holes that `seek` would find, and room that is reserved (`fallocate` without a
//! mode). `NO_REPLACE` holds against others who use this layer, and not against other clients of the cluster. An append goes to
//! the end that is there, against others who use this layer with [`Source::is_shared`]; among others to the end that it has seen.

#![deny(unsafe_code)]

mod attributes;
mod claim;
#[allow(unsafe_code)]
mod client;
mod content;
mod error;
#[allow(unsafe_code)]
mod functions;
mod handles;
mod layer;
mod names;
mod nodes;
mod seen;
mod settings;
mod source;
mod xattrs;

pub use claim::{Claim, ClaimKind};
pub use client::library_version;
pub use error::{MountError, has_lost_session};
pub use layer::Ceph;
pub use source::{KEPT_BYTES, Source};
