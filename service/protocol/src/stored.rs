//! Stacks as records have them: also those of versions whose kinds of directories were others.

use crate::{Coherence, StackSpec, Storage};
use serde::Deserialize;
use std::path::PathBuf;

/// What a record can say. The fields are those of [`StackSpec`].
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum Stored {
    Directory {
        directory: PathBuf,
        #[serde(default)]
        coherence: Coherence,
        #[serde(default)]
        size_bytes: Option<u64>,
    },
    Union {
        upper: PathBuf,
        lowers: Vec<PathBuf>,
        #[serde(default)]
        storage: Storage,
        #[serde(default)]
        immutable_lowers: bool,
    },
    /// An earlier version's directory that other pools may have mounted, too.
    SharedDirectory { directory: PathBuf },
    /// An earlier version's directory of a filesystem in memory.
    LimitedDirectory { directory: PathBuf, is_shared: bool, size_bytes: u64 },
}

impl From<Stored> for StackSpec {
    fn from(stored: Stored) -> Self {
        let shared = |is_shared| if is_shared { Coherence::Uncoordinated } else { Coherence::Exclusive };
        match stored {
            Stored::Directory { directory, coherence, size_bytes } => {
                Self::Directory { directory, coherence, size_bytes }
            }
            Stored::Union { upper, lowers, storage, immutable_lowers } => {
                Self::Union { upper, lowers, storage, immutable_lowers }
            }
            Stored::SharedDirectory { directory } => {
                Self::Directory { directory, coherence: shared(true), size_bytes: None }
            }
            Stored::LimitedDirectory { directory, is_shared, size_bytes } => {
                Self::Directory { directory, coherence: shared(is_shared), size_bytes: Some(size_bytes) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_earlier_versions_are_understood() {
        let read = |text: &str| serde_json::from_str::<StackSpec>(text).expect("a stack");
        let directory = |coherence, size_bytes| StackSpec::Directory { directory: "/d".into(), coherence, size_bytes };
        let shared = read(r#"{"kind":"shared-directory","directory":"/d"}"#);
        assert_eq!(shared, directory(Coherence::Uncoordinated, None));
        let limited = |text: &str| {
            format!(r#"{{"kind":"limited-directory","directory":"/d","is_shared":{text},"size_bytes":7}}"#)
        };
        assert_eq!(read(&limited("false")), directory(Coherence::Exclusive, Some(7)));
        assert_eq!(read(&limited("true")), directory(Coherence::Uncoordinated, Some(7)));
        assert_eq!(read(r#"{"kind":"directory","directory":"/d"}"#), StackSpec::directory("/d"));
        for stack in [StackSpec::union("/u", vec!["/l".into()]), shared] {
            assert_eq!(read(&serde_json::to_string(&stack).expect("serializable")), stack);
        }
        assert!(serde_json::from_str::<StackSpec>(r#"{"kind":"directory","directory":"/d","more":1}"#).is_err());
    }
}
