//! The processes of one side of the comparison.

use super::{PROCESSES, Who};
use crate::{Pool, Way};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Longest wait for an answer: no line does anything that takes time.
const ANSWER_S_MAX: i64 = 120;

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(mut command: Command, program: &Path, number: usize, who: &Who, mailbox: &Path) -> Self {
        command.arg(program).arg(number.to_string());
        command.args([who.user, who.group, who.supplementary].map(|id| id.to_string())).arg(mailbox);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a process starts");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { child, input: Some(input), output: BufReader::new(output) }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It ends with its input, unless it hangs.
        self.input = None;
        for _ in 0..500 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::park_timeout(std::time::Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes of a program on one of the two filesystems.
pub struct Side(Vec<Process>);

impl Side {
    /// Starts them: in the pool, or on the disk without one.
    pub fn start(pool: Option<&Pool>, program: &Path, mailbox: &Path) -> Self {
        let start = |(number, who): (usize, &Who)| {
            let mut command = match pool {
                Some(pool) => {
                    let mut command = pool.command();
                    command.args(["exec", pool.name()]);
                    if who.way == Way::Fuse {
                        command.arg("--legacy");
                    }
                    command.arg("--");
                    command
                }
                None => Command::new("env"),
            };
            command.current_dir("/");
            Process::start(command, program, number, who, mailbox)
        };
        Self(PROCESSES.iter().enumerate().map(start).collect())
    }

    /// Gives a line to a process.
    ///
    /// # Errors
    /// What is to be said instead of an answer, when the process is gone.
    pub fn send(&mut self, process: usize, line: &str) -> Result<(), String> {
        let input = self.0[process].input.as_mut().expect("open until the end");
        writeln!(input, "{line}").map_err(|error| format!("process {process} does not read: {error}"))
    }

    /// The answer to the line sent last.
    ///
    /// # Errors
    /// What is to be said instead of an answer, when there is none.
    pub fn answer(&mut self, process: usize) -> Result<String, String> {
        let output = &mut self.0[process].output;
        if output.buffer().is_empty() {
            let mut wanted = [PollFd::new(output.get_ref(), PollFlags::IN)];
            let limit = Timespec { tv_sec: ANSWER_S_MAX, tv_nsec: 0 };
            if poll(&mut wanted, Some(&limit)).is_ok_and(|ready| ready == 0) {
                return Err(format!("process {process} did not answer within {ANSWER_S_MAX} s"));
            }
        }
        let mut line = String::new();
        match output.read_line(&mut line) {
            Ok(count) if count > 0 => Ok(line.trim_end().to_owned()),
            _ => Err(format!("process {process} died")),
        }
    }
}
