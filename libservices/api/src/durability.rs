//! How durable a change must be ([`Durability`]), and which change of names is about to follow ([`NameChange`]).

use poolfs_types::OpenFlags;

/// How much `fsync` makes durable, the lesser one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// content and what is needed to read it back (`fdatasync`)
    Data,
    /// all attributes as well (`fsync`)
    All,
}

impl Durability {
    /// What a write has to be before it returns, by the flags of its open file or its own; nothing: what it will be in its own time.
    #[must_use]
    pub fn of_writes(flags: OpenFlags) -> Option<Self> {
        let all = OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC;
        match flags & all {
            both if both == all => Some(Self::All),
            OpenFlags::DATA_SYNC => Some(Self::Data),
            _ => None,
        }
    }
}

/// What a change of names does that is about to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameChange {
    /// it gives a file a name that nothing had
    Adds,
    /// it puts a file in the place of another, whose content would be missed if this file's did not arrive
    Replaces,
}
