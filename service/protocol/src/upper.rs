//! How the upper branch of a union stores files of which only some blocks have moved, and its storage limit.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How files that begin as sketches are stored. What is stored already stays as it is, and is read whatever is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpperFormat {
    /// with holes, which the filesystem of the branch has to have
    #[default]
    Sparse,
    /// compactly, in the form that suits the file's size
    Bcow,
    /// compactly, found by one table, in units that are larger in larger files
    BcowPerformance,
    /// compactly, in units of one block
    BcowSpace,
}

impl UpperFormat {
    /// All of them with their names.
    pub const ALL: [(&'static str, Self); 4] = [
        ("sparse", Self::Sparse),
        ("bcow", Self::Bcow),
        ("bcow-performance", Self::BcowPerformance),
        ("bcow-space", Self::BcowSpace),
    ];

    /// Whether it is the usual one.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// How an upper branch stores what was written, and how much of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Storage {
    /// How files are stored.
    #[serde(default, skip_serializing_if = "UpperFormat::is_default")]
    pub format: UpperFormat,
    /// The most that all may take, bytes; none: as much as the filesystem of the branch has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
}

impl Storage {
    /// Whether it is the usual one.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for UpperFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, _) = Self::ALL.iter().find(|(_, format)| format == self).unwrap_or(&Self::ALL[0]);
        formatter.write_str(name)
    }
}

/// There is no format of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is none of sparse, bcow, bcow-performance and bcow-space")]
pub struct NoUpperFormat;

impl FromStr for UpperFormat {
    type Err = NoUpperFormat;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, format)| *format).ok_or(NoUpperFormat)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for (name, format) in UpperFormat::ALL {
            assert_eq!((format.to_string().as_str(), name.parse()), (name, Ok(format)));
            assert_eq!(serde_json::to_string(&format).expect("text"), format!("\"{name}\""));
        }
        assert_eq!("other".parse::<UpperFormat>(), Err(NoUpperFormat));
    }
}
