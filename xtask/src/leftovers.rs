//! What a run leaves on the machine: mounts, processes, control groups, loop devices, IPC segments, sockets.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Writes what is on the machine now.
pub fn record(file: &Path) -> Result<()> {
    let mut text = String::new();
    for line in inventory()? {
        text.push_str(&line);
        text.push('\n');
    }
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Compares the machine with what `record` wrote. The kernel takes a moment to reap a killed mount namespace, so what
/// is new gets a few seconds to go away.
pub fn compare(file: &Path) -> Result<()> {
    let before: BTreeSet<String> = fs::read_to_string(file)
        .with_context(|| format!("cannot read {}; run `cargo xtask leftovers record` first", file.display()))?
        .lines()
        .map(str::to_owned)
        .collect();
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let new: Vec<String> = inventory()?.difference(&before).cloned().collect();
        if new.is_empty() {
            println!("nothing was left behind");
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("left behind:\n  {}", new.join("\n  "));
        }
        std::thread::park_timeout(Duration::from_millis(200));
    }
}

fn inventory() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let kind = fields.iter().position(|&f| f == "-").and_then(|dash| fields.get(dash + 1));
        found.insert(format!("mount {} ({})", fields[4], kind.unwrap_or(&"?")));
    }
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // Gone between the listing and here: not left behind.
        let Ok(name) = fs::read_to_string(format!("/proc/{pid}/comm")) else { continue };
        if ["poolfs", "runc", "fsx", "pjdfstest"].iter().any(|known| name.starts_with(known)) {
            found.insert(format!("process {pid} ({})", name.trim()));
        }
    }
    for line in fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default().lines().skip(1) {
        found
            .insert(format!("shared memory segment {}", line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")));
    }
    for entry in fs::read_dir("/sys/block")?.flatten() {
        if let Ok(backing) = fs::read_to_string(entry.path().join("loop/backing_file")) {
            found.insert(format!("loop device {} ({})", entry.file_name().to_string_lossy(), backing.trim()));
        }
    }
    control_groups(Path::new("/sys/fs/cgroup"), 4, &mut found);
    for place in ["/run/poolfs", "/var/lib/poolfs"] {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            found.insert(format!("file {}", entry.path().display()));
        }
    }
    for entry in fs::read_dir(std::env::temp_dir())?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(".tmp") || name.starts_with("poolfs") {
            found.insert(format!("temporary file {}", entry.path().display()));
        }
    }
    Ok(found)
}

fn control_groups(folder: &Path, depth: u32, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if path.to_string_lossy().contains("poolfs") {
            found.insert(format!("control group {}", path.display()));
        }
        if depth > 0 {
            control_groups(&path, depth - 1, found);
        }
    }
}
