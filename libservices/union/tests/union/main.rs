//! Behaviour of the union over in-memory branches.

mod blocks;
mod judges;
mod support;
