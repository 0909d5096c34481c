//! The saved state of an image: `images/NAME.json`.

use crate::layers::{LAYERS_NAME, LayerRecord};
use crate::{Digest, ImageError, Result};
use oci_spec::image::ImageConfiguration;
use poolfs_service_protocol::CephAccess;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The version of the record's form.
pub(crate) const RECORD_VERSION: u32 = 1;
/// Longest name of an image.
const NAME_BYTES_MAX: usize = 128;

/// How an image's programs are to be started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageConfig {
    /// The environment, `NAME=VALUE`.
    pub env: Vec<String>,
    /// What always runs.
    pub entrypoint: Vec<String>,
    /// Its default arguments, or the default command.
    pub cmd: Vec<String>,
    /// The working directory; empty means `/`.
    pub working_directory: String,
    /// `USER`, `UID`, `USER:GROUP` or `UID:GID`; empty means root.
    pub user: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The signal that asks it to end.
    pub stop_signal: Option<String>,
}

impl ImageConfig {
    pub(crate) fn from_oci(configuration: &ImageConfiguration) -> ImageConfig {
        let Some(config) = configuration.config() else { return ImageConfig::default() };
        ImageConfig {
            env: config.env().clone().unwrap_or_default(),
            entrypoint: config.entrypoint().clone().unwrap_or_default(),
            cmd: config.cmd().clone().unwrap_or_default(),
            working_directory: config.working_dir().clone().unwrap_or_default(),
            user: config.user().clone().unwrap_or_default(),
            labels: config.labels().clone().unwrap_or_default().into_iter().collect(),
            stop_signal: config.stop_signal().clone(),
        }
    }
}

/// An image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// The version of this record's form.
    pub version: u32,
    /// Its name.
    pub name: String,
    /// Where it was imported from.
    pub source: String,
    /// When, in seconds since 1970.
    pub imported_seconds: u64,
    /// Its layers, the lowest first.
    pub layers: Vec<LayerRecord>,
    /// How its programs are started.
    pub config: ImageConfig,
    /// The store at a cluster that has its layers; none where they are in the state directory. A record in that store itself does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<ClusterStore>,
}

/// A store of images in a directory of a CephFS, which has the form of a state directory's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterStore {
    /// The directory, as unions name it: `ceph:/PATH`.
    pub directory: PathBuf,
    /// How its cluster is reached.
    pub access: CephAccess,
}

/// The store that these directories are layers of, and no other ones, by their paths alone.
#[must_use]
pub fn store_of(layers: &[PathBuf]) -> Option<&Path> {
    let store = |layer: &'_ PathBuf| -> Option<PathBuf> {
        let above = layer.parent()?;
        let is_layer = Digest::parse(&format!("sha256:{}", layer.file_name()?.to_str()?)).is_ok();
        (is_layer && above.file_name()? == LAYERS_NAME).then(|| above.parent().map(Path::to_path_buf))?
    };
    let first = store(layers.first()?)?;
    let is_one = layers.iter().all(|layer| store(layer).as_ref() == Some(&first));
    layers.first()?.parent()?.parent().filter(|_| is_one)
}

/// The directory of a layer in the store at `directory`.
#[must_use]
pub fn layer_in(directory: &Path, digest: &Digest) -> PathBuf {
    directory.join(LAYERS_NAME).join(digest.hex())
}

impl ImageRecord {
    /// Bytes of all its layers' files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes).sum()
    }
}

/// Whether `name` may name an image; it is then safe as a file name.
pub fn check_name(name: &str) -> Result<()> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':');
    let good = name.len() <= NAME_BYTES_MAX
        && name.bytes().all(allowed)
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if good { Ok(()) } else { Err(ImageError::BadName(name.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_one_store_are_known_by_their_paths() {
        let [one, two] = [&b"1"[..], b"2"].map(Digest::of);
        let layer = |store: &str, digest: &Digest| layer_in(Path::new(store), digest);
        let of = |layers: &[PathBuf]| store_of(layers).map(|store| store.to_str().expect("text").to_owned());
        assert_eq!(of(&[layer("ceph:/a", &one), layer("ceph:/a", &two)]).as_deref(), Some("ceph:/a"));
        for other in [layer("ceph:/b", &two), layer("/a", &two), "ceph:/a/layers/x".into(), "ceph:/a".into()] {
            assert_eq!(of(&[layer("ceph:/a", &one), other.clone()]), None, "{}", other.display());
        }
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn names_are_safe_file_names() {
        for good in ["debian:12", "a", "my-app_1.2"] {
            check_name(good).expect(good);
        }
        for bad in ["", ".x", "a/b", "..", "ä", &"x".repeat(129)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
