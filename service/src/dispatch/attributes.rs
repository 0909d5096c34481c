//! Dispatch of requests on attributes.

use super::privileges::{Writer, credentials_of, remaining_mode};
use super::{Served, Stop, leave_foreign};
use crate::access::{self, Credentials};
use crate::handles::OpenFile;
use crate::instance::Instance;
use crate::request::{Context, Reply};
use poolfs_libservice::types::{Attributes, Errno, FileType, NodeId, SetAttributes, SetTime};

const SET_GROUP_ID: u32 = 0o2000;

impl Instance {
    pub(super) fn access(&self, context: &Context<'_>, node: NodeId, mask: u32) -> Served {
        if mask & !7 != 0 {
            return Err(Errno::EINVAL.into());
        }
        let object = self.check(context, node, mask)?;
        if context.is_library() && mask != 0 && object.file_type.is_device() {
            // A control group may say no.
            return Err(Stop::UseKernel);
        }
        let changes_nothing = mask & access::WRITE == 0 || !matches_content(&object);
        if !changes_nothing && self.layer().read_only() {
            return Err(Errno::EROFS.into());
        }
        Ok(Reply::Done)
    }

    pub(super) fn change(
        &self,
        context: &Context<'_>,
        node: NodeId,
        mut changes: SetAttributes,
        file: Option<&OpenFile>,
    ) -> Served {
        if !context.is_library() {
            self.nodes.answers_size(node);
        }
        let nothing = !context.is_library() && changes == SetAttributes::default();
        let gives_away = nothing || changes.uid.is_some() || changes.gid.is_some();
        if gives_away && context.is_library() {
            // The kernel checks a chmod before it comes here: only it can keep the owner from changing in between.
            return Err(Stop::UseKernel);
        }
        let exclusive = (gives_away || changes.permissions.is_some()).then(|| self.rights.lock(node));
        let before = self.layer().getattr(&context.caller, node)?;
        leave_foreign(context, &before)?;
        if nothing {
            if is_anothers_program(context, &before) {
                return Ok(Reply::Attributes(before));
            }
            changes.uid = Some(before.uid);
        }
        if let Some(credentials) = context.credentials {
            self.check_change(context, credentials, (node, &before), &mut changes, file)?;
        }
        if let Some(file) = file.filter(|file| changes.size.is_some() && !file.flags().writable()) {
            return Err(if file.is_directory() { Errno::EBADF } else { Errno::EINVAL }.into());
        }
        let mut _changing = None;
        if changes.size.is_some() {
            if context.is_library() {
                // The kernel can be told that a file has grown, and not that it has shrunk: it does that itself where it has the file open.
                let shrinks = changes.size.is_some_and(|size| size < before.size);
                if self.nodes.may_map(node) || (shrinks && self.nodes.is_open(node)) {
                    return Err(Stop::UseKernel);
                }
                _changing = Some(self.nodes.begin_own_change(node).ok_or(Stop::UseKernel)?);
            }
            if exclusive.is_some() {
                self.drop_capability(node)?;
                self.drop_set_id(context, node, Writer::Caller)?;
            } else {
                self.drop_privileges(context, node, Writer::Caller)?;
            }
        }
        if gives_away && !before.is_directory() {
            if changes.permissions.is_none() && before.permissions & 0o6000 != 0 {
                changes.permissions = remaining_mode(&credentials_of(context), &before);
            }
            self.drop_capability(node)?;
        }
        let handle = file.filter(|file| file.flags().writable() && changes.size.is_some()).map(OpenFile::handle);
        let after = self.layer().setattr(&context.caller, node, &changes, handle);
        if changes.permissions.is_some() {
            self.nodes.privileges_changed(node);
        }
        drop(exclusive);
        let after = after?;
        if changes.size.is_some() {
            self.revoke_posts(node);
        }
        if changes.size.is_some() && context.is_library() {
            let grown = (after.size > before.size).then_some((after.size, 0));
            self.content_changed(node, grown);
        }
        Ok(Reply::Attributes(after))
    }

    fn check_change(
        &self,
        context: &Context<'_>,
        credentials: &Credentials,
        (node, object): (NodeId, &Attributes),
        changes: &mut SetAttributes,
        file: Option<&OpenFile>,
    ) -> Served<()> {
        if let Some(permissions) = &mut changes.permissions {
            access::may_own(credentials, object)?;
            if access::strips_set_group_id(credentials, object, object.gid) {
                *permissions &= !SET_GROUP_ID;
            }
        }
        if changes.size.is_some() && file.is_none() {
            // What cannot be truncated at all is told before who may.
            match object.file_type {
                FileType::Regular => self.check_object(context, node, object, access::WRITE)?,
                FileType::Directory => return Err(Errno::EISDIR.into()),
                _ => return Err(Errno::EINVAL.into()),
            }
        }
        let times = [changes.accessed, changes.modified];
        if times.iter().any(|time| matches!(time, Some(SetTime::At(_)))) || times.contains(&None) {
            if times != [None, None] {
                access::may_own(credentials, object)?;
            }
        } else if access::may_own(credentials, object).is_err() {
            self.check_object(context, node, object, access::WRITE)?;
        }
        Ok(())
    }
}

/// Whether the object has set-id bits that only another may take away.
///
/// The kernel asks for no change at all when somebody means `chown` to nobody, which is one to the owner that is; and when
/// somebody is about to write who may not keep set-id bits. The two look the same. Who writes will say so once more with the
/// write, so that nothing needs to be done here for who is not the owner, whose `chown` to nobody would fail.
fn is_anothers_program(context: &Context<'_>, object: &Attributes) -> bool {
    let has_set_id = !object.is_directory() && object.permissions & 0o6000 != 0;
    has_set_id && access::may_own(&credentials_of(context), object).is_err()
}

/// Whether a read-only filesystem refuses writing to this kind of object: devices, pipes and sockets are not in it.
fn matches_content(object: &Attributes) -> bool {
    use poolfs_libservice::types::FileType::{Directory, Regular, Symlink};
    matches!(object.file_type, Regular | Directory | Symlink)
}
