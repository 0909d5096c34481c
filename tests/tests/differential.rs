//! Random programs of several processes, each by the library or the kernel, end as on the disk's own filesystem.
//!
//! `POOLFS_DIFFERENTIAL` sets the long run in words: how many operations, the first seed, a stack.

use poolfs_tests::differential::{Difference, Stack, World, random_program, shortest};
use poolfs_tests::{Way, isolated_for, workspace};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Operations of one random program.
const PROGRAM: usize = 1_000;

/// Operations on each stack of the run that every test of the project makes.
const OPERATIONS: u64 = 5_000;

/// The same on the disk alone, which shows that the test itself makes no difference.
const OPERATIONS_DISK: u64 = 2_000;

/// Differences after which there is enough to look at.
const FOUND_MAX: usize = 10;

/// Lines of a program that are shown of what came before a difference.
const LINES_BEFORE: usize = 30;

/// A program that differed, as short as it goes; one that does not differ again, up to where it did.
fn report(world: &mut World, program: &[String], difference: &Difference) -> String {
    match shortest(world, program) {
        Some((shorter, difference)) => format!("differs from the disk\n{}\n{difference}", shorter.join("\n")),
        None => {
            let before = &program[difference.at.saturating_sub(LINES_BEFORE)..difference.at];
            format!("differed from the disk, but only once, after\n{}\n{difference}", before.join("\n"))
        }
    }
}

/// Compares so many operations; the programs that differed, each with its difference.
fn run(folder: &Path, stack: Stack, seeds: impl Iterator<Item = u64>, operations: u64) -> Vec<String> {
    let mut world = World::new(stack, folder);
    let start = Instant::now();
    let mut found = Vec::new();
    for seed in seeds {
        let program = random_program(seed, PROGRAM);
        if let Some(difference) = world.compare(&program) {
            found.push(format!("{stack:?}, seed {seed}: {}", report(&mut world, &program, &difference)));
        }
        if world.operations >= operations || found.len() >= FOUND_MAX {
            break;
        }
    }
    if !found.is_empty() {
        // Its pool can be removed then.
        world.end();
        return found;
    }
    for way in [Way::Library, Way::Fuse] {
        let enough = world.pool().is_none_or(|pool| pool.operations(way) > world.operations_here / 4);
        assert!(enough, "hardly any operation went by {way:?}");
    }
    world.end();
    println!("soak: {stack:?} {} operations in {:.0} s", world.operations, start.elapsed().as_secs_f64());
    found
}

fn run_all(folder: &Path, stacks: impl Iterator<Item = (Stack, u64)>, seed: u64) {
    let differed: Vec<_> = stacks.flat_map(|(stack, operations)| run(folder, stack, seed.., operations)).collect();
    assert!(differed.is_empty(), "{}", differed.join("\n"));
}

/// What `POOLFS_DIFFERENTIAL` asks for instead of the run that every test of the project makes.
struct Asked {
    operations: u64,
    seed: u64,
    stack: Option<String>,
}

fn asked() -> Option<Asked> {
    let text = std::env::var("POOLFS_DIFFERENTIAL").ok()?;
    let mut words = text.split_whitespace();
    let mut number = |what: &str, otherwise: u64| {
        words.next().map_or(otherwise, |word| word.parse().unwrap_or_else(|error| panic!("{what} {word:?}: {error}")))
    };
    let (operations, seed) = (number("operations", 20_000), number("seed", 1_000));
    Some(Asked { operations, seed, stack: words.next().map(str::to_owned) })
}

#[test]
fn random_programs_end_as_on_the_disk() {
    let asked = asked();
    let limit = Duration::from_secs(if asked.is_some() { 6 * 3600 } else { 300 });
    isolated_for("random_programs_end_as_on_the_disk", limit, |folder| {
        let all = [Stack::Disk].into_iter().chain(Stack::ALL);
        if let Some(asked) = asked {
            let wanted = |stack: &Stack| asked.stack.as_ref().is_none_or(|name| *name == format!("{stack:?}"));
            run_all(folder, all.filter(wanted).map(|stack| (stack, asked.operations)), asked.seed);
        } else {
            let operations = |stack| if stack == Stack::Disk { OPERATIONS_DISK } else { OPERATIONS };
            run_all(folder, all.map(|stack| (stack, operations(stack))), 1);
        }
    });
}

/// The programs in `programs/differences.txt`, each with a line that says what it is about.
fn found_before() -> Vec<(String, Vec<String>)> {
    let path = workspace().join("tests/programs/differences.txt");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut programs: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        match (line.strip_prefix("# "), programs.last_mut()) {
            (Some(name), _) => programs.push((name.to_owned(), Vec::new())),
            (None, Some((_, program))) => program.push(line.to_owned()),
            (None, None) => panic!("{}: {line:?} belongs to no program", path.display()),
        }
    }
    programs
}

#[test]
fn programs_that_once_differed_end_as_on_the_disk() {
    let limit = Duration::from_secs(300);
    isolated_for("programs_that_once_differed_end_as_on_the_disk", limit, |folder| {
        let mut failed = Vec::new();
        for stack in Stack::ALL {
            let mut world = World::new(stack, folder);
            for (name, program) in found_before() {
                if let Some(difference) = world.compare(&program) {
                    failed.push(format!("{stack:?}, {name}: {difference}"));
                }
            }
            world.end();
        }
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    });
}
