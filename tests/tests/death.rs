//! Killed clients, killed services, full disks, damaged files.

use poolfs_tests::{Pool, Stepper, Way, checksum, compile, hash, import_small, is_soak, isolated, populate, shell};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

fn union<'a>(pool: &'a Pool, folder: &Path) -> poolfs_tests::Mounted<'a> {
    pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&folder.join("lower")])
}

fn branches(folder: &Path) {
    fs::create_dir_all(folder.join("upper")).expect("a folder");
    populate(&folder.join("lower"));
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("a process"), Signal::KILL).expect("it is ours");
}

/// The only child of `poolfs exec`: the program itself.
fn child_of(pid: u32) -> i32 {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no child: {text:?}"))
}

#[test]
fn a_killed_client_frees_what_it_held_and_nobody_else_notices() {
    isolated("a_killed_client_frees_what_it_held_and_nobody_else_notices", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let mount = union(&pool, folder);
        let program = compile(folder, "steps", false);
        let mut witness = Stepper::start(&pool, &program, Way::Library);
        let path = mount.path().join("usr/share/doc/big");
        let expected = hash(&fs::read(folder.join("lower/usr/share/doc/big")).expect("readable")[..100_000]);
        assert_eq!(witness.step(&format!("open {} 0", path.display())), Ok(0));
        for round in 0..20 {
            let mut victim = Stepper::start(&pool, &program, Way::Library);
            assert_eq!(victim.step(&format!("open {} 66", mount.path().join("victim").display())), Ok(0));
            assert_eq!(victim.step("pwrite 0 5000 9"), Ok(5000));
            kill(child_of(victim.pid()));
            // The dead one is still held by its parent, and its session perhaps not yet ended.
            assert_eq!(witness.step("pread 0 100000"), Ok(expected), "round {round}");
            drop(victim);
        }
        let deadline = Instant::now() + Duration::from_secs(10);
        while handles(&pool) > 1 {
            assert!(Instant::now() < deadline, "handles of dead clients: {}", pool.status());
            std::thread::park_timeout(Duration::from_millis(100));
        }
        assert_eq!(fs::read(mount.path().join("victim")).expect("readable"), vec![9; 5000]);
        drop(witness);
        drop(mount);
    });
}

fn handles(pool: &Pool) -> u64 {
    fn sum(value: &serde_json::Value) -> u64 {
        match value {
            serde_json::Value::Object(map) => map
                .iter()
                .map(|(key, inner)| if key == "handles" { inner.as_u64().unwrap_or(0) } else { sum(inner) })
                .sum(),
            serde_json::Value::Array(items) => items.iter().map(sum).sum(),
            _ => 0,
        }
    }
    sum(&pool.status())
}

#[test]
fn a_killed_service_is_an_error_at_once_and_keeps_its_promises() {
    isolated("a_killed_service_is_an_error_at_once_and_keeps_its_promises", |folder| {
        branches(folder);
        let before = checksum(&folder.join("lower"));
        let pool = Pool::create(folder, "64M");
        let program = compile(folder, "steps", false);
        let big = fs::read(folder.join("lower/usr/share/doc/big")).expect("readable");
        let mut waits = Vec::new();
        for round in 0..3u64 {
            let mount = union(&pool, folder);
            let mut process = Stepper::start(&pool, &program, Way::Library);
            assert_eq!(process.step(&format!("open {} 2", mount.path().join("usr/share/doc/big").display())), Ok(0));
            let (synced, lost) = (10_000 + round * 100_000, 2_000_000 + round * 100_000);
            assert_eq!(process.step(&format!("pwrite {synced} 5000 {}", round + 1)), Ok(5000));
            assert_eq!(process.step("sync"), Ok(0));
            assert_eq!(process.step(&format!("pwrite {lost} 5000 200")), Ok(5000));
            kill(pool.service_pid());
            let begun = Instant::now();
            let answer = process.step("pread 0 100");
            let waited = begun.elapsed();
            // Adopted descriptors get EIO; the kernel's own answer for a dead FUSE server is ENOTCONN or ECONNABORTED.
            assert!(
                matches!(answer, Err(libc::EIO | libc::ENOTCONN | libc::ECONNABORTED)),
                "a dead service answered {answer:?}"
            );
            waits.push(waited);
            let by_kernel = fs::metadata(mount.path().join("etc/passwd")).expect_err("nobody serves").raw_os_error();
            assert!(matches!(by_kernel, Some(libc::ENOTCONN | libc::ECONNABORTED)), "{by_kernel:?}");
            let status = pool.poolfs(&["status", pool.name()]);
            let said = format!("{}{}", status.out, status.err).to_lowercase();
            assert!(said.contains("dead"), "status says: {said}");
            drop(process);
            std::mem::drop(mount.unmount());

            let again = union(&pool, folder);
            let content = fs::read(again.path().join("usr/share/doc/big")).expect("readable");
            assert_eq!(content.len(), big.len());
            for past in 0..=round {
                let at = (10_000 + past * 100_000) as usize;
                assert!(content[at..at + 5000].iter().all(|&b| u64::from(b) == past + 1), "fsync's promise {past}");
            }
            assert_eq!(content[4_000_000..], big[4_000_000..], "what nobody wrote");
            drop(again);
        }
        // From the signal on: the time the kernel takes to end the service is part of it, which on a busy machine is more than
        // what the caller adds.
        let most = if is_soak() { Duration::from_millis(100) } else { Duration::from_secs(1) };
        assert!(waits.iter().all(|wait| *wait < most), "a dead service was noticed after {waits:?}");
        println!("soak: noticed after {waits:.1?}");
        drop(pool);
        assert_eq!(before, checksum(&folder.join("lower")), "the lower branch changed");
    });
}

#[test]
fn a_full_disk_is_enospc_and_loses_nothing() {
    isolated("a_full_disk_is_enospc_and_loses_nothing", |folder| {
        populate(&folder.join("lower"));
        let disk = SmallDisk::make(folder.join("disk"));
        let upper = disk.0.join("upper");
        fs::create_dir(&upper).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_union(&folder.join("mnt"), &upper, &[&folder.join("lower")]);
        fs::write(mount.path().join("kept"), vec![5; 1 << 20]).expect("there is room");
        let mut accepted = Vec::new();
        let error = loop {
            let path = mount.path().join(format!("fill-{}", accepted.len()));
            match fs::write(&path, vec![accepted.len() as u8; 1 << 20]) {
                Ok(()) => accepted.push(path),
                Err(error) => break error,
            }
            assert!(accepted.len() < 40, "a disk of 20 MiB took 40 MiB");
        };
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        for (number, path) in accepted.iter().enumerate() {
            assert_eq!(fs::read(path).expect("readable"), vec![number as u8; 1 << 20], "{}", path.display());
        }
        for path in accepted.iter().take(4) {
            fs::remove_file(path).expect("removing works on a full disk");
        }
        fs::write(mount.path().join("later"), vec![6; 1 << 20]).expect("there is room again");
        let _ = shell(&format!("sync -f {}", mount.path().display())).expect("sync");
        drop(mount);
        let mount = pool.mount_union(&folder.join("mnt"), &upper, &[&folder.join("lower")]);
        assert_eq!(fs::read(mount.path().join("kept")).expect("readable"), vec![5; 1 << 20]);
        assert_eq!(fs::read(mount.path().join("later")).expect("readable"), vec![6; 1 << 20]);
        drop(mount);
        drop(pool);
    });
}

/// A disk of 20 MiB with an ext4 on it, and what fills it up behind poolfs.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn make(at: PathBuf) -> Self {
        fs::create_dir_all(&at).expect("a folder");
        let _ =
            shell(&format!("truncate -s 20M {0}.img; mkfs.ext4 -q {0}.img; mount -o loop {0}.img {0}", at.display()))
                .expect("a small disk");
        Self(at)
    }

    /// Until nothing more goes: what somebody has removed may become free only meanwhile.
    fn fill(&self) {
        let start = Instant::now();
        loop {
            let append = format!("of={}/ballast oflag=append conv=notrunc", self.0.display());
            let _ = shell(&format!("dd if=/dev/zero {append} bs=4k 2>/dev/null || true"));
            match fs::write(self.0.join("more"), [1; 8192]) {
                Ok(()) => assert!(start.elapsed() < Duration::from_secs(300), "the disk is never full"),
                Err(error) => return assert_eq!(error.raw_os_error(), Some(libc::ENOSPC)),
            }
        }
    }

    /// Has `write` make the file that is `below`, of `bytes`, and fills the disk before all of that is there. What is written back by
    /// itself meanwhile is written once more.
    fn fill_before(&self, below: &Path, bytes: u64, mut write: impl FnMut()) {
        let start = Instant::now();
        loop {
            write();
            self.fill();
            let there = fs::metadata(below).map_or(0, |found| found.blocks() * 512);
            if there < bytes {
                return;
            }
            assert!(start.elapsed() < Duration::from_secs(300), "the disk is never full in time");
            self.make_room();
        }
    }

    fn make_room(&self) {
        fs::remove_file(self.0.join("ballast")).expect("it was there");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = shell(&format!("umount {}", self.0.display())).expect("umount");
        }
    }
}

#[test]
fn an_unmount_that_cannot_write_back_says_so_and_keeps_everything() {
    isolated("an_unmount_that_cannot_write_back_says_so_and_keeps_everything", |folder| {
        populate(&folder.join("lower"));
        let disk = SmallDisk::make(folder.join("disk"));
        let upper = disk.0.join("upper");
        fs::create_dir(&upper).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let at = folder.join("mnt");
        let mount = || pool.mount_union(&at, &upper, &[&folder.join("lower")]);
        let write = |name: &str, byte: u8| {
            disk.fill_before(&upper.join(name), 3 << 20, || {
                let _ = fs::remove_file(at.join(name));
                fs::write(at.join(name), vec![byte; 3 << 20]).expect("there is room");
            });
        };
        let mounted = mount();
        write("late", 7);
        let first = mounted.unmount();
        let umount =
            |more: &[&str]| pool.poolfs(&[&["umount", pool.name(), at.to_str().expect("text")], more].concat());
        for refused in [first, umount(&[]), umount(&["--json"])] {
            assert_eq!(refused.code, 1, "{refused:?}");
            for part in [at.to_str().expect("text"), "no space left", "the mount stays", "--force"] {
                assert!(refused.err.contains(part), "{part} in: {}", refused.err);
            }
            assert_eq!(fs::read(at.join("late")).expect("still mounted"), vec![7; 3 << 20]);
        }
        assert!(pool.status().to_string().contains("\"instance\""), "status: {}", pool.status());
        assert_ne!(pool.poolfs(&["pool", "rm", pool.name()]).code, 0, "a pool with unwritten data is not removed");
        disk.make_room();
        let _ = umount(&[]).expect("umount with room");
        assert_eq!(fs::read(upper.join("late")).expect("on the disk"), vec![7; 3 << 20]);
        fs::remove_file(upper.join("late")).expect("removed");

        mount().keep();
        write("given-up", 8);
        let forced = umount(&["--force"]);
        assert_eq!(forced.code, 0, "{forced:?}");
        assert!(forced.err.contains("no space left"), "what is lost is said: {}", forced.err);
        assert!(!fs::read_to_string("/proc/self/mounts").expect("readable").contains(at.to_str().expect("text")));
        drop(pool);
    });
}

#[test]
fn an_unmount_of_what_is_in_use_changes_nothing() {
    isolated("an_unmount_of_what_is_in_use_changes_nothing", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let mounted = union(&pool, folder);
        let at = mounted.path().to_path_buf();
        let file = fs::File::create(at.join("open")).expect("created");
        let refused = mounted.unmount();
        assert!(refused.code == 1 && refused.err.contains("in use"), "{refused:?}");
        std::os::unix::fs::FileExt::write_all_at(&file, b"served", 0).expect("still mounted");
        assert_eq!(fs::read(at.join("open")).expect("still mounted"), b"served");
        let umount =
            |more: &[&str]| pool.poolfs(&[&["umount", pool.name(), at.to_str().expect("text")], more].concat());
        let _ = umount(&["--force"]).expect("umount --force");
        fs::metadata(at.join("open")).expect_err("its place is empty");
        assert_eq!(fs::read(folder.join("upper/open")).expect("flushed"), b"served");
    });
}

#[test]
fn a_command_whose_mount_cannot_be_written_back_says_so_and_keeps_it() {
    isolated("a_command_whose_mount_cannot_be_written_back_says_so_and_keeps_it", |folder| {
        let disk = SmallDisk::make(folder.join("disk"));
        let data = disk.0.join("data");
        fs::create_dir(&data).expect("a folder");
        let at = folder.join("mnt");
        fs::create_dir(&at).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let spec = format!("at={},dir={}", at.display(), data.display());
        // What is written back by itself before the disk is full is written once more.
        let script = format!(
            "while :; do head -c 3000000 /dev/zero | tr '\\0' x > {0}/late; dd if=/dev/zero of={1}/ballast bs=64k 2>/dev/null; \
             [ $(stat -c %b {2}/late) -ge 5859 ] || exit 0; rm {1}/ballast; done",
            at.display(),
            disk.0.display(),
            data.display()
        );
        // In a throw-away pool, which then is thrown away only by its user.
        let refused = pool.poolfs(&["exec", "--mount", &spec, "--", "sh", "-c", &script]);
        assert!(refused.code != 0 && refused.err.contains("poolfs umount exec-"), "{refused:?}");
        assert_eq!(fs::metadata(at.join("late")).expect("still mounted").len(), 3_000_000);
        let _ = pool.poolfs(&["exec", pool.name(), "--", "true"]).expect("other commands work");
        assert_eq!(fs::metadata(at.join("late")).expect("still mounted").len(), 3_000_000);
        disk.make_room();
        let commands = refused.err.split('`').filter(|part| part.starts_with("poolfs ")).collect::<Vec<_>>();
        assert_eq!(commands.len(), 2, "{}", refused.err);
        for command in commands {
            let words: Vec<&str> = command.split(' ').skip(1).collect();
            let _ = pool.poolfs(&words).expect("the remedy");
        }
        assert_eq!(fs::read(data.join("late")).expect("on the disk"), vec![b'x'; 3_000_000]);
    });
}

#[test]
fn containers_on_a_full_disk_are_told_of_and_removed() {
    isolated("containers_on_a_full_disk_are_told_of_and_removed", |folder| {
        let disk = SmallDisk::make(folder.join("state"));
        let pool = Pool::create(folder, "64M");
        import_small(&pool, folder, "small", &[], |_| {});
        let run = |name: &str, script: &str| {
            let mut command = pool.command();
            command.args(["run", pool.name(), "small", "-i", "--name", name, "--", "/bin/sh", "-c", script]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
        };
        let ended = |child: Child| {
            let output = child.wait_with_output().expect("ended");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let listed = || pool.poolfs(&["ps"]).expect("ps");
        // It fills the disk itself, and can be removed all the same.
        let (code, errors) = ended(run("hog", "head -c 50000000 /dev/zero > /big; echo $?; exit 4"));
        assert!(errors.contains("No space left"), "head says so: {code:?} {errors}");
        assert_ne!(pool.poolfs(&["run", pool.name(), "small", "--rm", "--", "/bin/true"]).code, 0, "there is no room");
        assert!(listed().contains("hog"), "{}", listed());
        let removed = pool.poolfs(&["rm", "--force", "hog"]);
        assert!(removed.code == 0 && !listed().contains("hog"), "{removed:?}\n{}", listed());

        // Somebody else fills the disk before what it wrote is there.
        for remedy in [&["stop", "late"][..], &["rm", "--force", "late"]] {
            let mut child =
                run("late", "while read line; do rm -f /late; head -c 3000000 /dev/zero > /late; echo written; done");
            let mut told = std::io::BufReader::new(child.stdout.take().expect("piped"));
            let upper = disk.0.join("containers/late/upper/late");
            disk.fill_before(&upper, 3_000_000, || {
                child.stdin.as_mut().expect("piped").write_all(b"again\n").expect("it reads");
                let mut line = String::new();
                told.read_line(&mut line).expect("readable");
                assert_eq!(line, "written\n");
            });
            let (code, errors) = ended(child);
            assert!(code != Some(0) && errors.contains("poolfs stop late"), "{code:?} {errors}");
            assert!(listed().contains("late"), "{}", listed());
            for refused in [["rm", "late"], ["stop", "late"]] {
                let outcome = pool.poolfs(&refused);
                assert!(outcome.code != 0 && outcome.err.contains("no space left"), "{refused:?}: {outcome:?}");
            }
            if remedy[0] == "stop" {
                disk.make_room();
                let _ = pool.poolfs(remedy).expect("stop with room");
                assert_eq!(fs::read(upper).expect("on the disk"), vec![0; 3_000_000]);
                let _ = pool.poolfs(&["rm", "late"]).expect("rm");
            } else {
                let _ = pool.poolfs(remedy).expect("rm --force");
                disk.make_room();
            }
            assert!(!listed().contains("late"), "{}", listed());
        }
        let _ = pool.poolfs(&["run", pool.name(), "small", "--rm", "--", "/bin/sh", "-c", ":"]).expect("room again");
        drop(pool);
    });
}

#[test]
fn a_damaged_bitmap_is_a_named_error_and_overwrites_nothing() {
    isolated("a_damaged_bitmap_is_a_named_error_and_overwrites_nothing", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let mount = union(&pool, folder);
        let _ = shell(&format!(
            "printf x | dd of={}/usr/share/doc/big bs=1 seek=9999 conv=notrunc,fsync",
            mount.path().display()
        ))
        .expect("a write");
        drop(mount);
        let upper = folder.join("upper");
        let bitmaps = shell(&format!("find {}/.poolfs/bitmaps -type f -size +0", upper.display())).expect("find");
        assert!(!bitmaps.trim().is_empty(), "no bitmap in the work directory");
        for bitmap in bitmaps.lines() {
            let mut bytes = fs::read(bitmap).expect("readable");
            let middle = bytes.len() / 2;
            bytes.iter_mut().skip(middle).for_each(|byte| *byte ^= 0x5a);
            bytes.iter_mut().take(middle).for_each(|byte| *byte ^= 0xa5);
            fs::write(bitmap, bytes).expect("writable");
        }
        // The work directory notes that the union is open; all else stays as it is.
        let content = || {
            let mut lines = checksum(&upper);
            lines.remove(".poolfs");
            lines
        };
        let damaged = content();
        let mount = union(&pool, folder);
        let error = fs::read(mount.path().join("usr/share/doc/big")).expect_err("damaged");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let error = fs::write(mount.path().join("usr/share/doc/big"), "y").expect_err("damaged");
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(pool.status().to_string().contains("usr/share/doc/big"), "status names the file: {}", pool.status());
        assert_eq!(fs::read(mount.path().join("var/one")).expect("others are readable").len(), 1);
        drop(mount);
        assert_eq!(damaged, content(), "the damaged file was touched");
    });
}
