//! The parser of the kernel's messages: each is validated and typed once, so that no later code sees lengths, message offsets or
//! raw flags.
//!
//! [`Message::parse`] is total: for any bytes it returns a message, an errno for the sender, or [`Malformed`].

mod fields;

use super::abi::{self, opcode};
use crate::in_flight::now_ms;
use crate::request::{Context, WriteMode};
use fields::Fields;
use poolfs_libservice::Durability;
use poolfs_libservice::types::{
    AllocateMode, Errno, FileType, Name, OpenFlags, RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use zerocopy::FromBytes;

/// A message whose sender cannot even be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// One message of the kernel.
#[derive(Debug)]
pub enum Message<'a> {
    /// It waits for an answer.
    Call(Call<'a>),
    /// It gives references to nodes back; no answer.
    Forget(Forgets<'a>),
    /// A thread that waits for an answer has got a signal; no answer.
    Interrupt,
    /// Nothing to do, and no answer.
    Nothing,
}

/// A request that is answered.
#[derive(Debug)]
pub struct Call<'a> {
    /// Its number, to be repeated in the answer. The highest bit says that the kernel sends it again.
    pub unique: u64,
    /// FUSE's number of the node it is about.
    pub node: u64,
    /// The calling thread as this process sees it; 0: unknown, or the kernel itself.
    pub thread: u32,
    uid: u32,
    gid: u32,
    umask: u32,
    /// What is asked for, or why it cannot be.
    pub operation: Result<Operation<'a>, Errno>,
}

impl Call<'_> {
    /// A call about the root.
    #[cfg(test)]
    pub(super) fn for_tests(thread: u32, operation: Operation<'_>) -> Call<'_> {
        Call { unique: 2, node: 1, thread, uid: 0, gid: 0, umask: 0, operation: Ok(operation) }
    }

    /// On whose behalf.
    #[must_use]
    pub fn context(&self) -> Context<'static> {
        Context { asked_ms: Some(now_ms()), ..Context::fuse(self.uid, self.gid, self.umask, self.thread) }
    }
}

/// What the kernel offers in its first message.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) read_ahead_max: u32,
    pub(super) flags: u64,
}

/// What a call asks for.
#[derive(Debug)]
pub enum Operation<'a> {
    /// the first message of a connection
    Init(Offer),
    /// the last one
    Destroy,
    /// something about the call's node
    Node(NodeOperation<'a>),
    /// new attributes of the node
    Change {
        /// which
        changes: SetAttributes,
        /// the open file they are changed by
        handle: Option<u64>,
    },
    /// another name, in the directory that is the call's node
    Link {
        /// FUSE's number of the file
        node: u64,
        /// the name
        name: Name<'a>,
    },
    /// another name and another directory
    Rename {
        /// the old name, in the call's node
        name: Name<'a>,
        /// FUSE's number of the new directory
        new_parent: u64,
        /// the new name
        new_name: Name<'a>,
        /// exchange and the like
        flags: RenameFlags,
    },
    /// the last descriptor and mapping of an open file are gone
    Release {
        /// its handle
        handle: u64,
    },
    /// something about an open file
    File {
        /// its handle
        handle: u64,
        /// what
        operation: FileOperation<'a>,
    },
}

/// What is asked about the node of a call.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "as in `Request`")]
pub enum NodeOperation<'a> {
    Lookup { name: Name<'a> },
    Stat,
    Statx,
    ReadLink,
    SymbolicLink { name: Name<'a>, target: &'a [u8] },
    MakeNode { name: Name<'a>, file_type: FileType, permissions: u32, device: u32 },
    MakeDirectory { name: Name<'a>, permissions: u32 },
    Unlink { name: Name<'a> },
    RemoveDirectory { name: Name<'a> },
    Create { name: Name<'a>, permissions: u32, flags: OpenFlags },
    CreateNameless { permissions: u32, flags: OpenFlags },
    Open { flags: OpenFlags },
    OpenDirectory,
    Statfs,
    SetXattr { name: &'a [u8], value: &'a [u8], flags: XattrFlags },
    GetXattr { name: &'a [u8], room: usize },
    ListXattr { room: usize },
    RemoveXattr { name: &'a [u8] },
}

/// What is asked about an open file.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "as in `Request`")]
pub enum FileOperation<'a> {
    Read { offset: u64, length: usize },
    Write { offset: u64, data: &'a [u8], mode: WriteMode },
    Flush,
    Sync { durability: Durability },
    List { cookie: u64, room: usize },
    ListWithAttributes { cookie: u64, room: usize },
    Control { command: u32, input: &'a [u8], room: usize },
    Allocate { mode: AllocateMode, offset: u64, length: u64 },
    Seek { offset: u64, to: SeekTo },
    CopyRange { source_offset: u64, target: u64, target_offset: u64, length: u64, wide_answer: bool },
}

impl<'a> Message<'a> {
    /// Reads one message, which is all of `bytes`.
    ///
    /// # Errors
    /// [`Malformed`] when there is nobody to answer.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (header, body) = abi::InHeader::read_from_prefix(bytes).map_err(|_| Malformed)?;
        let extensions = usize::from(header.extensions) * 8;
        let body = body.len().checked_sub(extensions).and_then(|length| body.get(..length));
        let (Some(body), true) = (body, header.length as usize == bytes.len()) else {
            return Err(Malformed);
        };
        let mut fields = Fields::of(body);
        match header.opcode {
            opcode::FORGET => fields.forget(header.node).map(Message::Forget).map_err(|_| Malformed),
            opcode::BATCH_FORGET => fields.forget_many().map(Message::Forget).map_err(|_| Malformed),
            opcode::INTERRUPT => Ok(Message::Interrupt),
            opcode::NOTIFY_REPLY => Ok(Message::Nothing),
            number => {
                let operation = fields.operation(number);
                let (unique, node, thread) = (header.unique, header.node, header.thread);
                let (uid, gid, umask) = (header.uid, header.gid, fields.umask);
                Ok(Message::Call(Call { unique, node, thread, uid, gid, umask, operation }))
            }
        }
    }
}

/// References given back.
#[derive(Clone, Copy, Debug)]
pub enum Forgets<'a> {
    /// of one node, by its number, and how many
    One(u64, u64),
    /// of several, as the kernel sent them
    Many(&'a [u8]),
}

impl Iterator for Forgets<'_> {
    type Item = (u64, u64);

    /// The number of a node and how many references it loses.
    fn next(&mut self) -> Option<Self::Item> {
        match *self {
            Forgets::One(node, count) => {
                *self = Forgets::Many(&[]);
                Some((node, count))
            }
            Forgets::Many(bytes) => {
                let (one, rest) = abi::ForgetOne::read_from_prefix(bytes).ok()?;
                *self = Forgets::Many(rest);
                Some((one.node, one.count))
            }
        }
    }
}

#[cfg(test)]
mod tests;
