//! Checks that what docs/threat-model.md names as holding a promise exists: files, and the tests in its tables.

use super::sources::rust_files;
use anyhow::Result;
use std::collections::BTreeSet;
use std::path::Path;

/// The document.
const DOCUMENT: &str = "docs/threat-model.md";

/// What is in the last column of a table with tests.
const HEADING: &str = "test";

/// The tests of the workspace, each by its name and by its module and name.
struct Tests(BTreeSet<String>);

impl Tests {
    fn read(files: &[(String, String)]) -> Tests {
        let mut names = BTreeSet::new();
        for (file, text) in files {
            let module = module_of(Path::new(file));
            for name in tests_of(text) {
                names.insert(format!("{module}::{name}"));
                names.insert(name.to_owned());
            }
        }
        Tests(names)
    }
}

/// What a test in this file is found by besides its name. The tests of a module or of a crate may be in a file of their own.
fn module_of(file: &Path) -> String {
    let names = file.with_extension("");
    let mut names = names.iter().rev().map(|name| name.to_string_lossy().into_owned());
    let is_speaking = |name: &String| !["tests", "mod", "lib", "main", "src"].contains(&name.as_str());
    names.find(is_speaking).unwrap_or_default()
}

/// The names of the functions marked as tests.
fn tests_of(text: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_marked = false;
    for line in text.lines().map(str::trim) {
        match line.strip_prefix("fn ") {
            Some(rest) if is_marked => names.extend(rest.split('(').next()),
            _ => {}
        }
        is_marked = line == "#[test]" || (is_marked && line.starts_with("#["));
    }
    names
}

/// What is between backticks.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Checks the document.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let text = std::fs::read_to_string(root.join(DOCUMENT))?;
    findings.extend(findings_in(&text, &Tests::read(&rust_files(root)?), |path| root.join(path).exists()));
    Ok(())
}

fn findings_in(text: &str, tests: &Tests, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let mut findings = Vec::new();
    let mut has_tests = false;
    for (number, line) in text.lines().enumerate() {
        let place = format!("{DOCUMENT}:{}", number + 1);
        // With the folder only: others are named in the folder that was just spoken of.
        let files = spans(line).filter(|span| span.ends_with(".rs") && span.contains('/'));
        findings.extend(files.filter(|file| !exists(file)).map(|file| format!("{place}: there is no {file}")));
        let Some(row) = line.strip_prefix('|').and_then(|line| line.trim_end().strip_suffix('|')) else {
            has_tests = false;
            continue;
        };
        let last = row.rsplit('|').next().unwrap_or_default().trim();
        if last == HEADING {
            has_tests = true;
        } else if has_tests {
            let named = spans(last).filter(|span| !span.ends_with(".rs") && !span.ends_with(".md"));
            let absent = named.filter(|name| !tests.0.contains(*name));
            findings.extend(absent.map(|name| format!("{place}: there is no test {name}")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_tests_that_are_not_there_are_found() {
        let source = "#[test]\n#[ignore]\nfn holds() {}\n    #[test]\n    fn also() {}\nfn other() {}\n".to_owned();
        let tests = Tests::read(&[("a/tests/suite/views.rs".to_owned(), source)]);
        let text = "`a/b.rs` and `gone/c.rs`, `c.rs`\n\n\
                    | what | test |\n|---|---|\n| `nothing` | `holds`, `views::also`, `a/b.rs` |\n| x | `views::other` |\n\n\
                    | what | why |\n|---|---|\n| x | `free text` |\n";
        let found = findings_in(text, &tests, |path| path == "a/b.rs");
        let expected =
            ["docs/threat-model.md:1: there is no gone/c.rs", "docs/threat-model.md:6: there is no test views::other"];
        assert_eq!(found, expected);
        assert_eq!(module_of(Path::new("control/image/src/tests.rs")), "image");
        assert_eq!(module_of(Path::new("service/src/walk/tests.rs")), "walk");
    }
}
