//! Processes driven step by step: the controlling end of `programs/steps.c`.

use crate::{Pool, Way, run, workspace};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Compiles a program of `programs/` into `folder`.
///
/// # Panics
/// When the compiler says no.
#[must_use]
pub fn compile(folder: &Path, name: &str, static_: bool) -> PathBuf {
    let source = workspace().join("tests/programs").join(format!("{name}.c"));
    let program = folder.join(if static_ { format!("{name}-static") } else { name.to_owned() });
    let mut command = Command::new("gcc");
    command.args(["-O1", "-Wall", "-Werror", "-D_GNU_SOURCE", "-pthread", "-o"]).arg(&program).arg(source);
    if static_ {
        command.arg("-static");
    }
    let _ = run(&mut command).expect("gcc");
    program
}

/// A process that does one file operation at a time.
pub struct Stepper {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Stepper {
    /// Starts the dynamic program with the library, or the static one, which takes the kernel's path.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(pool: &Pool, program: &Path, way: Way) -> Self {
        let mut command = pool.command();
        command.args(["exec", pool.name()]);
        if way == Way::Fuse {
            command.arg("--legacy");
        }
        Self::spawn(command.arg("--").arg(program))
    }

    /// Starts `/bin/NAME` of an image in a container, which is removed when it ends.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn in_container(pool: &Pool, image: &str, name: &str, way: Way) -> Self {
        let mut command = pool.command();
        command.args(["run", pool.name(), image, "-i", "--rm"]);
        if way == Way::Fuse {
            command.arg("--legacy");
        }
        Self::spawn(command.arg("--").arg(format!("/bin/{name}")))
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("poolfs starts");
        let (input, output) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { child, input, output: BufReader::new(output) }
    }

    /// One step: its value, or its errno.
    ///
    /// # Errors
    /// The errno of the operation.
    ///
    /// # Panics
    /// When the program died or did not understand.
    pub fn step(&mut self, command: &str) -> Result<u64, i32> {
        writeln!(self.input, "{command}").expect("the program reads");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the program answers");
        let mut words = line.split_whitespace();
        match (words.next(), words.next().and_then(|word| word.parse::<u64>().ok())) {
            (Some("ok"), Some(value)) => Ok(value),
            (Some("error"), Some(errno)) => Err(errno as i32),
            _ => panic!("{command:?} was answered {line:?}"),
        }
    }

    /// The process of `poolfs exec`; the program is its child.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        // It may be dead already, which was then the test's doing.
        let _ = writeln!(self.input, "exit");
        let _ = self.child.wait();
    }
}

/// The hash `steps.c` answers reads with.
#[must_use]
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}
