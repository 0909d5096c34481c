//! The image store: the images of one state directory.

use crate::layers::{LAYERS_NAME, LayerBlob, LayerRecord, LayerStore, Temporary};
use crate::record::{ClusterStore, ImageConfig, ImageRecord, RECORD_VERSION, check_name};
use crate::source::{BlobDirectory, Described, Source};
use crate::unpack::{self, Purpose};
use crate::{Digest, ImageError, Limits, Progress, Result, directory};
use rustix::fs::FlockOperation;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// What the directory of records is called in a store.
pub const IMAGES_NAME: &str = "images";
/// What a record begins with while it is written; no image has such a name.
pub(crate) const RECORD_PREFIX: &str = ".tmp-";
/// Most bytes of an image's record.
const RECORD_BYTES_MAX: u64 = 16 << 20;

/// The images of one state directory.
#[derive(Clone)]
pub struct ImageStore {
    images: PathBuf,
    layers: LayerStore,
    take_lock: TakeLock,
    scratch: Option<PathBuf>,
}

/// Takes a lock (`flock`) on an open file, exclusive or shared, and waits for it as whoever uses the store wants to.
pub type TakeLock = Arc<dyn Fn(&Path, File, FlockOperation) -> std::io::Result<File> + Send + Sync>;

fn wait_for_lock(_path: &Path, file: File, operation: FlockOperation) -> std::io::Result<File> {
    rustix::fs::flock(&file, operation)?;
    Ok(file)
}

/// The right to change the store, or (shared) to rely on it not being changed; ends when dropped.
#[derive(Debug)]
pub struct StoreLock(#[expect(dead_code, reason = "the open file is the lock")] File);

/// What went away with an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Layers nobody else used.
    pub layers: u64,
}

impl ImageStore {
    /// Open the store of a state directory, making it when it is not there.
    pub fn open(state: &Path) -> Result<ImageStore> {
        let images = state.join(IMAGES_NAME);
        std::fs::create_dir_all(&images).map_err(|source| ImageError::io("make", &images, source))?;
        Ok(ImageStore {
            images,
            layers: LayerStore::open(state.join(LAYERS_NAME))?,
            take_lock: Arc::new(wait_for_lock),
            scratch: None,
        })
    }

    /// The same store, whose lock is waited for in another way.
    #[must_use]
    pub fn locked_by(
        self,
        take_lock: impl Fn(&Path, File, FlockOperation) -> std::io::Result<File> + Send + Sync + 'static,
    ) -> ImageStore {
        ImageStore { take_lock: Arc::new(take_lock), ..self }
    }

    /// The same store, in which what was written below a directory is made durable in another way than by `syncfs`.
    #[must_use]
    pub fn made_durable_by(
        self,
        make_durable: impl Fn(&Path) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> ImageStore {
        ImageStore { layers: self.layers.made_durable_by(Arc::new(make_durable)), ..self }
    }

    /// The same store, whose archives are unpacked in another directory, for the command's time: what they are made of is not for the store.
    #[must_use]
    pub fn unpacking_in(self, scratch: PathBuf) -> ImageStore {
        ImageStore { scratch: Some(scratch), ..self }
    }

    /// Take the store's lock: while it is shared, no image and no layer goes away.
    pub fn lock(&self, exclusive: bool) -> Result<StoreLock> {
        let path = self.images.join(".lock");
        let mut options = std::fs::OpenOptions::new();
        let file = options.create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(|source| ImageError::io("open", &path, source))?;
        let operation = if exclusive { FlockOperation::LockExclusive } else { FlockOperation::LockShared };
        (self.take_lock)(&path, file, operation).map(StoreLock).map_err(|error| ImageError::io("lock", &path, error))
    }

    /// Import an image. On failure nothing of it stays.
    pub fn import(
        &self,
        name: &str,
        source: &str,
        limits: &Limits,
        progress: &mut dyn Progress,
    ) -> Result<ImageRecord> {
        check_name(name)?;
        let parsed = Source::parse(source)?;
        let _lock = self.lock(true)?;
        if self.has(name) {
            return Err(ImageError::Exists(name.to_owned()));
        }
        self.sweep()?;
        let mut added = Vec::new();
        let imported = self.import_layers(&parsed, limits, progress, &mut added);
        let imported = imported.map_err(|error| given_up(error.within(&parsed.place()), progress));
        let result = imported.and_then(|(layers, config)| self.record(name, source, layers, config));
        if result.is_err() {
            for digest in &added {
                // The first error is the one to report; a layer left over is found again by the next removal of an image.
                let _ = self.layers.remove(digest);
            }
        }
        result
    }

    /// All images, by name.
    pub fn list(&self) -> Result<Vec<ImageRecord>> {
        let listed = std::fs::read_dir(&self.images).map_err(|source| ImageError::io("list", &self.images, source))?;
        let mut names: Vec<String> = listed
            .filter_map(|entry| Some(entry.ok()?.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
            .filter(|name| check_name(name).is_ok())
            .collect();
        names.sort();
        names.iter().map(|name| self.get(name)).filter(|r| !matches!(r, Err(ImageError::Absent(_)))).collect()
    }

    /// One image.
    pub fn get(&self, name: &str) -> Result<ImageRecord> {
        check_name(name)?;
        let path = self.record_path(name);
        let mut text = String::new();
        match File::open(&path).and_then(|file| file.take(RECORD_BYTES_MAX).read_to_string(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(ImageError::Absent(name.to_owned()));
            }
            Err(source) => return Err(ImageError::io("read", &path, source)),
        }
        let record: ImageRecord =
            serde_json::from_str(&text).map_err(|error| ImageError::description(path.display().to_string(), error))?;
        if record.version != RECORD_VERSION {
            let cause = format!("version {} is not known here", record.version);
            return Err(ImageError::description(path.display().to_string(), cause));
        }
        Ok(record)
    }

    /// Remove an image and the layers that no other image has and `in_use` does not name. The lock is an exclusive one,
    /// taken before `in_use` was found out.
    pub fn remove(&self, _lock: &StoreLock, name: &str, in_use: &[Digest]) -> Result<Removed> {
        check_name(name)?;
        self.get(name)?;
        let path = self.record_path(name);
        std::fs::remove_file(&path).map_err(|source| ImageError::io("remove", &path, source))?;
        self.sweep()?;
        let mut wanted: BTreeSet<Digest> = in_use.iter().cloned().collect();
        for image in self.list()?.into_iter().filter(|image| image.at.is_none()) {
            wanted.extend(image.layers.into_iter().map(|layer| layer.digest));
        }
        let mut removed = Removed::default();
        for digest in self.layers.digests()?.iter().filter(|digest| !wanted.contains(digest)) {
            self.layers.remove(digest)?;
            removed.layers += 1;
        }
        Ok(removed)
    }

    /// The directory of a layer.
    #[must_use]
    pub fn layer_path(&self, digest: &Digest) -> PathBuf {
        self.layers.path(digest)
    }

    /// The directory that it is in.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.images.parent().unwrap_or(&self.images)
    }

    /// The directory of records.
    pub(crate) fn images(&self) -> &Path {
        &self.images
    }

    /// A directory, which vanishes, for what layers are made of.
    pub(crate) fn scratch(&self) -> Result<Temporary> {
        self.scratch.as_deref().map_or_else(|| self.layers.temporary(), Temporary::make_in)
    }

    pub(crate) fn layers(&self) -> &LayerStore {
        &self.layers
    }

    /// Whether there is an image of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.record_path(name).exists()
    }

    /// Make an image of layers that are there, with now as its time.
    pub(crate) fn record(
        &self,
        name: &str,
        source: &str,
        layers: Vec<LayerRecord>,
        config: ImageConfig,
    ) -> Result<ImageRecord> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let record = ImageRecord {
            version: RECORD_VERSION,
            name: name.to_owned(),
            source: source.to_owned(),
            imported_seconds: since.map_or(0, |elapsed| elapsed.as_secs()),
            layers,
            config,
            at: None,
        };
        self.write(&record)?;
        Ok(record)
    }

    /// Note an image whose layers a store at a cluster has: nothing is copied.
    pub fn adopt(&self, image: ImageRecord, at: ClusterStore) -> Result<ImageRecord> {
        check_name(&image.name)?;
        let _lock = self.lock(true)?;
        if self.has(&image.name) {
            return Err(ImageError::Exists(image.name));
        }
        self.sweep()?;
        let record = ImageRecord { at: Some(at), ..image };
        self.write(&record)?;
        Ok(record)
    }

    /// Forget an image whose layers a store at a cluster has: nothing goes there. The lock is an exclusive one.
    pub fn forget(&self, _lock: &StoreLock, name: &str) -> Result<()> {
        check_name(name)?;
        let path = self.record_path(name);
        std::fs::remove_file(&path).map_err(|source| ImageError::io("remove", &path, source))
    }

    /// Take away what killed commands left.
    pub(crate) fn sweep(&self) -> Result<()> {
        let listed = std::fs::read_dir(&self.images).map_err(|source| ImageError::io("list", &self.images, source))?;
        for entry in listed.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(RECORD_PREFIX)) {
            let path = entry.path();
            std::fs::remove_file(&path).map_err(|source| ImageError::io("remove", &path, source))?;
        }
        self.layers.sweep()
    }

    fn record_path(&self, name: &str) -> PathBuf {
        self.images.join(format!("{name}.json"))
    }

    fn write(&self, record: &ImageRecord) -> Result<()> {
        let path = self.record_path(&record.name);
        let failed = |source: std::io::Error| ImageError::io("write", &path, source);
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
        let file = tempfile::Builder::new().prefix(RECORD_PREFIX).tempfile_in(&self.images);
        let mut file = file.map_err(failed)?;
        std::io::Write::write_all(&mut file, &text).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        File::open(&self.images).and_then(|directory| directory.sync_all()).map_err(failed)
    }

    fn import_layers(
        &self,
        source: &Source,
        limits: &Limits,
        progress: &mut dyn Progress,
        added: &mut Vec<Digest>,
    ) -> Result<(Vec<LayerRecord>, ImageConfig)> {
        // Outlives the descriptors of the blobs in it.
        let unpacked = self.scratch()?;
        let described = match source {
            Source::Directory(path) => {
                let unpacked = self.layers.temporary()?;
                let tree_path = unpacked.path().join("tree");
                std::fs::create_dir(&tree_path).map_err(|error| ImageError::io("make", &tree_path, error))?;
                let (done, digest) = directory::copy_tree(path, &tree_path, limits, progress)?;
                let (record, is_new) = self.layers.keep(&tree_path, digest, done)?;
                added.extend(is_new.then(|| record.digest.clone()));
                return Ok((vec![record], ImageConfig::default()));
            }
            Source::Tar(path) => {
                let name = path.display().to_string();
                let blob = LayerBlob { name, file: open(path)?, blob_digest: None, blob_bytes: None, expected: None };
                Described { config: ImageConfig::default(), layers: vec![blob] }
            }
            Source::Oci(path, tag) => BlobDirectory::open(path, limits)?.oci(tag.as_deref())?,
            Source::OciArchive(path) => {
                unpack_plain(path, unpacked.path(), limits)?;
                BlobDirectory::open(unpacked.path(), limits)?.oci(None)?
            }
            Source::DockerArchive(path) => {
                unpack_plain(path, unpacked.path(), limits)?;
                BlobDirectory::open(unpacked.path(), limits)?.docker()?
            }
        };
        let mut records: Vec<LayerRecord> = Vec::new();
        for blob in described.layers {
            let record = match self.known(blob.expected.as_ref())? {
                Some(record) => record,
                None => {
                    let (record, is_new) = self.layers.add(blob, limits, progress)?;
                    added.extend(is_new.then(|| record.digest.clone()));
                    record
                }
            };
            records.push(record);
        }
        Ok((records, described.config))
    }

    /// What another image says of a layer that is there already.
    fn known(&self, digest: Option<&Digest>) -> Result<Option<LayerRecord>> {
        let Some(digest) = digest.filter(|digest| self.layers.contains(digest)) else { return Ok(None) };
        let mut known = self.list()?.into_iter().flat_map(|image| image.layers);
        Ok(known.find(|layer| layer.digest == *digest))
    }
}

fn open(path: &Path) -> Result<File> {
    let file = File::open(path).map_err(|source| ImageError::io("open", path, source))?;
    if file.metadata().is_ok_and(|found| found.is_dir()) {
        return Err(ImageError::OtherKind("it is a directory, and no archive"));
    }
    Ok(file)
}

/// Unpack an archive of documents and blobs.
fn unpack_plain(path: &Path, to: &Path, limits: &Limits) -> Result<()> {
    let reader = crate::decompress::Decompressor::new(open(path)?);
    let reader = reader.map_err(|source| ImageError::Archive(source.to_string()))?;
    unpack::unpack(reader, to, Purpose::Source, limits).map(|_| ())
}

/// What failed; but who had it given up has broken it off, and reading that ends there fails as a cut archive does.
pub(crate) fn given_up(error: ImageError, progress: &mut dyn Progress) -> ImageError {
    if progress.is_cancelled() { ImageError::Interrupted } else { error }
}
