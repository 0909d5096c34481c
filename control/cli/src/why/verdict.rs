//! The decision which path the operations of a process or a descriptor take, from what is known of both.

use super::facts::{DescriptorFacts, Kind, Loaded, ProcessFacts};
use poolfs_service_protocol::{AdoptedFile, ClientStatus};
use serde::Serialize;
use std::fmt::{Display, Formatter};

/// The way operations take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// by request over shared memory
    Library,
    /// by the kernel's FUSE
    Fuse,
    /// by the kernel, to no mount of poolfs
    Foreign,
}

impl Display for Way {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Library => "library",
            Self::Fuse => "FUSE",
            Self::Foreign => "foreign",
        })
    }
}

/// A way, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    #[serde(rename = "goes_by")]
    pub way: Way,
    pub because: String,
}

fn fuse(because: impl Into<String>) -> Verdict {
    Verdict { way: Way::Fuse, because: because.into() }
}

/// What keeps the library out of the whole process.
fn obstacle(facts: &ProcessFacts) -> Option<&'static str> {
    match facts.loaded {
        Loaded::Yes if facts.off => Some("the library is off: POOLFS_OFF is in its environment"),
        Loaded::Yes => None,
        Loaded::Static => Some("a static program: nothing can be preloaded"),
        Loaded::Secure => Some("the program got rights by its file (set-user-id or capabilities)"),
        Loaded::Foreign => Some("a program of another architecture than the library"),
        Loaded::NotAsked => {
            Some("it was started without the library (not by poolfs exec or run, --fuse, or a cleared environment)")
        }
        Loaded::Refused => Some("LD_PRELOAD names the library, but the loader could not load it"),
    }
}

/// Why there is no session.
fn without_session(client: Option<&ClientStatus>) -> String {
    match client {
        None => "no service of this host's pools that answers has the instance".to_owned(),
        Some(ClientStatus { refused: Some(errno), .. }) => format!("the service refused it a session: {errno}"),
        Some(_) => "it has no session: it has not used the mount by itself yet, or gave it up by changing its rights, root or mounts".to_owned(),
    }
}

/// The way of calls that name a file.
pub fn process_verdict(facts: &ProcessFacts, clients: &[ClientStatus]) -> Verdict {
    if facts.instances.is_empty() {
        return Verdict { way: Way::Foreign, because: "no instance is mounted where it lives".to_owned() };
    }
    if let Some(because) = obstacle(facts) {
        return fuse(because);
    }
    let of_instance = |name: &String| clients.iter().find(|client| client.instance == *name);
    let mut found = facts.instances.iter().filter_map(of_instance);
    if let Some(client) = found.clone().find(|client| client.has_session) {
        let because =
            format!("it has a session with {}; paths relative to its working directory go by FUSE", client.instance);
        return Verdict { way: Way::Library, because };
    }
    let refused = found.clone().find(|client| client.refused.is_some());
    fuse(without_session(refused.or_else(|| found.next())))
}

/// Whether the kernel maps and reads the file from the cache by itself: for who has it open only to be read.
pub fn is_passed_through(descriptor: &DescriptorFacts, clients: &[ClientStatus]) -> bool {
    let client = clients.iter().find(|client| Some(&client.instance) == descriptor.instance.as_ref());
    let is_program = client.is_some_and(|client| client.passed_through.contains(&descriptor.inode));
    let opened = descriptor.flags & (libc::O_ACCMODE | libc::O_PATH) as u32;
    is_program && opened == libc::O_RDONLY as u32
}

/// What the service knows of the file that a descriptor stands for, if it was adopted.
pub fn adopted_file<'a>(descriptor: &DescriptorFacts, clients: &'a [ClientStatus]) -> Option<&'a AdoptedFile> {
    let client = clients.iter().find(|client| Some(&client.instance) == descriptor.instance.as_ref())?;
    let writable = descriptor.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
    client.adopted.iter().find(|file| file.inode == descriptor.inode && file.writable == writable)
}

/// The way of one descriptor.
pub fn descriptor_verdict(facts: &ProcessFacts, descriptor: &DescriptorFacts, clients: &[ClientStatus]) -> Verdict {
    let Some(instance) = &descriptor.instance else {
        return Verdict { way: Way::Foreign, because: "not on a mount of poolfs".to_owned() };
    };
    if let Some(because) = obstacle(facts) {
        return fuse(because);
    }
    if descriptor.kind == Kind::Other {
        return fuse("neither a regular file nor a directory");
    }
    if descriptor.flags & libc::O_PATH as u32 != 0 {
        return fuse("opened with O_PATH");
    }
    let writable = descriptor.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
    if facts.mapped.contains(&descriptor.inode) && writable {
        return fuse("mapped shared, and it may be written");
    }
    let client = clients.iter().find(|client| client.instance == *instance);
    let Some(client) = client.filter(|client| client.has_session) else { return fuse(without_session(client)) };
    match adopted_file(descriptor, std::slice::from_ref(client)) {
        None => fuse("not adopted: it was not used twice by calls that pay, or the service gave no handle"),
        Some(_) if descriptor.kind == Kind::Directory => library("adopted; what names a file in it"),
        Some(file) if file.left_to_kernel => {
            fuse("somebody has the file open for writing without the library, or mapped: its content is the kernel's")
        }
        Some(_) if facts.threads > 1 => {
            library(format!("adopted; but read and write at its offset by FUSE: {} threads", facts.threads))
        }
        Some(_) => library(
            "adopted; read and write at its offset, too, unless it was inherited or the process has forked since",
        ),
    }
}

fn library(because: impl Into<String>) -> Verdict {
    Verdict { way: Way::Library, because: because.into() }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use poolfs_service_protocol::{ReadCounts, WriteStatus};

    pub fn process() -> ProcessFacts {
        ProcessFacts {
            program: "p".into(),
            loaded: Loaded::Yes,
            off: false,
            file_size_limited: false,
            threads: 1,
            instances: vec!["web-1".into()],
            descriptors: Vec::new(),
            mapped: Vec::new(),
        }
    }

    pub fn descriptor() -> DescriptorFacts {
        DescriptorFacts {
            fd: 3,
            file: "/mnt/f".into(),
            instance: Some("web-1".into()),
            inode: 7,
            kind: Kind::Regular,
            flags: libc::O_RDWR as u32,
        }
    }

    pub fn client() -> ClientStatus {
        let reads = ReadCounts { direct: 1, ..ReadCounts::default() };
        let file = AdoptedFile {
            inode: 7,
            writable: true,
            left_to_kernel: false,
            reads,
            not_direct: None,
            writes: WriteStatus::default(),
        };
        ClientStatus {
            instance: "web-1".into(),
            has_session: true,
            adopted: vec![file],
            refused: None,
            passed_through: vec![7],
        }
    }

    /// A descriptor's verdict after each of these was changed.
    fn after(change: impl FnOnce(&mut ProcessFacts, &mut DescriptorFacts, &mut ClientStatus)) -> (Way, String) {
        let (mut process, mut descriptor, mut client) = (process(), descriptor(), client());
        change(&mut process, &mut descriptor, &mut client);
        let Verdict { way, because } = descriptor_verdict(&process, &descriptor, &[client]);
        (way, because)
    }

    #[test]
    fn an_adopted_descriptor_goes_by_the_library() {
        let (way, because) = after(|_, _, _| {});
        assert!(way == Way::Library && because.starts_with("adopted"), "{because}");
        let (way, because) = after(|process, _, _| process.threads = 5);
        assert!(way == Way::Library && because.contains("5 threads"), "{because}");
    }

    #[test]
    fn who_may_write_or_has_another_file_reads_nothing_by_passthrough() {
        let passed = |flags: i32, inode: u64| {
            let descriptor = DescriptorFacts { flags: flags as u32, inode, ..descriptor() };
            is_passed_through(&descriptor, &[client()])
        };
        assert!(passed(libc::O_RDONLY, 7) && passed(libc::O_RDONLY | libc::O_CLOEXEC, 7));
        assert!(!passed(libc::O_RDWR, 7) && !passed(libc::O_PATH, 7) && !passed(libc::O_RDONLY, 8));
    }

    #[test]
    fn every_obstacle_is_named() {
        type Change = fn(&mut ProcessFacts, &mut DescriptorFacts, &mut ClientStatus);
        let changes: [(Change, &str); 12] = [
            (|p, _, _| p.loaded = Loaded::Static, "static"),
            (|p, _, _| p.loaded = Loaded::Secure, "set-user-id"),
            (|p, _, _| p.loaded = Loaded::Foreign, "architecture"),
            (|p, _, _| p.loaded = Loaded::NotAsked, "without the library"),
            (|p, _, _| p.loaded = Loaded::Refused, "LD_PRELOAD"),
            (|p, _, _| p.off = true, "POOLFS_OFF"),
            (|p, _, _| p.mapped = vec![7], "mapped shared"),
            (|_, d, _| d.kind = Kind::Other, "neither"),
            (|_, d, _| d.flags |= libc::O_PATH as u32, "O_PATH"),
            (|_, d, _| d.flags = libc::O_RDONLY as u32, "not adopted"),
            (|_, _, c| c.adopted[0].left_to_kernel = true, "somebody"),
            (|_, _, c| (c.has_session, c.refused) = (false, Some("EPERM".into())), "EPERM"),
        ];
        for (change, word) in changes {
            let (way, because) = after(change);
            assert!(way == Way::Fuse && because.contains(word), "{word}: {way} {because}");
        }
        assert_eq!(after(|_, d, _| d.instance = None).0, Way::Foreign);
    }

    #[test]
    fn calls_that_name_a_file_are_judged_by_the_session() {
        assert_eq!(process_verdict(&process(), &[client()]).way, Way::Library);
        let none = ClientStatus { has_session: false, refused: Some("EUSERS".into()), ..client() };
        let verdict = process_verdict(&process(), &[none]);
        assert!(verdict.way == Way::Fuse && verdict.because.contains("EUSERS"), "{verdict:?}");
        assert_eq!(process_verdict(&ProcessFacts { instances: Vec::new(), ..process() }, &[]).way, Way::Foreign);
    }
}
