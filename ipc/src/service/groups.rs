//! Core groups: CPUs that share an L2 cache.

use crate::area::QUEUES_MAX;
use std::fs;

/// The core groups of a pool's CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoreGroups(Vec<Vec<u32>>);

impl CoreGroups {
    /// Groups `cpus` by the L2 cache they share; a CPU of which that is not known is a group of its own. At most
    /// [`QUEUES_MAX`] groups: CPUs beyond join the first.
    #[must_use]
    pub fn of_cpus(cpus: &[u32]) -> Self {
        Self::by(cpus, |cpu| {
            let shared =
                fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/cache/index2/shared_cpu_list")).ok()?;
            let first: String = shared.chars().take_while(char::is_ascii_digit).collect();
            first.parse().ok()
        })
    }

    fn by(cpus: &[u32], first_sharer: impl Fn(u32) -> Option<u32>) -> Self {
        let mut groups: Vec<(u32, Vec<u32>)> = Vec::new();
        for &cpu in cpus {
            let key = first_sharer(cpu).unwrap_or(cpu);
            match groups.iter_mut().position(|(other, _)| *other == key) {
                Some(index) => groups[index].1.push(cpu),
                None if groups.len() < QUEUES_MAX => groups.push((key, vec![cpu])),
                None => groups[0].1.push(cpu),
            }
        }
        if groups.is_empty() {
            groups.push((0, Vec::new()));
        }
        Self(groups.into_iter().map(|(_, cpus)| cpus).collect())
    }

    /// How many there are; at least one.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The CPUs of one; empty when no CPU was given at all.
    #[must_use]
    pub fn cpus(&self, group: usize) -> &[u32] {
        &self.0[group]
    }

    /// The table of a [`crate::wire::Welcome`]: CPUs that are not the pool's get a number that is no group.
    #[must_use]
    pub fn table(&self) -> [u8; 64] {
        let mut table = [u8::MAX; 64];
        for (group, cpus) in self.0.iter().enumerate() {
            for &cpu in cpus {
                if let Some(entry) = table.get_mut(cpu as usize) {
                    *entry = group as u8;
                }
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_grouped_by_their_cache() {
        let groups = CoreGroups::by(&[0, 1, 4, 5, 70], |cpu| Some(cpu / 2 * 2));
        assert_eq!(groups.count(), 3);
        assert_eq!(groups.cpus(1), [4, 5]);
        let table = groups.table();
        assert_eq!((table[0], table[1], table[2], table[4], table[5]), (0, 0, u8::MAX, 1, 1));
        assert_eq!(CoreGroups::by(&[], |_| None).count(), 1);
        let many: Vec<u32> = (0..100).collect();
        assert_eq!(CoreGroups::by(&many, |_| None).count(), QUEUES_MAX);
    }
}
