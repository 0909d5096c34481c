//! Names of a mount that something else is mounted on, in whatever mount namespace.
//!
//! A name whose node gets another number is looked up anew by the kernel, and with the old one goes all that is mounted on it, also
//! where nobody has looked. So who is about to answer another number looks first. Namespaces that no process is in are not seen.

use crate::instance::Instance;
use poolfs_ipc::wire::{MOUNT_SOURCE_PREFIX, MOUNT_TYPE};
use poolfs_libservice::types::{Caller, Name, NodeId};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::os::unix::ffi::OsStringExt;
use std::{fs, io};
use tracing::warn;

/// A line of a mount table, as far as it matters.
struct Line<'a> {
    id: &'a [u8],
    parent: &'a [u8],
    /// Which part of its filesystem is shown.
    root: Vec<u8>,
    place: Vec<u8>,
    is_own: bool,
}

/// Spaces and the like are written as three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                text.push(byte);
                rest = &after[3..];
            }
            None => {
                text.push(first);
                rest = after;
            }
        }
    }
    text
}

fn parse<'a>(line: &'a [u8], source: &[u8]) -> Option<Line<'a>> {
    let mut fields = line.split(|&byte| byte == b' ');
    let (id, parent) = (fields.next()?, fields.next()?);
    let (root, place) = (unescaped(fields.nth(1)?), unescaped(fields.next()?));
    let mut filesystem = fields.skip_while(|&field| field != b"-").skip(1);
    let is_own = filesystem.next()? == MOUNT_TYPE.as_bytes() && unescaped(filesystem.next()?) == source;
    Some(Line { id, parent, root, place, is_own })
}

/// What of `place` is below `directory`, with a slash before it.
fn below<'a>(place: &'a [u8], directory: &[u8]) -> Option<&'a [u8]> {
    if directory == b"/" { Some(place) } else { place.strip_prefix(directory).filter(|rest| rest.starts_with(b"/")) }
}

/// Adds the paths, from the root of the mount of `source` on, on which this table has something mounted.
fn find(table: &[u8], source: &[u8], paths: &mut BTreeSet<Vec<u8>>) {
    let lines: Vec<Line<'_>> = table.split(|&byte| byte == b'\n').filter_map(|line| parse(line, source)).collect();
    let own: HashMap<&[u8], &Line<'_>> = lines.iter().filter(|line| line.is_own).map(|line| (line.id, line)).collect();
    for line in &lines {
        let Some(under) = own.get(line.parent) else { continue };
        let Some(rest) = below(&line.place, &under.place) else { continue };
        let root: &[u8] = if under.root == b"/" { b"" } else { &under.root };
        paths.insert([root, rest].concat());
    }
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
    let lacks =
        |error: &io::Error| matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM));
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
        let mut node = Some(NodeId::ROOT);
        for name in path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()) {
            let found = node.zip(Name::new(name).ok());
            let found = found.and_then(|(node, name)| self.layer().lookup(&Caller::ROOT, node, name).ok());
            node = found.map(|entry| entry.node);
            held.extend(node);
        }
        held.into_iter().for_each(|node| self.layer().forget(node, 1));
        node
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
        let failed = |errno: Errno| unless_ended(Err(errno.into()));
        for errno in [Errno::NOENT, Errno::SRCH, Errno::INVAL] {
            assert_eq!(failed(errno).expect("it has ended"), b"");
        }
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert_eq!(Errno::from_io_error(&failed(errno).expect_err("unknown")), Some(errno));
        }
        assert_eq!(unless_ended(Ok(b"line".to_vec())).expect("read"), b"line");
    }
}
