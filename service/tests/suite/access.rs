//! Our permission function against the kernel's.
