//! Where everything is: the state directory, the sockets, the programs that belong to this one.

use crate::failure::{Failure, Result};
use crate::patience::Patience;
use crate::state::Collection;
use crate::waiting;
use poolfs_host::{ControlGroups, Host, LinuxHost};
use poolfs_image::ImageStore;
use poolfs_service_protocol::CONTAINER_SOCKETS;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What the directory is called, beside the sockets, in which runtimes find roots of containers.
pub const SHOWN_ROOTS: &str = "roots";

/// The fixed surroundings of one invocation.
pub struct Context {
    /// The host.
    pub host: Box<dyn Host>,
    /// The state directory.
    pub state: PathBuf,
    /// The directory of sockets and other things that end with the host.
    pub run: PathBuf,
    /// Whether to print JSON.
    pub json: bool,
    /// How long is waited for those who do not answer.
    pub patience: Arc<Patience>,
    /// The directory this program was found in.
    program_directory: PathBuf,
}

impl Context {
    /// Of this process.
    pub fn new(state: PathBuf, run: PathBuf, json: bool, patience: Arc<Patience>) -> Result<Context> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::new("poolfs", format!("where it lies is unknown: {error}"), "mount /proc"))?;
        let absolute = |path: PathBuf| std::path::absolute(&path).map_err(|error| Failure::file(&path, error));
        Ok(Context {
            host: Box::new(LinuxHost),
            state: absolute(state)?,
            run: absolute(run)?,
            json,
            patience,
            program_directory: program.parent().map(Path::to_path_buf).unwrap_or_default(),
        })
    }

    /// The same with another state directory.
    pub fn with_state(&self, state: PathBuf) -> Context {
        let program_directory = self.program_directory.clone();
        let (run, patience) = (self.run.clone(), Arc::clone(&self.patience));
        Context { host: Box::new(LinuxHost), state, run, json: self.json, patience, program_directory }
    }

    /// Of a test, on a host that exists only in memory.
    #[cfg(test)]
    pub fn for_test(place: &Path, host: poolfs_host::RecordingHost) -> Context {
        let (state, run) = (place.join("state"), place.join("run"));
        let patience = Patience::new(std::time::Duration::from_secs(crate::patience::LIMIT_SECONDS));
        Context { host: Box::new(host), state, run, json: false, patience, program_directory: place.to_path_buf() }
    }

    /// A program has ended that this command ran, for hours perhaps: what it does now is another thing, with all of the time, and signals were
    /// for the program.
    pub fn begin_anew(&self) {
        self.patience.renew();
        crate::signals::forget_end();
    }

    /// The control groups of the pools of this state directory.
    pub fn groups(&self) -> poolfs_host::Result<ControlGroups> {
        let groups = ControlGroups::detect(&*self.host)?;
        let path = self.state.canonicalize().unwrap_or_else(|_| self.state.clone());
        Ok(groups.of_state(&*self.host, &path))
    }

    /// The pools.
    pub fn pools(&self) -> Result<Collection> {
        Ok(Collection::open(&self.state, "pool")?.with_patience(&self.patience))
    }

    /// The containers.
    pub fn containers(&self) -> Result<Collection> {
        Ok(Collection::open(&self.state, "container")?.with_patience(&self.patience))
    }

    /// The images.
    pub fn images(&self) -> Result<ImageStore> {
        crate::state::make_private(&self.state)?;
        let patience = Arc::clone(&self.patience);
        let wait = move |path: &Path, file, operation| {
            let failed = |failure: Failure| std::io::Error::other(failure.summary());
            waiting::lock(&patience, &LinuxHost, path, file, operation).map_err(failed)
        };
        Ok(ImageStore::open(&self.state)?.locked_by(wait))
    }

    /// This program.
    pub fn program(&self) -> PathBuf {
        self.program_directory.join("poolfs")
    }

    /// The program of a filesystem service.
    pub fn service_program(&self) -> Result<PathBuf> {
        self.companion(
            "poolfs-service",
            &["", "../libexec/poolfs"],
            "build it: cargo build --release -p poolfs-service",
        )
    }

    /// The library that is preloaded.
    pub fn preload_library(&self) -> Result<PathBuf> {
        let remedy =
            "build it: cargo build -p poolfs-preload --profile preload, and put it beside poolfs; or use --fuse";
        self.companion("libpoolfs_preload.so", &["", "../lib/poolfs", "../preload"], remedy)
    }

    /// The first process of containers that ask for one.
    pub fn init_program(&self) -> Result<PathBuf> {
        let remedy = "build it with `make build`, and put it beside poolfs; or leave --init out";
        self.companion("poolfs-init", &["", "../libexec/poolfs", "../preload"], remedy)
    }

    fn companion(&self, name: &str, places: &[&str], remedy: &str) -> Result<PathBuf> {
        let mut candidates = places.iter().map(|place| self.program_directory.join(place).join(name));
        candidates
            .find_map(|path| path.canonicalize().ok())
            .ok_or_else(|| Failure::host(name, format!("it is not beside {}", self.program().display()), remedy))
    }

    /// The directory of sockets, made when it is not there, and kept as long as the result lives. Containers' users must be
    /// able to reach sockets in it.
    pub fn make_run_directory(&self) -> Result<File> {
        let failed = |error: std::io::Error| Failure::file(&self.run, error);
        loop {
            std::fs::create_dir_all(&self.run).map_err(failed)?;
            let opened = match File::open(&self.run) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                other => other.map_err(failed)?,
            };
            let opened = waiting::lock(&self.patience, &*self.host, &self.run, opened, FlockOperation::LockShared)?;
            // Whoever removed it had the lock before: then it is another one now, or none.
            let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
            if opened.metadata().ok().map(identity) == std::fs::metadata(&self.run).ok().map(identity) {
                return Ok(opened);
            }
        }
    }

    /// Remove the directory of sockets when nothing is in it any more.
    pub fn remove_run_directory(&self) {
        let Ok(opened) = File::open(&self.run) else { return };
        if rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Not empty means that others still use it.
            let _ = std::fs::remove_dir(self.run.join(CONTAINER_SOCKETS));
            let _ = std::fs::remove_dir(self.run.join(SHOWN_ROOTS));
            let _ = std::fs::remove_dir(&self.run);
        }
    }
}
