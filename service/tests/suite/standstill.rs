//! Tests of clients that stop at any step, by a signal or frozen with their control group: the others go on.

use crate::bare::{Bare, bare_session, raw_socket};
use crate::harness::{Running, isolated};
use crate::queue::{adopt, connect, handle, write};
use poolfs_ipc::Connection;
use poolfs_ipc::area::{BufferArea, DATA_BYTES, queue};
use poolfs_ipc::futex;
use poolfs_ipc::queue::{Doorbell, DoorbellQueue};
use poolfs_ipc::state::{CallerState, Sequence};
use poolfs_ipc::wire::{Operation, Request, Status};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const NAME: &str = "standstill::clients_that_stop_at_any_step_hold_up_nobody";
const STEP: &str = "POOLFS_STANDSTILL_STEP";
const PLACE: &str = "POOLFS_STANDSTILL_PLACE";

/// Where a client may stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Connected,
    Greeted,
    Borrowed,
    Submitted,
    Published,
    Rung,
    AboutToSleep,
    Answered,
    WaitingForSpace,
    QueueFull,
    FileAdopted,
    DirectoryListed,
    LockHeld,
    MappingChanged,
}

const STEPS: [Step; 14] = [
    Step::Connected,
    Step::Greeted,
    Step::Borrowed,
    Step::Submitted,
    Step::Published,
    Step::Rung,
    Step::AboutToSleep,
    Step::Answered,
    Step::WaitingForSpace,
    Step::QueueFull,
    Step::FileAdopted,
    Step::DirectoryListed,
    Step::LockHeld,
    Step::MappingChanged,
];

/// Longest that another client's work may take meanwhile.
fn wait_max() -> Duration {
    if std::env::var_os("POOLFS_SOAK").is_some() { Duration::from_secs(1) } else { Duration::from_secs(10) }
}

/// The client: goes on to its step, stands still there, and ends when it is let go.
fn stop_at(step: Step, folder: &Path) {
    let stand = || {
        // SAFETY: stops this process until somebody continues it.
        assert_eq!(unsafe { libc::raise(libc::SIGSTOP) }, 0);
    };
    let (socket, at) = (folder.join("run/one.sock"), folder.join("mnt-one"));
    match step {
        Step::Connected => {
            let _socket = raw_socket(&socket);
            stand();
        }
        Step::Greeted => {
            let socket = raw_socket(&socket);
            poolfs_ipc::handshake::send_hello(socket.as_fd()).expect("greeted");
            stand();
        }
        Step::FileAdopted => {
            let hostile = bare_session(&socket);
            let mut file = OpenOptions::new().read(true).write(true).open(at.join("common")).expect("there");
            assert_ne!(adopt(&file, hostile.welcome.session).handle, 0);
            file.write_all(b"by the kernel").expect("written");
            stand();
        }
        Step::DirectoryListed => {
            let mut listing = fs::read_dir(&at).expect("readable");
            assert!(listing.next().is_some());
            stand();
        }
        Step::LockHeld => {
            let file = OpenOptions::new().write(true).open(at.join("common")).expect("there");
            file.lock().expect("nobody else has it");
            stand();
        }
        Step::MappingChanged => {
            let file = OpenOptions::new().read(true).write(true).open(at.join("mapped")).expect("there");
            // SAFETY: a new mapping of a file that this test alone changes; nothing refers to it.
            unsafe {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
                let bytes = libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, descriptor, 0);
                assert_ne!(bytes, libc::MAP_FAILED);
                bytes.cast::<u8>().write_volatile(7);
            }
            stand();
        }
        _ => request(&bare_session(&socket), step, &stand),
    }
}

/// A request, as far as `step`.
fn request(client: &Bare, step: Step, stand: &dyn Fn()) {
    let slots = client.welcome.queue_slots as usize;
    let words = queue(&client.queues[0], slots);
    let area = BufferArea::new(&client.buffers, 0, DATA_BYTES);
    let state = CallerState::new(area.state());
    let borrowed: Sequence = state.borrow().expect("free");
    area.put_data(0, b"common").expect("room");
    area.put_request(&Request { operation: Operation::Stat as u32, path_length: 6, ..Request::default() });
    if step == Step::Borrowed {
        return stand();
    }
    let submitted = state.submit(borrowed);
    let bell = Doorbell { session: client.welcome.session, buffer: 0, again: false };
    match step {
        Step::Submitted => return stand(),
        Step::WaitingForSpace => {
            words.announce_full();
            return stand();
        }
        Step::QueueFull => {
            // The service takes them, unless it is slower than this.
            for _ in 0..10 * slots {
                let _ = words.publish(bell);
            }
            return stand();
        }
        _ => {}
    }
    if words.publish(bell) == Ok(true) && step != Step::Published {
        futex::wake_one(words.ring());
    }
    if step == Step::AboutToSleep {
        let _ = state.announce_sleep(submitted);
    }
    if step == Step::Answered {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !state.is_done(submitted) {
            assert!(Instant::now() < deadline, "no answer");
            let _ = words.publish(Doorbell { again: true, ..bell });
            futex::wake_all(words.ring());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    stand();
}

/// A client that stands still; killed when dropped.
struct Still(Child);

impl Still {
    fn start(step: usize, folder: &Path) -> Self {
        let child = Command::new(std::env::current_exe().expect("the test's own path"))
            .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
            .env(STEP, step.to_string())
            .env(PLACE, folder)
            .spawn()
            .expect("a client");
        let still = Self(child);
        let mut status = 0;
        // SAFETY: waits for a child of this process; `status` is valid for the call.
        let waited = unsafe { libc::waitpid(still.number(), &raw mut status, libc::WUNTRACED) };
        assert_eq!(waited, still.number());
        assert!(libc::WIFSTOPPED(status), "the client of step {:?} ended: {status:#x}", STEPS[step]);
        still
    }

    fn number(&self) -> i32 {
        self.0.id() as i32
    }

    fn go_on(mut self) {
        // SAFETY: a child of this process that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.number(), libc::SIGCONT) }, 0);
        let status = self.0.wait().expect("ours");
        assert!(status.success(), "after standing still: {:?} {:?}", status.code(), status.signal());
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What others do meanwhile, by both paths.
struct Others {
    at: PathBuf,
    connection: Connection,
    file: File,
    handle: u64,
}

impl Others {
    fn new(folder: &Path, at: &Path) -> Self {
        let connection = connect(folder, "one");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(at.join("others")).expect("made");
        let handle = handle(&file, &connection);
        Self { at: at.to_owned(), connection, file, handle }
    }

    fn work(&self, what: &str) {
        let start = Instant::now();
        let reply = write(&self.connection, self.handle, 0, what.as_bytes());
        assert_eq!(reply.status, Status::Done as u32, "{what}: {reply:?}");
        let sync = Request { operation: Operation::Sync as u32, handle: self.handle, ..Request::default() };
        let reply = self.connection.call(&sync, &[], &mut []).expect("a reply");
        assert_eq!(reply.status, Status::Done as u32, "{what}: {reply:?}");
        let mut bytes = vec![0; what.len()];
        self.file.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(bytes, what.as_bytes());
        let [new, renamed] = ["new", "renamed"].map(|name| self.at.join(name));
        let mut file = File::create(&new).expect("made");
        file.write_all(what.as_bytes()).expect("written");
        file.sync_all().expect("synced");
        fs::rename(&new, &renamed).expect("renamed");
        assert_eq!(fs::read(&renamed).expect("read"), what.as_bytes());
        assert!(fs::read(self.at.join("common")).is_ok() && fs::read_dir(&self.at).expect("listed").count() >= 4);
        fs::remove_file(&renamed).expect("removed");
        assert!(start.elapsed() < wait_max(), "{what}: others took {:?}", start.elapsed());
    }
}

/// A control group that can be frozen, where this machine has one.
struct Freezer(PathBuf);

impl Freezer {
    fn make() -> Option<Self> {
        let name = format!("poolfs-standstill-{}", std::process::id());
        let roots = ["/sys/fs/cgroup/freezer", "/sys/fs/cgroup"].map(Path::new);
        let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists())?;
        let place = root.join(name);
        fs::create_dir(&place).is_ok().then_some(Self(place))
    }

    fn freeze(&self, process: i32, frozen: bool) -> bool {
        if fs::write(self.0.join("cgroup.procs"), process.to_string()).is_err() {
            return false;
        }
        let old = fs::write(self.0.join("freezer.state"), if frozen { "FROZEN" } else { "THAWED" });
        old.is_ok() || fs::write(self.0.join("cgroup.freeze"), if frozen { "1" } else { "0" }).is_ok()
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn clients_that_stop_at_any_step_hold_up_nobody() {
    if let Some(step) = std::env::var_os(STEP) {
        let step: usize = step.to_str().and_then(|text| text.parse().ok()).expect("a number");
        return stop_at(STEPS[step], Path::new(&std::env::var_os(PLACE).expect("told")));
    }
    isolated(NAME, |folder| {
        let service = Running::start(folder);
        let (at, _) = service.mount_directory("one");
        fs::write(at.join("common"), b"common").expect("written");
        fs::write(at.join("mapped"), [1; 4096]).expect("written");
        let others = Others::new(folder, &at);
        let freezer = Freezer::make();
        for (number, step) in STEPS.iter().enumerate() {
            let still = Still::start(number, folder);
            others.work(&format!("stopped {step:?}"));
            drop(still);
            others.work(&format!("killed {step:?}"));
            let still = Still::start(number, folder);
            if let Some(freezer) = freezer.as_ref().filter(|freezer| freezer.freeze(still.number(), true)) {
                others.work(&format!("frozen {step:?}"));
                freezer.freeze(still.number(), false);
            }
            still.go_on();
            others.work(&format!("gone {step:?}"));
        }
        assert_eq!(fs::read(at.join("mapped")).expect("read")[0], 7, "the change of a mapping is lost");
        let deadline = Instant::now() + Duration::from_secs(10);
        while service.status().instances[0].sessions > 1 {
            assert!(Instant::now() < deadline, "sessions of the dead are left");
            std::thread::sleep(Duration::from_millis(10));
        }
    });
}
