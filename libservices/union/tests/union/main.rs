//! Behaviour of the union over in-memory branches.

mod judges;
mod support;
