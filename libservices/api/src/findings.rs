//! Findings of a check of a layer's stored structures, and the outcome of each repair.

use crate::Result;

/// Most bytes of a path or a cause in a finding.
const TEXT_BYTES_MAX: usize = 1024;

/// What becomes of what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It cannot be repaired without guessing, or its repair failed.
    Damage,
    /// It can be repaired, and was not, because nothing was to be written.
    Repairable,
    /// It is as it has to be now.
    Repaired,
}

/// One thing that is not as it has to be; `P` are the kinds of them that a layer knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding<P> {
    /// Where: from the root of the branch, unprintable bytes escaped, cut after 1024 bytes.
    pub path: String,
    /// What kind of thing it is.
    pub problem: P,
    /// What is wrong, in words.
    pub cause: String,
    /// What became of it.
    pub outcome: Outcome,
}

/// How many things were found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Those that cannot be repaired.
    pub damaged: u64,
    /// Those that can be, and were not.
    pub repairable: u64,
    /// Those that were.
    pub repaired: u64,
}

impl Tally {
    /// Whether nothing is left that is not as it has to be.
    #[must_use]
    pub fn nothing_left(&self) -> bool {
        self.damaged == 0 && self.repairable == 0
    }

    /// Both together.
    #[must_use]
    pub fn and(self, other: Tally) -> Tally {
        Tally {
            damaged: self.damaged + other.damaged,
            repairable: self.repairable + other.repairable,
            repaired: self.repaired + other.repaired,
        }
    }
}

/// Where findings go, and whether they are repaired.
pub struct Findings<'a, P> {
    repair: bool,
    /// How many there were.
    pub tally: Tally,
    report: &'a mut dyn FnMut(Finding<P>),
}

fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// A path as it is shown in messages: unprintable bytes escaped, cut after 1024 bytes, however long it is.
#[must_use]
pub fn shown_path(path: &[u8]) -> String {
    let some = &path[..path.len().min(TEXT_BYTES_MAX + 1)];
    cut(some.escape_ascii().to_string())
}

impl<'a, P> Findings<'a, P> {
    /// None yet; each is given to `report`, after its repair where `repair` says that there is to be any.
    pub fn new(repair: bool, report: &'a mut dyn FnMut(Finding<P>)) -> Self {
        Findings { repair, tally: Tally::default(), report }
    }

    /// Whether what can be repaired is.
    #[must_use]
    pub fn repairs(&self) -> bool {
        self.repair
    }

    fn tell(&mut self, path: &[u8], problem: P, cause: String, outcome: Outcome) {
        let count = match outcome {
            Outcome::Damage => &mut self.tally.damaged,
            Outcome::Repairable => &mut self.tally.repairable,
            Outcome::Repaired => &mut self.tally.repaired,
        };
        *count += 1;
        (self.report)(Finding { path: shown_path(path), problem, cause: cut(cause), outcome });
    }

    /// Something that nobody can repair without guessing.
    pub fn damage(&mut self, path: &[u8], problem: P, cause: impl Into<String>) {
        self.tell(path, problem, cause.into(), Outcome::Damage);
    }

    /// Something that `mend` repairs, which is called if that is wanted. Damage when it fails. Whether all is well now.
    pub fn mendable(
        &mut self,
        path: &[u8],
        problem: P,
        cause: impl Into<String>,
        mend: impl FnOnce() -> Result<()>,
    ) -> bool {
        let (cause, outcome) = match if self.repair { Some(mend()) } else { None } {
            None => (cause.into(), Outcome::Repairable),
            Some(Ok(())) => (cause.into(), Outcome::Repaired),
            Some(Err(error)) => (format!("{}; its repair failed: {error}", cause.into()), Outcome::Damage),
        };
        self.tell(path, problem, cause, outcome);
        outcome == Outcome::Repaired
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_types::Errno;

    #[test]
    fn repairs_happen_when_they_are_wanted_and_are_told_as_they_ended() {
        let mut told = Vec::new();
        let mut report = |finding: Finding<u8>| told.push((finding.path, finding.problem, finding.outcome));
        let mut findings = Findings::new(false, &mut report);
        assert!(!findings.mendable(b"a", 1, "", || panic!("nothing is to be written")));
        assert!(!findings.tally.nothing_left());
        let mut findings = Findings::new(true, &mut report);
        assert!(findings.mendable(b"\n", 2, "", || Ok(())));
        assert!(findings.tally.nothing_left());
        assert!(!findings.mendable(b"c", 3, "", || Err(Errno::ENOSPC.into())));
        findings.damage(b"d", 4, "");
        assert_eq!(findings.tally, Tally { damaged: 2, repairable: 0, repaired: 1 });
        let expected = [
            ("a", 1, Outcome::Repairable),
            ("\\n", 2, Outcome::Repaired),
            ("c", 3, Outcome::Damage),
            ("d", 4, Outcome::Damage),
        ];
        assert_eq!(told, expected.map(|(path, problem, outcome)| (path.to_owned(), problem, outcome)));
    }

    #[test]
    fn nothing_told_is_long() {
        let mut lengths = Vec::new();
        let mut report = |finding: Finding<()>| lengths.push((finding.path.len(), finding.cause.len()));
        Findings::new(true, &mut report).damage(&[0xff; 9000], (), "\u{e4}".repeat(9000));
        assert_eq!(lengths, [(1024 + 3, 1024 + 3)]);
    }
}
