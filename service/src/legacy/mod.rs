//! The legacy path: kernel VFS, FUSE, service.
