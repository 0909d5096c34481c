//! Measures N servers of one image, each with a writable branch of its own: the time until all have answered, and memory.

use crate::emptying::emptied;
use crate::groups::{self, Memory};
use crate::roots::{Entrance, Root, Server, all_answer, unpack};
use crate::table::{Row, Table, Unit};
use crate::targets::{Branches, Laboratory, Target, turned};
use crate::worker::median;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

/// Servers at the same time.
const NUMBERS: [usize; 3] = [1, 8, 64];

/// Overlayfs first: the others are compared with it.
pub const TARGETS: [Target; 3] = [Target::Overlayfs, Target::Library, Target::Fuse];

/// Memory of the pool: of up to 64 servers with all they read, twice.
pub const POOL_MEMORY: &str = "8G";

/// What is measured of one fleet.
const TIMES: [&str; 3] = ["mounted", "answered, nothing cached", "answered once more"];

/// Two tables of medians of `rounds` rounds; `image` is a tar of a root file system with lighttpd.
pub fn run(work: &Path, poolfs: &Path, image: &Path, rounds: u32) -> Result<String> {
    let laboratory = Laboratory::with_memory(work, poolfs, "0-1", POOL_MEMORY)?;
    unpack(image, &laboratory.lower())?;
    let library = poolfs.with_file_name("libpoolfs_preload.so");
    let (mut times, mut memory) = (BTreeMap::new(), BTreeMap::new());
    for round in 0..rounds {
        for number in NUMBERS {
            eprintln!("round {} of {rounds}: {number} servers", round + 1);
            for target in turned(&TARGETS, round) {
                let (all, used) = fleet(&laboratory, target, number, &library)?;
                for (what, time) in all.into_iter().enumerate() {
                    times.entry((number, what, target)).or_insert_with(Vec::new).push(time);
                }
                for (what, used) in used.into_iter().enumerate() {
                    memory.entry((number, what, target)).or_insert_with(Vec::new).push(used);
                }
            }
        }
    }
    let mut text = String::new();
    let _ = writeln!(text, "{}", table("servers", Unit::Milliseconds, &TIMES, &mut times).markdown());
    let places = ["control groups of the pool", "the whole machine"];
    text.push_str(&table("memory of servers", Unit::Mebibytes, &places, &mut memory).markdown());
    Ok(text)
}

type Samples = BTreeMap<(usize, usize, Target), Vec<f64>>;

fn table(kind: &'static str, unit: Unit, what: &[&str], samples: &mut Samples) -> Table {
    let rows = NUMBERS.into_iter().flat_map(|number| what.iter().enumerate().map(move |(n, what)| (number, n, what)));
    let row = |(number, n, what): (usize, usize, &&str)| Row {
        title: format!("{number}: {what}"),
        medians: TARGETS.map(|target| samples.get_mut(&(number, n, target)).map_or(0.0, |all| median(all))).to_vec(),
    };
    let rows = rows.map(row).collect();
    Table::new(kind, unit, &TARGETS.map(Target::title), rows)
}

/// Unions over the lower directory, each with a writable branch of its own; unmounted at their end.
pub struct Unions<'l> {
    laboratory: &'l Laboratory,
    target: Target,
    mounted: Vec<Branches>,
}

impl<'l> Unions<'l> {
    /// Mounts so many; and the nanoseconds it took.
    pub fn mount(laboratory: &'l Laboratory, target: Target, number: usize) -> Result<(Self, f64)> {
        let folder = laboratory.folder().join("unions");
        fs::create_dir_all(&folder)?;
        let made: Result<Vec<_>> = (0..number).map(|n| Branches::beside(&folder.join(n.to_string()))).collect();
        let mut unions = Self { laboratory, target, mounted: Vec::new() };
        let begun = Instant::now();
        for branches in made? {
            laboratory.mount_union(target, &branches)?;
            unions.mounted.push(branches);
        }
        let time = begun.elapsed().as_nanos() as f64;
        Ok((unions, time))
    }

    /// Where they are mounted.
    pub fn places(&self) -> impl Iterator<Item = &Path> {
        self.mounted.iter().map(|branches| branches.at.as_path())
    }
}

impl Drop for Unions<'_> {
    fn drop(&mut self) {
        for branches in std::mem::take(&mut self.mounted) {
            let removed = self.laboratory.unmount_union(self.target, &branches.at).and_then(|()| branches.remove());
            if let Err(error) = removed {
                eprintln!("cleaning up: {error:#}");
            }
        }
    }
}

/// Times in the order of [`TIMES`], and bytes used by the pool's groups and by the machine.
fn fleet(laboratory: &Laboratory, target: Target, number: usize, library: &Path) -> Result<([f64; 3], [f64; 2])> {
    let before = (emptied(laboratory.pool())?, machine()?);
    let (unions, mounted) = Unions::mount(laboratory, target, number)?;
    let furnish = |(n, at): (usize, &Path)| Root::furnish(at, &format!("server-{n}"), library);
    let roots: Vec<Root> = unions.places().enumerate().map(furnish).collect::<Result<_>>()?;
    let mut command = laboratory.in_group(&std::env::current_exe()?);
    command.arg("serve");
    if target == Target::Library {
        command.arg("--library");
    }
    for root in &roots {
        command.arg(root.at()).arg(root.socket());
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let told = tell(&mut BufReader::new(child.stdout.take().context("an output")?), 2);
    let after = (groups::used(laboratory.pool())?, machine()?);
    drop(child.stdin.take());
    let status = child.wait()?;
    ensure!(status.success(), "{number} servers over {}: {status}", target.title());
    let told = told?;
    let Memory { all, .. } = after.0.since(before.0);
    Ok(([mounted, told[0], told[1]], [all as f64, after.1.saturating_sub(before.1) as f64]))
}

/// So many numbers, a line each.
pub fn tell(output: &mut impl BufRead, count: usize) -> Result<Vec<f64>> {
    let mut told = Vec::new();
    for _ in 0..count {
        let mut line = String::new();
        output.read_line(&mut line)?;
        told.push(line.trim().parse().with_context(|| format!("{line:?} is no number"))?);
    }
    Ok(told)
}

/// Bytes of the machine's memory that are in use, for whatever.
fn machine() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let value = |key: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).with_context(|| format!("no {key}"))?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
    };
    Ok(value("MemTotal:")?.saturating_sub(value("MemFree:")?))
}

/// What `fleet` runs in the pool's group: starts a server in each root directory (`places`: directory and socket in turn), prints the
/// nanoseconds until all have answered, does so once more, and keeps them until its input ends.
pub fn serve(places: &[PathBuf], library: bool) -> Result<()> {
    let pairs = places.chunks_exact(2).map(|pair| Ok((Entrance::of(&pair[0])?, &pair[1])));
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    let start_all = || -> Result<Vec<Server>> {
        let begun = Instant::now();
        let started = pairs.iter().map(|(entrance, socket)| Server::start(entrance, socket, library));
        let mut servers = started.collect::<Result<Vec<_>>>()?;
        all_answer(&mut servers)?;
        println!("{}", begun.elapsed().as_nanos());
        Ok(servers)
    };
    start_all()?.into_iter().try_for_each(Server::end)?;
    let servers = start_all()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    servers.into_iter().try_for_each(Server::end)
}
