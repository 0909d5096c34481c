//! The saved state of a container: `containers/NAME/container.json`, beside its upper branch, its bundle and its log.

use crate::context::Context;
use crate::record::{PoolRecord, ProcessRecord};
use poolfs_image::{Digest, layer_in};
use poolfs_service_protocol::{CephAccess, IdMap, Storage, Timeout, Transport};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// How far a container has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContainerState {
    /// Its root is being mounted.
    Created,
    /// It was started.
    Running,
    /// It has ended, but what it wrote could not be put on the disk: its root stays mounted.
    Unwritten,
    /// It has ended, and its root is unmounted.
    Ended,
}

/// How a container is, by its record and by what of it is alive; its name is what `ps --json` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// Its root is being mounted.
    Starting,
    /// It runs.
    Running,
    /// It runs, and its root answers with errors for good: the service that it was started with has ended.
    Dead,
    /// Nobody watches over it any more.
    Lost,
    /// See [`ContainerState::Unwritten`].
    Unwritten,
    /// It has ended.
    Ended,
}

/// A container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContainerRecord {
    /// The version of this form.
    pub version: u32,
    /// Its name.
    pub name: String,
    /// Its pool.
    pub pool: String,
    /// The image it was made of.
    pub image: String,
    /// The image's layers, the lowest first: they stay while the container does.
    pub layers: Vec<Digest>,
    /// The store at a cluster that has them; none where they are in the state directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers_at: Option<PathBuf>,
    /// What it runs.
    pub command: Vec<String>,
    /// Most memory, bytes.
    pub memory_bytes: Option<u64>,
    /// Without the library.
    #[serde(rename = "fuse", alias = "legacy")]
    pub legacy: bool,
    /// The upper branch that was asked for: it is not the container's, and stays when that goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<PathBuf>,
    /// How the cluster is reached that has it, or the layers, if one has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph: Option<Box<CephAccess>>,
    /// How it stores what it writes.
    #[serde(default)]
    pub storage: Storage,
    /// The ids of the host in its user namespace, when it has one.
    #[serde(default, with = "poolfs_service_protocol::ids", skip_serializing_if = "Option::is_none")]
    pub userns: Option<IdMap>,
    /// How the kernel's requests are to come, when that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Whether all writes of the library wait for their answers.
    #[serde(default)]
    pub wait_for_writes: bool,
    /// How long a request to its root may take before it fails.
    #[serde(default)]
    pub timeout: Option<Timeout>,
    /// With a terminal.
    pub tty: bool,
    /// Its standard input stays open.
    pub interactive: bool,
    /// Removed when it ends.
    pub remove_at_end: bool,
    /// The instance its root is.
    pub instance: Option<String>,
    /// When it was made, seconds since 1970.
    pub created_seconds: u64,
    /// The process that watches over it.
    pub monitor: Option<ProcessRecord>,
    /// How far it has come.
    pub state: ContainerState,
    /// Its exit status, when it has ended.
    pub exit_code: Option<u8>,
}

impl ContainerRecord {
    /// Whether somebody watches over it.
    pub fn is_watched(&self, context: &Context) -> bool {
        self.monitor.as_ref().is_some_and(|monitor| monitor.is_alive(&*context.host))
    }

    /// How it is now.
    pub fn condition(&self, context: &Context) -> Condition {
        match self.state {
            ContainerState::Ended => Condition::Ended,
            ContainerState::Unwritten => Condition::Unwritten,
            _ if !self.is_watched(context) => Condition::Lost,
            ContainerState::Created => Condition::Starting,
            ContainerState::Running if !self.has_root(context) => Condition::Dead,
            ContainerState::Running => Condition::Running,
        }
    }

    /// The same in a few words.
    pub fn described(&self, condition: Condition) -> String {
        let status = self.exit_code.map_or_else(String::new, |status| format!(" ({status})"));
        match condition {
            Condition::Ended => format!("ended{status}"),
            Condition::Unwritten => format!("ended{status}, not written"),
            Condition::Lost => "lost".to_owned(),
            Condition::Starting => "starting".to_owned(),
            Condition::Dead => "dead (its service has ended)".to_owned(),
            Condition::Running => "running".to_owned(),
        }
    }

    /// Whether its pool's service, which it was started with, is alive: else its root answers with errors, for good.
    fn has_root(&self, context: &Context) -> bool {
        let pool = context.pools().and_then(|pools| pools.peek::<PoolRecord>(&self.pool)).ok().flatten();
        let is_its = |pool: &PoolRecord| {
            let roots = pool.instances.iter().map(|known| &known.spec.instance);
            pool.service_alive(&*context.host) == Some(true)
                && roots.into_iter().any(|root| Some(root) == self.instance.as_ref())
        };
        pool.as_ref().is_some_and(is_its)
    }

    /// The host's id of its root, when that is another.
    pub fn host_root(&self) -> Option<u32> {
        self.userns.as_ref().and_then(|map| map.host(0))
    }

    /// The lower branches of its root, topmost first. A layer that an image has twice is there once, at its topmost place:
    /// it hides all that it has further down.
    pub fn lowers(&self, images: &poolfs_image::ImageStore) -> Vec<PathBuf> {
        let mut seen = BTreeSet::new();
        let topmost = self.layers.iter().rev().filter(|digest| seen.insert(*digest));
        let path = |digest| match &self.layers_at {
            Some(store) => layer_in(store, digest),
            None => images.layer_path(digest),
        };
        topmost.map(path).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_that_an_image_has_twice_is_one_branch() {
        let place = tempfile::tempdir().expect("a directory");
        let images = poolfs_image::ImageStore::open(place.path()).expect("opened");
        let [empty, other] = [&b"empty"[..], b"other"].map(Digest::of);
        let record = ContainerRecord {
            version: 1,
            name: "c".into(),
            pool: "p".into(),
            image: "i".into(),
            layers: vec![empty.clone(), other.clone(), empty.clone()],
            layers_at: None,
            command: Vec::new(),
            memory_bytes: None,
            legacy: false,
            upper: None,
            ceph: None,
            storage: Storage::default(),
            userns: None,
            transport: None,
            wait_for_writes: false,
            timeout: None,
            tty: false,
            interactive: false,
            remove_at_end: false,
            instance: None,
            created_seconds: 0,
            monitor: None,
            state: ContainerState::Created,
            exit_code: None,
        };
        assert_eq!(record.lowers(&images), [images.layer_path(&empty), images.layer_path(&other)]);
        let at_cluster = ContainerRecord { layers_at: Some("ceph:/images".into()), ..record };
        let expected = [&empty, &other].map(|digest| PathBuf::from(format!("ceph:/images/layers/{}", digest.hex())));
        assert_eq!(at_cluster.lowers(&images), expected);
    }

    #[test]
    fn every_image_that_can_be_imported_can_be_mounted() {
        assert!(poolfs_image::Limits::default().layers <= poolfs_service_protocol::LOWERS_MAX);
    }
}
