//! Dying clients, dying services, full disks, damaged files.

use poolfs_tests::{Pool, Stepper, Way, checksum, compile, hash, isolated, populate, shell};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::Path;
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
            let begun = Instant::now();
            assert_eq!(witness.step("pread 0 100000"), Ok(expected), "round {round}");
            assert!(begun.elapsed() < Duration::from_secs(1), "the witness waited {:?}", begun.elapsed());
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
            assert!(waited < Duration::from_millis(100), "a dead service was noticed after {waited:?}");
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
        drop(pool);
        assert_eq!(before, checksum(&folder.join("lower")), "the lower branch changed");
    });
}

#[test]
fn a_full_disk_is_enospc_and_loses_nothing() {
    isolated("a_full_disk_is_enospc_and_loses_nothing", |folder| {
        populate(&folder.join("lower"));
        let disk = folder.join("disk");
        fs::create_dir_all(&disk).expect("a folder");
        let _ = shell(&format!(
            "truncate -s 20M {0}.img; mkfs.ext4 -q {0}.img; mount -o loop {0}.img {0}; mkdir {0}/upper",
            disk.display()
        ))
        .expect("a small disk");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_union(&folder.join("mnt"), &disk.join("upper"), &[&folder.join("lower")]);
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
        let mount = pool.mount_union(&folder.join("mnt"), &disk.join("upper"), &[&folder.join("lower")]);
        assert_eq!(fs::read(mount.path().join("kept")).expect("readable"), vec![5; 1 << 20]);
        assert_eq!(fs::read(mount.path().join("later")).expect("readable"), vec![6; 1 << 20]);
        drop(mount);
        drop(pool);
        let _ = shell(&format!("umount {}", disk.display())).expect("umount");
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
