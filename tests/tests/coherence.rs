//! Coherence of the two paths: a change by one process is visible to every other one at once, by the library and by the kernel.

use poolfs_tests::{Pool, Stepper, Way, compile, hash, isolated, run};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// A small deterministic generator (Marsaglia's xorshift64).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

const SIZE_MAX: u64 = 300_000;

/// One random step by one of the processes, on the process and on the model.
fn random_step(dice: &mut Dice, process: &mut Stepper, model: &mut Vec<u8>) -> String {
    let offset = dice.below(SIZE_MAX - 70_000);
    let longest = if dice.below(4) == 0 { 70_000 } else { 5_000 };
    let length = 1 + dice.below(longest);
    let byte = 1 + dice.below(255);
    match dice.below(10) {
        0..=3 => {
            let step = format!("pread {offset} {length}");
            let end = model.len().min((offset + length) as usize);
            let expected = hash(model.get(offset as usize..end).unwrap_or_default());
            assert_eq!(process.step(&step), Ok(expected), "{step}, size {}", model.len());
            step
        }
        4..=6 => {
            let step = format!("pwrite {offset} {length} {byte}");
            assert_eq!(process.step(&step), Ok(length), "{step}");
            let end = (offset + length) as usize;
            if model.len() < end {
                model.resize(end, 0);
            }
            model[offset as usize..end].fill(byte as u8);
            step
        }
        7 => {
            let size = dice.below(SIZE_MAX);
            let step = format!("truncate {size}");
            assert_eq!(process.step(&step), Ok(0), "{step}");
            model.resize(size as usize, 0);
            step
        }
        8 => {
            assert_eq!(process.step("size"), Ok(model.len() as u64), "size");
            "size".to_owned()
        }
        _ => {
            assert_eq!(process.step("sync"), Ok(0));
            "sync".to_owned()
        }
    }
}

fn setup(folder: &Path, content: &[u8]) -> (Pool, std::path::PathBuf) {
    for name in ["lower", "upper"] {
        fs::create_dir_all(folder.join(name)).expect("a folder");
    }
    fs::write(folder.join("lower/file"), content).expect("a file");
    (Pool::create(folder, "64M"), folder.join("mnt"))
}

#[test]
fn both_paths_see_each_others_changes() {
    isolated("both_paths_see_each_others_changes", |folder| {
        let mut model: Vec<u8> = (0..200_000u32).map(|i| (i >> 10) as u8).collect();
        let (pool, at) = setup(folder, &model);
        let mount = pool.mount_union(&at, &folder.join("upper"), &[&folder.join("lower")]);
        let mut processes = [
            Stepper::start(&pool, &compile(folder, "steps", false), Way::Library),
            Stepper::start(&pool, &compile(folder, "steps", true), Way::Fuse),
        ];
        for process in &mut processes {
            assert_eq!(process.step(&format!("open {} 2", mount.path().join("file").display())), Ok(0));
        }
        let mut dice = Dice(0x5eed);
        for round in 0..3_000 {
            let who = dice.below(2) as usize;
            let step = random_step(&mut dice, &mut processes[who], &mut model);
            if round % 100 == 0 {
                println!("round {round}: {step}");
            }
        }
        assert!(pool.operations(Way::Library) > 500, "the library sent requests");
        let path = mount.path().join("file");
        let moved = mount.path().join("moved");
        for (who, from, to) in [(0, &path, &moved), (1, &moved, &path)] {
            assert_eq!(processes[who].step(&format!("rename {} {}", from.display(), to.display())), Ok(0));
            for process in &mut processes {
                assert_eq!(process.step(&format!("statsize {}", to.display())), Ok(model.len() as u64));
                assert_eq!(process.step(&format!("statsize {}", from.display())), Err(libc::ENOENT));
            }
        }
        assert_eq!(processes[0].step(&format!("unlink {}", path.display())), Ok(0));
        assert_eq!(processes[1].step(&format!("statsize {}", path.display())), Err(libc::ENOENT));
        for process in &mut processes {
            assert_eq!(process.step("size"), Ok(model.len() as u64), "open files outlive their name");
        }
        drop(processes);
        drop(mount);
    });
}

#[test]
fn shared_maps_of_static_programs_are_current() {
    isolated("shared_maps_of_static_programs_are_current", |folder| {
        let mut model = vec![7u8; 65_536];
        let (pool, at) = setup(folder, &model);
        let mount = pool.mount_union(&at, &folder.join("upper"), &[&folder.join("lower")]);
        let mut library = Stepper::start(&pool, &compile(folder, "steps", false), Way::Library);
        let mut legacy = Stepper::start(&pool, &compile(folder, "steps", true), Way::Fuse);
        for process in [&mut library, &mut legacy] {
            assert_eq!(process.step(&format!("open {} 2", mount.path().join("file").display())), Ok(0));
        }
        assert_eq!(library.step("pwrite 0 10 1"), Ok(10));
        model[..10].fill(1);
        assert_eq!(legacy.step("map 65536"), Ok(0));
        let mut dice = Dice(0xface);
        for round in 0..500 {
            let offset = dice.below(60_000) as usize;
            let length = 1 + dice.below(5_000) as usize;
            let byte = 1 + dice.below(255) as u8;
            let written = if round % 2 == 0 {
                library.step(&format!("pwrite {offset} {length} {byte}")).map(|count| count - length as u64)
            } else {
                legacy.step(&format!("mwrite {offset} {length} {byte}"))
            };
            assert_eq!(written, Ok(0));
            model[offset..offset + length].fill(byte);
            let expected = hash(&model);
            assert_eq!(legacy.step("mread 0 65536"), Ok(expected), "the map, round {round}");
            assert_eq!(library.step("pread 0 65536"), Ok(expected), "the library, round {round}");
        }
        drop((library, legacy));
        drop(mount);
    });
}

/// One random change of names or attributes below `at`; which of them succeed, the processes have to agree on.
fn random_change(dice: &mut Dice, at: &Path) -> String {
    let mut path = || at.join(["a", "b", "d/a", "d/b", "e/a"][dice.below(5) as usize]).display().to_string();
    let (one, other) = (path(), path());
    match dice.below(9) {
        0 => format!("rename {one} {other}"),
        1 => format!("unlink {one}"),
        2 => format!("link {one} {other}"),
        3 => format!("symlink b {one}"),
        4 => format!("chmod {one} {}", [0o600, 0o644, 0o755][dice.below(3) as usize]),
        5 => format!("mkdir {other}"),
        _ => format!("open {one} {}", libc::O_RDWR | libc::O_CREAT),
    }
}

#[test]
fn names_and_attributes_are_current_whoever_changed_them() {
    isolated("names_and_attributes_are_current_whoever_changed_them", |folder| {
        let (pool, at) = setup(folder, b"content");
        for name in ["d", "e"] {
            fs::create_dir_all(folder.join("lower").join(name)).expect("a folder");
        }
        let mount = pool.mount_union(&at, &folder.join("upper"), &[&folder.join("lower")]);
        let mut processes = [
            Stepper::start(&pool, &compile(folder, "steps", false), Way::Library),
            Stepper::start(&pool, &compile(folder, "steps", true), Way::Fuse),
        ];
        let mut dice = Dice(0xcac4e);
        for round in 0..3_000 {
            let who = dice.below(2) as usize;
            let step = random_change(&mut dice, mount.path());
            let done = processes[who].step(&step);
            if done.is_ok() && step.starts_with("open") {
                let length = 1 + dice.below(9_000);
                assert_eq!(processes[who].step(&format!("pwrite 0 {length} 7")), Ok(length));
                assert_eq!(processes[who].step("close"), Ok(0));
            }
            for name in ["a", "b", "d/a", "d/b", "e/a", "d", "e", "file", "."] {
                let look = format!("look {}", mount.path().join(name).display());
                let [library, kernel] = &mut processes;
                assert_eq!(library.step(&look), kernel.step(&look), "{name}, round {round}, {who}: {step} {done:?}");
            }
        }
        assert!(pool.operations(Way::Library) > 500, "the library sent requests");
        let by_kernel = pool.operations(Way::Fuse);
        for _ in 0..100 {
            assert!(processes[1].step(&format!("look {}", mount.path().join("file").display())).is_ok());
        }
        let asked = pool.operations(Way::Fuse) - by_kernel;
        assert!(asked < 10, "the kernel asked {asked} times for what it knows");
        drop(processes);
        drop(mount);
    });
}

#[test]
fn nobody_finds_an_end_before_one_he_knows_of() {
    isolated("nobody_finds_an_end_before_one_he_knows_of", |folder| {
        let (pool, at) = setup(folder, b"");
        let mount = pool.mount_union(&at, &folder.join("upper"), &[&folder.join("lower")]);
        let ends = compile(folder, "ends", false);
        for (way, asking) in [(Way::Library, 0), (Way::Library, 1), (Way::Fuse, 1)] {
            let script = format!("{} {} 3 {asking}", ends.display(), at.join("growing").display());
            assert_eq!(pool.shell(way, &script).expect("ends").trim(), "0 0 0 0 wrong", "{way:?}, {asking}");
        }
        drop(mount);
    });
}

#[test]
fn who_has_a_description_and_no_library_goes_by_the_size_that_is() {
    isolated("who_has_a_description_and_no_library_goes_by_the_size_that_is", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let program = compile(folder, "inherited", false);
        let pages = |count: u8| (1..=count).flat_map(|number| [number; 4096]).collect::<Vec<u8>>();
        for (how, count) in [("fork", 10), ("vfork", 10), ("spawn", 10), ("send", 10), ("exec", 4)] {
            let before = pool.operations(Way::Library);
            let script = format!("{} {}/{how} {how}", program.display(), at.display());
            assert_eq!(pool.shell(Way::Library, &script).expect("the program").trim(), "right", "{how}");
            assert!(pool.operations(Way::Library) > before, "{how}: nothing went by the library");
            assert!(fs::read(at.join(how)).expect("read") == pages(count), "{how}: the mount shows something else");
        }
        drop(mount);
        for (how, count) in [("fork", 10), ("vfork", 10), ("spawn", 10), ("send", 10), ("exec", 4)] {
            assert!(fs::read(directory.join(how)).expect("read") == pages(count), "{how}: the disk has something else");
        }
    });
}

/// Looks a directory up again and again, on a processor that it hardly gets, and with the kernel having forgotten it each time: who
/// renames in it meanwhile has mostly been answered when the kernel has not got yet what the look-up found. `changed` has the directory's
/// time as it is below, after each rename.
const LOOKS_UP: &str = r#"
import ctypes, mmap, os, struct, subprocess, sys
mount, directory, changed = sys.argv[1:]
file = open(changed, "r+b")
changes = mmap.mmap(file.fileno(), 16)
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    libc = ctypes.CDLL(None)
    for _ in range(60):
        assert libc.mount(None, mount.encode(), None, 32, None) == 0
        os.stat(directory)
        known = struct.unpack("q", changes[:8])[0]
        shown = os.stat(directory).st_mtime_ns
        assert shown >= known, (shown, known)
finally:
    changes[8:16] = struct.pack("q", 1)
    hog.kill()
    hog.wait()
"#;

const RENAMES: &str = r#"
import mmap, os, struct, sys
directory, below, changed = sys.argv[1:]
file = open(changed, "r+b")
changes = mmap.mmap(file.fileno(), 16)
one, other = directory + "/one", directory + "/other"
while changes[8] == 0:
    os.rename(one, other)
    os.rename(other, one)
    changes[:8] = struct.pack("q", os.stat(below).st_mtime_ns)
"#;

#[test]
fn who_looks_a_name_up_while_it_changes_gets_to_know_the_newest() {
    isolated("who_looks_a_name_up_while_it_changes_gets_to_know_the_newest", |folder| {
        let pool = Pool::create(folder, "16M");
        let (at, data, changed) = (folder.join("mnt"), folder.join("data"), folder.join("changed"));
        fs::create_dir_all(data.join("d")).expect("a folder");
        fs::write(data.join("d/one"), "").expect("a file");
        fs::write(&changed, [0; 4096]).expect("a file");
        let mount = pool.mount_directory(&at, &data);
        let text = |path: &Path| path.to_str().expect("text").to_owned();
        let mut looks_up = Command::new("python3");
        looks_up.args(["-c", LOOKS_UP, &text(&at), &text(&at.join("d")), &text(&changed)]);
        let mut looks_up = looks_up.spawn().expect("python3 runs");
        let renames = [text(&at.join("d")), text(&data.join("d")), text(&changed)];
        let mut command = pool.command();
        command.args(["exec", pool.name(), "--", "python3", "-c", RENAMES]).args(renames);
        let _ = run(&mut command).expect("it renames");
        assert!(looks_up.wait().expect("ours").success());
        let _ = mount.unmount().expect("umount");
    });
}

#[test]
fn a_mapping_reaches_the_end_that_was_written_while_others_change_attributes() {
    isolated("a_mapping_reaches_the_end_that_was_written_while_others_change_attributes", |folder| {
        let pool = Pool::create(folder, "16M");
        let (at, data) = (folder.join("mnt"), folder.join("data"));
        fs::create_dir(&data).expect("made");
        let mounted = pool.mount_directory(&at, &data);
        let program = compile(folder, "mapped_end", false);
        let (file, stop) = (mounted.path().join("f"), folder.join("stop"));
        let start = |options: &[&str], what: &str, rounds: &[&str]| {
            let mut command = pool.command();
            command.args(["exec", pool.name()]).args(options).arg("--").arg(&program).arg(what).args([&file, &stop]);
            command.args(rounds).stdout(Stdio::piped()).spawn().expect("poolfs starts")
        };
        let others = [&["--fuse"][..], &["--fuse"]].map(|options| start(options, "change", &[]));
        let mapping = start(&[], "map", &["1000"]).wait_with_output().expect("it ends");
        fs::write(&stop, "").expect("written");
        for mut other in others {
            assert!(other.wait().expect("it ends").success());
        }
        assert!(mapping.status.success(), "{}", String::from_utf8_lossy(&mapping.stdout));
        let _ = mounted.unmount().expect("umount");
    });
}
