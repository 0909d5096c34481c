//! The two places where programs run: a mount and a folder of the disk with the same tree in both.

use super::compare::Steps;
use super::process::Side;
use super::tree::plant;
use super::{Difference, PROCESSES, TICK};
use crate::{Cluster, Pool, checksum, compile, name_of};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Trees of one mount: each program has its own, and after so many everything is made anew.
const TREES: usize = 24;

/// What is mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    /// nothing: the disk is compared with itself, and what differs is the test's fault
    Disk,
    /// a directory
    Directory,
    /// a union whose lower branch has the tree
    Union,
    /// the same with a cache far smaller than the files
    TinyCache,
    /// a directory at a Ceph cluster
    Ceph,
    /// the same that anybody may change meanwhile
    CephStrict,
    /// a union whose branches are at one, and whose lower branch has the tree
    CephUnion,
}

impl Stack {
    /// All that are poolfs.
    pub const ALL: [Self; 6] =
        [Self::Directory, Self::Union, Self::TinyCache, Self::Ceph, Self::CephStrict, Self::CephUnion];

    fn cache(self) -> &'static str {
        if self == Self::TinyCache { "256K" } else { "64M" }
    }

    /// Whether its branches are at a Ceph cluster.
    fn is_at_cluster(self) -> bool {
        matches!(self, Self::Ceph | Self::CephStrict | Self::CephUnion)
    }

    fn is_union(self) -> bool {
        matches!(self, Self::Union | Self::TinyCache | Self::CephUnion)
    }

    /// Whether it offers what a line asks for: CephFS reserves no room, has no range of zeros and exchanges no names.
    fn offers(self, line: &str) -> bool {
        let words: Vec<&str> = line.split(' ').filter(|word| !["child", "bare"].contains(word)).collect();
        match words[..] {
            [_, "fallocate", _, mode, ..] => !self.is_at_cluster() || mode == "3",
            [_, "rename", _, _, flags] => !self.is_at_cluster() || !["2", "3"].contains(&flags),
            _ => true,
        }
    }
}

/// Both sides of one stack.
pub struct World {
    stack: Stack,
    folder: PathBuf,
    worker: PathBuf,
    pool: Option<Pool>,
    /// where the branches are, if they are not on the disk, and the pool that prepares them
    cluster: Option<(Cluster, Pool)>,
    trees_left: usize,
    lower: Option<BTreeMap<String, String>>,
    is_mounted: bool,
    running: Option<(Side, Side)>,
    /// lines carried out on both sides
    pub operations: u64,
    /// those of them since it was mounted last
    pub operations_here: u64,
}

impl World {
    /// Prepares a stack in a folder of its own below that of the test.
    ///
    /// # Panics
    /// When something cannot be made.
    #[must_use]
    pub fn new(stack: Stack, test: &Path) -> Self {
        let worker = prepare(test);
        let name = test.file_name().expect("a folder's name").to_string_lossy();
        let folder = &test.join(format!("{name}-{stack:?}"));
        for folder in [test, folder] {
            fs::create_dir_all(folder).expect("a folder");
            // All users have to reach the mount.
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).expect("a mode");
        }
        let pool = (stack != Stack::Disk).then(|| Pool::create(folder, stack.cache()));
        Self {
            stack,
            folder: folder.to_path_buf(),
            worker,
            pool,
            cluster: stack.is_at_cluster().then(|| {
                (Cluster::create(folder), Pool::named(folder, &format!("{}-branches", name_of(folder)), "16M"))
            }),
            trees_left: 0,
            lower: None,
            is_mounted: false,
            running: None,
            operations: 0,
            operations_here: 0,
        }
    }

    /// The pool, if there is one.
    #[must_use]
    pub fn pool(&self) -> Option<&Pool> {
        self.pool.as_ref()
    }

    fn side(&self, poolfs: bool) -> PathBuf {
        // Names of one length: an absolute link shows it.
        self.folder.join(if poolfs { "poolfs" } else { "disk__" })
    }

    /// The name of a branch below that of what has all of them.
    fn branch(&self) -> &'static str {
        if self.stack.is_union() { "lower" } else { "branch" }
    }

    /// Does something with all branches, which are not in use.
    fn with_branches<T>(&self, with: impl FnOnce(&Path) -> T) -> T {
        let branches = self.folder.join("branches");
        fs::create_dir_all(&branches).expect("a folder");
        let Some((cluster, pool)) = &self.cluster else { return with(&branches) };
        let mounted = pool.mount(&branches, &[&["--dir", "ceph:/"], &cluster.access()[..]].concat());
        let done = with(&branches);
        let _ = mounted.unmount().expect("umount");
        done
    }

    /// What a mount of the stack is given.
    fn arguments(&self) -> Vec<String> {
        let place = match &self.cluster {
            Some(_) => "ceph:".to_owned(),
            None => self.folder.join("branches").display().to_string(),
        };
        let of = |option: &str, name: &str| [format!("--{option}"), format!("{place}/{name}")];
        let mut arguments = match self.stack.is_union() {
            true => [of("upper", "upper"), of("lower", self.branch())].concat(),
            false => of("dir", self.branch()).to_vec(),
        };
        if let Some((cluster, _)) = &self.cluster {
            arguments.extend(cluster.access().map(str::to_owned));
            if self.stack == Stack::CephStrict {
                arguments.extend(["--consistency", "strict"].map(str::to_owned));
            }
        }
        arguments
    }

    /// Unmounts, looks whether the lower branch is what it was, and mounts over new trees.
    fn renew(&mut self) {
        self.end();
        self.trees_left = TREES;
        self.operations_here = 0;
        let disk = self.side(false);
        let at = self.side(true);
        let plant_in = |folders: &[&Path]| {
            for folder in folders {
                fs::create_dir_all(folder).expect("a folder");
                for entry in fs::read_dir(folder).expect("readable") {
                    fs::remove_dir_all(entry.expect("readable").path()).expect("old trees go");
                }
            }
            for number in 1..=TREES {
                let root = folders[0].join(tree(number));
                fs::create_dir_all(&root).expect("a folder");
                plant(&root);
            }
        };
        plant_in(&[&disk]);
        if let Some(pool) = &self.pool {
            self.lower = self.with_branches(|branches| {
                let branch = branches.join(self.branch());
                plant_in(&[&branch, &branches.join("upper")]);
                self.stack.is_union().then(|| checksum(&branch))
            });
            let arguments = self.arguments();
            pool.mount(&at, &arguments.iter().map(String::as_str).collect::<Vec<_>>()).keep();
            self.is_mounted = true;
        } else {
            plant_in(&[&at]);
        }
        // In the test's own /run: a socket's name is short, and the test's folder is as long as the user's temporary directory.
        let start = |pool, name| Side::start(pool, &self.worker, &Path::new("/run").join(name));
        self.running = Some((start(self.pool.as_ref(), "mailbox-poolfs"), start(None, "mailbox-disk")));
    }

    /// Ends the processes, unmounts, and looks at the lower branch.
    ///
    /// # Panics
    /// When it was changed or the mount is not unmounted.
    pub fn end(&mut self) {
        self.running = None;
        if !std::mem::take(&mut self.is_mounted) {
            return;
        }
        let at = self.side(true);
        let at = at.to_str().expect("paths of tests are text");
        if let Some(pool) = &self.pool {
            let _ = pool.poolfs(&["umount", pool.name(), at]).expect("umount");
        }
        if let Some(before) = self.lower.take() {
            let after = self.with_branches(|branches| checksum(&branches.join(self.branch())));
            assert_eq!(before, after, "the lower branch changed");
        }
    }

    /// Runs a program on both sides, up to the first difference.
    pub fn compare(&mut self, program: &[String]) -> Option<Difference> {
        if self.trees_left == 0 || self.running.is_none() {
            self.renew();
        }
        let tree = tree(self.trees_left);
        self.trees_left -= 1;
        let roots = [true, false].map(|poolfs| self.side(poolfs).join(&tree));
        let sides = self.running.as_mut().expect("running");
        for process in 0..PROCESSES.len() {
            let begun = exchange(sides, process, &roots.each_ref().map(|root| format!("begin {}", root.display())));
            assert_eq!(begun, ["0".to_owned(), "0".to_owned()], "process {process} begins");
        }
        let mut steps = Steps::default();
        steps.tick();
        for (at, line) in program.iter().enumerate() {
            if line == TICK {
                // What was posted is taken before the step ends, however long a busy machine would leave it: what comes later than a second
                // shows a later time (docs/protocol.md).
                let asked = statx(CWD, &roots[0], AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
                let _ = asked.expect("the root is there");
                steps.tick();
                continue;
            }
            if !self.stack.offers(line) {
                continue;
            }
            let (process, rest) = line.split_once(' ').expect("a process and a line");
            let process: usize = process.parse().expect("a process's number");
            let answers = exchange(sides, process, &[rest.to_owned(), rest.to_owned()]);
            // What is written and no longer in the cache shows when it was brought to the disk (docs/semantics.md).
            let of_files = self.stack != Stack::TinyCache;
            let [poolfs, disk] = answers.map(|answer| steps.steps_for_times(&answer, of_files));
            self.operations += 1;
            self.operations_here += 1;
            if poolfs != disk {
                if poolfs.starts_with("process") || disk.starts_with("process") {
                    self.running = None;
                    self.trees_left = 0;
                }
                return Some(Difference { at, line: line.clone(), poolfs, disk });
            }
        }
        None
    }
}

/// Compiles the processes' program and, whatever they may do, makes all of the machine's disk but the test's folder
/// read-only in these namespaces. In the folder reading moves no access times and devices do not open, as on poolfs. Only once for a test.
fn prepare(test: &Path) -> PathBuf {
    let worker = test.join("differential");
    if !worker.exists() {
        let _ = compile(test, "differential", false);
        let at = test.display();
        let confine = format!(
            "mount --bind {at} {at} && mount -o remount,bind,noatime,nodev {at} && mount -o remount,bind,ro / && ! touch /poolfs-differential 2>/dev/null"
        );
        let _ = crate::shell(&confine).expect("a read-only machine");
    }
    worker
}

/// Where a program's tree is below the root of its side: links may lead one folder up.
fn tree(number: usize) -> String {
    format!("{number}/tree")
}

/// A line for each side, and their answers; what went wrong stands for one.
fn exchange(sides: &mut (Side, Side), process: usize, lines: &[String; 2]) -> [String; 2] {
    let sent = [sides.0.send(process, &lines[0]), sides.1.send(process, &lines[1])];
    let [first, second] = sent;
    [
        first.and_then(|()| sides.0.answer(process)).unwrap_or_else(|error| error),
        second.and_then(|()| sides.1.answer(process)).unwrap_or_else(|error| error),
    ]
}
