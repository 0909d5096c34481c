//! Path walks for the user-level path: from a directory to what a path names, one name at a time, with a check of search
//! permission on each directory. Symbolic links are not followed here but reported: only the application knows its root.

use crate::access::EXECUTE;
use crate::dispatch::Stop;
use crate::instance::Instance;
use crate::request::{Context, Failure};
use crate::spans::enter;
use poolfs_libservice::types::limits::PATH_MAX;
use poolfs_libservice::types::{Attributes, Errno, FileType, Name, NodeId};
use poolfs_service_protocol::Layer;
use tracing::warn;

/// One reference on a node, given back when dropped. The starting point of a walk is held by the caller and counts as not
/// referenced here.
pub struct Held<'i> {
    instance: &'i Instance,
    node: NodeId,
    referenced: bool,
}

impl Held<'_> {
    /// The node.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.referenced {
            self.instance.layer().forget(self.node, 1);
        }
    }
}

/// What a path names.
pub struct Found<'i> {
    /// The object.
    pub node: Held<'i>,
    /// Its attributes at that moment.
    pub attributes: Attributes,
}

/// A directory and a name in it, which may exist or not.
pub struct Place<'i, 'p> {
    /// The directory.
    pub parent: Held<'i>,
    /// The last name of the path.
    pub name: Name<'p>,
    /// The path ended with a slash: only a directory will do.
    pub must_be_directory: bool,
}

/// Why a walk did not arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WalkError {
    /// It failed, or has to be left to the kernel (the path leaves the instance).
    Failure(Failure),
    /// A symbolic link was met. The path to go on with: absolute when it begins with a slash (then from the process's root),
    /// else from the same starting point as before. Links are counted by whoever goes on.
    Redirect(Vec<u8>),
}

impl From<Errno> for WalkError {
    fn from(errno: Errno) -> Self {
        Self::Failure(Failure::Errno(errno))
    }
}

/// One step of a path: a component with its place in the path.
struct Step<'p> {
    name: &'p [u8],
    end: usize,
}

fn steps(path: &[u8]) -> Vec<Step<'_>> {
    let mut steps = Vec::new();
    let mut at = 0;
    for name in path.split(|&byte| byte == b'/') {
        let end = at + name.len();
        if !name.is_empty() && name != b"." {
            steps.push(Step { name, end });
        }
        at = end + 1;
    }
    steps
}

impl Instance {
    /// Finds what `path` names, from the directory `start` (leading slashes mean nothing: they start there too). With
    /// `follow` a symbolic link at the end is reported as [`WalkError::Redirect`], without it is the object itself, unless a
    /// slash follows it.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `EACCES`, `ENAMETOOLONG`; the kernel for what leaves the instance, or passes something that the caller has
    /// mounted in it; links.
    pub fn walk<'i>(
        &'i self,
        context: &Context<'_>,
        start: NodeId,
        path: &[u8],
        follow: bool,
    ) -> Result<Found<'i>, WalkError> {
        let _access = enter(Layer::Access);
        let steps = checked(path)?;
        let trailing = ends_as_directory(path);
        let mut walk = Walk::new(self, context, start);
        for (n, step) in steps.iter().enumerate() {
            let last = n + 1 == steps.len();
            walk.step(path, step, follow || trailing || !last)?;
        }
        let attributes = walk.attributes()?;
        if trailing && !attributes.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        Ok(Found { node: walk.into_last(), attributes })
    }

    /// Finds the directory that holds the last name of `path`, and that name.
    ///
    /// # Errors
    /// As [`Instance::walk`]; the kernel also for paths that end in `.`, `..`, at the starting point or where something is mounted.
    pub fn walk_to_parent<'i, 'p>(
        &'i self,
        context: &Context<'_>,
        start: NodeId,
        path: &'p [u8],
    ) -> Result<Place<'i, 'p>, WalkError> {
        let _access = enter(Layer::Access);
        let steps = checked(path)?;
        let trimmed = path.trim_ascii_end_slashes();
        let (last, before) = steps.split_last().ok_or(WalkError::Failure(Failure::UseKernel))?;
        if last.name == b".." || last.end != trimmed.len() {
            return Err(WalkError::Failure(Failure::UseKernel));
        }
        let mut walk = Walk::new(self, context, start);
        for step in before {
            walk.step(path, step, true)?;
        }
        let directory = walk.attributes()?;
        if !directory.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        // The way to it is checked before the way to a second path is taken, as by the kernel.
        let here = walk.here();
        self.check_object(context, here, &directory, EXECUTE).map_err(|stop| walk.failed(stop))?;
        let name = Name::new(last.name).map_err(|errno| match errno {
            // Told when the name is looked up, and other things are looked at before.
            Errno::ENAMETOOLONG => Failure::UseKernel,
            errno => Failure::Errno(errno),
        });
        let name = name.map_err(WalkError::Failure)?;
        if context.has_mounted_on(here, last.name) {
            return Err(WalkError::Failure(Failure::UseKernel));
        }
        Ok(Place { parent: walk.into_last(), name, must_be_directory: trimmed.len() < path.len() })
    }
}

trait TrimSlashes {
    fn trim_ascii_end_slashes(&self) -> &[u8];
}

impl TrimSlashes for [u8] {
    fn trim_ascii_end_slashes(&self) -> &[u8] {
        let end = self.iter().rposition(|&byte| byte != b'/').map_or(0, |at| at + 1);
        &self[..end]
    }
}

fn checked(path: &[u8]) -> Result<Vec<Step<'_>>, WalkError> {
    if path.is_empty() {
        return Err(Errno::ENOENT.into());
    }
    if path.len() > PATH_MAX {
        return Err(Errno::ENAMETOOLONG.into());
    }
    if path.contains(&0) {
        return Err(Errno::EINVAL.into());
    }
    Ok(steps(path))
}

fn ends_as_directory(path: &[u8]) -> bool {
    path.ends_with(b"/") || path.ends_with(b"/.") || path == b"."
}

/// A walk under way: the directories passed, so that `..` finds back. A path has at most PATH_MAX / 2 of them.
struct Walk<'i, 'c> {
    instance: &'i Instance,
    context: &'c Context<'c>,
    passed: Vec<Held<'i>>,
    /// Of the last one, when it is known.
    attributes: Option<Attributes>,
}

impl<'i, 'c> Walk<'i, 'c> {
    fn new(instance: &'i Instance, context: &'c Context<'c>, start: NodeId) -> Self {
        let start = Held { instance, node: start, referenced: false };
        Self { instance, context, passed: vec![start], attributes: None }
    }

    fn here(&self) -> NodeId {
        self.passed.last().map_or(NodeId::ROOT, Held::node)
    }

    fn attributes(&mut self) -> Result<Attributes, WalkError> {
        if let Some(attributes) = self.attributes {
            return Ok(attributes);
        }
        let attributes = self
            .instance
            .layer()
            .getattr(&self.context.caller, self.here())
            .map_err(|error| self.failed(Stop::Error(error)))?;
        self.attributes = Some(attributes);
        Ok(attributes)
    }

    fn failed(&self, stop: Stop) -> WalkError {
        WalkError::Failure(match stop {
            Stop::UseKernel => Failure::UseKernel,
            Stop::Error(error) => {
                if let Some(message) = error.message() {
                    warn!(instance = self.instance.name(), errno = ?error.errno(), "{message}");
                }
                Failure::Errno(error.errno())
            }
        })
    }

    fn step(&mut self, path: &[u8], step: &Step<'_>, follow: bool) -> Result<(), WalkError> {
        let directory = self.attributes()?;
        if !directory.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        let here = self.here();
        self.instance.check_object(self.context, here, &directory, EXECUTE).map_err(|stop| self.failed(stop))?;
        if step.name == b".." {
            return self.step_up();
        }
        if self.context.has_mounted_on(here, step.name) {
            return Err(WalkError::Failure(Failure::UseKernel));
        }
        let name = Name::new(step.name)?;
        let layer = self.instance.layer();
        let entry = layer.lookup(&self.context.caller, here, name).map_err(|error| self.failed(Stop::Error(error)))?;
        let found = Held { instance: self.instance, node: entry.node, referenced: true };
        if self.context.has_covered(entry.node) {
            return Err(WalkError::Failure(Failure::UseKernel));
        }
        if follow && entry.attributes.file_type == FileType::Symlink {
            if self.context.leaves_links() || self.is_strangers(&directory, &entry.attributes) {
                return Err(WalkError::Failure(Failure::UseKernel));
            }
            let target =
                layer.readlink(&self.context.caller, found.node).map_err(|error| self.failed(Stop::Error(error)))?;
            return Err(redirect(path, step, &target));
        }
        self.passed.push(found);
        self.attributes = Some(entry.attributes);
        Ok(())
    }

    /// Whether a link in a directory for everybody is neither the caller's nor the directory's owner's: a host may forbid to follow
    /// it (fs.protected_symlinks), and its kernel decides.
    fn is_strangers(&self, directory: &Attributes, link: &Attributes) -> bool {
        const FOR_EVERYBODY: u32 = 0o1002;
        let own = self.context.credentials.is_none_or(|credentials| credentials.uid == link.uid);
        directory.permissions & FOR_EVERYBODY == FOR_EVERYBODY && !own && link.uid != directory.uid
    }

    /// Above the starting point only the kernel knows what there is, except that a root is its own parent.
    fn step_up(&mut self) -> Result<(), WalkError> {
        if self.passed.len() > 1 {
            self.passed.pop();
            self.attributes = None;
            return Ok(());
        }
        if self.here() == NodeId::ROOT && self.instance.spec().is_root {
            return Ok(());
        }
        Err(WalkError::Failure(Failure::UseKernel))
    }

    fn into_last(mut self) -> Held<'i> {
        let instance = self.instance;
        self.passed.pop().unwrap_or(Held { instance, node: NodeId::ROOT, referenced: false })
    }
}

/// The path with the link at `step` replaced by its target.
fn redirect(path: &[u8], step: &Step<'_>, target: &[u8]) -> WalkError {
    let mut next = Vec::with_capacity(path.len() + target.len());
    if !target.starts_with(b"/") {
        next.extend_from_slice(&path[..step.end - step.name.len()]);
    }
    next.extend_from_slice(target);
    next.extend_from_slice(&path[step.end..]);
    if next.len() > PATH_MAX {
        return Errno::ENAMETOOLONG.into();
    }
    WalkError::Redirect(next)
}

#[cfg(test)]
mod tests;
