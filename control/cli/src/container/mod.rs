//! Containers: a root filesystem that is a union over an image's layers, run by an OCI runtime.

mod record;

pub use record::{ContainerRecord, ContainerState};
