//! Upper branches in every storage format, over real mounts.
//!
//! A file's content does not depend on how it is stored, a reader that knows only docs/formats.md finds it, and a compact file takes the
//! space of what was written.

use poolfs_tests::{Pool, Way, isolated, name_of, run, run_within, workspace};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const FORMATS: [&str; 4] = ["sparse", "bcow", "bcow-performance", "bcow-space"];

/// Changes the files of the directory in its first argument at random, as the second says, and makes half of them durable.
const CHANGES: &str = r#"
import os, random, sys
directory, seed = sys.argv[1], int(sys.argv[2])
random.seed(seed)
names = sorted(os.listdir(directory))
for step in range(400):
    path = os.path.join(directory, random.choice(names))
    descriptor = os.open(path, os.O_RDWR)
    size = os.fstat(descriptor).st_size
    kind = random.randrange(10)
    if kind == 0:
        os.ftruncate(descriptor, random.randrange(size + 100000))
    elif kind == 1:
        os.fsync(descriptor)
    else:
        length = random.choice([1, 100, 4096, 5000, 70000])
        at = random.randrange(max(size, 1))
        os.pwrite(descriptor, random.randbytes(length), at)
    os.close(descriptor)
"#;

/// Files of some sizes in `directory`, the same for the same directory name.
fn make_files(directory: &Path) {
    fs::create_dir_all(directory).expect("a folder");
    for (number, size) in [0_usize, 10, 4096, 100_000, 1 << 20, 9 << 20].into_iter().enumerate() {
        let content: Vec<u8> = (0..size).map(|at| (at / 7 * (number + 3)) as u8).collect();
        fs::write(directory.join(format!("f{number}")), content).expect("a file");
    }
}

fn contents(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut names: Vec<_> =
        fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry").path()).collect();
    names.sort();
    names.into_iter().map(|path| (path.file_name().expect("a name").into(), fs::read(&path).expect("read"))).collect()
}

/// What the reader finds in the branches.
fn read_by_format(upper: &Path, lower: &Path, name: &Path, folder: &Path) -> Vec<u8> {
    let to = folder.join("read");
    let mut command = Command::new("sh");
    let reader = workspace().join("tests/readers/upper.py");
    command.args(["-c", "exec python3 \"$1\" \"$2\" \"$3\" \"$4\" >\"$5\"", "sh"]).arg(reader);
    let _ = run_within(command.arg(upper).arg(lower).arg(name).arg(&to), Duration::from_secs(120)).expect("the reader");
    fs::read(to).expect("what it found")
}

#[test]
fn content_is_the_same_in_every_format_and_found_by_another_reader() {
    isolated("content_is_the_same_in_every_format_and_found_by_another_reader", |folder| {
        let script = folder.join("changes.py");
        fs::write(&script, CHANGES).expect("a file");
        let (lower, disk) = (folder.join("lower"), folder.join("disk"));
        [&lower, &disk].into_iter().for_each(|directory| make_files(directory));
        for seed in ["1", "2"] {
            let _ = run(Command::new("python3").arg(&script).arg(&disk).arg(seed)).expect("on the disk");
        }
        let expected = contents(&disk);
        let pool = Pool::create(folder, "64M");
        for format in FORMATS {
            let upper = folder.join(format!("upper-{format}"));
            fs::create_dir(&upper).expect("a folder");
            let at = folder.join("mnt");
            for (seed, way, format) in [("1", Way::Library, format), ("2", Way::Fuse, "sparse")] {
                let mount = pool.mount_stored(&at, &upper, &lower, format);
                let command = format!("python3 {} {} {seed}", script.display(), at.display());
                let _ = pool.shell(way, &command).expect("changed");
                let _ = mount.unmount().expect("unmounted");
            }
            let mount = pool.mount_stored(&at, &upper, &lower, "bcow-space");
            assert!(contents(&at) == expected, "{format}");
            let _ = mount.unmount().expect("unmounted");
            for (name, content) in &expected {
                assert!(read_by_format(&upper, &lower, name, folder) == *content, "{format}: {}", name.display());
            }
        }
    });
}

#[test]
fn a_touched_block_of_a_file_takes_few() {
    isolated("a_touched_block_of_a_file_takes_few", |folder| {
        const FILES: u64 = 200;
        let lower = folder.join("lower");
        fs::create_dir(&lower).expect("a folder");
        for number in 0..FILES {
            fs::write(lower.join(number.to_string()), vec![number as u8; 1 << 20]).expect("a file");
        }
        let pool = Pool::create(folder, "64M");
        for format in FORMATS {
            let upper = folder.join(format!("upper-{format}"));
            fs::create_dir(&upper).expect("a folder");
            let mount = pool.mount_stored(&folder.join("mnt"), &upper, &lower, format);
            let touch = format!(
                "cd {} && for f in *; do printf x | dd of=$f bs=1 seek=$((f * 4096)) conv=notrunc status=none; done",
                mount.path().display()
            );
            let _ = pool.shell(Way::Fuse, &touch).expect("touched");
            let _ = mount.unmount().expect("unmounted");
            let taken = |directory: &Path| -> u64 {
                let entries = fs::read_dir(directory).expect("listed").map(|entry| entry.expect("an entry"));
                entries
                    .map(|entry| entry.metadata().expect("attributes"))
                    .filter(|a| a.is_file())
                    .map(|a| a.blocks() * 512)
                    .sum()
            };
            let taken = taken(&upper) + taken(&upper.join(".poolfs/bitmaps"));
            // The block itself, the file's attributes and the bitmap.
            assert!(taken <= 3 * 4096 * FILES, "{format}: {taken} bytes for {FILES} files");
        }
    });
}

#[test]
fn what_was_synced_survives_the_service_in_every_format() {
    isolated("what_was_synced_survives_the_service_in_every_format", |folder| {
        let lower = folder.join("lower");
        make_files(&lower);
        for format in FORMATS {
            let upper = folder.join(format!("upper-{format}"));
            fs::create_dir(&upper).expect("a folder");
            let at = folder.join("mnt");
            let pool = Pool::named(folder, &format!("{}-{format}", name_of(folder)), "64M");
            let mount = pool.mount_stored(&at, &upper, &lower, format);
            let write = |text: &str, sync: &str| {
                let command = format!(
                    "printf {text} | dd of={}/f5 bs=1 seek=5000000 conv=notrunc{sync} status=none",
                    at.display()
                );
                let _ = pool.shell(Way::Library, &command).expect("written");
            };
            write("promised", ",fsync");
            write("written", "");
            pool.kill_service();
            mount.keep();
            // A new service takes the dead mount away.
            let [at_text, upper, lower_text] = [&at, &upper, &lower].map(|path| path.to_str().expect("text"));
            let again =
                ["mount", pool.name(), at_text, "--upper", upper, "--lower", lower_text, "--upper-format", format];
            let _ = pool.poolfs(&again).expect("mounted again");
            let content = fs::read(at.join("f5")).expect("read");
            let seen = &content[5_000_000..5_000_008];
            assert!(seen == b"promised" || seen == b"writtend", "{format}: {}", seen.escape_ascii());
            assert_eq!(content.len(), 9 << 20, "{format}");
            let below = fs::read(lower.join("f5")).expect("read");
            assert!(
                content[..5_000_000] == below[..5_000_000] && content[5_000_008..] == below[5_000_008..],
                "{format}"
            );
            let _ = pool.poolfs(&["umount", pool.name(), at_text]).expect("unmounted");
        }
    });
}
