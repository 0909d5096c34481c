//! Branches at a Ceph cluster: how it is reached, and what is noted of them.

use crate::failure::{Failure, Result};
use clap::Args;
use poolfs_host::Host;
use poolfs_service_protocol::{CephAccess, StackSpec};
use std::ffi::OsString;
use std::io::Read;
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
        if !stacks.iter().any(|stack| has_ceph(stack)) {
            let is_given = [
                ("--ceph-conf", self.ceph_conf.is_some()),
                ("--ceph-user", self.ceph_user.is_some()),
                ("--ceph-keyring", self.ceph_keyring.is_some()),
                ("--ceph-fs", self.ceph_fs.is_some()),
            ];
            return match is_given.into_iter().find(|(_, is_given)| *is_given) {
                Some((option, _)) => {
                    Err(Failure::usage(option, "no branch is at a cluster", "name one as ceph:/PATH, or leave it out"))
                }
                None => Ok(None),
            };
        }
        self.given(file).map(Some)
    }

    /// What services are told of it, where an image is at a cluster: what is given here goes before what was noted of the image.
    pub fn access_over(&self, noted: &CephAccess, file: impl Fn(&Path) -> Result<PathBuf>) -> Result<CephAccess> {
        let given = self.given(file)?;
        let cluster = if self.ceph_conf.is_some() { given.cluster } else { noted.cluster.clone() };
        let given = CephAccess { cluster, ..given };
        if !given.may_be_one(noted) {
            let option = if self.ceph_fs.is_some() && given.filesystem != noted.filesystem {
                "--ceph-fs"
            } else {
                "--ceph-conf"
            };
            let remedy = "leave it out; all branches of a container that are at a cluster have to be in one filesystem";
            return Err(Failure::usage(option, "the image is in another filesystem, or at another cluster", remedy));
        }
        // A key is one user's.
        let keyring = if given.user.is_some() { given.keyring } else { given.keyring.or(noted.keyring.clone()) };
        Ok(CephAccess {
            configuration: given.configuration.or(noted.configuration.clone()),
            user: given.user.or(noted.user.clone()),
            keyring,
            filesystem: given.filesystem.or(noted.filesystem.clone()),
            cluster: given.cluster,
            holder: None,
        })
    }

    fn given(&self, file: impl Fn(&Path) -> Result<PathBuf>) -> Result<CephAccess> {
        let Self { ceph_conf, ceph_user, ceph_keyring, ceph_fs } = self.clone();
        let file = |path: Option<PathBuf>| path.map(|path| file(&path)).transpose();
        let user = ceph_user.map(|user| user.strip_prefix("client.").map_or(user.clone(), str::to_owned));
        let configuration = file(ceph_conf)?;
        Ok(CephAccess {
            cluster: cluster_of(configuration.as_deref().unwrap_or(Path::new(DEFAULT_CONFIGURATION))),
            configuration,
            user,
            keyring: file(ceph_keyring)?,
            filesystem: ceph_fs,
            holder: None,
        })
    }
}

/// Where Ceph's programs look for their configuration.
const DEFAULT_CONFIGURATION: &str = "/etc/ceph/ceph.conf";
/// Bytes of a configuration that are looked at.
const CONFIGURATION_BYTES_MAX: u64 = 1 << 20;

/// The id of the cluster that a configuration leads to, if it says that.
fn cluster_of(configuration: &Path) -> Option<String> {
    let mut text = String::new();
    std::fs::File::open(configuration).ok()?.take(CONFIGURATION_BYTES_MAX).read_to_string(&mut text).ok()?;
    cluster_in(&text)
}

fn cluster_in(configuration: &str) -> Option<String> {
    let said = configuration.lines().filter_map(|line| line.split(['#', ';']).next()?.split_once('='));
    let mut ids = said.filter(|(name, _)| name.trim().eq_ignore_ascii_case("fsid")).map(|(_, id)| id.trim());
    // As for Ceph, the last one holds.
    ids.next_back().filter(|id| !id.is_empty()).map(str::to_ascii_lowercase)
}

/// With the name that the cluster knows the pool by, which it has from its first such mount on. It is recorded with that. One that was given on another
/// host came with a copy of the record: with it, each of the two pools would take the other for its dead predecessor.
pub fn held(host: &dyn Host, known: &mut Option<String>, access: CephAccess) -> Result<CephAccess> {
    let machine = host.read_text(Path::new("/etc/machine-id")).unwrap_or_default();
    let own = format!("@{}", machine.trim());
    let holder = match known.as_ref().filter(|holder| holder.ends_with(&own)) {
        Some(holder) => holder.clone(),
        None => host.read_text(Path::new("/proc/sys/kernel/random/uuid"))?.trim().to_owned() + &own,
    };
    *known = Some(holder.clone());
    Ok(CephAccess { holder: Some(holder), ..access })
}

/// Whether one of its branches is at a cluster.
pub fn has_ceph(stack: &StackSpec) -> bool {
    stack.branches().into_iter().any(|branch| !branch.place().is_directory())
}

/// A directory of a CephFS, as it is noted. In records it is one line: `ceph`, and in hexadecimal digits the configuration and the filesystem that were
/// given, the path, and the id of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CephPlace {
    access: CephAccess,
    path: PathBuf,
}

/// The first word of what is noted.
const WORD: &str = "ceph";
/// What stands for something that is not known.
const NONE: &str = "-";

impl CephPlace {
    /// The directory at a path.
    pub fn new(path: &Path, access: &CephAccess) -> CephPlace {
        let CephAccess { configuration, filesystem, cluster, .. } = access.clone();
        let access = CephAccess { configuration, filesystem, cluster, ..CephAccess::default() };
        CephPlace { access, path: path.to_owned() }
    }

    /// Whether it may be another one, or one lie in the other.
    pub fn overlaps(&self, other: &CephPlace) -> bool {
        self.access.may_be_one(&other.access)
            && (self.path.starts_with(&other.path) || other.path.starts_with(&self.path))
    }

    /// The line.
    pub fn noted(&self) -> String {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let given = |bytes: Option<&[u8]>| bytes.map_or_else(|| NONE.to_owned(), digits);
        let CephAccess { configuration, filesystem, cluster, .. } = &self.access;
        let configuration = given(configuration.as_ref().map(|path| path.as_os_str().as_bytes()));
        let [filesystem, cluster] = [filesystem, cluster].map(|text| given(text.as_ref().map(|text| text.as_bytes())));
        format!("{WORD} {configuration} {filesystem} {} {cluster}", digits(self.path.as_os_str().as_bytes()))
    }

    /// What a line notes; nothing where it is no such line.
    pub fn of_noted(text: &str) -> Option<CephPlace> {
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let bytes = |digits: &str| digits.as_bytes().chunks(2).map(byte).collect::<Option<Vec<u8>>>();
        let path = |digits: &str| Some(PathBuf::from(OsString::from_vec(bytes(digits)?)));
        let text_of = |digits: &str| String::from_utf8(bytes(digits)?).ok();
        let words: Vec<&str> = text.split(' ').collect();
        let (configuration, filesystem, of_path, cluster) = match words[..] {
            [WORD, configuration, filesystem, of_path] => (configuration, filesystem, of_path, NONE),
            [WORD, configuration, filesystem, of_path, cluster] => (configuration, filesystem, of_path, cluster),
            _ => return None,
        };
        let given = |word: &'_ str| word != NONE;
        let access = CephAccess {
            configuration: if given(configuration) { Some(path(configuration)?) } else { None },
            filesystem: if given(filesystem) { Some(text_of(filesystem)?) } else { None },
            cluster: if given(cluster) { Some(text_of(cluster)?) } else { None },
            ..CephAccess::default()
        };
        Some(CephPlace { access, path: path(of_path)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str, cluster: Option<&str>) -> CephPlace {
        let access = CephAccess { cluster: cluster.map(str::to_owned), ..CephAccess::default() };
        CephPlace { access, path: path.into() }
    }

    #[test]
    fn a_copied_record_is_another_pool_at_a_cluster() {
        let of_host = |machine: &str, uuid: &str| {
            let host = poolfs_host::RecordingHost::new();
            host.set_file("/etc/machine-id", machine);
            host.set_file("/proc/sys/kernel/random/uuid", uuid);
            host
        };
        let mut known = None;
        let name = |host: poolfs_host::RecordingHost, known: &mut Option<String>| {
            held(&host, known, CephAccess::default()).expect("a name").holder.expect("a name")
        };
        let own = name(of_host("m1\n", "u1\n"), &mut known);
        assert_eq!(name(of_host("m1\n", "u2\n"), &mut known), own);
        let mut copy = known.clone();
        assert_ne!(name(of_host("m2\n", "u3\n"), &mut copy), own);
        assert_eq!(name(of_host("m1\n", "u4\n"), &mut known), own);
    }

    #[test]
    fn what_is_noted_is_understood_again() {
        let access = CephAccess {
            filesystem: Some("f s".to_owned()),
            configuration: Some("/x y".into()),
            ..place("", Some("id")).access
        };
        for place in [place("/", None), place("/a b", Some("id")), CephPlace { access, path: "/".into() }] {
            assert_eq!(CephPlace::of_noted(&place.noted()), Some(place));
        }
        assert_eq!(CephPlace::of_noted("ceph - - 2f"), Some(place("/", None)), "as it was written at first");
        for wrong in
            ["", "ceph", "ceph - - zz", "ceph - -", "ceph x - 2f", "1:2 3:4", "other - - 2f", "ceph - - 2f 2f 2f"]
        {
            assert_eq!(CephPlace::of_noted(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn directories_of_one_filesystem_are_compared_by_their_paths() {
        let overlap = |one: &str, other: &str| place(one, None).overlaps(&place(other, None));
        assert!(overlap("/a", "/a") && overlap("/a", "/a/b") && overlap("/a/b", "/"));
        assert!(!overlap("/a", "/ab") && !overlap("/a/b", "/a/c"));
        let differ = |one: Option<&str>, other: Option<&str>| !place("/a", one).overlaps(&place("/a", other));
        assert!(differ(Some("1"), Some("2")));
        assert!(!differ(Some("1"), Some("1")) && !differ(None, Some("1")) && !differ(None, None), "it may be the same");
    }

    #[test]
    fn what_is_given_goes_before_what_is_noted_of_an_image() {
        let text = |text: &str| Some(text.to_owned());
        let noted = CephAccess {
            configuration: Some("/noted".into()),
            user: text("images"),
            keyring: Some("/key".into()),
            filesystem: text("fs"),
            cluster: text("1"),
            holder: None,
        };
        let over = |arguments: CephArguments| arguments.access_over(&noted, |path| Ok(path.to_owned()));
        assert_eq!(over(CephArguments::default()).expect("as noted"), noted);
        let user = CephArguments { ceph_user: text("client.a"), ..CephArguments::default() };
        let expected = CephAccess { user: text("a"), keyring: None, ..noted.clone() };
        assert_eq!(over(user).expect("another user"), expected, "whose key is another");
        let place = tempfile::tempdir().expect("a directory");
        let file = |name: &str, id: &str| {
            let path = place.path().join(name);
            std::fs::write(&path, format!("fsid = {id}\n")).expect("written");
            CephArguments { ceph_conf: Some(path), ..CephArguments::default() }
        };
        assert_eq!(over(file("copy", "1")).expect("a copy").user, noted.user);
        let refused = [file("other", "2"), CephArguments { ceph_fs: text("other"), ..CephArguments::default() }];
        for (arguments, option) in refused.into_iter().zip(["--ceph-conf", "--ceph-fs"]) {
            assert!(over(arguments).expect_err("another place").summary().starts_with(option), "{option}");
        }
    }

    #[test]
    fn a_configuration_says_which_cluster_it_is() {
        let text = "# fsid = no\n[global]\n fsid = 5A-b ; the id\n mon host = x\n";
        assert_eq!(cluster_in(text).as_deref(), Some("5a-b"));
        assert_eq!(cluster_in("[global]\nmon host = x\nfsid_other = 1\n"), None);
    }
}
