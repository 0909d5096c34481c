//! Crash recovery of a service: data that was accepted and never synced is there at the next mount.

use poolfs_tests::{Pool, Way, checksum, is_soak, isolated, populate, run, shell, wait_until};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const FORMATS: [&str; 3] = ["sparse", "bcow-performance", "bcow-space"];

fn mount<'p>(pool: &'p Pool, folder: &Path, format: &str) -> poolfs_tests::Mounted<'p> {
    pool.mount_stored(&folder.join("mnt"), &folder.join("upper"), &folder.join("lower"), format)
}

fn branches(folder: &Path) {
    for name in ["upper", "lower"] {
        fs::create_dir_all(folder.join(name)).expect("a folder");
    }
    populate(&folder.join("lower"));
}

/// A tree without its times.
fn shape(root: &Path) -> BTreeMap<String, String> {
    let timeless = |line: String| {
        let (before, after) = line.split_once(" mtime ").expect("a line of a checksum");
        format!("{before} {}", after.split_once(' ').expect("a line of a checksum").1)
    };
    checksum(root).into_iter().map(|(path, line)| (path, timeless(line))).collect()
}

/// How many mounts of the memory that services keep are in the test's own `/run`: its mount namespace is a copy, in which others' are as well, and go
/// with theirs.
fn kept_mounts() -> usize {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let mounts = table.lines().map(|line| {
        let (before, after) = line.split_once(" - ").expect("fields of the filesystem");
        let (before, source): (Vec<&str>, _) = (before.split(' ').collect(), after.split(' ').nth(1));
        (before[0], before[1], before[4], source.expect("a source"))
    });
    let mounts: Vec<_> = mounts.collect();
    let own = |&&(_, _, place, source): &&_| place == "/run" && source == "poolfs-test";
    let (run, ..) = mounts.iter().rfind(own).expect("a private /run");
    mounts.iter().filter(|(_, parent, _, source)| parent == run && *source == "poolfs-memory").count()
}

/// Changes of every kind, none of them synced. Every round does other things to the same files.
fn changes(round: u64) -> String {
    let seed = round * 7919 % 100_000 + 1;
    format!(
        "umask 022; mkdir -p made/deep; echo round {round} >> made/log; echo small-{round} > made/deep/small-{round}
         head -c {large} /dev/zero | tr '\\0' '{letter}' > made/large-{round}
         printf X{round} | dd of=usr/share/doc/big bs=1 seek={seed} conv=notrunc status=none
         printf Y{round} | dd of=usr/share/doc/big bs=1 seek={far} conv=notrunc status=none
         head -c 20000 /dev/zero | tr '\\0' '{letter}' | dd of=usr/share/doc/big bs=4096 seek={block} conv=notrunc status=none
         printf Z{round} | dd of=usr/share/doc/big bs=1 seek=$(({block} * 4096 + 100)) conv=notrunc status=none
         printf more-{round} >> etc/passwd
         printf T | dd of=usr/bin/tool bs=1 seek=$((30000 + {round})) conv=notrunc status=none
         truncate -s $((60000 - {round})) usr/bin/tool; truncate -s 70000 usr/bin/tool
         mv var/one var/one-moved 2>/dev/null || mv var/one-moved var/one
         ln -f usr/share/doc/big made/linked; rm -f made/large-$(({round} - 2)); chmod 640 made/log",
        large = 300_000 + seed,
        letter = char::from(b'a' + (round % 26) as u8),
        far = 2_000_000 + seed,
        block = 300 + round * 3,
    )
}

#[test]
fn what_was_accepted_outlives_the_service() {
    isolated("what_was_accepted_outlives_the_service", |folder| {
        branches(folder);
        let lower = checksum(&folder.join("lower"));
        let pool = Pool::create(folder, "64M");
        let rounds = if is_soak() { 100 } else { 4 };
        for format in FORMATS {
            let plain = folder.join("plain");
            let _ = run(Command::new("cp").arg("-a").arg(folder.join("lower")).arg(&plain)).expect("copied");
            for round in 0..rounds {
                let mounted = mount(&pool, folder, format);
                let way = if round % 2 == 0 { Way::Fuse } else { Way::Library };
                let script = changes(round);
                let _ = pool.shell(way, &format!("cd {}\n{script}", mounted.path().display())).expect("changes");
                pool.kill_service();
                drop(mounted.unmount());
                let _ = shell(&format!("set -eu; cd {}\n{script}", plain.display())).expect("changes");
                let mounted = mount(&pool, folder, format);
                assert!(kept_mounts() == 1, "what was left is given up");
                let (expected, found) = (shape(&plain), shape(mounted.path()));
                for (path, line) in &expected {
                    assert_eq!(found.get(path), Some(line), "{format}, round {round}: {path}\n{}", pool.service_log());
                }
                assert_eq!(found.len(), expected.len(), "{format}, round {round}");
                // The next service dies before anything is written.
                let before = checksum(mounted.path());
                pool.kill_service();
                drop(mounted.unmount());
                let mounted = mount(&pool, folder, format);
                assert_eq!(checksum(mounted.path()), before, "{format}, round {round}: without any change");
                let _ = mounted.unmount().expect("umount");
                let checked = pool.poolfs(&["fsck", folder.join("upper").to_str().expect("UTF-8")]);
                assert_eq!(checked.code, 0, "{format}, round {round}: {checked:?}");
            }
            for name in ["plain", "upper"] {
                fs::remove_dir_all(folder.join(name)).expect("removed");
            }
            fs::create_dir(folder.join("upper")).expect("a folder");
        }
        drop(pool);
        assert_eq!(kept_mounts(), 0, "an orderly end leaves nothing");
        assert_eq!(lower, checksum(&folder.join("lower")), "the lower branch changed");
    });
}

#[test]
fn a_branch_whose_service_died_waits_for_its_next_mount_by_any_pool() {
    isolated("a_branch_whose_service_died_waits_for_its_next_mount_by_any_pool", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let mounted = mount(&pool, folder, "sparse");
        let _ = pool.shell(Way::Fuse, &format!("echo accepted > {}/file", mounted.path().display())).expect("sh");
        pool.kill_service();
        drop(mounted.unmount());
        let upper = folder.join("upper");
        let upper = upper.to_str().expect("UTF-8");
        for arguments in [&["fsck", upper][..], &["fsck", upper, "--repair"]] {
            let refused = pool.poolfs(arguments);
            assert!(refused.code == 8 && refused.err.contains("mount it once"), "{refused:?}");
        }
        let removed = pool.poolfs(&["pool", "rm", pool.name()]);
        assert!(removed.code == 0 && removed.err.contains(upper), "what waits is told of: {removed:?}");
        assert_eq!(kept_mounts(), 1);
        let _ = pool.poolfs(&["pool", "create", pool.name(), "--memory", "512M", "--cache", "64M"]).expect("again");
        let other = Pool::named(folder, &format!("{}-other", pool.name()), "64M");
        let mounted = mount(&other, folder, "sparse");
        assert_eq!(fs::read_to_string(mounted.path().join("file")).expect("there"), "accepted\n");
        assert_eq!(kept_mounts(), 1, "the other pool's own");
        drop(mounted);
        drop(other);
        assert_eq!(kept_mounts(), 0);
    });
}

#[test]
fn a_branch_whose_service_died_may_be_moved_before_its_next_mount() {
    isolated("a_branch_whose_service_died_may_be_moved_before_its_next_mount", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let mounted = mount(&pool, folder, "sparse");
        let _ = pool.shell(Way::Fuse, &format!("echo accepted > {}/file", mounted.path().display())).expect("sh");
        pool.kill_service();
        drop(mounted.unmount());
        fs::rename(folder.join("upper"), folder.join("moved")).expect("moved");
        fs::create_dir(folder.join("upper")).expect("a folder");
        // The service that starts for it looks at what its predecessor has left.
        drop(mount(&pool, folder, "sparse"));
        let moved = pool.mount_stored(&folder.join("mnt"), &folder.join("moved"), &folder.join("lower"), "sparse");
        assert_eq!(fs::read_to_string(moved.path().join("file")).expect("there"), "accepted\n");
        drop(moved);
        drop(pool);
        assert_eq!(kept_mounts(), 0);
    });
}

#[test]
fn what_nobody_can_want_any_more_takes_no_memory() {
    isolated("what_nobody_can_want_any_more_takes_no_memory", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let mounted = mount(&pool, folder, "sparse");
        let _ = pool.shell(Way::Fuse, &format!("echo x > {}/file", mounted.path().display())).expect("sh");
        pool.kill_service();
        drop(mounted.unmount());
        fs::remove_dir_all(folder.join("upper")).expect("removed");
        fs::create_dir(folder.join("upper")).expect("a folder");
        let removed = pool.poolfs(&["pool", "rm", pool.name()]);
        assert!(removed.code == 0 && removed.err.is_empty(), "{removed:?}");
        assert_eq!(kept_mounts(), 0);
        let _ = pool.poolfs(&["pool", "create", pool.name(), "--memory", "512M", "--cache", "64M"]).expect("again");
    });
}

/// The number of the last line.
fn last_number(text: &str) -> u64 {
    text.lines().last().and_then(|line| line.parse().ok()).unwrap_or(0)
}

#[test]
fn writers_lose_nothing_they_were_told_is_written_whenever_the_service_dies() {
    isolated("writers_lose_nothing_they_were_told_is_written_whenever_the_service_dies", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "16M");
        let said: PathBuf = folder.join("said");
        let rounds = if is_soak() { 200 } else { 8 };
        for round in 0..rounds {
            let mounted = mount(&pool, folder, FORMATS[round % 3]);
            let way = if round % 2 == 0 { "--legacy" } else { "--" };
            // The number is said when it was accepted: into a new file, and over a block of a lower one.
            let script = format!(
                "cd {0}; n=0; while :; do n=$((n + 1)); echo $n >> log-{round} || exit 0
                 printf %07d $n | dd of=usr/share/doc/big bs=1 seek=$(($n * 5000 % 4900000)) conv=notrunc status=none || exit 0
                 echo $n >> {1}; done",
                mounted.path().display(),
                said.display(),
            );
            fs::write(&said, "").expect("written");
            let mut command = pool.command();
            command.args(["exec", pool.name()]);
            if way == "--legacy" {
                command.arg(way);
            }
            command.args(["--", "sh", "-c", &script]).stderr(Stdio::null());
            let mut writer = command.spawn().expect("started");
            while last_number(&fs::read_to_string(&said).expect("readable")) < 20 {
                assert!(writer.try_wait().expect("ours").is_none(), "the writer ended: {}", pool.service_log());
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(Duration::from_millis(37 * (round as u64 % 9)));
            pool.kill_service();
            drop(mounted.unmount());
            let _ = writer.wait().expect("ours");
            let told = last_number(&fs::read_to_string(&said).expect("readable"));
            let mounted = mount(&pool, folder, FORMATS[round % 3]);
            let log = fs::read_to_string(mounted.path().join(format!("log-{round}"))).expect("there");
            let numbers: Vec<u64> = log.lines().map(|line| line.parse().expect("a number")).collect();
            assert!(numbers.len() as u64 >= told, "round {round}: {} of {told} lines", numbers.len());
            assert!(numbers.iter().copied().eq(1..=numbers.len() as u64), "round {round}: {numbers:?}");
            let big = fs::read(mounted.path().join("usr/share/doc/big")).expect("there");
            for number in told.saturating_sub(900) + 1..=told {
                let at = (number * 5000 % 4_900_000) as usize;
                let found = String::from_utf8_lossy(&big[at..at + 7]).parse();
                let is_there = found.as_ref().is_ok_and(|found: &u64| *found == number || *found == told + 1);
                assert!(is_there, "round {round}: at {at} {found:?} instead of {number}, told {told}");
            }
            let _ = mounted.unmount().expect("umount");
        }
    });
}

/// When a service dies, by what can be seen of its write-back.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// when the first piece of this file has reached the branch
    Begun(&'static str),
    /// when its cache says that hardly anything waits
    Over,
}

#[test]
fn what_was_written_back_just_before_the_service_died_is_there() {
    isolated("what_was_written_back_just_before_the_service_died_is_there", |folder| {
        const FILES: [&str; 2] = ["usr/share/doc/big", "long"];
        const MOMENTS: [Moment; 4] = [Moment::Begun("long"), Moment::Over, Moment::Begun(FILES[0]), Moment::Over];
        const LITTLE: u64 = 128 << 10;
        branches(folder);
        let pool = Pool::create(folder, "64M");
        let (upper, plain) = (folder.join("upper"), folder.join("plain"));
        for format in &FORMATS[1..] {
            let _ = run(Command::new("cp").arg("-a").arg(folder.join("lower")).arg(&plain)).expect("copied");
            for (round, moment) in MOMENTS.into_iter().enumerate() {
                // Over a lower file; into one that is new and made long at once, in few blocks and at its end.
                let script = format!(
                    "head -c 1200000 /dev/urandom > {random}
                     for tree in {mounted} {plain}; do cd $tree
                     dd if={random} of=usr/share/doc/big bs=4k seek=$(({round} * 250)) conv=notrunc status=none
                     test -e long || truncate -s 300000 long
                     dd if={random} of=long bs=1 count=7 seek=$(({round} * 50000 + 1)) conv=notrunc status=none
                     dd if={random} bs=300001 count=3 iflag=fullblock status=none >> long; done",
                    random = folder.join("random").display(),
                    mounted = folder.join("mnt").display(),
                    plain = plain.display(),
                );
                let mounted = mount(&pool, folder, format);
                let size_of = |name: &str| fs::metadata(upper.join(name)).map_or(0, |file| file.len());
                let before = FILES.map(size_of);
                let way = if round < 2 { Way::Fuse } else { Way::Library };
                let _ = pool.shell(way, &script).expect("changes");
                pool.kill_service_after(|| match moment {
                    Moment::Begun(name) => {
                        let before = before[FILES.iter().position(|file| *file == name).expect("one of them")];
                        wait_until("nothing is written back", || size_of(name) > before);
                    }
                    Moment::Over => wait_until("not all is written back", || {
                        let dirty = pool.status()["service"]["cache"]["dirty_bytes"].as_u64().expect("a number");
                        dirty < LITTLE && FILES.iter().zip(before).all(|(name, before)| size_of(name) > before)
                    }),
                });
                drop(mounted.unmount());
                let mounted = mount(&pool, folder, format);
                for name in FILES {
                    let [expected, found] =
                        [&plain, mounted.path()].map(|tree: &Path| fs::read(tree.join(name)).expect("readable"));
                    assert_eq!(found.len(), expected.len(), "{format}, {round}, {moment:?}: the size of {name}");
                    let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
                    assert_eq!(differs, None, "{format}, round {round}, {moment:?}: {name} differs from there on");
                }
                let _ = mounted.unmount().expect("umount");
                let checked = pool.poolfs(&["fsck", upper.to_str().expect("UTF-8")]);
                assert_eq!(checked.code, 0, "{format}, round {round}: {checked:?}");
            }
            for tree in [&plain, &upper] {
                fs::remove_dir_all(tree).expect("removed");
            }
            fs::create_dir(&upper).expect("a folder");
        }
    });
}

#[test]
fn an_orderly_end_right_after_changes_complains_of_nothing() {
    isolated("an_orderly_end_right_after_changes_complains_of_nothing", |folder| {
        branches(folder);
        let pool = Pool::create(folder, "64M");
        for format in FORMATS {
            let mounted = mount(&pool, folder, format);
            let _ =
                pool.shell(Way::Fuse, &format!("cd {}\n{}", mounted.path().display(), changes(1))).expect("changes");
            let _ = mounted.unmount().expect("umount");
            let log = pool.service_log();
            let complaints: Vec<_> =
                log.lines().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
            assert!(complaints.is_empty(), "{format}: {complaints:?}");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
            fs::create_dir(folder.join("upper")).expect("a folder");
        }
    });
}

/// Files of a lower branch that are together larger than the disk of the upper one.
const FULL_FILES: usize = 6;
const FULL_BYTES: usize = 4 << 20;

fn content_below(file: usize) -> Vec<u8> {
    (0..FULL_BYTES).map(|at| (at / 4096 * 7 + file) as u8).collect()
}

/// Writes blocks here and there until many were refused for want of room; what was accepted is in `contents`.
fn fill(at: &Path, contents: &mut [Vec<u8>]) {
    let open = |file: usize| fs::OpenOptions::new().write(true).open(at.join(format!("f{file}"))).expect("opened");
    let files: Vec<fs::File> = (0..contents.len()).map(open).collect();
    let (mut refused, mut state) = (0, 1u64);
    while refused < 500 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (file, block) = ((state >> 33) as usize % files.len(), (state >> 40) as usize % (FULL_BYTES / 4096));
        let data = [(state >> 52) as u8; 4096];
        match files[file].write_at(&data, block as u64 * 4096) {
            Ok(count) => contents[file][block * 4096..][..count].copy_from_slice(&data[..count]),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ENOSPC), "{error}");
                refused += 1;
            }
        }
    }
}

#[test]
fn a_branch_on_a_full_disk_is_mounted_after_a_death_and_loses_nothing_when_there_is_room() {
    isolated("a_branch_on_a_full_disk_is_mounted_after_a_death_and_loses_nothing_when_there_is_room", |folder| {
        let pool = Pool::create(folder, "64M");
        let [lower, disk, at] = ["lower", "disk", "mnt"].map(|name| folder.join(name));
        for place in [&lower, &disk] {
            fs::create_dir(place).expect("a folder");
        }
        for file in 0..FULL_FILES {
            fs::write(lower.join(format!("f{file}")), content_below(file)).expect("room");
        }
        for format in FORMATS {
            let image = folder.join(format);
            let make =
                "truncate -s 16M IMAGE && mkfs.ext4 -q -m 0 IMAGE && mount -o loop IMAGE DISK && mkdir DISK/upper";
            let make =
                make.replace("IMAGE", image.to_str().expect("text")).replace("DISK", disk.to_str().expect("text"));
            let _ = shell(&make).expect("a disk");
            let upper = disk.join("upper");
            let mount = || pool.mount_stored(&at, &upper, &lower, format);
            let mut contents: Vec<Vec<u8>> = (0..FULL_FILES).map(content_below).collect();
            let mounted = mount();
            fill(&at, &mut contents);
            pool.kill_service();
            drop(mounted.unmount());
            let mounted = mount();
            // What waits for room answers EIO, and nothing else than what was written last.
            let read = |file: usize| fs::read(at.join(format!("f{file}")));
            for (file, content) in contents.iter().enumerate() {
                match read(file) {
                    Ok(found) => assert!(&found == content, "{format}: f{file} differs"),
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO), "{format}: f{file}: {error}"),
                }
            }
            fs::remove_file(at.join("f0")).expect("removed, which makes room");
            let _ = mounted.unmount().expect("umount");
            let mounted = mount();
            for (file, content) in contents.iter().enumerate().skip(1) {
                assert!(&read(file).expect("readable") == content, "{format}: f{file} differs");
            }
            let _ = mounted.unmount().expect("umount");
            let checked = pool.poolfs(&["fsck", upper.to_str().expect("UTF-8")]);
            assert_eq!(checked.code, 0, "{format}: {checked:?}");
            let _ = run(Command::new("umount").arg(&disk)).expect("umount");
        }
    });
}
