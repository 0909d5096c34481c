//! The layer before the judges of all layers, and what is its own: owners.

mod judges;
mod owners;
