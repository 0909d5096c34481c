//! A filter over a lower branch that may have been mounted as immutable: what has changed since then is not served.
//!
//! Nobody is told of changes behind the service. But each moves the time of change of what is changed, a directory's with its names, and nobody
//! can set that time. So it is compared with the time from which on nothing may have changed: where attributes come from below, and after content,
//! names, a link's target or an extended attribute has come from there. That time is when the branch was opened, also where other mounts have used it
//! as one that may change: of all that the cache has from then, nothing is a part of something that was different later.

use crate::sync::lock;
use hashbrown::HashMap;
use poolfs_libservice::types::{Attributes, Caller, Errno, HandleId, Name, NodeId, OpenFlags, SeekTo, Timestamp};
use poolfs_libservice::{DirectoryEntry, Entry, Error, Filter, Libservice, ReadTarget, Result};
use rustix::time::{ClockId, clock_gettime};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use tracing::warn;

/// A layer of which nothing may change from some time on.
pub(super) struct Immutable {
    below: Arc<dyn Libservice>,
    path: PathBuf,
    opened: Timestamp,
    /// From where on nothing may have changed; nothing: it may.
    since: OnceLock<Timestamp>,
    is_told: AtomicBool,
    /// What open files and directories are.
    handles: Mutex<HashMap<HandleId, NodeId>>,
}

impl Immutable {
    /// `below`, the branch at `path`, which is opened now, and may change as long as nobody calls [`Immutable::begin`].
    pub fn over(below: Arc<dyn Libservice>, path: PathBuf) -> Arc<Self> {
        let (since, is_told, handles) = Default::default();
        // Never behind the times that filesystems have given: some take them finer than their clock ticks.
        let now = clock_gettime(ClockId::Realtime);
        let opened = Timestamp { seconds: now.tv_sec, nanoseconds: now.tv_nsec as u32 };
        Arc::new(Self { below, path, opened, since, is_told, handles })
    }

    /// From here on it counts what has changed since the branch was opened.
    pub fn begin(&self) {
        let _ = self.since.set(self.opened);
    }

    fn check(&self, attributes: &Attributes) -> Result<()> {
        if self.since.get().is_none_or(|since| attributes.changed <= *since) {
            return Ok(());
        }
        let (branch, inode) = (self.path.display(), attributes.inode);
        if !self.is_told.swap(true, Ordering::Relaxed) {
            warn!(%branch, inode, "a lower branch that is mounted as immutable was changed: what has changed is not served");
        }
        let cause = format!(
            "inode {inode} of the lower branch {branch} was changed after the pool had begun to use the branch, which is mounted as immutable"
        );
        Err(Error::new(Errno::EIO, cause))
    }

    /// Fails where something has changed; to be called when an answer about it has come.
    fn verify(&self, node: NodeId) -> Result<()> {
        if self.since.get().is_none() {
            return Ok(());
        }
        self.check(&self.below.getattr(&Caller::ROOT, node)?)
    }

    fn verify_open(&self, handle: HandleId) -> Result<()> {
        if self.since.get().is_none() {
            return Ok(());
        }
        let node = lock(&self.handles).get(&handle).copied();
        node.map_or(Ok(()), |node| self.verify(node))
    }

    fn opened(&self, node: NodeId, handle: HandleId) -> Result<HandleId> {
        lock(&self.handles).insert(handle, node);
        self.verify(node).inspect_err(|_| Filter::release(self, handle))?;
        Ok(handle)
    }
}

impl Filter for Immutable {
    fn below(&self) -> &dyn Libservice {
        &*self.below
    }

    fn lookup(&self, caller: &Caller, parent: NodeId, name: Name<'_>) -> Result<Entry> {
        let found = self.below.lookup(caller, parent, name);
        let forget = |node| self.below.forget(node, 1);
        let is_as_it_was =
            self.verify(parent).and_then(|()| found.as_ref().map_or(Ok(()), |entry| self.check(&entry.attributes)));
        if let (Err(_), Ok(entry)) = (&is_as_it_was, &found) {
            forget(entry.node);
        }
        is_as_it_was.and(found)
    }

    fn getattr(&self, caller: &Caller, node: NodeId) -> Result<Attributes> {
        let attributes = self.below.getattr(caller, node)?;
        self.check(&attributes).map(|()| attributes)
    }

    fn readlink(&self, caller: &Caller, node: NodeId) -> Result<Vec<u8>> {
        let target = self.below.readlink(caller, node)?;
        self.verify(node).map(|()| target)
    }

    fn open(&self, caller: &Caller, node: NodeId, flags: OpenFlags) -> Result<HandleId> {
        self.opened(node, self.below.open(caller, node, flags)?)
    }

    fn read_into(&self, caller: &Caller, handle: HandleId, offset: u64, target: &mut dyn ReadTarget) -> Result<usize> {
        let count = self.below.read_into(caller, handle, offset, target)?;
        self.verify_open(handle).map(|()| count)
    }

    fn seek(&self, caller: &Caller, handle: HandleId, offset: u64, to: SeekTo) -> Result<u64> {
        // That nothing follows is an answer about content, too.
        let found = self.below.seek(caller, handle, offset, to);
        self.verify_open(handle).and(found)
    }

    fn opendir(&self, caller: &Caller, node: NodeId) -> Result<HandleId> {
        self.opened(node, self.below.opendir(caller, node)?)
    }

    fn readdir(
        &self,
        caller: &Caller,
        handle: HandleId,
        cookie: u64,
        visit: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.below.readdir(caller, handle, cookie, visit)?;
        self.verify_open(handle)
    }

    fn getxattr(&self, caller: &Caller, node: NodeId, name: &[u8]) -> Result<Vec<u8>> {
        let value = self.below.getxattr(caller, node, name);
        self.verify(node).and(value)
    }

    fn listxattr(&self, caller: &Caller, node: NodeId) -> Result<Vec<Vec<u8>>> {
        let names = self.below.listxattr(caller, node)?;
        self.verify(node).map(|()| names)
    }

    fn release(&self, handle: HandleId) {
        lock(&self.handles).remove(&handle);
        self.below.release(handle);
    }
}

#[cfg(test)]
mod tests {
    use crate::stack::{Stack, StackBuilder};
    use poolfs_libservice::types::{Caller, Errno, Name, NodeId, OpenFlags, SeekTo};
    use poolfs_service_protocol::{StackSpec, Storage};
    use rustix::time::{ClockId, clock_gettime};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    const ROOT: Caller = Caller::ROOT;

    struct Mounted(Stack);

    impl Mounted {
        fn new(folder: &Path, builder: &StackBuilder, upper: &str, immutable_lowers: bool) -> Self {
            let upper = folder.join(upper);
            fs::create_dir(&upper).expect("made");
            let (lowers, storage) = (vec![folder.join("lower")], Storage::default());
            let stack = StackSpec::Union { upper, lowers, storage, immutable_lowers };
            Self(builder.build(&stack).expect("usable"))
        }

        fn node(&self, path: &str) -> Result<NodeId, Errno> {
            let layer = self.0.layer();
            path.split('/').try_fold(NodeId::ROOT, |parent, name| {
                let name = Name::new(name.as_bytes()).expect("a name");
                Ok(layer.lookup(&ROOT, parent, name).map_err(|error| error.errno())?.node)
            })
        }

        fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
            let layer = self.0.layer();
            let handle = layer.open(&ROOT, self.node(path)?, OpenFlags::empty()).map_err(|error| error.errno())?;
            let mut buffer = vec![0; 16];
            let read = layer.read(&ROOT, handle, 0, &mut buffer).map_err(|error| error.errno());
            layer.release(handle);
            read.map(|count| buffer[..count].to_vec())
        }

        fn names(&self, path: &str) -> Result<usize, Errno> {
            let layer = self.0.layer();
            let handle = layer.opendir(&ROOT, self.node(path)?).map_err(|error| error.errno())?;
            let mut count = 0;
            let listed = layer.readdir(&ROOT, handle, 0, &mut |_| {
                count += 1;
                std::ops::ControlFlow::Continue(())
            });
            layer.release(handle);
            listed.map(|()| count).map_err(|error| error.errno())
        }
    }

    /// Waits until files get times that are later than now.
    fn tick() {
        let time = |clock| {
            let now = clock_gettime(clock);
            (now.tv_sec, now.tv_nsec)
        };
        let now = time(ClockId::Realtime);
        while time(ClockId::RealtimeCoarse) <= now {
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_has_changed_is_not_served_and_all_else_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let lower = folder.path().join("lower");
        for directory in ["same", "changed", "names", "listed"] {
            fs::create_dir_all(lower.join(directory)).expect("made");
            ["cached", "known", "unknown", "mode"].iter().for_each(|file| {
                fs::write(lower.join(directory).join(file), "as it was").expect("written");
            });
        }
        let builder = StackBuilder::new(1 << 20, None).expect("a cache");
        let mounted = Mounted::new(folder.path(), &builder, "upper", true);
        assert_eq!(mounted.read("changed/cached").as_deref(), Ok(&b"as it was"[..]));
        mounted.node("changed/known").expect("there");
        mounted.node("names").expect("there");
        mounted.node("listed").expect("there");
        tick();
        for file in ["cached", "known", "unknown"] {
            fs::write(lower.join("changed").join(file), "another!!").expect("written");
        }
        fs::set_permissions(lower.join("changed/mode"), PermissionsExt::from_mode(0o600)).expect("changed");
        fs::rename(lower.join("names/cached"), lower.join("names/new")).expect("renamed");
        fs::remove_file(lower.join("listed/cached")).expect("removed");
        assert_eq!(mounted.read("changed/cached").as_deref(), Ok(&b"as it was"[..]), "the cache has it");
        for path in ["changed/known", "changed/unknown", "changed/mode"] {
            assert_eq!(mounted.read(path), Err(Errno::EIO), "{path}");
        }
        for path in ["names/new", "names/cached", "names/unknown"] {
            assert_eq!(mounted.node(path), Err(Errno::EIO), "{path}");
        }
        assert_eq!(mounted.names("listed"), Err(Errno::EIO));
        assert_eq!(mounted.read("same/unknown").as_deref(), Ok(&b"as it was"[..]));
        assert_eq!(mounted.names("same").map(|names| names >= 4), Ok(true));
        // What is made above does not change the branches.
        let name = Name::new(b"own").expect("a name");
        mounted.0.layer().mkdir(&ROOT, mounted.node("same").expect("there"), name, 0o755).expect("made");
        // A lower branch is one for all that are mounted: once one of them goes by it, all do.
        let other = Mounted::new(folder.path(), &builder, "other", false);
        assert_eq!(other.read("changed/unknown"), Err(Errno::EIO));
        drop((mounted, other));
        let later = Mounted::new(folder.path(), &builder, "later", true);
        assert_eq!(later.read("changed/known").as_deref(), Ok(&b"another!!"[..]), "it was so when it was mounted");
    }

    #[test]
    fn what_changed_while_others_used_the_branch_is_not_mixed_with_what_they_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let lower = folder.path().join("lower");
        fs::create_dir(&lower).expect("made");
        for file in ["f", "same"] {
            fs::write(lower.join(file), vec![b'A'; 4 << 20]).expect("written");
        }
        let builder = StackBuilder::new(64 << 20, None).expect("a cache");
        let others = Mounted::new(folder.path(), &builder, "others", false);
        assert_eq!(others.read("f").as_deref(), Ok(&[b'A'; 16][..]));
        tick();
        fs::write(lower.join("f"), vec![b'B'; 4 << 20]).expect("written");
        let mounted = Mounted::new(folder.path(), &builder, "upper", true);
        let layer = mounted.0.layer();
        let whole = mounted.node("f").and_then(|node| {
            let handle = layer.open(&ROOT, node, OpenFlags::empty()).map_err(|error| error.errno())?;
            let mut content = vec![0; 4 << 20];
            let read = layer.read(&ROOT, handle, 0, &mut content).map_err(|error| error.errno());
            layer.release(handle);
            read.map(|count| content[..count].to_vec())
        });
        // All of it may be in the cache, as it was.
        assert!([Err(Errno::EIO), Ok(vec![b'A'; 4 << 20])].contains(&whole), "a mixture");
        assert_eq!(mounted.read("same").as_deref(), Ok(&[b'A'; 16][..]));
    }

    #[test]
    fn that_nothing_follows_is_compared_too() {
        let folder = tempfile::tempdir().expect("a folder");
        let lower = folder.path().join("lower");
        fs::create_dir(&lower).expect("made");
        fs::write(lower.join("f"), "as it was").expect("written");
        let builder = StackBuilder::new(1 << 20, None).expect("a cache");
        let mounted = Mounted::new(folder.path(), &builder, "upper", true);
        let layer = mounted.0.layer();
        let handle = layer.open(&ROOT, mounted.node("f").expect("there"), OpenFlags::empty()).expect("open");
        assert_eq!(layer.seek(&ROOT, handle, 0, SeekTo::Data).expect("content"), 0);
        tick();
        let file = fs::File::options().write(true).open(lower.join("f")).expect("open");
        file.set_len(0).and_then(|()| file.set_len(9)).expect("nothing but a hole");
        let found = layer.seek(&ROOT, handle, 0, SeekTo::Data).map_err(|error| error.errno());
        layer.release(handle);
        assert_eq!(found, Err(Errno::EIO));
    }

    #[test]
    fn what_changed_just_before_is_served() {
        let folder = tempfile::tempdir().expect("a folder");
        let lower = folder.path().join("lower");
        fs::create_dir(&lower).expect("made");
        for round in 0..50 {
            // Its time is looked at: the filesystem gives the next change a finer one than its clock's last tick.
            fs::write(lower.join("f"), "another!!").and_then(|()| fs::metadata(lower.join("f"))).expect("known");
            fs::write(lower.join("f"), "as it was").expect("written");
            let builder = StackBuilder::new(1 << 20, None).expect("a cache");
            let mounted = Mounted::new(folder.path(), &builder, &format!("upper-{round}"), true);
            assert_eq!(mounted.read("f").as_deref(), Ok(&b"as it was"[..]));
        }
    }

    #[test]
    fn a_mount_that_fails_makes_nothing_immutable() {
        let folder = tempfile::tempdir().expect("a folder");
        let lower = folder.path().join("lower");
        fs::create_dir(&lower).expect("made");
        fs::write(lower.join("f"), "as it was").expect("written");
        let builder = StackBuilder::new(1 << 20, None).expect("a cache");
        let mounted = Mounted::new(folder.path(), &builder, "upper", false);
        let (upper, lowers, storage) = (folder.path().join("upper"), vec![lower.clone()], Storage::default());
        let claimed = StackSpec::Union { upper, lowers, storage, immutable_lowers: true };
        assert!(builder.build(&claimed).is_err(), "its upper branch belongs to another");
        tick();
        fs::write(lower.join("f"), "another!!").expect("written");
        assert_eq!(mounted.read("f").as_deref(), Ok(&b"another!!"[..]));
    }

    #[test]
    fn without_it_nothing_is_compared() {
        let folder = tempfile::tempdir().expect("a folder");
        let lower = folder.path().join("lower");
        fs::create_dir(&lower).expect("made");
        fs::write(lower.join("f"), "as it was").expect("written");
        let builder = StackBuilder::new(1 << 20, None).expect("a cache");
        let mounted = Mounted::new(folder.path(), &builder, "upper", false);
        tick();
        fs::write(lower.join("f"), "another!!").expect("written");
        assert_eq!(mounted.read("f").as_deref(), Ok(&b"another!!"[..]));
    }
}
