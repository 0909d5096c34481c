//! Waits for a child while passing on the signals that ask this process to end or to do something.

use crate::failure::{Failure, Result};
use poolfs_host::{Host, ProcessSignal};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

/// Those that ask a process to end.
const ENDING: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Whether one of them came that nobody has heeded, once they are caught.
static END_CAME: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// What came until now has been heeded, or passed on to a program that has ended.
pub fn forget_end() {
    END_CAME.store(false, Ordering::SeqCst);
}

/// Whether this process was asked to end.
pub fn end_came() -> bool {
    END_CAME.load(Ordering::SeqCst)
}

/// Signals that are passed on and no longer end this process, so that it can clean up.
pub struct Signals(SignalsInfo<WithOrigin>);

impl Signals {
    /// From now on they are kept until [`Signals::wait`] passes them on.
    pub fn catch() -> Result<Signals> {
        let numbers = [SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
        let failed = |error| Failure::new("signals", format!("they cannot be caught: {error}"), "");
        for number in ENDING {
            signal_hook::flag::register(number, Arc::clone(&END_CAME)).map_err(failed)?;
        }
        SignalsInfo::<WithOrigin>::new(numbers).map(Signals).map_err(failed)
    }

    /// Whether one came that asks this process to end.
    pub fn end_was_asked(&mut self) -> bool {
        self.0.pending().any(|origin| ENDING.contains(&origin.signal))
    }

    /// Wait for the child. What the terminal sends reaches it by itself when it is in the same process group. `again` is told how
    /// often it was interrupted or asked to end so far.
    pub fn wait(
        &mut self,
        host: &dyn Host,
        child: &mut Child,
        mut again: impl FnMut(u32) -> Result<()>,
    ) -> Result<ExitStatus> {
        let mut asked = 0;
        let failed = |error: std::io::Error| Failure::new("command", format!("it cannot be waited for: {error}"), "");
        let process = host.identify(child.id());
        loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Ok(status);
            }
            for origin in self.0.wait() {
                let from_terminal = origin.cause == Cause::Kernel;
                if origin.signal != SIGCHLD
                    && !from_terminal
                    && let Some(process) = &process
                {
                    host.signal(process, ProcessSignal::Other(origin.signal))?;
                }
                if matches!(origin.signal, SIGINT | SIGTERM) {
                    asked += 1;
                    again(asked)?;
                }
            }
        }
    }
}

/// The exit status of a shell for it: that of the command, or 128 and the signal that ended it.
pub fn status_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(255);
    u8::try_from(code & 0xff).unwrap_or(255)
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_host::LinuxHost;
    use std::process::Command;

    #[test]
    fn codes_and_signals_become_a_status() {
        let run = |script: &str| Command::new("sh").args(["-c", script]).status().expect("sh exists");
        assert_eq!(status_code(run("exit 7")), 7);
        assert_eq!(status_code(run("kill -TERM $$")), 128 + 15);
    }

    #[test]
    fn a_child_is_waited_for() {
        let mut signals = Signals::catch().expect("caught");
        let mut child = Command::new("sh").args(["-c", "sleep 0.05; exit 3"]).spawn().expect("sh exists");
        let status = signals.wait(&LinuxHost, &mut child, |_| Ok(())).expect("waited");
        assert_eq!(status.code(), Some(3));
    }
}
