//! Documented differences from ext4 in calls that few programs make (docs/semantics.md).

use poolfs_tests::{Pool, Way, compile, isolated, shell};
use std::fs;

#[test]
fn uncommon_calls_answer_what_is_documented() {
    isolated("uncommon_calls_answer_what_is_documented", |folder| {
        let program = compile(folder, "uncommon", false).display().to_string();
        let pool = Pool::create(folder, "128M");
        let (at, upper, lower) = (folder.join("mnt"), folder.join("upper"), folder.join("lower"));
        for folder in [&upper, &lower] {
            fs::create_dir(folder).expect("a folder");
        }
        let mount = pool.mount_union(&at, &upper, &[&lower]);
        for (way, most) in [(Way::Fuse, 40), (Way::Library, 16)] {
            let said = pool.shell(way, &format!("{program} {}", at.display())).expect("uncommon");
            let moved = most << 20;
            let expected = format!(
                "getflags -1 ENOTTY\nsetflags -1 ENOTTY\nfiemap -1 EOPNOTSUPP\nsendfile {moved} -\ncopy_file_range {moved} -\n\
                 trusted.overlay -1 EOPNOTSUPP\nswapon -1 EINVAL\nname_to_handle_at 0 -\nopen_by_handle_at-open 0 -\n\
                 open_by_handle_at-dropped -1 ESTALE\n"
            );
            assert_eq!(said, expected, "{way:?}");
        }
        drop(mount);
    });
}

#[test]
fn overlayfs_can_have_a_mount_below_and_not_above() {
    isolated("overlayfs_can_have_a_mount_below_and_not_above", |folder| {
        let pool = Pool::create(folder, "64M");
        let at = folder.join("mnt");
        let names = ["upper", "lower", "outside", "u", "w", "merged"].map(|name| folder.join(name));
        for folder in &names {
            fs::create_dir(folder).expect("a folder");
        }
        let [upper, lower, outside, u, w, merged] = names.map(|path| path.display().to_string());
        let mount = pool.mount(&at, &["--upper", &upper, "--lower", &lower]);
        let mnt = at.display();
        let _ = shell(&format!("mkdir {mnt}/l {mnt}/u {mnt}/w; echo below > {mnt}/l/file")).expect("made");
        let overlay = |options: &str| shell(&format!("mount -t overlay overlay -o {options} {merged}"));
        assert_ne!(overlay(&format!("lowerdir={outside},upperdir={mnt}/u,workdir={mnt}/w")).code, 0);
        let _ = overlay(&format!("lowerdir={mnt}/l,upperdir={u},workdir={w}")).expect("mount");
        let _ = shell(&format!("echo changed >> {merged}/file")).expect("copied up");
        assert_eq!(shell(&format!("cat {merged}/file; umount {merged}")).expect("cat"), "below\nchanged\n");
        drop(mount);
    });
}
