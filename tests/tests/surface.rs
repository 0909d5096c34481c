//! libc's whole file surface from C programs (`programs/surface`): on the disk, and on a union by FUSE and by the library, each call with
//! the same result, errno and effect. docs/surface.md lists what happens to each function.

use poolfs_tests::{Pool, Way, isolated, program, remove_sockets, run, workspace};
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles one of the programs.
fn compile(folder: &Path, name: &str) -> PathBuf {
    let target = folder.join(name);
    let mut command = Command::new("gcc");
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", "-I"]);
    command.arg(workspace().join("client/preload/tests")).arg("-o").arg(&target);
    command.arg(workspace().join(format!("tests/programs/surface/{name}.c"))).args(["-lrt", "-lutil"]);
    let _ = run(&mut command).expect("gcc");
    target
}

/// Runs the program of that name three times, and compares what it prints. By the library it must send at least so many requests.
fn same_on_all_ways(test: &str, name: &str, requests_min: u64) {
    isolated(test, |folder| {
        // Other users have to reach the files.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("a mode");
        let binary = compile(folder, name);
        let directory = |parent: &Path| {
            let directory = parent.join("work");
            fs::create_dir_all(&directory).expect("a folder");
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("a mode");
            directory
        };
        let expected = run(Command::new(&binary).arg(directory(&folder.join("disk")))).expect("on the disk");
        let pool = Pool::create(folder, "64M");
        let library = program("libpoolfs_preload.so");
        for way in [Way::Fuse, Way::Library] {
            let [upper, lower] = ["upper", "lower"].map(|part| {
                let path = folder.join(format!("{part}-{way:?}"));
                fs::create_dir(&path).expect("a folder");
                path
            });
            let mount = pool.mount_union(&folder.join(format!("mnt-{way:?}")), &upper, &[&lower]);
            let before = pool.operations(Way::Library);
            // A second process of a program goes the other way.
            let other = match way {
                Way::Library => "env -u LD_PRELOAD".to_owned(),
                Way::Fuse => format!("env LD_PRELOAD={}", library.display()),
            };
            let script =
                format!("export SURFACE_OTHER='{other}'; {} {}", binary.display(), directory(mount.path()).display());
            let printed = pool.shell(way, &script).expect(name);
            assert_same(&expected, &printed, &format!("{name} by {way:?}"));
            let requests = pool.operations(Way::Library) - before;
            assert!(way == Way::Fuse || requests >= requests_min, "{name}: {requests} requests by the library");
            drop(mount);
        }
    });
}

/// Names the lines that differ.
fn assert_same(expected: &str, found: &str, what: &str) {
    let lines = expected.lines().zip(found.lines()).filter(|(expected, found)| expected != found);
    let different: Vec<String> = lines.map(|(expected, found)| format!("disk: {expected}\n here: {found}")).collect();
    assert!(different.is_empty(), "{what} differs:\n{}", different.join("\n"));
    assert_eq!(expected.lines().count(), found.lines().count(), "{what} ends elsewhere");
}

#[test]
fn files() {
    same_on_all_ways("files", "files", 30);
}

#[test]
fn names() {
    same_on_all_ways("names", "names", 20);
}

#[test]
fn processes() {
    same_on_all_ways("processes", "processes", 500);
}

#[test]
fn waiting() {
    same_on_all_ways("waiting", "waiting", 4);
}

/// The portable program, built and run in some way.
struct Built {
    what: &'static str,
    compiler: &'static str,
    flags: &'static [&'static str],
    /// What it is started by, which also makes it what it is.
    launcher: &'static str,
    is_served: bool,
}

const BUILT: &[Built] = &[
    Built { what: "glibc", compiler: "gcc", flags: &[], launcher: "", is_served: true },
    Built { what: "musl", compiler: "musl-gcc", flags: &[], launcher: "", is_served: true },
    Built { what: "static", compiler: "gcc", flags: &["-static"], launcher: "", is_served: false },
    Built { what: "static musl", compiler: "musl-gcc", flags: &["-static"], launcher: "", is_served: false },
    Built {
        what: "set-user-id",
        compiler: "gcc",
        flags: &[],
        launcher: "setpriv --reuid 1000 --regid 1000 --clear-groups",
        is_served: false,
    },
];

/// Programs of another C library are served; those without a loader, and those with more rights than who starts them, go by the
/// kernel. All see the same.
#[test]
fn programs_of_any_make_see_the_same() {
    isolated("programs_of_any_make_see_the_same", |folder| {
        let open_to_all = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
        };
        open_to_all(folder, 0o755);
        let upper = folder.join("upper");
        fs::create_dir(&upper).expect("a folder");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&folder.join("mnt"), &upper);
        for built in BUILT {
            let name = built.what.replace(' ', "-");
            let binary = folder.join(&name);
            let mut command = Command::new(built.compiler);
            command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&binary).args(built.flags);
            let _ = run(command.arg(workspace().join("tests/programs/surface/portable.c"))).expect(built.compiler);
            if !built.launcher.is_empty() {
                open_to_all(&binary, 0o4755);
            }
            let work = |parent: &Path| {
                let work = parent.join(format!("work-{name}"));
                fs::create_dir(&work).expect("a folder");
                work
            };
            let on_disk = format!("{} {} {}", built.launcher, binary.display(), work(folder).display());
            let expected = run(Command::new("sh").args(["-euc", &on_disk])).expect("on the disk");
            let before = pool.operations(Way::Library);
            let script = format!("{} {} {}", built.launcher, binary.display(), work(mount.path()).display());
            let printed = pool.shell(Way::Library, &script).expect(built.what);
            assert_same(&expected, &printed, built.what);
            let requests = pool.operations(Way::Library) - before;
            assert_eq!(requests >= 50, built.is_served, "{}: {requests} requests by the library", built.what);
            assert!(built.is_served || requests == 0, "{}: {requests} requests by the library", built.what);
        }
        drop(mount);
    });
}

/// Writes into each instance, whose mounts and directories are named in pairs, and tells what is on the disk after `sync` and `syncfs`.
const SYNC: &str = "
import ctypes, os, sys
libc = ctypes.CDLL(None)
places = list(zip(sys.argv[1::2], sys.argv[2::2]))
def put(mount, name):
    f = os.open(mount + '/' + name, os.O_RDWR | os.O_CREAT)
    for _ in range(2): os.pwrite(f, b'content of ' + name.encode(), 0)
    return f
def tell(directory, name):
    with open(directory + '/' + name, 'rb') as f: print(f.read().decode())
for mount, _ in places: os.close(put(mount, 'sync'))
os.sync()
for _, directory in places: tell(directory, 'sync')
f = put(places[0][0], 'syncfs')
print(libc.syncfs(f))
tell(places[0][1], 'syncfs')
";

/// Runs [`SYNC`] by the library on so many instances, after `prepare`.
fn sync_reaches<T>(folder: &Path, instances: usize, prepare: impl FnOnce() -> T) {
    let pool = Pool::create(folder, "64M");
    let place = |what: &str, number: usize| folder.join(format!("{what}{number}"));
    let mounts: Vec<_> = (0..instances)
        .map(|number| {
            fs::create_dir(place("directory", number)).expect("a folder");
            pool.mount_directory(&place("mnt", number), &place("directory", number))
        })
        .collect();
    let prepared = prepare();
    let file = folder.join("script.py");
    fs::write(&file, SYNC).expect("a file");
    let places = (0..instances)
        .map(|number| format!(" {} {}", place("mnt", number).display(), place("directory", number).display()));
    let command = format!("python3 {}{}", file.display(), places.collect::<String>());
    let printed = pool.shell(Way::Library, &command).expect("python");
    assert_eq!(printed, format!("{}0\ncontent of syncfs\n", "content of sync\n".repeat(instances)));
    drop(prepared);
    drop(mounts);
}

#[test]
fn what_was_written_is_on_the_disk_when_sync_returns() {
    isolated("what_was_written_is_on_the_disk_when_sync_returns", |folder| sync_reaches(folder, 1, || ()));
}

#[test]
fn sync_reaches_more_instances_than_there_are_sessions() {
    isolated("sync_reaches_more_instances_than_there_are_sessions", |folder| sync_reaches(folder, 20, || ()));
}

#[test]
fn sync_goes_by_the_mount_when_there_is_no_session() {
    isolated("sync_goes_by_the_mount_when_there_is_no_session", |folder| {
        sync_reaches(folder, 2, remove_sockets);
    });
}

/// Four threads write records by one description, each by `write` or `writev`, and one comes to the limit of file sizes: what is in the
/// file, and where the offset is.
const THREADS: &str = r#"
import os, resource, sys, threading
path = os.path.join(sys.argv[1], "records")
descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)

def work(letter):
    for number in range(400):
        record = letter * (1 + number * 7 % 900) + b"\n"
        if number % 3:
            assert os.write(descriptor, record) == len(record)
        else:
            assert os.writev(descriptor, [record[:5], record[5:]]) == len(record)

threads = [threading.Thread(target=work, args=(letter,)) for letter in (b"a", b"b", b"c", b"d")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
size = os.stat(path).st_size
print(os.lseek(descriptor, 0, os.SEEK_CUR) == size, size)
with open(path, "rb") as file:
    lines = file.read().split(b"\n")
whole = [line for line in lines if len(set(line)) == 1]
print(len(lines), len(whole), sum(len(line) for line in whole))
other = threading.Event()
threading.Thread(target=other.wait, daemon=True).start()
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))
print(os.write(descriptor, b"x" * 100), os.lseek(descriptor, 0, os.SEEK_CUR) - size)
for attempt in range(2):
    try:
        os.write(descriptor, b"y" * 100)
    except OSError as error:
        print(error.errno, os.lseek(descriptor, 0, os.SEEK_CUR) - size)
other.set()
"#;

#[test]
fn threads_write_by_one_description() {
    isolated("threads_write_by_one_description", |folder| {
        let file = folder.join("script.py");
        fs::write(&file, THREADS).expect("a file");
        let [disk, below] = ["disk", "below"].map(|name| {
            fs::create_dir(folder.join(name)).expect("a folder");
            folder.join(name)
        });
        let expected = run(Command::new("python3").arg(&file).arg(&disk)).expect("on the disk");
        let pool = Pool::create(folder, "64M");
        let mount = pool.mount_directory(&folder.join("mnt"), &below);
        let command = format!("python3 {} {}", file.display(), mount.path().display());
        let before = pool.operations(Way::Fuse);
        assert_eq!(pool.shell(Way::Library, &command).expect("by the library"), expected);
        // Of those by the library several may be one request: these would be one each.
        let by_kernel = pool.operations(Way::Fuse) - before;
        assert!(by_kernel < 500, "{by_kernel} operations by the kernel: {}", pool.status());
        drop(mount);
    });
}

/// Whoever made this mount never answers; it ends with what is returned. Sockets are gone, so that every instance is gone to by its mount.
fn mount_what_nobody_serves(folder: &Path, user: u32) -> fs::File {
    remove_sockets();
    let at = folder.join("unserved");
    fs::create_dir(&at).expect("a folder");
    let device = fs::File::options().read(true).write(true).open("/dev/fuse").expect("fuse");
    let options = format!("fd={},rootmode=40000,user_id={user},group_id={user},allow_other", device.as_raw_fd());
    let options = CString::new(options).expect("text");
    rustix::mount::mount("poolfs:other", &at, "fuse.poolfs", MountFlags::empty(), options.as_c_str()).expect("mounted");
    device
}

#[test]
fn sync_does_not_wait_for_a_mount_that_another_user_calls_an_instance() {
    isolated("sync_does_not_wait_for_a_mount_that_another_user_calls_an_instance", |folder| {
        sync_reaches(folder, 1, || mount_what_nobody_serves(folder, 1000));
    });
}
