//! Finds what keeps a mount in use: processes that work in it, run a program of it or have files of it open, and mounts below it.

use crate::text::plain;
use poolfs_host::{Host, mount_table, parse_mount_table, pool_mounts};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Most that are named.
const NAMED_MAX: usize = 8;

/// Who uses what is mounted at a place, in words; nothing where nobody is found. Nothing of the mount is looked at: it may not answer.
pub fn described(host: &dyn Host, place: &Path) -> Option<String> {
    let mut all = in_use_by(Path::new("/proc"), place, std::process::id());
    let below = mount_table(host).unwrap_or_default().into_iter().map(|entry| entry.mount_point);
    let below: Vec<PathBuf> = below.filter(|at| at != place && at.starts_with(place)).collect();
    all.extend(below.into_iter().map(|at| format!("the mount {}", at.display())));
    listed(all)
}

/// The processes of other mount namespaces that have the mount of an instance, in words; nothing where nobody is found.
pub fn elsewhere(instance: &str) -> Option<String> {
    listed(having_elsewhere(Path::new("/proc"), instance, std::process::id()))
}

/// The processes that have something open of the filesystem with a device, wherever they see it, in words; a pool whose service is one of them is named by
/// `pool_of`. Nothing where nobody is found. The filesystem itself is not asked.
pub fn of_device(device: &str, pool_of: impl Fn(u32) -> Option<String>) -> Option<String> {
    let described = |(pid, how): (u32, String)| match pool_of(pid) {
        Some(pool) => format!("the pool {pool} (process {pid}), which has a branch in it"),
        None => how,
    };
    listed(having_open(Path::new("/proc"), device, std::process::id()).into_iter().map(described).collect())
}

/// The processes but for one that have something open of the filesystem with a device, each with its number and program.
fn having_open(proc: &Path, device: &str, but: u32) -> Vec<(u32, String)> {
    let is_of_it = |link: PathBuf| {
        let known = statx(CWD, &link, AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
        known.is_ok_and(|known| format!("{}:{}", known.stx_dev_major, known.stx_dev_minor) == device)
    };
    let others = pids(proc).into_iter().filter(|&pid| pid != but);
    others.filter_map(|pid| Some((pid, use_by(&proc.join(pid.to_string()), pid, is_of_it)?))).collect()
}

/// The first of them, and how many more there are.
fn listed(mut all: Vec<String>) -> Option<String> {
    let more = all.len().saturating_sub(NAMED_MAX);
    all.truncate(NAMED_MAX);
    if more > 0 {
        all.push(format!("{more} more"));
    }
    (!all.is_empty()).then(|| plain(&all.join(", ")))
}

fn pids(proc: &Path) -> Vec<u32> {
    let numbers = fs::read_dir(proc).into_iter().flatten().flatten();
    let mut pids: Vec<u32> = numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// The mount namespace of a process.
fn namespace(proc: &Path, pid: u32) -> Option<PathBuf> {
    fs::read_link(proc.join(format!("{pid}/ns/mnt"))).ok()
}

/// The name of its program.
fn program(own: &Path) -> String {
    fs::read_to_string(own.join("comm")).map_or_else(|_| "?".to_owned(), |name| name.trim().to_owned())
}

/// The processes of this mount namespace that use it, but for one.
fn in_use_by(proc: &Path, place: &Path, but: u32) -> Vec<String> {
    let own = namespace(proc, but);
    let others = pids(proc).into_iter().filter(|&pid| pid != but && namespace(proc, pid) == own);
    let is_there = |link: PathBuf| fs::read_link(link).is_ok_and(|target| target.starts_with(place));
    others.filter_map(|pid| use_by(&proc.join(pid.to_string()), pid, is_there)).collect()
}

/// The processes of other mount namespaces than that of a process in which an instance is mounted.
fn having_elsewhere(proc: &Path, instance: &str, than: u32) -> Vec<String> {
    let mut known = BTreeMap::from_iter(namespace(proc, than).map(|own| (own, false)));
    let has_it = |pid: u32| {
        let table = fs::read_to_string(proc.join(format!("{pid}/mountinfo"))).unwrap_or_default();
        !pool_mounts(&parse_mount_table(&table), instance).is_empty()
    };
    let others = pids(proc).into_iter().filter(|&pid| {
        namespace(proc, pid).is_some_and(|namespace| *known.entry(namespace).or_insert_with(|| has_it(pid)))
    });
    others.map(|pid| format!("{pid} ({})", program(&proc.join(pid.to_string())))).collect()
}

/// What a process uses that for to which its links lead, with its number and program.
fn use_by(own: &Path, pid: u32, is_there: impl Fn(PathBuf) -> bool) -> Option<String> {
    let files = || fs::read_dir(own.join("fd")).into_iter().flatten().flatten().any(|entry| is_there(entry.path()));
    let how = match () {
        () if is_there(own.join("cwd")) => "works in it",
        () if is_there(own.join("root")) => "has it as its root",
        () if is_there(own.join("exe")) => "is a program of it",
        () if files() => "has files of it open",
        () => return None,
    };
    Some(format!("{pid} ({}) {how}", program(own)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn who_works_in_a_place_or_has_a_file_of_it_open_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().canonicalize().expect("there");
        fs::write(place.join("f"), "x").expect("written");
        let named = || in_use_by(Path::new("/proc"), &place, std::process::id());
        assert_eq!(named(), [] as [String; 0]);
        for (script, directory, how) in [
            ("exec sleep 1000", &*place, "works in it"),
            ("exec sleep 1000 < $F", Path::new("/"), "has files of it open"),
        ] {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(directory).env("F", place.join("f"));
            let mut child = command.spawn().expect("sh");
            let expected = format!("{} (sleep) {how}", child.id());
            // It is the shell first.
            let found = (0..500).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(10));
                named() == [expected.clone()]
            });
            let last = named();
            child.kill().expect("ours");
            let _ = child.wait().expect("ours");
            assert!(found, "{expected}: {last:?}");
        }
    }
}
