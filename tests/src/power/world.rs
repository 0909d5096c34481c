//! A union under random operations, and the model of what it may show after a power cut at any moment.

use super::file::FileHistory;
use super::names::{NameHistory, Names, Object};
use super::{Random, RecordingDevice};
use crate::Stepper;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Files of the lower branch: path and bytes. Of the second one, a table of the smallest units does not tell all places.
const LOWER: [(&str, usize); 9] = [
    ("one", 40_000),
    ("two", 2_200_000),
    ("three", 5 * 4096),
    ("four", 100),
    ("large", 1_000_001),
    ("d/x", 70_000),
    ("d/y", 30_000),
    ("d/e/z", 50_000),
    ("linked", 20_000),
];
/// Bytes of one of them where it is to have a bitmap of two sectors.
const LARGE: (&str, usize) = ("large", (16 << 20) + 1234);
/// Another name of the last of them.
const LOWER_LINK: &str = "d/linked";

/// What is around a byte that is written after a cut, and must stay.
const AROUND_BYTES: usize = 64 << 10;

/// Operations told of before a state that is not allowed.
const TOLD_MAX: usize = 25;

/// What a mounted union shows: files with their contents, and directories.
pub type Shown = BTreeMap<String, Option<Vec<u8>>>;

/// What is done to a union, and all that follows from it.
pub struct World {
    pub(super) at: PathBuf,
    pub(super) random: Random,
    pub(super) files: Vec<FileHistory>,
    pub(super) names: NameHistory,
    /// files that stay open
    pub(super) open: HashMap<usize, File>,
    /// who writes by the library, where somebody does
    pub(super) library: Option<Stepper>,
    /// the path whose content was changed last
    pub(super) changed: Option<String>,
    /// events before which something was promised
    pub(super) promised: Vec<usize>,
    /// what was done, and the events before it
    pub(super) told: Vec<(usize, String)>,
}

impl World {
    /// Makes the lower branch, and begins with it. The union is mounted at `at`. With `has_large`, one of the files is large.
    ///
    /// # Panics
    /// When a file cannot be made.
    #[must_use]
    pub fn new(seed: u64, has_large: bool, lower: &Path, at: &Path) -> Self {
        let mut random = Random::new(seed);
        let mut names = Names::new();
        let mut files = Vec::new();
        for directory in ["d", "d/e"] {
            fs::create_dir_all(lower.join(directory)).expect("a folder");
            names.insert(directory.to_owned(), Object::Directory);
        }
        for (path, size) in LOWER {
            let content = random.bytes(if has_large && path == LARGE.0 { LARGE.1 } else { size });
            fs::write(lower.join(path), &content).expect("a file");
            names.insert(path.to_owned(), Object::File(files.len()));
            files.push(FileHistory::of_lower(&content));
        }
        let (linked, _) = LOWER[LOWER.len() - 1];
        fs::hard_link(lower.join(linked), lower.join(LOWER_LINK)).expect("a link");
        names.insert(LOWER_LINK.to_owned(), Object::File(files.len() - 1));
        Self {
            at: at.to_path_buf(),
            random,
            files,
            names: NameHistory::new(names),
            open: HashMap::new(),
            library: None,
            changed: None,
            promised: Vec::new(),
            told: Vec::new(),
        }
    }

    /// Half of the writes are this process's from here on, which uses the library.
    pub fn write_by(&mut self, library: Stepper) {
        self.library = Some(library);
    }

    /// Closes what is open; the operations are over.
    pub fn close(&mut self) {
        self.open.clear();
        self.library = None;
    }

    /// Everything is on the disk by now.
    pub fn promise_all(&mut self, device: &RecordingDevice) {
        let position = device.position();
        self.promised.push(position);
        self.names.promise_all(position);
        self.files.iter_mut().for_each(|file| file.promise(position));
    }

    /// The numbers of events after which something was promised.
    #[must_use]
    pub fn promised(&self) -> &[usize] {
        &self.promised
    }

    /// Whether the union mounted at `at` may look as it does after a power cut after so many events; how it looks.
    ///
    /// # Errors
    /// What is wrong, and which operations came before.
    pub fn check(&self, at: &Path, position: usize) -> Result<Shown, String> {
        let mut shown = Shown::new();
        let checked = list(at, "", &mut shown).and_then(|()| self.check_shown(at, &shown, position));
        checked.map(|()| shown).map_err(|what| {
            let done: Vec<&(usize, String)> = self.told.iter().filter(|(begun, _)| *begun < position).collect();
            let told: Vec<String> = done[done.len().saturating_sub(TOLD_MAX)..]
                .iter()
                .map(|(begun, what)| format!("  {begun:>6} {what}"))
                .collect();
            format!("{what}\nafter\n{}", told.join("\n"))
        })
    }

    fn check_shown(&self, at: &Path, shown: &Shown, position: usize) -> Result<(), String> {
        let mut known: HashMap<(String, usize), Result<(), String>> = HashMap::new();
        let mut explains = |path: &str, object: Object| match (object, &shown[path]) {
            (Object::Directory, None) => Ok(()),
            (Object::File(file), Some(content)) => {
                let check = || self.files[file].check(content, position);
                known.entry((path.to_owned(), file)).or_insert_with(check).clone()
            }
            _ => Err("it is of another type".to_owned()),
        };
        let paths: BTreeSet<String> = shown.keys().cloned().collect();
        self.names.check(position, &paths, &mut explains)?;
        check_links(at, shown)
    }

    /// Changes a byte of every file of a union that looks so, each at a place of its own: the bytes around must stay.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_use(at: &Path, shown: &Shown, seed: u64) -> Result<(), String> {
        let mut random = Random::new(seed);
        let mut seen = BTreeSet::new();
        for (path, content) in shown.iter().filter_map(|(path, content)| Some((path, content.as_ref()?))) {
            let failed = |error: std::io::Error| format!("{path}: {error}");
            let file = File::options().read(true).write(true).open(at.join(path)).map_err(failed)?;
            if !seen.insert(file.metadata().map_err(failed)?.ino()) || content.is_empty() {
                continue;
            }
            let place = random.below(content.len());
            let byte = !content[place];
            file.write_all_at(&[byte], place as u64).map_err(failed)?;
            let from = place.saturating_sub(AROUND_BYTES);
            let mut found = vec![0; content.len().min(place + AROUND_BYTES) - from];
            file.read_exact_at(&mut found, from as u64).map_err(failed)?;
            let expected = |at: usize| if at == place { byte } else { content[at] };
            if let Some(other) = (0..found.len()).find(|&at| found[at] != expected(from + at)) {
                return Err(format!("{path}: a byte was written at {place}, and that at {} is wrong", from + other));
            }
        }
        Ok(())
    }
}

/// All there is, with the contents of files.
fn list(root: &Path, below: &str, shown: &mut Shown) -> Result<(), String> {
    let failed = |what: &str, error: std::io::Error| format!("{what} cannot be read: {error}");
    for entry in fs::read_dir(root.join(below)).map_err(|error| failed(below, error))? {
        let entry = entry.map_err(|error| failed(below, error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        if entry.file_type().map_err(|error| failed(&path, error))?.is_dir() {
            list(root, &path, shown)?;
            shown.insert(path, None);
        } else {
            let content = fs::read(entry.path()).map_err(|error| failed(&path, error))?;
            shown.insert(path, Some(content));
        }
    }
    Ok(())
}

/// Names of one file have one content.
fn check_links(at: &Path, shown: &Shown) -> Result<(), String> {
    let mut first: HashMap<u64, &String> = HashMap::new();
    for path in shown.iter().filter(|(_, content)| content.is_some()).map(|(path, _)| path) {
        let inode = fs::symlink_metadata(at.join(path)).map_err(|error| format!("{path}: {error}"))?.ino();
        let other = first.entry(inode).or_insert(path);
        if shown[*other] != shown[path] {
            return Err(format!("{path} and {other} have one inode and two contents"));
        }
    }
    Ok(())
}
