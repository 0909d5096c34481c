//! FUSE passthrough per node: programs that the kernel maps and reads by itself.
//!
//! The kernel handles an open file in one of two ways: it caches the file's pages itself, or it uses those of a file it was given
//! for that. All files open at one time under one number are handled the same way; otherwise the next open fails with EIO.
//! Mappings of the given file outlive the open file. So the given file stays until the kernel forgets the number.
//!
//! When the content is about to change for the first time (somebody opens the file for writing, or sets its size), there are
//! three cases:
//!
//! - Nobody has it open in this way any more: from here on the kernel caches it itself. Existing mappings keep what they show.
//! - Somebody has, and something is mounted on one of the file's names: ETXTBSY, because another number would take the mount
//!   away.
//! - Somebody has, and nothing is mounted there: the number is *retired*. The node gets another one, which the kernel finds when
//!   it looks the name up again, as it does after ESTALE. Processes that have the old number open continue with the old content.
//!   Who opens it anew without a name (by `/proc/self/fd`, or where a file is mounted) may read it, and is answered ETXTBSY for
//!   writing.

mod retired;

use super::{NodeState, NodeTable, lock};
use crate::notify::KernelCache;
use hashbrown::HashMap;
use poolfs_libservice::types::{Errno, NodeId};
use retired::Retired;
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// How many bytes and files the kernel was given and has not let go, and how often something was opened so.
#[derive(Default)]
struct Counts {
    bytes: AtomicU64,
    files: AtomicU64,
    opens: AtomicU64,
}

/// What a mount's kernel has of programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextCounts {
    /// Bytes it may have mapped.
    pub bytes: u64,
    /// Files that it may have mapped.
    pub files: u64,
    /// How often one was opened so, since the mount was made.
    pub opens: u64,
}

/// A file that the kernel was given in place of one of the mount. Dropped, the kernel has let it go.
pub struct Backing {
    id: u32,
    bytes: u64,
    kernel: Arc<dyn KernelCache>,
    counts: Arc<Counts>,
    /// Keeps the bytes where they are, until the kernel has been told.
    _pin: Arc<dyn Any + Send + Sync>,
}

impl Drop for Backing {
    fn drop(&mut self) {
        self.counts.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.counts.files.fetch_sub(1, Ordering::Relaxed);
        // Without its connection the kernel has let go of it already.
        if let Err(error) = self.kernel.close_backing(self.id) {
            tracing::debug!(id = self.id, %error, "the kernel did not take back a program");
        }
    }
}

/// Of one number.
#[derive(Default)]
pub(super) struct TextState {
    backing: Option<Arc<Backing>>,
    /// Files open now that the kernel maps and reads by itself.
    opens: u32,
    /// Other open files, and changes of the size that are under way.
    others: u32,
    /// The content may no longer be what it was when the kernel had it: it caches it itself, as long as it knows this number.
    outdated: bool,
    /// Counts what may change the content.
    changes: u64,
}

/// All of a mount.
#[derive(Default)]
pub(super) struct PassthroughFiles {
    counts: Arc<Counts>,
    retired: Mutex<HashMap<u64, Retired>>,
    /// How many are retired: mostly none, and nobody looks for them.
    retired_count: AtomicU64,
    /// What the kernel goes on with though nobody serves it any more.
    left: Mutex<Vec<Arc<Backing>>>,
}

/// One user of a number: an open file, or a change under way.
pub(crate) struct TextUse {
    nodes: Arc<NodeTable>,
    node: NodeId,
    number: u64,
    /// Of what is known of the node; nothing where nothing was.
    born: Option<u64>,
    is_text: bool,
}

impl Drop for TextUse {
    fn drop(&mut self) {
        self.nodes.end_text_use(self);
    }
}

/// How a file is about to be opened.
pub(crate) enum Opening {
    /// the kernel caches it itself
    Cached(TextUse),
    /// as others that are open: the kernel has it by this id
    Text(TextUse, u32),
    /// it may be a program that the kernel does not have yet; to be decided by [`NodeTable::open_text`]
    Undecided(Undecided),
}

/// A number as it was before somebody looked whether its file is a program.
pub(crate) struct Undecided {
    node: NodeId,
    number: u64,
    born: u64,
    changes: u64,
}

/// Who is about to open a number or to change it, in the kernel's words.
#[derive(Clone, Copy)]
pub(crate) struct Asking {
    pub node: NodeId,
    pub number: u64,
    pub thread: u32,
}

impl NodeTable {
    fn text_use(self: &Arc<Self>, asking: Asking, born: Option<u64>, is_text: bool) -> TextUse {
        TextUse { nodes: Arc::clone(self), node: asking.node, number: asking.number, born, is_text }
    }

    /// A file is about to be opened by the kernel, to be read only or not. `is_covered` says whether something is mounted on one of
    /// its names, and is asked when nothing is locked.
    ///
    /// # Errors
    /// `ESTALE` when the kernel has to look the name up again, `ETXTBSY` when it has not done so, or must not.
    pub(crate) fn begin_open(
        self: &Arc<Self>,
        asking: Asking,
        writes: bool,
        is_covered: impl FnOnce() -> bool,
    ) -> Result<Opening, Errno> {
        self.reinstate(asking);
        if let Some(opening) = self.begin_open_retired(asking, writes) {
            return opening;
        }
        if writes {
            return self.begin_change(asking, is_covered).map(Opening::Cached);
        }
        let mut states = self.states(asking.node);
        let Some(state) = states.get_mut(&asking.node) else { return Err(Errno::ESTALE) };
        let text = &mut state.text;
        match &text.backing {
            // Also when the content has been copied up by then: it is the same until somebody changes it, who comes by here.
            Some(backing) if text.opens > 0 || text.others == 0 && !text.outdated => {
                text.opens += 1;
                self.texts.counts.opens.fetch_add(1, Ordering::Relaxed);
                Ok(Opening::Text(self.text_use(asking, Some(state.born), true), backing.id))
            }
            None if text.others == 0 && !text.outdated => {
                let Asking { node, number, .. } = asking;
                Ok(Opening::Undecided(Undecided { node, number, born: state.born, changes: text.changes }))
            }
            _ => {
                text.others += 1;
                Ok(Opening::Cached(self.text_use(asking, Some(state.born), false)))
            }
        }
    }

    /// What becomes of an open file that was undecided, now that the kernel has been given `backing`, or nothing.
    pub(crate) fn open_text(self: &Arc<Self>, undecided: &Undecided, backing: Option<Backing>) -> Option<Opening> {
        let Undecided { node, number, born, changes } = *undecided;
        let asking = Asking { node, number, thread: 0 };
        let mut backing = backing.map(Arc::new);
        let mut states = self.states(node);
        let state = states.get_mut(&node)?;
        let born_now = Some(state.born);
        let is_as_it_was = state.born == born && state.number == number && state.text.changes == changes;
        let text = &mut state.text;
        if is_as_it_was && text.others == 0 {
            // Another one may have been faster.
            text.backing = text.backing.take().or_else(|| backing.take());
            if let Some(known) = &text.backing {
                text.opens += 1;
                self.texts.counts.opens.fetch_add(1, Ordering::Relaxed);
                return Some(Opening::Text(self.text_use(asking, born_now, true), known.id));
            }
        }
        text.others += 1;
        Some(Opening::Cached(self.text_use(asking, born_now, false)))
    }

    /// The kernel has this file to be taken in place of one of the mount.
    pub(crate) fn backing(
        &self,
        kernel: &Arc<dyn KernelCache>,
        text: poolfs_libservice::Text,
    ) -> std::io::Result<Backing> {
        let id = kernel.open_backing(&text.file)?;
        let counts = Arc::clone(&self.texts.counts);
        counts.bytes.fetch_add(text.bytes, Ordering::Relaxed);
        counts.files.fetch_add(1, Ordering::Relaxed);
        Ok(Backing { id, bytes: text.bytes, kernel: Arc::clone(kernel), counts, _pin: text.pin })
    }

    /// The content is about to change, by the kernel: as long as what is returned is kept.
    ///
    /// # Errors
    /// As [`NodeTable::begin_open`].
    pub(crate) fn begin_change(
        self: &Arc<Self>,
        asking: Asking,
        is_covered: impl FnOnce() -> bool,
    ) -> Result<TextUse, Errno> {
        self.reinstate(asking);
        if let Some(answered) = self.begin_open_retired(asking, true) {
            return Err(answered.err().unwrap_or(Errno::ETXTBSY));
        }
        let is_open = |states: &HashMap<NodeId, NodeState>| states.get(&asking.node).is_some_and(|s| s.text.opens > 0);
        let may_be_retired = if is_open(&self.states(asking.node)) { !is_covered() } else { false };
        let mut states = self.states(asking.node);
        let Some(state) = states.get_mut(&asking.node) else { return Err(Errno::ESTALE) };
        if state.text.opens > 0 {
            if !may_be_retired {
                return Err(Errno::ETXTBSY);
            }
            self.retire(state, asking);
            return Err(Errno::ESTALE);
        }
        state.text.begin_change();
        Ok(self.text_use(asking, Some(state.born), false))
    }

    /// The content is about to change, by the user-level path: as long as what is returned is kept. Nothing while the kernel reads it
    /// by itself: then the change is to come by the kernel.
    pub(crate) fn begin_own_change(self: &Arc<Self>, node: NodeId) -> Option<TextUse> {
        let mut states = self.states(node);
        let state = states.get_mut(&node);
        if state.as_ref().is_some_and(|state| state.text.opens > 0) {
            return None;
        }
        let born = state.map(|state| {
            state.text.begin_change();
            state.born
        });
        Some(self.text_use(Asking { node, number: 0, thread: 0 }, born, false))
    }

    fn end_text_use(&self, ended: &TextUse) {
        if ended.is_text
            && self.texts.retired_count.load(Ordering::Acquire) > 0
            && let Some(retired) = lock(&self.texts.retired).get_mut(&ended.number)
        {
            retired.opens = retired.opens.saturating_sub(1);
            return;
        }
        let mut states = self.states(ended.node);
        if let Some(state) = states.get_mut(&ended.node).filter(|state| Some(state.born) == ended.born) {
            let count = if ended.is_text { &mut state.text.opens } else { &mut state.text.others };
            *count = count.saturating_sub(1);
        }
    }

    /// The kernel keeps what it was given: the mount is used, and is served no more.
    pub(crate) fn leave_texts(&self) {
        let mut left = lock(&self.texts.left);
        for shard in &self.states {
            left.extend(lock(shard).values_mut().filter_map(|state| state.text.take_backing()));
        }
        left.extend(lock(&self.texts.retired).values().map(|retired| Arc::clone(&retired.backing)));
    }

    /// Numbers of programs that the kernel keeps though nobody has them open, the longest unused half of them. Mappings may live on.
    pub(crate) fn unused_texts(&self) -> Vec<u64> {
        let mut unused: Vec<(u64, NodeId, u64)> = Vec::new();
        for shard in &self.states {
            let states = lock(shard);
            let of_shard = states.iter().filter(|(_, state)| state.text.backing.is_some() && state.open_files == 0);
            unused.extend(of_shard.map(|(&node, state)| (state.entered, node, state.number)));
        }
        unused.sort_unstable();
        unused.truncate(unused.len().div_ceil(2));
        for &(_, node, _) in &unused {
            // What is mapped stays, and is not the first to be asked for again.
            if let Some(state) = self.states(node).get_mut(&node) {
                state.entered = self.entries.fetch_add(1, Ordering::Relaxed);
            }
        }
        let retired = lock(&self.texts.retired);
        let retired = retired.iter().filter(|(_, retired)| retired.opens == 0).map(|(&number, _)| number);
        unused.into_iter().map(|(_, _, number)| number).chain(retired).collect()
    }

    /// What the kernel has of programs.
    #[must_use]
    pub fn texts(&self) -> TextCounts {
        let Counts { bytes, files, opens } = &*self.texts.counts;
        let [bytes, files, opens] = [bytes, files, opens].map(|count| count.load(Ordering::Relaxed));
        TextCounts { bytes, files, opens }
    }

    /// The nodes that somebody has open so that the kernel reads them by itself.
    pub(crate) fn open_texts(&self) -> Vec<NodeId> {
        let mut open = Vec::new();
        for shard in &self.states {
            let states = lock(shard);
            open.extend(states.iter().filter(|(_, state)| state.text.opens > 0).map(|(&node, _)| node));
        }
        open.extend(lock(&self.texts.retired).values().filter(|retired| retired.opens > 0).map(|retired| retired.node));
        open
    }
}

impl TextState {
    fn begin_change(&mut self) {
        self.others += 1;
        self.changes += 1;
        self.outdated |= self.backing.is_some();
    }

    /// What the kernel has, of a node that is forgotten.
    pub(super) fn take_backing(&mut self) -> Option<Arc<Backing>> {
        self.backing.take()
    }
}

#[cfg(test)]
mod tests;
