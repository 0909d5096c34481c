#![doc = include_str!("coherence.md")]

use poolfs_types::NodeId;
use std::time::Duration;

/// What a layer may keep of the answers of the layer below, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coherence {
    /// Nobody else changes anything: everything is kept, and changes may be delayed.
    Exclusive,
    /// Nobody changes anything: everything is kept.
    Immutable,
    /// Others make changes, and each of them returns only when the [`Upcalls`] for it have. Everything is kept until then.
    Leased,
    /// Others make changes of which nothing is told. Content and names are kept, and used while an answer that was asked for during the
    /// call says that they are as they were ([`poolfs_types::Attributes::change`]).
    Validated,
    /// The same, where an answer that was asked for so long before the call is enough.
    Timed(Duration),
}

impl Coherence {
    /// Whether changes may be delayed: nobody can look for them below.
    #[must_use]
    pub fn delays(self) -> bool {
        self == Self::Exclusive
    }

    /// Whether others make changes.
    #[must_use]
    pub fn is_shared(self) -> bool {
        !matches!(self, Self::Exclusive | Self::Immutable)
    }

    /// How long before a call an answer may have been asked for that the call goes by; nothing where upcalls tell of changes, or there are none.
    #[must_use]
    pub fn validity(self) -> Option<Duration> {
        match self {
            Self::Exclusive | Self::Immutable | Self::Leased => None,
            Self::Validated => Some(Duration::ZERO),
            Self::Timed(time) => Some(time),
        }
    }
}

/// Which part of what is kept of a node is no longer so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stale {
    /// Attributes, and extended attributes.
    Attributes,
    /// Those and the content.
    Content,
}

/// What a layer below says of changes that others make, when its [`Coherence`] is [`Leased`](Coherence::Leased). Nodes that the layer above does
/// not hold may be named.
///
/// An upcall marks what is kept, and has it told further above. It calls no layer, and takes no lock that is held over a call of one: the layer
/// below may hold its own.
pub trait Upcalls: Send + Sync {
    /// A node is not as it was.
    fn stale(&self, node: NodeId, what: Stale);

    /// Names in a directory are not as they were, nor is its listing.
    fn names(&self, directory: NodeId);

    /// Nothing is known of what others have changed: all that is kept may be wrong.
    fn lost(&self);
}
