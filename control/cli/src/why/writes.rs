//! The decision how writes through a descriptor are taken (posted, by request or by FUSE), and why.

use super::facts::{DescriptorFacts, Kind, ProcessFacts};
use super::verdict::{Verdict, Way};
use poolfs_service_protocol::{AdoptedFile, NotPosted};
use serde::Serialize;

/// The way of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WriteWay {
    /// by request, whose answer is not waited for
    Posted,
    /// by request, whose answer is waited for
    Request,
    /// by the kernel's FUSE
    Fuse,
}

/// How a descriptor is written, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Writes {
    #[serde(rename = "go_by")]
    pub way: WriteWay,
    pub because: String,
    /// Posted requests so far, of the file as the process has it open.
    pub posted_requests: u64,
    /// Why they are not posted, as far as that is the service's doing.
    pub not_posted: Option<NotPosted>,
}

/// The way of the writes by a descriptor of this way; nothing where it cannot be written, or is of no mount of poolfs.
pub fn writes(
    facts: &ProcessFacts,
    descriptor: &DescriptorFacts,
    verdict: &Verdict,
    adopted: Option<&AdoptedFile>,
) -> Option<Writes> {
    let is_writable = descriptor.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32
        && descriptor.flags & libc::O_PATH as u32 == 0;
    if verdict.way == Way::Foreign || descriptor.kind != Kind::Regular || !is_writable {
        return None;
    }
    let status = adopted.map(|file| file.writes).unwrap_or_default();
    let (way, because) = if verdict.way == Way::Fuse {
        (WriteWay::Fuse, verdict.because.as_str())
    } else if facts.file_size_limited {
        (WriteWay::Fuse, "the process may not make files of any size (RLIMIT_FSIZE)")
    } else if status.granted {
        (WriteWay::Posted, "the service lets this process go on before it has taken them")
    } else {
        let undecided = "nothing is known against posting them; the answer to a small write allows it, at the earliest to the second since \
                         the file was opened";
        (WriteWay::Request, status.not_posted.map_or(undecided, NotPosted::text))
    };
    Some(Writes {
        way,
        because: because.to_owned(),
        posted_requests: status.posted_requests,
        not_posted: status.not_posted.filter(|_| way == WriteWay::Request),
    })
}

impl Writes {
    /// In a table, next to why the descriptor goes by the way that it does.
    pub fn text(&self) -> String {
        let Self { way, because, posted_requests, .. } = self;
        match way {
            WriteWay::Posted => format!("posted, {posted_requests} requests so far"),
            WriteWay::Request => format!("by request: {because}"),
            WriteWay::Fuse => "by FUSE".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::verdict::tests::{client, descriptor, process};
    use super::super::verdict::{adopted_file, descriptor_verdict};
    use super::*;
    use poolfs_service_protocol::{ClientStatus, WriteStatus};

    /// How a descriptor is written after each of these was changed.
    fn after(change: impl FnOnce(&mut ProcessFacts, &mut DescriptorFacts, &mut ClientStatus)) -> Option<Writes> {
        let (mut process, mut descriptor, mut client) = (process(), descriptor(), client());
        change(&mut process, &mut descriptor, &mut client);
        let clients = [client];
        let verdict = descriptor_verdict(&process, &descriptor, &clients);
        writes(&process, &descriptor, &verdict, adopted_file(&descriptor, &clients))
    }

    fn with(status: WriteStatus) -> Writes {
        after(|_, _, client| client.adopted[0].writes = status).expect("it can be written")
    }

    #[test]
    fn writes_are_posted_or_it_is_said_what_stands_against_it() {
        let posted = with(WriteStatus { granted: true, posted_requests: 5, not_posted: None });
        assert!(posted.way == WriteWay::Posted && posted.text() == "posted, 5 requests so far", "{posted:?}");
        let refused = with(WriteStatus { not_posted: Some(NotPosted::Room), ..WriteStatus::default() });
        assert_eq!((refused.way, refused.not_posted), (WriteWay::Request, Some(NotPosted::Room)));
        assert_eq!(refused.text(), format!("by request: {}", NotPosted::Room.text()));
        let undecided = with(WriteStatus::default());
        assert!(undecided.way == WriteWay::Request && undecided.because.contains("second"), "{undecided:?}");
    }

    #[test]
    fn what_is_left_to_the_kernel_is_written_by_it() {
        let left = after(|_, _, client| client.adopted[0].left_to_kernel = true).expect("it can be written");
        assert!(left.way == WriteWay::Fuse && left.because.contains("somebody"), "{left:?}");
        let limited = after(|process, _, _| process.file_size_limited = true).expect("it can be written");
        assert!(limited.way == WriteWay::Fuse && limited.because.contains("RLIMIT_FSIZE"), "{limited:?}");
    }

    #[test]
    fn nothing_is_said_of_what_cannot_be_written() {
        assert_eq!(after(|_, descriptor, _| descriptor.flags = libc::O_RDONLY as u32), None);
        assert_eq!(after(|_, descriptor, _| descriptor.flags |= libc::O_PATH as u32), None);
        assert_eq!(after(|_, descriptor, _| descriptor.instance = None), None);
        assert_eq!(after(|_, descriptor, _| descriptor.kind = Kind::Directory), None);
    }
}
