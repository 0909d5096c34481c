//! Expiry of the kernel's pages in the timed mode: what others have changed is dropped, also where nobody asks for attributes.
//!
//! The kernel compares sizes and modification times when a file is opened, read or looked at, and drops its pages then. `sendfile`, `splice` and
//! memory mappings do none of this. So a thread looks at the files that the kernel has open, twice in the mode's time, and has the kernel drop
//! what it has of those that show another size or time. It drops what there is of a file that it sees for the first time: nobody knows how old that
//! is.

use crate::nodes::NodeTable;
use crate::notify::{Job, KernelCache, tell};
use crate::sync::lock;
use poolfs_libservice::Libservice;
use poolfs_libservice::types::{Attributes, Caller, NodeId, OpenFlags, Timestamp};
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use tracing::debug;

/// The shortest pause between two looks at the files.
pub(crate) const PAUSE_MIN: Duration = Duration::from_millis(50);

/// What a change changes.
type Stamp = (u64, Timestamp, Timestamp);

fn stamp(attributes: &Attributes) -> Stamp {
    (attributes.size, attributes.modified, attributes.changed)
}

/// How long the end waits for the thread, which has descriptors of the directory: it may not respond.
const END_WAIT: Duration = Duration::from_secs(1);

/// The thread that looks; it ends when this is dropped.
pub(crate) struct PageExpiry {
    /// Nothing at the end.
    end: Option<Sender<()>>,
    ended: Mutex<Receiver<()>>,
}

impl PageExpiry {
    /// Begins to look at what `kernel` has open of `layer`, so that what others change is dropped after `time` at the latest.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub fn start(
        name: &str,
        time: Duration,
        (layer, nodes, kernel): (Arc<dyn Libservice>, Arc<NodeTable>, Arc<dyn KernelCache>),
    ) -> io::Result<Self> {
        let ((end, asked), (told, ended)) = (channel::<()>(), channel::<()>());
        let mut looks = Looks { layer, nodes, kernel, seen: HashMap::new() };
        let pause = (time / 2).max(PAUSE_MIN);
        let work = move || {
            while asked.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                looks.look();
            }
            drop(looks);
            drop(told);
        };
        thread::Builder::new().name(format!("pages-{name}")).spawn(work)?;
        Ok(Self { end: Some(end), ended: Mutex::new(ended) })
    }
}

impl Drop for PageExpiry {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = lock(&self.ended).recv_timeout(END_WAIT);
    }
}

struct Looks {
    layer: Arc<dyn Libservice>,
    nodes: Arc<NodeTable>,
    kernel: Arc<dyn KernelCache>,
    /// Files that were open, as they were when they were looked at last.
    seen: HashMap<NodeId, Stamp>,
}

impl Looks {
    /// Looks at all files that are open by now.
    fn look(&mut self) {
        let open = self.nodes.open_numbers();
        let mut seen = HashMap::with_capacity(open.len());
        for (node, number) in open {
            let Ok(attributes) = self.layer.getattr(&Caller::ROOT, node) else { continue };
            let now = stamp(&attributes);
            let before = self.seen.get(&node);
            if before != Some(&now) {
                let grown_to = before.filter(|before| before.0 < now.0).and_then(|_| self.end_of(node));
                if let Err(error) = tell(self.kernel.as_ref(), Job { number, pages: true, grown_to }) {
                    debug!(node = number, %error, "the kernel did not drop pages");
                    continue;
                }
            }
            seen.insert(node, now);
        }
        self.seen = seen;
    }

    /// The size of a file and its last byte.
    fn end_of(&self, node: NodeId) -> Option<(u64, u8)> {
        let handle = self.layer.open(&Caller::ROOT, node, OpenFlags::READ_ONLY).ok()?;
        let size = self.layer.getattr(&Caller::ROOT, node).map(|attributes| attributes.size);
        let mut last = [0];
        let read = size.and_then(|size| match size.checked_sub(1) {
            Some(at) => self.layer.read(&Caller::ROOT, handle, at, &mut last).map(|count| (size, count)),
            None => Ok((size, 0)),
        });
        self.layer.release(handle);
        read.ok().filter(|&(_, count)| count == 1).map(|(size, _)| (size, last[0]))
    }
}
