//! What reading any stored structure takes: parts of its bytes, and words for what is wrong with them.

/// What is wrong with a stored structure, in words.
pub(crate) type Cause = String;

/// As many bytes as the result has, from `at` on. Panics behind the end.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
