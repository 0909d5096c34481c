//! The command `doctor`: what this host lacks, and what follows from it.

use crate::ceph::CephArguments;
use crate::container::find_program;
use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::inherited::with_used_variables;
use crate::mount::{branch, file_to_read};
use crate::text::{print, print_json, size};
use poolfs_host::{ControlGroups, GroupLayout, Host};
use poolfs_service_protocol::{PROBE_ANSWER_BYTES_MAX, Place, ProbeAnswer, ProbeSpec, ProbedDirectory, StackSpec};
use rustix::process::Resource;
use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Kernel versions from which something is there.
const KERNEL_LOCAL: (u32, u32) = (5, 12);
const KERNEL_SESSIONS: (u32, u32) = (6, 5);
const KERNEL_PASSTHROUGH: (u32, u32) = (6, 9);
const KERNEL_URING: (u32, u32) = (6, 14);
const KERNEL_PRUNE: (u32, u32) = (6, 18);
/// Fewer open files than this are too few for a service with many of them in its cache.
const OPEN_FILES_MIN: u64 = 4096;
const LOCKED_BYTES_MIN: u64 = 8 << 20;
/// The capability without which nothing can be mounted, and that which raises limits.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    /// As it should be.
    Fine,
    /// Slower or less than possible.
    Less,
    /// Something does not work.
    Broken,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Finding {
    thing: Cow<'static, str>,
    verdict: Verdict,
    found: String,
    consequence: &'static str,
    remedy: Cow<'static, str>,
}

/// Look at everything; 1 when something does not work.
pub fn doctor(context: &Context, directory: Option<&Path>, ceph: &CephArguments) -> Result<u8> {
    let findings = examine(context, probe(context, directory, ceph)?);
    let broken = findings.iter().any(|finding| finding.verdict == Verdict::Broken);
    if context.json {
        print_json(&findings)?;
    } else {
        print(&readable(&findings))?;
    }
    Ok(u8::from(broken))
}

fn readable(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let mark = match finding.verdict {
            Verdict::Fine => "fine  ",
            Verdict::Less => "less  ",
            Verdict::Broken => "BROKEN",
        };
        let _ = writeln!(text, "{mark}  {:<18} {}", finding.thing, finding.found);
        if finding.verdict != Verdict::Fine {
            let _ = writeln!(text, "{:27}follows: {}\n{:27}remedy: {}", "", finding.consequence, "", finding.remedy);
        }
    }
    text
}

fn examine(context: &Context, cluster: Vec<Finding>) -> Vec<Finding> {
    let host = &*context.host;
    let kernel = kernel_version(host);
    let mut findings = vec![user(), kernel_finding(kernel)];
    findings.extend(capabilities(host));
    findings.push(confinement(host));
    findings.push(fuse_device());
    findings.extend(kernel_features(host, kernel));
    findings.push(control_groups(host));
    findings.push(state_directory(&context.state));
    findings.push(runtime());
    findings.push(user_namespaces(host));
    findings.extend(programs(context));
    findings.extend(limits());
    findings.push(huge_pages(host));
    findings.extend(cluster);
    findings
}

/// What branches at a cluster need, and a directory of one.
fn probe(context: &Context, directory: Option<&Path>, ceph: &CephArguments) -> Result<Vec<Finding>> {
    let directory = directory.map(|name| branch(context, name)).transpose()?;
    if let Some(name) = directory.as_ref().filter(|name| Place::of(name).is_directory()) {
        let remedy = "name a directory of a cluster as ceph:/PATH, or leave it out";
        return Err(Failure::usage(name.display().to_string(), "it is a directory of this host", remedy));
    }
    let stacks: Vec<_> = directory.iter().map(StackSpec::directory).collect();
    let access = ceph.access(&stacks.iter().collect::<Vec<_>>(), |path| file_to_read(context, path))?;
    let spec = ProbeSpec { directory: directory.clone(), ceph: access.unwrap_or_default() };
    let answer = match context.service_program().map(|program| probe_by(&program, &spec)) {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            let remedy = "use the poolfs and the poolfs-service of one build";
            let failed = judged(
                "Ceph's library",
                Verdict::Broken,
                error.to_string(),
                "whether it can be used is not known",
                remedy,
            );
            return Ok(vec![failed]);
        }
        // It is found missing elsewhere.
        Err(_) => return Ok(Vec::new()),
    };
    let mut findings = vec![library_finding(answer.library)];
    findings.extend(directory.zip(answer.directory).map(|(name, found)| directory_finding(&name, found)));
    Ok(findings)
}

/// What the service's program answers.
fn probe_by(program: &Path, spec: &ProbeSpec) -> std::io::Result<ProbeAnswer> {
    let mut command = Command::new(program);
    let command = with_used_variables(&mut command).arg("probe").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::inherit()).spawn()?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&serde_json::to_vec(spec)?)?;
    }
    let mut text = Vec::new();
    if let Some(output) = child.stdout.take() {
        let _ = output.take(PROBE_ANSWER_BYTES_MAX).read_to_end(&mut text)?;
    }
    let ended = child.wait()?;
    if !ended.success() {
        return Err(std::io::Error::other(format!("poolfs-service probe: {ended}")));
    }
    Ok(serde_json::from_slice(&text)?)
}

fn library_finding(library: std::result::Result<String, String>) -> Finding {
    judged(
        "Ceph's library",
        fine_or(library.is_ok(), Verdict::Less),
        library.map_or_else(|cause| cause, |version| format!("libcephfs {version}")),
        "branches at a Ceph cluster (ceph:/PATH) cannot be mounted",
        "install libcephfs of Ceph 16.2 or newer (Debian: apt-get install libcephfs2)",
    )
}

fn directory_finding(name: &Path, found: std::result::Result<ProbedDirectory, String>) -> Finding {
    let thing = Cow::Owned(name.display().to_string());
    match found {
        Ok(ProbedDirectory { mounted_ms, total_bytes: 0, .. }) => {
            Finding { thing, ..judged("", Verdict::Fine, format!("mounted in {mounted_ms} ms"), "", "") }
        }
        Ok(ProbedDirectory { mounted_ms, total_bytes, free_bytes }) => {
            let found = format!("mounted in {mounted_ms} ms; {} of {} free", size(free_bytes), size(total_bytes));
            Finding { thing, ..judged("", Verdict::Fine, found, "", "") }
        }
        Err(text) => {
            let (cause, remedy) = text.rsplit_once("; ").unwrap_or((&text, "look at the cluster (ceph -s)"));
            let remedy = Cow::Owned(remedy.to_owned());
            Finding { thing, remedy, ..judged("", Verdict::Broken, cause, "it cannot be mounted", "") }
        }
    }
}

fn judged(
    thing: &'static str,
    verdict: Verdict,
    found: impl Into<String>,
    consequence: &'static str,
    remedy: &'static str,
) -> Finding {
    // What is fine has none.
    let told = |text| if verdict == Verdict::Fine { "" } else { text };
    let (thing, remedy) = (Cow::Borrowed(thing), Cow::Borrowed(told(remedy)));
    Finding { thing, verdict, found: found.into(), consequence: told(consequence), remedy }
}

fn fine_or(good: bool, otherwise: Verdict) -> Verdict {
    if good { Verdict::Fine } else { otherwise }
}

/// The remedy for missing rights.
const AS_ROOT: &str = "run poolfs as root, with all of root's capabilities";

fn user() -> Finding {
    let uid = rustix::process::geteuid();
    judged(
        "user",
        fine_or(uid.is_root(), Verdict::Broken),
        if uid.is_root() { "root".to_owned() } else { format!("user {}", uid.as_raw()) },
        "pools, mounts and containers cannot be made: they need mount, control groups and owners of files",
        "run poolfs as root (without it, FUSE by fusermount3, user namespaces and delegated control groups would be needed)",
    )
}

fn kernel_version(host: &dyn Host) -> Option<(u32, u32)> {
    let text = host.read_text(Path::new("/proc/sys/kernel/osrelease")).ok()?;
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

fn kernel_finding(version: Option<(u32, u32)>) -> Finding {
    let found = version.map_or_else(|| "unknown".to_owned(), |(major, minor)| format!("{major}.{minor}"));
    let from = |wanted| version.is_some_and(|version| version >= wanted);
    let (verdict, consequence) = if from(KERNEL_SESSIONS) {
        (Verdict::Fine, "")
    } else if from(KERNEL_LOCAL) {
        (Verdict::Broken, "the library has no sessions (SO_PEERPIDFD, Linux 6.5; futex_waitv, 5.16)")
    } else {
        (
            Verdict::Broken,
            "no directory can be mounted: local branches are private mounts (open_tree, mount_setattr, Linux 5.12)",
        )
    };
    let remedy = "use Linux 6.5 or later (5.12 for local branches, 6.5 for the library's sessions)";
    judged("kernel", verdict, found, consequence, remedy)
}

fn capabilities(host: &dyn Host) -> Vec<Finding> {
    let status = host.read_text(Path::new("/proc/self/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap_or("0");
    let effective = u64::from_str_radix(line.trim(), 16).unwrap_or(0);
    let has = |bit: u32| effective & (1 << bit) != 0;
    let found = |bit| if has(bit) { "held" } else { "not held" };
    vec![
        judged(
            "CAP_SYS_ADMIN",
            fine_or(has(CAP_SYS_ADMIN), Verdict::Broken),
            found(CAP_SYS_ADMIN),
            "nothing can be mounted, and no local branch can be opened (it is a private mount of its directory)",
            "run poolfs with all of root's capabilities",
        ),
        judged(
            "CAP_SYS_RESOURCE",
            fine_or(has(CAP_SYS_RESOURCE), Verdict::Less),
            found(CAP_SYS_RESOURCE),
            "limits below cannot be raised",
            "none is needed for ordinary use",
        ),
    ]
}

/// The service confines itself, or does not run.
fn confinement(host: &dyn Host) -> Finding {
    let actions = host.read_text(Path::new("/proc/sys/kernel/seccomp/actions_avail")).unwrap_or_default();
    let lacking =
        ["kill_process", "errno"].iter().filter(|action| !actions.split_whitespace().any(|one| one == **action));
    let lacking: Vec<&str> = lacking.copied().collect();
    let found = if lacking.is_empty() {
        "services run with few capabilities and system calls, and no new privileges".to_owned()
    } else {
        format!("seccomp without {}", lacking.join(", "))
    };
    judged(
        "confinement",
        fine_or(lacking.is_empty(), Verdict::Broken),
        found,
        "no service runs: one that cannot give up what it does not need ends at its start",
        "a kernel with CONFIG_SECCOMP_FILTER",
    )
}

/// The remedy for what failed, which is another one where only the rights are missing.
fn or_as_root(error: &std::io::Error, remedy: &'static str) -> &'static str {
    if error.kind() == std::io::ErrorKind::PermissionDenied { AS_ROOT } else { remedy }
}

fn fuse_device() -> Finding {
    let opened = std::fs::File::options().read(true).write(true).open("/dev/fuse");
    let found = opened.as_ref().map_or_else(ToString::to_string, |_| "can be opened".to_owned());
    let consequence = "nothing can be mounted: programs cannot be started from a pool's filesystem";
    let remedy = opened.as_ref().map_or_else(|error| or_as_root(error, "modprobe fuse"), |_| "");
    judged("/dev/fuse", fine_or(opened.is_ok(), Verdict::Broken), found, consequence, remedy)
}

fn kernel_features(host: &dyn Host, kernel: Option<(u32, u32)>) -> Vec<Finding> {
    let from = |wanted| kernel.is_some_and(|version| version >= wanted);
    let offered = |wanted| if from(wanted) { "offered by this kernel" } else { "not offered by this kernel" };
    let read = |path| host.read_text(Path::new(path)).ok().map(|text| text.trim().to_owned());
    let parameter = read("/sys/module/fuse/parameters/enable_uring");
    let switched_on = parameter.as_deref().map(|text| matches!(text, "Y" | "1"));
    // 1 forbids it to those without rights only, of which the service has few.
    let disabled = read("/proc/sys/kernel/io_uring_disabled");
    let (forbidden, restricted) = (disabled.as_deref() == Some("2"), disabled.is_some_and(|text| text != "0"));
    let uring = match switched_on {
        Some(_) if forbidden => "offered, and io_uring is forbidden by kernel.io_uring_disabled",
        Some(true) => "offered and switched on",
        Some(false) => "offered and switched off",
        None => offered(KERNEL_URING),
    };
    vec![
        judged(
            "FUSE passthrough",
            fine_or(from(KERNEL_PASSTHROUGH), Verdict::Less),
            offered(KERNEL_PASSTHROUGH),
            "program text cannot be mapped from the cache: the kernel keeps a copy of its own",
            "use Linux 6.9 or later",
        ),
        judged(
            "FUSE io_uring",
            fine_or(switched_on == Some(true) && !forbidden, Verdict::Less),
            uring,
            "a request by the kernel's path to a service on another core waits for it to wake",
            "Linux 6.14 or later; before mounting: echo Y > /sys/module/fuse/parameters/enable_uring (and, where it is \
             forbidden, sysctl kernel.io_uring_disabled=0)",
        ),
        judged(
            "io_uring",
            fine_or(!restricted, Verdict::Less),
            if restricted { "forbidden by kernel.io_uring_disabled" } else { "not forbidden" },
            "what was written to many places of a file goes to the disk one after the other",
            "sysctl kernel.io_uring_disabled=0",
        ),
        judged(
            "FUSE prune",
            fine_or(from(KERNEL_PRUNE), Verdict::Less),
            offered(KERNEL_PRUNE),
            "program text cannot be mapped from the cache, because it could not be given back: the kernel keeps a copy of its own",
            "use Linux 6.18 or later",
        ),
    ]
}

fn control_groups(host: &dyn Host) -> Finding {
    let consequence = "pools are not kept on their cores or within their memory";
    let remedy = "mount control groups with the controllers cpuset and memory";
    match ControlGroups::detect(host).and_then(|groups| Ok((groups.lacking(host)?, groups))) {
        Ok((lacking, groups)) => {
            let version = match groups.layout() {
                GroupLayout::V1(_) => "version 1",
                GroupLayout::V2(_) => "version 2",
            };
            let found = if lacking.is_empty() {
                version.to_owned()
            } else {
                format!("{version} without {}", lacking.join(", "))
            };
            judged("control groups", fine_or(lacking.is_empty(), Verdict::Broken), found, consequence, remedy)
        }
        Err(error) => judged("control groups", Verdict::Broken, error.to_string(), consequence, remedy),
    }
}

/// Layers and upper branches need devices 0/0 and attributes that only root may set.
fn state_directory(state: &Path) -> Finding {
    let there = state.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/"));
    let tried = tempfile::Builder::new().prefix(".poolfs-doctor-").tempdir_in(there).and_then(|place| {
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, place.path().join("whiteout"), kind, rustix::fs::Mode::empty(), 0)?;
        let none = rustix::fs::XattrFlags::empty();
        rustix::fs::lsetxattr(place.path(), "trusted.overlay.opaque", b"y", none)?;
        Ok(rustix::fs::lsetxattr(place.path(), "trusted.poolfs.doctor", b"y", none)?)
    });
    let found = match &tried {
        Ok(()) => state.display().to_string(),
        Err(error) => format!("{}: {error}", there.display()),
    };
    let consequence =
        "images cannot be imported, and no container can be run: whiteouts and marks cannot be kept there";
    let remedy = "use --state on a local disk with ext4, xfs or btrfs, with room left";
    let remedy = tried.as_ref().map_or_else(|error| or_as_root(error, remedy), |()| "");
    judged("state directory", fine_or(tried.is_ok(), Verdict::Broken), found, consequence, remedy)
}

fn runtime() -> Finding {
    let found = ["runc", "crun"].into_iter().find_map(find_program);
    let verdict = fine_or(found.is_some(), Verdict::Broken);
    let found = found.map_or_else(|| "neither runc nor crun".to_owned(), |path| path.display().to_string());
    judged("OCI runtime", verdict, found, "`poolfs run` does not work", "apt-get install runc")
}

fn user_namespaces(host: &dyn Host) -> Finding {
    let text = host.read_text(Path::new("/proc/sys/user/max_user_namespaces"));
    let limit = text.ok().and_then(|text| text.trim().parse::<u64>().ok());
    judged(
        "user namespaces",
        fine_or(limit.is_some_and(|limit| limit > 0), Verdict::Less),
        limit.map_or_else(|| "not in this kernel".to_owned(), |limit| format!("at most {limit}")),
        "`poolfs run --userns` does not work: root in a container is root on the host",
        "a kernel with CONFIG_USER_NS, and: sysctl -w user.max_user_namespaces=10000",
    )
}

fn programs(context: &Context) -> Vec<Finding> {
    let described = |result: Result<std::path::PathBuf>| match result {
        Ok(path) => (Verdict::Fine, path.display().to_string()),
        Err(_) => (Verdict::Broken, "not beside poolfs".to_owned()),
    };
    let (service, service_found) = described(context.service_program());
    let (preload, preload_found) = described(context.preload_library());
    vec![
        judged("poolfs-service", service, service_found, "nothing can be mounted", "make build"),
        judged(
            "preload library",
            preload,
            preload_found,
            "only --fuse works: every operation goes by FUSE",
            "make build",
        ),
    ]
}

fn limits() -> Vec<Finding> {
    let described = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    let files = rustix::process::getrlimit(Resource::Nofile).maximum;
    let locked = rustix::process::getrlimit(Resource::Memlock).current;
    vec![
        judged(
            "open files",
            fine_or(files.is_none_or(|limit| limit >= OPEN_FILES_MIN), Verdict::Less),
            described(files),
            "a service can serve only so many open files and sessions at once",
            "raise the hard limit of RLIMIT_NOFILE (ulimit -Hn)",
        ),
        judged(
            "locked memory",
            fine_or(locked.is_none_or(|limit| limit >= LOCKED_BYTES_MIN), Verdict::Less),
            locked.map_or_else(|| "unlimited".to_owned(), size),
            "io_uring and pinned buffers get less memory",
            "raise RLIMIT_MEMLOCK (ulimit -l)",
        ),
    ]
}

fn huge_pages(host: &dyn Host) -> Finding {
    let text = host.read_text(Path::new("/sys/kernel/mm/transparent_hugepage/shmem_enabled"));
    let found = match &text {
        Ok(text) => text.trim().to_owned(),
        Err(_) => "not in this kernel".to_owned(),
    };
    let verdict = fine_or(text.is_ok_and(|text| !text.contains("[deny]")), Verdict::Less);
    let remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    judged("huge pages (tmpfs)", verdict, found, "the cache uses small pages: more memory for page tables", remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_host::RecordingHost;

    #[test]
    fn versions_are_compared_by_number() {
        let host = RecordingHost::new();
        host.set_file("/proc/sys/kernel/osrelease", "6.10.3-generic\n");
        assert_eq!(kernel_version(&host), Some((6, 10)));
        let fine = kernel_finding(Some((6, 10)));
        assert_eq!((fine.verdict, fine.consequence, &*fine.remedy), (Verdict::Fine, "", ""));
        let older = kernel_finding(Some((5, 15)));
        assert_eq!(older.verdict, Verdict::Broken);
        assert!(older.consequence.contains("sessions") && older.remedy.contains("6.5"), "{older:?}");
        assert!(kernel_finding(Some((5, 11))).consequence.contains("5.12"));
        assert_eq!(kernel_finding(None).verdict, Verdict::Broken);
    }

    #[test]
    fn a_place_that_cannot_hold_layers_is_named() {
        let place = tempfile::tempdir().expect("a directory");
        assert_eq!(state_directory(&place.path().join("not/there/yet")).verdict, Verdict::Fine);
        assert_eq!(std::fs::read_dir(place.path()).expect("listed").count(), 0, "nothing stays");
        let broken = state_directory(Path::new("/proc/self"));
        assert!(broken.verdict == Verdict::Broken && broken.found.contains("/proc/self"), "{broken:?}");
    }

    #[test]
    fn what_is_less_says_why_and_what_to_do() {
        let host = RecordingHost::new();
        host.set_file("/sys/module/fuse/parameters/enable_uring", "N\n");
        let features = kernel_features(&host, Some((6, 18)));
        let verdicts: Vec<Verdict> = features.iter().map(|finding| finding.verdict).collect();
        assert_eq!(verdicts, [Verdict::Fine, Verdict::Less, Verdict::Fine, Verdict::Fine]);
        let text = readable(&features);
        assert!(text.contains("switched off") && text.contains("remedy: Linux 6.14"), "{text}");
        host.set_file("/sys/module/fuse/parameters/enable_uring", "Y\n");
        host.set_file("/proc/sys/kernel/io_uring_disabled", "1\n");
        let verdicts = kernel_features(&host, Some((6, 18))).into_iter().map(|finding| finding.verdict);
        assert_eq!(verdicts.collect::<Vec<_>>()[1..3], [Verdict::Fine, Verdict::Less]);
        host.set_file("/proc/sys/kernel/io_uring_disabled", "2\n");
        let forbidden = &kernel_features(&host, Some((6, 18)))[1];
        assert!(forbidden.verdict == Verdict::Less && forbidden.found.contains("forbidden"), "{forbidden:?}");
        assert_eq!(control_groups(&RecordingHost::new()).verdict, Verdict::Broken);
        assert_eq!(confinement(&RecordingHost::new()).verdict, Verdict::Broken);
        host.set_file("/proc/sys/kernel/seccomp/actions_avail", "kill_process kill_thread trap errno log allow\n");
        assert_eq!(confinement(&host).verdict, Verdict::Fine);
        assert_eq!(user_namespaces(&host).verdict, Verdict::Less);
        host.set_file("/proc/sys/user/max_user_namespaces", "0\n");
        assert_eq!(user_namespaces(&host).verdict, Verdict::Less);
        host.set_file("/proc/sys/user/max_user_namespaces", "96365\n");
        assert_eq!(user_namespaces(&host).verdict, Verdict::Fine);
    }
}
