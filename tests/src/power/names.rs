//! The names that may exist after a power cut.
//!
//! Changes of names reach the disk in their order, as ext4 keeps it: what is there is the state between two operations, or an operation in
//! part.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Object {
    /// a directory
    Directory,
    /// a file, by its number
    File(usize),
}

/// All names, by their paths.
pub type Names = BTreeMap<String, Object>;

/// The names as they were after each operation.
pub struct NameHistory {
    /// with the events before the operation
    states: Vec<(usize, Names)>,
    /// from an event on, a state or a later one is on the disk
    promises: Vec<(usize, usize)>,
    of_directories: HashMap<String, usize>,
    of_files: HashMap<usize, usize>,
}

/// The directory of a path.
pub fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl NameHistory {
    /// Names that were there from the beginning.
    pub fn new(names: Names) -> Self {
        Self {
            states: vec![(0, names)],
            promises: vec![(0, 0)],
            of_directories: HashMap::new(),
            of_files: HashMap::new(),
        }
    }

    /// Those of now.
    pub fn now(&self) -> &Names {
        &self.states.last().expect("at least one").1
    }

    /// An operation that began after so many events has given these paths what is said.
    pub fn change(&mut self, begun: usize, changes: &[(&str, Option<Object>)]) {
        let mut names = self.now().clone();
        let state = self.states.len();
        for (path, object) in changes {
            self.of_directories.insert(parent(path).to_owned(), state);
            let before = match object {
                Some(object) => names.insert((*path).to_owned(), *object),
                None => names.remove(*path),
            };
            for object in before.iter().chain(object) {
                if let Object::File(file) = object {
                    self.of_files.insert(*file, state);
                }
            }
        }
        self.states.push((begun, names));
    }

    /// An operation that began after so many events has moved a directory, with all that is below it.
    pub fn move_directory(&mut self, begun: usize, from: &str, to: &str) {
        let mut names = self.now().clone();
        let state = self.states.len();
        let is_moved =
            |path: &String| path.strip_prefix(from).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let moved: Vec<String> = names.keys().filter(|path| is_moved(path)).cloned().collect();
        for path in moved {
            let place = format!("{to}{}", &path[from.len()..]);
            // The fsync of something below says nothing of it.
            if let Some(changed) = self.of_directories.remove(&path) {
                self.of_directories.insert(place.clone(), changed);
            }
            let object = names.remove(&path);
            names.extend(object.map(|object| (place, object)));
        }
        for directory in [parent(from), parent(to)] {
            self.of_directories.insert(directory.to_owned(), state);
        }
        self.states.push((begun, names));
    }

    /// All names are on the disk from so many events on.
    pub fn promise_all(&mut self, position: usize) {
        self.promises.push((position, self.states.len() - 1));
    }

    /// Those in a directory are.
    pub fn promise_directory(&mut self, position: usize, directory: &str) {
        self.promises.extend(self.of_directories.get(directory).map(|&state| (position, state)));
    }

    /// Those of a file are.
    pub fn promise_file(&mut self, position: usize, file: usize) {
        self.promises.extend(self.of_files.get(&file).map(|&state| (position, state)));
    }

    /// Whether these names may be there when the power is cut after so many events, where `explains` says what is wrong with the object at a path.
    ///
    /// # Errors
    /// What is wrong with them, by the state that is nearest.
    pub fn check(
        &self,
        position: usize,
        shown: &BTreeSet<String>,
        explains: &mut dyn FnMut(&str, Object) -> Result<(), String>,
    ) -> Result<(), String> {
        let promised = self.promises.iter().filter(|(from, _)| *from <= position).map(|(_, state)| *state);
        let first = promised.max().unwrap_or(0);
        let last = self.states.iter().rposition(|(begun, _)| *begun < position).unwrap_or(0).max(first);
        let mut wrong = Vec::new();
        for state in first..=last {
            let (before, after) = (&self.states[state].1, &self.states[(state + 1).min(last)].1);
            let faults = faults(before, after, shown, explains);
            if faults.is_empty() {
                return Ok(());
            }
            wrong.push((faults.len(), state, faults));
        }
        wrong.sort();
        let (_, state, faults) = wrong.remove(0);
        Err(format!("names of {first}..={last}, nearest is {state}:\n  {}", faults.join("\n  ")))
    }
}

/// What keeps the names shown from being those before an operation, those after it, or some of either.
fn faults(
    before: &Names,
    after: &Names,
    shown: &BTreeSet<String>,
    explains: &mut dyn FnMut(&str, Object) -> Result<(), String>,
) -> Vec<String> {
    let mut faults = Vec::new();
    let mut found = BTreeSet::new();
    let paths: BTreeSet<&String> = before.keys().chain(after.keys()).chain(shown).collect();
    for path in paths {
        let allowed = [before.get(path).copied(), after.get(path).copied()];
        if !shown.contains(path) {
            if !allowed.contains(&None) {
                faults.push(format!("{path} is missing"));
            }
            continue;
        }
        let mut reasons = Vec::new();
        let mut is_explained = false;
        for object in allowed.into_iter().flatten() {
            match explains(path, object) {
                Ok(()) => {
                    is_explained = true;
                    if let Object::File(file) = object {
                        found.insert(file);
                    }
                }
                Err(reason) => reasons.push(format!("as {object:?}: {reason}")),
            }
        }
        if !is_explained {
            reasons.dedup();
            faults
                .push(format!("{path} {}", if reasons.is_empty() { "is too many".into() } else { reasons.join("; ") }));
        }
    }
    let files = |names: &Names| -> BTreeSet<usize> {
        names.values().filter_map(|object| if let Object::File(file) = object { Some(*file) } else { None }).collect()
    };
    for lost in files(before).intersection(&files(after)).filter(|file| !found.contains(file)) {
        faults.push(format!("file {lost} is under none of its names"));
    }
    faults
}
