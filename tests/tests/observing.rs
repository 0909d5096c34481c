//! What poolfs tells of processes and of itself while it works: `why`, `status --watch`.

use poolfs_tests::{Pool, Stepper, Way, compile, isolated};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The program that `poolfs exec` runs for a stepper: its only child.
fn program_of(stepper: &Stepper) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let children = format!("/proc/{0}/task/{0}/children", stepper.pid());
        let text = fs::read_to_string(children).expect("poolfs exec runs");
        if let Some(pid) = text.split_whitespace().next() {
            return pid.parse().expect("a number");
        }
        assert!(Instant::now() < deadline, "poolfs exec starts nothing");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// What `why --json` says of the descriptor that stands for `file`: the way, and because of what.
fn why(pool: &Pool, pid: u32, file: &str) -> (String, String) {
    let text = pool.poolfs(&["why", &pid.to_string(), "--json"]).expect("why");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let descriptors = answer["descriptors"].as_array().expect("descriptors");
    let found = descriptors.iter().find(|descriptor| descriptor["file"] == file);
    let found = found.unwrap_or_else(|| panic!("{file} in {text}"));
    let field = |name: &str| found[name].as_str().expect("text").to_owned();
    (field("goes_by"), field("because"))
}

#[test]
fn why_tells_the_way_of_every_descriptor() {
    isolated("why_tells_the_way_of_every_descriptor", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let file = at.join("file").display().to_string();
        fs::write(&file, [7; 8192]).expect("a file");

        let mut program = Stepper::start(&pool, &compile(folder, "steps", false), Way::Library);
        let mut asked = |commands: &[&str]| {
            for command in commands {
                program.step(command).unwrap_or_else(|errno| panic!("{command}: {errno}"));
            }
            program_of(&program)
        };
        let open = format!("open {file} 2");
        let pid = asked(&[&open, "pread 0 10"]);
        assert_eq!(why(&pool, pid, &file).0, "fuse", "used once: {:?}", why(&pool, pid, &file));
        asked(&["pread 0 10", "pread 0 10"]);
        let (way, because) = why(&pool, pid, &file);
        assert!(way == "library" && because.starts_with("adopted"), "{way}: {because}");
        asked(&["map 4096", "mwrite 0 10 1"]);
        let (way, because) = why(&pool, pid, &file);
        assert!(way == "fuse" && because.contains("mapped"), "{way}: {because}");
        let text = pool.poolfs(&["why", &pid.to_string(), "1"]).expect("why of a pipe");
        assert!(text.contains("go by library") && text.contains("foreign"), "{text}");
        assert_ne!(pool.poolfs(&["why", &pid.to_string(), "999"]).code, 0, "a descriptor that is not open");
        drop(program);

        for (what, static_, way, word) in
            [("--legacy", false, Way::Legacy, "without the library"), ("static", true, Way::Library, "static")]
        {
            let mut program = Stepper::start(&pool, &compile(folder, "steps", static_), way);
            assert_eq!(program.step(&open), Ok(0));
            assert_eq!(program.step("pread 0 1").map(|_| ()), Ok(()));
            let (way, because) = why(&pool, program_of(&program), &file);
            assert!(way == "fuse" && because.contains(word), "{what}: {way}: {because}");
        }
        assert_ne!(pool.poolfs(&["why", "4194304"]).code, 0, "no process has this number");
        drop(mount);
    });
}

#[test]
fn watching_shows_what_was_done_in_between() {
    isolated("watching_shows_what_was_done_in_between", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let mut command = pool.command();
        command.args(["status", pool.name(), "--watch", "1"]).stdout(Stdio::piped());
        let mut watch = command.spawn().expect("poolfs starts");
        let mut lines = BufReader::new(watch.stdout.take().expect("piped")).lines();
        // Each round is something new, so that it falls into some interval.
        let mut seen = Vec::new();
        for round in 0..60 {
            fs::create_dir(at.join(format!("d{round}"))).expect("a folder");
            let line = lines.next().expect("it goes on").expect("text");
            let found = line.contains("mkdir") && line.contains("kernel");
            seen.push(line);
            if found {
                break;
            }
        }
        assert!(seen.last().is_some_and(|line| line.contains("mkdir")), "{seen:#?}");
        // It ends when nobody reads any more.
        drop(lines);
        let deadline = Instant::now() + Duration::from_secs(30);
        while watch.try_wait().expect("it is ours").is_none() {
            assert!(Instant::now() < deadline, "it watches for nobody");
            std::thread::park_timeout(Duration::from_millis(50));
        }
        drop(mount);
    });
}

#[test]
fn a_process_reports_what_went_which_way() {
    isolated("a_process_reports_what_went_which_way", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let report = folder.join("report");
        let script = format!(
            "export POOLFS_REPORT={}; cd {}; exec /usr/bin/python3 -c '
import os
w = os.getcwd() + \"/\"
os.mkdir(w + \"d\")
[os.stat(w + \"d\") for _ in range(5)]
f = os.open(w + \"f\", os.O_RDWR | os.O_CREAT)
[os.pwrite(f, b\"x\", n) for n in range(7)]
try: os.stat(w + \"d/../f\")
except OSError: pass
'",
            report.display(),
            at.display()
        );
        let _ = pool.shell(Way::Library, &script).expect("python");
        let text = fs::read_to_string(&report).expect("a report");
        let line = text.lines().find(|line| line.contains("python")).unwrap_or_else(|| panic!("no python in {text}"));
        let number = |key: &str| -> u64 {
            let found = line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
            found.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        assert!(number("library.MakeDirectory") == 1 && number("library.Stat") >= 5, "{line}");
        // The first use of a descriptor is the kernel's.
        assert_eq!((number("library.Write"), number("kernel.first-use")), (6, 1), "{line}");
        assert!(number("kernel.path") >= 1, "{line}");
        let by_operation: u64 = line
            .split(' ')
            .filter_map(|word| word.strip_prefix("library.")?.split_once('=')?.1.parse::<u64>().ok())
            .sum();
        assert_eq!(number("library"), by_operation, "{line}");
        drop(mount);
    });
}
