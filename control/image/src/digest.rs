//! Digests of content: `sha256:` and 64 hexadecimal digits.

use crate::{ImageError, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::io::Read;

/// The SHA-256 of some content, safe as a file name by its [`Digest::hex`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// Understand `sha256:...`.
    pub fn parse(text: &str) -> Result<Digest> {
        let hex = text.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
            Ok(Digest(hex.to_owned()))
        } else {
            Err(ImageError::description("digest", format!("{text:?} is not sha256: and 64 hexadecimal digits")))
        }
    }

    /// Of some bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Digest {
        Self::finished(Sha256::new_with_prefix(bytes))
    }

    /// The 64 hexadecimal digits.
    #[must_use]
    pub fn hex(&self) -> &str {
        &self.0
    }

    pub(crate) fn finished(hasher: Sha256) -> Digest {
        Digest(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = ImageError;
    fn try_from(text: String) -> Result<Digest> {
        Digest::parse(&text)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> String {
        digest.to_string()
    }
}

/// Computes the digest of everything that is read through it.
pub(crate) struct HashingReader<R> {
    inner: R,
    hasher: Sha256,
    bytes: u64,
}

impl<R: Read> HashingReader<R> {
    pub(crate) fn new(inner: R) -> Self {
        HashingReader { inner, hasher: Sha256::new(), bytes: 0 }
    }

    /// Read what is left, then tell digest and length of the whole.
    pub(crate) fn finish(mut self) -> std::io::Result<(Digest, u64, R)> {
        std::io::copy(&mut self, &mut std::io::sink())?;
        Ok((Digest::finished(self.hasher), self.bytes, self.inner))
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hasher.update(&buffer[..count]);
        self.bytes += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_sha256_is_taken() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::parse(empty).expect("valid"), Digest::of(b""));
        assert_eq!(Digest::of(b"").to_string(), empty);
        for bad in ["", "sha256:", "sha512:00", &empty.to_uppercase(), "sha256:../../etc/passwd", &format!("{empty}0")]
        {
            assert!(Digest::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_whole_is_hashed_also_what_nobody_read() {
        let mut reader = HashingReader::new(&b"abcdef"[..]);
        reader.read_exact(&mut [0; 2]).expect("read");
        let (digest, bytes, _) = reader.finish().expect("read");
        assert_eq!((digest, bytes), (Digest::of(b"abcdef"), 6));
    }
}
