//! The user-level page and metadata cache over any layer.
