//! Behaviour of the union over in-memory branches.

mod blocks;
mod crash;
mod judges;
mod overlay;
mod recorder;
mod stack;
mod support;
mod threads;
