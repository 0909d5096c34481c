//! The union of one writable and many read-only branches that copies blocks, not files.
