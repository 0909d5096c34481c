//! A file server over the cluster in one pool, alone and beside random reads and writes of the local disk in another.

use crate::containers::tell;
use crate::danaus::report::Experiment;
use crate::danaus::site::{Site, at_once, clients, empty, numbers, title, worker};
use crate::files::fill;
use crate::targets::{Laboratory, drop_caches, turned};
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

const SETTINGS: [&str; 2] = ["alone", "beside RandomIO"];

/// Both experiments: the file server's throughput, and that of what is beside it.
pub fn run(site: &Site) -> Result<Vec<Experiment>> {
    let about = format!(
        "Fileserver: 4 threads in a pool on CPU 0, each with 50 files of 1 MiB at the cluster, of which each removes and makes one, appends 16 KiB to \
         another, reads and looks at a third in a round. RandomIO: 2 threads in a pool on CPU 1, which read and write 512 bytes anywhere in a file of \
         {} MiB on the local ext4, with 64 KiB of read-ahead. The cluster's daemons use both CPUs; in the paper they have machines of their own.",
        site.sizes.random
    );
    let repeats = "section 6.2, figures 1a and 6a";
    let mut served = Experiment {
        title: "Fileserver beside RandomIO: the file server",
        repeats,
        about,
        unit: "rounds/s",
        kept: Some((SETTINGS[0], SETTINGS[1])),
        series: Vec::new(),
    };
    let mut random = Experiment {
        title: "Fileserver beside RandomIO: the random reads and writes",
        repeats,
        about: "The same runs, seen from the other pool.".to_owned(),
        unit: "operations/s",
        kept: None,
        series: Vec::new(),
    };
    let (server, neighbour) = (site.pool("server", "0")?, site.pool("neighbour", "1")?);
    let file = neighbour.folder().join("random");
    fill(&file, site.sizes.random << 20)?;
    for round in 0..site.sizes.rounds {
        for client in turned(&clients(), round) {
            let mounted = site.mount(&server, client, "neighbours")?;
            let run = || {
                let mut command = worker(&server, client, "fileserver")?;
                command.arg(mounted.at()).args(["--milliseconds", &site.sizes.milliseconds.to_string()]);
                at_once(vec![command]).with_context(|| title(client).to_owned())
            };
            // Not measured: both settings begin with files that are there and with a service that has them.
            run()?;
            for setting in turned(&SETTINGS, round) {
                eprintln!("round {} of {}: Fileserver by {}, {setting}", round + 1, site.sizes.rounds, title(client));
                drop_caches()?;
                let beside = if setting == SETTINGS[1] { Some(Random::start(&neighbour, &file)?) } else { None };
                let printed = run();
                if let Some(beside) = beside {
                    random.add(title(client), "beside Fileserver", beside.end()?);
                }
                served.add(title(client), setting, numbers(&printed?)?[0]);
            }
            empty(&mounted)?;
        }
    }
    Ok(vec![served, random])
}

/// Random reads and writes in a pool.
struct Random {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Random {
    fn start(laboratory: &Laboratory, file: &Path) -> Result<Self> {
        let mut command = laboratory.in_group(&std::env::current_exe()?);
        command.args(["danaus", "random"]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut output = BufReader::new(child.stdout.take().context("an output")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        ensure!(line.trim() == "begun", "the neighbour said {line:?}");
        Ok(Self { child, output })
    }

    /// Operations per second.
    fn end(mut self) -> Result<f64> {
        drop(self.child.stdin.take());
        let told = tell(&mut self.output, 1);
        let status = self.child.wait()?;
        ensure!(status.success(), "the neighbour: {status}");
        Ok(told?[0])
    }
}
