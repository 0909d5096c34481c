//! A look at what is needed for branches at a cluster (`poolfs-service probe`): one JSON [`ProbeSpec`] on standard input, answered on standard
//! output by one JSON [`ProbeAnswer`].

use crate::CephAccess;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Most bytes of the answer.
pub const PROBE_ANSWER_BYTES_MAX: u64 = 64 << 10;

/// What is looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeSpec {
    /// The name of a directory of a CephFS, which is mounted to be read; none: only Ceph's library is looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// How its cluster is reached.
    #[serde(default)]
    pub ceph: CephAccess,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProbeAnswer {
    /// The version of Ceph's library, or why it cannot be used.
    pub library: Result<String, String>,
    /// The directory, or why it cannot be used: the cause, and what to do after the last "; ".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub directory: Option<Result<ProbedDirectory, String>>,
}

/// A directory of a CephFS that was mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbedDirectory {
    /// How long that took.
    pub mounted_ms: u64,
    /// What it may store, by its quota or by the size of the cluster; 0 where nobody says.
    pub total_bytes: u64,
    /// What is left of that.
    pub free_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_and_answered_comes_back() {
        let spec = ProbeSpec { directory: Some("ceph:/a".into()), ceph: CephAccess::default() };
        let text = serde_json::to_string(&spec).expect("text");
        assert_eq!(serde_json::from_str::<ProbeSpec>(&text).expect("its own output"), spec);
        assert!(serde_json::from_str::<ProbeSpec>(r#"{"more":1}"#).is_err());
        let found = ProbedDirectory { mounted_ms: 1, total_bytes: 2, free_bytes: 1 };
        for directory in [None, Some(Ok(found)), Some(Err("cause; remedy".to_owned()))] {
            let answer = ProbeAnswer { library: Ok("16.2.15".to_owned()), directory };
            let text = serde_json::to_string(&answer).expect("text");
            assert_eq!(serde_json::from_str::<ProbeAnswer>(&text).expect("its own output"), answer);
        }
    }
}
