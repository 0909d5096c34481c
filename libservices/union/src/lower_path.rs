//! Paths in lower branches, with a bound on their length and on the memory that they take.
//!
//! Each node of a lower branch has its own path. A container that descends a deep tree step by step, and holds what it finds,
//! would make the service keep all these paths. Therefore their length is bounded, a directory in several branches has one path
//! as long as they are the same, and long paths are counted.

use poolfs_libservice::{Headroom, Result, fail};
use poolfs_types::Errno;
use std::ops::Deref;
use std::sync::Arc;

/// Most bytes of a path in a lower branch: what a program can name at once (`PATH_MAX`, without the zero).
pub(crate) const LOWER_PATH_MAX: usize = 4095;

/// A path of so many bytes is part of what any node takes.
const ORDINARY: usize = 256;

/// A path from the root of a lower branch, or of all of them, without a leading slash.
#[derive(Clone)]
pub(crate) struct LowerPath(Arc<Counted>);

struct Counted {
    bytes: Box<[u8]>,
    /// where long ones are counted, and those below this one
    room: Option<Arc<dyn Headroom>>,
}

impl Counted {
    /// What is counted of it.
    fn cost(&self) -> u64 {
        if self.bytes.len() > ORDINARY { self.bytes.len() as u64 } else { 0 }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let (Some(room), cost @ 1..) = (&self.room, self.cost()) {
            room.subtract(cost);
        }
    }
}

impl LowerPath {
    /// The root's. What is below it is counted there.
    pub fn root(room: Option<Arc<dyn Headroom>>) -> Self {
        LowerPath(Arc::new(Counted { bytes: Box::default(), room }))
    }

    fn new(bytes: Vec<u8>, room: Option<Arc<dyn Headroom>>) -> Result<Self> {
        if bytes.len() > LOWER_PATH_MAX {
            // Without a message: whoever likes may have it answered as often as he likes.
            return fail(Errno::ENAMETOOLONG);
        }
        let counted = Counted { bytes: bytes.into(), room };
        // What there is too little memory for is refused where nodes are: here it is counted only, so that this is seen in time.
        if let (Some(room), cost @ 1..) = (&counted.room, counted.cost()) {
            room.force(cost);
        }
        Ok(LowerPath(Arc::new(counted)))
    }

    /// That of a name in the directory.
    ///
    /// # Errors
    /// `ENAMETOOLONG`.
    pub fn child(&self, name: &[u8]) -> Result<Self> {
        Self::new(join(self, name), self.0.room.clone())
    }

    /// One that leads from the same root, whatever this one is.
    ///
    /// # Errors
    /// `ENAMETOOLONG`.
    pub fn beside(&self, parts: &[Vec<u8>]) -> Result<Self> {
        Self::new(parts.join(&b'/'), self.0.room.clone())
    }

    /// Becomes one with `other` if they are the same.
    pub fn share(&mut self, other: &Self) {
        if **self == **other {
            *self = other.clone();
        }
    }
}

impl Deref for LowerPath {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// `parent/name`, or `name` in the root.
pub(crate) fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() { name.to_vec() } else { [parent, b"/", name].concat() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[derive(Default)]
    struct Bytes(AtomicU64);

    impl Headroom for Bytes {
        fn add(&self, _amount: u64) -> bool {
            false
        }

        fn force(&self, amount: u64) {
            self.0.fetch_add(amount, Ordering::Relaxed);
        }

        fn subtract(&self, amount: u64) {
            self.0.fetch_sub(amount, Ordering::Relaxed);
        }
    }

    #[test]
    fn long_paths_are_counted_once_and_bounded() {
        let bytes = Arc::new(Bytes::default());
        let counted = || bytes.0.load(Ordering::Relaxed);
        let root = LowerPath::root(Some(Arc::clone(&bytes) as Arc<dyn Headroom>));
        let short = root.child(&[b'a'; 255]).expect("short");
        assert_eq!((short.len(), counted()), (255, 0));
        let long = short.child(b"bc").expect("long");
        assert_eq!((long.len(), counted()), (258, 258));
        let mut same = root.beside(&[vec![b'a'; 255], b"bc".to_vec()]).expect("long");
        assert_eq!(counted(), 2 * 258);
        same.share(&long);
        assert_eq!(counted(), 258);
        drop(long);
        assert_eq!(counted(), 258);
        drop(same);
        assert_eq!(counted(), 0);
        let mut deep = root.clone();
        while deep.len() + 256 <= LOWER_PATH_MAX {
            deep = deep.child(&[b'd'; 255]).expect("not too long");
        }
        assert_eq!((deep.len(), counted()), (LOWER_PATH_MAX, LOWER_PATH_MAX as u64));
        assert!(deep.child(b"d").is_err_and(|error| error == Errno::ENAMETOOLONG));
        assert!(root.beside(&[deep.to_vec(), b"d".to_vec()]).is_err_and(|error| error == Errno::ENAMETOOLONG));
        drop(deep);
        assert_eq!(counted(), 0);
    }
}
