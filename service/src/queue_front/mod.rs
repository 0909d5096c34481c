//! The queue front: requests of the user-level path, from shared memory to [`crate::Instance::dispatch`].
//!
//! ```text
//! client --- socket ---> Reception thread: who is it? -> session (credentials, handles)
//!        --- doorbell -> service thread of its core group -> Message::check -> serve -> reply
//! ```
//!
//! A [`QueueFront`] belongs to one instance; the [`ServiceThreads`] belong to the pool and take requests from the queues of all
//! fronts. A session names files by path or by handles it adopted from the kernel's descriptors. Whatever this front cannot do
//! exactly as the kernel would is answered "use the kernel", before anything has happened.
//!
//! **Invariant.** A client's bytes are copied out once, checked on the copy ([`Message`]), and never read again.

mod adoptions;
mod attributes;
mod changes;
mod credentials;
mod front;
mod lifecycle;
mod message;
mod names;
mod operations;
mod posts;
mod reach;
mod refused;
mod serve;
mod session;
mod threads;
mod view;

pub use adoptions::HANDLES_OF_SESSIONS_MAX;
pub use front::QueueFront;
pub use message::{DataArea, Message};
pub use serve::serve;
pub use session::{HANDLES_PER_SESSION_MAX, SessionState};
pub use threads::{SERVICE_THREADS_PER_GROUP_MAX, ServiceThreads};
pub use view::MountPoints;

#[cfg(test)]
mod tests;
