//! The note of an exchange of names that takes several renames ([`exchange`](crate::exchange)), and what is done with it after a crash.
//!
//! The note says between which places, and is on disk before the first rename. A union that is opened after a crash sees from what is where how far
//! the exchange came, and undoes or completes it before anything else is looked at. Names have to reach the disk in the order in which they
//! changed, as they do on CephFS.

use crate::format::DIRECTORY;
use crate::upper_names::find;
use poolfs_libservice::{Branch, Error, Held, Opened, Result};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, OpenFlags, RenameFlags};

const ROOT: &Caller = &Caller::ROOT;
/// The note, in `.poolfs`.
pub(crate) const NOTE: &[u8] = b"exchange";
/// What is on its way, beside it.
pub(crate) const ASIDE: &[u8] = b"exchanged";
/// How a note begins; the two paths from the branch's root follow, each with a zero behind it.
const HEAD: &[u8] = b"poolfs-exchange 1\n";
/// Most bytes of a note.
const NOTE_BYTES_MAX: usize = 1 << 20;

/// The note of an exchange between two paths of the branch.
///
/// # Errors
/// `ENAMETOOLONG` when they are too long for one.
pub(crate) fn text([first, second]: [Vec<u8>; 2]) -> Result<Vec<u8>> {
    let text = [HEAD, &first, b"\0", &second, b"\0"].concat();
    if text.len() > NOTE_BYTES_MAX {
        return Err(Error::new(Errno::ENAMETOOLONG, "the paths are too long for an exchange on this backend"));
    }
    Ok(text)
}

/// Whether the backend exchanges names in one step. In `top`, nothing has the names that are tried.
pub(crate) fn is_offered(upper: &Branch, top: &Held) -> Result<bool> {
    let (one, other) = (Name::new(NOTE)?, Name::new(ASIDE)?);
    match upper.rename(ROOT, top.node(), one, top.node(), other, RenameFlags::EXCHANGE) {
        Err(error) if error == Errno::EINVAL => Ok(false),
        Err(error) if error != Errno::ENOENT => Err(error),
        _ => Ok(true),
    }
}

/// Completes or undoes what a crash interrupted. `top` is the branch's `.poolfs`.
///
/// # Errors
/// `EIO` for a note that no union wrote, with something on its way of which nobody knows where it belongs.
pub(crate) fn complete(upper: &Branch, top: &Held) -> Result<()> {
    let Some((note, attributes)) = find(upper, top.node(), NOTE)? else { return Ok(()) };
    if find(upper, top.node(), ASIDE)?.is_some() {
        let [first, second] = read(upper, &note, &attributes)?;
        let is_free =
            |(directory, name): &(Held, &[u8])| find(upper, directory.node(), name).map(|found| found.is_none());
        let Some(to) = place(upper, &second)? else { return Err(damaged()) };
        // It came from the second place. As long as that is free, nothing else has moved. Else it goes to the first, unless what was to be there
        // has been given up.
        let (directory, name) = match place(upper, &first)? {
            _ if is_free(&to)? => to,
            Some(from) if is_free(&from)? => from,
            // What was to go with it is gone already. It is swept with all else there.
            None if is_in_work(&first) => (find(upper, top.node(), b"work")?.ok_or_else(damaged)?.0, ASIDE),
            _ => return Err(damaged()),
        };
        upper.rename(ROOT, top.node(), Name::new(ASIDE)?, directory.node(), Name::new(name)?, RenameFlags::empty())?;
    }
    upper.unlink(ROOT, top.node(), Name::new(NOTE)?)
}

/// Whether a path leads to where nothing stays.
fn is_in_work(path: &[u8]) -> bool {
    path.strip_prefix(DIRECTORY).is_some_and(|rest| rest.starts_with(b"/work/"))
}

fn damaged() -> Error {
    let cause = "its .poolfs/exchange is damaged: move .poolfs/exchanged to where it belongs, and remove the former";
    Error::new(Errno::EIO, cause)
}

fn read(upper: &Branch, note: &Held, attributes: &Attributes) -> Result<[Vec<u8>; 2]> {
    if attributes.file_type != FileType::Regular || attributes.size > NOTE_BYTES_MAX as u64 {
        return Err(damaged());
    }
    let mut text = vec![0; attributes.size as usize];
    let file = Opened::file(upper, ROOT, note.node(), OpenFlags::READ_ONLY)?;
    let count = file.read_full(0, &mut text)?;
    let paths = text[..count].strip_prefix(HEAD).ok_or_else(damaged)?;
    let is_path = |path: &[u8]| path.split(|&byte| byte == b'/').all(|name| Name::new(name).is_ok());
    match paths.split(|&byte| byte == 0).collect::<Vec<_>>()[..] {
        [first, second, b""] if is_path(first) && is_path(second) => Ok([first.to_vec(), second.to_vec()]),
        _ => Err(damaged()),
    }
}

/// The directory that a path's last name is in; nothing where the path leads through none.
fn place<'a>(upper: &Branch, path: &'a [u8]) -> Result<Option<(Held, &'a [u8])>> {
    let names: Vec<&[u8]> = path.split(|&byte| byte == b'/').collect();
    let Some((last, above)) = names.split_last() else { return Ok(None) };
    let mut directory = Held::new(upper, NodeId::ROOT);
    for name in above {
        match find(upper, directory.node(), name)? {
            Some((held, attributes)) if attributes.is_directory() => directory = held,
            _ => return Ok(None),
        }
    }
    Ok(Some((directory, last)))
}
