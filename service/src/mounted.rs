//! Detects names of the instance's mount on which something else is mounted, in any mount namespace.
//!
//! If a name's node gets another number, the kernel looks the name up anew, and everything mounted on the old node is unmounted,
//! also where nobody has looked. So a request that is about to answer another number checks first. Namespaces without a process
//! are not seen.

use crate::instance::Instance;
use crate::mount_table::{Mount, MountTable};
use poolfs_ipc::wire::{MOUNT_SOURCE_PREFIX, MOUNT_TYPE};
use poolfs_libservice::types::{Caller, Errno, Name, NodeId};
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStringExt;
use std::{fs, io};
use tracing::warn;

/// Adds the paths, from the root of the mount of `source` on, on which this table has something mounted.
fn find(table: &[u8], source: &[u8], paths: &mut BTreeSet<Vec<u8>>) {
    let table = MountTable::parse(table);
    let is_own = |mount: &Mount<'_>| mount.file_system == MOUNT_TYPE.as_bytes() && mount.source == source;
    paths.extend(table.mounted_on(is_own).flatten());
}

/// The paths on which something is mounted where any process could see it.
fn paths(instance: &str) -> io::Result<BTreeSet<Vec<u8>>> {
    let source = format!("{MOUNT_SOURCE_PREFIX}{instance}");
    let mut paths = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for process in fs::read_dir("/proc")? {
        let process = process?.path();
        if !process.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit)) {
            continue;
        }
        // A process shows what it could reach from its root.
        let link = |name: &str| fs::read_link(process.join(name)).map(|link| link.into_os_string().into_vec());
        let (Ok(namespace), Ok(root)) = (link("ns/mnt"), link("root")) else { continue };
        if seen.insert((namespace, root)) {
            find(&unless_ended(fs::read(process.join("mountinfo")))?, source.as_bytes(), &mut paths);
        }
    }
    Ok(paths)
}

/// The mount table of a process; one that has ended meanwhile shows nothing any more. What cannot be read for want of descriptors or
/// memory may show anything.
fn unless_ended(table: io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    let lacks = |error: &io::Error| {
        error
            .raw_os_error()
            .is_some_and(|number| [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM].contains(&Errno::from_raw(number)))
    };
    table.or_else(|error| if lacks(&error) { Err(error) } else { Ok(Vec::new()) })
}

impl Instance {
    /// Whether something is mounted on one of the names of a file, or that cannot be found out. Takes a moment that grows with the
    /// number of processes.
    pub(crate) fn is_covered(&self, node: NodeId) -> bool {
        self.may_have_mount(|path| self.node_at(path) == Some(node))
    }

    /// The same of one name of a directory.
    pub(crate) fn is_mounted_on(&self, parent: NodeId, name: &[u8]) -> bool {
        self.may_have_mount(|path| match path.iter().rposition(|&byte| byte == b'/') {
            Some(at) => path[at + 1..] == *name && self.node_at(&path[..at]) == Some(parent),
            None => false,
        })
    }

    fn may_have_mount(&self, is_it: impl Fn(&[u8]) -> bool) -> bool {
        match paths(self.name()) {
            Ok(paths) => paths.iter().any(|path| is_it(path)),
            Err(error) => {
                warn!(instance = self.name(), %error, "what is mounted where cannot be found out");
                true
            }
        }
    }

    /// What has this path from the root on.
    fn node_at(&self, path: &[u8]) -> Option<NodeId> {
        let mut held = Vec::new();
        let node = self.hold_path(path, &mut held).ok();
        held.into_iter().for_each(|node| self.layer().forget(node, 1));
        node
    }

    /// What has this name in a directory at this moment; no reference is kept.
    ///
    /// # Errors
    /// Those of the layers.
    pub(crate) fn peek_name(&self, directory: NodeId, name: &[u8]) -> Result<NodeId, Errno> {
        let found = self.layer().lookup(&Caller::ROOT, directory, Name::new(name)?);
        let node = found.map_err(|error| error.errno())?.node;
        self.layer().forget(node, 1);
        Ok(node)
    }

    /// What has this path from the root on. Each node on the way goes to `held`, which the caller gives back.
    ///
    /// # Errors
    /// Those of the layers.
    pub(crate) fn hold_path(&self, path: &[u8], held: &mut Vec<NodeId>) -> Result<NodeId, Errno> {
        let mut node = NodeId::ROOT;
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let entry = self.layer().lookup(&Caller::ROOT, node, Name::new(name)?).map_err(|error| error.errno())?;
            node = entry.node;
            held.push(node);
        }
        Ok(node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
20 1 8:1 / / rw - ext4 /dev/vda rw
30 20 0:50 / /srv/a\\040b rw - fuse.poolfs poolfs:x rw
31 30 0:60 / /srv/a\\040b/tmp/t rw shared:1 - tmpfs tmpfs rw
32 30 8:1 /etc/hosts /srv/a\\040b/etc/hosts rw - ext4 /dev/vda rw
33 31 0:61 / /srv/a\\040b/tmp/t/u rw - tmpfs tmpfs rw
34 20 0:50 /usr/lib /lib rw - fuse.poolfs poolfs:x rw
35 34 0:62 / /lib/python rw - tmpfs tmpfs rw
36 20 0:51 / /other rw - fuse.poolfs poolfs:y rw
37 36 0:63 / /other/z rw - tmpfs tmpfs rw
nonsense
";

    fn found(table: &str) -> Vec<String> {
        let mut paths = BTreeSet::new();
        find(table.as_bytes(), b"poolfs:x", &mut paths);
        paths.into_iter().map(|path| String::from_utf8(path).expect("as above")).collect()
    }

    #[test]
    fn what_is_mounted_on_the_mount_itself_is_found_by_its_path_in_it() {
        assert_eq!(found(TABLE), ["/etc/hosts", "/tmp/t", "/usr/lib/python"]);
    }

    #[test]
    fn the_root_of_a_container_is_a_mount_too() {
        let table = "5 1 0:50 / / rw - fuse.poolfs poolfs:x rw\n6 5 0:7 / /proc rw - proc proc rw\n";
        assert_eq!(found(table), ["/proc"]);
    }

    #[test]
    fn who_has_ended_shows_nothing_and_what_cannot_be_read_may_show_anything() {
        let failed = |errno: Errno| unless_ended(Err(io::Error::from_raw_os_error(errno.raw())));
        for errno in [Errno::ENOENT, Errno::ESRCH, Errno::EINVAL] {
            assert_eq!(failed(errno).expect("it has ended"), b"");
        }
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM] {
            assert_eq!(failed(errno).expect_err("unknown").raw_os_error(), Some(errno.raw()));
        }
        assert_eq!(unless_ended(Ok(b"line".to_vec())).expect("read"), b"line");
    }
}
