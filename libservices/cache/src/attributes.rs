//! The attribute cache: attributes, symbolic links' targets and extended attributes are asked for below once, and kept exact
//! afterwards.

use crate::answers::{AnswerRoom, CachedXattr, Target};
use crate::node::Node;
use crate::node_state::{Emptied, State};
use crate::sync::{lock, read};
use poolfs_libservice::{Result, WrittenAt, fail};
use poolfs_types::{Attributes, Caller, Errno, FileType, HandleId, SetAttributes, SetTime};
use std::time::Instant;

/// How often a question is repeated whose answer a change overtook, before the answer is used without being kept.
const ATTEMPTS_MAX: usize = 4;
/// Extended attributes remembered per node, and the longest value.
const XATTRS_MAX: usize = 8;
const XATTR_VALUE_MAX: usize = 512;

impl State {
    /// Takes over attributes that the layer below gave, except what is newer here.
    fn merge(&mut self, below: &Attributes) {
        let ours = self.attributes;
        let is_file = ours.file_type == FileType::Regular;
        if is_file && self.is_dirty() {
            let (size, modified, changed) = (ours.size, ours.modified, ours.changed.max(below.changed));
            self.attributes = Attributes { size, modified, changed, ..*below };
            return;
        }
        if is_file && below.size < ours.size {
            // It is being cut, and whoever does that has yet to note it: he will find it as long as it is then.
            self.truncate(below.size);
        }
        self.attributes = *below;
        self.below_size = below.size;
        if let Some((_, seen)) = self.written_back.filter(|(at, _)| *at == below.changed) {
            // Moved by nothing but the write-back.
            self.attributes.changed = seen;
        }
    }
}

/// The same changes, with the time of this clock, which those of a dirty file are from: that below may be a tick behind it.
fn with_now_from_here(changes: &SetAttributes) -> SetAttributes {
    let now = SetTime::At(WrittenAt::now());
    let here = |time| if time == SetTime::Now { now } else { time };
    SetAttributes { accessed: changes.accessed.map(here), modified: changes.modified.map(here), ..*changes }
}

impl Node {
    /// The attributes as users see them.
    pub(crate) fn attributes(&self) -> Result<Attributes> {
        {
            let state = read(&self.state);
            if !state.stale {
                return Ok(state.shown());
            }
        }
        self.ask()
    }

    /// The same, as the layer below says now.
    pub(crate) fn ask(&self) -> Result<Attributes> {
        let is_validated = self.core.coherence.validity().is_some();
        let mut answer = None;
        for _ in 0..ATTEMPTS_MAX {
            let stamp = read(&self.state).stamp;
            let asked = Instant::now();
            let below = self.core.below.getattr(&Caller::ROOT, self.id)?;
            let kept = self.update(None, |state| {
                if state.stamp != stamp {
                    return None;
                }
                if is_validated {
                    state.go_by(&below, asked);
                }
                state.merge(&below);
                state.stale = false;
                Some(state.shown())
            });
            if kept.is_some() {
                return Ok(kept.unwrap_or(below));
            }
            answer = Some(below);
        }
        if is_validated {
            self.update(None, State::invalidate);
        }
        // Writers keep changing it: their size and times are the newest, the rest is as below said.
        let state = read(&self.state);
        let mut shown = answer.unwrap_or(state.attributes);
        if shown.file_type == FileType::Regular {
            (shown.size, shown.modified) = (state.attributes.size, state.attributes.modified);
            shown.changed = shown.changed.max(state.attributes.changed);
        }
        Ok(shown)
    }

    /// Something below changed attributes in a way only below knows exactly.
    pub(crate) fn outdate(&self) {
        self.update(None, |state| {
            state.stale = true;
            state.stamp += 1;
            state.written_back = None;
        });
    }

    /// Gives the node a name by `link`, which asks the layer below.
    pub(crate) fn gain_name<R>(&self, link: impl FnOnce() -> Result<R>) -> Result<R> {
        let _links = lock(&self.links);
        let result = link();
        self.update(None, |state| {
            state.stale = true;
            state.stamp += 1;
            state.orphan &= result.is_err();
            state.written_back = state.written_back.filter(|_| result.is_err());
        });
        if result.is_ok() {
            self.note_whether_leaving();
        }
        result
    }

    /// Takes one of its names from the node by `remove`, which asks the layer below, and is told whether it is the last, if that is known.
    pub(crate) fn lose_name(&self, remove: impl FnOnce(Option<bool>) -> Result<()>) -> Result<()> {
        let _links = lock(&self.links);
        // Only names change the number, and nobody else changes names now. Afterwards it would be too late to look: somebody
        // may have asked below in the middle of it.
        let before = {
            let state = read(&self.state);
            (!state.stale && !self.core.coherence.is_shared()).then_some(state.attributes.links)
        };
        remove(before.map(|before| before == 1))?;
        let directory = self.update(None, |state| {
            state.stale = true;
            state.stamp += 1;
            state.written_back = None;
            let directory = state.attributes.file_type == FileType::Directory;
            if directory {
                // It had no other name.
                state.orphan = true;
            } else if let Some(before) = before {
                state.attributes.links = before.saturating_sub(1);
                state.orphan = state.attributes.links == 0;
            }
            directory
        });
        if before.is_none()
            && !directory
            && let Ok(attributes) = self.attributes()
        {
            self.update(None, |state| state.orphan = attributes.links == 0);
        }
        self.note_whether_leaving();
        Ok(())
    }

    /// Changes attributes. Of a regular file only under a [`Use`](crate::node_use::Use).
    pub(crate) fn set_attributes(
        &self,
        caller: &Caller,
        changes: &SetAttributes,
        handle: Option<HandleId>,
    ) -> Result<Attributes> {
        let is_dirty = read(&self.state).is_dirty();
        let mut changes = if is_dirty { with_now_from_here(changes) } else { *changes };
        if changes.size.is_none() && (is_dirty || changes.modified.is_none()) {
            // Nobody waits here for who brings the file to disk just now.
            let modified = changes.modified.take();
            if changes != SetAttributes::default() {
                self.change_below(caller, &changes, handle)?;
            }
            if modified.is_none_or(|time| self.set_modified_here(time)) {
                return self.attributes();
            }
            changes = SetAttributes { modified, ..SetAttributes::default() };
        }
        // Write-back sets times, and writes what a truncation drops: neither may happen in between.
        let _writer = lock(&self.writer);
        let _flush = lock(&self.flush);
        self.change_below(caller, &changes, handle)
    }

    fn change_below(&self, caller: &Caller, changes: &SetAttributes, handle: Option<HandleId>) -> Result<Attributes> {
        let stamp = read(&self.state).stamp;
        let is_cut = changes.size.is_some();
        if is_cut {
            self.update(None, |state| state.cut_record(changes.size));
        }
        let below = self.core.below.setattr(caller, self.id, changes, handle).inspect_err(|_| {
            if is_cut {
                // It is as long as before.
                self.update(None, |state| state.cut_record(None));
            }
        })?;
        let note = |state: &mut State| {
            if is_cut {
                state.cut_record(None);
            }
            // A name may have come or gone meanwhile.
            let overtaken = state.stamp != stamp;
            if let Some(size) = changes.size.filter(|_| state.attributes.file_type == FileType::Regular) {
                state.truncate(size);
                if size == 0 {
                    state.emptied = Emptied::Open;
                }
            }
            let ours = state.attributes;
            let newer = state.is_dirty() && changes.size.is_none();
            state.attributes = below;
            state.attributes.size = if ours.file_type == FileType::Regular { ours.size } else { below.size };
            if newer && changes.modified.is_none() {
                state.attributes.modified = ours.modified;
            }
            state.attributes.changed = below.changed.max(ours.changed);
            state.stamp += 1;
            state.written_back = None;
            state.stale = overtaken;
            state.xattrs = Vec::new();
            state.shown()
        };
        Ok(if is_cut { self.taking_away(|| self.update(None, note)) } else { self.update(None, note) })
    }

    /// Gives a file a modification time that goes below with what else is to go there; false when nothing is.
    fn set_modified_here(&self, modified: SetTime) -> bool {
        self.update(None, |state| {
            let now = WrittenAt::now();
            let modified = match modified {
                SetTime::Now => now,
                SetTime::At(time) => time,
            };
            // What a filesystem below makes of other times only it knows.
            let is_ordinary = (0..=now.seconds).contains(&modified.seconds);
            if !state.is_dirty() || !is_ordinary {
                return false;
            }
            state.attributes.modified = modified;
            state.attributes.changed = now.max(state.attributes.changed);
            state.written_back = None;
            state.stamp += 1;
            state.time_dirty = true;
            true
        })
    }

    /// The target of a symbolic link, which never changes.
    pub(crate) fn target(&self, caller: &Caller) -> Result<Vec<u8>> {
        if let Some(target) = &read(&self.state).target {
            return Ok(target.bytes.to_vec());
        }
        let target = self.core.below.readlink(caller, self.id)?;
        if let Some(room) = AnswerRoom::take(&self.core.pool, &self.core.answers, target.len()) {
            let kept = Target { bytes: target.clone().into(), _room: room };
            self.update(None, |state| state.target = Some(kept));
        }
        Ok(target)
    }

    /// An extended attribute's value; short ones, and that there is none, are remembered.
    pub(crate) fn xattr(&self, caller: &Caller, name: &[u8]) -> Result<Vec<u8>> {
        let stamp = {
            let state = read(&self.state);
            if let Some(CachedXattr { value, .. }) = state.xattrs.iter().find(|known| *known.name == *name) {
                return value.as_ref().map_or_else(|| fail(Errno::ENODATA), |value| Ok(value.to_vec()));
            }
            state.stamp
        };
        let result = self.core.below.getxattr(caller, self.id, name);
        let value = match &result {
            Ok(value) if value.len() <= XATTR_VALUE_MAX => Some(Some(value.as_slice())),
            Err(error) if error.errno() == Errno::ENODATA => Some(None),
            _ => None,
        };
        if let Some(value) = value
            && let Some(room) =
                AnswerRoom::take(&self.core.pool, &self.core.answers, name.len() + value.map_or(0, <[u8]>::len))
        {
            let entry = CachedXattr { name: name.into(), value: value.map(Into::into), _room: room };
            self.update(None, |state| {
                if state.stamp == stamp && state.xattrs.iter().all(|known| known.name != entry.name) {
                    if state.xattrs.len() >= XATTRS_MAX {
                        state.xattrs.remove(0);
                    }
                    state.xattrs.push(entry);
                }
            });
        }
        result
    }

    /// An extended attribute changed below, or was to be changed.
    pub(crate) fn xattrs_changed(&self, done: bool) {
        self.update(None, |state| {
            state.stale = true;
            state.stamp += 1;
            state.written_back = state.written_back.filter(|_| !done);
            state.xattrs = Vec::new();
        });
    }
}
