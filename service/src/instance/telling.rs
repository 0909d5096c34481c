//! Notifications to the kernel about content, sizes and names that the user-level path has changed.

use super::{ChangedNames, Instance};
use crate::nodes::content::UntoldSize;
use crate::notify::{DirectoryJob, Job, NameChange, NameJob, Notifications, ToldUnlocked};
use crate::spans::enter;
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Caller, Name, NodeId, OpenFlags};
use poolfs_service_protocol::Layer;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;

/// How long who has made a file longer, or opens it, waits until the kernel has applied what it was answered before about the file: it
/// needs a processor for that, and nothing else.
const SIZE_WAIT_MAX: Duration = Duration::from_secs(1);

impl Instance {
    /// The user-level path changed the content of `node`, or its size to `grown_to` (with the last byte there): the kernel
    /// is told before this returns. Not for handlers of FUSE requests.
    pub(crate) fn content_changed(&self, node: NodeId, grown_to: Option<(u64, u8)>) {
        let (Some(view), Some(notifications)) = (self.nodes.changed(node), self.notifications.get()) else {
            return;
        };
        // Whoever wrote up to the end has made it the end, or has only overwritten it; all others need not tell the size.
        let is_the_end = |end| self.layer().getattr(&Caller::ROOT, node).map_or(true, |now| now.size == end);
        let grown_to = grown_to.filter(|&(end, _)| view.goes_by_size && is_the_end(end));
        if view.may_cache || grown_to.is_some() {
            let _kernel = enter(Layer::Kernel);
            if grown_to.is_some() && self.tell_after_answers(notifications, node, view.may_cache) {
                self.nodes.size_told(node, view.change);
                self.nodes.told(node);
                return;
            }
            let told = notifications.tell(view.number, || {
                // What others have written at the end since, or the kernel shows of it, is not covered with what was written here.
                let is_newest = grown_to.is_none() || self.nodes.is_newest(node, view.change);
                let grown_to = if is_newest { grown_to } else { self.end_to_tell(node).flatten() };
                Some(Job { number: view.number, pages: view.may_cache, grown_to })
            });
            if told.is_some_and(|job| job.grown_to.is_some()) {
                self.nodes.size_told(node, view.change);
            }
        }
        self.nodes.told(node);
    }

    /// Somebody may go by the size that the kernel knows of an open file from here on: it knows it when this returns. Not for handlers of
    /// FUSE requests.
    pub(crate) fn tell_size(&self, node: NodeId) {
        if let (Some(untold), Some(notifications)) = (self.nodes.untold_size(node), self.notifications.get()) {
            let _kernel = enter(Layer::Kernel);
            self.tell_end(notifications, node, untold);
        }
    }

    pub(super) fn tell_end(&self, notifications: &Notifications, node: NodeId, untold: UntoldSize) {
        if self.tell_after_answers(notifications, node, false) {
            self.nodes.size_told(node, untold.change);
            return;
        }
        let told = notifications.tell(untold.number, || {
            let grown_to = self.end_to_tell(node)?;
            Some(Job { number: untold.number, pages: false, grown_to })
        });
        if told.is_some() {
            self.nodes.size_told(node, untold.change);
        }
    }

    fn end_to_tell(&self, node: NodeId) -> Option<Option<(u64, u8)>> {
        let end = end_of(self.layer(), node);
        end.inspect_err(|error| warn!(instance = self.name(), %error, "the kernel could not be told a size")).ok()
    }

    /// As [`Instance::tell_size`], for who cannot wait.
    pub(crate) fn tell_size_later(&self, node: NodeId) {
        if let Some(untold) = self.nodes.untold_size(node) {
            self.tell_later(node, untold.number, false);
        }
    }

    /// The kernel has put what it appended into its pages at the end that it knew, which was not the end: it drops them, and gets to
    /// know the size. Without waiting.
    pub(crate) fn appended_elsewhere(&self, node: NodeId) {
        if let Some(number) = self.nodes.open_number(node) {
            self.tell_later(node, number, true);
        }
    }

    /// Of a file that was closed the kernel drops the pages that it could not write back: what is read from here on is what there is.
    pub(crate) fn forget_lost_pages(&self, node: NodeId) {
        if let Some(number) = self.nodes.lost_pages(node) {
            self.tell_later(node, number, true);
        }
    }

    /// Before the kernel hears that it has opened a file: it goes by the size that it has asked for before, and posts may have changed that since.
    /// It knows it when this returns, unless it takes no notifications for long.
    pub(crate) fn tell_size_to_opener(&self, node: NodeId) {
        let (Some(unshown), Some(notifications)) = (self.nodes.unshown_size(node), self.notifications.get()) else {
            return;
        };
        if self.tell_after_answers(notifications, node, false)
            || notifications.tell_soon(unshown.number, self.size_by_then(node, unshown.number, false))
        {
            self.nodes.size_told(node, unshown.change);
        } else {
            warn!(instance = self.name(), "the kernel could not be told the size of a file that it opens");
        }
    }

    fn tell_later(&self, node: NodeId, number: u64, pages: bool) {
        let Some(notifications) = self.notifications.get() else { return };
        if !notifications.tell_later(number, self.size_by_then(node, number, pages)) {
            warn!(instance = self.name(), "the kernel could not be told a size");
        }
        let _ = self.after_answers(notifications, node, pages);
    }

    /// The kernel takes the size from some answers when it gets to them, whatever it was told since they were given. So it is told when it has done
    /// with those that may be older. Whether it knows the size by that alone, within the time; not when there are none.
    fn tell_after_answers(&self, notifications: &Notifications, node: NodeId, pages: bool) -> bool {
        let Some(told) = self.after_answers(notifications, node, pages) else { return false };
        let in_time = told.is_done_within(SIZE_WAIT_MAX);
        if !in_time {
            warn!(
                instance = self.name(),
                "the kernel is not told the size of a file in time, as a program keeps it locked or a branch does not answer: whoever has it open may find it too \
                 short for a while"
            );
        }
        in_time
    }

    /// The same without waiting. Nothing when there are none, or too many files are waited for.
    fn after_answers(&self, notifications: &Notifications, node: NodeId, pages: bool) -> Option<ToldUnlocked> {
        let pending = self.nodes.pending_size_answers(node)?;
        let (nodes, by_then) = (Arc::clone(&self.nodes), self.size_by_then(node, pending.number, pages));
        notifications.tell_unlocked(pending.number, move || {
            nodes.size_answers_applied(node, pending);
            by_then()
        })
    }

    /// Asks for the size when it is told: the kernel may make the file shorter itself meanwhile.
    fn size_by_then(&self, node: NodeId, number: u64, pages: bool) -> impl Fn() -> Option<Job> + Send + Sync + use<> {
        // Whoever waits for the kernel is to keep no branch.
        let (layer, nodes) = (Arc::downgrade(&self.stack.layer()), Arc::clone(&self.nodes));
        move || {
            let is_known = nodes.node(number) == Some(node);
            let grown_to = end_of(&*layer.upgrade()?, node).ok().filter(|_| is_known)?;
            Some(Job { number, pages, grown_to })
        }
    }

    /// What the kernel must be told of names that the user-level path has changed. To be told when nothing is locked.
    pub(crate) fn names_changed<'n>(&self, names: &[(NodeId, Name<'n>, NameChange)]) -> ChangedNames<'n> {
        let held = names.iter().flat_map(|&(parent, name, change)| {
            let named = self
                .nodes
                .name_changed(parent, name.as_bytes())
                .map(|view| DirectoryJob::Name(NameJob { parent: view.parent, name: name.as_bytes().into(), change }));
            let listed = self.nodes.listing_changed(parent).map(DirectoryJob::Listing);
            named.into_iter().chain(listed).map(move |job| (parent, name, job))
        });
        ChangedNames(held.collect())
    }

    /// Tells the kernel of names before this returns. Not for handlers of FUSE requests.
    pub(crate) fn tell_names(&self, changed: ChangedNames<'_>) {
        if changed.0.is_empty() {
            return;
        }
        let _kernel = enter(Layer::Kernel);
        let jobs = changed.0.iter().map(|(_, _, job)| job.clone());
        // What the kernel did not take stays noted: later changes of the name have to be told as well.
        if self.notifications.get().is_none_or(|notifications| notifications.tell_names(jobs)) {
            changed.0.iter().for_each(|(parent, name, job)| self.name_told(*parent, name.as_bytes(), job));
        }
    }

    fn name_told(&self, parent: NodeId, name: &[u8], job: &DirectoryJob) {
        match job {
            DirectoryJob::Name(_) => self.nodes.name_told(parent, name),
            DirectoryJob::Listing(_) => self.nodes.listing_told(parent),
        }
    }

    /// The kernel was told in time that a change of this name failed, by whose caller it was killed, and the change was
    /// made nevertheless.
    pub(crate) fn name_changed_late(&self, parent: NodeId, name: &[u8]) {
        let Some(notifications) = self.notifications.get() else { return };
        let Ok(name) = Name::new(name) else { return };
        for (parent, name, job) in self.names_changed(&[(parent, name, NameChange::Appeared)]).0 {
            if notifications.tell_name_later(job.clone()) {
                self.name_told(parent, name.as_bytes(), &job);
            } else {
                warn!(instance = self.name(), "too much to tell the kernel: it keeps nothing more");
                let _ = self.nodes.stop_holding();
            }
        }
    }
}

/// The size of a file, and its last byte.
fn end_of(layer: &dyn Libservice, node: NodeId) -> poolfs_libservice::Result<Option<(u64, u8)>> {
    let handle = layer.open(&Caller::ROOT, node, OpenFlags::READ_ONLY)?;
    let size = layer.getattr(&Caller::ROOT, node).map(|attributes| attributes.size);
    let end = size.and_then(|size| {
        let mut last = [0];
        let Some(at) = size.checked_sub(1) else { return Ok(None) };
        layer.read(&Caller::ROOT, handle, at, &mut last)?;
        Ok(Some((size, last[0])))
    });
    layer.release(handle);
    end
}
