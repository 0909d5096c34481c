//! The service's end of posted writes: grants, and taking posts.

use crate::post_slots::PostSlots;
use crate::posts::{self, SlotWords};
use crate::service::session::{Acquired, Session};
use crate::wire::{Operation, Reply, Status, WireTime};
use poolfs_types::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl<C> Session<C> {
    /// The words of a slot. Panics for one that does not exist.
    pub(super) fn slot(&self, slot: usize) -> SlotWords<'_> {
        PostSlots::new(&self.buffers).slot(slot)
    }

    /// Lets the client post writes in a slot, by an epoch other than 0 that the slot has not had before. Under the slot's
    /// lock. Whether it does: not when the session is about to end.
    pub fn grant_posts(&self, slot: usize, epoch: u32) -> bool {
        let grants = !self.is_dismissed();
        if grants {
            self.slot(slot).grant(epoch);
        }
        grants
    }

    /// No write is posted in a slot any more: [`Session::take_posts`] finds every post whose caller went on without an answer.
    pub fn revoke_posts(&self, slot: usize) {
        self.slot(slot).revoke();
    }

    /// Whether there are posts in a slot that have not been served, also such as are being served. A client may say so for ever.
    pub fn has_posts(&self, slot: usize) -> bool {
        self.slot(slot).posted() != 0
    }

    /// Says whether a thread looks at a slot within a millisecond without being called. After `false`, [`Session::has_posts`]
    /// tells of everything that nobody will call for.
    pub fn tend_posts(&self, slot: usize, tended: bool) {
        self.slot(slot).tend(tended);
    }

    /// The posts of a slot, in the order of their numbers; also of a session that has ended. Whoever takes them has the slot's
    /// lock until all of them are finished: a post counts among those [outstanding](Session::has_posts) until then.
    ///
    /// They are writes (`Operation::Write`), as long as the client has made them until now, within the data area; nothing else of
    /// them has been looked at. When the last of their writes was made, as the client says, stands in `times[1]`. What is no such post is answered with EINVAL here.
    pub fn take_posts(self: &Arc<Self>, slot: usize) -> Vec<Acquired<C>> {
        let words = self.slot(slot);
        let posted = words.posted();
        let known = u64::MAX >> (u64::BITS as usize - self.records.len());
        if posted & !known != 0 {
            words.clear(posted & !known);
        }
        let mut taken: Vec<_> = (0..self.records.len())
            .filter(|index| posted >> index & 1 == 1)
            .filter_map(|index| self.take_post(&words, slot, index))
            .collect();
        taken.sort_by_key(|post| post.request.second_offset);
        taken
    }

    fn take_post(self: &Arc<Self>, words: &SlotWords<'_>, slot: usize, index: usize) -> Option<Acquired<C>> {
        let area = self.area(index);
        let (sequence, length) = posts::take(words, &self.records[index], (area.state(), area.extent()), index)?;
        let mut request = area.get_request();
        let length = length.filter(|&length| length as usize <= area.data_bytes());
        request.length = u64::from(length.unwrap_or(0));
        let written_at = area.written_at().load(Ordering::Relaxed);
        request.times[1] = WireTime {
            seconds: (written_at / 1_000_000_000).cast_signed(),
            nanoseconds: (written_at % 1_000_000_000) as u32,
            reserved: 0,
        };
        let post = Acquired { session: Arc::clone(self), index, sequence, request, reply: None, slot: Some(slot) };
        if length.is_some() && request.operation == Operation::Write as u32 {
            return Some(post);
        }
        post.finish(&Reply { status: Status::Failed as u32, errno: Errno::EINVAL.raw(), ..Reply::default() });
        None
    }
}
