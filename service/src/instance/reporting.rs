//! What an instance reports to `poolfs status` and `poolfs why`.

use super::{Adopted, Instance};
use crate::request::Kind;
use crate::sync::lock;
use poolfs_service_protocol::{AdoptedFile, ClientStatus, InstanceStatus, OperationPath, ProgramStatus, ReadCounts};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

impl Instance {
    /// How reads were done so far.
    fn reads(&self) -> ReadCounts {
        ReadCounts {
            direct: self.adopter.get().map_or(0, |adopter| adopter.direct_reads()),
            library: self.statistics.count(OperationPath::Library, Kind::Read),
            kernel: self.statistics.count(OperationPath::Fuse, Kind::Read),
        }
    }

    /// What it knows of a process.
    #[must_use]
    pub fn client(&self, pid: u32) -> ClientStatus {
        let (has_session, files, refused) =
            self.adopter.get().map_or_else(Default::default, |adopter| adopter.client(pid));
        let adopted = |Adopted { file, direct_reads, writes }: Adopted| {
            // No layer is asked: its branch may not respond. A file that the kernel does not know has a number that no file has.
            let inode = self.nodes.inode(file.node()).unwrap_or(0);
            let left_to_kernel = self.nodes.may_map(file.node());
            let [library, kernel] = file.reads();
            AdoptedFile {
                inode,
                writable: file.flags().writable(),
                left_to_kernel,
                reads: ReadCounts { direct: direct_reads, library, kernel },
                not_direct: file.not_direct(),
                writes,
            }
        };
        ClientStatus {
            instance: self.spec.instance.clone(),
            has_session,
            adopted: files.into_iter().map(adopted).collect(),
            refused: refused.map(|errno| errno.name().to_owned()),
            passed_through: self.open_programs(),
        }
    }

    /// Inode numbers of programs that the kernel maps and reads by itself for who has them open.
    fn open_programs(&self) -> Vec<u64> {
        self.nodes.open_texts().into_iter().filter_map(|node| self.nodes.inode(node)).collect()
    }

    /// What it does and holds.
    #[must_use]
    pub fn status(&self) -> InstanceStatus {
        let (posted_requests, not_posted) =
            self.adopter.get().map_or_else(Default::default, |adopter| adopter.posted());
        InstanceStatus {
            instance: self.spec.instance.clone(),
            mount_point: self.spec.mount_point.clone(),
            transport: self.transport(),
            sessions: self.adopter.get().map_or(0, |adopter| adopter.sessions()),
            sessions_refused: self.adopter.get().map_or_else(BTreeMap::new, |adopter| {
                adopter.refused().into_iter().map(|(errno, count)| (errno.name().to_owned(), count)).collect()
            }),
            handles: self.handles.len() as u64,
            nodes: self.nodes.len(),
            kernel_cached_bytes: self.nodes.cached_bytes(),
            operations: self.statistics.report(),
            reads: self.reads(),
            programs: self.texts().map(|texts| ProgramStatus {
                opens: texts.opens,
                files: texts.files,
                bytes: texts.bytes,
            }),
            not_direct: lock(&self.not_direct).clone(),
            posted_requests,
            not_posted,
            waiting: self
                .requests
                .waiting()
                .map(|waiting| waiting.status(Kind::NAMES.get(usize::from(waiting.code)).copied().unwrap_or_default())),
            timed_out: self.spec.timeout.map(|_| self.timed_out.load(Ordering::Relaxed)),
            union: self.stack.union_status(),
        }
    }
}
