//! How the library finds instances and gets sessions with them, also under adverse conditions.

use poolfs_tests::{Pool, Stepper, Way, compile, isolated, program, remove_sockets, shell, wait_until};
use rustix::fs::CWD;
use rustix::mount::{MountFlags, OpenTreeFlags, UnmountFlags, mount_bind, mount_remount, open_tree, unmount};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::fs;
use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// More instances than one process has sessions at a time.
const INSTANCES: usize = 20;

#[test]
fn each_of_many_instances_is_served_by_the_library() {
    isolated("each_of_many_instances_is_served_by_the_library", |folder| {
        let pool = Pool::create(folder, "64M");
        let mounts: Vec<_> = (0..INSTANCES)
            .map(|number| {
                let directory = folder.join(format!("directory-{number}"));
                fs::create_dir(&directory).expect("a folder");
                pool.mount_directory(&folder.join(format!("mnt-{number}")), &directory)
            })
            .collect();
        for mount in &mounts {
            let before = pool.operations(Way::Library);
            let _ = pool.shell(Way::Library, &format!("mkdir {}/made", mount.path().display())).expect("mkdir");
            assert!(pool.operations(Way::Library) > before, "{} went by the kernel", mount.path().display());
        }
        // One process that sees all of them.
        let program = compile(folder, "steps", false);
        let mut stepper = Stepper::start(&pool, &program, Way::Library);
        for mount in &mounts {
            assert!(stepper.step(&format!("chmod {}/made 448", mount.path().display())).is_ok());
        }
        drop(stepper);
        drop(mounts);
    });
}

#[test]
fn instances_that_come_and_go_leave_room_for_others() {
    isolated("instances_that_come_and_go_leave_room_for_others", |folder| {
        let pool = Pool::create(folder, "64M");
        let directory = folder.join("directory");
        fs::create_dir(&directory).expect("a folder");
        fs::write(directory.join("file"), "content").expect("a file");
        let kept = folder.join("kept");
        fs::create_dir(&kept).expect("a folder");
        let kept = pool.mount_directory(&folder.join("mnt-kept"), &kept);
        let program = compile(folder, "steps", false);
        let mut stepper = Stepper::start(&pool, &program, Way::Library);
        let at: PathBuf = folder.join("mnt");
        for round in 0..INSTANCES {
            let mount = pool.mount_directory(&at, &directory);
            let before = pool.operations(Way::Library);
            assert_eq!(stepper.step(&format!("chmod {}/file 416", at.display())), Ok(0));
            assert!(pool.operations(Way::Library) > before, "the instance of round {round} went by the kernel");
            drop(mount);
        }
        drop(stepper);
        drop(kept);
    });
}

#[test]
fn who_gets_no_session_says_why() {
    isolated("who_gets_no_session_says_why", |folder| {
        let pool = Pool::create(folder, "64M");
        let directory = folder.join("directory");
        fs::create_dir(&directory).expect("a folder");
        let mount = pool.mount_directory(&folder.join("mnt"), &directory);
        remove_sockets();
        let trace = folder.join("trace");
        let script = format!("POOLFS_TRACE={} mkdir {}/made", trace.display(), mount.path().display());
        let _ = pool.shell(Way::Library, &script).expect("mkdir by the kernel");
        let report = fs::read_to_string(trace).expect("a report");
        let no_such_file = "library=0 fuse=1 sessions-refused=1 errno=2\n";
        assert!(report.ends_with(no_such_file), "{report}");
        assert!(directory.join("made").exists());
        drop(mount);
    });
}

/// The process of the program itself.
fn program_of(stepper: &Stepper) -> String {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", stepper.pid())).expect("it runs");
    children.split_whitespace().next().expect("a child").to_owned()
}

/// Whether a process waits in one of the system calls that change a mode by a path.
fn is_in_chmod(process: &str) -> bool {
    let call = fs::read_to_string(format!("/proc/{process}/syscall")).expect("it runs");
    let calls = [libc::SYS_chmod, libc::SYS_fchmodat].map(|number| number.to_string());
    call.split(' ').next().is_some_and(|number| calls.iter().any(|known| known == number))
}

#[test]
fn a_service_that_stood_still_at_the_beginning_is_used_afterwards() {
    isolated("a_service_that_stood_still_at_the_beginning_is_used_afterwards", |folder| {
        let pool = Pool::create(folder, "64M");
        let directory = folder.join("directory");
        fs::create_dir(&directory).expect("a folder");
        fs::write(directory.join("file"), "content").expect("a file");
        let mount = pool.mount_directory(&folder.join("mnt"), &directory);
        let program = compile(folder, "steps", false);
        let service = Pid::from_raw(pool.service_pid()).expect("a process");
        let before = pool.operations(Way::Library);
        let mut stepper = Stepper::start(&pool, &program, Way::Library);
        // From here on it runs, and has not used the mount.
        assert!(stepper.step("statsize /").is_ok());
        let caller = program_of(&stepper);
        kill_process(service, Signal::STOP).expect("it is ours");
        let waker = std::thread::spawn(move || {
            // Then the library has given up, and the kernel waits for the service.
            let waited = std::panic::catch_unwind(|| wait_until("the system call itself", || is_in_chmod(&caller)));
            kill_process(service, Signal::CONT).expect("it is ours");
            waited
        });
        let step = format!("chmod {} 416", mount.path().join("file").display());
        assert_eq!(stepper.step(&step), Ok(0));
        waker.join().expect("no panic").expect("left to the kernel");
        assert_eq!(pool.operations(Way::Library), before, "the library did not wait for a service that stands still");
        wait_until("it uses the library again", || {
            assert_eq!(stepper.step(&step), Ok(0));
            pool.operations(Way::Library) > before
        });
        drop(stepper);
        drop(mount);
    });
}

/// A private mount of a directory, as branches are sent to services. It has been at `place` before.
fn private_mount(place: &Path, directory: &Path) -> OwnedFd {
    fs::create_dir_all(place).expect("a folder");
    mount_bind(directory, place).expect("mounted");
    const NO_LINKS: MountFlags = MountFlags::from_bits_retain(256);
    let restricted = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME | NO_LINKS;
    mount_remount(place, restricted, c"").expect("restricted");
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let branch = open_tree(CWD, place, clone).expect("cloned");
    unmount(place, UnmountFlags::empty()).expect("unmounted");
    branch
}

/// A service that is nobody's pool.
struct Impostor(Child);

impl Impostor {
    /// Mounts `directory` at `at` under the name of another service's instance.
    fn mount(folder: &Path, instance: &str, at: &Path, directory: &Path) -> Self {
        let control = folder.join("impostor/control.sock");
        let config = json!({
            "pool": "impostor", "cpus": [0], "cache_bytes": 64 << 20,
            "control_socket": control, "socket_directory": folder.join("impostor"),
        });
        let mut child = Command::new(program("poolfs-service")).stdin(Stdio::piped()).spawn().expect("a service");
        child.stdin.take().expect("a pipe").write_all(config.to_string().as_bytes()).expect("read");
        let service = Self(child);
        let mut connected = None;
        wait_until("a service that can be connected to", || {
            connected = UnixStream::connect(&control).ok();
            connected.is_some()
        });
        let stream = connected.expect("connected");
        let stack = json!({"kind": "directory", "directory": directory});
        let command = json!({
            "command": "mount", "instance": instance, "mount_point": at, "stack": stack, "devices": true, "is_root": false,
        });
        let (line, branch) = (format!("{command}\n"), private_mount(&folder.join("impostor/branch"), directory));
        let branches = [branch.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&branches)));
        let sent = sendmsg(&stream, &[IoSlice::new(line.as_bytes())], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(line.len()));
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).expect("an answer");
        assert!(answer.contains("done"), "{answer}");
        service
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_mount_that_only_has_the_name_of_an_instance_is_left_to_the_kernel() {
    isolated("a_mount_that_only_has_the_name_of_an_instance_is_left_to_the_kernel", |folder| {
        let pool = Pool::create(folder, "64M");
        let [genuine, other] = ["genuine", "other"].map(|name| folder.join(name));
        for (directory, content) in [(&genuine, "content"), (&other, "x")] {
            fs::create_dir(directory).expect("a folder");
            fs::write(directory.join("file"), content).expect("a file");
        }
        let at = folder.join("mnt");
        let mount = pool.mount_directory(&at, &genuine);
        let table = fs::read_to_string("/proc/self/mountinfo").expect("readable");
        let line = table.lines().find(|line| line.contains(at.to_str().expect("text"))).expect("mounted");
        let instance = line.split("poolfs:").nth(1).and_then(|rest| rest.split(' ').next()).expect("a source");
        let claimed = folder.join("claimed");
        fs::create_dir(&claimed).expect("a folder");
        let impostor = Impostor::mount(folder, instance, &claimed, &other);
        let program = compile(folder, "steps", false);
        let mut stepper = Stepper::start(&pool, &program, Way::Library);
        let before = pool.operations(Way::Library);
        assert_eq!(stepper.step(&format!("chmod {}/file 416", at.display())), Ok(0));
        assert!(pool.operations(Way::Library) > before, "the instance went by the kernel");
        assert_eq!(stepper.step(&format!("chmod {}/file 384", claimed.display())), Ok(0));
        let mode = |directory: &Path| fs::metadata(directory.join("file")).expect("there").permissions().mode() & 0o777;
        assert_eq!((mode(&genuine), mode(&other)), (0o640, 0o600), "the instance's own file");
        drop(stepper);
        drop(impostor);
        drop(mount);
    });
}

#[test]
fn an_open_file_stays_the_librarys_while_mounts_come_and_go() {
    isolated("an_open_file_stays_the_librarys_while_mounts_come_and_go", |folder| {
        let pool = Pool::create(folder, "64M");
        let (directory, others) = (folder.join("directory"), folder.join("others"));
        fs::create_dir(&directory).and_then(|()| fs::create_dir(&others)).expect("folders");
        let mount = pool.mount_directory(&folder.join("mnt"), &directory);
        let mut command = pool.command();
        command.args(["exec", pool.name(), "--"]).arg(compile(folder, "beside", false)).arg(mount.path().join("file"));
        let mut program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("started");
        let (mut input, output) = (program.stdin.take().expect("piped"), program.stdout.take().expect("piped"));
        let mut said = BufReader::new(output).lines().map(|line| line.expect("readable"));
        assert_eq!(said.next().as_deref(), Some("works"));
        for _ in 0..200 {
            let turn = format!("mount -t tmpfs none {0} && umount {0}", others.display());
            let _ = shell(&turn).expect("mounted");
        }
        writeln!(input).expect("it reads");
        assert_eq!(said.next().as_deref(), Some("rests"));
        let before = pool.operations(Way::Library);
        writeln!(input).expect("it reads");
        assert_eq!(said.next().as_deref(), Some("done"));
        let served = pool.operations(Way::Library) - before;
        assert!(served >= 100, "{served} of 100");
        writeln!(input).expect("it reads");
        assert!(program.wait().expect("it ends").success());
        drop(mount);
    });
}
