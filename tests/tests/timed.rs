//! Timed coherence: a directory that others change behind the service (`--coherence timed:TIME`). What they have done is seen by both paths
//! when that time is over, and what is done through the mount is where they see it at once.

use poolfs_tests::{Pool, Stepper, Way, compile, hash, isolated, wait_until};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What the mounts of these tests promise. Waiting for as long is no guess about how fast anything is: after it, nothing old may be shown.
const TIMED: Duration = Duration::from_millis(300);
const COHERENCE: &str = "timed:300ms";

struct Scene<'a> {
    data: PathBuf,
    at: PathBuf,
    observers: Vec<(Way, Stepper)>,
    mounted: poolfs_tests::Mounted<'a>,
}

impl<'a> Scene<'a> {
    fn new(folder: &Path, pool: &'a Pool) -> Self {
        let (data, at) = (folder.join("data"), folder.join("mnt"));
        let mounted = pool.mount(&at, &["--dir", data.to_str().expect("text"), "--coherence", COHERENCE]);
        let start = |way, static_| (way, Stepper::start(pool, &compile(folder, "steps", static_), way));
        Self { data, at, observers: vec![start(Way::Library, false), start(Way::Fuse, true)], mounted }
    }

    /// Has each observer see the old state, changes it, waits for as long as is promised, and has each see the new one. A step is one of `steps.c`,
    /// with `@` for the mount point.
    fn changes(
        &mut self,
        what: &str,
        step: &str,
        old: Result<u64, i32>,
        change: impl FnOnce(&Path),
        new: Result<u64, i32>,
    ) {
        let step = step.replace('@', &format!("{}/", self.at.display()));
        for (way, observer) in &mut self.observers {
            assert_eq!(observer.step(&step), old, "{what}: before, {way:?}");
        }
        change(&self.data);
        std::thread::sleep(TIMED);
        for (way, observer) in &mut self.observers {
            assert_eq!(observer.step(&step), new, "{what}: after, {way:?}");
        }
    }

    /// The same of what is seen when a thread of the service has looked.
    fn changes_soon(
        &mut self,
        what: &str,
        step: &str,
        old: Result<u64, i32>,
        change: impl FnOnce(&Path),
        new: Result<u64, i32>,
    ) {
        for (way, observer) in &mut self.observers {
            assert_eq!(observer.step(step), old, "{what}: before, {way:?}");
        }
        change(&self.data);
        for (way, observer) in &mut self.observers {
            wait_until(&format!("{what}, {way:?}"), || observer.step(step) == new);
        }
    }

    fn each(&mut self, step: &str) {
        let step = step.replace('@', &format!("{}/", self.at.display()));
        for (way, observer) in &mut self.observers {
            let _ = observer.step(&step).unwrap_or_else(|errno| panic!("{step}: {errno}, {way:?}"));
        }
    }
}

fn bytes(byte: u8, count: usize) -> Vec<u8> {
    vec![byte; count]
}

#[test]
fn what_others_change_is_seen_when_the_time_is_over() {
    isolated("what_others_change_is_seen_when_the_time_is_over", |folder| {
        let data = folder.join("data");
        fs::create_dir_all(data.join("directory")).expect("made");
        fs::write(data.join("open"), bytes(b'a', 8192)).expect("written");
        fs::write(data.join("gone"), "gone").expect("written");
        fs::write(data.join("replaced"), "old").expect("written");
        fs::write(data.join("replacing"), "the new one").expect("written");
        fs::write(data.join("directory/inner"), "1").expect("written");
        symlink("replaced", data.join("link")).expect("made");
        let pool = Pool::create(folder, "16M");
        let mut scene = Scene::new(folder, &pool);
        scene.each("open @open 2");
        let at = |name: &'static str| {
            move |data: &Path| fs::File::options().write(true).open(data.join(name)).expect("there")
        };
        let [old, new] = [b'a', b'b'].map(|byte| Ok(hash(&bytes(byte, 8192))));
        let overwrite = |data: &Path| at("open")(data).write_all_at(&bytes(b'b', 8192), 0).expect("written");
        scene.changes("an open file is overwritten, as long as before", "pread 0 8192", old, overwrite, new);
        let append = |data: &Path| {
            let mut file = fs::File::options().append(true).open(data.join("open")).expect("there");
            file.write_all(&bytes(b'c', 100)).expect("written");
        };
        scene.changes("an open file grows", "size", Ok(8192), append, Ok(8292));
        let tail = Ok(hash(&bytes(b'c', 100)));
        scene.changes(
            "its end",
            "pread 8192 100",
            tail,
            |data| at("open")(data).set_len(50).expect("cut"),
            Ok(hash(b"")),
        );
        scene.changes("and is cut", "statsize @open", Ok(50), |data| at("open")(data).set_len(7).expect("cut"), Ok(7));
        let (missing, write) =
            (Err(libc::ENOENT), |data: &Path| fs::write(data.join("new"), "12345").expect("written"));
        scene.changes("a name appears", "statsize @new", missing, write, Ok(5));
        let remove = |data: &Path| fs::remove_file(data.join("gone")).expect("removed");
        scene.changes("a name goes", "statsize @gone", Ok(4), remove, missing);
        let replace = |data: &Path| fs::rename(data.join("replacing"), data.join("replaced")).expect("renamed");
        scene.changes("a file is replaced", "statsize @replaced", Ok(3), replace, Ok(11));
        let point = |data: &Path| {
            fs::remove_file(data.join("link")).expect("removed");
            symlink("open", data.join("link")).expect("made");
        };
        scene.changes("a link leads elsewhere", "statsize @link", Ok(11), point, Ok(7));
        let rename = |data: &Path| fs::rename(data.join("directory"), data.join("other")).expect("renamed");
        scene.changes("a directory is renamed", "statsize @directory/inner", Ok(1), rename, missing);
        scene.changes("and is there", "statsize @other/inner", Ok(1), |_| (), Ok(1));

        // The kernel asks for no attributes here.
        let content = |text: &[u8]| Ok(hash(text));
        let write = |text: &'static [u8]| move |data: &Path| at("open")(data).write_all_at(text, 0).expect("written");
        let before = |data: &Path| fs::metadata(data.join("open")).and_then(|file| file.modified()).expect("known");
        scene.changes_soon(
            "an open file is sent",
            "send 0 100",
            content(&bytes(b'b', 7)),
            write(b"0123456"),
            content(b"0123456"),
        );
        scene.changes_soon(
            "and has grown",
            "send 0 100",
            content(b"0123456"),
            write(b"0123456789"),
            content(b"0123456789"),
        );
        scene.each("map 10");
        scene.changes_soon(
            "it is mapped",
            "mread 0 10",
            content(b"0123456789"),
            write(b"abcdefghij"),
            content(b"abcdefghij"),
        );
        let keep_time = |data: &Path| {
            let time = before(data);
            write(b"ABCDEFGHIJ")(data);
            at("open")(data).set_modified(time).expect("set");
        };
        scene.changes_soon(
            "its time is set back",
            "mread 0 10",
            content(b"abcdefghij"),
            keep_time,
            content(b"ABCDEFGHIJ"),
        );
        scene.each("unmap");
        scene.changes_soon(
            "and is sent",
            "send 0 100",
            content(b"ABCDEFGHIJ"),
            write(b"9876543210"),
            content(b"9876543210"),
        );

        // By what the test itself has seen, through the kernel.
        let (names, mode) = (
            |at: &Path| fs::read_dir(at).expect("listed").flatten().map(|entry| entry.file_name()).collect::<Vec<_>>(),
            |at: &Path| fs::metadata(at.join("open")).expect("there").mode() & 0o7777,
        );
        let (listed, before) = (names(&scene.at), mode(&scene.at));
        fs::write(data.join("listed"), "").expect("written");
        fs::set_permissions(data.join("open"), fs::Permissions::from_mode(0o612)).expect("changed");
        std::thread::sleep(TIMED);
        assert!(names(&scene.at).len() == listed.len() + 1 && before != 0o612);
        assert_eq!(mode(&scene.at), 0o612);
        let by_library =
            pool.shell(Way::Library, &format!("ls {0} | grep -c . ; stat -c %a {0}/open", scene.at.display()));
        assert_eq!(by_library.expect("ls").trim_end(), format!("{}\n612", listed.len() + 1));
        scene.observers.clear();
        let _ = scene.mounted.unmount().expect("umount");
    });
}

#[test]
fn what_is_done_through_the_mount_is_in_the_directory_at_once() {
    isolated("what_is_done_through_the_mount_is_in_the_directory_at_once", |folder| {
        let data = folder.join("data");
        fs::create_dir_all(&data).expect("made");
        fs::write(data.join("f"), bytes(0, 4096)).expect("written");
        let pool = Pool::create(folder, "16M");
        let mut scene = Scene::new(folder, &pool);
        scene.each("open @f 2");
        let (mut content, at) = (bytes(0, 4096), scene.at.display().to_string());
        for (round, byte) in (1..=20_u8).enumerate() {
            let writer = round % 2;
            let (way, observer) = &mut scene.observers[writer];
            assert_eq!(observer.step(&format!("pwrite {} 100 {byte}", round * 10)), Ok(100), "{way:?}");
            content[round * 10..][..100].fill(byte);
            assert_eq!(fs::read(data.join("f")).expect("there"), content, "{way:?}, round {round}");
            for (way, observer) in &mut scene.observers {
                assert_eq!(observer.step("pread 0 4096"), Ok(hash(&content)), "{way:?}, round {round}");
            }
            let made = format!("{at}/made-{round}");
            let _ = scene.observers[writer].1.step(&format!("mkdir {made}")).expect("made");
            assert!(data.join(format!("made-{round}")).is_dir());
            let other = &mut scene.observers[1 - writer].1;
            let _ = other.step(&format!("rename {made} {at}/renamed-{round}")).expect("the other path sees it at once");
            assert!(data.join(format!("renamed-{round}")).is_dir());
        }
        scene.observers.clear();
        let _ = scene.mounted.unmount().expect("umount");
        assert_eq!(fs::read(data.join("f")).expect("there"), content);
    });
}

#[test]
fn a_directory_that_others_change_belongs_to_no_pool_alone() {
    isolated("a_directory_that_others_change_belongs_to_no_pool_alone", |folder| {
        let data = folder.join("data");
        fs::create_dir_all(&data).expect("made");
        let one = Pool::create(folder, "16M");
        let other = Pool::named(folder, &format!("{}-other", one.name()), "16M");
        let dir = data.to_str().expect("text");
        let timed = ["--dir", dir, "--coherence", COHERENCE];
        let first = one.mount(&folder.join("one"), &timed);
        let second = other.mount(&folder.join("two"), &timed);
        fs::write(folder.join("one/f"), "from one").expect("written");
        std::thread::sleep(TIMED);
        assert_eq!(fs::read(folder.join("two/f")).expect("seen"), b"from one");
        fs::create_dir(folder.join("three")).expect("made");
        let three = folder.join("three");
        for pool in [&one, &other] {
            let alone = pool.poolfs(&["mount", pool.name(), three.to_str().expect("text"), "--dir", dir]);
            assert!(alone.code != 0 && alone.err.contains(dir), "{}", alone.err);
        }
        let _ = second.unmount().expect("umount");
        let _ = first.unmount().expect("umount");
        let alone = one.mount(&three, &["--dir", dir]);
        let refused = other.poolfs(&[
            "mount",
            other.name(),
            folder.join("two").to_str().expect("text"),
            timed[0],
            dir,
            timed[2],
            timed[3],
        ]);
        assert!(refused.code != 0 && refused.err.contains(dir), "{}", refused.err);
        let _ = alone.unmount().expect("umount");
    });
}
