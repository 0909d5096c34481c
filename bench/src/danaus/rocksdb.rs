//! RocksDB's put and get latency, in one pool and in two at the same time.

use crate::ceph::clients::Client;
use crate::danaus::report::Experiment;
use crate::danaus::site::{POOL_GIBIBYTES, Site, at_once, clients, empty, title};
use crate::targets::{Laboratory, drop_caches, turned};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;

/// The program that measures, and its Debian package.
pub const PROGRAM: (&str, &str) = ("db_bench", "rocksdb-tools");

/// How many pools, as the tables say it.
const SETTINGS: [(usize, &str); 2] = [(1, "1 pool"), (2, "2 pools")];

/// Both experiments.
pub fn run(site: &Site) -> Result<Vec<Experiment>> {
    let experiment = |title, about| Experiment {
        title,
        repeats: "section 6.3.1, figures 7a and 7b",
        about,
        unit: "latency, us",
        kept: None,
        series: Vec::new(),
    };
    let common = format!(
        "`db_bench` with 1 thread, keys of 9 bytes, values of 128 KiB, a buffer of 64 MiB, 2 compaction threads, in pools of one CPU and {POOL_GIBIBYTES} GiB each. \
         The mean of all pools."
    );
    let mut put = experiment(
        "RocksDB put",
        format!("{common} {} random puts ({} MiB; the paper: 1 GB).", site.sizes.puts, site.sizes.puts / 8),
    );
    let mut get = experiment(
        "RocksDB get",
        format!(
            "{common} {} random gets of as many values ({} MiB; the paper: 8 GB), with nothing cached before.",
            site.sizes.gets,
            site.sizes.gets / 8
        ),
    );
    let pools = [site.pool("first", "0")?, site.pool("second", "1")?];
    for round in 0..site.sizes.rounds {
        for client in turned(&clients(), round) {
            for (number, setting) in turned(&SETTINGS, round) {
                eprintln!("round {} of {}: RocksDB by {}, {setting}", round + 1, site.sizes.rounds, title(client));
                let [puts, gets] = once(site, &pools[..number], client)
                    .with_context(|| format!("{} over {}", PROGRAM.0, title(client)))?;
                put.add(title(client), setting, puts);
                get.add(title(client), setting, gets);
            }
        }
    }
    Ok(vec![put, get])
}

/// Mean latencies of puts and of gets in some pools at the same time.
fn once(site: &Site, pools: &[Laboratory], client: Client) -> Result<[f64; 2]> {
    let phase = |benchmark: &str, is_last: bool, options: &[String]| -> Result<f64> {
        let mounted: Vec<_> = pools.iter().map(|pool| site.mount(pool, client, "rocksdb")).collect::<Result<_>>()?;
        drop_caches()?;
        let commands = pools.iter().zip(&mounted).map(|(pool, at)| command(pool, client, at.at(), benchmark, options));
        let printed = at_once(commands.collect())?;
        if is_last {
            mounted.iter().try_for_each(empty)?;
        }
        let all = printed.iter().map(|text| latency(text)).collect::<Result<Vec<_>>>()?;
        Ok(all.iter().sum::<f64>() / all.len() as f64)
    };
    let number = |count: u32| format!("--num={count}");
    let puts = phase("fillrandom", false, &[number(site.sizes.puts)])?;
    let _ = phase("fillrandom", false, &[number(site.sizes.gets)])?;
    // On new mounts, of which none has anything cached.
    let gets = phase("readrandom", true, &[number(site.sizes.gets), "--use_existing_db=true".to_owned()])?;
    Ok([puts, gets])
}

fn command(pool: &Laboratory, client: Client, at: &Path, benchmark: &str, options: &[String]) -> Command {
    let mut command = client.command(pool, Path::new(PROGRAM.0));
    command.arg(format!("--db={}", at.join("db").display())).arg(format!("--benchmarks={benchmark}"));
    command.args(["--seed=7", "--threads=1", "--key_size=9", "--value_size=131072", "--compression_type=none"]);
    command.args(["--write_buffer_size=67108864", "--max_background_compactions=2", "--cache_size=1048576"]);
    command.args(options);
    command
}

/// Microseconds of an operation, from what `db_bench` prints.
fn latency(text: &str) -> Result<f64> {
    let line = text.lines().find(|line| line.contains("micros/op")).with_context(|| format!("no latency in {text}"))?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let place = words.iter().position(|word| *word == "micros/op").context("a unit")?;
    let number = place.checked_sub(1).map(|before| words[before]).context("a number")?;
    number.parse().with_context(|| format!("{number:?} in {line:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latency_is_found() {
        let text = "Keys: 9 bytes each\nfillrandom   :     412.250 micros/op 2425 ops/sec;  303.2 MB/s\n";
        assert_eq!(latency(text).expect("there"), 412.25);
        for bad in ["", "micros/op\n", "x micros/op\n"] {
            assert!(latency(bad).is_err(), "{bad:?}");
        }
    }
}
