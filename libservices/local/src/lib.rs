//! The local-directory backend client: a directory tree, never left.
