//! Checks what the preload library imports from libc: nothing that it interposes itself.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Compares the built library's undefined symbols with the committed list; a library that is not built is not checked.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| root.join("target").display().to_string());
    let library = Path::new(&target).join("preload/libpoolfs_preload.so");
    let list = root.join("client/preload/allowed-imports.txt");
    if !library.exists() || !list.exists() {
        return Ok(());
    }
    let allowed = std::fs::read_to_string(&list)?;
    let allowed: BTreeSet<&str> =
        allowed.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')).collect();
    let output = Command::new("nm")
        .args(["-D", "--undefined-only", "--format=just-symbols"])
        .arg(&library)
        .output()
        .context("cannot run nm (package binutils)")?;
    for symbol in String::from_utf8_lossy(&output.stdout).lines() {
        let name = symbol.split('@').next().unwrap_or_default().trim();
        if !name.is_empty() && !allowed.contains(name) {
            findings.push(format!("libpoolfs_preload.so imports {name}, which {} does not allow", list.display()));
        }
    }
    Ok(())
}
