//! The sound branches that inputs begin from, and the directory in memory in which they are laid out.

use super::tree::{self, Inodes, Picture};
use super::{CACHE_BYTES, ROOT, WITNESS};
use poolfs_libservice::types::{Name, NodeId, OpenFlags, RenameFlags};
use poolfs_libservice::{Branch, Durability, Held};
use poolfs_service::stack::{Stack, StackBuilder};
use poolfs_service_protocol::{StackSpec, Storage, UpperFormat, kept_directory};
use rustix::fs::lstat;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::fs::{self, DirBuilder};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, symlink};
use std::path::{Path, PathBuf};

pub(super) const POOL: &str = "pool";
const FORMATS: [UpperFormat; 3] = [UpperFormat::Sparse, UpperFormat::BcowPerformance, UpperFormat::BcowSpace];

/// Files of the lower branch and their bytes.
const FILES: [(&str, usize); 5] =
    [("small", 9000), ("large", 1 << 20), ("linked", 40_000), ("first", 9000), ("directory/below", 30_000)];

/// What a sound branch is.
#[derive(Clone, Copy)]
enum State {
    /// Its union has ended in good order.
    Ended,
    /// Its service has died, and what it had accepted waits.
    Died,
    /// That was brought to disk, but not all of it could be made good: there is a journal.
    Journaled,
}

const STATES: [State; 3] = [State::Ended, State::Died, State::Journaled];

/// The directory, in which `upper` is what an input edits.
pub(super) struct Ground {
    top: PathBuf,
}

impl Drop for Ground {
    fn drop(&mut self) {
        self.clear();
        let _ = fs::remove_dir_all(&self.top);
    }
}

impl Ground {
    pub(super) fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let place = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let top = place.canonicalize().expect("there").join(format!("poolfs-hostile-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&top).expect("a new directory");
        let mut ground = Self { top };
        ground.make_witness();
        let lower = ground.lower();
        fs::create_dir_all(lower.join("directory/deeper")).expect("made");
        FILES.iter().for_each(|(name, size)| fs::write(lower.join(name), vec![7; *size]).expect("room"));
        fs::hard_link(lower.join("linked"), lower.join("other")).expect("linked");
        symlink("small", lower.join("link")).expect("linked");
        for format in FORMATS {
            ground.make_sound(format);
        }
        ground
    }

    pub(super) fn upper(&self) -> PathBuf {
        self.top.join("upper")
    }

    pub(super) fn lower(&self) -> PathBuf {
        self.top.join("lower")
    }

    pub(super) fn run(&self) -> PathBuf {
        self.top.join("run")
    }

    /// An empty upper branch.
    pub(super) fn above(&self) -> PathBuf {
        self.top.join("above")
    }

    pub(super) fn outside(&self) -> PathBuf {
        self.top.join("witness")
    }

    /// Where what a dead service has left is mounted.
    pub(super) fn state(&self) -> PathBuf {
        kept_directory(&self.run(), POOL).join("7")
    }

    pub(super) fn witness(&self) -> Picture {
        Picture::of(&self.outside())
    }

    fn make_witness(&self) {
        let outside = self.outside();
        fs::create_dir_all(outside.join("directory")).expect("made");
        let name = std::str::from_utf8(WITNESS).expect("text");
        for path in ["secret", "directory/secret", name, "ledger", "open", "format"] {
            fs::write(outside.join(path), WITNESS.repeat(4000)).expect("room");
        }
    }

    fn template(&self, format: UpperFormat, state: State) -> PathBuf {
        self.top.join(format!("{format}-{}", state as u8))
    }

    /// Makes the three sound branches of a format.
    fn make_sound(&mut self, format: UpperFormat) {
        let storage = Storage { format, size_bytes: None };
        let upper = self.upper();
        let spec = |lowers| StackSpec::Union { upper: upper.clone(), lowers, storage, immutable_lowers: false };
        fs::create_dir_all(self.upper()).expect("made");
        let builder = self.builder();
        let stack = builder.build(&spec(vec![self.lower()])).expect("sound");
        change_all(&stack);
        drop(stack);
        let stack = builder.build(&spec(vec![self.lower()])).expect("sound");
        tree::copy(&self.upper(), &self.template(format, State::Ended).join("upper"));
        write_unsynced(&stack.layer());
        let died = self.template(format, State::Died);
        let inodes = tree::copy(&self.upper(), &died.join("upper"));
        tree::copy(&kept_directory(&self.run(), POOL).join("1"), &died.join("state"));
        fix_state(&died.join("state"), &died.join("upper"), &inodes);
        drop((stack, builder));
        // Without its lower branch nothing can be made good.
        self.lay_template(&died);
        let builder = self.builder();
        let without = self.top.join("without");
        fs::create_dir_all(&without).expect("made");
        drop(builder.build(&spec(vec![without])).expect("sound"));
        drop(builder);
        let journaled = self.template(format, State::Journaled);
        tree::copy(&self.upper(), &journaled.join("upper"));
        assert!(journaled.join("upper/.poolfs/journal-0").exists(), "there is no journal");
        self.clear();
    }

    fn builder(&self) -> StackBuilder {
        DirBuilder::new().mode(0o700).recursive(true).create(self.run()).expect("made");
        let builder = StackBuilder::new(CACHE_BYTES * 8, Some(kept_directory(&self.run(), POOL))).expect("a cache");
        builder.with_states_of(&self.run()).expect("its own")
    }

    /// Lays the sound branch of that number.
    pub(super) fn lay(&mut self, number: u8) {
        let (format, state) = (FORMATS[usize::from(number % 3)], STATES[usize::from(number / 3 % 3)]);
        self.lay_template(&self.template(format, state));
    }

    fn lay_template(&mut self, template: &Path) {
        self.clear();
        let inodes = tree::copy(&template.join("upper"), &self.upper());
        DirBuilder::new().mode(0o700).recursive(true).create(self.state()).expect("made");
        fs::create_dir_all(self.above()).expect("made");
        if template.join("state").exists() {
            self.mount("poolfs-memory", &self.state(), "tmpfs", MountFlags::NODEV, Some(c"mode=0700"));
            tree::copy(&template.join("state"), &self.state());
            fix_state(&self.state(), &self.upper(), &inodes);
        }
    }

    pub(super) fn mount(
        &self,
        source: impl AsRef<Path>,
        target: &Path,
        kind: &str,
        flags: MountFlags,
        options: Option<&std::ffi::CStr>,
    ) {
        // On what is no directory, or is gone, nothing is mounted.
        let _ = mount(source.as_ref(), target, kind, flags, options);
    }

    /// Where something is mounted below the ground: what was mounted may have been moved since, with a directory above it.
    fn mounted(&self) -> Vec<PathBuf> {
        let table = fs::read_to_string("/proc/self/mounts").expect("readable");
        let places = table.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
        places.filter(|place| place.starts_with(&self.top)).collect()
    }

    /// Whether a path is of the branch or the state, and leads nowhere else.
    pub(super) fn is_own(&self, path: &Path) -> bool {
        if path == self.upper() {
            return true;
        }
        let real = path.parent().and_then(|parent| parent.canonicalize().ok());
        let Some(real) = real.zip(path.file_name()).map(|(parent, name)| parent.join(name)) else { return false };
        let is_mounted = self.mounted().iter().any(|at| *at != self.state() && real.starts_with(at));
        !is_mounted && (real.starts_with(self.upper()) || real.starts_with(self.state()))
    }

    /// Removes what an input was about.
    pub(super) fn clear(&mut self) {
        for at in self.mounted().iter().rev() {
            let _ = unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
        for path in [self.upper(), self.run(), self.above()] {
            if path.exists() {
                fs::remove_dir_all(&path).expect("removed");
            }
        }
    }
}

/// The state is that of this copy of its branch, and of the files of that.
fn fix_state(state: &Path, upper: &Path, inodes: &Inodes) {
    for path in tree::paths(state) {
        let name = path.file_name().expect("a name").as_bytes().to_vec();
        let bytes = fs::read(&path).expect("there");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("opened");
        let put = |at: usize, new: &[u8]| file.write_all_at(new, at as u64).expect("room");
        if name.starts_with(b"branch-") {
            put(16, &lstat(upper).expect("there").st_ino.to_le_bytes());
            // When it was made is not known.
            put(36, &[0; 4]);
        } else if name == b"ledger" {
            let word = |bytes: &[u8], at: usize| u64::from_ne_bytes(bytes[at * 8..][..8].try_into().expect("eight"));
            for slot in 0..word(&bytes, 1) as usize {
                let at = 8 + slot * 10;
                if let Some(inode) = inodes.get(&word(&bytes, at + 3)).filter(|_| word(&bytes, at) != 0) {
                    put((at + 3) * 8, &inode.to_ne_bytes());
                    // Its copy was made before that.
                    put((at + 8) * 8, &(1u64 << 40).to_ne_bytes());
                }
            }
        }
    }
}

fn name(text: &str) -> Name<'_> {
    Name::new(text.as_bytes()).expect("a name")
}

fn lookup(union: &Branch, parent: NodeId, text: &str) -> Held {
    Held::new(union, union.lookup(ROOT, parent, name(text)).expect("there").node)
}

/// Changes of every kind, all on disk.
fn change_all(stack: &Stack) {
    let union = stack.layer();
    for (path, size) in FILES.into_iter().filter(|(path, _)| *path != "first") {
        let parts: Vec<&str> = path.split('/').collect();
        let parent = (parts.len() > 1).then(|| lookup(&union, NodeId::ROOT, parts[0]));
        let parent = parent.as_ref().map_or(NodeId::ROOT, Held::node);
        let file = lookup(&union, parent, parts[parts.len() - 1]);
        let handle = union.open(ROOT, file.node(), OpenFlags::READ_WRITE).expect("opened");
        for at in (100..size as u64).step_by(300_000) {
            let _ = union.write(ROOT, handle, at, b"new").expect("room");
        }
        union.fsync(ROOT, handle, Durability::All).expect("room");
        union.release(handle);
    }
    let made = Held::new(&union, union.mkdir(ROOT, NodeId::ROOT, name("made"), 0o755).expect("made").node);
    let to = RenameFlags::empty();
    union.rename(ROOT, NodeId::ROOT, name("small"), made.node(), name("moved"), to).expect("renamed");
    union.rename(ROOT, NodeId::ROOT, name("directory"), made.node(), name("directory"), to).expect("renamed");
    let again = Held::new(&union, union.mkdir(ROOT, NodeId::ROOT, name("directory"), 0o755).expect("made").node);
    let link = union.symlink(ROOT, again.node(), name("link"), b"../made").expect("made");
    union.forget(link.node, 1);
    union.unlink(ROOT, NodeId::ROOT, name("link")).expect("removed");
    union.sync().expect("room");
}

/// What a service has accepted that dies.
fn write_unsynced(union: &Branch) {
    for (text, at) in [("first", 5000), ("large", 5000), ("large", 705_000), ("linked", 20_000)] {
        let file = lookup(union, NodeId::ROOT, text);
        let handle = union.open(ROOT, file.node(), OpenFlags::READ_WRITE).expect("opened");
        let _ = union.write(ROOT, handle, at, b"accepted").expect("room");
        union.release(handle);
    }
    let (entry, handle) = union.create(ROOT, NodeId::ROOT, name("new"), 0o644, OpenFlags::READ_WRITE).expect("made");
    let _ = union.write(ROOT, handle, 0, &[3; 50_000]).expect("room");
    union.release(handle);
    union.forget(entry.node, 1);
}
