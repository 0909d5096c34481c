//! Behaviour of the union over in-memory branches.

mod ahead;
mod blocks;
mod calls;
mod check;
mod content_first;
mod copied;
mod crash;
mod death;
mod deep;
mod deferred;
mod faults;
mod frozen;
mod hooked;
mod judges;
mod listings;
mod meetings;
mod overlay;
mod script;
mod segments;
mod stack;
mod support;
mod threads;
mod times;
mod transit;
mod trees;
mod waiting;
