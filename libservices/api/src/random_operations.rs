//! The random-operations test: one random program, run in step on a layer and on the in-memory reference.
//!
//! After every operation, results, errnos, bytes and attributes must agree; at the end, both whole trees. Type, mode, owner,
//! group and device are always compared; size and link count for everything but directories. The modification time is compared
//! where an explicit change set it last (and where something else has set it since, it must *not* be such an explicit time).
//! Allocated blocks and the places of holes are the layer's own choice, as long as no data lies in a hole. Owner and access lists
//! of whiteouts are the backend's.
//!
//! A failure names the seed and the operations that led there. The same seed, count and options give the same program.

mod generator;
mod inodes;
mod operation;
mod populate;
mod tree;
mod world;
mod world_files;
mod world_names;

pub use populate::populate;

use crate::conformance::Capability;
use crate::{Libservice, Memory};
use generator::Generator;
use operation::Operation;
use std::collections::VecDeque;
use std::sync::Arc;
use world::World;

/// How many operations a failure shows.
const SHOWN: usize = 30;

/// Something to do to the layer between operations.
type Disturbance<'a> = Box<dyn FnMut(&dyn Libservice) + 'a>;

/// Something that ends an instance of the layer and starts another over the same storage.
type Remount<'a> = Box<dyn FnMut(Arc<dyn Libservice>) -> Arc<dyn Libservice> + 'a>;

/// What a comparison did: a test can see that it was not idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Operations that both layers carried out.
    pub succeeded: usize,
    /// Operations that both layers refused, with the same errno.
    pub refused: usize,
}

/// One comparison to be made.
pub struct Comparison<'a> {
    seed: u64,
    operations: usize,
    reference: Arc<Memory>,
    lacking: Vec<Capability>,
    disturbance: Option<(usize, Disturbance<'a>)>,
    remount: Option<(usize, Remount<'a>)>,
    /// whether all is synced before
    syncs: bool,
}

impl<'a> Comparison<'a> {
    /// A program of so many operations, starting from empty layers.
    #[must_use]
    pub fn new(seed: u64, operations: usize) -> Self {
        Self {
            seed,
            operations,
            reference: Memory::new(),
            lacking: Vec::new(),
            disturbance: None,
            remount: None,
            syncs: true,
        }
    }

    /// Starts from a tree instead: `reference` holds the same as the subject already (see [`populate`]).
    #[must_use]
    pub fn starting_from(mut self, reference: Arc<Memory>) -> Self {
        self.reference = reference;
        self
    }

    /// Leaves out operations that need what the layer does not offer.
    #[must_use]
    pub fn lacking(mut self, capabilities: &[Capability]) -> Self {
        self.lacking.extend_from_slice(capabilities);
        self
    }

    /// Calls `disturb` after every `every` operations; nothing may change by it that a caller could see.
    #[must_use]
    pub fn disturbing(mut self, every: usize, disturb: impl FnMut(&dyn Libservice) + 'a) -> Self {
        self.disturbance = Some((every.max(1), Box::new(disturb)));
        self
    }

    /// After every `every` operations: syncs, releases and forgets everything, hands the layer to `remount`, which
    /// returns one that holds the same, and opens by path what was open. Files without names are closed before.
    #[must_use]
    pub fn remounting(
        mut self,
        every: usize,
        remount: impl FnMut(Arc<dyn Libservice>) -> Arc<dyn Libservice> + 'a,
    ) -> Self {
        self.remount = Some((every.max(1), Box::new(remount)));
        self
    }

    /// The same without a sync: whoever had the layer has died.
    #[must_use]
    pub fn dying(self, every: usize, remount: impl FnMut(Arc<dyn Libservice>) -> Arc<dyn Libservice> + 'a) -> Self {
        Self { syncs: false, ..self.remounting(every, remount) }
    }

    /// Runs the program. At the end everything is released and forgotten on both sides.
    ///
    /// # Panics
    /// With the first disagreement.
    pub fn run(mut self, subject: Arc<dyn Libservice>) -> Summary {
        let mut generator = Generator::new(self.seed, self.lacking.clone());
        let mut world = World::new(subject, Arc::clone(&self.reference));
        let mut recent: VecDeque<Operation> = VecDeque::with_capacity(SHOWN);
        for number in 1..=self.operations {
            let operation = generator.next(&world);
            if recent.len() == SHOWN {
                recent.pop_front();
            }
            recent.push_back(operation.clone());
            let outcome = world.apply(&operation).and_then(|()| self.between(number, &mut world));
            if let Err(difference) = outcome {
                self.fail(number, &difference, &recent, &world);
            }
        }
        if let Err(difference) = world.compare_trees() {
            self.fail(self.operations, &difference, &recent, &world);
        }
        world.let_go();
        world.summary()
    }

    /// The disturbances due after operation `number`.
    fn between(&mut self, number: usize, world: &mut World) -> Result<(), String> {
        if let Some((every, disturb)) = &mut self.disturbance
            && number.is_multiple_of(*every)
        {
            disturb(world.subject());
        }
        if let Some((every, remount)) = &mut self.remount
            && number.is_multiple_of(*every)
        {
            world.remount(remount, self.syncs)?;
            world.compare_trees()?;
        }
        Ok(())
    }

    fn fail(&self, number: usize, difference: &str, recent: &VecDeque<Operation>, world: &World) -> ! {
        let shown: Vec<String> = recent.iter().map(|operation| format!("  {operation:?}")).collect();
        panic!(
            "random operations, seed {}, after {number} of {} operations: {difference}\nheld now:\n{}the last {}:\n{}",
            self.seed,
            self.operations,
            world.held(),
            shown.len(),
            shown.join("\n")
        )
    }
}

/// Runs `operations` random operations on the empty layer `subject` and on the reference.
///
/// # Panics
/// With the first disagreement.
pub fn compare(subject: Arc<dyn Libservice>, seed: u64, operations: usize) -> Summary {
    Comparison::new(seed, operations).run(subject)
}

/// As [`compare`], where both hold the same tree at the start (see [`populate`]).
///
/// # Panics
/// With the first disagreement.
pub fn compare_with(subject: Arc<dyn Libservice>, reference: Arc<Memory>, seed: u64, operations: usize) -> Summary {
    Comparison::new(seed, operations).starting_from(reference).run(subject)
}

#[cfg(test)]
mod tests;
