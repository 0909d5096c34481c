//! Programs that the kernel maps from the cache, while their files are changed in every way by both paths.
//!
//! Each mapping shows what the file is or what it was, the lower branch stays unchanged, and so do mounts over the files.

use poolfs_tests::{Mounted, Pool, Stepper, Way, checksum, compile, hash, isolated};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const PAGE: usize = 4096;
const STEPS: usize = 300;
const LENGTH_MAX: usize = 40 * PAGE;
/// Descriptors that this test keeps open.
const OPEN_MAX: usize = 6;

/// A small deterministic generator (Marsaglia's xorshift64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

/// A file, whatever its names are.
struct Object {
    /// What it is below.
    old: Vec<u8>,
    now: Vec<u8>,
    /// Something is mounted on one of its names.
    is_covered: bool,
    /// Its length has changed: who mapped it may find nothing behind its end.
    resized: bool,
}

/// A process that has mapped a file.
struct Mapper {
    process: Stepper,
    mapped: Option<usize>,
}

struct World<'p> {
    dice: Dice,
    mount: Mounted<'p>,
    objects: Vec<Object>,
    names: BTreeMap<String, usize>,
    open: Vec<(File, usize)>,
    mappers: Vec<Mapper>,
    writers: Vec<Stepper>,
    next_name: usize,
    /// How often somebody was told that a file is busy.
    busy: usize,
}

/// The names that something is mounted on, elsewhere: they are neither moved nor removed.
const COVERED: [&str; 2] = ["covered", "also-covered"];

fn program(seed: usize) -> Vec<u8> {
    let length = PAGE + (seed * 7919) % (LENGTH_MAX - PAGE);
    let mut bytes: Vec<u8> = (0..length).map(|at| (at / PAGE * 37 + at % 239 + seed * 11) as u8).collect();
    bytes[..4].copy_from_slice(b"\x7fELF");
    bytes
}

impl World<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.mount.path().join(name)
    }

    fn any_name(&mut self) -> (String, usize) {
        let at = self.dice.below(self.names.len());
        self.names.iter().nth(at).map(|(name, object)| (name.clone(), *object)).expect("as many")
    }

    fn movable(&mut self) -> Option<(String, usize)> {
        Some(self.any_name()).filter(|(name, _)| !COVERED.contains(&name.as_str()))
    }

    fn new_name(&mut self) -> String {
        self.next_name += 1;
        format!("n{}", self.next_name)
    }

    fn step(&mut self) -> String {
        match self.dice.below(16) {
            0..=2 => self.open(),
            3 => self.close(),
            4..=5 => self.map(),
            6..=9 => self.write(),
            10 => self.resize(),
            11 => self.replace(),
            12 => self.rename(),
            13 => self.link(),
            14 => self.unlink(),
            _ => self.run_through(),
        }
    }

    fn open(&mut self) -> String {
        let (name, object) = self.any_name();
        if self.open.len() >= OPEN_MAX {
            self.open.remove(0);
        }
        self.open.push((File::open(self.path(&name)).expect("to be read"), object));
        format!("open {name}")
    }

    fn close(&mut self) -> String {
        if !self.open.is_empty() {
            let at = self.dice.below(self.open.len());
            self.open.swap_remove(at);
        }
        "close".to_owned()
    }

    fn map(&mut self) -> String {
        let (name, object) = self.any_name();
        let (path, length) = (self.path(&name), self.objects[object].now.len());
        let at = self.dice.below(self.mappers.len());
        let mapper = &mut self.mappers[at];
        if mapper.mapped.take().is_some() {
            assert_eq!(mapper.process.step("unmap"), Ok(0));
        }
        if length > 0 {
            assert_eq!(mapper.process.step(&format!("open {} {}", path.display(), libc::O_RDONLY)), Ok(0));
            assert_eq!(mapper.process.step(&format!("textmap {length}")), Ok(0));
            assert_eq!(mapper.process.step("close"), Ok(0));
            mapper.mapped = Some(object);
        }
        format!("map {name}")
    }

    fn write(&mut self) -> String {
        let (name, object) = self.any_name();
        let (path, at) = (self.path(&name), self.dice.below(self.writers.len()));
        let text = format!("write {name} by {at}");
        match self.writers[at].step(&format!("open {} {}", path.display(), libc::O_RDWR)) {
            Ok(_) => {}
            Err(errno) => {
                assert!(errno == libc::ETXTBSY && self.objects[object].is_covered, "{text}: {errno}");
                self.busy += 1;
                return text;
            }
        }
        for _ in 0..3 {
            let (offset, length) = (self.dice.below(LENGTH_MAX), 1 + self.dice.below(2 * PAGE));
            let byte = 1 + self.dice.below(255);
            let wrote = self.writers[at].step(&format!("pwrite {offset} {length} {byte}"));
            assert_eq!(wrote, Ok(length as u64), "{text}");
            let content = &mut self.objects[object];
            if content.now.len() < offset + length {
                content.now.resize(offset + length, 0);
            }
            content.now[offset..offset + length].fill(byte as u8);
        }
        assert_eq!(self.writers[at].step("close"), Ok(0));
        text
    }

    fn resize(&mut self) -> String {
        let (name, object) = self.any_name();
        let (path, at, length) = (self.path(&name), self.dice.below(self.writers.len()), self.dice.below(LENGTH_MAX));
        let text = format!("resize {name} to {length} by {at}");
        match self.writers[at].step(&format!("shorten {} {length}", path.display())) {
            Ok(_) => {
                let content = &mut self.objects[object];
                content.now.resize(length, 0);
                content.resized = true;
            }
            Err(errno) => {
                assert!(errno == libc::ETXTBSY && self.objects[object].is_covered, "{text}: {errno}");
                self.busy += 1;
            }
        }
        text
    }

    /// A new file in the place of another.
    fn replace(&mut self) -> String {
        let Some((name, _)) = self.movable() else { return "nothing".to_owned() };
        let bytes = program(self.dice.below(1000));
        fs::write(self.path("temporary"), &bytes).expect("written");
        fs::rename(self.path("temporary"), self.path(&name)).expect("renamed");
        // Files that were made here are what they are: nobody was given them by anything else.
        self.objects.push(Object { old: bytes.clone(), now: bytes, is_covered: false, resized: false });
        self.names.insert(name.clone(), self.objects.len() - 1);
        format!("replace {name}")
    }

    fn rename(&mut self) -> String {
        let Some((from, object)) = self.movable() else { return "nothing".to_owned() };
        let other = self.movable().filter(|(to, other)| *to != from && *other != object).map(|(to, _)| to);
        let to = other.unwrap_or_else(|| self.new_name());
        let at = self.dice.below(self.writers.len());
        let (old, new) = (self.path(&from), self.path(&to));
        let renamed = self.writers[at].step(&format!("rename {} {}", old.display(), new.display()));
        assert_eq!(renamed, Ok(0), "rename {from} {to}");
        self.names.remove(&from);
        self.names.insert(to.clone(), object);
        format!("rename {from} {to} by {at}")
    }

    fn link(&mut self) -> String {
        let (from, object) = self.any_name();
        let to = self.new_name();
        let at = self.dice.below(self.writers.len());
        let (old, new) = (self.path(&from), self.path(&to));
        assert_eq!(self.writers[at].step(&format!("link {} {}", old.display(), new.display())), Ok(0));
        self.names.insert(to.clone(), object);
        format!("link {from} {to} by {at}")
    }

    fn unlink(&mut self) -> String {
        let Some((name, _)) = self.movable().filter(|_| self.names.len() > 6) else { return "nothing".to_owned() };
        let at = self.dice.below(self.writers.len());
        let path = self.path(&name);
        assert_eq!(self.writers[at].step(&format!("unlink {}", path.display())), Ok(0));
        self.names.remove(&name);
        format!("unlink {name} by {at}")
    }

    /// What a stat of a whole tree and a memory that is short would do.
    fn run_through(&mut self) -> String {
        for entry in fs::read_dir(self.mount.path()).expect("listed") {
            let metadata = entry.expect("listed").metadata().expect("there");
            assert!(metadata.ino() > 0);
        }
        "run through".to_owned()
    }

    fn check(&mut self, history: &[String]) {
        let told = || history.iter().rev().take(30).rev().cloned().collect::<Vec<_>>().join("\n");
        for (name, object) in &self.names {
            let seen = fs::read(self.path(name)).expect("to be read");
            assert!(seen == self.objects[*object].now, "{name} is not what it is, after\n{}", told());
        }
        for (file, object) in &self.open {
            let Object { old, now, .. } = &self.objects[*object];
            let mut seen = vec![0; LENGTH_MAX + 2 * PAGE];
            let mut count = 0;
            loop {
                match file.read_at(&mut seen[count..], count as u64).expect("read") {
                    0 => break,
                    more => count += more,
                }
            }
            seen.truncate(count);
            assert!(seen == *old || seen == *now, "open of object {object}: neither old nor new, after\n{}", told());
        }
        for mapper in &mut self.mappers {
            let Some(object) = mapper.mapped.map(|object| &self.objects[object]).filter(|object| !object.resized)
            else {
                continue;
            };
            for start in (0..object.old.len() - object.old.len() % PAGE).step_by(PAGE) {
                let seen = mapper.process.step(&format!("mread {start} {PAGE}"));
                let page = |bytes: &[u8]| Ok(hash(&bytes[start..start + PAGE]));
                let is_known = seen == page(&object.old) || seen == page(&object.now);
                assert!(is_known, "page at {start} of a mapping: neither old nor new, after\n{}", told());
            }
        }
    }
}

/// Somebody in a mount namespace of his own, where two of the names are covered.
struct Elsewhere {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Elsewhere {
    fn new(mount: &Path, cover: &Path) -> Self {
        let script = "for name in covered also-covered; do mount --bind \"$2\" \"$1/$name\" || exit; done; echo ready; \
                      read -r go; cat \"$1/covered\" \"$1/also-covered\"; grep -c covered /proc/self/mountinfo";
        let mut child = Command::new("unshare")
            .args(["-m", "--propagation", "private", "sh", "-c", script, "sh"])
            .args([mount, cover])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("util-linux");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("said");
        assert_eq!(line, "ready\n");
        Self { child, output }
    }

    fn check(mut self) {
        self.child.stdin.take().expect("piped").write_all(b"go\n").expect("it waits");
        let said: Vec<String> = self.output.lines().map(|line| line.expect("text")).collect();
        assert_eq!(said, ["cover", "cover", "2"]);
        assert!(self.child.wait().expect("ours").success());
    }
}

fn play(folder: &Path, seed: u64) {
    let folder = folder.join(format!("seed-{seed}"));
    let lower = folder.join("lower");
    fs::create_dir_all(&lower).expect("a folder");
    let mut names = BTreeMap::new();
    let mut objects = Vec::new();
    for (object, name) in ["a", "b", "c", "d", COVERED[0], COVERED[1]].into_iter().enumerate() {
        let bytes = program(object + 1);
        fs::write(lower.join(name), &bytes).expect("written");
        let is_covered = COVERED.contains(&name);
        objects.push(Object { old: bytes.clone(), now: bytes, is_covered, resized: false });
        names.insert(name.to_owned(), object);
    }
    for (from, to) in [("a", "a-link"), (COVERED[0], "covered-link")] {
        fs::hard_link(lower.join(from), lower.join(to)).expect("linked");
        names.insert(to.to_owned(), names[from]);
    }
    fs::write(folder.join("cover"), "cover\n").expect("written");
    let before = checksum(&lower);
    let pool = Pool::create(&folder, "4M");
    let (mount, upper) = (folder.join("mnt"), folder.join("upper"));
    fs::create_dir_all(&upper).expect("a folder");
    let mount = pool.mount_union(&mount, &upper, &[&lower]);
    let elsewhere = Elsewhere::new(mount.path(), &folder.join("cover"));
    let (dynamic, static_) = (compile(&folder, "steps", false), compile(&folder, "steps", true));
    let start = |program: &Path, way| Stepper::start(&pool, program, way);
    // By the library they are given what they map by the service, without the kernel.
    let mapper = |number: usize| {
        let process = if number.is_multiple_of(2) { start(&static_, Way::Fuse) } else { start(&dynamic, Way::Library) };
        Mapper { process, mapped: None }
    };
    let writers = vec![start(&dynamic, Way::Library), start(&static_, Way::Fuse), start(&dynamic, Way::Library)];
    let mut world = World {
        dice: Dice(seed),
        mount,
        objects,
        names,
        open: Vec::new(),
        mappers: (0..5).map(mapper).collect(),
        writers,
        next_name: 0,
        busy: 0,
    };
    let mut history = Vec::new();
    for _ in 0..STEPS {
        history.push(world.step());
        if world.dice.below(4) == 0 {
            world.check(&history);
        }
    }
    world.check(&history);
    elsewhere.check();
    let programs = &pool.status()["service"]["instances"][0]["programs"];
    assert!(
        programs["opens"].as_u64().expect("a number") > 0,
        "{programs}: nothing was read from the cache by the kernel"
    );
    assert!(pool.operations(Way::Library) > 0, "nothing was done by the library");
    world.open.clear();
    drop((world.mappers, world.writers));
    let _ = world.mount.unmount().expect("unmounted");
    assert_eq!(checksum(&lower), before);
}

#[test]
fn programs_show_what_they_are_or_what_they_were_whatever_happens() {
    isolated("programs_show_what_they_are_or_what_they_were_whatever_happens", |folder| {
        (1..=10).for_each(|seed| play(folder, seed));
    });
}
