//! Dispatch of requests on names: looking up, creating, linking, removing, renaming.

use super::privileges::credentials_of;
use super::{Served, Stop, leave_foreign};
use crate::access::{self, EXECUTE, READ, WRITE};
use crate::handles::layer_flags;
use crate::instance::{ChangedNames, Instance};
use crate::notify::NameChange::{self, Appeared, Left};
use crate::request::{Context, Reply};
use poolfs_libservice::Entry;
use poolfs_libservice::types::{Attributes, Caller, Errno, FileType, Name, NodeId, OpenFlags, RenameFlags};

const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

impl Instance {
    pub(super) fn lookup(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served {
        if context.credentials.is_some() {
            self.check_search(context, parent)?;
        }
        Ok(Reply::Entry(self.layer().lookup(&context.caller, parent, name)?))
    }

    fn check_search(&self, context: &Context<'_>, directory: NodeId) -> Served<()> {
        let object = self.layer().getattr(&context.caller, directory)?;
        if !object.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        self.check_object(context, directory, &object, EXECUTE)
    }

    /// The directory's attributes, once the caller may add or remove names in it.
    ///
    /// In a sticky directory what a name stands for decides who may remove or replace it: only the kernel, which locks the
    /// directory, can keep that from changing between the check and the deed, and only if all changes of its names come
    /// through it.
    fn check_directory(&self, context: &Context<'_>, directory: NodeId) -> Served<Attributes> {
        let object = self.layer().getattr(&context.caller, directory)?;
        if !object.is_directory() {
            return Err(Errno::ENOTDIR.into());
        }
        if object.links == 0 {
            // Removed: as with the kernel, that comes before missing permission.
            return Err(Errno::ENOENT.into());
        }
        if context.is_library() && access::is_sticky(&object) {
            return Err(Stop::UseKernel);
        }
        self.check_object(context, directory, &object, WRITE | EXECUTE)?;
        Ok(object)
    }

    /// Existing names are reported before missing permission, as Linux does.
    fn refuse_existing(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served<()> {
        if context.credentials.is_none() {
            return Ok(());
        }
        self.check_search(context, parent)?;
        match self.layer().lookup(&context.caller, parent, name) {
            Ok(entry) => {
                self.layer().forget(entry.node, 1);
                Err(Errno::EEXIST.into())
            }
            Err(error) if error.errno() == Errno::ENOENT => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Checks the parent and answers owner, group and mode of what will be made in it: a set-group-id directory passes its
    /// group on, and the bit to directories.
    fn prepare(
        &self,
        context: &Context<'_>,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
    ) -> Served<(Caller, u32)> {
        self.refuse_existing(context, parent, name)?;
        let directory = self.check_directory(context, parent)?;
        Ok(Self::passed_on(context, &directory, file_type, permissions))
    }

    /// Owner, group and mode of what is made in a directory.
    fn passed_on(
        context: &Context<'_>,
        directory: &Attributes,
        file_type: FileType,
        permissions: u32,
    ) -> (Caller, u32) {
        let mut caller = context.caller;
        let mut permissions = permissions & 0o7777;
        if directory.permissions & SET_GROUP_ID != 0 {
            caller.gid = directory.gid;
            if file_type == FileType::Directory {
                permissions |= SET_GROUP_ID;
            } else if let Some(credentials) = context.credentials
                && permissions & (SET_GROUP_ID | GROUP_EXECUTE) == SET_GROUP_ID | GROUP_EXECUTE
                && access::strips_set_group_id(credentials, directory, caller.gid)
            {
                permissions &= !SET_GROUP_ID;
            }
        }
        (caller, permissions)
    }

    pub(super) fn create(
        &self,
        context: &Context<'_>,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
        flags: OpenFlags,
    ) -> Served {
        let (caller, permissions) = self.prepare(context, parent, name, FileType::Regular, permissions)?;
        let room = self.handles.reserve()?;
        let privileges = self.nodes.privileges_changes();
        let (entry, handle) = self.layer().create(&caller, parent, name, permissions, layer_flags(flags))?;
        self.name_appeared(context, parent, name);
        let file = room.enter(entry.node, handle, flags, false);
        self.revoke_posts(entry.node);
        self.note_made(&entry, privileges);
        self.note_writer(context, &file);
        Ok(Reply::Opened { file, entry: Some(entry) })
    }

    pub(super) fn create_nameless(
        &self,
        context: &Context<'_>,
        parent: NodeId,
        permissions: u32,
        flags: OpenFlags,
    ) -> Served {
        let directory = self.check_directory(context, parent)?;
        let (caller, permissions) = Self::passed_on(context, &directory, FileType::Regular, permissions);
        let room = self.handles.reserve()?;
        let layer_flags = layer_flags(flags) | flags & OpenFlags::EXCLUSIVE;
        let privileges = self.nodes.privileges_changes();
        let (entry, handle) = self.layer().tmpfile(&caller, parent, permissions, layer_flags)?;
        let file = room.enter(entry.node, handle, flags, false);
        self.note_made(&entry, privileges);
        self.note_writer(context, &file);
        Ok(Reply::Opened { file, entry: Some(entry) })
    }

    pub(super) fn make_node(
        &self,
        context: &Context<'_>,
        parent: NodeId,
        name: Name<'_>,
        file_type: FileType,
        permissions: u32,
        device: u32,
    ) -> Served {
        if context.is_library() && file_type.is_device() {
            // A control group may say no.
            return Err(Stop::UseKernel);
        }
        let (caller, permissions) = self.prepare(context, parent, name, file_type, permissions)?;
        let entry = self.layer().mknod(&caller, parent, name, file_type, permissions, device)?;
        self.name_appeared(context, parent, name);
        Ok(Reply::Entry(entry))
    }

    pub(super) fn make_directory(
        &self,
        context: &Context<'_>,
        parent: NodeId,
        name: Name<'_>,
        permissions: u32,
    ) -> Served {
        let permissions = permissions & 0o1777;
        let (caller, permissions) = self.prepare(context, parent, name, FileType::Directory, permissions)?;
        let entry = self.layer().mkdir(&caller, parent, name, permissions)?;
        self.name_appeared(context, parent, name);
        Ok(Reply::Entry(entry))
    }

    pub(super) fn symbolic_link(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>, target: &[u8]) -> Served {
        let (caller, _) = self.prepare(context, parent, name, FileType::Symlink, 0o777)?;
        let entry = self.layer().symlink(&caller, parent, name, target)?;
        self.name_appeared(context, parent, name);
        Ok(Reply::Entry(entry))
    }

    pub(super) fn link(&self, context: &Context<'_>, node: NodeId, parent: NodeId, name: Name<'_>) -> Served {
        self.refuse_existing(context, parent, name)?;
        self.check_link_source(context, node)?;
        self.check_directory(context, parent)?;
        if !context.is_library() {
            self.nodes.answers_size(node);
        }
        let entry = self.layer().link(&context.caller, node, parent, name)?;
        self.name_appeared(context, parent, name);
        Ok(Reply::Entry(entry))
    }

    /// The kernel may remember that there is no such name.
    fn name_appeared(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) {
        if context.is_library() {
            self.tell_names(self.names_changed(&[(parent, name, Appeared)]));
        }
    }

    /// Where the host protects hard links, only owners link files that others could not read and write anyway.
    fn check_link_source(&self, context: &Context<'_>, node: NodeId) -> Served<()> {
        let object = self.layer().getattr(&context.caller, node)?;
        leave_foreign(context, &object)?;
        let harmless = access::is_harmless_link_source(&object);
        if context.credentials.is_none() && harmless {
            return Ok(());
        }
        // The kernel has looked too, but at the mode it knew: set-id bits may have come by the user-level path since.
        let credentials = credentials_of(context);
        if access::may_own(&credentials, &object).is_ok() || !access::host_protects_hard_links() {
            return Ok(());
        }
        if harmless && self.check_object(context, node, &object, READ | WRITE).is_ok() {
            return Ok(());
        }
        Err(Errno::EPERM.into())
    }

    pub(super) fn unlink(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served {
        let locked = self.lock_removals(parent, parent);
        self.check_removal(context, parent, name)?;
        // Only the kernel is interested: removing it has errors of its own.
        let victim = self.peek(context, parent, name).ok().flatten();
        let changing = self.change_attributes(context, [victim.map(|victim| victim.node), None]);
        let removed = self.layer().unlink(&context.caller, parent, name);
        let change = if removed.is_ok() { Left } else { Appeared };
        let changed = self.removal_noted(context, removed.is_ok(), &[(parent, name, change)]);
        drop(locked);
        self.tell_names(changed);
        drop(changing);
        removed?;
        Ok(Reply::Done)
    }

    /// Names were taken away, or should have been: what the kernel must be told. Of what it has done itself it needs to be
    /// told nothing.
    fn removal_noted<'n>(
        &self,
        context: &Context<'_>,
        done: bool,
        names: &[(NodeId, Name<'n>, NameChange)],
    ) -> ChangedNames<'n> {
        if context.is_library() {
            return self.names_changed(names);
        }
        if let (true, &[(parent, name, _)]) = (done, names) {
            self.nodes.name_gone(parent, name.as_bytes());
        }
        ChangedNames::default()
    }

    pub(super) fn remove_directory(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served {
        let locked = self.lock_removals(parent, parent);
        self.check_removal(context, parent, name)?;
        let removed = self.layer().rmdir(&context.caller, parent, name);
        let change = if removed.is_ok() { Left } else { Appeared };
        let changed = self.removal_noted(context, removed.is_ok(), &[(parent, name, change)]);
        drop(locked);
        self.tell_names(changed);
        removed?;
        Ok(Reply::Done)
    }

    /// Whether the caller may take the name away. Nothing is looked up for requests the kernel has checked.
    fn check_removal(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served<()> {
        if context.credentials.is_none() {
            return Ok(());
        }
        self.check_search(context, parent)?;
        let victim = self.peek(context, parent, name)?.ok_or(Errno::ENOENT)?;
        if context.has_covered(victim.node) {
            return Err(Stop::UseKernel);
        }
        leave_foreign(context, &victim.attributes)?;
        self.check_directory(context, parent).map(|_| ())
    }

    pub(super) fn rename(
        &self,
        context: &Context<'_>,
        (parent, name): (NodeId, Name<'_>),
        (new_parent, new_name): (NodeId, Name<'_>),
        flags: RenameFlags,
    ) -> Served {
        let locked = self.lock_removals(parent, new_parent);
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        if context.is_library() {
            self.check_rename(context, (parent, name), (new_parent, new_name), flags)?;
        } else if self.nodes.is_name_being_told(parent, name.as_bytes())
            || exchange && self.nodes.is_name_being_told(new_parent, new_name.as_bytes())
        {
            // The kernel may mean what the name stood for before: it would move that. It looks again and comes back.
            return Err(Errno::ESTALE.into());
        }
        let [source, target] = self.peek_both(context, [(parent, name), (new_parent, new_name)]);
        let [source, target] = [source, target].map(|found| found.ok().flatten());
        let nodes = [&source, &target].map(|entry| entry.as_ref().map(|entry| entry.node));
        let changing = self.change_attributes(context, nodes);
        let renamed = self.layer().rename(&context.caller, parent, name, new_parent, new_name, flags);
        let same = nodes[0] == nodes[1];
        let mut changed = ChangedNames::default();
        if context.is_library() {
            // Two names of one object both stay.
            let left = if renamed.is_ok() && !same { Left } else { Appeared };
            let arrived = if target.is_some() { left } else { Appeared };
            changed = self.names_changed(&[(parent, name, left), (new_parent, new_name, arrived)]);
        } else if renamed.is_ok() && !exchange && !same {
            self.nodes.name_moved((parent, name.as_bytes()), (new_parent, new_name.as_bytes()));
        } else if renamed.is_ok() && exchange {
            self.nodes.names_exchanged((parent, name.as_bytes()), (new_parent, new_name.as_bytes()));
        }
        drop(locked);
        self.tell_names(changed);
        drop(changing);
        renamed?;
        Ok(Reply::Done)
    }

    /// Directories are left to the kernel: a mount below one that is renamed behind the kernel's back would be lost.
    fn check_rename(
        &self,
        context: &Context<'_>,
        (parent, name): (NodeId, Name<'_>),
        (new_parent, new_name): (NodeId, Name<'_>),
        flags: RenameFlags,
    ) -> Served<()> {
        if flags.contains(RenameFlags::WHITEOUT) {
            return Err(Stop::UseKernel);
        }
        self.check_search(context, parent)?;
        self.check_search(context, new_parent)?;
        let [source, target] = self.peek_both(context, [(parent, name), (new_parent, new_name)]);
        let (source, target) = (source?.ok_or(Errno::ENOENT)?, target?);
        for found in target.iter().chain([&source]) {
            if context.has_covered(found.node) {
                return Err(Stop::UseKernel);
            }
            leave_foreign(context, &found.attributes)?;
        }
        if flags.contains(RenameFlags::EXCHANGE) && target.is_none() {
            return Err(Errno::ENOENT.into());
        }
        let is_directory = |entry: &Entry| entry.attributes.is_directory();
        if is_directory(&source) || target.as_ref().is_some_and(is_directory) {
            return Err(Stop::UseKernel);
        }
        if target.is_some() && flags.contains(RenameFlags::NO_REPLACE) {
            return Err(Errno::EEXIST.into());
        }
        if target.is_some_and(|target| target.node == source.node) {
            // Two names of one file stay as they are, for which nobody needs permission.
            return Ok(());
        }
        self.check_directory(context, parent)?;
        self.check_directory(context, new_parent).map(|_| ())
    }

    /// What a name stands for at this moment; no reference is kept.
    pub(super) fn peek(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served<Option<Entry>> {
        let found = self.find(context, parent, name);
        self.forget_found(&found);
        found
    }

    /// What two names stand for. Of one object, both show the same node, which a layer promises only while somebody knows it.
    fn peek_both(&self, context: &Context<'_>, names: [(NodeId, Name<'_>); 2]) -> [Served<Option<Entry>>; 2] {
        let found = names.map(|(parent, name)| self.find(context, parent, name));
        found.iter().for_each(|found| self.forget_found(found));
        found
    }

    fn forget_found(&self, found: &Served<Option<Entry>>) {
        if let Ok(Some(entry)) = found {
            self.layer().forget(entry.node, 1);
        }
    }

    /// Looks a name up. What is found is to be forgotten once more.
    fn find(&self, context: &Context<'_>, parent: NodeId, name: Name<'_>) -> Served<Option<Entry>> {
        match self.layer().lookup(&context.caller, parent, name) {
            Ok(entry) => Ok(Some(entry)),
            Err(error) if error.errno() == Errno::ENOENT => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}
