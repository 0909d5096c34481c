//! The first process of a container (`poolfs run --init`): it starts the command, passes signals on, and reaps orphans.
//!
//! The kernel shields the first process of a process namespace from signals that it does not handle, and hands it all processes whose
//! parents have ended. Most programs are prepared for neither. This one is: it ends with the command, and with its exit status, or with 128
//! and the signal that ended it. Begin with [`run`].
//!
//! It is linked statically, so that it runs in any image, and comes into the container by a bind mount.
//!
//! **Assumption.** It and its children are alone in its process namespace, so that every child is one to be reaped.

#![forbid(unsafe_code)]

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, kill_process, wait};
use signal_hook::consts::{
    SIGALRM, SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::Command;

/// What is passed on. Real-time signals are not: nobody else passes them on to a container either.
const PASSED_ON: [i32; 10] = [SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH];

/// Exit statuses by which shells say that a command could not be started.
const STATUS_NOT_STARTED: u8 = 126;
const STATUS_NOT_FOUND: u8 = 127;

/// Runs a command, the program and its arguments, to its end; its exit status, or 128 and the signal that ended it.
pub fn run(command: impl IntoIterator<Item = OsString>) -> u8 {
    let mut words = command.into_iter();
    let Some(program) = words.next() else {
        eprintln!("poolfs-init: there is no command; give one");
        return STATUS_NOT_STARTED;
    };
    let signals = SignalsInfo::<WithOrigin>::new(PASSED_ON.into_iter().chain([SIGCHLD]));
    let mut signals = match signals {
        Ok(signals) => signals,
        Err(error) => {
            eprintln!("poolfs-init: signals cannot be caught: {error}");
            return STATUS_NOT_STARTED;
        }
    };
    let child = match Command::new(&program).args(words).spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("poolfs-init: {}: {error}", program.display());
            return if error.kind() == ErrorKind::NotFound { STATUS_NOT_FOUND } else { STATUS_NOT_STARTED };
        }
    };
    let child = Pid::from_child(&child);
    loop {
        // Before the first wait as well: it may have ended at once.
        if let Some(status) = reap(child) {
            return status;
        }
        for origin in signals.wait() {
            // What the terminal sends reaches the command by itself: it is in the same process group.
            if origin.signal != SIGCHLD && origin.cause != Cause::Kernel {
                pass_on(child, origin.signal);
            }
        }
    }
}

/// Reaps all who have ended; the exit status of `child` if it is one of them.
fn reap(child: Pid) -> Option<u8> {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == child => return Some(code_of(status)),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            // Nobody is left, and the command is not among those that were: it cannot be waited for any more.
            Err(_) => return Some(STATUS_NOT_STARTED),
            Ok(None) => return None,
        }
    }
}

fn code_of(status: WaitStatus) -> u8 {
    let code = status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal)).unwrap_or(255);
    u8::try_from(code & 0xff).unwrap_or(255)
}

fn pass_on(child: Pid, signal: i32) {
    // It may have ended.
    let _ = Signal::from_named_raw(signal).map(|signal| kill_process(child, signal));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_shell(script: &str) -> u8 {
        run(["sh", "-c", script].map(OsString::from))
    }

    // One test: whoever runs is the parent of all children of this process.
    #[test]
    fn the_status_is_the_commands_whoever_else_ends() {
        assert_eq!(run_shell("exit 7"), 7);
        assert_eq!(run_shell("kill -TERM $$"), 128 + 15);
        assert_eq!(run(["/no/such/program".into()]), STATUS_NOT_FOUND);
        assert_eq!(run(["/".into()]), STATUS_NOT_STARTED);
        assert_eq!(run([]), STATUS_NOT_STARTED);
        // A signal that comes to this process is passed on.
        let own = std::process::id();
        assert_eq!(run_shell(&format!("trap 'exit 9' USR1; kill -USR1 {own}; while :; do sleep 0.02; done")), 9);
        // Processes that their parents leave behind come to whoever asked for them, and are reaped.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).expect("this process");
        assert_eq!(run_shell("sh -c 'exit 3 &'; sleep 0.1; exit 5"), 5);
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        assert!(wait(WaitOptions::NOHANG).is_err(), "no child is left");
    }
}
