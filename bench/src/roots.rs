//! Root directories of an image: unpacked, given what programs expect besides files, and programs started in them.

use crate::targets::succeed;
use anyhow::{Context, Result, anyhow, bail, ensure};
use poolfs_ipc::wire::SOCKET_DIRECTORY;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_bind_recursive, mount_change, unmount,
};
use rustix::process::{chdir, pivot_root};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::ffi::{CStr, CString};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The library as programs in a root directory see it.
const LIBRARY: &str = "/run/libpoolfs_preload.so";

/// Where `/run` of root directories is kept: in this measurement's own `/run`, so in memory.
const RUNS: &str = "/run/poolfs-bench";

/// A web server's file, and what it says.
const PAGE: &str = "var/www/html/page.txt";
const TEXT: &str = "the page of the bench command\n";
/// The server's socket and its configuration, below `/run`.
const SOCKET: &str = "server.sock";
const CONFIGURATION: &str = "server.conf";

/// The server's command.
pub const SERVER: &[&str] = &["/usr/sbin/lighttpd", "-D", "-f", "/run/server.conf"];

/// The longest wait for a server's answer, and the pause between two attempts.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
const ANSWER_PAUSE: Duration = Duration::from_micros(100);

/// Unpacks the image with a page for the web server.
pub fn unpack(image: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    succeed(Command::new("tar").arg("-C").arg(to).args(["--xattrs", "-xpf"]).arg(image))?;
    let page = to.join(PAGE);
    fs::create_dir_all(page.parent().context("a folder")?)?;
    Ok(fs::write(page, TEXT)?)
}

/// A root directory with `/proc`, `/dev` and a `/run` of its own, which go with it.
pub struct Root {
    at: PathBuf,
    run: PathBuf,
    mounted: Vec<PathBuf>,
}

impl Root {
    /// Furnishes the root directory `at`, where everything else is mounted already. No two have the same `name`.
    pub fn furnish(at: &Path, name: &str, library: &Path) -> Result<Self> {
        let run = Path::new(RUNS).join(name);
        fs::create_dir_all(run.join("poolfs"))?;
        let common = Path::new(RUNS).join("library");
        if !common.exists() {
            fs::copy(library, &common).with_context(|| format!("cannot copy {}", library.display()))?;
        }
        let linked = run.join(Path::new(LIBRARY).file_name().context("a name")?);
        if !linked.exists() {
            fs::hard_link(common, linked)?;
        }
        let configuration = format!(
            "server.document-root = \"/{}\"\nserver.bind = \"/run/{SOCKET}\"\nserver.port = 0\nserver.errorlog = \"/run/server.log\"\n",
            Path::new(PAGE).parent().context("a folder")?.display()
        );
        fs::write(run.join(CONFIGURATION), configuration)?;
        let mut root = Self { at: at.to_path_buf(), run, mounted: Vec::new() };
        root.mount_all().with_context(|| format!("cannot furnish {}", at.display()))?;
        Ok(root)
    }

    fn mount_all(&mut self) -> Result<()> {
        let at = self.at.clone();
        mount("proc", at.join("proc"), "proc", MountFlags::empty(), None)?;
        self.mounted.push(at.join("proc"));
        mount_bind_recursive("/dev", at.join("dev"))?;
        self.mounted.push(at.join("dev"));
        mount_bind(&self.run, at.join("run"))?;
        self.mounted.push(at.join("run"));
        // It goes with the last mount of poolfs.
        let sockets = Path::new(SOCKET_DIRECTORY);
        fs::create_dir_all(sockets)?;
        mount_bind(sockets, at.join("run/poolfs"))?;
        self.mounted.push(at.join("run/poolfs"));
        Ok(())
    }

    /// Where it is.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// The socket of a server that runs in it.
    pub fn socket(&self) -> PathBuf {
        self.run.join(SOCKET)
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for at in self.mounted.iter().rev() {
            // With what is mounted below; nothing of it is this measurement's own.
            if let Err(error) = unmount(at, UnmountFlags::DETACH) {
                eprintln!("{} cannot be unmounted: {error}", at.display());
            }
        }
    }
}

/// A mount namespace with a root directory for its root, as containers have it: only there a service gives programs sessions.
pub struct Entrance(OwnedFd);

impl Entrance {
    /// That of a root directory, with what is mounted in it now.
    pub fn of(root: &Path) -> Result<Self> {
        let place = CString::new(root.as_os_str().as_bytes())?;
        // The namespace is the thread's, and stays with the descriptor.
        let made = std::thread::spawn(move || Self::make(&place)).join();
        let namespace = made.map_err(|_| anyhow!("a thread panicked"))?;
        Ok(Self(namespace.with_context(|| format!("no mount namespace of {}", root.display()))?))
    }

    fn make(place: &CStr) -> Result<OwnedFd> {
        // SAFETY: descriptors and memory stay as they are.
        unsafe { unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS)? };
        let namespace = fs::File::open("/proc/thread-self/ns/mnt")?;
        mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
        // It may be a plain directory.
        mount_bind_recursive(place, place)?;
        chdir(place)?;
        pivot_root(c".", c".")?;
        unmount(c".", UnmountFlags::DETACH)?;
        Ok(namespace.into())
    }
}

/// A command whose program finds itself behind `entrance`, with or without the library.
pub fn rooted(entrance: &Entrance, words: &[impl AsRef<std::ffi::OsStr>], with_library: bool) -> Result<Command> {
    let [program, arguments @ ..] = words else { bail!("no program") };
    let namespace = entrance.0.try_clone()?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
    if with_library {
        command.env("LD_PRELOAD", LIBRARY);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let enter = move || Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?);
    // SAFETY: between fork and exec this is one system call.
    unsafe { command.pre_exec(enter) };
    Ok(command)
}

/// A server in a root directory; ended with this value.
pub struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts the server, whose socket is `socket` out here.
    pub fn start(entrance: &Entrance, socket: &Path, with_library: bool) -> Result<Self> {
        let child = rooted(entrance, SERVER, with_library)?.spawn().context("cannot start the server")?;
        Ok(Self { child, socket: socket.to_path_buf() })
    }

    /// Whether it has answered a request.
    pub fn answers(&mut self) -> Result<bool> {
        let Ok(mut stream) = UnixStream::connect(&self.socket) else {
            let ended = self.child.try_wait()?;
            ensure!(ended.is_none(), "the server has ended: {ended:?}");
            return Ok(false);
        };
        let page = Path::new(PAGE).file_name().context("a name")?.to_string_lossy();
        stream.write_all(format!("GET /{page} HTTP/1.0\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.contains(" 200 ") && answer.ends_with(TEXT), "the server answered {answer:?}");
        Ok(true)
    }

    /// Ends it.
    pub fn end(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        self.child.wait()?;
        // A socket that is left keeps the next one from its place.
        let _ = fs::remove_file(&self.socket);
        Ok(())
    }
}

/// Waits until every server has answered one request.
pub fn all_answer(servers: &mut [Server]) -> Result<()> {
    let deadline = Instant::now() + ANSWER_WAIT;
    let mut waiting: Vec<&mut Server> = servers.iter_mut().collect();
    loop {
        let mut silent = Vec::new();
        for server in waiting {
            if !server.answers()? {
                silent.push(server);
            }
        }
        if silent.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{} servers do not answer", silent.len());
        waiting = silent;
        std::thread::sleep(ANSWER_PAUSE);
    }
}
