//! Bounds on what an image may cost, and how its reading is reported.

/// Bounds on one image.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most layers.
    pub layers: usize,
    /// Most bytes of one layer's uncompressed archive.
    pub layer_bytes: u64,
    /// Most members of one layer's archive.
    pub layer_members: u64,
    /// Most bytes of one JSON document.
    pub document_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { layers: 256, layer_bytes: 256 << 30, layer_members: 8 << 20, document_bytes: 8 << 20 }
    }
}

/// Told while content is read.
pub trait Progress {
    /// Reading of something with so many bytes begins.
    fn begin(&mut self, what: &str, bytes: u64);
    /// So many bytes more were read.
    fn advance(&mut self, bytes: u64);
    /// The reading has ended.
    fn end(&mut self);
    /// Whether it should be given up.
    fn is_cancelled(&mut self) -> bool {
        false
    }
}

/// Nobody is told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _what: &str, _bytes: u64) {}
    fn advance(&mut self, _bytes: u64) {}
    fn end(&mut self) {}
}
