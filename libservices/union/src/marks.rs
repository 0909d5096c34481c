//! The extended attributes that mark what a directory tree alone cannot express: whiteouts, opaque directories, redirects,
//! sketches. docs/formats.md describes each.

use poolfs_libservice::{Error, Libservice, Result, fail};
use poolfs_types::{Attributes, Caller, Errno, FileType, Name, NodeId, XattrFlags};

pub(crate) const WHITEOUT: &[u8] = b"trusted.overlay.whiteout";
pub(crate) const OPAQUE: &[u8] = b"trusted.overlay.opaque";
pub(crate) const IMPURE: &[u8] = b"trusted.overlay.impure";
pub(crate) const REDIRECT: &[u8] = b"trusted.overlay.redirect";
pub(crate) const METACOPY: &[u8] = b"trusted.overlay.metacopy";
pub(crate) const LINKS: &[u8] = b"trusted.overlay.nlink";
/// Instead of `OPAQUE` = `x`, on a directory without lower ones, which may be `y` already.
pub(crate) const WHITEOUTS: &[u8] = b"trusted.poolfs.whiteouts";
pub(crate) const ORIGIN: &[u8] = b"trusted.poolfs.origin";
pub(crate) const SKETCH: &[u8] = b"trusted.poolfs.sketch";

/// Most components a redirect may have: as many as a path of `PATH_MAX` bytes holds.
const REDIRECT_COMPONENTS_MAX: usize = 2048;

/// Whether users never see the attribute `name`.
pub(crate) fn hidden(name: &[u8]) -> bool {
    name.starts_with(b"trusted.overlay.") || name.starts_with(b"trusted.poolfs.")
}

/// Where the lower directories of a renamed directory are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Redirect {
    /// another name in the same parent
    Sibling(Vec<u8>),
    /// components from the root of the lower branches
    Path(Vec<Vec<u8>>),
}

impl Redirect {
    pub fn parse(value: &[u8]) -> Result<Self> {
        let bad = || Error::new(Errno::EIO, format!("redirect \"{}\" is no path", value.escape_ascii()));
        let component = |bytes: &[u8]| Name::new(bytes).map(|name| name.as_bytes().to_vec()).map_err(|_| bad());
        match value.strip_prefix(b"/") {
            Some(path) => {
                let parts: Vec<_> = path.split(|&byte| byte == b'/').map(component).collect::<Result<_>>()?;
                if parts.len() > REDIRECT_COMPONENTS_MAX { Err(bad()) } else { Ok(Redirect::Path(parts)) }
            }
            None => component(value).map(Redirect::Sibling),
        }
    }
}

/// What the marks of one object of a branch say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Marks {
    pub whiteout: bool,
    /// a directory that hides what is below it
    pub opaque: bool,
    /// a directory that may hold whiteouts in xattr form
    pub whiteouts: bool,
    pub impure: bool,
    pub redirect: Option<Redirect>,
    pub metacopy: bool,
    pub sketch: bool,
    pub origin: bool,
    pub links: bool,
}

impl Marks {
    /// Reads the marks of `node`; a layer without xattrs has none.
    pub fn read(layer: &dyn Libservice, node: NodeId) -> Result<Self> {
        let mut marks = Marks::default();
        let names = match layer.listxattr(&Caller::ROOT, node) {
            Ok(names) => names,
            Err(error) if error == Errno::EOPNOTSUPP => return Ok(marks),
            Err(error) => return Err(error),
        };
        for name in names.iter().filter(|name| hidden(name)) {
            match name.as_slice() {
                WHITEOUT => marks.whiteout = true,
                OPAQUE => {
                    let value = layer.getxattr(&Caller::ROOT, node, OPAQUE)?;
                    marks.opaque = value == b"y";
                    marks.whiteouts |= value == b"x";
                }
                WHITEOUTS => marks.whiteouts = true,
                IMPURE => marks.impure = true,
                REDIRECT => {
                    marks.redirect = Some(Redirect::parse(&layer.getxattr(&Caller::ROOT, node, REDIRECT)?)?);
                }
                METACOPY => marks.metacopy = true,
                ORIGIN => marks.origin = true,
                SKETCH => marks.sketch = true,
                LINKS => marks.links = true,
                _ => {}
            }
        }
        Ok(marks)
    }
}

/// Whether an object of a lower branch is a whiteout. Its node must be held by the caller.
pub(crate) fn is_lower_whiteout(layer: &dyn Libservice, node: NodeId, attributes: &Attributes) -> Result<bool> {
    match attributes.file_type {
        FileType::CharDevice => Ok(attributes.device == 0),
        _ => is_xattr_whiteout(layer, node, attributes),
    }
}

/// Whether an object is a whiteout in xattr form.
pub(crate) fn is_xattr_whiteout(layer: &dyn Libservice, node: NodeId, attributes: &Attributes) -> Result<bool> {
    if attributes.file_type != FileType::Regular || attributes.size != 0 {
        return Ok(false);
    }
    match layer.getxattr(&Caller::ROOT, node, WHITEOUT) {
        Ok(_) => Ok(true),
        Err(error) if error == Errno::ENODATA || error == Errno::EOPNOTSUPP => Ok(false),
        Err(error) => Err(error),
    }
}

/// Sets a mark on an object of the upper branch.
pub(crate) fn set(upper: &dyn Libservice, node: NodeId, name: &[u8], value: &[u8]) -> Result<()> {
    upper.setxattr(&Caller::ROOT, node, name, value, XattrFlags::empty())
}

/// Removes a mark, which may be absent.
pub(crate) fn clear(upper: &dyn Libservice, node: NodeId, name: &[u8]) -> Result<()> {
    match upper.removexattr(&Caller::ROOT, node, name) {
        Err(error) if error != Errno::ENODATA => Err(error),
        _ => Ok(()),
    }
}

/// Refuses to show or change a hidden attribute.
pub(crate) fn refuse_hidden<T>(name: &[u8], errno: Errno, otherwise: impl FnOnce() -> Result<T>) -> Result<T> {
    if hidden(name) { fail(errno) } else { otherwise() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_checked() {
        assert_eq!(Redirect::parse(b"name").unwrap(), Redirect::Sibling(b"name".to_vec()));
        assert_eq!(Redirect::parse(b"/a/b").unwrap(), Redirect::Path(vec![b"a".to_vec(), b"b".to_vec()]));
        for bad in [&b""[..], b"/", b"a/b", b"/a//b", b"/../a", b"."] {
            assert!(Redirect::parse(bad).is_err_and(|error| error == Errno::EIO), "{bad:?}");
        }
    }
}
