//! The conformance suite: tests of the contract, operation by operation and errno by errno.
//!
//! A layer's tests call [`run`] with a function that makes a fresh, empty layer. Every case gets a layer of its own. If a layer
//! cannot offer something (a backend without ACLs, for example), its test passes that to [`run_lacking`], which prints the cases
//! that were skipped.

mod acls;
mod attributes;
mod concurrency;
mod directories;
mod durability;
mod files;
mod handles;
mod holes;
mod links;
mod nameless;
mod names;
mod rename;
mod support;
mod times;
mod xattrs;

use crate::Libservice;
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};

/// Something that not every layer offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// POSIX access control lists: stored, inherited, tied to the mode
    Acls,
    /// room that is reserved: `fallocate` without a mode, or with `KEEP_SIZE` alone
    Allocation,
    /// device nodes
    Devices,
    /// `seek` tells holes from data, and `PUNCH_HOLE` makes them
    Holes,
    /// files without a name
    NamelessFiles,
    /// `NO_REPLACE`, `EXCHANGE` and `WHITEOUT`
    RenameFlags,
    /// xattrs in `security.`
    SecurityXattrs,
    /// xattrs in `trusted.`
    TrustedXattrs,
    /// xattrs in `user.`
    UserXattrs,
    /// `fallocate` with `ZERO_RANGE`
    ZeroRange,
}

/// One thing a layer must do.
#[derive(Clone, Copy)]
pub struct Case {
    /// File of the suite and name of the case.
    pub name: &'static str,
    /// What the layer must offer for the case to make sense.
    pub needs: Option<Capability>,
    /// Panics when the layer, which is empty and used by nobody else, does not do it.
    pub check: fn(&dyn Libservice),
}

impl Case {
    const fn new(name: &'static str, check: fn(&dyn Libservice)) -> Self {
        Self { name, needs: None, check }
    }

    const fn needing(name: &'static str, capability: Capability, check: fn(&dyn Libservice)) -> Self {
        Self { name, needs: Some(capability), check }
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// All cases, for a layer that wants to run them one by one.
#[must_use]
pub fn cases() -> &'static [Case] {
    static CASES: LazyLock<Vec<Case>> = LazyLock::new(|| {
        [
            names::CASES,
            files::CASES,
            handles::CASES,
            rename::CASES,
            links::CASES,
            nameless::CASES,
            xattrs::CASES,
            acls::CASES,
            attributes::CASES,
            times::CASES,
            directories::CASES,
            holes::CASES,
            durability::CASES,
            concurrency::CASES,
        ]
        .concat()
    });
    &CASES
}

/// Runs every case, each on a layer that `make` makes.
///
/// # Panics
/// Names all cases that failed, after their own messages.
pub fn run(make: &dyn Fn() -> Arc<dyn Libservice>) {
    run_lacking(make, &[]);
}

/// As [`run`], without the cases that need one of `lacking`; says on standard error which those are.
///
/// # Panics
/// Names all cases that failed, after their own messages.
pub fn run_lacking(make: &dyn Fn() -> Arc<dyn Libservice>, lacking: &[Capability]) {
    let (skipped, judged): (Vec<Case>, Vec<Case>) =
        cases().iter().partition(|case| case.needs.is_some_and(|capability| lacking.contains(&capability)));
    if !skipped.is_empty() {
        eprintln!("conformance: the layer lacks {lacking:?}; not judged: {skipped:?}");
    }
    let failed: Vec<String> = judged
        .iter()
        .filter_map(|case| {
            let outcome = catch_unwind(AssertUnwindSafe(|| (case.check)(&*make())));
            outcome.err().map(|panic| format!("{}: {}", case.name, message_of(&*panic)))
        })
        .collect();
    assert!(
        failed.is_empty(),
        "conformance: {} of {} cases failed:\n  {}",
        failed.len(),
        judged.len(),
        failed.join("\n  ")
    );
}

fn message_of(panic: &(dyn Any + Send)) -> &str {
    let owned = panic.downcast_ref::<String>().map(String::as_str);
    owned.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}

#[cfg(test)]
mod tests;
