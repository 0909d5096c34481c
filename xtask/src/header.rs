//! Generates `include/poolfs.h` from the C library's functions and their comments.

use anyhow::{Context, Result, anyhow};
use std::fs;
use std::path::Path;

const HEADER: &str = "include/poolfs.h";

/// The sources, in the header's order.
const SOURCES: &[&str] = &["files.rs", "names.rs", "process.rs"];

/// Writes the header.
pub fn write(root: &Path) -> Result<()> {
    let path = root.join(HEADER);
    fs::write(&path, generate(root)?).with_context(|| format!("cannot write {}", path.display()))
}

/// Compares the committed header with what the sources give.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let committed = fs::read_to_string(root.join(HEADER)).unwrap_or_default();
    if committed != generate(root)? {
        findings.push(format!("{HEADER} is not what client/capi gives: run `cargo xtask header`"));
    }
    Ok(())
}

fn generate(root: &Path) -> Result<String> {
    let library = root.join("client/capi");
    let config = cbindgen::Config::from_file(library.join("cbindgen.toml")).map_err(|error| anyhow!(error))?;
    let builder = cbindgen::Builder::new().with_config(config);
    let sources = SOURCES.iter().map(|source| library.join("src").join(source));
    let bindings = sources.fold(builder, cbindgen::Builder::with_src).generate().context("client/capi")?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    String::from_utf8(header).context("client/capi")
}
