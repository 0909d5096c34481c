//! Wraps the archive of a root filesystem as an image: an OCI layout with one layer.

use crate::decompress::Decompressor;
use crate::digest::HashingReader;
use crate::{Digest, ImageConfig, ImageError, Progress, Result};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Write an OCI layout into the directory `layout`, which is made: one image named `tag` whose only layer is the tar archive
/// `archive` (plain, gzip or zstd).
pub fn write_layout(
    archive: &Path,
    layout: &Path,
    tag: &str,
    config: &ImageConfig,
    progress: &mut dyn Progress,
) -> Result<()> {
    let blobs = layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).map_err(|source| ImageError::io("make", &blobs, source))?;
    let (layer, diff_id) = layer(archive, &blobs, progress)?;
    let list = |words: &[String]| if words.is_empty() { Value::Null } else { json!(words) };
    let configuration = json!({
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": list(&config.env),
            "Entrypoint": list(&config.entrypoint),
            "Cmd": list(&config.cmd),
            "WorkingDir": config.working_directory,
            "User": config.user,
            "Labels": config.labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id.to_string()]},
        "history": [],
    });
    let config = document(&blobs, "application/vnd.oci.image.config.v1+json", &configuration)?;
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": [layer]});
    let mut manifest = document(&blobs, media_type, &manifest)?;
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
    write(&layout.join("index.json"), &json!({"schemaVersion": 2, "manifests": [manifest]}))?;
    write(&layout.join("oci-layout"), &json!({"imageLayoutVersion": "1.0.0"}))
}

/// Put the archive among the blobs: its descriptor, and the digest of what it is uncompressed.
fn layer(archive: &Path, blobs: &Path, progress: &mut dyn Progress) -> Result<(Value, Digest)> {
    let failed = |source: std::io::Error| ImageError::io("read", archive, source);
    let file = File::open(archive).map_err(failed)?;
    progress.begin(&archive.display().to_string(), file.metadata().map_err(failed)?.len());
    let mut plain = HashingReader::new(Decompressor::new(HashingReader::new(file)).map_err(failed)?);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = plain.read(&mut buffer).map_err(failed)?;
        if count == 0 {
            break;
        }
        progress.advance(count as u64);
        if progress.is_cancelled() {
            return Err(failed(std::io::Error::other("it was interrupted")));
        }
    }
    let (diff_id, plain_bytes, compressed) = plain.finish().map_err(failed)?;
    let (digest, bytes, _) = compressed.into_inner().into_inner().finish().map_err(failed)?;
    progress.end();
    let blob = blobs.join(digest.hex());
    if !blob.exists() {
        // The same bytes under another name where that is possible.
        std::fs::hard_link(archive, &blob)
            .or_else(|_| std::fs::copy(archive, &blob).map(|_| ()))
            .map_err(|source| ImageError::io("make", &blob, source))?;
    }
    let form = if bytes == plain_bytes { "tar" } else { "tar+gzip" };
    let media_type = format!("application/vnd.oci.image.layer.v1.{form}");
    Ok((json!({"mediaType": media_type, "digest": digest.to_string(), "size": bytes}), diff_id))
}

fn document(blobs: &Path, media_type: &str, value: &Value) -> Result<Value> {
    let text = value.to_string();
    let digest = Digest::of(text.as_bytes());
    write(&blobs.join(digest.hex()), value)?;
    Ok(json!({"mediaType": media_type, "digest": digest.to_string(), "size": text.len()}))
}

fn write(path: &Path, value: &Value) -> Result<()> {
    std::fs::write(path, value.to_string()).map_err(|source| ImageError::io("write", path, source))
}
