//! Request tracing: where single requests spend their time, while somebody asks for it.
//!
//! A front begins a measurement ([`Tracer::begin`]). From then on the thread's clock counts for one layer at a time: code that
//! passes a request on switches it to the next layer ([`enter`]), and back afterwards, so that each layer is counted without
//! those below it. Between layers [`Timed`] does it. What other threads do for a request meanwhile (reading ahead, writing back
//! in the background) is counted as waiting, where the request waits for it.
//!
//! While nobody asks, a request costs one read of an atomic and one check of the log's filter, and each layer one read of the
//! thread's clock. Everything that is kept is bounded: a listener that does not read fast enough is told how much it missed.

mod clock;
mod layer;
mod summary;
#[cfg(test)]
mod tests;
mod tracer;

pub(crate) use clock::{enter, note};
pub use layer::Timed;
pub use tracer::{Asked, Measured, Tracer, Watch};
