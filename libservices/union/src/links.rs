//! Link counts of files in the index: hard-linked lower files of which some names have an upper link and some have not.
//!
//! The count is stored relative to the inode whose own count does not change with the step that follows, so that it is right
//! after a crash on either side of that step: relative to the lower inode before an existing name gets its upper link, relative
//! to the upper inode before a name is made or removed.

use crate::Union;
use crate::format::Origin;
use crate::marks;
use poolfs_libservice::{Error, Held, Result};
use poolfs_types::{Attributes, Caller, Errno};

/// Whether a lower object may have names that nobody has told of.
pub(crate) fn has_several_names(lower: &Attributes) -> bool {
    !lower.is_directory() && lower.links > 1
}

/// Most links a file can have more or less than an inode.
const DELTA_MAX: i64 = u32::MAX as i64;

/// The stored link count `value`: what it is relative to (`U` or `L`), and by how much it differs.
pub(crate) fn parse(value: &[u8]) -> Option<(u8, i64)> {
    let (&base, number) = value.split_first()?;
    let delta = std::str::from_utf8(number).ok()?.parse().ok()?;
    (matches!(base, b'U' | b'L') && (-DELTA_MAX..=DELTA_MAX).contains(&delta)).then_some((base, delta))
}

/// The link count of an indexed upper file less that of its upper inode.
pub(crate) fn load(union: &Union, held: &Held, upper: &Attributes, origin: Option<&Origin>) -> Result<i64> {
    let value = union.upper.getxattr(&Caller::ROOT, held.node(), marks::LINKS)?;
    match parse(&value) {
        Some((b'U', delta)) => Ok(delta),
        Some((_, delta)) => {
            let lower = match origin.map(|origin| union.lower_of(origin)).transpose()? {
                Some(Ok((_, attributes))) => i64::from(attributes.links),
                _ => i64::from(upper.links),
            };
            Ok(lower + delta - i64::from(upper.links))
        }
        None => Err(Error::new(Errno::EIO, "the link count of an indexed file is unreadable")),
    }
}

/// Stores the count relative to the upper inode.
pub(crate) fn store_upper(union: &Union, held: &Held, delta: i64) -> Result<()> {
    marks::set(&*union.upper, held.node(), marks::LINKS, format!("U{delta:+}").as_bytes())
}

/// Stores the count `links` relative to the lower inode, which has `lower_links`.
pub(crate) fn store_lower(union: &Union, held: &Held, links: i64, lower_links: u32) -> Result<()> {
    let delta = links - i64::from(lower_links);
    marks::set(&*union.upper, held.node(), marks::LINKS, format!("L{delta:+}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_written() {
        assert_eq!(parse(b"U+3"), Some((b'U', 3)));
        assert_eq!(parse(b"L-2"), Some((b'L', -2)));
        for bad in [&b""[..], b"X+1", b"U", b"U+x", b"U+4294967296", b"L-9223372036854775808"] {
            assert_eq!(parse(bad), None);
        }
    }
}
