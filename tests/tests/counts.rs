//! The copy-up counters of `status` agree with the bitmaps and the holes of the upper branch.

use poolfs_tests::{Pool, Way, isolated, populate};
use rustix::fs::{SeekFrom, seek};
use serde_json::Value;
use std::fs::{self, File};
use std::path::Path;

const BLOCK: u64 = 4096;

/// Bits set in a bitmap as docs/formats.md draws it.
fn moved_blocks(bitmap: &Path) -> u64 {
    let bytes = fs::read(bitmap).expect("readable");
    bytes
        .chunks(512)
        .filter(|sector| sector.starts_with(b"PFBM"))
        .map(|sector| sector[32..].iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>())
        .sum()
}

/// Blocks of a sparse file that are no hole.
fn data_blocks(path: &Path) -> u64 {
    let file = File::open(path).expect("readable");
    let (mut at, mut blocks) = (0, 0);
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(data)).expect("a hole ends every file");
        blocks += at.div_ceil(BLOCK) - data / BLOCK;
    }
    blocks
}

fn number(value: &Value, key: &str) -> Option<u64> {
    match value {
        Value::Object(map) => {
            map.get(key).and_then(Value::as_u64).or_else(|| map.values().find_map(|v| number(v, key)))
        }
        Value::Array(items) => items.iter().find_map(|item| number(item, key)),
        _ => None,
    }
}

#[test]
fn status_counts_what_is_in_the_bitmaps_and_on_the_disk() {
    isolated("status_counts_what_is_in_the_bitmaps_and_on_the_disk", |folder| {
        populate(&folder.join("lower"));
        let upper = folder.join("upper");
        fs::create_dir_all(&upper).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_union(&folder.join("mnt"), &upper, &[&folder.join("lower")]);
        let big = mount.path().join("usr/share/doc/big");
        // One byte, bytes across a boundary, whole blocks, and one block twice: 1 + 2 + 3 + 1 blocks.
        let script = format!(
            "f={}; w() {{ dd if=/dev/zero of=$f bs=1 seek=$1 count=$2 conv=notrunc 2>/dev/null; }}
             w 5000 1; w 40950 20; w 204800 12288; w 409700 3; w 409600 9; sync $f",
            big.display()
        );
        let _ = pool.shell(Way::Library, &script).expect("writing");
        let status = pool.status();
        let bitmaps: Vec<_> = fs::read_dir(upper.join(".poolfs/bitmaps")).expect("readable").flatten().collect();
        assert_eq!(bitmaps.len(), 1, "one sketch has one bitmap");
        let counted = moved_blocks(&bitmaps[0].path());
        assert_eq!(counted, 7, "bits in the bitmap");
        assert_eq!(data_blocks(&upper.join("usr/share/doc/big")), counted, "blocks on the disk");
        assert_eq!(number(&status, "blocks_moved"), Some(counted), "{status}");
        assert_eq!(number(&status, "sketches"), Some(1), "{status}");
        drop(mount);
    });
}
