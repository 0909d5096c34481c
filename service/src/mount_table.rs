//! Parser of mount tables (`/proc/PID/mountinfo`): what is mounted where in a process's mount namespace, as far as the process
//! can reach it from its root.

use std::collections::HashMap;

/// What the kernel writes behind the path of something that was removed. No path has two slashes in a row.
const REMOVED_MARK: &[u8] = b"//deleted";

/// A mount, as far as it matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount<'a> {
    id: &'a [u8],
    parent: &'a [u8],
    /// Device number of what is shown, `MAJOR:MINOR`.
    pub(crate) device: &'a [u8],
    /// Which part of its filesystem is shown.
    pub(crate) root: Vec<u8>,
    /// Where, from the process's root on.
    pub(crate) place: Vec<u8>,
    /// Nothing can be changed by this mount.
    pub(crate) is_read_only: bool,
    /// By it no symbolic link is followed (`nosymfollow`).
    pub(crate) has_no_links: bool,
    /// The filesystem's type.
    pub(crate) file_system: &'a [u8],
    /// What it says it was made from.
    pub(crate) source: Vec<u8>,
}

impl Mount<'_> {
    /// Its number, as `stx_mnt_id` has it.
    pub(crate) fn number(&self) -> Option<u64> {
        std::str::from_utf8(self.id).ok()?.parse().ok()
    }
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

fn parse(line: &[u8]) -> Option<Mount<'_>> {
    let has = |options: &[u8], wanted: &[u8]| options.split(|&byte| byte == b',').any(|option| option == wanted);
    let mut fields = line.split(|&byte| byte == b' ');
    let (id, parent, device) = (fields.next()?, fields.next()?, fields.next()?);
    let (root, place, options) = (unescaped(fields.next()?), unescaped(fields.next()?), fields.next()?);
    let mut filesystem = fields.skip_while(|&field| field != b"-").skip(1);
    let (file_system, source) = (filesystem.next()?, unescaped(filesystem.next()?));
    let is_read_only = has(options, b"ro") || filesystem.next().is_some_and(|options| has(options, b"ro"));
    let has_no_links = has(options, b"nosymfollow");
    Some(Mount { id, parent, device, root, place, is_read_only, has_no_links, file_system, source })
}

/// What of `place` is below `directory`, with a slash before it.
fn below<'a>(place: &'a [u8], directory: &[u8]) -> Option<&'a [u8]> {
    if directory == b"/" { Some(place) } else { place.strip_prefix(directory).filter(|rest| rest.starts_with(b"/")) }
}

/// The mounts of a table.
pub(crate) struct MountTable<'a> {
    mounts: Vec<Mount<'a>>,
    by_id: HashMap<&'a [u8], usize>,
    /// Those on each of them.
    children: HashMap<&'a [u8], Vec<usize>>,
}

impl<'a> MountTable<'a> {
    /// Of the kernel's text. Lines that are none are left out.
    pub(crate) fn parse(text: &'a [u8]) -> Self {
        let mounts: Vec<Mount<'a>> = text.split(|&byte| byte == b'\n').filter_map(parse).collect();
        let by_id = mounts.iter().enumerate().map(|(at, mount)| (mount.id, at)).collect();
        let mut children: HashMap<&[u8], Vec<usize>> = HashMap::new();
        for (at, mount) in mounts.iter().enumerate() {
            children.entry(mount.parent).or_default().push(at);
        }
        Self { mounts, by_id, children }
    }

    /// All of them.
    pub(crate) fn mounts(&self) -> &[Mount<'a>] {
        &self.mounts
    }

    fn on(&self, mount: &Mount<'a>) -> impl Iterator<Item = &Mount<'a>> {
        self.children.get(mount.id).into_iter().flatten().map(|&at| &self.mounts[at]).filter(|on| on.id != on.parent)
    }

    /// That in which the process's root is, if it is all of it: a root that is a directory in a mount does not show that one.
    pub(crate) fn root(&self) -> Option<&Mount<'a>> {
        let is_first = |mount: &&Mount<'a>| mount.id == mount.parent || !self.by_id.contains_key(mount.parent);
        self.mounts.iter().find(|mount| mount.place == b"/" && is_first(mount))
    }

    /// What is mounted over a mount, in its place.
    pub(crate) fn over(&self, mount: &Mount<'a>) -> Option<&Mount<'a>> {
        self.on(mount).find(|other| other.place == mount.place)
    }

    /// Whether a path leads to the mount, and nothing that is mounted over it or over one of the directories that lead there hides
    /// it.
    pub(crate) fn is_reachable(&self, mount: &Mount<'a>) -> bool {
        if self.over(mount).is_some() {
            return false;
        }
        let mut here = mount;
        // No way is longer than the table.
        for _ in 0..self.mounts.len() {
            let above = self.by_id.get(here.parent).map(|&at| &self.mounts[at]).filter(|above| above.id != here.id);
            let Some(above) = above else { return true };
            let hides = |other: &Mount<'_>| {
                other.id != here.id && (other.place == here.place || below(&here.place, &other.place).is_some())
            };
            if self.on(above).any(hides) {
                return false;
            }
            here = above;
        }
        false
    }

    /// The paths on which something is mounted in the mounts that are `own`, from their filesystem's root on. Nothing for one that
    /// is not below what it is mounted on: directories were renamed while the kernel wrote the table.
    pub(crate) fn mounted_on(&self, own: impl Fn(&Mount<'a>) -> bool) -> impl Iterator<Item = Option<Vec<u8>>> {
        self.mounts.iter().filter(move |mount| own(mount)).flat_map(|under| {
            let root: &[u8] = if under.root == b"/" { b"" } else { &under.root };
            // What covers a mount is on the name of its root, wherever that is shown. The filesystem's root has no name, and neither has
            // what was removed.
            let is_nameless = root.is_empty() || root.ends_with(REMOVED_MARK);
            let on = self.on(under).filter(move |on| !is_nameless || on.place != under.place);
            on.map(move |on| {
                let rest = if on.place == under.place { Some(&b""[..]) } else { below(&on.place, &under.place) };
                Some([root, rest?].concat())
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reachable(text: &str) -> Vec<String> {
        let table = MountTable::parse(text.as_bytes());
        let all = table.mounts().iter().filter(|mount| mount.source == b"x" && table.is_reachable(mount));
        all.map(|mount| String::from_utf8(mount.place.clone()).expect("as given")).collect()
    }

    #[test]
    fn fields_are_found_behind_any_number_of_others() {
        let text =
            "31 30 0:60 /a\\040b /srv rw,noatime shared:1 master:2 - tmpfs what\\134 ro,size=1\nnonsense\n1 2 3\n";
        let table = MountTable::parse(text.as_bytes());
        let [mount] = table.mounts() else { panic!("{:?}", table.mounts()) };
        let expected = Mount {
            id: b"31",
            parent: b"30",
            device: b"0:60",
            root: b"/a b".into(),
            place: b"/srv".into(),
            is_read_only: true,
            has_no_links: false,
            file_system: b"tmpfs",
            source: b"what\\".into(),
        };
        assert_eq!(*mount, expected);
        assert!(!parse(b"1 2 3:4 / / rw,rox - t s rw").expect("a line").is_read_only);
        assert!(parse(b"1 2 3:4 / / nodev,ro - t s rw").expect("a line").is_read_only);
        assert!(parse(b"1 2 3:4 / / rw,nosymfollow - t s rw").expect("a line").has_no_links);
        assert_eq!(parse(b"17 2 3:4 / / rw - t s rw").expect("a line").number(), Some(17));
    }

    #[test]
    fn what_is_covered_is_not_reached() {
        const ROOT: &str = "1 0 8:1 / / rw - ext4 disk rw\n2 1 0:9 / /srv/x rw - t x rw\n";
        assert_eq!(reachable(ROOT), ["/srv/x"]);
        assert_eq!(reachable(&format!("{ROOT}3 2 0:8 / /srv/x/below rw - t other rw\n")), ["/srv/x"]);
        assert_eq!(reachable(&format!("{ROOT}3 2 0:8 / /srv/x rw - t other rw\n")), [""; 0], "its root");
        assert_eq!(reachable(&format!("{ROOT}3 1 0:8 / /srv rw - t other rw\n")), [""; 0], "a directory above it");
        assert_eq!(reachable(&format!("{ROOT}3 1 0:8 / /srv/xy rw - t other rw\n")), ["/srv/x"]);
        assert_eq!(reachable(&format!("{ROOT}3 1 0:8 / / rw - t other rw\n")), [""; 0], "everything");
        assert_eq!(reachable(&format!("{ROOT}3 2 0:9 / /srv/x rw - t x rw\n")), ["/srv/x"], "by itself");
    }

    #[test]
    fn the_root_is_the_mount_that_is_on_none_of_the_others() {
        let root = |text: &str| MountTable::parse(text.as_bytes()).root().and_then(Mount::number);
        assert_eq!(root("3 2 0:8 / / rw - t over rw\n2 1 8:1 / / rw - ext4 disk rw\n"), Some(2));
        assert_eq!(root("1 1 0:2 / / rw - rootfs rootfs rw\n"), Some(1), "the first of all");
        assert_eq!(root("5 4 0:8 / /srv rw - t x rw\n"), None, "below a directory");
    }

    fn mounted_on(mounts: &str) -> Vec<String> {
        let text = format!("1 0 8:1 / / rw - ext4 disk rw\n{mounts}");
        let table = MountTable::parse(text.as_bytes());
        let paths = table.mounted_on(|mount| mount.source == b"x");
        paths.map(|path| String::from_utf8(path.expect("below it")).expect("as given")).collect()
    }

    #[test]
    fn what_covers_a_part_is_on_the_name_of_that_part() {
        const WHOLE: &str = "2 1 0:9 / /srv/x rw - t x rw\n";
        const PART: &str = "3 1 0:9 /d/f /other rw - t x rw\n";
        assert_eq!(mounted_on(&format!("{WHOLE}4 2 0:8 / /srv/x rw - t y rw\n")), [""; 0], "all of it");
        assert_eq!(mounted_on(&format!("{WHOLE}{PART}")), [""; 0], "nothing is on it");
        assert_eq!(mounted_on(&format!("{WHOLE}{PART}4 3 0:8 / /other rw - t y rw\n")), ["/d/f"]);
        assert_eq!(
            mounted_on(&format!("{WHOLE}{PART}4 3 0:9 /g /other rw - t x rw\n5 4 0:8 / /other rw - t y rw\n")),
            ["/d/f", "/g"]
        );
        assert_eq!(mounted_on(&format!("{PART}4 3 0:8 / /other/below rw - t y rw\n")), ["/d/f/below"]);
        assert_eq!(
            mounted_on("3 1 0:9 /d / rw - t x rw\n4 3 0:8 / / rw - t y rw\n"),
            ["/d"],
            "a part that is the root"
        );
        assert_eq!(mounted_on("3 1 0:9 / / rw - t x rw\n4 3 0:8 / / rw - t y rw\n"), [""; 0], "all of it is the root");
        let removed = "3 1 0:9 /d/f//deleted /other rw - t x rw\n4 3 0:8 / /other rw - t y rw\n";
        assert_eq!(mounted_on(removed), [""; 0], "it has no name any more");
    }

    #[test]
    fn a_table_that_goes_in_circles_ends() {
        assert_eq!(reachable("1 1 0:9 / / rw - t x rw\n"), ["/"]);
        assert_eq!(reachable("1 2 0:9 / /a rw - t x rw\n2 1 0:9 / /b rw - t y rw\n"), [""; 0]);
    }
}
