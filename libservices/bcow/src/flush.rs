//! Flushes compact files to disk in order: data, then the tables and records that name it, then those that name the tables. A
//! thread does this periodically for files that nobody syncs.

use crate::Bcow;
use crate::file::File;
use crate::format::{Level, Record, Root};
use crate::nodes::{Content, Node, lock};
use crate::table::{Sector, Table};
use poolfs_libservice::{Durability, Result, Spending};
use poolfs_types::{Caller, Errno, SetAttributes, SetTime};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

const ROOT: &Caller = &Caller::ROOT;

/// How the thread is told to end.
#[derive(Default)]
pub(crate) struct Stop {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Stop {
    pub fn stop(&self) {
        *lock(&self.stopped) = true;
        self.wake.notify_all();
    }

    /// Waits for `time`; whether the end has come.
    fn wait(&self, time: Duration) -> bool {
        let waited = self.wake.wait_timeout_while(lock(&self.stopped), time, |stopped| !*stopped);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn run(layer: &Weak<Bcow>, stop: &Stop, interval: Duration) {
    while !stop.wait(interval) {
        let Some(layer) = layer.upgrade() else { return };
        if let Err(error) = layer.flush_all() {
            tracing::warn!(%error, "the tables of a file could not be brought to disk");
        }
    }
}

/// What a file has to bring to disk, as it was when its data was.
struct Snapshot {
    units: Vec<Sector>,
    root: Vec<Sector>,
    record: Record,
    /// [`File::emptied`] at that time
    emptied: u64,
}

impl Bcow {
    /// A file has something to bring to disk. With too many waiting, the oldest is brought there now.
    pub(crate) fn queue(&self, node: &Arc<Node>) {
        if node.is_queued.swap(true, Ordering::AcqRel) {
            return;
        }
        self.nodes.begin_flush(node.id);
        let oldest = {
            let mut dirty = lock(&self.dirty);
            dirty.push_back(node.clone());
            if dirty.len() > self.dirty_files_max { dirty.pop_front() } else { None }
        };
        self.have_thread();
        // What another file meets is no error of this call; that file's fsync reports it.
        if let Some(Err(error)) = oldest.map(|oldest| self.flush_queued(&oldest)) {
            tracing::warn!(%error, "the tables of a file could not be brought to disk");
        }
    }

    /// Has room in memory for tables of a file that is about to be read or written, and for those of all. Tables that are not stored have to
    /// be before they go, and whoever made them waits. Nothing of any file is locked meanwhile.
    pub(crate) fn have_room(&self, node: &Arc<Node>) -> Result<()> {
        let is_full = matches!(&*node.read(), Content::Open(file) if file.has_all_tables());
        if is_full && self.drop_tables(node, File::has_many_tables) {
            self.flush(node)?;
            self.drop_tables(node, |_| false);
        }
        if !self.bound.is_full() {
            return Ok(());
        }
        // Whoever comes meanwhile waits: what it brought would come on top.
        let _dropping = lock(&self.dropping);
        // Half of them, so that not each goes through all nodes.
        if self.bound.count() >= self.bound.of_all {
            let is_enough = || self.bound.count() <= self.bound.of_all / 2;
            let mut nodes = self.open_nodes(File::has_tables);
            nodes.retain(|node| !is_enough() && self.drop_tables(node, File::has_tables));
            self.flush_until(nodes, node, is_enough, |other| _ = self.drop_tables(other, |_| false))?;
        }
        if self.bound.root_count() >= self.bound.of_roots {
            let is_enough = || self.bound.root_count() <= self.bound.of_roots / 2;
            let mut nodes = self.open_nodes(File::has_root);
            nodes.retain(|node| !is_enough() && !self.close(node));
            self.flush_until(nodes, node, is_enough, |other| _ = self.close(other))?;
        }
        // When none of them can be stored, there must not be more.
        if self.bound.is_full() { Err(Errno::ENOMEM.into()) } else { Ok(()) }
    }

    /// The nodes whose file is in use and like that.
    fn open_nodes(&self, is_wanted: fn(&File) -> bool) -> Vec<Arc<Node>> {
        let mut nodes = self.nodes.all();
        nodes.retain(|node| matches!(&*node.read(), Content::Open(file) if is_wanted(file)));
        nodes
    }

    /// Brings files to disk, one after the other, and does something with each, until it is enough. Fails with what `own` meets.
    fn flush_until(
        &self,
        nodes: Vec<Arc<Node>>,
        own: &Arc<Node>,
        is_enough: impl Fn() -> bool,
        stored: impl Fn(&Arc<Node>),
    ) -> Result<()> {
        for node in nodes {
            if is_enough() {
                break;
            }
            match self.flush(&node) {
                Ok(()) => stored(&node),
                Err(error) if Arc::ptr_eq(&node, own) => return Err(error),
                // What another file meets is no error of this call; that file's fsync reports it.
                Err(error) => tracing::warn!(%error, "the tables of a file could not be brought to disk"),
            }
        }
        Ok(())
    }

    /// Has nothing of a file in memory but its record, until it is used again; whether that can be.
    fn close(&self, node: &Node) -> bool {
        // Whoever brings it to disk knows it as it was.
        let Ok(_flushing) = node.flushing.try_lock() else { return false };
        let mut content = node.write();
        let Content::Open(file) = &*content else { return true };
        let is_at_rest = file.is_at_rest();
        if is_at_rest {
            *content = Content::Stored(file.stored.clone());
        }
        is_at_rest
    }

    /// The same for a reader, whose tables can go at any time: what cannot be stored does not hold it up.
    pub(crate) fn have_room_to_read(&self, node: &Arc<Node>) {
        if let Err(error) = self.have_room(node) {
            tracing::debug!(%error, "the tables of a file could not be brought to disk");
        }
    }

    /// Lets the tables of a file go that are on disk; whether `then`.
    fn drop_tables(&self, node: &Node, then: impl FnOnce(&File) -> bool) -> bool {
        let Content::Open(file) = &mut *node.write() else { return false };
        file.drop_tables();
        then(file)
    }

    fn have_thread(&self) {
        let mut thread = lock(&self.thread);
        if thread.is_some() || self.flush_interval.is_zero() {
            return;
        }
        let (layer, stop, interval) = (self.own.clone(), self.stop.clone(), self.flush_interval);
        let started = std::thread::Builder::new().name("bcow-flush".into()).spawn(move || run(&layer, &stop, interval));
        // Without it fsync, sync and the end do it, and the next who comes here tries again.
        *thread = started.inspect_err(|error| tracing::debug!(%error, "no thread for a bcow layer")).ok();
    }

    /// Brings a file to disk that was taken from those that wait.
    fn flush_queued(&self, node: &Arc<Node>) -> Result<()> {
        node.is_queued.store(false, Ordering::Release);
        let result = self.flush(node);
        if result.is_err() && !node.is_queued.swap(true, Ordering::AcqRel) {
            lock(&self.dirty).push_back(node.clone());
        } else {
            self.nodes.end_flush(node.id);
        }
        result
    }

    /// Brings every file to disk that waits for it; returns the first failure, after trying all.
    pub(crate) fn flush_all(&self) -> Result<()> {
        let mut first = Ok(());
        let waiting = lock(&self.dirty).len();
        for _ in 0..waiting {
            let Some(node) = lock(&self.dirty).pop_front() else { break };
            first = first.and(self.flush_queued(&node));
        }
        first
    }

    /// Brings a file to disk, with what was written where it had places already.
    pub(crate) fn flush_with_data(&self, node: &Arc<Node>) -> Result<()> {
        let own = {
            let mut content = node.write();
            let is_sound = content.record().is_some();
            is_sound
                .then(|| content.open(&self.below, node.id, false, &self.bound))
                .transpose()?
                .map(|file| file.own.clone())
        };
        if let Some(own) = own {
            node.sync_sized(Durability::Data, |durability| self.below.fsync(ROOT, own.id(), durability))?;
        }
        self.flush(node)
    }

    /// Brings places of a file to disk, and the data that they name. Whoever comes second waits for the first.
    pub(crate) fn flush(&self, node: &Arc<Node>) -> Result<()> {
        // What the places are of was accepted, whoever's request has them written.
        let _spending = Spending::of_service();
        let _flushing = lock(&node.flushing);
        loop {
            let snapshot = {
                let mut content = node.write();
                let Content::Open(file) = &mut *content else { return Ok(()) };
                if !file.is_dirty {
                    return Ok(());
                }
                file.take_snapshot()?
            };
            let written = self.write_snapshot(node, &snapshot);
            let is_of_now = |file: &File| file.emptied == snapshot.emptied;
            let Err(error) = written else {
                return self.unseen(node, |file| if is_of_now(file) { file.settle() } else { Ok(()) });
            };
            let mut has_tables_now = false;
            if let Content::Open(file) = &mut *node.write()
                && is_of_now(file)
            {
                file.put_back(&snapshot);
                let was_inline = matches!(snapshot.record.root, Root::Inline(_));
                has_tables_now = was_inline && !matches!(file.record.root, Root::Inline(_));
            }
            if !has_tables_now {
                return Err(error);
            }
        }
    }

    fn write_snapshot(&self, node: &Arc<Node>, snapshot: &Snapshot) -> Result<()> {
        let sync = |durability| -> Result<()> {
            let own = match &*node.read() {
                Content::Open(file) => file.own.id(),
                _ => return Ok(()),
            };
            self.below.fsync(ROOT, own, durability)
        };
        // The data of every unit that the tables name.
        sync(Durability::Data)?;
        self.write_sectors(node, snapshot, &snapshot.units)?;
        // A table is named when it is there.
        if !snapshot.units.is_empty() && !snapshot.root.is_empty() {
            sync(Durability::Data)?;
        }
        self.write_sectors(node, snapshot, &snapshot.root)?;
        // The record counts on all of them when it names another root, or no longer says what they must not be believed.
        let has_sectors = !snapshot.units.is_empty() || !snapshot.root.is_empty();
        let counts = |stored: &Record| stored.root != snapshot.record.root || stored.limit != u64::MAX;
        if has_sectors && node.read().stored().is_some_and(counts) {
            sync(Durability::Data)?;
        }
        self.unseen(node, |file| {
            if file.emptied == snapshot.emptied { file.store_places(snapshot.record_to_store(file)) } else { Ok(()) }
        })?;
        sync(Durability::All)
    }

    fn write_sectors(&self, node: &Arc<Node>, snapshot: &Snapshot, sectors: &[Sector]) -> Result<()> {
        if sectors.is_empty() {
            return Ok(());
        }
        self.unseen(node, |file| {
            // Where they were to stand, there may be something else by now.
            let sectors = if file.emptied == snapshot.emptied { sectors } else { &[] };
            sectors.iter().try_for_each(|sector| file.own.write_full(sector.offset, &sector.bytes))
        })
    }

    /// Has something done to the file below that is no change that users see.
    fn unseen<T>(&self, node: &Arc<Node>, work: impl FnOnce(&mut File) -> Result<T>) -> Result<T> {
        let mut content = node.write();
        let file = content.open(&self.below, node.id, false, &self.bound)?;
        let before = self.below.getattr(ROOT, node.id)?;
        let result = work(file);
        let after = self.below.getattr(ROOT, node.id)?;
        if after.modified != before.modified {
            let modified = Some(SetTime::At(before.modified));
            self.below.setattr(ROOT, node.id, &SetAttributes { modified, ..SetAttributes::default() }, None)?;
        }
        node.changed.hide(before.changed, self.below.getattr(ROOT, node.id)?.changed);
        result
    }
}

impl Snapshot {
    /// The record with the size as it is by now: a truncation has stored that already.
    fn record_to_store(&self, file: &File) -> Record {
        let limit = if file.record.limit == u64::MAX { self.record.limit } else { file.record.limit };
        Record { size: file.record.size, limit, is_metacopy: file.record.is_metacopy, ..self.record.clone() }
    }
}

impl File {
    /// What has to be written. Until [`File::settle`] its tables stay in memory, and what is let go meanwhile is so with the next one.
    fn take_snapshot(&mut self) -> Result<Snapshot> {
        self.apply_limit()?;
        let mut taken = [Level::Units, Level::Tables]
            .map(|level| self.tables_mut(level).flat_map(|table| table.take_dirty()).collect::<Vec<_>>());
        let [units, root] = &mut taken;
        self.record.limit = u64::MAX;
        self.record.has_freed = self.has_free();
        self.space().begin_freeing();
        let (units, root) = (std::mem::take(units), std::mem::take(root));
        Ok(Snapshot { units, root, record: self.record.clone(), emptied: self.emptied })
    }

    /// Stores a record with the places of a snapshot. Where the attributes of the file below have no room for more of them, tables have them
    /// from here on, and the error is answered.
    fn store_places(&mut self, record: Record) -> Result<()> {
        self.store(record).or_else(|error| {
            if [Errno::ENOSPC, Errno::E2BIG].iter().any(|&full| error == full) {
                self.have_tables(0)?;
            }
            Err(error)
        })
    }

    /// The snapshot has reached the disk.
    fn settle(&mut self) -> Result<()> {
        self.end_storing();
        let is_behind = |file: &mut File, level| file.tables_mut(level).any(|table| table.is_dirty());
        self.is_dirty = is_behind(self, Level::Units)
            || is_behind(self, Level::Tables)
            || self.record.limit != u64::MAX
            || self.record.size != self.stored.size
            || self.record.root != self.stored.root;
        self.release()
    }

    /// It has not, or not all of it.
    fn put_back(&mut self, snapshot: &Snapshot) {
        self.record.limit = self.record.limit.min(self.stored.limit);
        self.space().put_back_freeing();
        for sector in snapshot.units.iter().chain(&snapshot.root) {
            let table = self.tables_mut(sector.which.level).find(|table| table.which == sector.which);
            table.into_iter().for_each(|table| table.put_back(sector.sector));
        }
        self.end_storing();
    }

    fn end_storing(&mut self) {
        for level in [Level::Units, Level::Tables] {
            self.tables_mut(level).for_each(Table::end_storing);
        }
    }
}
