//! Tests of the id-mapping layer: the suites that every layer must pass, and its own translation of owners.

mod judges;
mod owners;
