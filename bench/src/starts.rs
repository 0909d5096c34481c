//! Measures how long programs of an image take to start when they were started before: in a root directory on every target, and in
//! containers.

use crate::files::fill;
use crate::roots::{Entrance, Root, SERVER, Server, all_answer, rooted, unpack};
use crate::table::{Row, Table, Unit};
use crate::targets::{Branches, Laboratory, Target, succeed, turned};
use crate::worker::median;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// (what the table calls it, the command)
const PROGRAMS: &[(&str, &[&str])] = &[
    ("`python3 -c pass`, from start to end", &["/usr/bin/python3", "-c", "pass"]),
    ("`apt-get --version`, from start to end", &["/usr/bin/apt-get", "--version"]),
    ("lighttpd, until it answered a request", SERVER),
];

/// Overlayfs first: the others are compared with it.
const TARGETS: [Target; 5] = [Target::Overlayfs, Target::Library, Target::Fuse, Target::FuseOverlayfs, Target::Ext4];

/// Starts of one program on one target in a round, besides one that is not counted.
const STARTS: u32 = 10;

/// Containers of one kind in a round, besides one that is not counted.
const CONTAINERS: u32 = 3;

/// What runs in a container.
const CONTAINER: &[&str] = &["python3", "-c", "pass"];

/// A file of the image that a container writes, and how.
const LARGE: &str = "large";
const LARGE_BYTES: u64 = 4 << 30;
const WRITING: &[&str] = &["python3", "-c", "open('/large', 'r+b').write(b'x')"];

/// Rounds of that: a filesystem that copies files takes its time.
const WRITING_ROUNDS: u32 = 2;

/// Medians of `rounds` rounds; `image` is a tar of a root file system with these programs.
pub fn run(work: &Path, poolfs: &Path, image: &Path, rounds: u32) -> Result<Table> {
    let mut laboratory = Laboratory::new(work, poolfs, "0-1")?;
    unpack(image, &laboratory.lower())?;
    let mut samples: BTreeMap<(usize, Target), Vec<f64>> = BTreeMap::new();
    laboratory.mount()?;
    for round in 0..rounds {
        eprintln!("round {} of {rounds}: programs", round + 1);
        for (program, (_, words)) in PROGRAMS.iter().enumerate() {
            for target in turned(&TARGETS, round) {
                let times = starts(&laboratory, target, words, poolfs)?;
                samples.entry((program, target)).or_default().extend(times);
            }
        }
    }
    laboratory.unmount()?;
    fill(&laboratory.lower().join(LARGE), LARGE_BYTES)?;
    let containers = Containers::prepare(&laboratory)?;
    for round in 0..rounds {
        eprintln!("round {} of {rounds}: containers", round + 1);
        for (number, has_company) in [(PROGRAMS.len(), false), (PROGRAMS.len() + 1, true)] {
            let company = has_company.then(|| containers.company()).transpose()?;
            for target in turned(&TARGETS, round).into_iter().filter(|target| *target != Target::Ext4) {
                let times = containers.times(target, CONTAINER)?;
                samples.entry((number, target)).or_default().extend(times);
            }
            company.map_or(Ok(()), |company| containers.end(company))?;
        }
        for target in turned(&TARGETS, round).into_iter().filter(|target| *target != Target::Ext4) {
            if round < WRITING_ROUNDS {
                let times = containers.times(target, WRITING)?;
                samples.entry((PROGRAMS.len() + 2, target)).or_default().extend(times);
            }
        }
    }
    let container = |place| format!("container of `{}`, {place}, from the command to its end", CONTAINER.join(" "));
    let places = ["alone in its pool", "beside one of the same image"];
    let titles = PROGRAMS.iter().map(|program| program.0.to_owned()).chain(places.map(container));
    let titles = titles.chain(["container that writes a byte into a file of 4 GiB of its image".to_owned()]);
    let row = |(number, title)| {
        let medians = TARGETS.map(|target| samples.get_mut(&(number, target)).map_or(0.0, |all| median(all)));
        Row { title, medians: medians.to_vec() }
    };
    let rows = titles.enumerate().map(row).collect();
    Ok(Table::new("second start", Unit::Milliseconds, &TARGETS.map(Target::title), rows))
}

/// Nanoseconds of each start but the first, by a process in the pool's group, which is the same for all targets.
fn starts(laboratory: &Laboratory, target: Target, words: &[&str], poolfs: &Path) -> Result<Vec<f64>> {
    let library = poolfs.with_file_name("libpoolfs_preload.so");
    let root = Root::furnish(&laboratory.directory(target), "start", &library)?;
    let mut command = laboratory.in_group(&std::env::current_exe()?);
    command.arg("start").arg(root.at()).arg("--times").arg(STARTS.to_string());
    if target == Target::Library {
        command.arg("--library");
    }
    if words == SERVER {
        command.arg("--socket").arg(root.socket());
    }
    let output = command.arg("--").args(words).output()?;
    if !output.status.success() {
        bail!("{words:?} over {}: {}", target.title(), String::from_utf8_lossy(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let times: Vec<f64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    ensure!(times.len() == STARTS as usize, "{words:?} over {} said {text:?}", target.title());
    Ok(times)
}

/// What `starts` runs in the pool's group: starts a program in `root` once for nothing, then `times` times, and prints the
/// nanoseconds of each: to its end, or to the first answer at `socket`.
pub fn start(root: &Path, words: &[String], times: u32, library: bool, socket: Option<&Path>) -> Result<()> {
    let entrance = Entrance::of(root)?;
    for time in 0..=times {
        let begun = Instant::now();
        let elapsed = if let Some(socket) = socket {
            let mut servers = [Server::start(&entrance, socket, library)?];
            all_answer(&mut servers)?;
            let elapsed = begun.elapsed();
            let [server] = servers;
            server.end()?;
            elapsed
        } else {
            let status = rooted(&entrance, words, library)?.status()?;
            let elapsed = begun.elapsed();
            ensure!(status.success(), "{words:?}: {status}");
            elapsed
        };
        if time > 0 {
            println!("{}", elapsed.as_nanos());
        }
    }
    Ok(())
}

/// Containers of one image, which is the lower directory, by `poolfs run` and by a union with runc and the same specification.
struct Containers<'l> {
    laboratory: &'l Laboratory,
    image: &'static str,
    bundle: PathBuf,
}

impl<'l> Containers<'l> {
    /// Imports the image, and learns from a container what its specification is.
    fn prepare(laboratory: &'l Laboratory) -> Result<Self> {
        let image = "bench";
        let folder = laboratory.folder();
        let source = format!("dir:{}", laboratory.lower().display());
        succeed(laboratory.poolfs().args(["image", "import", image, &source]))?;
        let bundle = folder.join("bundle");
        let containers = Self { laboratory, image, bundle: bundle.clone() };
        let example = containers.company()?;
        let kept = folder.join("state/containers").join(example).join("bundle");
        let copied = succeed(Command::new("cp").arg("-a").arg(&kept).arg(&bundle));
        containers.end(example)?;
        copied?;
        let path = bundle.join("config.json");
        let mut specification: Value = serde_json::from_slice(&fs::read(&path)?)?;
        specification["root"]["path"] = folder.join("container").to_string_lossy().into();
        specification["linux"]["cgroupsPath"] = format!("/poolfs/{}-runc/container", laboratory.pool()).into();
        for mount in specification["mounts"].as_array_mut().context("mounts")? {
            let source = mount["source"].as_str().map(PathBuf::from);
            if let Some(inside) = source.as_deref().and_then(|source| source.strip_prefix(&kept).ok()) {
                mount["source"] = bundle.join(inside).to_string_lossy().into();
            }
        }
        fs::write(&path, specification.to_string())?;
        Ok(containers)
    }

    /// A container that runs, and does nothing, until it is ended: with it the pool's service and what it knows of the image.
    fn company(&self) -> Result<&'static str> {
        let name = "company";
        let mut command = self.laboratory.poolfs();
        command.args([
            "run",
            self.laboratory.pool(),
            self.image,
            "--name",
            name,
            "--legacy",
            "-d",
            "--",
            "sleep",
            "1000",
        ]);
        succeed(&mut command)?;
        Ok(name)
    }

    fn end(&self, name: &str) -> Result<()> {
        succeed(self.laboratory.poolfs().args(["stop", name, "--time", "0"]))?;
        succeed(self.laboratory.poolfs().args(["rm", name, "--force"]))
    }

    /// Nanoseconds of each container but the first.
    fn times(&self, target: Target, words: &[&str]) -> Result<Vec<f64>> {
        let path = self.bundle.join("config.json");
        let mut specification: Value = serde_json::from_slice(&fs::read(&path)?)?;
        specification["process"]["args"] = words.into();
        fs::write(&path, specification.to_string())?;
        let mut times = Vec::new();
        for _ in 0..=CONTAINERS {
            let begun = Instant::now();
            match target {
                Target::Library | Target::Fuse => {
                    let mut command = self.laboratory.poolfs();
                    command.args(["run", self.laboratory.pool(), self.image, "--rm"]);
                    if target == Target::Fuse {
                        command.arg("--legacy");
                    }
                    succeed(command.arg("--").args(words).stdin(Stdio::null()))?;
                }
                _ => self.by_runc(target)?,
            }
            times.push(begun.elapsed().as_nanos() as f64);
        }
        Ok(times.split_off(1))
    }

    fn by_runc(&self, target: Target) -> Result<()> {
        let branches = Branches::beside(&self.laboratory.folder().join("container"))?;
        self.laboratory.mount_union(target, &branches)?;
        let mut runc = Command::new("runc");
        let ran = succeed(runc.arg("run").arg("--bundle").arg(&self.bundle).arg("bench").stdin(Stdio::null()));
        let unmounted = self.laboratory.unmount_union(target, &branches.at);
        ran.and(unmounted)?;
        branches.remove()
    }
}
