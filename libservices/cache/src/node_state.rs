//! What the cache holds of one object, and what keeps its parts true to each other.

use crate::answers::{CachedXattr, Target};
use crate::blocks::{BLOCK, BlockMap, CHUNK_BLOCKS, Held, blocks_for, mask};
use crate::content::Content;
use crate::huge::HugeRanges;
use crate::ledger::{FileWords, Record, Recorder};
use crate::pins::Pinned;
use crate::version::Version;
use crate::view::View;
use poolfs_libservice::Holder;
use poolfs_types::{Attributes, Errno, Timestamp};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

/// A write-back that failed, for the handles that have not heard of it.
#[derive(Default)]
pub(crate) struct WriteError {
    /// Counts failures; a handle remembers which it has reported.
    pub(crate) sequence: u64,
    pub(crate) errno: Option<Errno>,
    /// Whether the last attempt failed: a repetition of it is no news.
    pub(crate) failing: bool,
}

/// Of a file that was truncated to nothing: its old content is gone below, so what is written instead goes below as it is closed, and
/// not only when its time has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Emptied {
    #[default]
    No,
    /// no descriptor was closed since it was written again
    Open,
    /// one was, perhaps of a process that had only inherited it; the file itself is not closed yet
    Closing,
}

/// What is known of a file as a program.
#[derive(Default)]
pub(crate) struct Program {
    /// It is one.
    pub(crate) is_one: Option<bool>,
    /// What keeps all of it in a segment, or did.
    pub(crate) pin: Option<Weak<dyn Pinned>>,
}

/// What changes.
pub(crate) struct State {
    /// As users see them; `size` and, while `time_dirty`, the times of a file are newer than below's.
    pub(crate) attributes: Attributes,
    /// Something below changed them; ask before the next use.
    pub(crate) stale: bool,
    /// Counts changes of attributes by this layer, to recognise answers from below that a change overtook.
    pub(crate) stamp: u64,
    /// The file's size below.
    pub(crate) below_size: u64,
    /// The times are not below yet.
    pub(crate) time_dirty: bool,
    /// The times are being set below right now.
    pub(crate) time_moving: bool,
    /// The change time that the last write-back left below, and the one that users go on seeing: theirs, as long as
    /// nothing else changes the file.
    pub(crate) written_back: Option<(Timestamp, Timestamp)>,
    /// Counts events after which bytes read from below earlier may be outdated; of a directory: names.
    pub(crate) epoch: u64,
    pub(crate) blocks: BlockMap,
    pub(crate) content: Content,
    /// What clients read by themselves; then the content is a segment.
    pub(crate) view: Option<Box<View>>,
    /// Of a segment that clients read by themselves, or did before.
    pub(crate) huge: Option<Box<HugeRanges>>,
    /// Whose clients were given that segment, or all of the file in one.
    pub(crate) given: Vec<Weak<dyn Holder>>,
    /// Nothing comes into that segment any more: with the last of what is in it, it goes, and this is over.
    pub(crate) is_retiring: bool,
    /// What the kernel may map by itself.
    pub(crate) program: Program,
    pub(crate) dirty_ticket: Option<u64>,
    /// What is noted of it for the time after a death, while it is dirty.
    pub(crate) record: Option<Box<Record>>,
    pub(crate) error: WriteError,
    pub(crate) emptied: Emptied,
    /// It has no name any more.
    pub(crate) orphan: bool,
    /// It is counted as such where others wait for its room.
    pub(crate) is_leaving: bool,
    /// A symbolic link's target.
    pub(crate) target: Option<Target>,
    pub(crate) xattrs: Vec<CachedXattr>,
    /// Where others change the layer below.
    pub(crate) version: Version,
}

impl State {
    /// That of an object with these attributes, of which nothing is cached. `is_noted`: what is dirty of it is noted in the ledger.
    pub(crate) fn new(attributes: Attributes, stale: bool, is_noted: bool) -> Self {
        Self {
            attributes,
            stale,
            stamp: 0,
            below_size: attributes.size,
            time_dirty: false,
            time_moving: false,
            written_back: None,
            epoch: 0,
            blocks: if is_noted { BlockMap::noting() } else { BlockMap::default() },
            content: Content::default(),
            view: None,
            huge: None,
            given: Vec::new(),
            is_retiring: false,
            program: Program::default(),
            dirty_ticket: None,
            record: None,
            error: WriteError::default(),
            emptied: Emptied::default(),
            orphan: false,
            is_leaving: false,
            target: None,
            xattrs: Vec::new(),
            version: Version::default(),
        }
    }

    pub(crate) fn held(&self) -> Held {
        let counts = self.blocks.counts();
        Held { counts, cost: counts.cost(matches!(self.content, Content::Segment(_))) }
    }

    /// The attributes as users see them: dirty blocks count as allocated.
    pub(crate) fn shown(&self) -> Attributes {
        let mut shown = self.attributes;
        let most = shown.blocks.max(blocks_for(shown.size).saturating_mul(BLOCK / 512));
        shown.blocks = (shown.blocks + self.blocks.counts().dirty * (BLOCK / 512)).min(most);
        shown
    }

    /// Something is newer here than below.
    pub(crate) fn is_dirty(&self) -> bool {
        self.blocks.counts().dirty > 0 || self.time_dirty || self.time_moving
    }

    /// Something is newer here than what whoever comes after this process finds below.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_dirty() || self.blocks.counts().deferred > 0
    }

    /// Whether the content has to stay where it is.
    pub(crate) fn is_pinned(&self) -> bool {
        self.program.pin.as_ref().is_some_and(|pin| pin.strong_count() > 0)
    }

    /// To be called before bytes of these blocks are taken away, or changed otherwise than by an ordinary write.
    pub(crate) fn retract(&mut self, blocks: &Range<u64>) {
        if let Some(huge) = &mut self.huge {
            huge.note_loss(blocks);
        }
        if let Some(view) = &mut self.view {
            view.retract(blocks);
        }
    }

    /// Shows clients what has changed: these chunks, and what was retracted.
    pub(crate) fn publish(&mut self, changed: &[u64]) {
        if let Some(view) = &mut self.view {
            view.publish_changed(&self.blocks, changed, self.attributes.size);
        }
    }

    /// Ends the view, if there is one.
    pub(crate) fn end_view(&mut self) {
        self.view = None;
        self.blocks.note_changes(false);
        if self.blocks.counts().resident == 0 {
            self.empty();
        }
    }

    /// Gives the memory of its content back, of which nothing is cached any more.
    pub(crate) fn empty(&mut self) {
        self.content = Content::Empty;
        self.huge = None;
        self.given = Vec::new();
        self.is_retiring = false;
    }

    /// Frees the bytes of a chunk's blocks.
    pub(crate) fn punch(&mut self, chunk: u64, mut blocks: u64) -> io::Result<()> {
        while blocks != 0 {
            let first = u64::from(blocks.trailing_zeros());
            let count = u64::from((blocks >> first).trailing_ones());
            let block = chunk * CHUNK_BLOCKS + first;
            self.retract(&(block..block + count));
            self.content.punch(block * BLOCK, count * BLOCK)?;
            blocks &= !mask(first, count);
        }
        Ok(())
    }

    /// Whether those are known to have been given the segment.
    pub(crate) fn was_given(&self, holder: &Arc<dyn Holder>) -> bool {
        self.given.iter().any(|known| std::ptr::addr_eq(known.as_ptr(), Arc::as_ptr(holder)))
    }

    /// Notes that those are given the segment: under the lock under which they are, or it may be another one by then. `most`: so many are remembered.
    pub(crate) fn note_given(&mut self, holder: &Arc<dyn Holder>, most: usize) {
        if self.was_given(holder) {
            return;
        }
        self.given.retain(|known| known.strong_count() > 0);
        if self.given.len() >= most.max(1) {
            self.given.remove(0);
        }
        self.given.push(Arc::downgrade(holder));
    }

    /// Drops the answers of the layer below that are kept beside it.
    pub(crate) fn give_up_answers(&mut self) {
        (self.target, self.xattrs) = (None, Vec::new());
    }

    /// The file is about to be cut below, to this size: after a death in the middle of it the record has it cut, too. Nothing: it is
    /// over.
    pub(crate) fn cut_record(&mut self, size: Option<u64>) {
        if let Some(record) = &mut self.record {
            record.cut(size);
        }
    }

    /// Notes in the ledger what has changed, in these chunks and otherwise.
    pub(crate) fn record(&mut self, recorder: &Recorder, changed: &[u64]) {
        if !self.is_unsettled() {
            self.record = None;
            return;
        }
        let segment = if let Content::Segment(segment) = &self.content { segment.id() } else { 0 };
        let file = FileWords {
            key: recorder.key,
            inode: self.attributes.inode,
            segment,
            size: self.attributes.size,
            modified: self.attributes.modified,
            changed: self.attributes.changed,
            holds: false,
        };
        recorder.note(&mut self.record, file, &self.blocks, changed);
    }
}
