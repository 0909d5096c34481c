//! How many nodes the kernel's tree has in which it finds the pages of a memory file, from the leaves that have pages.
//!
//! A leaf is for [`PAGE_TREE_FANOUT`] pages. On each level above, a node is for as many nodes below it; the tree is as high as its last leaf
//! requires (`include/linux/xarray.h`).

use hashbrown::HashMap;
use poolfs_types::limits::PAGE_TREE_FANOUT;

const SHIFT: u32 = PAGE_TREE_FANOUT.ilog2();
/// Levels above the leaves that the largest number has.
const LEVELS_MAX: usize = u64::BITS.div_ceil(SHIFT) as usize;

/// The tree of a file, but for its first leaf: files that have no other need none of this.
#[derive(Default)]
pub(crate) struct PageTree {
    leaves: u64,
    /// How many of the leaves need so many levels above them.
    by_height: [u32; LEVELS_MAX + 1],
    /// How many leaves are below a node, by its level and number; not of the first node of a level.
    nodes: HashMap<(u32, u64), u32>,
}

/// How many levels a tree has above the leaves when this is its last one.
pub(crate) fn height(leaf: u64) -> u64 {
    u64::from((u64::BITS - leaf.leading_zeros()).div_ceil(SHIFT))
}

/// The nodes above a leaf, but those that are the first of their level.
fn above(leaf: u64) -> impl Iterator<Item = (u32, u64)> {
    (1..).map(move |level| (level, leaf >> (SHIFT * level))).take_while(|&(_, number)| number > 0)
}

impl PageTree {
    /// A leaf that had no pages has some.
    pub(crate) fn add(&mut self, leaf: u64) {
        self.leaves += 1;
        self.by_height[height(leaf) as usize] += 1;
        above(leaf).for_each(|node| *self.nodes.entry(node).or_default() += 1);
    }

    /// It has none any more.
    pub(crate) fn remove(&mut self, leaf: u64) {
        self.leaves -= 1;
        self.by_height[height(leaf) as usize] -= 1;
        for node in above(leaf) {
            let left = self.nodes.get_mut(&node).map_or(0, |leaves| {
                *leaves -= 1;
                *leaves
            });
            if left == 0 {
                self.nodes.remove(&node);
            }
        }
    }

    /// Leaves and what is above them. The first node of each level counts, whether or not the kernel needs it.
    pub(crate) fn nodes(&self) -> u64 {
        let height = self.by_height.iter().rposition(|&leaves| leaves > 0).unwrap_or(0);
        self.leaves + self.nodes.len() as u64 + height as u64
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leaves == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The same, from all leaves.
    fn expected(leaves: &[u64]) -> u64 {
        let height = leaves.iter().copied().max().map_or(0, height);
        let on = |level: u64| leaves.iter().map(|leaf| leaf >> (6 * level)).chain([0]).collect::<BTreeSet<_>>().len();
        leaves.len() as u64 + (1..=height).map(|level| on(level) as u64).sum::<u64>()
    }

    #[test]
    fn each_node_counts_once() {
        let mut tree = PageTree::default();
        let mut there = Vec::new();
        // Neighbours, the first of a group, far ones, the last that a file can have.
        let leaves = [1, 63, 64, 65, 128, 4095, 4096, 1 << 20, (1 << 20) + 64, (1 << 45) - 1];
        for leaf in leaves {
            tree.add(leaf);
            there.push(leaf);
            assert_eq!(tree.nodes(), expected(&there), "with {there:?}");
        }
        for leaf in [64, (1 << 45) - 1, 4096, 1 << 20, 63, 65, 4095, 1, (1 << 20) + 64, 128] {
            tree.remove(leaf);
            there.retain(|&other| other != leaf);
            assert_eq!(tree.nodes(), expected(&there), "with {there:?}");
        }
        assert!(tree.is_empty() && tree.nodes.is_empty());
    }
}
