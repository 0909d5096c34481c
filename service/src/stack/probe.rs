//! The job `probe`: looks whether branches at a cluster can be had, before the process ends.

use super::sources::{CephDirectory, Used};
use super::{StackError, with_causes};
use crate::confinement;
use crate::outside::{Deed, outside};
use poolfs_service_protocol::{Place, ProbeAnswer, ProbeSpec, ProbedDirectory};
use std::io::{Read, Write};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::time::Instant;

/// Most bytes of a job.
const SPEC_BYTES_MAX: u64 = 64 << 10;

/// Reads a [`ProbeSpec`] from `input`, looks, and writes a [`ProbeAnswer`] to `output`.
///
/// # Errors
/// When `input` is no such job, the process cannot be confined, or `output` takes nothing.
pub fn run(input: impl Read, output: &mut dyn Write) -> anyhow::Result<()> {
    let mut text = Vec::new();
    input.take(SPEC_BYTES_MAX).read_to_end(&mut text)?;
    let spec: ProbeSpec = serde_json::from_slice(&text)?;
    confinement::enter(None)?;
    let version = outside(Deed::Cluster, poolfs_ceph::library_version)?;
    let answer = ProbeAnswer {
        library: version.map_err(|error| with_causes(&error)),
        directory: spec.directory.as_ref().map(|name| probe(name, &spec).map_err(|error| with_causes(&error))),
    };
    serde_json::to_writer(&mut *output, &answer)?;
    output.write_all(b"\n")?;
    Ok(output.flush()?)
}

fn probe(name: &Path, spec: &ProbeSpec) -> Result<ProbedDirectory, StackError> {
    let failed = |cause: String| StackError::Branch { path: name.to_owned(), cause };
    let Place::Ceph(path) = Place::of(name) else { return Err(failed("it is not at a cluster".to_owned())) };
    let begun = Instant::now();
    // The process ends after this, and with it the mount: nobody waits for a cluster that may not answer.
    let directory = ManuallyDrop::new(CephDirectory::new(name, path, &spec.ceph, Used::Read));
    let space = directory.space();
    let mounted_ms = begun.elapsed().as_millis() as u64;
    let space = space?;
    let bytes = |blocks: u64| blocks.saturating_mul(space.block_size.into());
    Ok(ProbedDirectory { mounted_ms, total_bytes: bytes(space.blocks), free_bytes: bytes(space.blocks_available) })
}
