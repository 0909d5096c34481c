//! The service's end of sessions and queues.
//!
//! An [`Endpoint`] is one instance's: its listening socket, its queues and its sessions. One thread of the service runs
//! [`Reception::run`], which lets sessions in and ends them; its service threads take requests from the queues.

mod budget;
mod endpoint;
mod groups;
mod heap;
mod peer;
mod posting;
mod reception;
mod session;
mod tasks;

pub use budget::{MemoryBudget, SessionMemory};
pub use endpoint::{
    Admission, Called, Endpoint, EndpointConfig, EndpointCounters, Search, Summoned, wait_for_doorbells,
};
pub use groups::CoreGroups;
pub use heap::give_back_freed;
pub use peer::PeerFacts;
pub use reception::{Reception, Stop};
pub use session::{Acquired, DataError, Recheck, Session};
