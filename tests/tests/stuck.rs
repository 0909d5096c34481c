//! A damaged file of an upper branch for which data was accepted: the branch can still be mounted, and data accepted for other files
//! reaches the disk. Only what was accepted for the damaged file is lost, when the file is removed or the mount given up.

use poolfs_tests::{Outcome, Pool, Way, isolated};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

const BLOCK: u64 = 4096;

/// Spoils the first sector of the first table of a compact file.
fn spoil_table(file: &Path) {
    let mut record = vec![0; 4096];
    let count = rustix::fs::getxattr(file, "trusted.poolfs.bcow", &mut record).expect("a compact file");
    assert!(count > 36 && record[7] > 0, "it has a table");
    let root = u32::from_le_bytes(*record[32..].first_chunk().expect("a number"));
    let file = fs::OpenOptions::new().write(true).open(file).expect("opened");
    file.write_all_at(&[0x5a; 512], u64::from(root) * BLOCK).expect("written");
}

/// A branch with files `good-N` that are old, and a compact file `c` that is damaged.
fn branches(pool: &Pool, folder: &Path) {
    for name in ["upper", "lower"] {
        fs::create_dir_all(folder.join(name)).expect("a folder");
    }
    let mounted = mount(pool, folder);
    let script = format!(
        "cd {}; for i in $(seq 20); do echo old > good-$i; done; truncate -s 8M c
         for i in $(seq 0 100); do head -c 4096 /dev/urandom | dd of=c bs=4k seek=$((i * 3)) conv=notrunc status=none; done",
        mounted.path().display()
    );
    let _ = pool.shell(Way::Fuse, &script).expect("made");
    let _ = mounted.unmount().expect("umount");
    spoil_table(&folder.join("upper/c"));
}

fn mount<'p>(pool: &'p Pool, folder: &Path) -> poolfs_tests::Mounted<'p> {
    pool.mount_stored(&folder.join("mnt"), &folder.join("upper"), &folder.join("lower"), "bcow-space")
}

fn mount_and_hear(pool: &Pool, folder: &Path) -> Outcome {
    let [mnt, upper, lower] =
        ["mnt", "upper", "lower"].map(|name| folder.join(name).to_str().expect("text").to_owned());
    pool.poolfs(&["mount", pool.name(), &mnt, "--upper", &upper, "--lower", &lower])
}

/// Writes a block of `c`, and into all others, and ends the service.
fn accept_and_die(pool: &Pool, folder: &Path, word: &str) {
    let at = folder.join("mnt");
    let script = format!(
        "cd {}; head -c 4096 /dev/zero | tr '\\0' A | dd of=c bs=4k conv=notrunc status=none
         for i in $(seq 20); do printf {word} | dd of=good-$i conv=notrunc status=none; done",
        at.display()
    );
    let _ = pool.shell(Way::Fuse, &script).expect("accepted");
    pool.kill_service();
}

fn expect_others(folder: &Path, word: &str) {
    for number in 1..=20 {
        let found = fs::read_to_string(folder.join(format!("mnt/good-{number}"))).expect("readable");
        assert_eq!(found, format!("{word}\n"));
    }
}

#[test]
fn a_damaged_file_keeps_no_branch_from_being_mounted() {
    isolated("a_damaged_file_keeps_no_branch_from_being_mounted", |folder| {
        let pool = Pool::create(folder, "64M");
        branches(&pool, folder);
        mount(&pool, folder).keep();
        accept_and_die(&pool, folder, "new");
        // What waits goes on to wait through further deaths.
        for word in ["one", "two"] {
            let heard = mount_and_hear(&pool, folder);
            assert!(
                heard.code == 0 && heard.err.contains("the file c ") && heard.err.contains("is damaged"),
                "{heard:?}"
            );
            expect_others(folder, if word == "one" { "new" } else { "one" });
            let first = fs::File::open(folder.join("mnt/c")).expect("opened");
            let mut block = [0; BLOCK as usize];
            first.read_exact_at(&mut block, 0).expect("what was accepted is there");
            assert_eq!(block, [b'A'; BLOCK as usize]);
            assert!(first.read_exact_at(&mut block, 3 * BLOCK).is_err(), "what is damaged is not");
            drop(first);
            assert!(pool.status().to_string().contains("\"path\":\"c\""), "{}", pool.status());
            accept_and_die(&pool, folder, word);
        }
        let heard = mount_and_hear(&pool, folder).expect("mounted");
        let at = folder.join("mnt");
        let umount = || pool.poolfs(&["umount", pool.name(), at.to_str().expect("text")]);
        let refused = umount();
        assert!(refused.code == 1 && refused.err.contains("remove the file that is damaged"), "{refused:?} {heard:?}");
        let _ = pool.shell(Way::Fuse, &format!("rm {}/c", at.display())).expect("removed");
        assert!(!pool.status().to_string().contains("\"path\":\"c\""), "{}", pool.status());
        let _ = umount().expect("nothing waits any more");
        let checked = pool.poolfs(&["fsck", folder.join("upper").to_str().expect("text")]);
        assert_eq!(checked.code, 0, "{checked:?}");
        let heard = mount_and_hear(&pool, folder);
        assert!(heard.code == 0 && heard.err.is_empty(), "{heard:?}");
        expect_others(folder, "two");
        let _ = umount().expect("umount");
    });
}

#[test]
fn what_waits_for_a_damaged_file_goes_when_the_mount_is_given_up() {
    isolated("what_waits_for_a_damaged_file_goes_when_the_mount_is_given_up", |folder| {
        let pool = Pool::create(folder, "64M");
        branches(&pool, folder);
        mount(&pool, folder).keep();
        accept_and_die(&pool, folder, "new");
        let _ = mount_and_hear(&pool, folder).expect("mounted");
        let at = folder.join("mnt");
        let forced = pool.poolfs(&["umount", pool.name(), at.to_str().expect("text"), "--force"]);
        assert!(forced.code == 0 && forced.err.contains("is damaged"), "{forced:?}");
        let upper = folder.join("upper");
        let checked = pool.poolfs(&["fsck", upper.to_str().expect("text"), "--repair"]);
        assert!(checked.code == 4 && checked.out.contains("c: "), "the check goes through: {checked:?}");
        let heard = mount_and_hear(&pool, folder);
        assert!(heard.code == 0 && heard.err.is_empty(), "{heard:?}");
        expect_others(folder, "new");
        let _ = pool.poolfs(&["umount", pool.name(), at.to_str().expect("text")]).expect("umount");
    });
}
