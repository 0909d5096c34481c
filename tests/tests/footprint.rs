//! Memory that mounts take of a service, and that it is given back; files that clones run or map have one copy in memory.

use poolfs_tests::{Mounted, Pool, Stepper, Way, compile, hash, isolated, populate, wait_until};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const MOUNTS: usize = 8;
const ROUNDS: usize = 3;
/// Far above what the service needs for a single mount, far below what the buffers of all these are together.
const LEFT_BYTES_MAX: u64 = 24 << 20;

/// Of a second file. So much is mapped by the library, too.
const OTHER_LENGTH: usize = 1 << 20;

/// Bytes of a process's memory that are in no file.
fn anonymous(process: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line of it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn mounts_that_are_gone_leave_no_memory_behind() {
    isolated("mounts_that_are_gone_leave_no_memory_behind", |folder| {
        let lower = folder.join("lower");
        populate(&lower);
        fs::write(lower.join("large"), vec![7; 4 << 20]).expect("a file");
        let pool = Pool::create(folder, "64M");
        let mount = |name: String| {
            let upper = folder.join(format!("{name}-upper"));
            fs::create_dir_all(&upper).expect("a folder");
            pool.mount_union(&folder.join(name), &upper, &[&lower])
        };
        // With one that stays the service does.
        let _stays = mount("stays".to_owned());
        for _ in 0..ROUNDS {
            let mounts: Vec<Mounted<'_>> = (0..MOUNTS).map(|number| mount(format!("m{number}"))).collect();
            for mount in &mounts {
                assert_eq!(fs::read(mount.path().join("large")).expect("it is there").len(), 4 << 20);
            }
        }
        let left = anonymous(pool.service_pid());
        assert!(left <= LEFT_BYTES_MAX, "{left} bytes after {ROUNDS} times {MOUNTS} mounts");
    });
}

#[test]
fn clones_that_run_the_same_program_have_one_copy_of_it() {
    isolated("clones_that_run_the_same_program_have_one_copy_of_it", |folder| {
        const CLONES: usize = 4;
        let lower = folder.join("lower");
        populate(&lower);
        let program = lower.join("bash");
        fs::copy("/bin/bash", &program).expect("a program");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("changed");
        let length = fs::metadata(&program).expect("there").len();
        let pool = Pool::create(folder, "64M");
        let mount = |number: usize| {
            let upper = folder.join(format!("upper-{number}"));
            fs::create_dir_all(&upper).expect("a folder");
            pool.mount_union(&folder.join(format!("clone-{number}")), &upper, &[&lower])
        };
        let clones: Vec<Mounted<'_>> = (0..CLONES).map(mount).collect();
        for clone in &clones {
            let program = clone.path().join("bash");
            let said =
                Command::new(&program).args(["-c", "cat \"$0\" | wc -c"]).arg(&program).output().expect("it runs");
            assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), length.to_string());
        }
        let status = pool.status();
        let number = |value: &serde_json::Value| value.as_u64().expect("a number");
        let service = &status["service"];
        assert_eq!(number(&service["cache"]["pinned_bytes"]), length.next_multiple_of(4096), "{status:#}");
        let instances = service["instances"].as_array().expect("a list");
        assert_eq!(instances.len(), CLONES);
        for instance in instances {
            assert_eq!(number(&instance["kernel_cached_bytes"]), 0, "{instance:#}");
            assert!(number(&instance["programs"]["opens"]) >= 2, "{instance:#}");
        }
    });
}

/// Clones of one lower branch in which a program is started by the library in each.
struct Scene<'p> {
    pool: &'p Pool,
    clones: Vec<(Mounted<'p>, Stepper)>,
}

impl<'p> Scene<'p> {
    fn new(pool: &'p Pool, folder: &Path, count: usize) -> Self {
        let program = compile(folder, "steps", false);
        let clone = |number: usize| {
            let upper = folder.join(format!("upper-{number}"));
            fs::create_dir_all(&upper).expect("a folder");
            let mount = pool.mount_union(&folder.join(format!("clone-{number}")), &upper, &[&folder.join("lower")]);
            (mount, Stepper::start(pool, &program, Way::Library))
        };
        Self { pool, clones: (0..count).map(clone).collect() }
    }

    fn open(&mut self, clone: usize, name: &str, flags: i32) {
        let (mount, stepper) = &mut self.clones[clone];
        let path = mount.path().join(name);
        assert_eq!(stepper.step(&format!("open {} {flags}", path.display())), Ok(0));
    }

    fn does(&mut self, clone: usize, step: &str) -> u64 {
        self.clones[clone].1.step(step).unwrap_or_else(|errno| panic!("{step} in clone {clone}: {errno}"))
    }

    /// Maps so much of a file privately, and has it closed.
    fn map(&mut self, clone: usize, name: &str, length: usize) {
        self.open(clone, name, libc::O_RDONLY);
        self.does(clone, &format!("textmap {length}"));
        self.does(clone, "close");
    }

    fn pinned(&self) -> u64 {
        self.pool.status()["service"]["cache"]["pinned_bytes"].as_u64().expect("a number")
    }

    fn kernel_caches(&self) -> u64 {
        let status = self.pool.status();
        let instances = status["service"]["instances"].as_array().expect("a list");
        instances.iter().map(|instance| instance["kernel_cached_bytes"].as_u64().expect("a number")).sum()
    }

    /// Waits until the service has looked for what nobody has mapped any more, which it does about once a second. One look is for all files:
    /// also for a second one, which this clone has mapped for a moment. It must have nothing else mapped.
    fn wait_until_the_service_has_looked(&mut self, clone: usize) {
        let before = self.pinned();
        self.map(clone, "other", OTHER_LENGTH);
        assert!(self.pinned() > before, "a file that somebody has mapped");
        self.does(clone, "unmap");
        wait_until("what nobody has mapped is let go", || self.pinned() <= before);
    }
}

fn data(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 4096 * 31 + at % 251) as u8).collect()
}

#[test]
fn clones_that_map_the_same_file_have_one_copy_of_it() {
    isolated("clones_that_map_the_same_file_have_one_copy_of_it", |folder| {
        // Not a multiple of a page: what is behind the end are zeros.
        const LENGTH: usize = (3 << 20) + 100;
        let lower = folder.join("lower");
        fs::create_dir_all(&lower).expect("a folder");
        let mut bytes = data(LENGTH);
        fs::write(lower.join("data"), &bytes).expect("a file");
        fs::write(lower.join("other"), data(OTHER_LENGTH)).expect("a file");
        let pool = Pool::create(folder, "64M");
        let mut scene = Scene::new(&pool, folder, 4);
        bytes.resize(LENGTH.next_multiple_of(4096), 0);
        for clone in 0..4 {
            scene.map(clone, "data", LENGTH);
            assert_eq!(scene.does(clone, &format!("mread 0 {}", bytes.len().min(LENGTH))), hash(&bytes[..LENGTH]));
        }
        assert_eq!((scene.pinned(), scene.kernel_caches()), (bytes.len() as u64, 0));

        // Who has it mapped keeps what it was; everybody else sees what it is.
        scene.open(0, "data", libc::O_RDWR);
        scene.does(0, "pwrite 5000 1 7");
        let mut now = bytes[..LENGTH].to_vec();
        now[5000] = 7;
        assert_eq!(scene.does(0, "pread 4096 4096"), hash(&now[4096..8192]));
        scene.does(0, "close");
        for clone in 0..4 {
            assert_eq!(scene.does(clone, "mread 4096 4096"), hash(&bytes[4096..8192]), "clone {clone}");
        }
        scene.does(0, "unmap");
        scene.map(0, "data", LENGTH);
        assert_eq!(scene.does(0, "mread 4096 4096"), hash(&now[4096..8192]));
        scene.does(0, "unmap");
        assert_eq!(scene.pinned(), bytes.len() as u64, "others have it mapped");

        // However they let it go.
        scene.does(1, "unmap");
        drop(scene.clones.remove(2));
        scene.wait_until_the_service_has_looked(0);
        assert_eq!(scene.pinned(), bytes.len() as u64, "somebody has it mapped");
        assert_eq!(scene.does(2, &format!("mread 0 {LENGTH}")), hash(&bytes[..LENGTH]));
        scene.does(2, "unmap");
        wait_until("nothing is pinned that nobody has mapped", || scene.pinned() == 0);
    });
}

#[test]
fn a_large_file_is_mapped_from_the_cache_when_it_is_there() {
    isolated("a_large_file_is_mapped_from_the_cache_when_it_is_there", |folder| {
        const LENGTH: usize = 12 << 20;
        let lower = folder.join("lower");
        fs::create_dir_all(&lower).expect("a folder");
        let bytes = data(LENGTH);
        fs::write(lower.join("data"), &bytes).expect("a file");
        let pool = Pool::create(folder, "128M");
        let mut scene = Scene::new(&pool, folder, 2);
        scene.map(0, "data", LENGTH);
        assert_eq!(scene.pinned(), 0, "all of it was read for who wants a little");
        assert_eq!(scene.does(0, &format!("mread 0 {LENGTH}")), hash(&bytes));
        let before = scene.kernel_caches();
        assert!(before >= LENGTH as u64, "{before}");
        scene.map(1, "data", LENGTH);
        assert_eq!(scene.does(1, &format!("mread 0 {LENGTH}")), hash(&bytes));
        assert_eq!((scene.pinned(), scene.kernel_caches()), (LENGTH as u64, before));
        // What is mapped stays readable when there are neither mounts nor a service.
        let (mounts, mut steppers): (Vec<_>, Vec<_>) = scene.clones.into_iter().unzip();
        steppers.remove(0);
        for mount in mounts {
            let _ = mount.unmount().expect("unmounted");
        }
        assert_eq!(steppers[0].step(&format!("mread 0 {LENGTH}")), Ok(hash(&bytes)));
    });
}
