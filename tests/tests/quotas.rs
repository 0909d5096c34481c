//! Disk quotas of a branch's filesystem: a write over quota fails as on the filesystem itself, and what a write has accepted is stored.

use poolfs_tests::{Pool, Way, isolated, run, shell};
use std::fs;
use std::path::Path;
use std::process::Command;

/// What may be stored in each of the two limited directories, bytes.
const QUOTA: u64 = 8 << 20;

/// The subvolume `upper` for a union over `lower`, and `plain` to be mounted as a directory, each with a quota of [`QUOTA`].
fn make_disk(folder: &Path) -> std::path::PathBuf {
    let disk = folder.join("disk");
    fs::create_dir_all(folder.join("lower")).expect("a folder");
    fs::write(folder.join("lower/lower"), vec![b'l'; 32 << 20]).expect("a file");
    let _ = shell(&format!(
        "set -eu; mkdir {1}; truncate -s 200M {0}/img; mkfs.btrfs -q {0}/img >&2; mount -o loop {0}/img {1}; btrfs quota enable {1}
         for one in upper plain; do
             btrfs subvolume create {1}/$one >&2; btrfs qgroup limit {QUOTA} {1}/$one; done; sync -f {1}",
        folder.display(),
        disk.display()
    ))
    .expect("a disk");
    disk
}

/// A script that writes until it fails, says how, and how many bytes were accepted.
fn filling(write: &str) -> String {
    format!("total=0; while {write}; do total=$((total + $bytes)); i=$((i + 1)); done 2>&1; echo $total")
}

/// Fills the directory `at` of a mount whose files are stored in `stored`.
fn fill(pool: &Pool, way: Way, at: &Path, stored: &Path) {
    for (what, write) in [
        ("appends", "bytes=10000; i=0; {} >> grown"),
        ("files", "bytes=30000; i=0; {} > new$i"),
        ("large writes", "bytes=262144; i=0; {} >> large"),
    ] {
        let write = write.replace("{}", "head -c $bytes /dev/zero");
        let (set, write) = write.split_once("i=0; ").expect("two parts");
        let script = format!("cd {}; {set} i=0; {}", at.display(), filling(write));
        let said = pool.shell(way, &script).expect(what);
        let accepted: u64 = said.lines().last().and_then(|line| line.parse().ok()).expect("a count");
        assert!(said.contains("Disk quota exceeded"), "{way:?} {what} in {}: {said}", at.display());
        assert!(accepted > QUOTA / 4, "{way:?} {what} in {}: {accepted} bytes were accepted", at.display());
        // Nothing fails later, and all of it is on the disk.
        let _ = pool.shell(way, &format!("sync -f {}", at.display())).expect("all that was accepted is stored");
        let sizes = shell(&format!("find {} -name grown -printf '%s\\n' -o -name 'new*' -printf '%s\\n' -o -name large -printf '%s\\n' | awk '{{ sum += $1 }} END {{ print sum }}'", stored.display())).expect("sizes");
        let found: u64 = sizes.trim().parse().expect("a sum");
        assert!(found >= accepted, "{way:?} {what} in {}: of {accepted} bytes {found} are stored", at.display());
        let _ = pool.shell(way, &format!("cd {}; rm -f grown new* large; sync -f .", at.display())).expect("removed");
        let _ = shell(&format!("sync -f {}", stored.display())).expect("committed");
    }
}

#[test]
fn who_is_over_a_quota_is_told_by_the_write() {
    isolated("who_is_over_a_quota_is_told_by_the_write", |folder| {
        let disk = make_disk(folder);
        let pool = Pool::create(folder, "64M");
        for format in ["sparse", "bcow"] {
            let upper = disk.join("upper");
            let union = pool.mount_stored(&folder.join("union"), &upper, &folder.join("lower"), format);
            let directory = pool.mount_directory(&folder.join("directory"), &disk.join("plain"));
            for way in [Way::Library, Way::Fuse] {
                fill(&pool, way, union.path(), &upper);
                fill(&pool, way, directory.path(), &disk.join("plain"));
            }
            drop((union, directory));
        }
        drop(pool);
        let _ = run(Command::new("umount").arg(&disk)).expect("umount");
    });
}

/// A first write to a lower file is stored, or refused: none is accepted that no copy-up has room for.
#[test]
fn no_first_write_is_accepted_beyond_a_quota() {
    isolated("no_first_write_is_accepted_beyond_a_quota", |folder| {
        let disk = make_disk(folder);
        for number in 0..400 {
            fs::write(folder.join(format!("lower/f{number}")), vec![b'l'; 100_000]).expect("a file");
        }
        let pool = Pool::create(folder, "64M");
        let upper = disk.join("upper");
        let union = pool.mount_union(&folder.join("union"), &upper, &[&folder.join("lower")]);
        let at = union.path().display();
        // As full as it gets, and 64 KiB less.
        let full =
            format!("cd {at}; head -c 65536 /dev/zero > less; sync -f .; cat /dev/zero > full || rm less; sync -f .");
        let _ = pool.shell(Way::Library, &full).expect("filled");
        let script = format!(
            "cd {at}; for i in $(seq 0 399); do printf x | dd of=f$i bs=1 seek=50000 conv=notrunc status=none 2>said.$i && echo f$i; done; true"
        );
        let accepted = pool.shell(Way::Library, &script).expect("written");
        let accepted: Vec<_> = accepted.lines().map(str::to_owned).collect();
        assert!(accepted.len() < 400, "{} first writes were accepted", accepted.len());
        let _ = pool.shell(Way::Library, &format!("sync -f {at}")).expect("all that was accepted is stored");
        drop(union);
        let _ = shell(&format!("btrfs qgroup limit none {}", upper.display())).expect("no limit");
        let again = pool.mount_union(&folder.join("union"), &upper, &[&folder.join("lower")]);
        for name in &accepted {
            let content = fs::read(again.path().join(name)).expect("there");
            assert!(content.len() == 100_000 && content[50_000] == b'x', "{name} was accepted and is lost");
        }
        drop(again);
        drop(pool);
        let _ = run(Command::new("umount").arg(&disk)).expect("umount");
    });
}
