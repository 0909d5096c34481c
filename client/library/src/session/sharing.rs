//! Announces to the services that others than the library will go by what was adopted, before they do.

use super::{LIVE, Sessions};
use crate::life::Began;
use poolfs_ipc::wire::{Operation, Request};

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
        let mut all = true;
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(session) = slot.enter(self, index, call) else {
                // One that has ended has its files shared by the service.
                all &= slot.kind() != LIVE;
                continue;
            };
            let request = Request { operation: Operation::Share as u32, ..Request::default() };
            let told = session.borrow().and_then(|mut borrowed| session.execute(&mut borrowed, &request));
            all &= told.is_ok();
        }
        all
    }
}
