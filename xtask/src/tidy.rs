//! `cargo xtask tidy`: the invariants of ARCHITECTURE.md and CONTRIBUTING.md that a program can check.

mod circles;
mod crates;
mod imports;
mod promises;
mod sources;

use anyhow::{Result, bail};
use std::path::{Path, PathBuf};

/// Runs every check and prints every finding before it fails.
pub fn run() -> Result<()> {
    let root = workspace_root();
    let mut findings = Vec::new();
    crates::check(&root, &mut findings)?;
    circles::check(&root, &mut findings)?;
    sources::check(&root, &mut findings)?;
    imports::check(&root, &mut findings)?;
    promises::check(&root, &mut findings)?;
    crate::header::check(&root, &mut findings)?;
    crate::surface::check(&root, &mut findings)?;
    if findings.is_empty() {
        println!("tidy: nothing to mend");
        return Ok(());
    }
    bail!("tidy:\n  {}", findings.join("\n  "))
}

/// The folder of the workspace this program was built in.
pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(PathBuf::new, Path::to_path_buf)
}
