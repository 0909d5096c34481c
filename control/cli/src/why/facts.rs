//! What `/proc` tells of a process. No filesystem that the process uses is asked: it may belong to a service that does not answer.

use poolfs_host::parse_mount_table;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

/// Entry of `/proc/PID/auxv` that says that the program got rights by its file.
const AT_SECURE: u64 = 23;

/// What keeps the library out of a program, or that nothing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    Yes,
    /// no dynamic loader: nothing can be preloaded
    Static,
    /// it got rights by its file, for which the loader leaves preloaded libraries out
    Secure,
    /// a program of 32 bits
    Foreign,
    /// its environment has no `LD_PRELOAD` with the library
    NotAsked,
    /// its environment asks for it, and the loader did not take it
    Refused,
}

/// What a descriptor stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Regular,
    Directory,
    Other,
}

/// One open descriptor.
#[derive(Clone, Debug)]
pub struct DescriptorFacts {
    pub fd: u32,
    pub file: String,
    /// The poolfs instance it is of.
    pub instance: Option<String>,
    pub inode: u64,
    pub kind: Kind,
    /// `O_*`
    pub flags: u32,
}

/// A process.
#[derive(Clone, Debug)]
pub struct ProcessFacts {
    pub program: String,
    pub loaded: Loaded,
    /// `POOLFS_OFF` is in its environment.
    pub off: bool,
    /// Its files may not grow beyond some size (`RLIMIT_FSIZE`).
    pub file_size_limited: bool,
    pub threads: u32,
    /// The instances mounted where it lives.
    pub instances: Vec<String>,
    pub descriptors: Vec<DescriptorFacts>,
    /// Inode numbers of files of poolfs that it has mapped shared.
    pub mapped: Vec<u64>,
}

impl ProcessFacts {
    /// Of a living process; `proc` is where the kernel's files of processes are.
    ///
    /// # Errors
    /// When there is none, or it may not be looked at.
    pub fn read(proc: &Path, pid: u32) -> io::Result<Self> {
        let own = proc.join(pid.to_string());
        let text = |name: &str| fs::read_to_string(own.join(name));
        let maps = fs::read(own.join("maps")).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())?;
        let environment = fs::read(own.join("environ"))?;
        let status = text("status")?;
        let mounts = parse_mount_table(&text("mountinfo")?);
        let of_mount: BTreeMap<u64, String> =
            mounts.iter().filter_map(|entry| Some((entry.id, entry.instance()?.to_owned()))).collect();
        let descriptors = descriptors(&own, &of_mount)?;
        let mut instances: Vec<String> = of_mount.into_values().collect();
        instances.sort();
        instances.dedup();
        Ok(Self {
            program: text("comm")?.trim().to_owned(),
            loaded: loaded(&own, &maps, &environment),
            off: variable(&environment, b"POOLFS_OFF").is_some_and(|value| !value.is_empty()),
            file_size_limited: is_file_size_limited(&text("limits")?),
            threads: field(&status, "Threads:").unwrap_or(1),
            instances,
            descriptors,
            mapped: shared(&maps),
        })
    }
}

fn field(status: &str, name: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

fn is_file_size_limited(limits: &str) -> bool {
    let values = limits.lines().find_map(|line| line.strip_prefix("Max file size"));
    values.and_then(|values| values.split_whitespace().next()).is_some_and(|soft| soft != "unlimited")
}

fn variable<'e>(environment: &'e [u8], name: &[u8]) -> Option<&'e [u8]> {
    environment.split(|&b| b == 0).find_map(|entry| entry.strip_prefix(name)?.strip_prefix(b"="))
}

fn loaded(own: &Path, maps: &str, environment: &[u8]) -> Loaded {
    const LIBRARY: &str = "libpoolfs_preload.so";
    if maps.contains(LIBRARY) {
        return Loaded::Yes;
    }
    let auxv = fs::read(own.join("auxv")).unwrap_or_default();
    if is_foreign(&auxv) {
        return Loaded::Foreign;
    }
    if !maps.contains("/ld-linux") && !maps.contains("/ld-musl") {
        return Loaded::Static;
    }
    if is_secure(&auxv) {
        return Loaded::Secure;
    }
    let asked = variable(environment, b"LD_PRELOAD");
    let asked = asked.is_some_and(|list| String::from_utf8_lossy(list).contains(LIBRARY));
    if asked { Loaded::Refused } else { Loaded::NotAsked }
}

/// The pairs of words of `/proc/PID/auxv`, as a program of 64 bits has them.
fn pairs(auxv: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_ne_bytes);
    auxv.chunks_exact(16).map(move |pair| (word(&pair[..8]), word(&pair[8..])))
}

/// Whether the program has words of 32 bits: its first pair, taken for one word, is a larger number than any kind of entry has.
fn is_foreign(auxv: &[u8]) -> bool {
    pairs(auxv).any(|(kind, _)| kind > u64::from(u32::MAX))
}

fn is_secure(auxv: &[u8]) -> bool {
    pairs(auxv).any(|(kind, value)| kind == AT_SECURE && value != 0)
}

/// The inode number and the kind of what a descriptor stands for, as the kernel knows them: neither changes while it is open.
fn identity(link: &Path) -> Option<(u64, Kind)> {
    let wanted = StatxFlags::INO | StatxFlags::TYPE;
    let known = statx(CWD, link, AtFlags::STATX_DONT_SYNC, wanted).ok()?;
    let kind = match FileType::from_raw_mode(known.stx_mode.into()) {
        FileType::RegularFile => Kind::Regular,
        FileType::Directory => Kind::Directory,
        _ => Kind::Other,
    };
    Some((known.stx_ino, kind))
}

fn descriptors(own: &Path, of_mount: &BTreeMap<u64, String>) -> io::Result<Vec<DescriptorFacts>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(own.join("fd"))? {
        let name = entry?.file_name();
        let Some(fd) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // What is closed while it is looked at is left out.
        let Ok(file) = fs::read_link(own.join("fd").join(&name)) else { continue };
        let Ok(info) = fs::read_to_string(own.join("fdinfo").join(&name)) else { continue };
        let value = |key: &str| info.lines().find_map(|line| Some(line.strip_prefix(key)?.trim()));
        let instance = value("mnt_id:").and_then(|id| of_mount.get(&id.parse().ok()?)).cloned();
        // Other filesystems may ask somebody all the same.
        let known = instance.as_ref().and_then(|_| identity(&own.join("fd").join(&name)));
        let (inode, kind) = known.unwrap_or((0, Kind::Other));
        all.push(DescriptorFacts {
            fd,
            file: file.to_string_lossy().into_owned(),
            instance,
            inode,
            kind,
            flags: value("flags:").and_then(|text| u32::from_str_radix(text, 8).ok()).unwrap_or(0),
        });
    }
    all.sort_by_key(|descriptor| descriptor.fd);
    Ok(all)
}

/// The inode numbers in lines `START-END rw-s OFFSET MAJOR:MINOR INODE NAME`.
fn shared(maps: &str) -> Vec<u64> {
    let inode = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let rights = words.next()?;
        // Whether it is writable now does not count: it can be made so as long as its description is.
        rights.ends_with('s').then(|| words.nth(2)?.parse().ok()).flatten()
    };
    maps.lines().filter_map(inode).filter(|&inode| inode != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_understood() {
        let facts = ProcessFacts::read(Path::new("/proc"), std::process::id()).expect("this process");
        assert!(facts.threads >= 1 && !facts.off, "{facts:?}");
        assert!(facts.descriptors.iter().any(|descriptor| descriptor.fd == 1), "{facts:?}");
        assert!(ProcessFacts::read(Path::new("/proc"), u32::MAX).is_err());
    }

    #[test]
    fn what_the_kernel_writes_is_understood() {
        let maps = "7f00-7f01 rw-s 00000000 00:2f 42 /mnt/a\n7f02-7f03 r--p 00000000 00:2f 43 /mnt/b\n7f04-7f05 rw-s 0 0:1 0 x\n";
        assert_eq!(shared(maps), [42]);
        assert_eq!(variable(b"A=1\0POOLFS_OFF=\0B=2\0", b"POOLFS_OFF"), Some(&b""[..]));
        assert_eq!(variable(b"XPOOLFS_OFF=1\0", b"POOLFS_OFF"), None);
        assert_eq!(field("Name:\tx\nThreads:\t7\n", "Threads:"), Some(7));
        let limits = |soft: &str| format!("Max cpu time  1  2  seconds\nMax file size  {soft}  unlimited  bytes\n");
        assert!(is_file_size_limited(&limits("512")) && !is_file_size_limited(&limits("unlimited")));
        let pair = |kind: u64, value: u64| [kind.to_ne_bytes(), value.to_ne_bytes()].concat();
        assert!(is_secure(&[pair(6, 4096), pair(AT_SECURE, 1)].concat()));
        assert!(!is_secure(&[pair(6, 4096), pair(AT_SECURE, 0)].concat()));
        assert!(!is_foreign(&[pair(33, u64::MAX), pair(AT_SECURE, 0)].concat()) && !is_foreign(&[]));
        let small = |kind: u32, value: u32| [kind.to_ne_bytes(), value.to_ne_bytes()].concat();
        assert!(is_foreign(&[small(32, 0xf7f0_0000), small(33, 1), small(0, 0), small(0, 0)].concat()));
    }
}
