//! Images made from others: the layers of a base image, and one more.

use crate::layers::{LayerBlob, LayerRecord, Temporary};
use crate::record::{ImageConfig, ImageRecord, check_name};
use crate::store::{ImageStore, StoreLock};
use crate::{Digest, ImageError, Limits, Progress, Result};
use std::fs::File;
use std::path::{Path, PathBuf};

/// An image that is being made. Until it is finished nobody else changes the store; dropped, nothing of it stays.
pub struct Staged<'s> {
    store: &'s ImageStore,
    name: String,
    place: Temporary,
    _lock: StoreLock,
}

/// What an image that is being made stands on.
#[derive(Clone, Debug, Default)]
pub struct Base {
    /// Its layers, the lowest first.
    pub layers: Vec<LayerRecord>,
    /// How its programs are started.
    pub config: ImageConfig,
}

impl ImageStore {
    /// Begin an image of this name.
    pub fn stage(&self, name: &str) -> Result<Staged<'_>> {
        check_name(name)?;
        let lock = self.lock(true)?;
        if self.has(name) {
            return Err(ImageError::Exists(name.to_owned()));
        }
        self.sweep()?;
        Ok(Staged { store: self, name: name.to_owned(), place: self.scratch()?, _lock: lock })
    }

    /// The layers with these directories (the lowest first), and the configuration of the image that has just these; nothing when one of them is no layer of
    /// this store.
    pub fn base(&self, directories: &[PathBuf]) -> Result<Option<Base>> {
        let images = self.list()?;
        let mut layers = Vec::new();
        for directory in directories {
            let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Ok(digest) = Digest::parse(&format!("sha256:{name}")) else { return Ok(None) };
            let own = self.layer_path(&digest);
            if own.canonicalize().ok() != directory.canonicalize().ok() || !own.is_dir() {
                return Ok(None);
            }
            let mut known = images.iter().flat_map(|image| &image.layers).filter(|layer| layer.digest == digest);
            let layer = known.next().cloned().map_or_else(|| measured(&own, digest), Ok)?;
            layers.push(layer);
        }
        let image = images.into_iter().find(|image| image.layers == layers);
        Ok(Some(Base { layers, config: image.map(|image| image.config).unwrap_or_default() }))
    }
}

impl Staged<'_> {
    /// Where the archive of its topmost layer is to be put: a file that is not there yet.
    #[must_use]
    pub fn archive(&self) -> PathBuf {
        self.place.path().join("layer.tar")
    }

    /// Make the image of `base` and of what the archive holds; `source` says where that is from.
    pub fn finish(self, base: Base, source: &str, limits: &Limits, progress: &mut dyn Progress) -> Result<ImageRecord> {
        let archive = self.archive();
        let file = File::open(&archive).map_err(|error| ImageError::io("open", &archive, error))?;
        let blob = LayerBlob { name: self.name.clone(), file, blob_digest: None, blob_bytes: None, expected: None };
        let added = self.store.layers().add(blob, limits, progress);
        let (layer, is_new) = added.map_err(|error| crate::store::given_up(error, progress))?;
        let digest = layer.digest.clone();
        let Base { mut layers, config } = base;
        layers.push(layer);
        let made = self.store.record(&self.name, source, layers, config);
        if made.is_err() && is_new {
            // The first error is the one to report; a layer left over is found again by the next removal of an image.
            let _ = self.store.layers().remove(&digest);
        }
        made
    }
}

/// The record of a layer whose image is gone, which is there because a container uses it.
fn measured(directory: &Path, digest: Digest) -> Result<LayerRecord> {
    let mut record = LayerRecord { digest, bytes: 0, members: 0 };
    let mut pending = vec![directory.to_path_buf()];
    while let Some(next) = pending.pop() {
        let failed = |error| ImageError::io("list", &next, error);
        for entry in std::fs::read_dir(&next).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let metadata = entry.metadata().map_err(failed)?;
            record.members += 1;
            if metadata.is_dir() {
                pending.push(entry.path());
            } else if metadata.is_file() {
                record.bytes += metadata.len();
            }
        }
    }
    Ok(record)
}
