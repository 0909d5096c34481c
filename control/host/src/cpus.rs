//! Lists of CPUs as the kernel writes them: `0-3,5`.

use crate::{Host, HostError, Result};
use std::path::Path;

/// Most CPUs a list may name; the kernel's own limit on x86-64 is 8192.
const CPU_NUMBER_MAX: u32 = 8191;

/// A non-empty set of CPUs, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSet(Vec<u32>);

impl CpuSet {
    /// Understand a list such as `0-1` or `0,2-3`.
    pub fn parse(text: &str) -> Result<CpuSet> {
        let malformed = || HostError::Malformed { what: "a list of CPUs such as 0-1,3", text: text.to_owned() };
        let mut cpus = Vec::new();
        for part in text.trim().split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u32 = first.trim().parse().map_err(|_| malformed())?;
            let last: u32 = last.trim().parse().map_err(|_| malformed())?;
            if first > last || last > CPU_NUMBER_MAX {
                return Err(malformed());
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CpuSet(cpus))
    }

    /// The CPUs the kernel says are online.
    pub fn online(host: &dyn Host) -> Result<CpuSet> {
        CpuSet::parse(&host.read_text(Path::new("/sys/devices/system/cpu/online"))?)
    }

    /// The CPUs, ascending.
    #[must_use]
    pub fn numbers(&self) -> &[u32] {
        &self.0
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn missing_from(&self, other: &CpuSet) -> Vec<u32> {
        self.0.iter().copied().filter(|cpu| !other.0.contains(cpu)).collect()
    }
}

impl std::fmt::Display for CpuSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut rest = self.0.as_slice();
        let mut separator = "";
        while let Some(&first) = rest.first() {
            let run = rest.iter().zip(first..).take_while(|&(&cpu, expected)| cpu == expected).count();
            let last = rest[run - 1];
            if run == 1 {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{first}-{last}")?;
            }
            separator = ",";
            rest = &rest[run..];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_understood_and_written_back() {
        for (text, written) in [("0-1", "0-1"), ("3,0-1,1", "0-1,3"), (" 5\n", "5"), ("0,1,2,4", "0-2,4")] {
            assert_eq!(CpuSet::parse(text).expect(text).to_string(), written);
        }
        for bad in ["", "a", "1-", "3-1", "0-99999", "-1", "0,,1"] {
            assert!(CpuSet::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let online = CpuSet::parse("0-1").expect("valid");
        assert_eq!(CpuSet::parse("1-3").expect("valid").missing_from(&online), vec![2, 3]);
    }
}
