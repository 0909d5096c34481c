//! The layer over a real cluster on this machine, which each test starts for itself. They need the packages that `make ceph` installs.

mod claims;
mod cluster;
mod judges;
mod peculiar;
