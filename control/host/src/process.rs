//! Process identities: a process number alone may have been given to another process.

use crate::{Host, Result};
use std::path::Path;

/// A process that cannot be mistaken for a later one with the same number: the number, when it started, and since which boot
/// of the host the start is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The process number.
    pub pid: u32,
    /// When it started, in the kernel's ticks since boot.
    pub start_ticks: u64,
    /// The host's boot identifier.
    pub boot_id: String,
}

impl ProcessIdentity {
    /// Whether exactly this process is alive (a zombie is not).
    #[must_use]
    pub fn is_alive(&self, host: &dyn Host) -> bool {
        host.identify(self.pid).is_some_and(|now| now == *self)
    }
}

/// The signals the control side sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessSignal {
    /// Please end.
    Terminate,
    /// End now.
    Kill,
    /// Any other, by number: passed on from a user.
    Other(i32),
}

/// The identifier of the host's present boot.
pub fn boot_id(host: &dyn Host) -> Result<String> {
    Ok(host.read_text(Path::new("/proc/sys/kernel/random/boot_id"))?.trim().to_owned())
}

/// The start time in the text of `/proc/PID/stat`; none for a zombie or a text that is not understood.
///
/// The program's name in parentheses may itself contain blanks and parentheses: fields count from the last one.
#[must_use]
pub fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    // The state is field 3 of the file, the start time field 22.
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RecordingHost;

    #[test]
    fn start_times_are_found_behind_strange_names() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 777 1000 1 184";
        assert_eq!(parse_start_time(stat), Some(777));
        assert_eq!(parse_start_time(&stat.replace(" S ", " Z ")), None);
        assert_eq!(parse_start_time("42 (a"), None);
    }

    #[test]
    fn a_recycled_number_is_another_process() {
        let host = RecordingHost::new();
        host.set_process(42, 777);
        let first = host.identify(42).expect("just set");
        assert!(first.is_alive(&host));
        host.set_process(42, 900);
        assert!(!first.is_alive(&host));
        assert!(!host.signal(&first, ProcessSignal::Kill).expect("no error"));
        assert!(host.log().iter().all(|line| !line.starts_with("signal")));
    }
}
