//! The check of an upper branch that no instance uses (`poolfs-service check`): one JSON [`CheckSpec`] on standard input,
//! answered on standard output by one JSON [`CheckLine`] a line.

use crate::{CephAccess, FailureCode};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Most findings that are told one by one.
pub const FINDINGS_MAX: u64 = 10_000;

/// Most bytes of one line of the answer.
pub const CHECK_LINE_BYTES_MAX: u64 = 64 << 10;

/// What is to be checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckSpec {
    /// The writable branch of a union: its path or, of a directory of a CephFS, its name.
    pub upper: PathBuf,
    /// The read-only branches, the same way, topmost first; none: the lower files of sketches are not looked at.
    #[serde(default)]
    pub lowers: Vec<PathBuf>,
    /// Whether what can be repaired is. Without it nothing is written.
    #[serde(default)]
    pub repair: bool,
    /// Where services have their sockets and keep what they have accepted.
    pub socket_directory: PathBuf,
    /// How the cluster is reached, where a branch is at one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceph: Option<CephAccess>,
}

/// One line of the answer: findings, and at the end one of the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "kebab-case")]
pub enum CheckLine {
    /// Something is not as it has to be.
    Finding(CheckFinding),
    /// All was looked at.
    Summary(CheckSummary),
    /// The branch could not be checked, or not to the end.
    Failed {
        /// What kind of failure it is.
        #[serde(default)]
        code: FailureCode,
        /// The thing and the cause.
        message: String,
    },
}

/// What becomes of what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckOutcome {
    /// It cannot be repaired without guessing, or its repair failed.
    Damage,
    /// It can be repaired, and was not.
    Repairable,
    /// It is as it has to be now.
    Repaired,
}

/// One thing that is not as it has to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckFinding {
    /// Where, from the root of the branch, which is empty; unprintable bytes are escaped, and what is longer than 1024 bytes is cut.
    pub path: String,
    /// What kind of thing it is; docs/formats.md lists them.
    pub problem: String,
    /// What is wrong, in words.
    pub cause: String,
    /// What became of it.
    pub outcome: CheckOutcome,
}

/// What a check has come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckSummary {
    /// Whether the directory is, or looks as if it had been, an upper branch.
    pub is_upper: bool,
    /// Objects of the tree.
    pub objects: u64,
    /// Sketches among them.
    pub sketches: u64,
    /// Files that are stored compactly.
    pub compact_files: u64,
    /// Findings that cannot be repaired.
    pub damaged: u64,
    /// Findings that can be, and were not.
    pub repairable: u64,
    /// Findings that were.
    pub repaired: u64,
    /// Findings beyond [`FINDINGS_MAX`], which were not told one by one.
    pub untold: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_back() {
        let finding = CheckFinding {
            path: "a".into(),
            problem: "bitmap".into(),
            cause: "it is missing".into(),
            outcome: CheckOutcome::Damage,
        };
        for line in [
            CheckLine::Finding(finding),
            CheckLine::Summary(CheckSummary { is_upper: true, objects: 3, ..CheckSummary::default() }),
            CheckLine::Failed { code: FailureCode::InUse, message: "x".into() },
        ] {
            let text = serde_json::to_string(&line).expect("text");
            assert_eq!(serde_json::from_str::<CheckLine>(&text).expect("its own output"), line);
        }
        let spec: CheckSpec = serde_json::from_str(r#"{"upper":"/u","socket_directory":"/run"}"#).expect("a spec");
        assert_eq!(
            spec,
            CheckSpec {
                upper: "/u".into(),
                lowers: Vec::new(),
                repair: false,
                socket_directory: "/run".into(),
                ceph: None
            }
        );
        assert!(serde_json::from_str::<CheckSpec>(r#"{"upper":"/u","socket_directory":"/run","guess":true}"#).is_err());
    }
}
