//! Sources of images, and how an image's description and its layers' archives are found there.

use crate::layers::LayerBlob;
use crate::record::ImageConfig;
use crate::tree::{TreePath, TreeWriter, open_in_root};
use crate::{Digest, ImageError, Limits, Result};
use oci_spec::image::{Arch, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType};
use rustix::fd::{AsFd, AsRawFd};
use rustix::fs::OFlags;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The annotation by which an OCI layout names its images.
const REFERENCE_ANNOTATION: &str = "org.opencontainers.image.ref.name";
/// Deepest nesting of OCI indexes.
const INDEX_DEPTH_MAX: u32 = 4;

/// Where an image is imported from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An OCI layout: a directory, and the name of one image in it.
    Oci(PathBuf, Option<String>),
    /// An OCI layout in an archive.
    OciArchive(PathBuf),
    /// What `docker save` writes.
    DockerArchive(PathBuf),
    /// A root filesystem in an archive: one layer.
    Tar(PathBuf),
    /// A root filesystem in a directory: one layer.
    Directory(PathBuf),
}

impl Source {
    /// Understand `oci:DIR[:TAG]`, `oci-archive:FILE`, `docker-archive:FILE`, `tar:FILE`, `dir:DIR`.
    pub fn parse(text: &str) -> Result<Source> {
        let unknown = || ImageError::UnknownSource(text.to_owned());
        let (kind, place) = text.split_once(':').ok_or_else(unknown)?;
        if place.is_empty() {
            return Err(unknown());
        }
        match kind {
            "oci" => Ok(match place.rsplit_once(':') {
                Some((directory, tag)) if !tag.contains('/') => Source::Oci(directory.into(), Some(tag.to_owned())),
                _ => Source::Oci(place.into(), None),
            }),
            "oci-archive" => Ok(Source::OciArchive(place.into())),
            "docker-archive" => Ok(Source::DockerArchive(place.into())),
            "tar" => Ok(Source::Tar(place.into())),
            "dir" => Ok(Source::Directory(place.into())),
            _ => Err(unknown()),
        }
    }

    /// The file or directory, for messages.
    pub(crate) fn place(&self) -> String {
        match self {
            Source::Oci(path, _)
            | Source::OciArchive(path)
            | Source::DockerArchive(path)
            | Source::Tar(path)
            | Source::Directory(path) => path.display().to_string(),
        }
    }
}

/// An image as its source describes it.
pub(crate) struct Described {
    pub config: ImageConfig,
    /// The lowest first.
    pub layers: Vec<LayerBlob>,
}

/// A directory of documents and blobs from which nothing outside can be reached.
pub(crate) struct BlobDirectory<'a> {
    path: PathBuf,
    root: TreeWriter,
    limits: &'a Limits,
}

impl<'a> BlobDirectory<'a> {
    pub(crate) fn open(path: &Path, limits: &'a Limits) -> Result<Self> {
        Ok(BlobDirectory { path: path.to_path_buf(), root: TreeWriter::open(path)?, limits })
    }

    fn file(&self, name: &str) -> Result<File> {
        let path = TreePath::parse(name.as_bytes())?;
        let relative = PathBuf::from(String::from_utf8_lossy(path.as_bytes()).into_owned());
        let failed = |source: std::io::Error| ImageError::io("open", &self.path.join(name), source);
        let found = open_in_root(self.root.root().as_fd(), &relative, OFlags::PATH);
        let found = File::from(found.map_err(|errno| failed(errno.into()))?);
        // Opening a device or a pipe would already do something.
        if !found.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(ImageError::description(name, "it is not a file"));
        }
        File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(failed)
    }

    /// That what every source of its kind has is there.
    fn refuse_without(&self, name: &str, cause: &'static str) -> Result<()> {
        match self.file(name) {
            Err(ImageError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Err(ImageError::OtherKind(cause))
            }
            found => found.map(drop),
        }
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let limit = self.limits.document_bytes;
        let read = self.file(name)?.take(limit + 1).read_to_end(&mut bytes);
        read.map_err(|source| ImageError::io("read", &self.path.join(name), source))?;
        if bytes.len() as u64 > limit {
            return Err(ImageError::TooLarge { what: "a JSON document of an image", limit });
        }
        Ok(bytes)
    }

    fn document<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        serde_json::from_slice(&self.bytes(name)?).map_err(|error| ImageError::description(name, error))
    }

    /// A document that the descriptor names by its digest.
    fn described_document<T: DeserializeOwned>(&self, descriptor: &Descriptor) -> Result<T> {
        let (name, expected) = blob_name(descriptor)?;
        let bytes = self.bytes(&name)?;
        if bytes.len() as u64 != descriptor.size() {
            let cause = format!("it has {} bytes, its descriptor says {}", bytes.len(), descriptor.size());
            return Err(ImageError::description(name, cause));
        }
        let found = Digest::of(&bytes);
        if found != expected {
            let (found, expected) = (found.to_string(), expected.to_string());
            return Err(ImageError::Damaged { what: name, found, expected });
        }
        serde_json::from_slice(&bytes).map_err(|error| ImageError::description(name, error))
    }

    /// The image named `tag` of an OCI layout, or the only one.
    pub(crate) fn oci(&self, tag: Option<&str>) -> Result<Described> {
        self.refuse_without("index.json", "it is no OCI layout: it has no index.json")?;
        let index: ImageIndex = self.document("index.json")?;
        let name_of = |d: &Descriptor| d.annotations().as_ref().and_then(|a| a.get(REFERENCE_ANNOTATION)).cloned();
        let chosen: Vec<&Descriptor> =
            index.manifests().iter().filter(|d| tag.is_none() || name_of(d).as_deref() == tag).collect();
        let names = || index.manifests().iter().filter_map(name_of).collect::<Vec<_>>().join(", ");
        match chosen.as_slice() {
            [descriptor] => self.manifest(descriptor, INDEX_DEPTH_MAX),
            [] => {
                let cause = format!("it has no image {}", tag.unwrap_or_default());
                Err(ImageError::NotChosen { cause, names: names() })
            }
            _ => Err(ImageError::NotChosen { cause: "it has several images".to_owned(), names: names() }),
        }
    }

    fn manifest(&self, descriptor: &Descriptor, depth_left: u32) -> Result<Described> {
        let is_index = *descriptor.media_type() == MediaType::ImageIndex
            || descriptor.media_type().to_string() == "application/vnd.docker.distribution.manifest.list.v2+json";
        if is_index {
            let index: ImageIndex = self.described_document(descriptor)?;
            let fits = |d: &&Descriptor| {
                d.platform().as_ref().is_none_or(|p| *p.architecture() == Arch::Amd64 && p.os().to_string() == "linux")
            };
            let chosen = index.manifests().iter().find(fits).filter(|_| depth_left > 0);
            let chosen = chosen.ok_or_else(|| ImageError::description("index", "no image for linux/amd64"))?;
            return self.manifest(chosen, depth_left - 1);
        }
        let manifest: ImageManifest = self.described_document(descriptor)?;
        let configuration: ImageConfiguration = self.described_document(manifest.config())?;
        let mut layers = Vec::new();
        for layer in manifest.layers() {
            let (name, digest) = blob_name(layer)?;
            layers.push((name, Some((digest, layer.size()))));
        }
        self.layers(&configuration, layers)
    }

    /// The first image of a `docker save` archive.
    pub(crate) fn docker(&self) -> Result<Described> {
        self.refuse_without("manifest.json", "it is no archive of `docker save`: it has no manifest.json")?;
        let images: Vec<DockerImage> = self.document("manifest.json")?;
        let [image] = images.as_slice() else {
            return Err(ImageError::description("manifest.json", format!("{} images, one is expected", images.len())));
        };
        let configuration: ImageConfiguration = self.document(&image.config)?;
        self.layers(&configuration, image.layers.iter().map(|name| (name.clone(), None)).collect())
    }

    fn layers(
        &self,
        configuration: &ImageConfiguration,
        blobs: Vec<(String, Option<(Digest, u64)>)>,
    ) -> Result<Described> {
        let expected = configuration.rootfs().diff_ids();
        if expected.len() != blobs.len() {
            let cause = format!("{} layers, but digests of {}", blobs.len(), expected.len());
            return Err(ImageError::description("image configuration", cause));
        }
        if blobs.len() > self.limits.layers {
            return Err(ImageError::TooLarge { what: "the number of layers", limit: self.limits.layers as u64 });
        }
        let mut layers = Vec::with_capacity(blobs.len());
        for ((name, described), expected) in blobs.into_iter().zip(expected) {
            let (blob_digest, blob_bytes) = described.unzip();
            layers.push(LayerBlob {
                file: self.file(&name)?,
                name,
                blob_digest,
                blob_bytes,
                expected: Some(Digest::parse(expected)?),
            });
        }
        Ok(Described { config: ImageConfig::from_oci(configuration), layers })
    }
}

/// One image of a `docker save` archive's manifest.json.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    layers: Vec<String>,
}

fn blob_name(descriptor: &Descriptor) -> Result<(String, Digest)> {
    let digest = Digest::parse(descriptor.digest().as_ref())?;
    Ok((format!("blobs/sha256/{}", digest.hex()), digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_understood() {
        let parse = |text: &str| Source::parse(text).expect(text);
        assert_eq!(parse("oci:/a/b:v1"), Source::Oci("/a/b".into(), Some("v1".into())));
        assert_eq!(parse("oci:/a:b/c"), Source::Oci("/a:b/c".into(), None));
        assert_eq!(parse("tar:root.tar.zst"), Source::Tar("root.tar.zst".into()));
        assert_eq!(parse("dir:/root"), Source::Directory("/root".into()));
        for bad in ["", "tar", "tar:", "docker://debian", "/a/b"] {
            assert!(matches!(Source::parse(bad), Err(ImageError::UnknownSource(_))), "{bad}");
        }
    }
}
