//! The name of an instance, in the fixed size that a session's slot has for it.

/// Longest name of an instance.
pub const NAME_MAX: usize = 64;

/// The name of an instance; all zeros: of none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct InstanceName {
    pub(crate) hash: u64,
    length: u64,
    bytes: [u8; NAME_MAX],
}

impl InstanceName {
    /// No name.
    pub const NONE: Self = Self { hash: 0, length: 0, bytes: [0; NAME_MAX] };

    /// A name that an instance can have.
    #[must_use]
    pub fn new(name: &[u8]) -> Option<Self> {
        if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
            return None;
        }
        let mut new = Self { length: name.len() as u64, ..Self::NONE };
        new.bytes.get_mut(..name.len())?.copy_from_slice(name);
        // FNV-1a; never 0, which stands for a slot without a name.
        let step = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        new.hash = name.iter().fold(0xcbf2_9ce4_8422_2325, step) | 1;
        Some(new)
    }

    /// Whether it is none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.length == 0
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length as usize).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_are_none() {
        assert_eq!(InstanceName::new(b"pool-1").expect("a name").bytes(), b"pool-1");
        assert_ne!(InstanceName::new(b"pool-1"), InstanceName::new(b"pool-2"));
        for bad in [&b""[..], b"a/b", b"a\0", &[b'x'; NAME_MAX + 1]] {
            assert_eq!(InstanceName::new(bad), None);
        }
        assert!(InstanceName::NONE.is_none());
    }
}
