//! Many small writes to one descriptor, which a service may take later than they return: nobody may be able to tell. Everything here
//! is true of any filesystem that is right, and of poolfs whether writes are posted or not.

use poolfs_tests::{Outcome, Pool, compile, is_soak, isolated_for, run_within};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
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
    let seconds = if is_soak() { SOAK_S / 3 } else { 6 };
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
        }
    });
}

#[test]
fn each_finds_what_all_have_done_before() {
    let (rounds, seeds) = if is_soak() { ("40000", 20) } else { ("1200", 2) };
    isolated_for("each_finds_what_all_have_done_before", LIMIT * if is_soak() { 20 } else { 1 }, |folder| {
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
                println!("soak: {stack:?}: {}", outcome.out.trim());
            }
            let _ = umount(&pool, &at).expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}
