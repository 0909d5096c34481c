//! Upper branches that were copied, moved, or mounted otherwise than they were written: what would show zeros or cannot be read is refused
//! or reported.

use poolfs_tests::{Outcome, Pool, isolated, run, shell};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// What the file shows that was written in part.
fn content() -> Vec<u8> {
    let mut content = vec![b'l'; 100_000];
    content[50_000] = b'X';
    content
}

/// A pool, and an unmounted upper branch in which one file was written in part, and one removed.
fn written(folder: &Path) -> Pool {
    for name in ["mnt", "upper", "lower"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    for name in ["file", "gone"] {
        fs::write(folder.join("lower").join(name), vec![b'l'; 100_000]).expect("a file");
    }
    let pool = Pool::create(folder, "16M");
    let mounted = pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&folder.join("lower")]);
    let file = fs::File::options().write(true).open(folder.join("mnt/file")).expect("there");
    file.write_all_at(b"X", 50_000).expect("written");
    drop(file);
    fs::remove_file(folder.join("mnt/gone")).expect("there");
    let _ = mounted.unmount().expect("umount");
    pool
}

fn try_line(pool: &Pool, line: &str) -> Outcome {
    run(&mut pool.line(line))
}

#[test]
fn a_copy_of_an_upper_branch_is_whole_or_refused() {
    isolated("a_copy_of_an_upper_branch_is_whole_or_refused", |folder| {
        let pool = written(folder);
        let at = folder.display();
        let copy = |script: &str| {
            let _ = shell(&format!("cd {at}; rm -rf copy; mkdir copy; {script}")).expect(script);
        };
        for script in [
            "tar -C upper -cf - . | tar -C copy -xf -",
            "cp -r upper/. copy",
            "tar --xattrs --xattrs-include='*' -C upper -cf - . | tar -C copy -xf -",
            "cp -a upper/. copy; setfattr -x trusted.poolfs.attributed copy",
        ] {
            copy(script);
            let refused = try_line(&pool, "mount POOL @mnt --upper @copy --lower @lower");
            assert_ne!(refused.code, 0, "{script}: {refused:?}");
            for part in ["without its extended attributes", "`cp -a`", "--xattrs-include='*'", "rsync -aHX"] {
                assert!(refused.err.contains(part), "{script}: {part} in {refused:?}");
            }
            let told = try_line(&pool, "mount POOL @mnt --upper @copy --lower @lower --json").err;
            let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
            let told = |field: &str| told["error"][field].as_str().unwrap_or_default().to_owned();
            assert_eq!(told("code"), "damaged", "{script}");
            assert!(told("remedy").contains("`cp -a`") && !told("cause").contains("`cp -a`"), "{script}");
            let bitmaps = || fs::read_dir(folder.join("copy/.poolfs/bitmaps")).expect("there").count();
            for repair in ["", " --repair"] {
                let found = try_line(&pool, &format!("fsck @copy --lower @lower{repair}"));
                assert!(
                    found.code == 4 && found.out.contains("without its extended attributes"),
                    "{script}: {found:?}"
                );
                assert!(!found.out.contains("by the next mount"), "{script}: {found:?}");
                assert_eq!(bitmaps(), 1, "{script}");
            }
        }
        // As a lower branch as well.
        fs::create_dir(folder.join("new")).expect("a folder");
        let refused = try_line(&pool, "mount POOL @mnt --upper @new --lower @copy:@lower");
        assert!(refused.code != 0 && refused.err.contains("without its extended attributes"), "{refused:?}");

        copy("cp -a upper/. copy; rm -r copy/.poolfs");
        let refused = try_line(&pool, "mount POOL @mnt --upper @copy --lower @lower");
        assert!(refused.code != 0 && refused.err.contains("without its .poolfs"), "{refused:?}");

        for script in [
            "cp -a upper/. copy",
            "tar --xattrs --xattrs-include='*' -C upper -cf - . | tar --xattrs --xattrs-include='*' -C copy -xf -",
            "rmdir copy; cp -a upper copy",
        ] {
            copy(script);
            let found = try_line(&pool, "fsck @copy --lower @lower");
            assert_eq!(found.code, 0, "{script}: {found:?}");
            let mounted = pool.mount_union(&folder.join("mnt"), &folder.join("copy"), &[&folder.join("lower")]);
            assert!(fs::read(folder.join("mnt/file")).expect("there") == content(), "{script}");
            assert!(!folder.join("mnt/gone").exists(), "{script}");
            let _ = mounted.unmount().expect("umount");
        }
    });
}

/// Two files of one bitmap would hide each other's blocks.
#[test]
fn a_partly_written_file_that_was_copied_within_the_branch_answers_eio_and_the_other_loses_nothing() {
    isolated(
        "a_partly_written_file_that_was_copied_within_the_branch_answers_eio_and_the_other_loses_nothing",
        |folder| {
            let pool = written(folder);
            let _ = shell(&format!("cd {}; cp -a upper/file upper/copied", folder.display())).expect("copied");
            let mount = || pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&folder.join("lower")]);
            let mut wanted = content();
            for block in [3, 7] {
                let found = try_line(&pool, "fsck @upper --lower @lower");
                assert!(found.code == 4 && found.out.contains("damaged: copied: its bitmap"), "{found:?}");
                assert!(found.out.contains("remove it, or bring") && !found.out.contains("fsck"), "{found:?}");
                let mounted = mount();
                let open = |name: &str| fs::File::options().read(true).write(true).open(folder.join("mnt").join(name));
                let file = open("file").expect("it is the one that was written");
                let refused = open("copied").and_then(|file| file.write_all_at(b"Z", 9 * 4096));
                assert_eq!(refused.expect_err("it is a copy").raw_os_error(), Some(5));
                assert_eq!(fs::read(folder.join("mnt/copied")).expect_err("it is a copy").raw_os_error(), Some(5));
                file.write_all_at(&[b'Y'; 4096], block * 4096).expect("written");
                file.sync_all().expect("synced");
                wanted[block as usize * 4096..(block as usize + 1) * 4096].fill(b'Y');
                let status = try_line(&pool, "status POOL");
                assert!(status.out.contains("copied") && status.out.contains("inode number"), "{status:?}");
                drop(file);
                let _ = mounted.unmount().expect("umount");
            }
            let mounted = mount();
            fs::remove_file(folder.join("mnt/copied")).expect("it can be removed");
            assert!(fs::read(folder.join("mnt/file")).expect("there") == wanted);
            let _ = mounted.unmount().expect("umount");
            let found = try_line(&pool, "fsck @upper --lower @lower");
            assert_eq!(found.code, 0, "{found:?}");
        },
    );
}

#[test]
fn an_upper_branch_is_not_mounted_by_itself() {
    isolated("an_upper_branch_is_not_mounted_by_itself", |folder| {
        let pool = written(folder);
        for options in ["", " --shared"] {
            let refused = try_line(&pool, &format!("mount POOL @mnt --dir @upper{options}"));
            assert!(refused.code != 0 && refused.err.contains("upper branch"), "{refused:?}");
            assert!(refused.err.contains("--upper") && refused.err.contains("--lower"), "{refused:?}");
        }
        // It has been let go of.
        drop(pool.mount_union(&folder.join("mnt"), &folder.join("upper"), &[&folder.join("lower")]));
        drop(pool.mount_directory(&folder.join("mnt"), &folder.join("lower")));
    });
}

#[test]
fn a_mount_over_other_lower_branches_than_files_need_says_so() {
    isolated("a_mount_over_other_lower_branches_than_files_need_says_so", |folder| {
        let pool = written(folder);
        let place = |name: &str| folder.join(name);
        let mount = |lower: &str| {
            let outcome = try_line(&pool, &format!("mount POOL @mnt --upper @upper --lower {lower}"));
            assert_eq!(outcome.code, 0, "{outcome:?}");
            (outcome.err, pool.mounted(&place("mnt")))
        };
        fs::create_dir(place("other")).expect("a folder");
        fs::create_dir(place("bound")).expect("a folder");
        let _ =
            shell(&format!("mount --bind {} {}", place("lower").display(), place("bound").display())).expect("bound");
        for lower in ["@other", "@bound"] {
            let (said, mounted) = mount(lower);
            for part in ["note", text(&place("lower")), "EIO", "known by their paths"] {
                assert!(said.contains(part), "{lower}: {part} in {said}");
            }
            if lower == "@bound" {
                assert_eq!(fs::read(place("mnt/file")).expect_err("it is needed").raw_os_error(), Some(5));
            }
            let _ = mounted.unmount().expect("umount");
        }
        let (said, mounted) = mount("@other:@lower");
        assert!(!said.contains("note"), "{said}");
        assert!(fs::read(place("mnt/file")).expect("there") == content());
        let _ = mounted.unmount().expect("umount");
    });
}

#[test]
fn a_lower_branch_without_what_it_was_written_over_is_told_of() {
    isolated("a_lower_branch_without_what_it_was_written_over_is_told_of", |folder| {
        let pool = written(folder);
        let place = |name: &str| folder.join(name);
        fs::create_dir(place("clone")).expect("a folder");
        let mount = |lowers: &str| {
            let outcome = try_line(&pool, &format!("mount POOL @mnt --upper @clone --lower {lowers}"));
            assert_eq!(outcome.code, 0, "{outcome:?}");
            (outcome.err, pool.mounted(&place("mnt")))
        };
        // A file of which one block is in the clone, one in the branch below, and the rest in the one that was below that.
        let (said, mounted) = mount("@upper:@lower");
        assert!(!said.contains("note"), "{said}");
        let file = fs::File::options().write(true).open(place("mnt/file")).expect("there");
        file.write_all_at(b"Y", 10).expect("written");
        drop(file);
        let _ = mounted.unmount().expect("umount");
        let (said, mounted) = mount("@upper");
        for part in ["note", "lower branch", text(&place("upper")), text(&place("lower")), "EIO"] {
            assert!(said.contains(part), "{part} in {said}");
        }
        let _ = mounted.unmount().expect("umount");
        let checked = try_line(&pool, "fsck @clone --lower @upper");
        assert!(
            checked.code != 0 && checked.out.contains("file") && checked.out.contains("cannot be read"),
            "{checked:?}"
        );
        let checked = try_line(&pool, "fsck @clone --lower @upper:@lower");
        assert_eq!(checked.code, 0, "{checked:?}");
    });
}
