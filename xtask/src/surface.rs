//! Generates `docs/surface.md` (what happens to each function of libc's file surface) from `client/preload/surface.txt`.
//!
//! The list is compared with what the built library exports and with the C programs that call the functions.

use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "client/preload/surface.txt";
const PAGE: &str = "docs/surface.md";

/// Where the programs are that call the functions.
const PROGRAMS: &[&str] = &["client/preload/tests", "tests/programs/surface"];

const HEAD: &str = "\
# What the preload library does with each function of libc

Made by `cargo xtask surface` of `client/preload/surface.txt`; `cargo xtask tidy` compares. Every function here is called by a C program that runs on a
directory of the disk, and on a mount by FUSE and by the library, and prints result, errno and effect: the three outputs are the same
(`tests/tests/surface.rs`, `client/preload/tests`).

*Served*: by request where the call concerns an instance and can be served; otherwise the same system call is made. *Prepared*: something is done
first, then libc's own function runs. *Kernel*: libc's own function, which the library does not see.
";

/// Who does the work of a function.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Treatment {
    Served,
    Prepared,
    Kernel,
}

impl Treatment {
    fn parse(word: &str) -> Option<Self> {
        match word {
            "served" => Some(Self::Served),
            "prepared" => Some(Self::Prepared),
            "kernel" => Some(Self::Kernel),
            _ => None,
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Prepared => "prepared",
            Self::Kernel => "kernel",
        }
    }
}

/// Some functions that are treated alike.
struct Group {
    treatment: Treatment,
    names: Vec<String>,
    note: String,
}

/// Families of functions, in their order.
type Families = Vec<(String, Vec<Group>)>;

/// Writes the page.
pub fn write(root: &Path) -> Result<()> {
    let page = render(&parse(&read(root, SOURCE)?)?)?;
    fs::write(root.join(PAGE), page).with_context(|| format!("cannot write {PAGE}"))
}

/// Compares page, library and programs with the source.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let families = parse(&read(root, SOURCE)?)?;
    if fs::read_to_string(root.join(PAGE)).unwrap_or_default() != render(&families)? {
        findings.push(format!("{PAGE} is not what {SOURCE} gives: run `cargo xtask surface`"));
    }
    let mut treated = BTreeMap::new();
    for group in families.iter().flat_map(|(_, groups)| groups) {
        for name in &group.names {
            if treated.insert(name.as_str(), group.treatment).is_some() {
                findings.push(format!("{SOURCE} names {name} twice"));
            }
        }
    }
    let called = words_of_programs(root)?;
    for name in treated.keys().filter(|name| !called.contains(**name) && !called.contains(&format!("SYS_{name}"))) {
        findings.push(format!("no program below {} calls {name}, which {SOURCE} names", PROGRAMS.join(" or ")));
    }
    if let Some(exported) = exported(root)? {
        let ours = |name: &str| treated.get(name).is_some_and(|&treatment| treatment != Treatment::Kernel);
        for name in exported.iter().filter(|name| !ours(name)) {
            findings.push(format!("libpoolfs_preload.so exports {name}, and {SOURCE} does not say so"));
        }
        for name in treated.keys().filter(|name| ours(name) && !exported.contains(**name)) {
            findings.push(format!("libpoolfs_preload.so does not export {name}, and {SOURCE} says it does"));
        }
    }
    Ok(())
}

fn read(root: &Path, file: &str) -> Result<String> {
    fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))
}

fn parse(text: &str) -> Result<Families> {
    let mut families = Families::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(title) = line.strip_prefix("== ") {
            families.push((title.to_owned(), Vec::new()));
            continue;
        }
        let (word, rest) = line.split_once(": ").with_context(|| format!("{SOURCE}: no colon in \"{line}\""))?;
        let treatment = Treatment::parse(word).with_context(|| format!("{SOURCE}: \"{word}\" is no treatment"))?;
        let (names, note) = rest.split_once(" -- ").unwrap_or((rest, ""));
        if note.is_empty() && treatment != Treatment::Served {
            bail!("{SOURCE}: \"{line}\" does not say why");
        }
        let group =
            Group { treatment, names: names.split_whitespace().map(str::to_owned).collect(), note: note.to_owned() };
        families.last_mut().with_context(|| format!("{SOURCE}: \"{line}\" is in no family"))?.1.push(group);
    }
    Ok(families)
}

fn render(families: &Families) -> Result<String> {
    let mut page = HEAD.to_owned();
    for (title, groups) in families {
        write!(page, "\n## {title}\n\n| functions | by | |\n|---|---|---|\n")?;
        for group in groups {
            let names: Vec<String> = group.names.iter().map(|name| format!("`{name}`")).collect();
            writeln!(page, "| {} | {} | {} |", names.join(" "), group.treatment.title(), group.note)?;
        }
    }
    Ok(page)
}

/// All words of the C programs.
fn words_of_programs(root: &Path) -> Result<BTreeSet<String>> {
    let mut words = BTreeSet::new();
    for folder in PROGRAMS {
        for entry in fs::read_dir(root.join(folder)).with_context(|| format!("cannot list {folder}"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "c") {
                let text = fs::read_to_string(&path)?;
                let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
                words.extend(text.split(|c| !is_part(c)).filter(|word| !word.is_empty()).map(str::to_owned));
            }
        }
    }
    Ok(words)
}

/// The names the built library defines; nothing when it is not built.
fn exported(root: &Path) -> Result<Option<BTreeSet<String>>> {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| root.join("target").display().to_string());
    let library = Path::new(&target).join("preload/libpoolfs_preload.so");
    if !library.exists() {
        return Ok(None);
    }
    let output = Command::new("nm")
        .args(["-D", "--defined-only", "--format=just-symbols"])
        .arg(&library)
        .output()
        .context("cannot run nm (package binutils)")?;
    Ok(Some(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_and_shown() {
        let text = "# a remark\n== Family\nserved: a b\nkernel: c -- because\n";
        let page = render(&parse(text).expect("well-formed")).expect("text");
        assert!(page.ends_with("| `a` `b` | served |  |\n| `c` | kernel | because |\n"), "{page}");
    }

    #[test]
    fn what_is_left_to_the_kernel_has_a_reason() {
        assert!(parse("== Family\nkernel: c\n").is_err());
        assert!(parse("served: a\n").is_err());
        assert!(parse("== Family\nforgotten: a\n").is_err());
    }
}
