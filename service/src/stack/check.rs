//! The job `check`: checks an upper branch that no instance uses, before the process ends.

use super::crash_state::{self, StateRoot, UpperRoot};
use super::sources::{CephDirectory, ClaimKind, Directory, Source, Used};
use super::{Role, StackBuilder, StackError, with_causes};
use crate::confinement;
use crate::outside::{Deed, outside};
use poolfs_bcow::{Bcow, BcowConfig};
use poolfs_libservice::{Finding, Libservice, Outcome, Tally};
use poolfs_local::Descriptors;
use poolfs_service_protocol::{
    CheckFinding, CheckLine, CheckOutcome, CheckSpec, CheckSummary, FINDINGS_MAX, LOWERS_MAX, Place, Storage,
};
use poolfs_union::check::Check;
use rustix::process::{Resource, Rlimit};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The cache of lower branches, of which little more than directories is looked at.
const CACHE_BYTES: u64 = 16 << 20;

/// Most bytes of a job.
const SPEC_BYTES_MAX: u64 = 1 << 20;

/// Reads a [`CheckSpec`] from `input`, does what it says, and writes [`CheckLine`]s to `output`. What keeps the branch from being checked
/// is one of them.
///
/// # Errors
/// When `input` is no such job or `output` takes nothing.
pub fn run(input: impl Read, output: &mut dyn Write) -> anyhow::Result<()> {
    let mut text = Vec::new();
    input.take(SPEC_BYTES_MAX).read_to_end(&mut text)?;
    let spec: CheckSpec = serde_json::from_slice(&text)?;
    // Filesystems without lasting handles have a descriptor for each directory on the way down.
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(Resource::Nofile, raised)?;
    let branches = Opened::all(&spec);
    confinement::enter(None)?;
    let mut written = Ok(());
    let mut write = |line: &CheckLine| -> std::io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        output.write_all(&text)
    };
    // A repair goes on to its end also when nobody reads of it.
    let mut report = |finding| {
        if written.is_ok() {
            written = write(&CheckLine::Finding(finding));
        }
    };
    let done = branches.and_then(|branches| check_opened(&spec, &branches, &mut report));
    written?;
    write(&match done {
        Ok(summary) => CheckLine::Summary(summary),
        Err(error) => CheckLine::Failed { code: error.code(), message: with_causes(&error) },
    })?;
    Ok(output.flush()?)
}

/// Checks the branch, and gives as many findings to `report` as are told one by one.
///
/// # Errors
/// When a directory cannot be opened, or the branch cannot be checked to the end.
pub fn check(spec: &CheckSpec, report: &mut dyn FnMut(CheckFinding)) -> Result<CheckSummary, StackError> {
    check_opened(spec, &Opened::all(spec)?, report)
}

/// The branches of a job, which are opened while the host's files are there.
struct Opened {
    upper: Arc<dyn Source>,
    lowers: Vec<Arc<dyn Source>>,
}

impl Opened {
    fn all(spec: &CheckSpec) -> Result<Self, StackError> {
        if spec.lowers.len() > LOWERS_MAX {
            let cause = format!("a union has at most {LOWERS_MAX} lower branches");
            return Err(StackError::Union { upper: spec.upper.clone(), cause });
        }
        let access = spec.ceph.clone().unwrap_or_default();
        let open = |name: &Path, used: Used| -> Result<Arc<dyn Source>, StackError> {
            Ok(match Place::of(name) {
                Place::Directory(path) => Arc::new(Directory::open(path, used == Used::Read)?),
                Place::Ceph(path) => Arc::new(CephDirectory::new(name, path, &access, used)),
            })
        };
        let upper = open(&spec.upper, if spec.repair { Used::Written } else { Used::Read })?;
        let lowers = spec.lowers.iter().map(|lower| open(lower, Used::Read));
        Ok(Self { upper, lowers: lowers.collect::<Result<_, _>>()? })
    }
}

fn check_opened(
    spec: &CheckSpec,
    opened: &Opened,
    report: &mut dyn FnMut(CheckFinding),
) -> Result<CheckSummary, StackError> {
    let failed = |cause: String| StackError::Union { upper: spec.upper.clone(), cause };
    let kind = if spec.repair { ClaimKind::Alone } else { ClaimKind::Shared };
    let claim = opened.upper.claim(kind, Duration::ZERO).map_err(|error| error.of(&spec.upper))?;
    // Of what is at a cluster, nothing is kept on this host.
    let waiting = match claim.directory() {
        Some(directory) => {
            let place = spec.socket_directory.clone();
            let states = outside(Deed::Memory, move || StateRoot::open(&place)).flatten();
            let states = states.map_err(|error| failed(format!("{}: {error}", spec.socket_directory.display())))?;
            let upper = UpperRoot { directory, path: &spec.upper };
            states.map(|states| crash_state::waiting(upper, &states)).transpose().map_err(failed)?.flatten()
        }
        None => None,
    };
    if let Some((files, directory)) = waiting {
        let cause = format!(
            "{files} of its files, as a service had accepted them before it died, wait in {}; mount it once as an upper branch, which \
             brings them to disk",
            directory.display()
        );
        return Err(failed(cause));
    }
    let stored: Arc<dyn Libservice> = opened.upper.open(!spec.repair, &Descriptors::of_process())?;
    let builder = StackBuilder::new(CACHE_BYTES, None)?;
    let branch = |lower| builder.branch(lower, Role::Lower, &Storage::default(), None);
    let branches: Vec<_> = opened.lowers.iter().map(branch).collect::<Result<_, _>>()?;
    let (lowers, _) = builder.lowers(&branches)?;
    let failed =
        |error: poolfs_libservice::Error| StackError::Union { upper: spec.upper.clone(), cause: with_causes(&error) };
    let (mut told, mut untold) = (0, 0);
    let mut tell = |finding: CheckFinding| {
        *(if told < FINDINGS_MAX { &mut told } else { &mut untold }) += 1;
        if untold == 0 {
            report(finding);
        }
    };
    let is_unclean = !poolfs_union::has_ended_cleanly(&stored).map_err(failed)?;
    let bcow =
        Bcow::new(BcowConfig { layout: None, flush_interval: Duration::ZERO, ..BcowConfig::new(Arc::clone(&stored)) });
    let compact = bcow
        .check(is_unclean, spec.repair, &mut |finding| tell(finding_of(finding, poolfs_bcow::check::Problem::name)))
        .map_err(failed)?;
    let check = Check {
        // Above it, compact files are ordinary ones.
        upper: if compact.files > 0 { Arc::clone(&bcow) as Arc<dyn Libservice> } else { stored },
        lowers: Some(lowers.as_slice()).filter(|lowers| !lowers.is_empty()),
        repair: spec.repair,
        is_whole_below: compact.tally.nothing_left(),
    };
    let union =
        check.run(&mut |finding| tell(finding_of(finding, poolfs_union::check::Problem::name))).map_err(failed)?;
    let Tally { damaged, repairable, repaired } = compact.tally.and(union.tally);
    Ok(CheckSummary {
        is_upper: union.is_upper || compact.files > 0,
        objects: union.objects,
        sketches: union.sketches,
        compact_files: compact.files,
        damaged,
        repairable,
        repaired,
        untold,
    })
}

fn finding_of<P>(finding: Finding<P>, name: impl FnOnce(P) -> &'static str) -> CheckFinding {
    CheckFinding {
        path: finding.path,
        problem: name(finding.problem).to_owned(),
        cause: finding.cause,
        outcome: match finding.outcome {
            Outcome::Damage => CheckOutcome::Damage,
            Outcome::Repairable => CheckOutcome::Repairable,
            Outcome::Repaired => CheckOutcome::Repaired,
        },
    }
}
