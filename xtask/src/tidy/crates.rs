//! Checks the crate graph: which crate may name which.

use anyhow::Result;
use cargo_metadata::{DependencyKind, MetadataCommand};
use std::path::Path;

/// Crates of the workspace and the workspace crates each may depend on (ARCHITECTURE.md, "The crate graph"). Tests may
/// use more: dev-dependencies do not count.
const ALLOWED: &[(&str, &[&str])] = &[
    ("poolfs-types", &[]),
    ("poolfs-ipc", &["poolfs-types"]),
    ("poolfs-libservice", &["poolfs-types"]),
    ("poolfs-local", &["poolfs-types", "poolfs-libservice"]),
    ("poolfs-cache", &["poolfs-types", "poolfs-ipc", "poolfs-libservice"]),
    ("poolfs-union", &["poolfs-types", "poolfs-ipc", "poolfs-libservice"]),
    ("poolfs-bcow", &["poolfs-types", "poolfs-libservice"]),
    ("poolfs-idmap", &["poolfs-types", "poolfs-libservice"]),
    ("poolfs-quota", &["poolfs-types", "poolfs-libservice"]),
    ("poolfs-ceph", &["poolfs-types", "poolfs-libservice"]),
    ("poolfs-service-protocol", &["poolfs-types"]),
    ("poolfs-fuse-ring", &["poolfs-ipc"]),
    (
        "poolfs-service",
        &[
            "poolfs-types",
            "poolfs-ipc",
            "poolfs-libservice",
            "poolfs-local",
            "poolfs-ceph",
            "poolfs-cache",
            "poolfs-union",
            "poolfs-bcow",
            "poolfs-idmap",
            "poolfs-quota",
            "poolfs-fuse-ring",
            "poolfs-service-protocol",
        ],
    ),
    ("poolfs-client", &["poolfs-types", "poolfs-ipc"]),
    ("poolfs-preload", &["poolfs-types", "poolfs-client"]),
    ("poolfs-capi", &["poolfs-types", "poolfs-client"]),
    ("poolfs-host", &[]),
    ("poolfs-image", &["poolfs-host", "poolfs-service-protocol"]),
    ("poolfs-init", &[]),
    ("poolfs-cli", &["poolfs-host", "poolfs-image", "poolfs-local", "poolfs-service-protocol"]),
    ("poolfs-bench", &["poolfs-types", "poolfs-ipc", "poolfs-client", "poolfs-service-protocol"]),
    ("poolfs-tests", &[]),
    ("xtask", &[]),
];

/// The only module that may name concrete layers: what its files and folder begin with.
const STACK_BUILDER: &str = "service/src/stack";

/// Compares the graph with the list, both ways, and looks for layers named outside the stack builder.
pub fn check(root: &Path, findings: &mut Vec<String>) -> Result<()> {
    let metadata = MetadataCommand::new().manifest_path(root.join("Cargo.toml")).no_deps().exec()?;
    for package in &metadata.packages {
        let name = package.name.as_str();
        let Some((_, allowed)) = ALLOWED.iter().find(|(known, _)| *known == name) else {
            findings.push(format!("crate {name} is not in the list of xtask/src/tidy/crates.rs"));
            continue;
        };
        for dependency in &package.dependencies {
            let inside = ALLOWED.iter().any(|(known, _)| *known == dependency.name);
            if dependency.kind != DependencyKind::Development && inside && !allowed.contains(&dependency.name.as_str())
            {
                findings.push(format!("crate {name} must not depend on {}: edges point downwards", dependency.name));
            }
        }
    }
    for (file, text) in super::sources::rust_files(root)? {
        let in_service =
            file.starts_with("service/src") && !file.starts_with(STACK_BUILDER) && !file.contains("/tests");
        let product = text.split("#[cfg(test)]").next().unwrap_or_default();
        if in_service
            && [
                "poolfs_bcow::",
                "poolfs_cache::",
                "poolfs_idmap::",
                "poolfs_local::",
                "poolfs_quota::",
                "poolfs_union::",
            ]
            .iter()
            .any(|layer| product.contains(layer))
        {
            findings
                .push(format!("{file} names a concrete layer: only {STACK_BUILDER}.rs and what is in that module do"));
        }
    }
    Ok(())
}
