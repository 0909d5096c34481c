//! The preload library and the C library, tested by C programs: the families of calls, and the example of `libpoolfs.so`.

use poolfs_tests::{Pool, Way, isolated, program, run, workspace};
use std::fs;
use std::process::Command;

#[test]
fn families_of_calls_answer_as_on_the_disk() {
    isolated("families_of_calls_answer_as_on_the_disk", |_| {
        let script = workspace().join("client/preload/tests/compare.sh");
        let outcome = run(Command::new(script).arg(program("poolfs-service")).arg(program("libpoolfs_preload.so")));
        print!("{}", outcome.expect("compare.sh"));
    });
}

#[test]
fn the_c_library_is_what_its_header_says_and_its_example_copies_by_request() {
    isolated("the_c_library_is_what_its_header_says_and_its_example_copies_by_request", |folder| {
        let library = program("libpoolfs.so");
        let script = workspace().join("client/capi/tests/declared.sh");
        let _ = run(Command::new(script).arg(&library).arg(folder)).expect("declared.sh");
        let directory = folder.join("directory");
        fs::create_dir_all(&directory).expect("a folder");
        let content: Vec<u8> = (0..300_000u32).map(|i| (i >> 8) as u8).collect();
        fs::write(directory.join("source"), &content).expect("a file");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&folder.join("mnt"), &directory);
        let at = mount.path().display();
        let libraries = library.parent().expect("a folder").display();
        let copy = folder.join("copy");
        let _ = pool
            .shell(Way::Fuse, &format!("LD_LIBRARY_PATH={libraries} {} {at}/source {at}/target", copy.display()))
            .expect("the example");
        assert_eq!(fs::read(mount.path().join("target")).expect("readable"), content);
        assert!(pool.operations(Way::Library) >= 6, "the example sent {} requests", pool.operations(Way::Library));
        drop(mount);
    });
}
