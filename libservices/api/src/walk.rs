//! Walks a tree of a layer: every object once, without recursion and with bounded memory.

use crate::{Branch, Error, Held, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId};
use std::collections::VecDeque;
use std::ops::ControlFlow;

/// Most directories one inside the other that a walk enters.
pub const WALK_DEPTH_MAX: usize = 4096;

/// Names that are read at once from a directory near the root, and so many levels are near it; and from those deeper down. All
/// directories on the way down keep the names that they were read with.
const NAMES_NEAR: usize = 1024;
const LEVELS_NEAR: usize = 16;
const NAMES_DEEP: usize = 16;

/// The names of a directory, read piece by piece. Nothing stays open between two pieces.
struct Names {
    read: VecDeque<(Vec<u8>, FileType)>,
    at_once: usize,
    /// where the next piece begins; nothing: the end was reached
    cookie: Option<u64>,
}

impl Names {
    fn new(at_once: usize) -> Self {
        Names { read: VecDeque::new(), at_once, cookie: Some(0) }
    }

    fn next(&mut self, layer: &Branch, directory: NodeId) -> Result<Option<(Vec<u8>, FileType)>> {
        if self.read.is_empty()
            && let Some(mut cookie) = self.cookie.take()
        {
            let opened = Opened::directory(layer, directory)?;
            let (read, at_once) = (&mut self.read, self.at_once);
            let mut is_cut = false;
            layer.readdir(&Caller::ROOT, opened.id(), cookie, &mut |entry| {
                if read.len() == at_once {
                    is_cut = true;
                    return ControlFlow::Break(());
                }
                read.push_back((entry.name.as_bytes().to_vec(), entry.file_type));
                cookie = entry.cookie;
                ControlFlow::Continue(())
            })?;
            self.cookie = is_cut.then_some(cookie);
        }
        Ok(self.read.pop_front())
    }
}

/// Visits the names of one directory, which does not change meanwhile.
///
/// # Errors
/// What listing answers, and what `visit` does, with which it ends.
pub fn each_name(
    layer: &Branch,
    directory: NodeId,
    visit: &mut dyn FnMut(&[u8], FileType) -> Result<()>,
) -> Result<()> {
    let mut names = Names::new(NAMES_NEAR);
    while let Some((name, file_type)) = names.next(layer, directory)? {
        visit(&name, file_type)?;
    }
    Ok(())
}

/// An object that a walk came to, or what kept it from one.
pub type Visited<'a> = Result<(&'a Held, &'a Attributes)>;

/// Visits everything below the directory `from`, whose path is `path`: `visit` is given the path of each object, a slash between two
/// names, and the object; or, for what cannot be looked up or listed or is deeper than [`WALK_DEPTH_MAX`], the error. A directory comes
/// before what is in it, and is not entered where `visit` says so (`false`). Names that come or go meanwhile may be missed.
///
/// # Errors
/// Only what `visit` fails with, which ends the walk.
pub fn walk(
    layer: &Branch,
    from: Held,
    path: &[u8],
    visit: &mut dyn FnMut(&[u8], Visited<'_>) -> Result<bool>,
) -> Result<()> {
    // Each directory on the way down, the length of its path, and its names that are still to come.
    let mut way = vec![(from, path.len(), Names::new(NAMES_NEAR))];
    let mut path = path.to_vec();
    while let Some((directory, length, names)) = way.last_mut() {
        path.truncate(*length);
        let name = match names.next(layer, directory.node()) {
            Ok(Some((name, _))) => name,
            ended => {
                if let Err(error) = ended {
                    let _ = visit(&path, Err(error))?;
                }
                way.pop();
                continue;
            }
        };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&name);
        let found = Name::new(&name).map_err(Error::from);
        let entry = match found.and_then(|name| layer.lookup(&Caller::ROOT, directory.node(), name)) {
            Ok(entry) => entry,
            Err(error) => {
                let _ = visit(&path, Err(error))?;
                continue;
            }
        };
        let held = Held::new(layer, entry.node);
        let enter = visit(&path, Ok((&held, &entry.attributes)))?;
        if !enter || !entry.attributes.is_directory() {
            continue;
        }
        if way.len() == WALK_DEPTH_MAX {
            let too_deep = Error::new(Errno::ENAMETOOLONG, format!("it is below {WALK_DEPTH_MAX} directories"));
            let _ = visit(&path, Err(too_deep))?;
            continue;
        }
        let at_once = if way.len() < LEVELS_NEAR { NAMES_NEAR } else { NAMES_DEEP };
        way.push((held, path.len(), Names::new(at_once)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Libservice, Memory};
    use std::collections::BTreeSet;
    use std::sync::Arc;

    const ROOT: &Caller = &Caller::ROOT;

    fn name(text: &str) -> Name<'_> {
        Name::new(text.as_bytes()).expect("a name")
    }

    #[test]
    fn all_is_visited_once_however_wide_and_deep() {
        let memory: Arc<Memory> = Memory::new();
        let mut expected = BTreeSet::new();
        let mut directory = NodeId::ROOT;
        let mut path = String::new();
        for level in 0..200 {
            let files = if level == 0 { 3000 } else { 40 };
            for file in 0..files {
                let file = format!("f{file}");
                memory.mknod(ROOT, directory, name(&file), FileType::Regular, 0o600, 0).expect("made");
                expected.insert(format!("{path}{file}"));
            }
            directory = memory.mkdir(ROOT, directory, name("d"), 0o700).expect("made").node;
            expected.insert(format!("{path}d"));
            path.push_str("d/");
        }
        let branch: Branch = memory.clone();
        let mut seen = BTreeSet::new();
        walk(&branch, Held::new(&branch, NodeId::ROOT), b"", &mut |path, visited| {
            assert!(visited.is_ok());
            assert!(seen.insert(String::from_utf8(path.to_vec()).expect("text")), "twice");
            Ok(true)
        })
        .expect("visited");
        assert_eq!(seen, expected);
    }

    #[test]
    fn what_is_too_deep_is_told_and_what_is_not_wanted_is_left_out() {
        let memory: Arc<Memory> = Memory::new();
        let mut directory = NodeId::ROOT;
        for _ in 0..WALK_DEPTH_MAX + 5 {
            directory = memory.mkdir(ROOT, directory, name("d"), 0o700).expect("made").node;
        }
        let branch: Branch = memory.clone();
        let (mut objects, mut failures) = (0, 0);
        let mut count = |_: &[u8], visited: Visited<'_>| {
            *if visited.is_ok() { &mut objects } else { &mut failures } += 1;
            Ok(true)
        };
        walk(&branch, Held::new(&branch, NodeId::ROOT), b"", &mut count).expect("visited");
        assert_eq!((objects, failures), (WALK_DEPTH_MAX, 1));
        let mut visits = 0;
        walk(&branch, Held::new(&branch, NodeId::ROOT), b"", &mut |_, _| {
            visits += 1;
            Ok(false)
        })
        .expect("visited");
        assert_eq!(visits, 1);
    }
}
