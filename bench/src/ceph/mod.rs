//! Measures poolfs over a directory of a Ceph cluster beside ceph-fuse and libcephfs, paired: each round runs every client once, in a
//! rotating order.

mod bars;
pub mod clients;
pub mod clones;
pub mod cluster;
mod direct;
mod libcephfs;

use crate::targets::{Laboratory, turned};
use crate::worker::{Operation, by_threads, median};
use anyhow::{Context, Result, bail};
use bars::{Bar, Row, Shown, markdown};
use clients::{Client, Mounted, System};
use cluster::{Cluster, MANAGER, Peer, missing};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Bytes of the file that is read and written.
const DATA_BYTES: u64 = 64 << 20;

/// MiB of each file that is read or written once, in pieces of 1 MiB.
const STREAM_MEBIBYTES: u64 = 64;

/// What the cluster stores at most.
const STORED: &str = "16G";

/// Memory of the pool and its service, and how much of it is for cached bytes.
const POOL_MEMORY: &str = "4G";
const POOL_CACHE: &str = "1G";

/// Programs that may be missing.
const PEERS: [Peer; 4] = [
    MANAGER,
    ("ceph-fuse", "ceph-fuse", "nothing that goes by it is measured"),
    ("unionfs", "unionfs-fuse", "the memory of its unions over ceph-fuse is not measured"),
    ("fuse-overlayfs", "fuse-overlayfs", "the memory of its unions over ceph-fuse is not measured"),
];

/// An operation of the table.
struct Case {
    operation: &'static str,
    threads: u32,
    title: &'static str,
    shown: Shown,
    wanted: &'static [Wanted],
}

/// A bar of a case: who, than whom (of the case that has this place), how many times faster.
type Wanted = (Client, (usize, Client), f64);

const LIBRARY: Client = Client::Library(System::Exclusive);
const STRICT: Client = Client::Library(System::Strict);
const CEPH_FUSE: Client = Client::Kernel(System::CephFuse);

const fn case(operation: &'static str, title: &'static str, wanted: &'static [Wanted]) -> Case {
    Case { operation, threads: 1, title, shown: Shown::Microseconds, wanted }
}

const fn stream(operation: &'static str, title: &'static str, wanted: &'static [Wanted]) -> Case {
    Case { operation, threads: 1, title, shown: Shown::Speed(STREAM_MEBIBYTES << 20), wanted }
}

/// In the order of the table.
const CASES: &[Case] = &[
    case("read-4096", "pread of 4 KiB, cached", &[(LIBRARY, (0, Client::Libcephfs), 2.0)]),
    Case {
        operation: "read-4096",
        threads: 2,
        title: "the same by two threads, time for each of all reads",
        shown: Shown::Microseconds,
        wanted: &[(LIBRARY, (0, LIBRARY), 1.9)],
    },
    case(
        "write-4096",
        "pwrite of 4 KiB, cached",
        &[(LIBRARY, (2, CEPH_FUSE), 8.0), (STRICT, (2, CEPH_FUSE), 1.0 / 1.2)],
    ),
    case("open-close", "open and close", &[(LIBRARY, (3, CEPH_FUSE), 3.0), (STRICT, (3, CEPH_FUSE), 1.0)]),
    case("stat", "stat", &[(LIBRARY, (4, CEPH_FUSE), 50.0), (STRICT, (4, CEPH_FUSE), 1.0)]),
    case(
        "create-unlink",
        "create, close and unlink",
        &[(LIBRARY, (5, Client::Libcephfs), 1.0 / 1.15), (LIBRARY, (5, CEPH_FUSE), 1.5)],
    ),
    case("scattered-1", "pwrite of 4 KiB, then fdatasync", &[(LIBRARY, (6, Client::Libcephfs), 1.0 / 1.1)]),
    stream("stream-out-64", "64 MiB written in pieces of 1 MiB, then fsync", &[(LIBRARY, (7, CEPH_FUSE), 1.0)]),
    stream("stream-in", "64 MiB read in pieces of 1 MiB, cached nowhere", &[(LIBRARY, (8, CEPH_FUSE), 1.0)]),
];

/// All measurements as Markdown: `rounds` rounds of operations of `milliseconds` each, and the memory of clones.
pub fn run(work: &Path, poolfs: &Path, rounds: u32, milliseconds: u64) -> Result<String> {
    let cluster = Cluster::start(work, STORED)?;
    let site = Site { laboratory: Laboratory::sized(work, poolfs, "0-1", POOL_MEMORY, POOL_CACHE)?, cluster };
    let mut text = missing(&PEERS);
    if !text.is_empty() {
        text.push('\n');
    }
    text.push_str(&operations(&site, rounds, milliseconds)?);
    text.push('\n');
    text.push_str(&clones::run(&site.laboratory, &site.cluster)?);
    Ok(text)
}

/// A cluster and a pool.
struct Site {
    // Unmounted before the cluster ends.
    laboratory: Laboratory,
    cluster: Cluster,
}

impl Site {
    fn mount(&self, system: System) -> Result<Mounted<'_>> {
        let at = self.laboratory.folder().join(system.tree().strip_prefix("/")?);
        Mounted::new(&self.laboratory, &self.cluster, system, system.tree(), &at, &[])
    }
}

/// The file that is read once in a round. The library and FUSE share a cache.
fn once(client: Client, round: u32) -> String {
    format!("once-{}-{round}", usize::from(matches!(client, Client::Library(_))))
}

/// The file of all else.
fn data(client: Client) -> &'static str {
    if matches!(client, Client::Library(_)) { "data-1" } else { "data-0" }
}

fn operations(site: &Site, rounds: u32, milliseconds: u64) -> Result<String> {
    let clients = Client::present();
    for client in &clients {
        eprintln!("preparing: {}", client.title());
        let streams = (0..rounds).map(|round| (once(*client, round), STREAM_MEBIBYTES << 20));
        let files: Vec<_> = streams.chain([(data(*client).to_owned(), DATA_BYTES)]).collect();
        site.cluster.prepare(client.tree(), &files)?;
    }
    let present = System::ALL.into_iter().filter(|system| system.is_there());
    let mounted: BTreeMap<System, Mounted<'_>> =
        present.map(|system| Ok((system, site.mount(system)?))).collect::<Result<_>>()?;
    let mut samples: BTreeMap<(usize, Client), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for (number, case) in CASES.iter().enumerate() {
            eprintln!("round {} of {rounds}: {}", round + 1, case.title);
            for client in turned(&clients, round) {
                let at = client.system().map_or(client.tree(), |system| mounted[&system].at());
                let file = if case.operation == "stream-in" { once(client, round) } else { data(client).to_owned() };
                let time = one(site, client, case, at, &file, milliseconds)
                    .with_context(|| format!("{} over {}", case.title, client.title()))?;
                samples.entry((number, client)).or_default().push(time);
            }
        }
    }
    let column = |client: Client| Client::ALL.iter().position(|other| *other == client).context("a column");
    let row = |(number, case): (usize, &Case)| {
        let middle = |client: &Client| samples.get_mut(&(number, *client)).map_or(0.0, |all| median(all));
        let medians = Client::ALL.iter().map(middle).collect();
        let bar = |(ours, (row, theirs), faster): &Wanted| {
            Ok(Bar { column: column(*ours)?, than: (*row, column(*theirs)?), faster: *faster })
        };
        let bars = case.wanted.iter().map(bar).collect::<Result<_>>()?;
        Ok(Row { title: case.title.to_owned(), shown: case.shown, medians, bars })
    };
    let rows = CASES.iter().enumerate().map(row).collect::<Result<Vec<_>>>()?;
    Ok(markdown(&Client::ALL.map(Client::title), &rows))
}

/// Nanoseconds of one operation, by a process of its own.
fn one(site: &Site, client: Client, case: &Case, at: &Path, file: &str, milliseconds: u64) -> Result<f64> {
    let mut command = client.command(&site.laboratory, &std::env::current_exe()?);
    match client {
        Client::Libcephfs => command.arg("ceph-worker").arg(site.cluster.configuration()),
        _ => command.arg("worker"),
    };
    command.arg(at).args([file, case.operation, "--warm"]);
    command.args(["--milliseconds", &milliseconds.to_string(), "--threads", &case.threads.to_string()]);
    let output = command.stdin(Stdio::null()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("{text}{}", String::from_utf8_lossy(&output.stderr));
    }
    text.trim().parse().with_context(|| format!("it said {text:?}"))
}

/// What `one` starts for libcephfs.
#[derive(clap::Args)]
pub struct Worker {
    /// The cluster's configuration.
    configuration: PathBuf,
    /// A directory of the cluster.
    directory: PathBuf,
    /// The file there that reads and writes use.
    data: String,
    /// What.
    operation: String,
    /// How long.
    #[arg(long)]
    milliseconds: u64,
    /// Touch everything first.
    #[arg(long)]
    warm: bool,
    /// By so many threads at the same time, which share a mount.
    #[arg(long, default_value_t = 1)]
    threads: u32,
}

impl Worker {
    /// Prints nanoseconds.
    pub fn run(&self) -> Result<()> {
        let operation = Operation::parse(&self.operation)?;
        let mount = &libcephfs::Mount::new(&self.configuration)?;
        let run = |time| direct::run(mount, &self.directory, &self.data, operation, time, self.warm);
        println!("{}", by_threads(self.threads, Duration::from_millis(self.milliseconds), run)?);
        Ok(())
    }
}

/// What `prepare` starts.
pub fn prepare(configuration: &Path, directory: &Path, files: &[String]) -> Result<()> {
    let parsed = files.iter().map(|file| {
        let (name, bytes) = file.split_once(':').with_context(|| format!("{file} is no NAME:BYTES"))?;
        Ok((name.to_owned(), bytes.parse()?))
    });
    direct::prepare(&libcephfs::Mount::new(configuration)?, directory, &parsed.collect::<Result<Vec<_>>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bar_is_of_a_cell_that_is_there() {
        for (number, case) in CASES.iter().enumerate() {
            assert!(Operation::parse(case.operation).is_ok(), "{}", case.operation);
            for (ours, (row, theirs), faster) in case.wanted {
                assert!(Client::ALL.contains(ours) && Client::ALL.contains(theirs), "{}", case.title);
                assert!(*row <= number && (*row == number) == (ours != theirs), "{}", case.title);
                assert!(*faster > 0.0, "{}", case.title);
            }
        }
    }
}
