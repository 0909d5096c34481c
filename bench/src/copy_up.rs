//! Measures first writes of lower files and their consequences: time by file size, a file written all over in parts, disk space.

use crate::files::fill;
use crate::first_writes::name;
use crate::grounds::{Ground, Kind};
use crate::table::{Row, Table, Unit};
use crate::targets::{Branches, Laboratory, Target, drop_caches, mount_overlayfs, turned};
use crate::transports::Offered;
use crate::worker::median;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// Sizes of lower files whose first byte is written, and how many of each are in one round.
const SIZES: &[(u64, &str, u32)] = &[
    (1 << 10, "1 KiB", 200),
    (64 << 10, "64 KiB", 200),
    (4 << 20, "4 MiB", 20),
    (64 << 20, "64 MiB", 4),
    (512 << 20, "512 MiB", 1),
    (4 << 30, "4 GiB", 1),
];

/// The file that is written all over, and its bytes.
const MANY: &str = "many";
const MANY_BYTES: u64 = 2 << 30;

/// Files of which one block is touched each, and their bytes.
const TOUCHED: u32 = 1000;
const TOUCHED_BYTES: u64 = 1 << 20;

/// What of an upper branch [`clear`] keeps.
const KEPT_BYTES: u64 = 1 << 20;

/// Memory of the pool, and of it cache: what is written all over has room there twice, as it has in the kernel's cache.
const MEMORY: (&str, &str) = ("12G", "6G");

/// Who writes first bytes, and by which way the kernel asks poolfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Writer {
    Poolfs { target: Target, offered: &'static str },
    Overlayfs(Kind),
}

const WRITERS: [(Writer, &str); 7] = [
    (Writer::Poolfs { target: Target::Library, offered: "N" }, "library"),
    (Writer::Poolfs { target: Target::Fuse, offered: "N" }, "FUSE"),
    (Writer::Poolfs { target: Target::Library, offered: "Y" }, "library, io_uring"),
    (Writer::Poolfs { target: Target::Fuse, offered: "Y" }, "FUSE, io_uring"),
    (Writer::Overlayfs(Kind::Xfs), "overlayfs on xfs"),
    (Writer::Overlayfs(Kind::Btrfs), "overlayfs on btrfs"),
    (Writer::Overlayfs(Kind::Ext4), "overlayfs on ext4"),
];

/// How uppers store what is touched.
const FORMATS: [&str; 4] = ["sparse", "bcow", "bcow-performance", "bcow-space"];

/// All tables, as text. poolfs is over ext4 throughout.
pub fn run(work: &Path, poolfs: &Path, rounds: u32) -> Result<String> {
    let bench = Bench::new(work, poolfs)?;
    let mut text = bench.first_bytes(rounds)?.markdown();
    text.push('\n');
    text.push_str(&bench.write_many(rounds)?.markdown());
    text.push('\n');
    text.push_str(&bench.space()?.markdown());
    Ok(text)
}

struct Bench {
    laboratory: Laboratory,
    grounds: BTreeMap<Kind, Ground>,
}

impl Bench {
    fn new(work: &Path, poolfs: &Path) -> Result<Self> {
        let mut grounds = BTreeMap::new();
        for kind in Kind::ALL {
            let ground = Ground::new(work, kind)?;
            eprintln!("files on {}", kind.name());
            for (bytes, _, count) in SIZES {
                for number in 0..*count {
                    fill(&ground.lower().join(name(*bytes, number)), *bytes)?;
                }
            }
            grounds.insert(kind, ground);
        }
        let laboratory = Laboratory::sized(grounds[&Kind::Ext4].folder(), poolfs, "0-1", MEMORY.0, MEMORY.1)?;
        for number in 0..TOUCHED {
            fill(&laboratory.lower().join(name(TOUCHED_BYTES, number)), TOUCHED_BYTES)?;
        }
        fill(&laboratory.lower().join(MANY), MANY_BYTES)?;
        Ok(Self { laboratory, grounds })
    }

    /// This program, for a part of the work in a target's way; what it printed.
    fn part(&self, target: Target, arguments: &[&str]) -> Result<Vec<f64>> {
        let mut command = self.laboratory.command(target, &std::env::current_exe()?);
        let output = command.args(arguments).output()?;
        ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        text.lines().map(|line| line.parse().with_context(|| format!("{arguments:?} said {line:?}"))).collect()
    }

    fn first_bytes(&self, rounds: u32) -> Result<Table> {
        let mut samples: BTreeMap<(usize, Writer), Vec<f64>> = BTreeMap::new();
        let has_rings = Offered::is_known();
        for round in 0..rounds {
            for (writer, title) in turned(&WRITERS, round) {
                if matches!(writer, Writer::Poolfs { offered: "Y", .. }) && !has_rings {
                    continue;
                }
                eprintln!("round {} of {rounds}: first bytes, {title}", round + 1);
                let label = format!("first-{round}-{}", title.replace([' ', ','], "-"));
                let (target, branches) = match writer {
                    Writer::Poolfs { target, offered } => {
                        let _offered = if has_rings { Some(Offered::set(offered)?) } else { None };
                        let branches = self.grounds[&Kind::Ext4].branches(&label)?;
                        self.laboratory.mount_union(target, &branches)?;
                        (target, branches)
                    }
                    Writer::Overlayfs(kind) => {
                        let branches = self.grounds[&kind].branches(&label)?;
                        mount_overlayfs(&self.grounds[&kind].lower(), &branches)?;
                        (Target::Overlayfs, branches)
                    }
                };
                let at = branches.at.to_str().context("UTF-8")?;
                let files: Vec<_> = SIZES.iter().map(|(bytes, _, count)| format!("{bytes}:{count}")).collect();
                let arguments: Vec<_> =
                    ["first-bytes", at].into_iter().chain(files.iter().map(String::as_str)).collect();
                for (case, time) in self.part(target, &arguments)?.into_iter().enumerate() {
                    samples.entry((case, writer)).or_default().push(time);
                }
                self.laboratory.unmount_union(target, &branches.at)?;
                clear(&branches)?;
            }
        }
        let row = |(case, (_, size, _)): (usize, &(u64, &str, u32))| Row {
            title: format!("open, write 1 byte into {size}, close"),
            medians: WRITERS.iter().map(|(writer, _)| of(&mut samples, (case, *writer))).collect(),
        };
        let rows = SIZES.iter().enumerate().map(row).collect();
        Ok(Table::of_operations(&WRITERS.map(|(_, title)| title), rows))
    }

    fn write_many(&self, rounds: u32) -> Result<Table> {
        const TARGETS: [Target; 4] = [Target::Library, Target::Fuse, Target::Ext4, Target::Overlayfs];
        const ROWS: [&str; 5] = [
            "write 410 bytes into every block of 2 GiB, nothing cached before, and close",
            "then read 20 % of the blocks",
            "then fsync",
            "then read 20 % of the blocks",
            "read 20 % of the blocks of 2 GiB, nothing cached",
        ];
        let mut samples: BTreeMap<(usize, Target), Vec<f64>> = BTreeMap::new();
        for round in 0..rounds {
            for target in turned(&TARGETS, round) {
                eprintln!("round {} of {rounds}: a file written all over, {}", round + 1, target.title());
                let branches = self.grounds[&Kind::Ext4].branches(&format!("many-{round}-{}", target.title()))?;
                if target == Target::Ext4 {
                    fill(&branches.at.join(MANY), MANY_BYTES)?;
                }
                for (first, task) in [(4, "read-some"), (0, "write-many")] {
                    if target != Target::Ext4 {
                        self.laboratory.mount_union(target, &branches)?;
                    }
                    drop_caches()?;
                    let path = branches.at.join(MANY);
                    let times = self.part(target, &[task, path.to_str().context("UTF-8")?])?;
                    for (row, time) in times.into_iter().enumerate() {
                        samples.entry((first + row, target)).or_default().push(time);
                    }
                    if target != Target::Ext4 {
                        self.laboratory.unmount_union(target, &branches.at)?;
                    }
                }
                clear(&branches)?;
            }
        }
        let row = |(row, title): (usize, &&str)| Row {
            title: (*title).to_owned(),
            medians: TARGETS.iter().map(|target| of(&mut samples, (row, *target))).collect(),
        };
        let rows = ROWS.iter().enumerate().map(row).collect();
        Ok(Table::new("operation", Unit::Milliseconds, &TARGETS.map(Target::title), rows))
    }

    fn space(&self) -> Result<Table> {
        let mut medians = Vec::new();
        for format in FORMATS {
            let branches = self.grounds[&Kind::Ext4].branches(&format!("touched-{format}"))?;
            self.laboratory.mount_stored(&branches, format)?;
            medians.push(self.touched(Target::Fuse, &branches)?);
        }
        let ground = &self.grounds[&Kind::Ext4];
        let branches = ground.branches("touched-overlayfs")?;
        mount_overlayfs(&ground.lower(), &branches)?;
        medians.push(self.touched(Target::Overlayfs, &branches)?);
        let columns: Vec<&str> = FORMATS.into_iter().chain(["overlayfs on ext4"]).collect();
        let title = format!("one byte in each of {TOUCHED} files of 1 MiB, on disk");
        Ok(Table::new("room a file", Unit::Kibibytes, &columns, vec![Row { title, medians }]))
    }

    /// What the upper branch takes of each file more than before, bytes.
    fn touched(&self, target: Target, branches: &Branches) -> Result<f64> {
        eprintln!("space: {}", branches.at.display());
        let before = taken(branches.upper())?;
        let at = branches.at.to_str().context("UTF-8")?;
        self.part(target, &["touch-each", at, &TOUCHED_BYTES.to_string(), &TOUCHED.to_string()])?;
        self.laboratory.unmount_union(target, &branches.at)?;
        rustix::fs::sync();
        Ok((taken(branches.upper())? - before) / f64::from(TOUCHED))
    }
}

fn of<K: Ord>(samples: &mut BTreeMap<K, Vec<f64>>, key: K) -> f64 {
    samples.get_mut(&key).map_or(0.0, |all| median(all))
}

/// What `du` counts, bytes.
fn taken(directory: &Path) -> Result<f64> {
    let output = Command::new("du").args(["-s", "-B1"]).arg(directory).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Some(count) = text.split_whitespace().next() else { bail!("du said nothing of {}", directory.display()) };
    Ok(count.parse()?)
}

/// Makes room: large files of an upper branch that is used no more go, all others stay, because ext4 is slow to make new ones where many were
/// removed a moment ago.
fn clear(branches: &Branches) -> Result<()> {
    for directory in [branches.upper(), &branches.at] {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            if metadata.is_file() && metadata.blocks() * 512 > KEPT_BYTES {
                fs::remove_file(entry.path())?;
            }
        }
    }
    rustix::fs::sync();
    Ok(())
}
