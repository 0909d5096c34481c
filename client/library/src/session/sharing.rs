//! Announces to the services that others than the library will go by what was adopted, before they do.

use super::{LIVE, Sessions, Slot, usable};
use crate::life::Began;
use crate::raw;
use core::time::Duration;
use poolfs_ipc::wire::{Operation, Request};

/// How long services are asked again and again to share: longer than they take if their branches answer.
const SHARE_MAX_NS: u64 = 10_000_000_000;

/// The pause before a service is asked again.
const SHARE_PAUSE_NS: u32 = 1_000_000;

/// How long to wait for services, all of them and all times together.
pub(super) struct Patience {
    until: u64,
}

impl Patience {
    pub(super) fn begin() -> Self {
        Self { until: raw::coarse_time_ns() + SHARE_MAX_NS }
    }

    /// What is left of it; nothing when it is over.
    fn left(&self) -> Option<Duration> {
        let left = self.until.saturating_sub(raw::coarse_time_ns());
        (left > 0).then(|| Duration::from_nanos(left))
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
    /// no buffer for that or the sizes are still being told, is asked again.
    #[cold]
    pub(super) fn share_patiently(&self, call: Began, patience: &Patience) {
        for (index, slot) in self.slots.iter().enumerate() {
            while let Some(left) = patience.left() {
                if self.share(index, slot, call, Some(left)) {
                    break;
                }
                raw::sleep(SHARE_PAUSE_NS);
            }
        }
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
