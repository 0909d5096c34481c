//! The diagnostics of poolfs: `why`, `status --watch`, `trace`, and the reports of the library.

use poolfs_tests::{Pool, Stepper, Way, compile, isolated, run, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
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
            [("--legacy", false, Way::Fuse, "without the library"), ("static", true, Way::Library, "static")]
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

/// What `why --json` says of the writes by the descriptor that stands for `file`.
fn writes(pool: &Pool, program: &Stepper, file: &str) -> Value {
    let text = pool.poolfs(&["why", &program_of(program).to_string(), "--json"]).expect("why");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let found = answer["descriptors"].as_array().expect("descriptors").iter().find(|one| one["file"] == file);
    found.unwrap_or_else(|| panic!("{file} in {text}"))["writes"].clone()
}

#[test]
fn why_tells_whether_writes_are_posted() {
    isolated("why_tells_whether_writes_are_posted", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let steps = compile(folder, "steps", false);
        let mount = pool.mount_directory(&at, &directory);
        let file = at.join("file").display().to_string();
        fs::write(&file, [7; 8192]).expect("a file");
        let open = |flags: i32, way: Way| {
            let mut program = Stepper::start(&pool, &steps, way);
            assert_eq!(program.step(&format!("open {file} {flags}")), Ok(0));
            program
        };
        // Writes now and then until it is said so of them.
        let until = |program: &mut Stepper, way: &str, cause: Value| {
            wait_until(&format!("{way}: {cause}"), || {
                assert_eq!(program.step("pwrite 0 10 1"), Ok(10));
                let writes = writes(&pool, program, &file);
                assert!(writes["go_by"] == "request" || writes["not_posted"].is_null(), "{writes}");
                writes["go_by"] == way && writes["not_posted"] == cause
            });
        };

        let mut writer = open(libc::O_RDWR, Way::Library);
        assert_eq!(writes(&pool, &writer, &file)["go_by"], "fuse", "it has not used it yet");
        until(&mut writer, "posted", Value::Null);
        let count = |program: &Stepper| writes(&pool, program, &file)["posted_requests"].as_u64().expect("a number");
        let before = count(&writer);
        assert_eq!(writer.step("pwrite 5000 10 1"), Ok(10));
        wait_until("it is taken and counted", || count(&writer) > before);
        let text = pool.poolfs(&["why", &program_of(&writer).to_string()]).expect("why");
        assert!(text.contains("posted, ") && text.contains("POOLFS_REPORT"), "{text}");

        // Somebody else has it open: nothing is posted, and then it is again.
        let other = fs::File::open(&file).expect("readable");
        until(&mut writer, "request", "shared".into());
        let text = pool.poolfs(&["why", &program_of(&writer).to_string()]).expect("why");
        assert!(text.contains("by request: others have the file"), "{text}");
        drop(other);
        until(&mut writer, "posted", Value::Null);
        drop(writer);

        let mut waits = open(libc::O_RDWR | libc::O_DSYNC, Way::Library);
        until(&mut waits, "request", "flags".into());
        drop(waits);
        let mut reader = open(libc::O_RDONLY, Way::Library);
        for _ in 0..3 {
            assert!(reader.step("pread 0 10").is_ok());
        }
        assert!(writes(&pool, &reader, &file).is_null(), "it cannot be written");
        drop(reader);
        let mut kernels = open(libc::O_RDWR, Way::Fuse);
        until(&mut kernels, "fuse", Value::Null);
        drop(kernels);
        drop(mount);

        let mount = pool.mount(&at, &["--dir", directory.to_str().expect("text"), "--wait-for-writes"]);
        let mut waits = open(libc::O_RDWR, Way::Library);
        until(&mut waits, "request", "switched".into());
        drop(waits);
        drop(mount);
    });
}

#[test]
fn reads_are_counted_by_the_way_they_took() {
    isolated("reads_are_counted_by_the_way_they_took", |folder| {
        const READS: u64 = 100;
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let file = at.join("file").display().to_string();
        fs::write(&file, vec![7; 128 << 10]).expect("a file");
        let reads_of = |counted: &Value| {
            let of = |way: &str| counted[way].as_u64().expect("a number");
            (of("direct"), of("library"), of("fuse"))
        };
        let of_instance = || reads_of(&pool.status()["service"]["instances"][0]["reads"]);
        let of_descriptor = |program: &Stepper| {
            let text = pool.poolfs(&["why", &program_of(program).to_string(), "--json"]).expect("why");
            let answer: Value = serde_json::from_str(&text).expect("JSON");
            let found = answer["descriptors"].as_array().expect("descriptors").iter().find(|one| one["file"] == file);
            let found = found.unwrap_or_else(|| panic!("{file} in {text}"));
            (reads_of(&found["reads"]), found["not_direct"].clone())
        };
        let read = |program: &mut Stepper, times: u64| {
            (0..times).for_each(|_| assert!(program.step("pread 0 100").is_ok()));
        };

        let program = compile(folder, "steps", false);
        let mut reader = Stepper::start(&pool, &program, Way::Library);
        assert_eq!(reader.step(&format!("open {file} 0")), Ok(0));
        read(&mut reader, READS);
        let ((direct, library, kernel), not_direct) = of_descriptor(&reader);
        // The first one is the kernel's, some more go by request until the file is worth it.
        assert!(direct >= READS / 2 && direct + library + 1 >= READS, "{direct} {library} {kernel}");
        assert!(not_direct.is_null(), "{not_direct}");
        read(&mut reader, READS);
        assert_eq!(of_descriptor(&reader).0, (direct + READS, library, kernel));
        assert_eq!(of_instance(), (direct + READS, library, kernel));
        drop(reader);
        assert_eq!(of_instance().0, direct + READS, "what is over has happened");

        // Somebody writes by the kernel.
        let mut writer = Stepper::start(&pool, &program, Way::Fuse);
        assert_eq!(writer.step(&format!("open {file} 2")), Ok(0));
        let mut reader = Stepper::start(&pool, &program, Way::Library);
        assert_eq!(reader.step(&format!("open {file} 0")), Ok(0));
        read(&mut reader, READS);
        let (_, before_library, before_kernel) = of_instance();
        assert_eq!(of_descriptor(&reader).0.0, 0);
        drop(writer);
        read(&mut reader, 3 * READS);
        let ((now_direct, now_library, _), _) = of_descriptor(&reader);
        assert!(now_direct > 0 && now_direct + now_library >= 3 * READS, "{now_direct} {now_library}");
        let (_, library, kernel) = of_instance();
        assert!(library >= before_library && kernel >= before_kernel);
        drop(reader);
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
            let found = line.contains("mkdir") && line.contains("FUSE");
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
fn watching_says_when_a_service_stands_still_dies_or_comes_back() {
    isolated("watching_says_when_a_service_stands_still_dies_or_comes_back", |folder| {
        let directory = folder.join("dir");
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "16M");
        let mount = pool.mount_directory(&folder.join("mnt"), &directory);
        let watch = |name: &[&str]| {
            let mut command = pool.command();
            command.arg("status").args(name).args(["--watch", "1", "--wait", "2", "--json"]);
            let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("poolfs starts");
            let errors = BufReader::new(child.stderr.take().expect("piped"));
            (child, errors)
        };
        let (mut one, mut of_one) = watch(&[pool.name()]);
        let (mut all, mut of_all) = watch(&[]);
        let mut next = |which: &str| {
            let mut both = [&mut of_one, &mut of_all].map(|errors| {
                let mut line = String::new();
                errors.read_line(&mut line).expect("readable");
                serde_json::from_str::<Value>(&line).unwrap_or_else(|error| panic!("{which}: {error}: {line}"))
            });
            for told in &both {
                assert_eq!((&told["pool"], &told["state"]), (&pool.name().into(), &which.into()), "{told}");
            }
            std::mem::take(&mut both[0])["note"].as_str().expect("text").to_owned()
        };
        let service = Pid::from_raw(pool.service_pid()).expect("a process");
        let mut numbers = BufReader::new(one.stdout.take().expect("piped"));
        let mut first = String::new();
        numbers.read_line(&mut first).expect("it has begun");
        let first: Value = serde_json::from_str(&first).unwrap_or_else(|error| panic!("{error}: {first}"));
        assert_eq!(first["pool"], pool.name());
        let mut numbers_of_all = BufReader::new(all.stdout.take().expect("piped"));
        numbers_of_all.read_line(&mut String::new()).expect("it has begun");
        let drain = |mut from: BufReader<std::process::ChildStdout>| {
            std::thread::spawn(move || std::io::copy(&mut from, &mut std::io::sink()))
        };
        let readers = [drain(numbers), drain(numbers_of_all)];

        kill_process(service, Signal::STOP).expect("ours");
        assert!(next("silent").contains(&format!("process {service}")));
        kill_process(service, Signal::CONT).expect("ours");
        assert!(next("running").contains("answers again"));
        pool.kill_service();
        assert!(next("dead").contains("died"));
        drop(mount);
        next("not running");
        let mount = pool.mount_directory(&folder.join("mnt"), &directory);
        assert!(next("running").contains(&format!("process {}", pool.service_pid())));
        drop(mount);
        next("not running");
        // One ends with its pool, as a failure; the other goes on.
        let name = pool.name().to_owned();
        let mut ended = String::new();
        drop(pool);
        of_one.read_line(&mut ended).expect("readable");
        let ended: Value = serde_json::from_str(&ended).unwrap_or_else(|error| panic!("{error}: {ended}"));
        assert_eq!(ended["error"]["code"], "not-found", "{ended}");
        assert_eq!(one.wait().expect("ours").code(), Some(1));
        let mut removed = String::new();
        of_all.read_line(&mut removed).expect("readable");
        let removed: Value = serde_json::from_str(&removed).unwrap_or_else(|error| panic!("{error}: {removed}"));
        assert_eq!((&removed["pool"], &removed["state"]), (&name.into(), &"removed".into()));
        assert_eq!(all.try_wait().expect("ours"), None, "it goes on");
        all.kill().expect("ours");
        all.wait().expect("ours");
        for reader in readers {
            let _ = reader.join().expect("no panic").expect("readable");
        }
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
[os.chmod(w + \"d\", 0o700) for _ in range(5)]
f = os.open(w + \"f\", os.O_RDWR | os.O_CREAT)
[os.pwrite(f, b\"x\", n) for n in range(7)]
try: os.chmod(w + \"d/../f\", 0o600)
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
        assert!(number("library.MakeDirectory") == 1 && number("library.ChangeMode") == 5, "{line}");
        // The first use of a descriptor is the kernel's, and who writes again and again does not wait for the answers.
        let writes = number("library.Write") + number("posted");
        assert_eq!((writes, number("fuse.first-use")), (6, 1), "{line}");
        assert!(number("posted") > 0, "{line}");
        assert!(number("fuse.path") >= 1, "{line}");
        let by_operation: u64 = line
            .split(' ')
            .filter_map(|word| word.strip_prefix("library.")?.split_once('=')?.1.parse::<u64>().ok())
            .sum();
        assert_eq!(number("library"), by_operation, "{line}");
        drop(mount);
    });
}

/// A `poolfs trace` that prints JSON, one request a line, as they come.
struct Trace {
    child: Child,
    lines: Receiver<Value>,
}

impl Trace {
    /// Starts it, and asks `at` for absent names until it tells of one: from then on nothing is missed.
    fn start(pool: &Pool, at: &Path) -> Self {
        let mut command = pool.command();
        command.args(["--json", "trace", pool.name()]).stdout(Stdio::piped());
        let mut child = command.spawn().expect("poolfs starts");
        let output = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            // Whoever does not want them any more has seen what it looked for.
            for line in output.map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap_or(Value::String(line)));
            }
        });
        let trace = Self { child, lines };
        let begun = (0..600).any(|round| {
            let _ = fs::metadata(at.join(format!("absent-{round}")));
            trace.lines.recv_timeout(Duration::from_millis(100)).is_ok()
        });
        assert!(begun, "it tells of nothing");
        trace
    }

    /// The next request of this kind on this path, by a program of this name.
    fn next(&self, operation: &str, path: &str, program: &str) -> Value {
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut seen = Vec::new();
        while let Ok(span) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            if [&span["operation"], &span["path"], &span["program"]] == [operation, path, program] {
                return span;
            }
            seen.push(span);
        }
        panic!("no {operation} by {path}: {seen:#?}");
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_trace_shows_where_requests_spend_their_time() {
    isolated("a_trace_shows_where_requests_spend_their_time", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        fs::write(directory.join("file"), [7; 8192]).expect("a file");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let trace = Trace::start(&pool, &at);
        let mut program = Stepper::start(&pool, &compile(folder, "steps", false), Way::Library);
        let mut step = |command: &str| program.step(command).unwrap_or_else(|errno| panic!("{command}: {errno}"));
        step(&format!("open {} 2", at.join("file").display()));

        // The first use goes by the kernel, and finds nothing in the cache.
        step("pread 0 10");
        let cold = trace.next("read", "fuse", "steps");
        let time = |span: &Value, layer: &str| span["layers"].get(layer).map_or(0, |time| time.as_u64().expect("ns"));
        assert!(time(&cold, "local") > 0 && time(&cold, "cache") > 0, "{cold}");
        assert!(cold["queue_ns"].is_null() && cold["outcome"] == "done", "{cold}");
        for _ in 0..3 {
            step("pread 0 10");
        }
        let warm = trace.next("read", "library", "steps");
        assert!(time(&warm, "local") == 0 && time(&warm, "cache") > 0, "{warm}");
        assert!(warm["queue_ns"].as_u64() > Some(0), "{warm}");
        step("pwrite 0 4096 9");
        step("sync");
        let sync = trace.next("sync", "library", "steps");
        assert!(time(&sync, "local") > 0, "{sync}");
        let sum: u64 = sync["layers"].as_object().expect("layers").values().filter_map(Value::as_u64).sum();
        assert_eq!(Some(sum), sync["service_ns"].as_u64(), "{sync}");
        drop(trace);

        // For people, and of slow ones only; all of them in a summary.
        let started = Instant::now();
        let mut summary = pool.command();
        let summary = summary.args(["trace", pool.name(), "--summary", "--seconds", "2", "--json"]);
        let mut summary = summary.stdout(Stdio::piped()).spawn().expect("poolfs starts");
        let lines = std::thread::scope(|scope| {
            let slow = scope.spawn(|| pool.poolfs(&["trace", pool.name(), "--slower", "1000s", "--seconds", "1"]));
            while summary.try_wait().expect("ours").is_none() {
                step("size");
                assert!(started.elapsed() < Duration::from_secs(60), "the summary does not end");
            }
            slow.join().expect("no panic").expect("trace")
        });
        assert_eq!(lines, "", "nothing is that slow");
        let summary: Value = serde_json::from_reader(summary.stdout.take().expect("piped")).expect("JSON");
        let kinds = summary["kinds"].as_array().expect("kinds");
        let stat = kinds.iter().find(|kind| kind["operation"] == "stat" && kind["path"] == "library");
        let stat = stat.unwrap_or_else(|| panic!("no stats in {summary}"));
        assert!(stat["count"].as_u64() > Some(0) && stat["service"]["p99_ns"].as_u64() > Some(0), "{stat}");
        assert!(stat["queue"]["p50_ns"].as_u64() > Some(0) && stat["layers"].get("local").is_none(), "{stat}");
        drop(program);
        drop(mount);
    });
}

#[test]
fn a_trace_that_a_signal_ends_says_what_it_has() {
    isolated("a_trace_that_a_signal_ends_says_what_it_has", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        for signal in [Signal::INT, Signal::TERM] {
            // Until it came to see something, which takes long on a busy machine.
            let is_told = (1..10).any(|round: u32| {
                let mut command = pool.command();
                command.args(["--json", "trace", pool.name(), "--summary", "--seconds", "600"]);
                let mut child = command.stdout(Stdio::piped()).spawn().expect("poolfs starts");
                let end = Instant::now() + Duration::from_millis(500) * round;
                while Instant::now() < end {
                    let _ = fs::metadata(at.join(format!("absent-{round}-{:?}", end - Instant::now())));
                }
                let pid = Pid::from_raw(child.id().try_into().expect("a number")).expect("a process");
                kill_process(pid, signal).expect("ours");
                let summary: Option<Value> = serde_json::from_reader(child.stdout.take().expect("piped")).ok();
                let status = child.wait().expect("ours");
                summary.is_some_and(|summary| {
                    assert!(status.success(), "{status:?}: {summary}");
                    summary["requests"].as_u64() > Some(0)
                        && summary["kinds"].as_array().is_some_and(|all| !all.is_empty())
                })
            });
            assert!(is_told, "{signal:?}");
        }
        drop(mount);
    });
}

#[test]
fn programs_that_close_standard_error_report_to_it_all_the_same() {
    isolated("programs_that_close_standard_error_report_to_it_all_the_same", |folder| {
        let (directory, at) = (folder.join("dir"), folder.join("mnt"));
        fs::create_dir(&directory).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&at, &directory);
        let outcome = pool.shell(Way::Library, &format!("export POOLFS_REPORT=-; exec ls -l {}", at.display()));
        assert!(
            outcome.err.lines().any(|line| line.starts_with("poolfs ") && line.contains(" ls library=")),
            "{outcome:?}"
        );
        // Whoever counts or closes what is open does not find it; a file that took its number is not written to.
        let script = format!(
            "export POOLFS_REPORT=-; cd {}; exec /usr/bin/python3 -c '
import os
own = []
for n in range(500, 600):
    try: os.fstat(n); own.append(n)
    except OSError: pass
print(own)
os.closerange(3, 1000)
os.stat(os.getcwd() + \"/.\")
os.close(2)
'",
            at.display()
        );
        let outcome = pool.shell(Way::Library, &script);
        assert_eq!(outcome.out, "[]\n", "{outcome:?}");
        assert!(outcome.err.contains(" python3 library="), "{outcome:?}");
        let script = format!(
            "export POOLFS_REPORT=-; cd {}; exec /usr/bin/python3 -c '
import os
f = os.open(\"taken\", os.O_CREAT | os.O_RDWR)
[os.dup2(f, n) for n in range(500, 520)]
'",
            at.display()
        );
        let outcome = pool.shell(Way::Library, &script);
        assert!(outcome.err.contains(" python3 library="), "{outcome:?}");
        assert_eq!(fs::read(at.join("taken")).expect("made"), b"");
        drop(mount);
    });
}

#[test]
fn the_kernels_requests_come_as_was_asked_for_or_the_mount_is_refused() {
    isolated("the_kernels_requests_come_as_was_asked_for_or_the_mount_is_refused", |folder| {
        for name in ["dir", "mnt"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        let pool = Pool::create(folder, "16M");
        let by = |way: &str| run(&mut pool.line(&format!("mount POOL @mnt --dir @dir --fuse-transport {way}")));
        let transport = || pool.status()["service"]["instances"][0]["transport"].clone();
        for way in ["dev-fuse", "auto", "io-uring"] {
            let outcome = by(way);
            if outcome.code != 0 {
                // The kernel offers it only where its administrator says so.
                assert!(way == "io-uring" && outcome.err.contains("poolfs doctor"), "{way}: {outcome:?}");
                assert!(fs::read_dir(folder.join("mnt")).expect("nothing is mounted").next().is_none());
                continue;
            }
            fs::write(folder.join("mnt/file"), way).expect("written");
            let transport = transport();
            assert!(way == "auto" || transport == way, "{way}: {transport}");
            let _ = run(&mut pool.line("umount POOL @mnt")).expect("umount");
        }
        let ways = [
            "exec POOL --fuse-transport dev-fuse --mount at=MNT,dir=DIR -- true",
            "mount POOL @mnt --dir @dir --fuse-transport x",
        ];
        let places = |line: &str| {
            line.replace("MNT", &folder.join("mnt").display().to_string())
                .replace("DIR", &folder.join("dir").display().to_string())
        };
        assert_eq!(ways.map(|line| run(&mut pool.line(&places(line))).code), [0, 2]);
    });
}
