//! Where single requests spend their time, while somebody wants to know.
//!
//! A front begins a measurement ([`Tracer::begin`]); from then on the thread's clock counts for one layer at a time: whoever
//! passes a request on turns it to the next ([`enter`]), and back afterwards, so that each layer is counted without those below it.
//! Between layers [`Timed`] does it. What other threads do for a request meanwhile (reading ahead, writing back in the
//! background) is counted as waiting, where the request waits for it.
//!
//! While nobody wants to know, a request costs one look at an atomic and one at the filter of the log, and each layer one look at
//! the thread's clock. All that is kept is bounded: who does not read fast enough is told how much it missed.

mod clock;
mod layer;
mod summary;
#[cfg(test)]
mod tests;
mod tracer;

pub(crate) use clock::{enter, note};
pub use layer::Timed;
pub use tracer::{Asked, Measured, Tracer, Watch};
