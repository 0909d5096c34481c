//! Checks source files: where `unsafe` stands, how long they are, how they begin.

use anyhow::Result;
use std::path::Path;
use std::process::Command;

/// Folders and files in which `unsafe` is allowed, because they touch shared memory, system calls or libc's names.
const UNSAFE: &str = include_str!("unsafe-files.txt");

/// Longest source file, lines; a folder's tests and tables may be longer.
const LINES_MAX: usize = 600;

/// Rust files git knows below `root`, with their text.
pub fn rust_files(root: &Path) -> Result<Vec<(String, String)>> {
    let listing = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "*.rs"])
        .current_dir(root)
        .output()?;
    let mut files = Vec::new();
    for file in String::from_utf8_lossy(&listing.stdout).lines() {
        // A file removed but not yet committed is still listed.
        if let Ok(text) = std::fs::read_to_string(root.join(file)) {
            files.push((file.to_owned(), text));
        }
    }
    Ok(files)
}

/// Checks every source file.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let allowed: Vec<&str> = UNSAFE.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    for (file, text) in rust_files(root)? {
        let uses_unsafe = text.lines().any(|line| {
            let code = line.split("//").next().unwrap_or_default();
            !code.contains("forbid") && code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe")
        });
        if uses_unsafe && !file.starts_with("xtask/") && !allowed.iter().any(|place| file.starts_with(place)) {
            findings.push(format!("{file} uses unsafe and is not in xtask/src/tidy/unsafe-files.txt"));
        }
        let is_test = file.contains("/tests/") || file.starts_with("tests/") || file.ends_with("tests.rs");
        let lines = text.lines().count();
        if lines > LINES_MAX && !is_test {
            findings.push(format!("{file} has {lines} lines, more than {LINES_MAX}: make it two"));
        }
        if !text.starts_with("//!") && !text.starts_with("#!") {
            findings.push(format!("{file} does not begin with a line that says what it is for (//!)"));
        }
    }
    Ok(())
}
