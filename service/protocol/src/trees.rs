//! The differences between a union and its lower branches, and the results of the commands that use them.

use serde::{Deserialize, Serialize};

/// What is under a path where a union and its lower branches differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DifferenceKind {
    /// The lower branches have nothing there.
    Added,
    /// The object of the lower branches, with other attributes or another content; of a directory, perhaps only because something in it differs.
    Changed,
    /// Another object than the lower branches have there. Of a directory: nothing that they have in theirs is in it.
    Replaced,
    /// The lower branches have something there, and the union has nothing.
    Removed,
}

/// One path in which a union and its lower branches differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// From the union's root, beginning with a slash. What is no UTF-8 in it is shown as U+FFFD.
    pub path: String,
    /// The bytes of a path that is no UTF-8, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_bytes: Option<String>,
    /// What is there.
    pub kind: DifferenceKind,
    /// Its type: `file`, `directory`, `symlink`, `character-device`, `block-device`, `fifo` or `socket`; nothing for what was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_type: Option<String>,
    /// Bytes of a regular file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// If it was asked for, the parts of a regular file whose bytes are not the lower branches' (offset and length), in order: whole blocks of 4096
    /// bytes, cut at the file's end. Further ones come in [`Answer::Parts`](crate::Answer::Parts).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<Vec<(u64, u64)>>,
}

/// What was put into the archive of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    /// Files, directories, links, and names that hide others.
    pub members: u64,
    /// Bytes of files.
    pub bytes: u64,
}

/// What the completing of sketches has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flattened {
    /// Files that need no lower branch any more.
    pub files: u64,
    /// Bytes copied for it.
    pub bytes: u64,
    /// How many could not be completed.
    pub failed: u64,
    /// Some of those: path and cause.
    pub failures: Vec<(String, String)>,
}
