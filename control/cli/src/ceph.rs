//! Branches at a Ceph cluster: how it is reached, and what is noted of them.

use crate::failure::{Failure, Result};
use clap::Args;
use poolfs_service_protocol::{CephAccess, StackSpec};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// How the cluster is reached that has the branches `ceph:/PATH`.
#[derive(Clone, Debug, Default, Args)]
pub struct CephArguments {
    /// Of branches ceph:/PATH: the configuration of their cluster [default: /etc/ceph/ceph.conf]
    #[arg(long, value_name = "FILE")]
    pub ceph_conf: Option<PathBuf>,
    /// The user at the cluster [default: admin]
    #[arg(long, value_name = "NAME")]
    pub ceph_user: Option<String>,
    /// The file with that user's key [default: as the configuration says]
    #[arg(long, value_name = "FILE")]
    pub ceph_keyring: Option<PathBuf>,
    /// The filesystem, of a cluster with several
    #[arg(long, value_name = "NAME")]
    pub ceph_fs: Option<String>,
}

impl CephArguments {
    /// What services are told of it, for those of the stacks that have such a branch; nothing where none has.
    pub fn access(&self, stacks: &[&StackSpec], file: impl Fn(&Path) -> Result<PathBuf>) -> Result<Option<CephAccess>> {
        let Self { ceph_conf, ceph_user, ceph_keyring, ceph_fs } = self.clone();
        if !stacks.iter().any(|stack| has_ceph(stack)) {
            let is_given = [
                ("--ceph-conf", ceph_conf.is_some()),
                ("--ceph-user", ceph_user.is_some()),
                ("--ceph-keyring", ceph_keyring.is_some()),
                ("--ceph-fs", ceph_fs.is_some()),
            ];
            return match is_given.into_iter().find(|(_, is_given)| *is_given) {
                Some((option, _)) => {
                    Err(Failure::usage(option, "no branch is at a cluster", "name one as ceph:/PATH, or leave it out"))
                }
                None => Ok(None),
            };
        }
        let file = |path: Option<PathBuf>| path.map(|path| file(&path)).transpose();
        let user = ceph_user.map(|user| user.strip_prefix("client.").map_or(user.clone(), str::to_owned));
        Ok(Some(CephAccess {
            configuration: file(ceph_conf)?,
            user,
            keyring: file(ceph_keyring)?,
            filesystem: ceph_fs,
            holder: None,
        }))
    }
}

/// Whether one of its branches is at a cluster.
pub fn has_ceph(stack: &StackSpec) -> bool {
    stack.branches().into_iter().any(|branch| !branch.place().is_directory())
}

/// A directory of a CephFS, as it is noted. In records it is one line: `ceph`, and in hexadecimal digits the configuration and the filesystem that were
/// given, and the path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CephPlace {
    configuration: Option<PathBuf>,
    filesystem: Option<String>,
    path: PathBuf,
}

/// The first word of what is noted.
const WORD: &str = "ceph";
/// What stands for something that was not given.
const NONE: &str = "-";

impl CephPlace {
    /// The directory at a path.
    pub fn new(path: &Path, access: &CephAccess) -> CephPlace {
        let (configuration, filesystem) = (access.configuration.clone(), access.filesystem.clone());
        CephPlace { configuration, filesystem, path: path.to_owned() }
    }

    /// Whether it is another one, or one lies in the other. A cluster or a filesystem by another name is another one here; that it is not, the cluster finds
    /// out.
    pub fn overlaps(&self, other: &CephPlace) -> bool {
        let is_one = self.configuration == other.configuration && self.filesystem == other.filesystem;
        is_one && (self.path.starts_with(&other.path) || other.path.starts_with(&self.path))
    }

    /// The line.
    pub fn noted(&self) -> String {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let given = |bytes: Option<&[u8]>| bytes.map_or_else(|| NONE.to_owned(), digits);
        let configuration = given(self.configuration.as_ref().map(|path| path.as_os_str().as_bytes()));
        let filesystem = given(self.filesystem.as_ref().map(|name| name.as_bytes()));
        format!("{WORD} {configuration} {filesystem} {}", digits(self.path.as_os_str().as_bytes()))
    }

    /// What a line notes; nothing where it is no such line.
    pub fn of_noted(text: &str) -> Option<CephPlace> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes = |digits: &str| digits.as_bytes().chunks(2).map(byte).collect::<Option<Vec<u8>>>();
        let path = |digits: &str| Some(PathBuf::from(OsString::from_vec(bytes(digits)?)));
        let [word, configuration, filesystem, of_path] = text.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let given = |word: &'_ str| word != NONE;
        (word == WORD).then_some(())?;
        Some(CephPlace {
            configuration: if given(configuration) { Some(path(configuration)?) } else { None },
            filesystem: if given(filesystem) { Some(String::from_utf8(bytes(filesystem)?).ok()?) } else { None },
            path: path(of_path)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str, configuration: Option<&str>) -> CephPlace {
        CephPlace { configuration: configuration.map(PathBuf::from), filesystem: None, path: path.into() }
    }

    #[test]
    fn what_is_noted_is_understood_again() {
        let named = CephPlace { filesystem: Some("f s".to_owned()), ..place("/a b", Some("/etc/ceph/x.conf")) };
        for place in [place("/", None), named] {
            assert_eq!(CephPlace::of_noted(&place.noted()), Some(place));
        }
        for wrong in ["", "ceph", "ceph - - zz", "ceph - -", "ceph x - 2f", "1:2 3:4", "other - - 2f", "ceph - - 2f 2f"]
        {
            assert_eq!(CephPlace::of_noted(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn directories_of_one_filesystem_are_compared_by_their_paths() {
        let overlap = |one: &str, other: &str| place(one, None).overlaps(&place(other, None));
        assert!(overlap("/a", "/a") && overlap("/a", "/a/b") && overlap("/a/b", "/"));
        assert!(!overlap("/a", "/ab") && !overlap("/a/b", "/a/c"));
        assert!(!place("/a", None).overlaps(&place("/a", Some("/x"))));
    }
}
