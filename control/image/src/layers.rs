//! The store of unpacked layers: `layers/DIGEST/`, each stored once and shared by all images that have it.
//!
//! A layer appears under its name only when it is complete, verified and durable. What a killed import leaves behind begins with
//! [`TEMPORARY_PREFIX`] and is swept by the next one. Callers hold the store's lock.

use crate::decompress::Decompressor;
use crate::digest::HashingReader;
use crate::unpack::{Purpose, Unpacked, unpack};
use crate::{Digest, ImageError, Limits, Progress, Result, tree};
use poolfs_host::remove_tree;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the directory of layers is called in a store.
pub(crate) const LAYERS_NAME: &str = "layers";
/// What temporary directories begin with.
const TEMPORARY_PREFIX: &str = ".tmp-";

/// One layer of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRecord {
    /// The digest of its uncompressed archive, and the name of its directory.
    pub digest: Digest,
    /// Bytes of its files.
    pub bytes: u64,
    /// Its files, directories and links.
    pub members: u64,
}

/// Where a layer's archive comes from.
pub(crate) struct LayerBlob {
    /// For messages and progress.
    pub name: String,
    pub file: File,
    /// The digest of the blob as it is stored, when it is known.
    pub blob_digest: Option<Digest>,
    /// Its length, when it is known.
    pub blob_bytes: Option<u64>,
    /// The digest of the uncompressed archive, when it is known.
    pub expected: Option<Digest>,
}

impl LayerBlob {
    fn check_length(&self) -> Result<()> {
        let Some(expected) = self.blob_bytes else { return Ok(()) };
        let found =
            self.file.metadata().map_err(|source| ImageError::io("look at", Path::new(&self.name), source))?.len();
        if found == expected {
            return Ok(());
        }
        Err(ImageError::description(&self.name, format!("it has {found} bytes, the manifest says {expected}")))
    }
}

/// Makes durable what was written below a directory.
pub type MakeDurable = Arc<dyn Fn(&Path) -> std::io::Result<()> + Send + Sync>;

/// The directory of layers.
#[derive(Clone)]
pub(crate) struct LayerStore {
    directory: PathBuf,
    make_durable: MakeDurable,
}

impl LayerStore {
    pub(crate) fn open(directory: PathBuf) -> Result<LayerStore> {
        std::fs::create_dir_all(&directory).map_err(|source| ImageError::io("make", &directory, source))?;
        Ok(LayerStore { directory, make_durable: Arc::new(tree::make_durable) })
    }

    pub(crate) fn made_durable_by(self, make_durable: MakeDurable) -> LayerStore {
        LayerStore { make_durable, ..self }
    }

    pub(crate) fn path(&self, digest: &Digest) -> PathBuf {
        self.directory.join(digest.hex())
    }

    pub(crate) fn contains(&self, digest: &Digest) -> bool {
        self.path(digest).is_dir()
    }

    /// Take away what killed imports left.
    pub(crate) fn sweep(&self) -> Result<()> {
        for name in self.names()? {
            if name.starts_with(TEMPORARY_PREFIX) {
                remove_tree(&self.directory.join(name))?;
            }
        }
        Ok(())
    }

    /// The layers that are there.
    pub(crate) fn digests(&self) -> Result<Vec<Digest>> {
        Ok(self.names()?.iter().filter_map(|name| Digest::parse(&format!("sha256:{name}")).ok()).collect())
    }

    pub(crate) fn remove(&self, digest: &Digest) -> Result<()> {
        let (path, dead) = (self.path(digest), self.directory.join(format!("{TEMPORARY_PREFIX}{}", digest.hex())));
        // Renamed first: a half-removed layer must never be found under its name.
        std::fs::rename(&path, &dead).map_err(|source| ImageError::io("remove", &path, source))?;
        Ok(remove_tree(&dead)?)
    }

    /// A directory that vanishes unless it is kept as a layer.
    pub(crate) fn temporary(&self) -> Result<Temporary> {
        Temporary::make_in(&self.directory)
    }

    /// Unpack a layer's archive; true when it was not there before.
    pub(crate) fn add(
        &self,
        blob: LayerBlob,
        limits: &Limits,
        progress: &mut dyn Progress,
    ) -> Result<(LayerRecord, bool)> {
        let place = self.temporary()?;
        let tree_path = place.path().join("tree");
        std::fs::create_dir(&tree_path).map_err(|source| ImageError::io("make", &tree_path, source))?;
        let name = blob.name.clone();
        blob.check_length()?;
        let (blob_digest, expected) = (blob.blob_digest.clone(), blob.expected.clone());
        let (unpacked, found_blob, found) =
            unpack_verified(blob, &tree_path, limits, progress).map_err(|error| error.within(&name))?;
        check(&name, blob_digest, found_blob)?;
        check(&name, expected, found.clone())?;
        self.keep(&tree_path, found, unpacked)
    }

    /// Give a complete tree its name.
    pub(crate) fn keep(&self, tree_path: &Path, digest: Digest, unpacked: Unpacked) -> Result<(LayerRecord, bool)> {
        let record = LayerRecord { digest, bytes: unpacked.bytes, members: unpacked.members };
        if self.contains(&record.digest) {
            return Ok((record, false));
        }
        (self.make_durable)(tree_path).map_err(|source| ImageError::io("make durable", tree_path, source))?;
        let path = self.path(&record.digest);
        std::fs::rename(tree_path, &path).map_err(|source| ImageError::io("name", &path, source))?;
        // Before a record names it.
        File::open(&self.directory)
            .and_then(|directory| directory.sync_all())
            .map_err(|source| ImageError::io("make durable", &self.directory, source))?;
        Ok((record, true))
    }

    fn names(&self) -> Result<Vec<String>> {
        let listed = std::fs::read_dir(&self.directory).map_err(|s| ImageError::io("list", &self.directory, s))?;
        Ok(listed.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect())
    }
}

/// A directory that is removed with everything in it, which may be a stranger's.
pub(crate) struct Temporary(PathBuf);

impl Temporary {
    pub(crate) fn make_in(directory: &Path) -> Result<Temporary> {
        let made = tempfile::Builder::new().prefix(TEMPORARY_PREFIX).tempdir_in(directory);
        let made = made.map_err(|source| ImageError::io("make a directory in", directory, source))?;
        Ok(Temporary(made.keep()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.0) {
            tracing::warn!(%error, "the next import tries again");
        }
    }
}

fn unpack_verified(
    blob: LayerBlob,
    tree_path: &Path,
    limits: &Limits,
    progress: &mut dyn Progress,
) -> Result<(Unpacked, Digest, Digest)> {
    let broken = |source: std::io::Error| ImageError::Archive(source.to_string());
    let length = blob.file.metadata().map_or(0, |metadata| metadata.len());
    progress.begin(&blob.name, length);
    let watched = Watched { inner: blob.file, progress: &mut *progress };
    let plain = Decompressor::new(HashingReader::new(watched)).map_err(broken)?;
    // Headers and padding count too: a bomb of empty members must end as well.
    let bounded = Bounded { inner: plain, left: limits.layer_bytes };
    let (unpacked, hashing) = unpack(HashingReader::new(bounded), tree_path, Purpose::Layer, limits)?;
    let (digest, _, bounded) = hashing.finish().map_err(broken)?;
    // What was buffered has been hashed already; the rest of the blob follows.
    let compressed = bounded.inner.into_inner().into_inner();
    let (blob_digest, _, _) = compressed.finish().map_err(broken)?;
    progress.end();
    Ok((unpacked, blob_digest, digest))
}

fn check(what: &str, expected: Option<Digest>, found: Digest) -> Result<()> {
    match expected {
        Some(expected) if expected != found => {
            Err(ImageError::Damaged { what: what.to_owned(), found: found.to_string(), expected: expected.to_string() })
        }
        _ => Ok(()),
    }
}

struct Watched<'a, R> {
    inner: R,
    progress: &'a mut dyn Progress,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.progress.advance(count as u64);
        if self.progress.is_cancelled() {
            return Err(std::io::Error::other("it was interrupted"));
        }
        Ok(count)
    }
}

struct Bounded<R> {
    inner: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| std::io::Error::other("the uncompressed archive is over its limit"))?;
        Ok(count)
    }
}
