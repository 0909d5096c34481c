//! Announces to the services that others than the library will go by what was adopted, before they do.

use super::{LIVE, Sessions, Slot, usable};
use crate::life::Began;
use crate::limits::INSTANCES_MAX;
use crate::raw;
use core::time::Duration;
use poolfs_ipc::wire::{Operation, Request};

/// How long services are asked again and again to share: longer than they take if their branches answer.
const SHARE_MAX_NS: u64 = 5_000_000_000;

/// The pause before services are asked again.
const SHARE_PAUSE_NS: u32 = 1_000_000;

/// Asks each of so many until it has answered, for `time_ns` in all. Nobody waits for one alone while others have not been asked: of the time that is
/// left, each gets its part.
fn ask_each<const COUNT: usize>(time_ns: u64, mut ask: impl FnMut(usize, Duration) -> bool) {
    let until = raw::coarse_time_ns() + time_ns;
    let mut has_answered = [false; COUNT];
    let mut waiting = COUNT as u64;
    while waiting > 0 {
        for (index, has_answered) in has_answered.iter_mut().enumerate().filter(|(_, has_answered)| !**has_answered) {
            let left = until.saturating_sub(raw::coarse_time_ns());
            if left == 0 {
                return;
            }
            if ask(index, Duration::from_nanos(left / waiting)) {
                *has_answered = true;
                waiting -= 1;
            }
        }
        if waiting > 0 {
            raw::sleep(SHARE_PAUSE_NS);
        }
    }
}

impl Sessions {
    /// Whether a session is that of the instance with this device number.
    pub fn serve_device(&self, call: Began, device: (u32, u32)) -> bool {
        let mut slots = self.slots.iter().enumerate();
        slots.any(|(index, slot)| {
            slot.enter(self, index, call).is_some_and(|session| session.connection().device() == device)
        })
    }

    /// Has the services tell the kernel the sizes of all that was adopted, before others get it; whether all of them do.
    #[cold]
    pub fn share_all(&self, call: Began) -> bool {
        let slots = self.slots.iter().enumerate();
        slots.fold(true, |all, (index, slot)| self.share(index, slot, call, None) && all)
    }

    /// The same, for who cannot do it in another way, and holds signals back: a service that cannot do it at the moment, because the session has
    /// no buffer for that or the sizes are still being told, is asked again, for 5 s.
    #[cold]
    pub(super) fn share_patiently(&self, call: Began) {
        ask_each::<INSTANCES_MAX>(SHARE_MAX_NS, |index, limit| {
            self.share(index, &self.slots[index], call, Some(limit))
        });
    }

    /// Whether a service has told the sizes, or nobody has to.
    fn share(&self, index: usize, slot: &Slot, call: Began, limit: Option<Duration>) -> bool {
        let Some(session) = slot.enter(self, index, call) else {
            // One that has ended has its files shared by the service.
            return slot.kind() != LIVE;
        };
        let Some(session) = usable(session) else { return false };
        let Ok(mut borrowed) = session.borrow() else { return false };
        let request = Request { operation: Operation::Share as u32, ..Request::default() };
        let reply = match limit {
            Some(limit) => session.answered(borrowed.execute_for(&request, limit), request.operation),
            None => session.execute(&mut borrowed, &request),
        };
        reply.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_leaves_time_for_the_others() {
        const ALL: u64 = 3_600_000_000_000;
        let mut asked = [0; 4];
        ask_each::<4>(ALL, |index, limit| {
            asked[index] += 1;
            match index {
                0 if asked[0] == 1 => assert!(limit <= Duration::from_nanos(ALL / 4), "{limit:?}"),
                0 if asked[0] == 2 => assert!(limit <= Duration::from_nanos(ALL / 2), "{limit:?}"),
                _ => {}
            }
            // The first answers last, and another one when it is asked again.
            match index {
                0 | 2 => asked[2] == 2,
                _ => true,
            }
        });
        assert_eq!(asked, [3, 1, 2, 1]);
        ask_each::<4>(0, |_, _| panic!("there is no time"));
    }
}
