//! How containers are run: terminals, input, signals, exit codes, memory, and what a killed command leaves.

use poolfs_tests::{Outcome, Pool, Stepper, Way, compile, import_small, isolated};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn pool_with_image(folder: &Path) -> Pool {
    let pool = Pool::create(folder, "64M");
    import_small(&pool, folder, "small", &[], |root| {
        fs::write(root.join("bin/plain"), "no program\n").expect("a file");
    });
    pool
}

fn run_command(pool: &Pool, options: &[&str], command: &[&str]) -> Command {
    let mut all = pool.command();
    all.args(["run", pool.name(), "small"]).args(options).arg("--").args(command);
    all
}

fn run(pool: &Pool, options: &[&str], command: &[&str]) -> Outcome {
    poolfs_tests::run(&mut run_command(pool, options, command))
}

/// A command with a terminal of its own, as on somebody's desk.
struct OnTerminal {
    child: Child,
    terminal: File,
    said: Arc<Mutex<String>>,
}

impl OnTerminal {
    fn start(command: &Command, rows: u16, columns: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = rustix::pty::openpt(flags).expect("a terminal");
        rustix::pty::grantpt(&master).and_then(|()| rustix::pty::unlockpt(&master)).expect("a terminal");
        let name = rustix::pty::ptsname(&master, Vec::new()).expect("its name");
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = File::from(rustix::fs::open(name.as_c_str(), flags, Mode::empty()).expect("its other end"));
        let mut shell = Command::new("setsid");
        shell.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
        shell.stdin(slave.try_clone().expect("a descriptor")).stdout(slave.try_clone().expect("a descriptor"));
        let child = shell.stderr(slave).spawn().expect("setsid (package util-linux) runs");
        let terminal = File::from(master);
        let (mut reader, said) = (terminal.try_clone().expect("a descriptor"), Arc::new(Mutex::new(String::new())));
        let sink = Arc::clone(&said);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // It ends with an error when the last process has closed the other end.
            while let Ok(count @ 1..) = reader.read(&mut bytes) {
                sink.lock().expect("no panic").push_str(&String::from_utf8_lossy(&bytes[..count]));
            }
        });
        let this = Self { child, terminal, said };
        this.resize(rows, columns);
        this
    }

    fn resize(&self, ws_row: u16, ws_col: u16) {
        tcsetwinsize(&self.terminal, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 }).expect("a size");
    }

    fn wait_for(&self, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.said.lock().expect("no panic").contains(text) {
            assert!(Instant::now() < deadline, "{text} does not come: {:?}", self.said);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn type_keys(&mut self, keys: &[u8]) {
        self.terminal.write_all(keys).expect("typed");
    }
}

#[test]
fn a_terminal_is_passed_on_with_its_size_and_its_keys() {
    isolated("a_terminal_is_passed_on_with_its_size_and_its_keys", |folder| {
        let pool = pool_with_image(folder);
        let script = "trap 'echo interrupted; exit 42' INT; test -t 0 && test -t 1 && test -t 2 && echo terminal
            while [ \"$(stty size)\" != '33 101' ]; do sleep 0.05; done; echo first
            while [ \"$(stty size)\" != '40 120' ]; do sleep 0.05; done; echo second
            read line; echo \"typed <$line>\"
            while :; do sleep 0.05; done";
        let command = run_command(&pool, &["-t", "--rm"], &["/bin/sh", "-c", script]);
        let mut desk = OnTerminal::start(&command, 33, 101);
        desk.wait_for("terminal");
        desk.wait_for("first");
        desk.resize(40, 120);
        desk.wait_for("second");
        desk.type_keys(b"hello\n");
        desk.wait_for("typed <hello>");
        desk.type_keys(b"\x03");
        assert_eq!(desk.child.wait().expect("ended").code(), Some(42), "{:?}", desk.said);
        desk.wait_for("interrupted");

        let refused = run(&pool, &["-t", "--rm"], &["/bin/true"]);
        assert!(refused.code != 0 && refused.err.contains("terminal"), "{refused:?}");
        // Detached, nobody sits at it.
        let _ = run(
            &pool,
            &["-d", "-t", "--name", "lonely"],
            &["/bin/sh", "-c", "test -t 0 && while [ \"$(stty size)\" = '0 0' ]; do sleep 0.05; done; stty size"],
        )
        .expect("-d");
        let deadline = Instant::now() + Duration::from_secs(20);
        while !pool.poolfs(&["logs", "lonely"]).expect("logs").contains("24 80") {
            assert!(Instant::now() < deadline, "no size in {}", pool.poolfs(&["logs", "lonely"]).out);
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = pool.poolfs(&["stop", "lonely"]).expect("stop");
        let _ = pool.poolfs(&["rm", "lonely"]).expect("rm");
    });
}

#[test]
fn without_a_terminal_of_its_own_a_container_cannot_listen_to_ours() {
    isolated("without_a_terminal_of_its_own_a_container_cannot_listen_to_ours", |folder| {
        let pool = pool_with_image(folder);
        let script = "for n in 0 1 2; do test -t $n && echo terminal-$n; done; echo out; echo err >&2; exit 5";
        let command = run_command(&pool, &["--rm"], &["/bin/sh", "-c", script]);
        let mut desk = OnTerminal::start(&command, 24, 80);
        assert_eq!(desk.child.wait().expect("ended").code(), Some(5));
        desk.wait_for("out\r\n");
        desk.wait_for("err\r\n");
        assert!(!desk.said.lock().expect("no panic").contains("terminal-"), "{:?}", desk.said);
    });
}

#[test]
fn input_signals_and_exit_codes_are_passed_on() {
    isolated("input_signals_and_exit_codes_are_passed_on", |folder| {
        let pool = pool_with_image(folder);
        let fed = |options: &[&str]| {
            let mut command = run_command(&pool, options, &["/bin/cat"]);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
            // Without -i nobody reads it.
            let _ = child.stdin.take().expect("piped").write_all(b"one\ntwo\n");
            let output = child.wait_with_output().expect("ended");
            (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
        };
        assert_eq!(fed(&["-i", "--rm"]), (Some(0), "one\ntwo\n".into()));
        assert_eq!(fed(&["--rm"]), (Some(0), String::new()), "without -i the input is empty");

        assert_eq!(run(&pool, &["--rm"], &["/bin/absent"]).code, 127);
        assert_eq!(run(&pool, &["--rm"], &["/bin/plain"]).code, 126, "not executable");
        assert_eq!(run(&pool, &["--rm"], &["/bin/sh", "-c", "exit 77"]).code, 77);

        let script = "trap 'echo usr1' USR1; trap 'echo term; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
        let mut command = run_command(&pool, &["--rm"], &["/bin/sh", "-c", script]);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut output = std::io::BufReader::new(child.stdout.take().expect("piped"));
        let mut expect = |wanted: &str| {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut output, &mut line).expect("readable");
            assert_eq!(line.trim(), wanted);
        };
        let pid = Pid::from_child(&child);
        expect("ready");
        kill_process(pid, Signal::USR1).expect("ours");
        expect("usr1");
        kill_process(pid, Signal::TERM).expect("ours");
        expect("term");
        assert_eq!(child.wait().expect("ended").code(), Some(9));

        // Asked to end it does not, so it is killed.
        let script = "trap '' TERM; echo ready; while :; do sleep 0.05; done";
        let _ = run(&pool, &["-d", "--name", "stubborn"], &["/bin/sh", "-c", script]).expect("run -d");
        let _ = pool.poolfs(&["stop", "stubborn", "--time", "0"]).expect("stop");
        assert!(pool.poolfs(&["ps"]).expect("ps").contains("ended (137)"));
        let _ = pool.poolfs(&["rm", "stubborn"]).expect("rm");
    });
}

#[test]
fn who_asks_a_container_to_end_hears_what_comes_of_it() {
    isolated("who_asks_a_container_to_end_hears_what_comes_of_it", |folder| {
        let pool = pool_with_image(folder);
        let script = "trap '' TERM INT; echo ready >&2; while :; do sleep 0.05; done";
        for signal in [Signal::TERM, Signal::INT] {
            let mut command = run_command(&pool, &["--rm", "--name", "c"], &["/bin/sh", "-c", script]);
            let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
            let mut output = std::io::BufReader::new(child.stderr.take().expect("piped"));
            let mut expect = |wanted: &str| {
                let mut line = String::new();
                std::io::BufRead::read_line(&mut output, &mut line).expect("readable");
                assert!(line.contains(wanted), "{wanted}: {line}");
            };
            expect("ready");
            for wanted in [
                "asked to end, and may take its time; asked 2 times more",
                "asked once more, it is killed",
                "3 times, and is killed",
            ] {
                kill_process(Pid::from_child(&child), signal).expect("ours");
                expect(wanted);
            }
            assert_eq!(child.wait().expect("ended").code(), Some(137));
        }
        let help = pool.poolfs(&["run", "--help"]).expect("help");
        assert!(help.contains("the third of them kills it"), "{help}");
    });
}

#[test]
fn a_container_that_runs_out_of_memory_ends_alone() {
    isolated("a_container_that_runs_out_of_memory_ends_alone", |folder| {
        let program = compile(folder, "steps", false);
        let pool = Pool::create(folder, "64M");
        import_small(&pool, folder, "small", &[&program], |root| {
            fs::write(root.join("data"), vec![3; 1 << 20]).expect("a file");
        });
        let mut neighbour = Stepper::in_container(&pool, "small", "steps", Way::Library);
        assert_eq!(neighbour.step("open /data 2"), Ok(0));
        let service = pool.service_pid();
        // What has no line end is kept in memory by tail until the end.
        let hungry = ["/bin/sh", "-c", "head -c 300000000 /dev/zero | tail -n 1 > /dev/null"];
        for way in [&["--rm", "--memory", "40M"][..], &["--rm", "--memory", "40M", "--legacy"]] {
            assert_eq!(run(&pool, way, &hungry).code, 137, "{way:?}");
        }
        assert_eq!(pool.service_pid(), service, "the service lives on");
        assert_eq!(neighbour.step("pwrite 0 5000 9"), Ok(5000), "the other container lives on");
        assert_eq!(neighbour.step("sync"), Ok(0));
        assert_eq!(run(&pool, &["--rm", "--memory", "40M"], &["/bin/sh", "-c", "exit 3"]).code, 3, "the next one runs");
        let nonsense = run(&pool, &["--rm", "--memory", "10K"], &["/bin/true"]);
        assert!(nonsense.code != 0 && nonsense.err.contains("remedy"), "{nonsense:?}");
        drop(neighbour);
    });
}

#[test]
fn other_users_of_the_host_have_no_way_to_a_container() {
    isolated("other_users_of_the_host_have_no_way_to_a_container", |folder| {
        let pool = pool_with_image(folder);
        let _ = run(&pool, &["-d", "--name", "c"], &["/bin/sleep", "60"]).expect("run -d");
        let connect = "import os, socket, sys
paths = [os.path.join(at, name) for at, _, names in os.walk('/run/poolfs') for name in names if name.endswith('.sock')]
assert len(paths) == 1, paths
os.setgroups([]); os.setgid(65534); os.setuid(65534)
socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(paths[0])";
        let outcome = poolfs_tests::run(Command::new("python3").args(["-c", connect]));
        assert!(outcome.err.contains("PermissionError"), "its root is below a directory of root's: {outcome:?}");
        let _ = pool.poolfs(&["stop", "c", "--time", "0"]).expect("stop");
        let _ = pool.poolfs(&["rm", "c"]).expect("rm");
    });
}

#[test]
fn a_container_that_nobody_watches_over_is_not_removed_while_it_runs() {
    isolated("a_container_that_nobody_watches_over_is_not_removed_while_it_runs", |folder| {
        let pool = pool_with_image(folder);
        let _ = run(&pool, &["-d", "--name", "c"], &["/bin/sleep", "600"]).expect("run -d");
        let record = fs::read(folder.join("state/containers/c/container.json")).expect("its record");
        let record: serde_json::Value = serde_json::from_slice(&record).expect("JSON");
        let monitor = record["monitor"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let monitor = Pid::from_raw(monitor.unwrap_or_else(|| panic!("{record}"))).expect("a process");
        kill_process(monitor, Signal::KILL).expect("ours");
        let condition = || pool.poolfs(&["ps", "--json"]).expect("ps");
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition().contains("lost") {
            assert!(Instant::now() < deadline, "{}", condition());
            std::thread::sleep(Duration::from_millis(10));
        }
        let refused = pool.poolfs(&["rm", "c"]);
        assert!(refused.code != 0 && refused.err.contains("stop") && refused.err.contains("--force"), "{refused:?}");
        assert!(condition().contains("lost"), "it is as it was");
        let _ = pool.poolfs(&["stop", "c", "--time", "0"]).expect("stop");
        let _ = pool.poolfs(&["rm", "c"]).expect("rm");
    });
}
