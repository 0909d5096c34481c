//! Suites: shell scripts that print a normalised summary of what they did.
//!
//! A script begins with lines that declare its needs:
//!
//!     # about: what it does, for the table
//!     # packages: Debian packages, which are installed when they are missing
//!     # version: a command that prints the version of the program
//!     # limit: seconds one run may take
//!     # targets: other filesystems it runs on, too (their outcome is only noted)
//!     # container: yes, when it is the program of a container of the demo's image (on the disk: of a chroot)
//!
//! It is run as `sh -eu NAME.sh` in its working directory `$W`, which is on the filesystem under test, with `$SUITES` (the folder of the
//! scripts) and `$WORKSPACE`. Its standard output is compared; its standard error is not. A line with the word `prepare)` in it says that
//! `NAME.sh prepare` is to be run in the working directory beforehand, while that is still a directory of the lower branch.

use crate::ask;
use poolfs_tests::workspace;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::target::Target;

/// A suite and what its first lines say.
pub struct Suite {
    pub name: String,
    pub script: PathBuf,
    pub about: String,
    pub limit: Duration,
    pub in_container: bool,
    pub prepares: bool,
    packages: Vec<String>,
    version: String,
    others: Vec<Target>,
}

/// All suites, by name.
pub fn names() -> Vec<String> {
    let folder = workspace().join("tests/suites");
    let entries = std::fs::read_dir(&folder).expect("the folder of the suites");
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok()?.strip_suffix(".sh").map(str::to_owned))
        .collect();
    names.sort();
    names
}

impl Suite {
    pub fn load(name: &str) -> Self {
        let script = workspace().join("tests/suites").join(format!("{name}.sh"));
        let text = std::fs::read_to_string(&script).unwrap_or_else(|error| panic!("no suite {name}: {error}"));
        let header = |key: &str| header(&text, key).unwrap_or_default().to_owned();
        let seconds =
            header("limit").parse().unwrap_or_else(|_| panic!("{name}: a line `# limit: SECONDS` is missing"));
        let words = |key: &str| header(key).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        Self {
            name: name.to_owned(),
            about: header("about"),
            limit: Duration::from_secs(seconds),
            in_container: header("container") == "yes",
            prepares: text.contains("prepare)"),
            packages: words("packages"),
            version: header("version"),
            others: words("targets").iter().map(|word| Target::of_name(word).expect("a known target")).collect(),
            script,
        }
    }

    /// Where it runs, the disk first.
    pub fn targets(&self) -> Vec<Target> {
        [&[Target::Disk][..], &self.others, &[Target::Fuse, Target::Library]].concat()
    }

    /// The version of its program on this machine.
    pub fn version(&self) -> String {
        ask(&self.version)
    }

    /// Installs what is missing, without starting the servers that come with it. Whether all is there now.
    pub fn install_packages(&self) -> bool {
        let installer = workspace().join("packaging/install-missing.sh");
        let status = Command::new(installer).arg("--no-servers").args(&self.packages).status().expect("sh starts");
        status.success()
    }
}

fn header<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    text.lines()
        .take_while(|line| line.starts_with('#'))
        .find_map(|line| line.strip_prefix("# ")?.strip_prefix(key)?.strip_prefix(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suite_says_what_it_is() {
        let names = names();
        assert!(names.len() > 3, "{names:?}");
        for name in names {
            let suite = Suite::load(&name);
            assert!(!suite.about.is_empty() && !suite.version.is_empty(), "{name} lacks a line of its header");
        }
    }

    #[test]
    fn headers_end_with_the_first_other_line() {
        let text = "#!/bin/sh\n# about: a b\n# limit: 5\nset -e\n# version: no\n";
        assert_eq!(
            (header(text, "about"), header(text, "limit"), header(text, "version")),
            (Some("a b"), Some("5"), None)
        );
    }
}
