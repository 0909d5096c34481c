//! Tests of the local layer on real filesystems: tmpfs, and loop-mounted ext4, xfs and btrfs. They need root, loop devices and
//! the filesystems' mkfs programs.

mod bytes;
mod escape;
mod judges;
mod limits;
mod ownership;
mod races;
mod smoke;
mod support;
