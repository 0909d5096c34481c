//! Announces to the services that others than the library will go by what was adopted, before they do.

use super::{LIVE, Sessions, Slot};
use crate::life::Began;
use crate::raw;
use poolfs_ipc::wire::{Operation, Request};

/// How often, and after what pauses, a session is asked to share that has no buffer for that.
const SHARE_TRIES: usize = 100;
const SHARE_PAUSE_NS: u32 = 1_000_000;

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
        self.share_each(call, 1)
    }

    /// The same, for who cannot do it in another way: a session that has no buffer for that at the moment is asked again.
    #[cold]
    pub fn share_patiently(&self, call: Began) {
        self.share_each(call, SHARE_TRIES);
    }

    fn share_each(&self, call: Began, tries: usize) -> bool {
        let mut all = true;
        for (index, slot) in self.slots.iter().enumerate() {
            let mut told = None;
            for attempt in 0..tries {
                if attempt > 0 {
                    raw::sleep(SHARE_PAUSE_NS);
                }
                told = self.share(index, slot, call);
                if told.is_some() {
                    break;
                }
            }
            all &= told.unwrap_or(false);
        }
        all
    }

    /// Whether a service has told the sizes; nothing when it cannot be asked now.
    fn share(&self, index: usize, slot: &Slot, call: Began) -> Option<bool> {
        let Some(session) = slot.enter(self, index, call) else {
            // One that has ended has its files shared by the service.
            return (slot.kind() != LIVE).then_some(true);
        };
        let mut borrowed = session.borrow().ok()?;
        let request = Request { operation: Operation::Share as u32, ..Request::default() };
        Some(session.execute(&mut borrowed, &request).is_ok())
    }
}
