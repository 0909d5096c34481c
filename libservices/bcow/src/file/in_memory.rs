//! The in-memory tables of compact files, bounded per file and for all files together.
//!
//! A program determines how many tables a file has, by where it writes and how long the file is. Tables of units that are stored
//! are dropped when there are too many, and read again when they are needed. A root stays as long as its file is in use.

use crate::table::Table;
use hashbrown::HashMap;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many tables are in memory of all files of a layer, and how many may be.
pub(crate) struct Bound {
    count: AtomicUsize,
    /// of one file
    pub of_file: usize,
    /// of all
    pub of_all: usize,
    root_count: AtomicUsize,
    /// of the roots of all
    pub of_roots: usize,
}

impl Bound {
    pub fn new(of_file: usize, of_all: usize, of_roots: usize) -> Arc<Self> {
        let (count, root_count) = Default::default();
        Arc::new(Bound { count, of_file: of_file.max(1), of_all: of_all.max(1), root_count, of_roots: of_roots.max(1) })
    }

    /// The tables of units.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Those of roots.
    pub fn root_count(&self) -> usize {
        self.root_count.load(Ordering::Relaxed)
    }

    /// Whether there are as many as there may be.
    pub fn is_full(&self) -> bool {
        self.count() >= self.of_all || self.root_count() >= self.of_roots
    }
}

/// The tables of one file that are in memory, by their numbers.
pub(crate) struct TablesInMemory {
    tables: HashMap<u64, Table>,
    bound: Arc<Bound>,
}

impl TablesInMemory {
    pub fn new(bound: Arc<Bound>) -> Self {
        TablesInMemory { tables: HashMap::new(), bound }
    }

    /// Does something by which there are more of them, or fewer.
    fn counted<T>(&mut self, change: impl FnOnce(&mut HashMap<u64, Table>) -> T) -> T {
        let before = self.tables.len();
        let result = change(&mut self.tables);
        let after = self.tables.len();
        self.bound.count.fetch_add(after.saturating_sub(before), Ordering::Relaxed);
        self.bound.count.fetch_sub(before.saturating_sub(after), Ordering::Relaxed);
        result
    }

    pub fn insert(&mut self, number: u64, table: Table) {
        self.counted(|tables| tables.insert(number, table));
    }

    pub fn remove(&mut self, number: u64) {
        self.counted(|tables| tables.remove(&number));
    }

    pub fn clear(&mut self) {
        self.counted(HashMap::clear);
    }

    /// Lets those go that are on disk as they are here, but for the numbers `but`.
    pub fn drop_stored(&mut self, but: &Range<u64>) {
        self.counted(|tables| tables.retain(|number, table| but.contains(number) || !table.is_stored()));
    }

    /// Lets others go when there is no room for those with the numbers `wanted`.
    pub fn have_room(&mut self, wanted: &Range<u64>) {
        if self.is_full(wanted.end - wanted.start) {
            self.drop_stored(wanted);
        }
    }

    /// Whether so many more are too many.
    pub fn is_full(&self, more: u64) -> bool {
        self.tables.len() as u64 + more > self.bound.of_file as u64
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut Table> {
        self.tables.get_mut(&number)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&u64, &mut Table)> {
        self.tables.iter_mut()
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Table> {
        self.tables.values_mut()
    }
}

/// The tables of a root.
pub(crate) struct RootTables {
    tables: Vec<Table>,
    bound: Arc<Bound>,
}

impl RootTables {
    pub fn new(bound: Arc<Bound>) -> Self {
        RootTables { tables: Vec::new(), bound }
    }

    /// Has these, instead of those there were.
    pub fn set(&mut self, tables: Vec<Table>) {
        let count = &self.bound.root_count;
        count.fetch_add(tables.len(), Ordering::Relaxed);
        count.fetch_sub(std::mem::replace(&mut self.tables, tables).len(), Ordering::Relaxed);
    }
}

impl Deref for RootTables {
    type Target = [Table];

    fn deref(&self) -> &Self::Target {
        &self.tables
    }
}

impl DerefMut for RootTables {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.tables
    }
}

impl Drop for RootTables {
    fn drop(&mut self) {
        self.set(Vec::new());
    }
}

impl Deref for TablesInMemory {
    type Target = HashMap<u64, Table>;

    fn deref(&self) -> &Self::Target {
        &self.tables
    }
}

impl Drop for TablesInMemory {
    fn drop(&mut self) {
        self.clear();
    }
}
