//! Size limits that clients and service share.

/// Bytes of one block: the unit of copy-on-write, caching and block maps.
pub const BLOCK_SIZE: usize = 4096;

/// `log2` of [`BLOCK_SIZE`].
pub const BLOCK_SHIFT: u32 = 12;

/// Most bytes of one name, without a terminator.
pub const NAME_MAX: usize = 255;

/// Most bytes of one path in a request, without a terminator (Linux's PATH_MAX less the terminator).
pub const PATH_MAX: usize = 4095;

/// Most symbolic links one path may lead through (Linux's MAXSYMLINKS).
pub const SYMLINKS_MAX: usize = 40;

/// Most bytes of one extended attribute's value (Linux's XATTR_SIZE_MAX).
pub const XATTR_VALUE_MAX: usize = 65536;

/// Files that grow beyond this are written through the cache while the writer waits, so that the branch decides how large a file may be.
pub const CACHED_SIZE_MAX: u64 = 1 << 42;

/// Most bytes of a file: offsets are signed 64-bit numbers.
pub const FILE_SIZE_MAX: u64 = i64::MAX as u64;

/// What Linux takes for a node of the tree in which it finds the pages of a file in memory, bytes: `struct xa_node` has 576 to 584, and 14 are in
/// two pages (`radix_tree_node` in `/proc/slabinfo`). Pages far from each other have up to one on each level of the tree for themselves.
pub const PAGE_TREE_NODE_BYTES: u64 = 592;

/// Pages of a leaf of that tree, and nodes below any other of its nodes (`XA_CHUNK_SIZE`).
pub const PAGE_TREE_FANOUT: u64 = 64;
