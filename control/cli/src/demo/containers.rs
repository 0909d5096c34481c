//! The two containers of the demonstration, which work at the same time.

use crate::context::Context;
use crate::failure::{Failure, Result};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// What a container does.
const SCRIPT: &str = include_str!("work.sh");
/// The steps, as the script names them, and what they are.
const STEPS: [(&str, &str); 5] = [
    ("sqlite", "python3 with sqlite"),
    ("git", "git commit, gc, fsck"),
    ("compiler", "gcc, and the program run"),
    ("apt", "apt-get install tree"),
    ("bytes", "ten bytes in a large file"),
];
/// Longest time all steps may take together.
const WORK_WAIT: Duration = Duration::from_secs(900);
/// Most bytes of what a container complains of.
const COMPLAINT_BYTES_MAX: u64 = 64 << 10;

/// How a step went.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// What it was.
    pub title: &'static str,
    /// How long it took.
    pub took: Duration,
    /// What it said of itself, or why it failed.
    pub note: String,
    /// Whether it did what it should.
    pub passed: bool,
}

/// A container at work.
pub struct Worker {
    /// Its name.
    pub name: String,
    /// How its steps went, as far as it has come.
    pub steps: Vec<StepResult>,
    /// It waits for its input to be closed.
    pub is_done: bool,
    child: Child,
    bar: ProgressBar,
    begun: Option<(&'static str, Instant)>,
    complaint: Vec<String>,
}

/// What a container's reader tells.
enum Told {
    Line(usize, String),
    Closed(usize),
}

/// Start the containers of these names.
pub fn start(context: &Context, pool: &str, image: &str, names: &[&str], legacy: bool) -> Result<Vec<Worker>> {
    let bars = MultiProgress::new();
    names.iter().map(|name| worker(context, pool, image, name, legacy, &bars)).collect()
}

fn worker(
    context: &Context,
    pool: &str,
    image: &str,
    name: &str,
    legacy: bool,
    bars: &MultiProgress,
) -> Result<Worker> {
    let mut command = Command::new(context.program());
    command.arg("--state").arg(&context.state).arg("--run-dir").arg(&context.run);
    command.args(["run", pool, image, "--name", name, "-i"]);
    if legacy {
        command.arg("--fuse");
    }
    command.args(["--", "/bin/sh", "-c", SCRIPT]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let child = command.spawn().map_err(|error| Failure::file(&context.program(), error))?;
    let bar = bars.add(ProgressBar::new(STEPS.len() as u64));
    if let Ok(style) = ProgressStyle::with_template("  {prefix:10} {bar:20} {pos} of {len}  {msg}") {
        bar.set_style(style);
    }
    bar.set_prefix(name.to_owned());
    bar.enable_steady_tick(Duration::from_millis(200));
    Ok(Worker {
        name: name.to_owned(),
        steps: Vec::new(),
        is_done: false,
        child,
        bar,
        begun: None,
        complaint: Vec::new(),
    })
}

/// Follow the containers until all have done their work. `interrupted` is asked now and then.
pub fn follow(workers: &mut [Worker], mut interrupted: impl FnMut() -> bool) -> Result<()> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let readers: Vec<_> = workers
        .iter_mut()
        .enumerate()
        .filter_map(|(number, worker)| Some((number, worker.child.stdout.take()?)))
        .map(|(number, output)| {
            let sender = sender.clone();
            std::thread::spawn(move || read_lines(number, output, &sender))
        })
        .collect();
    drop(sender);
    // The readers end with their containers, which the caller ends.
    drop(readers);
    listen(workers, &receiver, &mut interrupted)
}

fn listen(workers: &mut [Worker], receiver: &Receiver<Told>, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + WORK_WAIT;
    while !workers.iter().all(|worker| worker.is_done) {
        if interrupted() {
            return Err(Failure::interrupted("demo", "it was interrupted"));
        }
        if Instant::now() > end {
            let cause = format!("the containers are not done after {} s", WORK_WAIT.as_secs());
            return Err(Failure::new("demo", cause, "`poolfs doctor` says what this host lacks"));
        }
        match receiver.recv_timeout(Duration::from_millis(100)) {
            Ok(Told::Line(number, line)) => workers[number].hear(&line),
            Ok(Told::Closed(number)) if !workers[number].is_done => return Err(workers[number].died()),
            Ok(Told::Closed(_)) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    Ok(())
}

fn read_lines(number: usize, output: ChildStdout, sender: &Sender<Told>) {
    for line in BufReader::new(output).lines().map_while(std::result::Result::ok) {
        if sender.send(Told::Line(number, line)).is_err() {
            return;
        }
    }
    // Nobody listens any more when all is done.
    let _ = sender.send(Told::Closed(number));
}

impl Worker {
    fn hear(&mut self, line: &str) {
        let Some((word, rest)) = line.strip_prefix("@@").map(|told| told.split_once(' ').unwrap_or((told, ""))) else {
            return;
        };
        match word {
            "begin" => {
                let title = STEPS.iter().find(|(name, _)| *name == rest).map_or("?", |(_, title)| title);
                self.begun = Some((title, Instant::now()));
                self.bar.set_message(title);
            }
            "log" => self.complaint.push(rest.to_owned()),
            "end" => self.step_ended(true, rest.to_owned()),
            "fail" => {
                let note = std::mem::take(&mut self.complaint).join("\n      ");
                self.step_ended(false, note);
            }
            "done" => {
                self.is_done = true;
                self.bar.finish_and_clear();
            }
            _ => {}
        }
    }

    fn step_ended(&mut self, passed: bool, note: String) {
        let Some((title, since)) = self.begun.take() else { return };
        let step = StepResult { title, took: since.elapsed(), note, passed };
        let mark = if passed { "done  " } else { "FAILED" };
        let line = format!("  {:10} {mark} {title} in {:.1} s: {}", self.name, step.took.as_secs_f64(), step.note);
        if self.bar.is_hidden() {
            println!("{line}")
        } else {
            self.bar.println(line)
        }
        self.bar.inc(1);
        self.steps.push(step);
    }

    fn died(&mut self) -> Failure {
        self.bar.finish_and_clear();
        let mut text = String::new();
        if let Some(errors) = self.child.stderr.take() {
            // What can be read of it is better than nothing.
            let _ = errors.take(COMPLAINT_BYTES_MAX).read_to_string(&mut text);
        }
        Failure::new(
            format!("container {}", self.name),
            format!("it ended before its work was done: {}", text.trim()),
            "",
        )
    }

    /// Let the container end, and wait for it.
    pub fn end(&mut self) {
        drop(self.child.stdin.take());
        self.bar.finish_and_clear();
        // How it ended was told by its steps.
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker() -> Worker {
        let child = Command::new("true").stdin(Stdio::piped()).spawn().expect("true exists");
        let (name, bar) = ("one".to_owned(), ProgressBar::hidden());
        Worker { name, steps: Vec::new(), is_done: false, child, bar, begun: None, complaint: Vec::new() }
    }

    #[test]
    fn what_a_container_tells_is_understood() {
        let mut worker = worker();
        for line in
            ["@@begin git", "noise", "@@end 3 files", "@@begin apt", "@@log no network", "@@fail apt", "@@done 1"]
        {
            worker.hear(line);
        }
        worker.end();
        let passed: Vec<bool> = worker.steps.iter().map(|step| step.passed).collect();
        assert_eq!((passed, worker.is_done), (vec![true, false], true));
        assert_eq!(worker.steps[0].note, "3 files");
        assert_eq!(worker.steps[1].note, "no network");
    }

    #[test]
    fn the_script_has_the_steps_that_are_shown() {
        for (name, _) in STEPS {
            assert!(SCRIPT.contains(&format!("\n{name}() {{")), "{name}");
        }
    }
}
