//! Many small writes to one descriptor, which a service may take after they have returned: nobody may be able to tell.
//!
//! Everything here is true of any correct filesystem, and of poolfs whether writes are posted or not.

use poolfs_tests::{Outcome, Pool, Stepper, Way, compile, hash, is_soak, isolated_for, run, run_within, shell};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Longest run of one test, whatever else the machine does.
const LIMIT: Duration = Duration::from_secs(600);

/// How long the storms of the long form take together.
const SOAK_S: u64 = 30 * 60;

/// The programs of a test, with the library and without.
struct Programs {
    library: PathBuf,
    kernel: PathBuf,
}

impl Programs {
    fn compile(folder: &Path, name: &str) -> Self {
        Self { library: compile(folder, name, false), kernel: compile(folder, name, true) }
    }
}

fn mounted(pool: &Pool, folder: &Path, stack: Stack) -> PathBuf {
    let at = folder.join("mnt");
    for name in ["lower", "upper"] {
        fs::create_dir_all(folder.join(name)).expect("a folder");
    }
    match stack {
        Stack::Directory => pool.mount_directory(&at, &folder.join("upper")).keep(),
        Stack::Union => pool.mount_union(&at, &folder.join("upper"), &[&folder.join("lower")]).keep(),
    }
    at
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    Directory,
    Union,
}

fn umount(pool: &Pool, at: &Path) -> Outcome {
    pool.poolfs(&["umount", pool.name(), at.to_str().expect("text")])
}

fn storm(pool: &Pool, programs: &Programs, at: &Path, board: &Path, seconds: u64, seed: u64) -> Command {
    let mut command = pool.command();
    command.args(["exec", pool.name(), "--"]).arg(&programs.kernel).arg("storm").arg(at).arg(board);
    command.args([seconds.to_string(), seed.to_string()]).arg(&programs.library).arg(&programs.kernel);
    command
}

#[test]
fn whoever_looks_finds_every_write_that_has_returned() {
    let seconds = if is_soak() { SOAK_S / 3 } else { 5 };
    let limit = LIMIT + Duration::from_secs(3 * seconds);
    isolated_for("whoever_looks_finds_every_write_that_has_returned", limit, |folder| {
        let programs = Programs::compile(folder, "posting");
        let board = folder.join("board");
        // In a cache that is far smaller than the files as well.
        for (number, (stack, cache)) in
            [(Stack::Directory, "64M"), (Stack::Union, "64M"), (Stack::Union, "512K")].into_iter().enumerate()
        {
            let pool = Pool::create(folder, cache);
            let at = mounted(&pool, folder, stack);
            let seed = if is_soak() { u64::from(std::process::id()) + number as u64 } else { 1 + number as u64 };
            let outcome = run_within(&mut storm(&pool, &programs, &at, &board, seconds, seed), limit);
            assert_eq!(outcome.code, 0, "{stack:?}, {cache}, seed {seed}: {outcome:?}");
            println!("soak: {stack:?}, {cache}: {}", outcome.out.trim());
            let check = |place: &Path| {
                let place = place.join("posting");
                let _ = run_within(Command::new(&programs.kernel).arg("check").arg(place).arg(&board), limit)
                    .expect("what is left is right");
            };
            check(&at);
            let _ = umount(&pool, &at).expect("umount");
            check(&folder.join("upper"));
            let at = mounted(&pool, folder, stack);
            check(&at);
            let _ = umount(&pool, &at).expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
            fs::remove_file(&board).expect("it was there");
        }
    });
}

#[test]
fn a_write_that_has_only_been_said_to_return_is_found_out() {
    isolated_for("a_write_that_has_only_been_said_to_return_is_found_out", LIMIT, |folder| {
        let programs = Programs::compile(folder, "posting");
        // On the disk: by those who write as they say, nothing is found.
        for (number, lies) in [None, Some("lying")].into_iter().enumerate() {
            let at = folder.join(format!("files-{number}"));
            fs::create_dir(&at).expect("a folder");
            let mut command = Command::new(&programs.kernel);
            command.arg("storm").arg(&at).arg(folder.join("board")).args(["3", "1"]);
            let outcome = run_within(command.arg(&programs.library).arg(&programs.kernel).args(lies), LIMIT);
            let found_out = outcome.code != 0 && outcome.err.contains("had been written");
            assert_eq!(found_out, lies.is_some(), "{lies:?}: {outcome:?}");
        }
    });
}

#[test]
fn a_file_is_as_long_when_it_has_been_opened_as_what_was_written_before() {
    let seconds = if is_soak() { 60 } else { 10 };
    isolated_for("a_file_is_as_long_when_it_has_been_opened_as_what_was_written_before", LIMIT, |folder| {
        let programs = Programs::compile(folder, "openings");
        let pool = Pool::create(folder, "64M");
        let at = mounted(&pool, folder, Stack::Union);
        // Several at once, so that what is posted waits to be taken.
        let (library, kernel) = (programs.library.display(), programs.kernel.display());
        let pairs = (0..3).map(|number| {
            let files = format!("{}/f{number} {}/board-{number} {seconds}", at.display(), folder.display());
            format!("{library} write {files} & {kernel} look {files} & all=\"$all $!\"; ")
        });
        let script =
            format!("all=; {} for look in $all; do wait $look || exit 1; done; wait", pairs.collect::<String>());
        let _ = pool.shell(Way::Library, &script).expect("as long as was written");
        let posted = pool.status()["service"]["instances"][0]["posted_requests"].as_u64().expect("counted");
        assert!(posted > 100, "{posted} requests were posted");
        let _ = umount(&pool, &at).expect("umount");
    });
}

#[test]
fn each_finds_what_all_have_done_before() {
    let (rounds, seeds, limit) = if is_soak() { ("20000", 6, LIMIT * 6) } else { ("900", 2, LIMIT) };
    isolated_for("each_finds_what_all_have_done_before", limit, |folder| {
        let programs = Programs::compile(folder, "baton");
        for stack in [Stack::Directory, Stack::Union] {
            let pool = Pool::create(folder, "16M");
            let at = mounted(&pool, folder, stack);
            for number in 0..seeds {
                let seed = if is_soak() { u64::from(std::process::id()) + number } else { number + 1 };
                let mut command = pool.command();
                command.args(["exec", pool.name(), "--"]).arg(&programs.library).arg(&at);
                command.args([&seed.to_string(), rounds]).arg(&programs.kernel);
                let outcome = run_within(&mut command, LIMIT);
                assert_eq!(outcome.code, 0, "{stack:?}, seed {seed}: {outcome:?}");
            }
            println!("soak: {stack:?}: {seeds} programs of {rounds} turns");
            let _ = umount(&pool, &at).expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}

#[test]
fn a_sign_that_was_given_after_a_write_is_not_seen_before_it() {
    let (signs, limit) = if is_soak() { ("4000", LIMIT * 6) } else { ("70", LIMIT) };
    isolated_for("a_sign_that_was_given_after_a_write_is_not_seen_before_it", limit * 3, |folder| {
        let programs = Programs::compile(folder, "afterwards");
        for stack in [Stack::Directory, Stack::Union] {
            let pool = Pool::create(folder, "16M");
            let at = mounted(&pool, folder, stack);
            let mut command = pool.command();
            command.args(["exec", pool.name(), "--"]).arg(&programs.library).arg(&at).arg(signs).arg(&programs.kernel);
            let outcome = run_within(&mut command, limit);
            assert_eq!(outcome.code, 0, "{stack:?}: {outcome:?}");
            println!("soak: {stack:?}: {}", outcome.out.trim());
            let _ = umount(&pool, &at).expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}

/// Files that a [`Stepper`] writes as it is told (`programs/told.c`), and who looks whether all is there that it was told is written.
struct Told {
    program: PathBuf,
    judge: PathBuf,
    board: PathBuf,
}

impl Told {
    fn make(folder: &Path) -> Self {
        let judge = compile(folder, "posting", true);
        Self { program: compile(folder, "told", false), judge, board: folder.join("board") }
    }

    /// One that writes the file of this number.
    fn start(&self, pool: &Pool, way: Way, place: &Path, number: usize, how: usize) -> Stepper {
        let mut process = Stepper::start(pool, &self.program, way);
        assert_eq!(process.step(&format!("open {} {} {number} {how}", place.display(), self.board.display())), Ok(0));
        process
    }

    /// Looks at all files, in a mount or a branch.
    fn check(&self, place: &Path) {
        let outcome = run(Command::new(&self.judge).arg("check").arg(place).arg(&self.board));
        assert_eq!(outcome.code, 0, "in {}: {outcome:?}", place.display());
    }

    fn begin_again(&self) {
        fs::remove_file(&self.board).expect("it was there");
    }
}

#[test]
fn what_was_written_before_an_unmount_is_in_the_branch() {
    isolated_for("what_was_written_before_an_unmount_is_in_the_branch", LIMIT, |folder| {
        let told = Told::make(folder);
        let upper = folder.join("upper");
        for stack in [Stack::Directory, Stack::Union] {
            let pool = Pool::create(folder, "16M");
            for how in APPENDS {
                let at = mounted(&pool, folder, stack);
                let mut process = told.start(&pool, Way::Library, &at, 0, how);
                assert_eq!(process.step("append 50"), Ok(50));
                // Who has it open is in the way, and goes on.
                let refused = umount(&pool, &at);
                assert!(refused.code == 1 && refused.err.contains("in use"), "{refused:?}");
                assert_eq!(process.step("append 50"), Ok(50));
                told.check(&at);
                assert_eq!(process.step("append 50"), Ok(50));
                assert_eq!(process.step("close"), Ok(0));
                let _ = umount(&pool, &at).expect("umount after a close");
                told.check(&upper);
                drop(process);

                // One that ends without closing it, and one that is killed.
                let at = mounted(&pool, folder, stack);
                let mut ends = told.start(&pool, Way::Library, &at, 1, how);
                let mut killed = told.start(&pool, Way::Library, &at, 2, how);
                assert_eq!(ends.step("append 50"), Ok(50));
                assert_eq!(killed.step("append 50"), Ok(50));
                kill(&killed);
                drop((ends, killed));
                let _ = umount(&pool, &at).expect("umount after an end");
                told.check(&upper);
                told.begin_again();
                fs::remove_dir_all(&upper).expect("removed");
            }
        }
    });
}

/// With `O_APPEND`, at the descriptor's own offset, and by `pwrite`.
const APPENDS: [usize; 3] = [1, 0, 2];

/// Kills the program itself, the only child of `poolfs exec`.
fn kill(stepper: &Stepper) {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", stepper.pid())).expect("it runs");
    let child = children.split_whitespace().next().and_then(|word| word.parse().ok());
    kill_process(child.and_then(Pid::from_raw).expect("a child"), Signal::KILL).expect("it is ours");
}

#[test]
fn a_command_that_has_ended_has_written() {
    isolated_for("a_command_that_has_ended_has_written", LIMIT, |folder| {
        let pool = Pool::create(folder, "16M");
        for stack in [Stack::Directory, Stack::Union] {
            let at = mounted(&pool, folder, stack);
            let file = at.join("f");
            let mut expected = String::new();
            for number in 0..30 {
                let script = match number % 3 {
                    0 => format!("printf x >> {}", file.display()),
                    1 => format!("for i in 1 2 3 4 5 6; do printf $i; done >> {}", file.display()),
                    _ => format!("i=0; while [ $i -lt 20 ]; do echo $i; i=$((i + 1)); done >> {}", file.display()),
                };
                expected += &match number % 3 {
                    0 => "x".to_owned(),
                    1 => "123456".to_owned(),
                    _ => (0..20).map(|i| format!("{i}\n")).collect(),
                };
                let _ = pool.shell(Way::Library, &script).expect("it writes");
                assert_eq!(fs::metadata(&file).expect("there").len(), expected.len() as u64, "{stack:?}, {number}");
                assert_eq!(fs::read_to_string(&file).expect("readable"), expected, "{stack:?}, {number}");
            }
            let _ = umount(&pool, &at).expect("umount");
            assert_eq!(fs::read_to_string(folder.join("upper/f")).expect("readable"), expected, "{stack:?}");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}

#[test]
fn after_its_service_s_death_nothing_succeeds_and_what_was_synced_is_there() {
    isolated_for("after_its_service_s_death_nothing_succeeds_and_what_was_synced_is_there", LIMIT, |folder| {
        let told = Told::make(folder);
        let pool = Pool::create(folder, "16M");
        let calls = ["append 1", "sync", "data", "read", "close"];
        for (stack, how) in
            [Stack::Directory, Stack::Union].into_iter().flat_map(|stack| APPENDS.map(|how| (stack, how)))
        {
            let at = mounted(&pool, folder, stack);
            let mut all: Vec<Stepper> =
                (0..calls.len()).map(|number| told.start(&pool, Way::Library, &at, number, how)).collect();
            for process in &mut all {
                for step in ["append 40", "sync", "append 12"] {
                    process.step(step).expect("it is written");
                }
            }
            pool.kill_service();
            for (process, call) in all.iter_mut().zip(calls) {
                let error = process.step(call).expect_err("a success of a dead service");
                assert!(is_of_death(error), "{stack:?}, {how}: {call}: error {error}");
                process.step("append 1").expect_err("a success of a dead service");
                assert_eq!(process.step("mark"), Ok(0));
            }
            drop(all);
            let _ = umount(&pool, &at);
            let at = mounted(&pool, folder, stack);
            told.check(&at);
            let _ = umount(&pool, &at).expect("umount");
            told.begin_again();
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}

fn is_of_death(error: i32) -> bool {
    [libc::EIO, libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED].contains(&error)
}

#[test]
fn a_service_killed_at_any_moment_keeps_what_was_synced() {
    let (rounds, limit) = if is_soak() { (200, LIMIT * 6) } else { (4, LIMIT) };
    isolated_for("a_service_killed_at_any_moment_keeps_what_was_synced", limit, |folder| {
        let told = Told::make(folder);
        let pool = Pool::create(folder, "16M");
        for round in 0..rounds {
            let stack = [Stack::Directory, Stack::Union][round % 2];
            let at = mounted(&pool, folder, stack);
            let mut all: Vec<Stepper> = APPENDS
                .iter()
                .enumerate()
                .map(|(number, how)| told.start(&pool, Way::Library, &at, number, *how))
                .collect();
            std::thread::scope(|scope| {
                let running: Vec<_> = all
                    .iter_mut()
                    .map(|process| scope.spawn(|| process.step("run 7").expect_err("it ends so")))
                    .collect();
                pool.kill_service_after(|| std::thread::sleep(Duration::from_millis(20 + round as u64 * 37 % 300)));
                for process in running {
                    let error = process.join().expect("it answers");
                    assert!(is_of_death(error), "{stack:?}, round {round}: error {error}");
                }
            });
            for process in &mut all {
                assert_eq!(process.step("mark"), Ok(0));
            }
            drop(all);
            let _ = umount(&pool, &at);
            let at = mounted(&pool, folder, stack);
            told.check(&at);
            let _ = umount(&pool, &at).expect("umount");
            told.begin_again();
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
        println!("soak: {rounds} services killed under three writers");
    });
}

/// Leaves little room in a branch of 8 MiB.
fn fill(at: &Path) {
    let _ = shell(&format!("head -c 7000000 /dev/zero | tr '\\0' x > {}/filler", at.display())).expect("there is room");
}

#[test]
fn what_a_full_branch_has_accepted_is_there() {
    isolated_for("what_a_full_branch_has_accepted_is_there", LIMIT, |folder| {
        let told = Told::make(folder);
        let (at, upper, lower) = (folder.join("mnt"), folder.join("upper"), folder.join("lower"));
        let pool = Pool::create(folder, "64M");
        fs::create_dir_all(&lower).expect("a folder");
        for format in ["sparse", "bcow"] {
            for how in APPENDS {
                fs::create_dir_all(&upper).expect("a folder");
                let [upper_text, lower_text] = [&upper, &lower].map(|path| path.to_str().expect("text"));
                let stack =
                    ["--upper", upper_text, "--lower", lower_text, "--upper-format", format, "--upper-size", "8M"];
                let mounted = pool.mount(&at, &stack);
                fill(&at);
                // Several at once, one of them by the kernel.
                let mut all = [
                    told.start(&pool, Way::Library, &at, 0, how),
                    told.start(&pool, Way::Library, &at, 1, how),
                    told.start(&pool, Way::Fuse, &at, 2, how),
                ];
                std::thread::scope(|scope| {
                    let writing: Vec<_> =
                        all.iter_mut().map(|process| scope.spawn(|| process.step("append 100000"))).collect();
                    for process in writing {
                        assert_eq!(process.join().expect("it answers"), Err(libc::ENOSPC), "{format}, {how}");
                    }
                });
                told.check(&at);
                for process in &mut all {
                    assert_eq!(process.step("append 1"), Err(libc::ENOSPC), "{format}, {how}");
                    assert_eq!(process.step("sync"), Ok(0), "what was accepted has room: {format}, {how}");
                }
                told.check(&at);
                fs::remove_file(at.join("filler")).expect("removed");
                for process in &mut all {
                    assert_eq!(process.step("append 100"), Ok(100), "{format}, {how}");
                }
                told.check(&at);
                for process in &mut all {
                    process.step("read").expect("its own");
                    assert_eq!(process.step("close"), Ok(0), "{format}, {how}");
                }
                drop(all);
                let _ = mounted.unmount().expect("umount");
                let mounted = pool.mount(&at, &stack);
                told.check(&at);
                let _ = mounted.unmount().expect("umount");
                told.begin_again();
                fs::remove_dir_all(&upper).expect("removed");
            }
        }
    });
}

#[test]
fn a_full_disk_is_told_of_before_anything_is_missing() {
    isolated_for("a_full_disk_is_told_of_before_anything_is_missing", LIMIT, |folder| {
        let told = Told::make(folder);
        let (disk, at) = (folder.join("disk"), folder.join("mnt"));
        fs::create_dir(&disk).expect("a folder");
        let make = "truncate -s 20M D.img; mkfs.ext4 -q -m 0 D.img; mount -o loop D.img D; mkdir D/data";
        let _ = shell(&make.replace('D', &disk.display().to_string())).expect("a small disk");
        let pool = Pool::create(folder, "64M");
        let data = disk.join("data");
        for (round, how) in APPENDS.into_iter().enumerate() {
            let mounted = if round == 2 {
                fs::create_dir_all(folder.join("lower")).expect("a folder");
                pool.mount_union(&at, &data, &[&folder.join("lower")])
            } else {
                pool.mount_directory(&at, &data)
            };
            let mut process = told.start(&pool, Way::Library, &at, 0, how);
            assert_eq!(process.step("append 300"), Ok(300));
            assert_eq!(process.step("sync"), Ok(0));
            assert_eq!(process.step("append 20"), Ok(20));
            // Somebody else takes all room there is.
            let fill = format!("dd if=/dev/zero of={}/ballast bs=4k 2>/dev/null || true", disk.display());
            let _ = shell(&fill);
            let error = process.step("run 16").expect_err("there is no room");
            assert_eq!(error, libc::ENOSPC, "round {round}");
            told.check(&at);
            fs::remove_file(disk.join("ballast")).expect("removed");
            // It may be told once more.
            if process.step("sync").is_err() {
                assert_eq!(process.step("sync"), Ok(0), "round {round}: with room");
            }
            assert_eq!(process.step("append 20"), Ok(20), "round {round}");
            assert_eq!(process.step("sync"), Ok(0), "round {round}");
            told.check(&at);
            assert_eq!(process.step("close"), Ok(0), "round {round}");
            drop(process);
            let _ = mounted.unmount().expect("umount");
            told.check(&data);
            told.begin_again();
            fs::remove_file(data.join("f00")).expect("removed");
        }
        drop(pool);
        let _ = shell(&format!("umount {}", disk.display())).expect("umount");
    });
}

#[test]
fn who_becomes_somebody_else_behind_the_library_goes_on_without_an_error() {
    isolated_for("who_becomes_somebody_else_behind_the_library_goes_on_without_an_error", LIMIT, |folder| {
        let program = compile(folder, "becomes", false);
        let pool = Pool::create(folder, "64M");
        for stack in [Stack::Directory, Stack::Union] {
            let at = mounted(&pool, folder, stack);
            fs::set_permissions(&at, fs::Permissions::from_mode(0o777)).expect("set");
            let mut command = pool.line("exec POOL --");
            let written = run_within(command.arg(&program).arg(&at), LIMIT).expect("no error");
            let log = fs::read_to_string(at.join("log")).expect("readable");
            assert_eq!(log.len().to_string(), written.trim());
            let lines = log.lines().enumerate();
            assert!(lines.into_iter().all(|(number, line)| line == format!("record {:09}", number * 17)));
            let _ = umount(&pool, &at).expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}

#[test]
fn what_was_written_is_the_kernels_to_go_by_when_the_session_is_over() {
    isolated_for("what_was_written_is_the_kernels_to_go_by_when_the_session_is_over", LIMIT, |folder| {
        let program = compile(folder, "ended", false);
        let pool = Pool::create(folder, "64M");
        let at = mounted(&pool, folder, Stack::Union);
        // Another instance, by whose session the change is found.
        let other = folder.join("other");
        fs::create_dir(folder.join("others")).expect("a folder");
        let _other = pool.mount_directory(&other, &folder.join("others"));
        let place = |name: &str| {
            let place = at.join(name);
            fs::create_dir(&place).expect("a folder");
            fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).expect("set");
            place
        };
        std::thread::scope(|scope| {
            for how in ["mmap", "sendfile", "copy", "left", "rwf", "setfl", "append"] {
                for asked in [&at, &other] {
                    let place = place(&format!("{how}{}", asked == &other));
                    let mut command = pool.line("exec POOL --");
                    command.arg(&program).arg(place).arg(how).arg(asked);
                    scope.spawn(move || drop(run_within(&mut command, LIMIT).expect(how)));
                }
            }
        });
        let place = place("store");
        let mut reader = Stepper::start(&pool, &compile(folder, "steps", false), Way::Library);
        fs::write(place.join("stored"), [b'x'; 1000]).expect("made");
        fs::set_permissions(place.join("stored"), fs::Permissions::from_mode(0o666)).expect("set");
        let _ = reader.step(&format!("open {} 0", place.join("stored").display())).expect("opened");
        let mut read = || (0..20).map(|_| reader.step("pread 0 1").expect("read")).last();
        assert_eq!(read(), Some(hash(b"x")));
        let mut command = pool.line("exec POOL --");
        command.arg(&program).arg(&place).arg("store").arg(&at).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut writer = command.spawn().expect("started");
        let mut said = String::new();
        let _ = BufReader::new(writer.stdout.take().expect("piped")).read_line(&mut said).expect("said");
        assert_eq!((said.as_str(), read()), ("stored\n", Some(hash(b"N"))));
        drop(writer.stdin.take());
        assert!(writer.wait().expect("ended").success());
        drop(reader);
        let _ = umount(&pool, &at).expect("umount");
    });
}

#[test]
fn who_has_a_file_open_of_a_mount_that_is_covered_or_taken_away_loses_nothing() {
    isolated_for("who_has_a_file_open_of_a_mount_that_is_covered_or_taken_away_loses_nothing", LIMIT, |folder| {
        let program = compile(folder, "steps", false);
        let pool = Pool::create(folder, "64M");
        let at = mounted(&pool, folder, Stack::Directory);
        let whole = [b'x'; 60_000];
        let with = |end: &[u8]| hash(&[&whole[..], end].concat());
        for (way, taken_away, back) in
            [("covered", "mount -t tmpfs none AT", "umount AT"), ("detached", "umount -l AT", "true")]
        {
            let act = |command: &str| shell(&command.replace("AT", at.to_str().expect("text"))).expect("a mount");
            let written = |name: &str, flags: i32| {
                let mut file = Stepper::start(&pool, &program, Way::Library);
                let flags = flags | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC;
                let _ = file.step(&format!("open {} {flags}", at.join(name).display())).expect("opened");
                for _ in 0..60 {
                    assert_eq!(file.step("append 1000 120"), Ok(1000));
                }
                file
            };
            let files = ["sent", "mapped", "ended", "appending", "left", "copied"].map(|name| written(name, 0));
            let mut appended = written("appended", libc::O_APPEND);
            let _ = act(taken_away);
            let [mut sent, mut mapped, mut ended, mut appending, mut left, mut read] = files;
            assert_eq!(sent.step("send 0 100000"), Ok(hash(&whole)), "{way}");
            assert_eq!(read.step("pread 0 100000"), Ok(hash(&whole)), "{way}");
            assert_eq!(
                (mapped.step("textmap 60000"), mapped.step("mread 0 60000")),
                (Ok(0), Ok(hash(&whole))),
                "{way}"
            );
            assert_eq!((ended.step("end 3 122"), ended.step("pread 0 100000")), (Ok(3), Ok(with(b"zzz"))), "{way}");
            // At the end that the kernel knows.
            assert_eq!((left.step("left"), left.step("size")), (Ok(0), Ok(60_000)), "{way}");
            assert_eq!(appending.step("appending"), Ok(0), "{way}");
            for file in [&mut appending, &mut appended] {
                assert_eq!((file.step("append 3 122"), file.step("where")), (Ok(3), Ok(60_003)), "{way}");
                assert_eq!(file.step("pread 0 100000"), Ok(with(b"zzz")), "{way}");
            }
            let _ = act(back);
        }
    });
}
