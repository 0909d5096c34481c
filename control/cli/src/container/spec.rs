//! The OCI bundle's `config.json`: a container as the runtime is told of it.

use crate::container::seccomp;
use crate::container::user::User;
use poolfs_image::ImageConfig;
use poolfs_service_protocol::IdMap;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Where sockets and the library lie in a container.
const RUN_DIRECTORY: &str = "/run/poolfs";
/// The preloaded library in a container.
const PRELOAD_PATH: &str = "/run/poolfs/libpoolfs_preload.so";
/// The init process in a container, where no image has anything.
const INIT_PATH: &str = "/dev/poolfs-init";
/// Where programs are looked for when an image does not say.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What root in a container may do, as with Docker.
const CAPABILITIES: &[(&str, u32)] = &[
    ("CAP_CHOWN", 0),
    ("CAP_DAC_OVERRIDE", 1),
    ("CAP_FOWNER", 3),
    ("CAP_FSETID", 4),
    ("CAP_KILL", 5),
    ("CAP_SETGID", 6),
    ("CAP_SETUID", 7),
    ("CAP_SETPCAP", 8),
    ("CAP_NET_BIND_SERVICE", 10),
    ("CAP_NET_RAW", 13),
    ("CAP_SYS_CHROOT", 18),
    ("CAP_MKNOD", 27),
    ("CAP_AUDIT_WRITE", 29),
    ("CAP_SETFCAP", 31),
];
/// The group of terminals.
const TTY_GROUP: u32 = 5;
const MASKED_PATHS: &[&str] = &[
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];
const READ_ONLY_PATHS: &[&str] = &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// What a container's specification is made of.
pub struct Wanted<'a> {
    /// Its name, also its host's name.
    pub name: &'a str,
    /// Its root, mounted.
    pub root: &'a Path,
    /// What it runs.
    pub command: &'a [String],
    /// The image's configuration.
    pub image: &'a ImageConfig,
    /// Variables that were asked for.
    pub env: &'a [String],
    /// As whom.
    pub user: &'a User,
    /// With a terminal.
    pub tty: bool,
    /// Its control group.
    pub group: PathBuf,
    /// Most memory.
    pub memory_bytes: Option<u64>,
    /// The directory with `hosts`, `hostname` and `resolv.conf` for it.
    pub files: &'a Path,
    /// The library and the instance's socket; none for the kernel's path alone.
    pub library: Option<Library>,
    /// The program under which the command runs, if it has one.
    pub init: Option<&'a Path>,
    /// The capabilities this host can give, as a bit set.
    pub capabilities: u64,
    /// Whether the host has control groups of version 2.
    pub is_unified: bool,
    /// The ids of its user namespace, when it has one.
    pub userns: Option<&'a IdMap>,
}

/// What a container needs for the user-level path.
pub struct Library {
    /// The library to preload.
    pub preload: PathBuf,
    /// The instance's socket.
    pub socket: PathBuf,
}

/// The whole specification.
pub fn specification(wanted: &Wanted<'_>) -> Value {
    let names = CAPABILITIES.iter().filter(|(_, bit)| wanted.capabilities & (1 << bit) != 0);
    let capabilities: Vec<&str> = names.map(|(name, _)| *name).collect();
    let directory = &wanted.image.working_directory;
    let init = wanted.init.map(|_| INIT_PATH);
    let command: Vec<&str> = init.into_iter().chain(wanted.command.iter().map(String::as_str)).collect();
    let memory = wanted.memory_bytes.map(|bytes| json!({"limit": bytes}));
    let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
    if wanted.is_unified {
        namespaces.push("cgroup");
    }
    let mut id_mappings = json!(null);
    if let Some(map) = wanted.userns {
        namespaces.push("user");
        id_mappings = map
            .ranges()
            .iter()
            .map(|range| json!({"containerID": range.inside, "hostID": range.host, "size": range.count}))
            .collect();
    }
    let mut resources = json!({"devices": devices()});
    if let Some(memory) = memory {
        resources["memory"] = memory;
    }
    let mut specification = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": wanted.tty,
            "user": {"uid": wanted.user.uid, "gid": wanted.user.gid, "additionalGids": wanted.user.groups},
            "args": command,
            "env": environment(wanted),
            "cwd": if directory.starts_with('/') { directory } else { "/" },
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
            "noNewPrivileges": false,
        },
        "root": {"path": wanted.root, "readonly": false},
        "hostname": wanted.name,
        "mounts": mounts(wanted),
        "linux": {
            "cgroupsPath": wanted.group,
            "resources": resources,
            "namespaces": namespaces.iter().map(|kind| json!({"type": kind})).collect::<Vec<_>>(),
            "maskedPaths": MASKED_PATHS,
            "readonlyPaths": READ_ONLY_PATHS,
            "seccomp": seccomp::profile(),
        },
    });
    if wanted.userns.is_some() {
        specification["linux"]["uidMappings"] = id_mappings.clone();
        specification["linux"]["gidMappings"] = id_mappings;
    }
    specification
}

/// Later ones win: defaults, the image's, those that were asked for.
fn environment(wanted: &Wanted<'_>) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut set = |variable: String| {
        let key_length = variable.find('=').map_or(variable.len(), |at| at + 1);
        all.retain(|known| !known.starts_with(&variable[..key_length]));
        all.push(variable);
    };
    set(format!("PATH={DEFAULT_PATH}"));
    set(format!("HOME={}", wanted.user.home));
    set(format!("HOSTNAME={}", wanted.name));
    if wanted.tty {
        set("TERM=xterm".to_owned());
    }
    wanted.image.env.iter().chain(wanted.env).cloned().for_each(&mut set);
    if wanted.library.is_some() {
        let asked_for = wanted.image.env.iter().chain(wanted.env).rev().find_map(|v| v.strip_prefix("LD_PRELOAD="));
        set(match asked_for {
            Some(others) if !others.is_empty() => format!("LD_PRELOAD={PRELOAD_PATH}:{others}"),
            _ => format!("LD_PRELOAD={PRELOAD_PATH}"),
        });
    }
    all
}

fn mounts(wanted: &Wanted<'_>) -> Vec<Value> {
    let plain = |at: &str, kind: &str, options: &[&str]| json!({"destination": at, "type": kind, "source": kind, "options": options});
    let bind = |at: &str, from: &Path, options: &[&str]| {
        let options: Vec<&str> = ["bind", "rprivate"].iter().chain(options).copied().collect();
        json!({"destination": at, "type": "bind", "source": from, "options": options})
    };
    // A group that the namespace does not have can own nothing in it.
    let has_tty_group = wanted.userns.is_none_or(|map| map.host(TTY_GROUP).is_some());
    let tty_group = format!("gid={TTY_GROUP}");
    let mut terminals = vec!["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"];
    terminals.extend(has_tty_group.then_some(tty_group.as_str()));
    let sys = match wanted.userns {
        None => plain("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        // Only who has rights over the network can mount it, and that is the host's.
        Some(_) => bind("/sys", Path::new("/sys"), &["rbind", "nosuid", "noexec", "nodev", "ro", "rro"]),
    };
    let mut mounts = vec![
        plain("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        plain("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        plain("/dev/pts", "devpts", &terminals),
        plain("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        plain("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        sys,
        plain("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", "ro"]),
    ];
    for file in ["hosts", "hostname", "resolv.conf"] {
        mounts.push(bind(&format!("/etc/{file}"), &wanted.files.join(file), &["nosuid", "nodev", "noexec"]));
    }
    if let Some(library) = &wanted.library {
        let socket = library.socket.file_name().unwrap_or_default().to_string_lossy().into_owned();
        mounts.push(plain(RUN_DIRECTORY, "tmpfs", &["nosuid", "nodev", "ro", "mode=755", "size=64k"]));
        mounts.push(bind(PRELOAD_PATH, &library.preload, &["ro", "nosuid", "nodev"]));
        mounts.push(bind(&format!("{RUN_DIRECTORY}/{socket}"), &library.socket, &["ro", "nosuid", "nodev", "noexec"]));
    }
    if let Some(init) = wanted.init {
        mounts.push(bind(INIT_PATH, init, &["ro", "nosuid", "nodev"]));
    }
    mounts
}

/// Nothing but what every program expects; nodes may be made, but not opened. The runtime adds the usual ones itself.
fn devices() -> Vec<Value> {
    vec![
        json!({"allow": false, "access": "rwm"}),
        json!({"allow": true, "type": "c", "access": "m"}),
        json!({"allow": true, "type": "b", "access": "m"}),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specified(library: bool, env: &[&str]) -> Value {
        specified_with(library, env, None)
    }

    fn specified_with(library: bool, env: &[&str], userns: Option<&IdMap>) -> Value {
        let user = User { uid: 5, gid: 6, groups: vec![7], home: "/home".into() };
        let image = ImageConfig { env: vec!["PATH=/bin".into(), "A=1".into()], ..ImageConfig::default() };
        let env: Vec<String> = env.iter().map(|text| (*text).to_owned()).collect();
        let library = library.then(|| Library { preload: "/lib/x.so".into(), socket: "/run/poolfs/p-1.sock".into() });
        specification(&Wanted {
            name: "c1",
            root: Path::new("/r"),
            command: &["sh".to_owned()],
            image: &image,
            env: &env,
            user: &user,
            tty: false,
            group: "/poolfs/p/containers/c1".into(),
            memory_bytes: Some(1 << 20),
            files: Path::new("/f"),
            library,
            init: userns.is_some().then_some(Path::new("/lib/init")),
            capabilities: !(1 << 13),
            is_unified: false,
            userns,
        })
    }

    #[test]
    fn the_library_comes_by_mounts_and_environment_unless_legacy() {
        let with = specified(true, &["A=2", "LD_PRELOAD=/mine.so"]);
        let env = with["process"]["env"].to_string();
        assert!(env.contains("LD_PRELOAD=/run/poolfs/libpoolfs_preload.so:/mine.so"), "{env}");
        assert!(env.contains("A=2") && !env.contains("A=1") && env.contains("PATH=/bin"), "{env}");
        assert!(with["mounts"].to_string().contains("/run/poolfs/p-1.sock"));
        let without = specified(false, &[]).to_string();
        assert!(!without.contains("LD_PRELOAD") && !without.contains("/run/poolfs"));
    }

    #[test]
    fn limits_rights_and_user_are_set() {
        let spec = specified(false, &[]);
        assert_eq!(spec["linux"]["resources"]["memory"]["limit"], 1 << 20);
        assert_eq!(spec["process"]["user"], json!({"uid": 5, "gid": 6, "additionalGids": [7]}));
        let bounding = spec["process"]["capabilities"]["bounding"].to_string();
        assert!(bounding.contains("CAP_CHOWN") && !bounding.contains("SYS_ADMIN"));
        assert!(!bounding.contains("CAP_NET_RAW"), "the host cannot give it");
        assert_eq!(spec["process"]["cwd"], "/");
        assert_eq!(spec["process"]["args"], json!(["sh"]));
    }

    #[test]
    fn a_user_namespace_has_its_map_and_the_hosts_sys() {
        let without = specified(false, &[]);
        assert!(!without.to_string().contains("Mappings") && without.to_string().contains("gid=5"));
        let few = IdMap::parse_proc("0 100000 5\n1000 7 1").expect("a map");
        let spec = specified_with(false, &[], Some(&few));
        let mappings = json!([
            {"containerID": 0, "hostID": 100_000, "size": 5},
            {"containerID": 1000, "hostID": 7, "size": 1},
        ]);
        assert_eq!((&spec["linux"]["uidMappings"], &spec["linux"]["gidMappings"]), (&mappings, &mappings));
        assert!(spec["linux"]["namespaces"].to_string().contains("user"));
        assert_eq!(spec["process"]["args"], json!([INIT_PATH, "sh"]));
        assert!(spec["mounts"].to_string().contains("/lib/init"));
        let sys = spec["mounts"].as_array().expect("mounts").iter().find(|mount| mount["destination"] == "/sys");
        assert_eq!(sys.expect("it is there")["type"], "bind");
        assert!(!spec.to_string().contains("gid=5"), "the namespace has no such group");
    }
}
