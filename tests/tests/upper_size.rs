//! A limited upper branch: the errors that programs get when it is full, what `df` and `du` show, and that it is usable again.

use poolfs_tests::{Mounted, Pool, Way, import_small, isolated};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const LIMIT: u64 = 8 << 20;

/// What is stored beyond the limit: tables that are written with their data, and names.
const BEYOND: u64 = 256 << 10;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A pool with a lower branch that has a file of 32 MiB.
fn pool(folder: &Path) -> Pool {
    fs::create_dir_all(folder.join("lower")).expect("a folder");
    fs::write(folder.join("lower/big"), vec![b'l'; 32 << 20]).expect("a file");
    fs::write(folder.join("lower/small"), "lower").expect("a file");
    Pool::create(folder, "64M")
}

fn mount<'p>(pool: &'p Pool, folder: &Path, format: &str) -> Mounted<'p> {
    mount_limited(pool, folder, format, "8M")
}

fn mount_limited<'p>(pool: &'p Pool, folder: &Path, format: &str, size: &str) -> Mounted<'p> {
    let [upper, lower] = ["upper", "lower"].map(|name| folder.join(name));
    fs::create_dir_all(&upper).expect("a folder");
    let stack = ["--upper", text(&upper), "--lower", text(&lower), "--upper-format", format, "--upper-size", size];
    pool.mount(&folder.join("mnt"), &stack)
}

/// What `du` counts in the upper branch.
fn stored(folder: &Path) -> u64 {
    let output = poolfs_tests::run(std::process::Command::new("du").args(["-s", "-B1"]).arg(folder.join("upper")));
    let text = output.expect("du");
    text.split_whitespace().next().and_then(|count| count.parse().ok()).expect("a count")
}

/// Runs a script in the mount, and returns what it printed.
fn in_mount(pool: &Pool, way: Way, at: &Path, script: &str) -> String {
    pool.shell(way, &format!("cd {}; {script}", at.display())).expect(script).trim().to_owned()
}

#[test]
fn a_full_branch_refuses_data_keeps_what_it_has_and_is_emptied() {
    isolated("a_full_branch_refuses_data_keeps_what_it_has_and_is_emptied", |folder| {
        let pool = pool(folder);
        for format in ["sparse", "bcow"] {
            for way in [Way::Library, Way::Fuse] {
                let mounted = mount(&pool, folder, format);
                let at = mounted.path().to_owned();
                let run = |script: &str| in_mount(&pool, way, &at, script);
                assert_eq!(run("df -B1 --output=size . | tail -n 1"), LIMIT.to_string());
                let _ = run("printf y | dd of=big bs=1 seek=100 conv=notrunc status=none");
                let said = run("dd if=/dev/zero of=full bs=64k 2>&1 || true");
                assert!(said.contains("No space left on device"), "{format} {way:?}: {said}");
                let size: u64 = run("stat -c %s full").parse().expect("a size");
                assert!((LIMIT - BEYOND..=LIMIT).contains(&size), "{format} {way:?}: {size}");
                assert_eq!(run("df -B1 --output=avail . | tail -n 1"), "0");
                // What is needed to keep what was accepted is stored past the limit.
                let _ = run("sync big full");
                // What it has can be written again, and reaches the disk.
                let _ = run(
                    "tr '\\0' x < /dev/zero | dd of=full bs=64k count=64 iflag=fullblock conv=notrunc,fsync status=none",
                );
                assert!(stored(folder) <= LIMIT + BEYOND, "{format} {way:?}: {}", stored(folder));
                // A block of a lower file needs room as any other does; its name is tidied away without.
                assert_eq!(
                    run(
                        "(printf y | dd of=big bs=1 seek=5000000 conv=notrunc status=none) 2>/dev/null || echo refused"
                    ),
                    "refused"
                );
                let _ = run("rm small");
                assert_eq!(run("head -c 5 big; tail -c 5 big; head -c 3 full; ls"), "llllllllllxxxbig\nfull");
                let _ = mounted.unmount().expect("umount");
                let mounted = mount(&pool, folder, format);
                assert_eq!(run("df -B1 --output=avail . | tail -n 1"), "0", "{format} {way:?}: after mounting again");
                let _ = run("rm full; sync; printf y | dd of=big bs=1 seek=5000000 conv=notrunc status=none");
                assert_eq!(run("tail -c +5000000 big | head -c 3"), "lyl");
                let available: u64 = run("df -B1 --output=avail . | tail -n 1").parse().expect("a size");
                assert!(available > LIMIT - BEYOND, "{format} {way:?}: {available}");
                let _ = mounted.unmount().expect("umount");
                fs::remove_dir_all(folder.join("upper")).expect("removed");
            }
        }
    });
}

#[test]
fn many_writers_together_get_what_there_is() {
    isolated("many_writers_together_get_what_there_is", |folder| {
        let pool = pool(folder);
        for format in ["sparse", "bcow-space"] {
            let mounted = mount(&pool, folder, format);
            let script = "
                for number in 1 2 3 4 5 6; do
                    (dd if=/dev/zero of=f$number bs=4k count=1000 conv=fsync 2>/dev/null || true) &
                done
                wait; cat f? | wc -c";
            let accepted: u64 = in_mount(&pool, Way::Fuse, mounted.path(), script).parse().expect("a size");
            assert!((LIMIT - BEYOND..=LIMIT).contains(&accepted), "{format}: {accepted}");
            assert!(stored(folder) <= LIMIT + BEYOND, "{format}: {}", stored(folder));
            let _ = mounted.unmount().expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("removed");
        }
    });
}

#[test]
fn a_container_has_a_limit() {
    isolated("a_container_has_a_limit", |folder| {
        let pool = Pool::create(folder, "64M");
        import_small(&pool, folder, "small", &["/bin/dd", "/bin/df"].map(Path::new), |_| {});
        let script = "df -B1 --output=size / | tail -n 1; dd if=/dev/zero of=/full bs=64k 2>&1 || true";
        let run = ["run", pool.name(), "small", "--rm", "--upper-size", "8M", "--", "sh", "-c", script];
        let said = pool.poolfs(&run).expect("run");
        assert!(
            said.trim_start().starts_with(&LIMIT.to_string()) && said.contains("No space left on device"),
            "{said}"
        );
        let refused = pool.poolfs(&["run", pool.name(), "small", "--upper-size", "8K", "--", "sh"]);
        assert!(refused.code != 0 && refused.err.contains("too small"), "{refused:?}");
    });
}

/// Rounds of each way to give room back.
const ROUNDS: usize = 20;

/// Ways to give the room of the file `big` back.
const WAYS_BACK: [&str; 4] = ["rm big", ": > big", "truncate -s 0 big", ": > new; mv new big"];

#[test]
fn room_that_was_given_back_is_there_for_the_next_writer() {
    isolated("room_that_was_given_back_is_there_for_the_next_writer", |folder| {
        let pool = pool(folder);
        for format in ["sparse", "bcow"] {
            for way in [Way::Library, Way::Fuse] {
                let mounted = mount_limited(&pool, folder, format, "50M");
                for back in WAYS_BACK {
                    let script = format!(
                        "
                        for round in $(seq {ROUNDS}); do
                            dd if=/dev/zero of=big bs=1M count=100 status=none 2>/dev/null && echo not full
                            {back}
                            dd if=/dev/zero of=b2 bs=1M count=20 status=none 2>&1 && echo written || true
                            rm -f big b2
                        done"
                    );
                    let said = in_mount(&pool, way, mounted.path(), &script);
                    let written = said.lines().filter(|line| *line == "written").count();
                    assert_eq!((written, said.lines().count()), (ROUNDS, ROUNDS), "{format} {way:?} {back}: {said}");
                }
                let _ = mounted.unmount().expect("umount");
                fs::remove_dir_all(folder.join("upper")).expect("removed");
            }
        }
    });
}

/// What a program meets that stores by a shared mapping of a file of which nothing can be put on the disk.
const MAPS: &str = r#"
import errno, mmap, os, sys
file, filler = sys.argv[1:]
descriptor = os.open(file, os.O_RDWR)
pages = mmap.mmap(descriptor, 1 << 20)
for page in range(256):
    pages[page * 4096] = ord("n")
def errno_of(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
told = [errno_of(pages.flush)] + [errno_of(lambda: os.fsync(descriptor)) for _ in range(2)]
os.unlink(filler)
told += [errno_of(lambda: os.fsync(descriptor)), errno_of(pages.flush)]
pages.close()
told.append(errno_of(lambda: os.close(descriptor)))
print(" ".join(told))
"#;

#[test]
fn pages_of_a_mapping_that_found_no_room_are_never_said_to_be_durable() {
    isolated("pages_of_a_mapping_that_found_no_room_are_never_said_to_be_durable", |folder| {
        let pool = pool(folder);
        fs::write(folder.join("lower/mapped"), vec![b'o'; 1 << 20]).expect("a file");
        for way in [Way::Library, Way::Fuse] {
            let mount = mount(&pool, folder, "sparse");
            let at = mount.path().to_owned();
            let _ =
                in_mount(&pool, way, &at, "dd if=/dev/zero of=filler bs=64k 2>/dev/null || true; sync -f . || true");
            fs::write(folder.join("maps.py"), MAPS).expect("a program");
            let told =
                in_mount(&pool, way, &at, &format!("python3 {} mapped filler", folder.join("maps.py").display()));
            let told: Vec<&str> = told.split(' ').collect();
            assert!(told.len() == 6 && told.iter().all(|&told| told == "ENOSPC"), "{told:?}");
            // Who opens it afterwards finds what there is, and may go on.
            let deadline = Instant::now() + Duration::from_secs(30);
            while fs::read(at.join("mapped")).expect("readable")[0] != b'o' {
                assert!(Instant::now() < deadline, "the kernel still shows what is nowhere else");
                std::thread::sleep(Duration::from_millis(5));
            }
            let again = "dd if=/dev/zero of=mapped bs=4k count=1 conv=notrunc,fsync 2>/dev/null; echo $?";
            assert_eq!(in_mount(&pool, way, &at, again), "0");
            let _ = in_mount(&pool, way, &at, "rm mapped");
            let _ = mount.unmount().expect("umount");
            fs::remove_dir_all(folder.join("upper")).expect("an upper branch");
        }
    });
}
