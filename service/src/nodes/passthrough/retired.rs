//! Retired numbers: numbers under which processes continue with an old program, while the node has another number.

use super::{Asking, Backing, Opening};
use crate::nodes::{NodeState, NodeTable, lock};
use poolfs_libservice::types::{Errno, NodeId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A number whose node has another one by now.
pub(super) struct Retired {
    pub(super) node: NodeId,
    references: u64,
    pub(super) backing: Arc<Backing>,
    pub(super) opens: u32,
    /// Who was told to look the name up again, and has not done so.
    sent_back: Option<u32>,
}

impl NodeTable {
    /// The node gets another number, because who has it open by this one goes on with the content from before.
    pub(super) fn retire(&self, state: &mut NodeState, asking: Asking) {
        let text = std::mem::take(&mut state.text);
        let Some(backing) = text.backing else { return };
        let Asking { node, number, thread } = asking;
        let references = std::mem::take(&mut state.kernel_references);
        let retired = Retired { node, references, backing, opens: text.opens, sent_back: Some(thread) };
        lock(&self.texts.retired).insert(number, retired);
        self.texts.retired_count.fetch_add(1, Ordering::AcqRel);
        state.text.changes = text.changes + 1;
        state.text.outdated = true;
        state.number = self.own_number(node);
        if references > 0 {
            self.count_left(1);
        }
    }

    /// The node has its number back, if nobody has it open by that any more and the kernel knows no other. It need not look anything up.
    pub(super) fn reinstate(&self, Asking { node, number, .. }: Asking) {
        if self.texts.retired_count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut states = self.states(node);
        let is_known = |state: &NodeState| state.kernel_references > 0 || state.text.others > 0;
        if states.get(&node).is_some_and(is_known) {
            return;
        }
        let mut all = lock(&self.texts.retired);
        let Some(Retired { references, backing, .. }) =
            all.get(&number).is_some_and(|retired| retired.opens == 0).then(|| all.remove(&number)).flatten()
        else {
            return;
        };
        self.texts.retired_count.fetch_sub(1, Ordering::AcqRel);
        drop(all);
        let state = states.entry(node).or_insert_with(|| self.new_state());
        let other = std::mem::replace(&mut state.number, number);
        state.kernel_references = references;
        state.text.backing = Some(backing);
        state.text.outdated = true;
        if other != 0 {
            self.numbers(other).remove(&other);
        }
        self.count_entered();
    }

    pub(super) fn begin_open_retired(self: &Arc<Self>, asking: Asking, writes: bool) -> Option<Result<Opening, Errno>> {
        if self.texts.retired_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = lock(&self.texts.retired);
        let retired = all.get_mut(&asking.number)?;
        if retired.sent_back != Some(asking.thread) {
            retired.sent_back = Some(asking.thread);
            return Some(Err(Errno::ESTALE));
        }
        retired.sent_back = None;
        if writes {
            return Some(Err(Errno::ETXTBSY));
        }
        retired.opens += 1;
        Some(Ok(Opening::Text(self.text_use(asking, None, true), retired.backing.id)))
    }

    /// Whether this is a number that the kernel is to keep no attributes of: it could not be told that they have changed.
    #[must_use]
    pub fn is_retired(&self, number: u64) -> bool {
        self.texts.retired_count.load(Ordering::Acquire) > 0 && lock(&self.texts.retired).contains_key(&number)
    }

    /// The node has been looked up. Answers one of its retired numbers, if it has any.
    pub(crate) fn retired_number(&self, node: NodeId) -> Option<u64> {
        if self.texts.retired_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let all = lock(&self.texts.retired);
        all.iter().find(|(_, retired)| retired.node == node).map(|(&number, _)| number)
    }

    /// The kernel goes on with a retired number for a name; whether there still is one.
    pub(crate) fn enter_retired(&self, number: u64) -> bool {
        let mut all = lock(&self.texts.retired);
        let retired = all.get_mut(&number);
        retired.is_some_and(|retired| {
            retired.references += 1;
            true
        })
    }

    /// Whoever was sent back to look the node up has done so, and has another number for it.
    pub(crate) fn looked_up_again(&self, number: u64, thread: u32) {
        if let Some(retired) = lock(&self.texts.retired).get_mut(&number)
            && retired.sent_back == Some(thread)
        {
            retired.sent_back = None;
        }
    }

    /// The kernel gives back references of a retired number, if it is one: the node, and how many the layers are owed.
    pub(in crate::nodes) fn forget_retired(&self, number: u64, count: u64) -> Option<(NodeId, u64)> {
        if self.texts.retired_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = lock(&self.texts.retired);
        let retired = all.get_mut(&number)?;
        let (node, given_back) = (retired.node, count.min(retired.references));
        retired.references -= given_back;
        if retired.references == 0 {
            let gone = all.remove(&number);
            self.texts.retired_count.fetch_sub(1, Ordering::AcqRel);
            self.numbers(number).remove(&number);
            drop(all);
            drop(gone);
        }
        Some((node, given_back))
    }

    /// Forgets all retired numbers, and has the kernel give back what it has by them; what the layers are owed.
    pub(in crate::nodes) fn forget_all_retired(&self) -> Vec<(NodeId, u64)> {
        let all = std::mem::take(&mut *lock(&self.texts.retired));
        self.texts.retired_count.store(0, Ordering::Release);
        all.into_values().map(|retired| (retired.node, retired.references)).collect()
    }
}
