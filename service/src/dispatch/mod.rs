//! The dispatcher: the one place where requests of both fronts are served.
//!
//! It adds to the layers: permission checks for requests that nobody has checked yet, set-id bits, the coherence of the kernel's
//! caches, statistics, and exactly one errno for each failure.

mod attributes;
mod data;
mod names;
mod privileges;
mod xattrs;

use crate::access::{self, Acl};
use crate::instance::Instance;
use crate::request::{Context, Failure, Reply, Request};
use crate::spans::{enter, note};
use poolfs_libservice::types::{Attributes, Errno, NodeId};
use poolfs_libservice::{Error, Spending};
use poolfs_service_protocol::Layer;
use std::time::Instant;
use tracing::warn;

/// Leaves what has an owner without an id here to the kernel, before it is changed: Linux refuses that, by an errno that says what
/// it would have been.
fn leave_foreign(context: &Context<'_>, object: &Attributes) -> Served<()> {
    if context.is_library() && object.is_foreign() { Err(Stop::UseKernel) } else { Ok(()) }
}

/// Why a request was not served, inside the dispatcher.
pub(crate) enum Stop {
    /// a layer or a rule says no
    Error(Error),
    /// the kernel has to do it
    UseKernel,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Error(errno.into())
    }
}

type Served<T = Reply> = Result<T, Stop>;

impl Instance {
    /// Serves one request.
    ///
    /// # Errors
    /// Exactly one errno, or [`Failure::UseKernel`] for requests of the user-level path.
    pub fn dispatch(&self, context: &Context<'_>, request: Request<'_>) -> Result<Reply, Failure> {
        if self.is_refusing() {
            return Err(Failure::Errno(Errno::ENOTCONN));
        }
        let kind = request.kind();
        let _in_flight = self.requests.begin(kind as u8);
        if !context.is_posted && !self.settle_posts() {
            self.settle_own(context, &request);
        }
        let changes = request.changes();
        let in_doubt = self.in_doubt.as_ref().filter(|_| changes[0].is_some());
        let begun = in_doubt.map(|in_doubt| in_doubt.begin(context.asked_ms)).transpose();
        let _change = begun.map_err(Failure::Errno)?;
        note(kind);
        let _access = enter(Layer::Access);
        let started = Instant::now();
        let changing = self.change_attributes(context, changes);
        let _spending = (!request.makes_durable()).then(|| Spending::of_user(context.caller.uid));
        let served = self.serve(context, request);
        // Also what has failed may have changed something.
        drop(changing);
        self.statistics.record(context.path, kind, started.elapsed(), matches!(served, Err(Stop::Error(_))));
        served.map_err(|stop| match stop {
            Stop::UseKernel => Failure::UseKernel,
            Stop::Error(error) => {
                if let Some(message) = error.message() {
                    warn!(instance = self.name(), request = ?kind, errno = ?error.errno(), "{message}");
                }
                Failure::Errno(error.errno())
            }
        })
    }

    /// Waits, however long it takes, until all was served that was posted to the files that a request has to do with: it comes after that. Whoever has to do with other
    /// files does not wait for a branch that does not answer.
    fn settle_own(&self, context: &Context<'_>, request: &Request<'_>) {
        let named = request.names().map(|name| {
            let (parent, name) = name?;
            self.peek(context, parent, name).ok().flatten().map(|entry| entry.node)
        });
        let nodes = request.files().into_iter().chain(named).flatten();
        nodes.for_each(|node| self.settle_all_posts(Some(node)));
    }

    fn serve(&self, context: &Context<'_>, request: Request<'_>) -> Served {
        match request {
            Request::Lookup { parent, name } => self.lookup(context, parent, name),
            Request::Forget { node, count } => {
                self.layer().forget(node, count);
                Ok(Reply::Done)
            }
            Request::Stat { node } => Ok(Reply::Attributes(self.layer().getattr(&context.caller, node)?)),
            Request::Access { node, mask } => self.access(context, node, mask),
            Request::Change { node, changes, file } => self.change(context, node, changes, file),
            Request::ReadLink { node } => Ok(Reply::Bytes(self.layer().readlink(&context.caller, node)?)),
            Request::Create { parent, name, permissions, flags } => {
                self.create(context, parent, name, permissions, flags)
            }
            Request::CreateNameless { parent, permissions, flags } => {
                self.create_nameless(context, parent, permissions, flags)
            }
            Request::MakeNode { parent, name, file_type, permissions, device } => {
                self.make_node(context, parent, name, file_type, permissions, device)
            }
            Request::MakeDirectory { parent, name, permissions } => {
                self.make_directory(context, parent, name, permissions)
            }
            Request::SymbolicLink { parent, name, target } => self.symbolic_link(context, parent, name, target),
            Request::Link { node, parent, name } => self.link(context, node, parent, name),
            Request::Unlink { parent, name } => self.unlink(context, parent, name),
            Request::RemoveDirectory { parent, name } => self.remove_directory(context, parent, name),
            Request::Rename { parent, name, new_parent, new_name, flags } => {
                self.rename(context, (parent, name), (new_parent, new_name), flags)
            }
            Request::Open { node, flags } => self.open(context, node, flags),
            Request::OpenDirectory { node } => self.open_directory(context, node),
            Request::Read { file, offset, target } => self.read(context, file, offset, target),
            Request::Write { file, offset, data, mode } => self.write(context, file, offset, data, mode),
            Request::Allocate { file, mode, offset, length } => self.allocate(context, file, mode, offset, length),
            Request::Seek { file, offset, to } => self.seek(context, file, offset, to),
            Request::Sync { file, durability } => self.sync_file(context, file, durability),
            Request::SyncAll => {
                self.settle_all_posts(None);
                self.layer().sync()?;
                Ok(Reply::Done)
            }
            Request::Flush { file } => self.flush(context, file),
            Request::CopyRange { source, source_offset, target, target_offset, length } => {
                self.copy_range(context, (source, source_offset), (target, target_offset), length)
            }
            Request::List { file, cookie, visit } => {
                self.layer().readdir(&context.caller, file.handle(), cookie, visit)?;
                Ok(Reply::Done)
            }
            Request::GetXattr { node, name } => self.get_xattr(context, node, name),
            Request::ListXattr { node } => self.list_xattr(context, node),
            Request::SetXattr { node, name, value, flags } => self.set_xattr(context, node, name, value, flags),
            Request::RemoveXattr { node, name } => self.remove_xattr(context, node, name),
            Request::Statfs { node } => Ok(Reply::Statistics(self.layer().statfs(&context.caller, node)?)),
        }
    }

    /// The object's attributes, once the caller may `mask` on it. Nothing is asked for requests the kernel has checked.
    pub(crate) fn check(&self, context: &Context<'_>, node: NodeId, mask: u32) -> Served<Attributes> {
        let object = self.layer().getattr(&context.caller, node)?;
        self.check_object(context, node, &object, mask)?;
        Ok(object)
    }

    /// As [`Instance::check`], with the attributes at hand.
    pub(crate) fn check_object(
        &self,
        context: &Context<'_>,
        node: NodeId,
        object: &Attributes,
        mask: u32,
    ) -> Served<()> {
        let Some(credentials) = context.credentials else {
            return Ok(());
        };
        if mask == 0 {
            return Ok(());
        }
        access::may_access(credentials, object, mask, || self.access_list(context, node))?;
        Ok(())
    }

    fn access_list(&self, context: &Context<'_>, node: NodeId) -> Result<Option<Acl>, Errno> {
        match self.layer().getxattr(&context.caller, node, b"system.posix_acl_access") {
            Ok(value) => Acl::parse(&value).map(Some),
            Err(error) if matches!(error.errno(), Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(None),
            Err(error) => Err(error.errno()),
        }
    }
}

#[cfg(test)]
mod tests;
