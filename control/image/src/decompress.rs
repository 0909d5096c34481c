//! Decompression of a stream whose format (plain, gzip, zstd) is found by its first bytes.

use std::io::{BufRead, BufReader, Error, Read};

/// Bytes read from a file at a time.
const BUFFER_BYTES: usize = 256 << 10;
const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const XZ_MAGIC: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z'];
const BZIP2_MAGIC: &[u8] = b"BZh";

/// A stream uncompressed, whatever it was; `inner` gives the compressed one back.
pub(crate) enum Decompressor<R: Read> {
    Plain(BufReader<R>),
    Gzip(Box<flate2::bufread::MultiGzDecoder<BufReader<R>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, BufReader<R>>>),
}

impl<R: Read> Decompressor<R> {
    pub(crate) fn new(reader: R) -> std::io::Result<Self> {
        let mut reader = BufReader::with_capacity(BUFFER_BYTES, reader);
        let first = reader.fill_buf()?;
        for (magic, name) in [(XZ_MAGIC, "xz"), (BZIP2_MAGIC, "bzip2")] {
            if first.starts_with(magic) {
                return Err(Error::other(format!("{name} compression is not supported: use gzip, zstd or none")));
            }
        }
        Ok(if first.starts_with(GZIP_MAGIC) {
            Decompressor::Gzip(Box::new(flate2::bufread::MultiGzDecoder::new(reader)))
        } else if first.starts_with(ZSTD_MAGIC) {
            Decompressor::Zstd(Box::new(zstd::stream::read::Decoder::with_buffer(reader)?))
        } else {
            Decompressor::Plain(reader)
        })
    }

    /// The compressed stream, with what was buffered of it.
    pub(crate) fn into_inner(self) -> BufReader<R> {
        match self {
            Decompressor::Plain(reader) => reader,
            Decompressor::Gzip(decoder) => decoder.into_inner(),
            Decompressor::Zstd(decoder) => decoder.finish(),
        }
    }
}

impl<R: Read> Read for Decompressor<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Decompressor::Plain(reader) => reader.read(buffer),
            Decompressor::Gzip(decoder) => decoder.read(buffer),
            Decompressor::Zstd(decoder) => decoder.read(buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn through(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
        let mut plain = Vec::new();
        Decompressor::new(bytes)?.read_to_end(&mut plain)?;
        Ok(plain)
    }

    #[test]
    fn every_form_is_recognised() {
        let text = b"the same text".repeat(1000);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).expect("in memory");
        let mut doubled = gzip.finish().expect("in memory");
        doubled.extend_from_within(..);
        assert_eq!(through(&doubled).expect("two members"), text.repeat(2));
        let zstd = zstd::encode_all(&text[..], 1).expect("in memory");
        assert_eq!(through(&zstd).expect("zstd"), text);
        assert_eq!(through(&text).expect("plain"), text);
        assert_eq!(through(b"").expect("empty"), b"");
        assert!(through(b"BZh9...").expect_err("bzip2").to_string().contains("bzip2"));
        assert!(through(&zstd[..zstd.len() / 2]).is_err());
    }
}
