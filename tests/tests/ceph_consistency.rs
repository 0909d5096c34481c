//! What a mount sees of what another one does, on whatever host, of a directory at a Ceph cluster: the table of docs/semantics.md, which these
//! tests read.

use poolfs_tests::{Cluster, Pool, Stepper, Way, compile, hash, isolated_for, name_of};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const DOCUMENT: &str = include_str!("../../docs/semantics.md");
/// How the table begins.
const HEAD: &str = "| one mount | the other asks for | `close-to-open` | `strict` |";
const MODES: [&str; 2] = ["close-to-open", "strict"];

/// The time of the mode `close-to-open`, after which nothing old may be shown.
const TIME: Duration = Duration::from_secs(1);

/// Longest run of a test.
const LIMIT: Duration = Duration::from_secs(1800);

/// What the table says of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Promise {
    AtOnce,
    InTime,
    Nothing,
}

struct Row {
    change: &'static str,
    question: &'static str,
    promises: [Promise; 2],
}

fn table() -> Vec<Row> {
    let promise = |cell: &str| match cell {
        "at once" => Promise::AtOnce,
        "1 s" => Promise::InTime,
        "-" => Promise::Nothing,
        other => panic!("{other:?} is no promise"),
    };
    let (_, body) = DOCUMENT.split_once(HEAD).expect("the table");
    let rows = body.trim_start().lines().skip(1).take_while(|line| line.starts_with('|'));
    let row = |line: &'static str| match line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>()[..] {
        [change, question, close_to_open, strict] => {
            Row { change, question, promises: [promise(close_to_open), promise(strict)] }
        }
        _ => panic!("{line}: not four cells"),
    };
    rows.map(row).collect()
}

/// A program of a pool, in a directory of its mount.
struct Program<'a> {
    pool: &'a Pool,
    way: Way,
    stepper: Stepper,
    at: PathBuf,
}

impl<'a> Program<'a> {
    fn start(pool: &'a Pool, folder: &Path, way: Way, at: &Path) -> Self {
        let stepper = Stepper::start(pool, &compile(folder, "steps", way == Way::Fuse), way);
        Self { pool, way, stepper, at: at.to_path_buf() }
    }

    /// A step in which `@` stands for the directory and `#` for the round.
    fn step(&mut self, step: &str, round: usize) -> Result<u64, i32> {
        let at = format!("{}/", self.at.display());
        self.stepper.step(&step.replace('@', &at).replace('#', &round.to_string()))
    }

    fn do_all(&mut self, steps: &[&str], round: usize) {
        for step in steps {
            let _ = self.step(step, round).unwrap_or_else(|errno| panic!("{step} by {:?}: {errno}", self.way));
        }
    }

    /// Makes a change of the table. A file that it has open is closed by the next one.
    fn change(&mut self, change: &str, round: usize) {
        match change {
            "writes and closes" => self.do_all(&["open @f# 1", "pwrite 10 50 7", "close"], round),
            "appends and closes" => self.do_all(&["open @f# 1025", "append 500 8", "close"], round),
            "writes" => self.do_all(&["open @f# 1", "pwrite 10 50 9"], round),
            "stores in a mapping, and syncs it" => {
                self.do_all(&["open @f# 2", "map 100", "mwrite 0 50 5", "sync", "unmap", "close"], round);
            }
            "truncates" => self.do_all(&["shorten @f# 17"], round),
            "changes the mode" => self.do_all(&["chmod @f# 256"], round),
            "changes the times" => self.do_all(&["times @f# 1000"], round),
            "links" => self.do_all(&["link @f# @link#"], round),
            "creates" => self.do_all(&["open @new# 65", "close"], round),
            "unlinks" => self.do_all(&["unlink @f#"], round),
            "renames over it" => self.do_all(&["open @new# 65", "append 30 3", "close", "rename @new# @f#"], round),
            "renames the directory" => self.do_all(&["rename @d# @moved#"], round),
            other => panic!("nobody knows how to do {other:?}"),
        }
    }

    /// The answer to a question of the table.
    fn ask(&mut self, question: &str, round: usize) -> Result<u64, i32> {
        match question {
            "content of the file, which it opens then" => {
                let _ = self.step("open @f# 0", round)?;
                let content = self.step("pread 0 8192", round);
                let _ = self.step("close", round)?;
                content
            }
            "size of the file, by its name" => self.step("statsize @f#", round),
            "attributes of the file, by its name" => self.step("look @f#", round),
            "the new name" => self.step("statsize @new#", round),
            "the name" => self.step("statsize @f#", round),
            "a name in the directory" => self.step("statsize @d#/inner", round),
            "the names in the directory" => {
                let names = self.pool.shell(self.way, &format!("ls -A {}", self.at.display())).expect("listed");
                Ok(hash(names.as_bytes()))
            }
            "content of the file, which it has open" => self.step("pread 0 8192", round),
            "size of the file, which it has open" => self.step("size", round),
            other => panic!("nobody knows how to ask for {other:?}"),
        }
    }
}

fn pools(folder: &Path) -> [Pool; 2] {
    ["one", "other"].map(|name| Pool::named(folder, &format!("{}-{name}", name_of(folder)), "16M"))
}

#[test]
fn every_pair_of_the_table_is_as_it_says() {
    let rows = table();
    assert!(rows.len() >= 20, "{}", rows.len());
    isolated_for("every_pair_of_the_table_is_as_it_says", LIMIT, |folder| {
        let cluster = Cluster::create(folder);
        cluster.make_directories(&MODES);
        let pools = pools(folder);
        for (mode, name) in MODES.into_iter().enumerate() {
            let directory = format!("ceph:/{name}");
            let arguments = [&["--dir", &directory, "--consistency", name][..], &cluster.access()].concat();
            let mounts = ["one", "other"].map(|side| folder.join(format!("{side}-{name}")));
            let mounted = [0, 1].map(|side| pools[side].mount(&mounts[side], &arguments));
            let programs = |side: usize| {
                [Way::Library, Way::Fuse].map(|way| Program::start(&pools[side], folder, way, mounted[side].path()))
            };
            let (mut changers, mut observers) = (programs(0), programs(1));
            let mut round = 0;
            for row in rows.iter().filter(|row| row.promises[mode] != Promise::Nothing) {
                for changer in &mut changers {
                    round += 1;
                    changer.do_all(
                        &["open @f# 66", "append 100 1", "close", "mkdir @d#", "open @d#/inner 65", "close"],
                        round,
                    );
                    let is_open = row.question.contains("has open");
                    let before = observers.each_mut().map(|observer| {
                        if is_open {
                            observer.do_all(&["open @f# 0"], round);
                        }
                        observer.ask(row.question, round)
                    });
                    changer.change(row.change, round);
                    if row.promises[mode] == Promise::InTime {
                        std::thread::sleep(TIME);
                    }
                    let after = observers.each_mut().map(|observer| observer.ask(row.question, round));
                    let what =
                        format!("{name}: one {} by {:?}, the other asks for {}", row.change, changer.way, row.question);
                    if is_open {
                        changer.do_all(&["open @f# 0"], round);
                    }
                    let truth = changer.ask(row.question, round);
                    for (observer, (before, after)) in observers.iter_mut().zip(before.into_iter().zip(after)) {
                        assert_ne!(before, truth, "{what} by {:?}", observer.way);
                        assert_eq!(after, truth, "{what} by {:?}", observer.way);
                        if is_open {
                            observer.do_all(&["close"], round);
                        }
                    }
                }
            }
            drop((changers, observers));
            for mounted in mounted {
                let _ = mounted.unmount().expect("umount");
            }
        }
    });
}

#[test]
fn what_was_closed_is_durable_where_that_is_promised() {
    const PIECE: usize = 65536;
    const PIECES: usize = 100;
    isolated_for("what_was_closed_is_durable_where_that_is_promised", LIMIT, |folder| {
        let cluster = Cluster::create(folder);
        cluster.make_directories(&["home"]);
        let pool = Pool::create(folder, "16M");
        let arguments = [&["--dir", "ceph:/home", "--consistency", "close-to-open"][..], &cluster.access()].concat();
        let at = folder.join("mnt");
        let mount = [&["mount", pool.name(), at.to_str().expect("text")][..], &arguments].concat();
        for (round, way) in [Way::Library, Way::Fuse].into_iter().enumerate() {
            // What is dead cannot be looked at.
            let _ = fs::create_dir(&at);
            let _ = pool.poolfs(&mount).expect("mounted");
            let mut program = Program::start(&pool, folder, way, &at);
            program.do_all(&["open @f# 65"], round);
            program.do_all(&vec![format!("append {PIECE} 7").as_str(); PIECES], round);
            pool.kill_service_after(|| program.do_all(&["close"], round));
        }
        let _ = pool.poolfs(&mount).expect("mounted");
        let mounted = pool.mounted(&at);
        for round in 0..2 {
            let found = fs::read(at.join(format!("f{round}"))).expect("there");
            assert!(found == vec![7; PIECE * PIECES], "{round}: {} bytes", found.len());
        }
        let _ = mounted.unmount().expect("umount");
    });
}
