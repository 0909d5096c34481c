//! OCI images: import, layers, configuration.
