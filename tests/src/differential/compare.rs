//! Comparison of the two sides' answers: times are made comparable, differences readable.

use rustix::time::{ClockId, clock_gettime};
use std::fmt;

/// Times from before this were set by programs and are compared as they are (July 2017).
const SET_NS_MAX: u64 = 1_500_000_000_000_000_000;

/// The steps of time of one run.
#[derive(Default)]
pub struct Steps {
    begun_ns: Vec<u64>,
}

impl Steps {
    /// Begins another step: what was done before has times up to now, what is done from now on later ones, also by the clock
    /// of filesystems, which stands still for some milliseconds.
    pub fn tick(&mut self) {
        let now = ns_of(ClockId::Realtime);
        while ns_of(ClockId::RealtimeCoarse) <= now {
            std::thread::park_timeout(std::time::Duration::from_micros(200));
        }
        self.begun_ns.push(now);
    }

    /// The answer with the step of each time instead of the time; of change times of files (all that has a size) only where those
    /// are to be compared.
    pub fn steps_for_times(&self, answer: &str, of_files: bool) -> String {
        let mut of_file = false;
        let mut word = |word: &str| match word.split_at_checked(2) {
            Some(("cT", _)) if of_file && !of_files => "c".to_owned(),
            Some((name @ ("aT" | "mT" | "cT"), digits)) => match digits.parse::<u64>() {
                Ok(ns) if ns > SET_NS_MAX => format!("{}@{}", &name[..1], self.begun_ns.partition_point(|&t| t < ns)),
                _ => word.to_owned(),
            },
            _ => {
                of_file = word == "size" || of_file && word != ";";
                word.to_owned()
            }
        };
        answer.split(' ').map(&mut word).collect::<Vec<_>>().join(" ")
    }
}

fn ns_of(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Where the two sides differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// the place of the line in the program
    pub at: usize,
    /// the line
    pub line: String,
    /// what was answered on poolfs
    pub poolfs: String,
    /// what was answered on the disk
    pub disk: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = |text: &str| text.split(" ; ").map(str::to_owned).collect::<Vec<_>>();
        let (poolfs, disk) = (parts(&self.poolfs), parts(&self.disk));
        writeln!(formatter, "line {}: {}", self.at, self.line)?;
        for part in poolfs.iter().filter(|part| !disk.contains(part)) {
            writeln!(formatter, "  poolfs: {part}")?;
        }
        for part in disk.iter().filter(|part| !poolfs.contains(part)) {
            writeln!(formatter, "  disk:   {part}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_become_steps() {
        let steps = Steps { begun_ns: vec![SET_NS_MAX + 10, SET_NS_MAX + 20] };
        let at = |ns: u64| steps.steps_for_times(&format!("0 mT{} x", SET_NS_MAX + ns), true);
        assert_eq!([at(5), at(10), at(11), at(20), at(21)], ["0 m@0 x", "0 m@0 x", "0 m@1 x", "0 m@1 x", "0 m@2 x"]);
        assert_eq!(steps.steps_for_times("cT1000000000000000001 aT user.T5", true), "cT1000000000000000001 aT user.T5");
        let mixed = "/f links 1 size 5 mT1 cT5 ; /d links 2 mT1 cT5";
        assert_eq!(steps.steps_for_times(mixed, false), "/f links 1 size 5 mT1 c ; /d links 2 mT1 cT5");
    }

    #[test]
    fn only_what_differs_is_shown() {
        let difference =
            Difference { at: 3, line: "0 look".into(), poolfs: "a ; b ; c".into(), disk: "a ; d ; c".into() };
        assert_eq!(difference.to_string(), "line 3: 0 look\n  poolfs: b\n  disk:   d\n");
    }
}
