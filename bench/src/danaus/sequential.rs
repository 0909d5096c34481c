//! Sequential writes and cached sequential reads, in one pool and in two at the same time.

use crate::danaus::report::Experiment;
use crate::danaus::site::{Site, at_once, clients, empty, numbers, title, worker};
use crate::targets::turned;
use anyhow::{Context, Result};

/// How many pools, as the tables say it.
const SETTINGS: [(usize, &str); 2] = [(1, "1 pool"), (2, "2 pools")];

/// The processes, and headings.
const KINDS: [(&str, &str); 2] = [("write", "Seqwrite"), ("read", "Seqread")];

/// Both experiments.
pub fn run(site: &Site) -> Result<Vec<Experiment>> {
    let pools = [site.pool("first", "0")?, site.pool("second", "1")?];
    let bytes = site.sizes.sequential << 20;
    let mut experiments = KINDS.map(|(_, title)| Experiment {
        title,
        repeats: "section 6.3.2, figure 9",
        about: format!(
            "4 threads take turns at the pieces of 1 MiB of one file of {} MiB (the paper: 16 threads, 1 GB), again and again; read when it is cached. \
             The sum of all pools, which have one CPU each.",
            site.sizes.sequential
        ),
        unit: "MB/s",
        kept: None,
        series: Vec::new(),
    });
    for round in 0..site.sizes.rounds {
        for client in turned(&clients(), round) {
            for (number, setting) in turned(&SETTINGS, round) {
                let mounted: Vec<_> =
                    pools[..number].iter().map(|pool| site.mount(pool, client, "sequential")).collect::<Result<_>>()?;
                for (experiment, (kind, heading)) in experiments.iter_mut().zip(KINDS) {
                    eprintln!(
                        "round {} of {}: {heading} by {}, {setting}",
                        round + 1,
                        site.sizes.rounds,
                        title(client)
                    );
                    let commands = pools.iter().zip(&mounted).map(|(pool, at)| {
                        let mut command = worker(pool, client, kind)?;
                        command.arg(at.at().join("sequential")).arg(bytes.to_string());
                        command.args(["--milliseconds", &site.sizes.milliseconds.to_string()]);
                        Ok(command)
                    });
                    let printed = at_once(commands.collect::<Result<_>>()?)
                        .with_context(|| format!("{heading} over {}", title(client)))?;
                    experiment.add(title(client), setting, numbers(&printed)?.iter().sum());
                }
                mounted.iter().try_for_each(empty)?;
            }
        }
    }
    Ok(experiments.into())
}
