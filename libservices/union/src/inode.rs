//! The inode numbers that a union shows.

use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// The layer id of the upper branch in inode numbers.
pub(crate) const UPPER: &str = "";

/// The number shown for inode `inode` of the layer `layer_id`: the same at every mount, whatever the order of the
/// branches, and different for different layers but for a chance of 2^-63.
pub(crate) fn shown(layer_id: &str, inode: u64) -> u64 {
    let mut bytes = Vec::with_capacity(layer_id.len() + 9);
    bytes.extend_from_slice(layer_id.as_bytes());
    bytes.push(0);
    bytes.extend_from_slice(&inode.to_le_bytes());
    match xxh3_64(&bytes) & (u64::MAX >> 1) {
        small @ 0..=1 => small + 2,
        number => number,
    }
}

/// Whether [`shown`] can say this number. Names that show 0 are passed over by who lists them.
pub(crate) fn can_be_shown(inode: u64) -> bool {
    inode > 1 && inode >> 63 == 0
}

/// The name in the index of a lower file that has several links.
pub(crate) fn index_key(layer_id: &str, attributes: &poolfs_types::Attributes) -> String {
    let mut bytes = Vec::with_capacity(layer_id.len() + 29);
    bytes.extend_from_slice(layer_id.as_bytes());
    bytes.push(0);
    bytes.extend_from_slice(&attributes.inode.to_le_bytes());
    bytes.extend_from_slice(&attributes.size.to_le_bytes());
    bytes.extend_from_slice(&attributes.modified.seconds.to_le_bytes());
    bytes.extend_from_slice(&attributes.modified.nanoseconds.to_le_bytes());
    format!("{:032x}", xxh3_128(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_do_not_collide() {
        let mut seen = std::collections::HashSet::new();
        for layer in [UPPER, "a", "b", "a\u{1}"] {
            for inode in 0..2000 {
                let number = shown(layer, inode);
                assert!(can_be_shown(number));
                assert!(seen.insert(number));
            }
        }
    }
}
