//! Fuzz targets as ordinary functions: each takes bytes, and panics when the code under it breaks a promise.

#![forbid(unsafe_code)]

mod replay;
mod session_edge;

pub use replay::run;
pub use session_edge::session_edge;
