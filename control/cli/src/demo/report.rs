//! The report that the demonstration prints at its end.

use crate::demo::containers::StepResult;
use crate::failure::{Failure, Result};
use crate::text::{count, duration, size};
use poolfs_service_protocol::{CacheStatus, InstanceStatus, KindStatus, OperationPath, ServiceStatus, UnionStatus};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The attribute of a file of which only some blocks have moved to the upper branch.
const SKETCH_ATTRIBUTE: &str = "trusted.poolfs.sketch";
/// The union's own directory in an upper branch.
const WORK_DIRECTORY: &str = ".poolfs";
/// So many sketches and kinds of operations are shown.
const SHOWN: usize = 5;
/// Deepest directory that is looked into.
const DEPTH_MAX: usize = 128;

/// What lies in an upper branch.
#[derive(Debug, Default)]
pub struct UpperContent {
    /// Files of which only some blocks are there: path, size, bytes on the disk.
    pub sketches: Vec<(PathBuf, u64, u64)>,
    /// Other files.
    pub files: u64,
    /// Their bytes.
    pub file_bytes: u64,
}

/// One container in the report.
pub struct Part {
    /// Its name.
    pub name: String,
    /// How its steps went.
    pub steps: Vec<StepResult>,
    /// What the service told of it while it was there.
    pub instance: Option<InstanceStatus>,
    /// What it left in its upper branch.
    pub upper: UpperContent,
}

/// Everything that is shown.
pub struct Report {
    /// Bytes of the image's layers.
    pub image_bytes: u64,
    /// Layers.
    pub layers: usize,
    /// The service, while the containers were there.
    pub service: ServiceStatus,
    /// Memory the pool used then.
    pub memory_bytes: Option<u64>,
    /// Without the library.
    pub legacy: bool,
    /// The containers.
    pub parts: Vec<Part>,
}

/// Look through an upper branch after its union was unmounted.
pub fn look_at_upper(upper: &Path) -> Result<UpperContent> {
    let mut content = UpperContent::default();
    look_into(upper, upper, 0, &mut content).map_err(|error| Failure::file(upper, error))?;
    content.sketches.sort_by_key(|(_, size, _)| std::cmp::Reverse(*size));
    Ok(content)
}

fn look_into(root: &Path, directory: &Path, depth: usize, content: &mut UpperContent) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let (path, status) = (entry.path(), entry.metadata()?);
        if depth == 0 && entry.file_name() == WORK_DIRECTORY {
            continue;
        }
        if status.is_dir() && depth < DEPTH_MAX {
            look_into(root, &path, depth + 1, content)?;
        } else if status.is_file() {
            let mut value = [0; 128];
            if rustix::fs::lgetxattr(&path, SKETCH_ATTRIBUTE, &mut value).is_ok() {
                let relative = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
                content.sketches.push((relative, status.len(), status.blocks() * 512));
            } else {
                content.files += 1;
                content.file_bytes += status.len();
            }
        }
    }
    Ok(())
}

impl Report {
    /// Whether every step of every container did what it should.
    pub fn passed(&self) -> bool {
        self.parts.iter().all(|part| !part.steps.is_empty() && part.steps.iter().all(|step| step.passed))
    }

    /// As text.
    pub fn text(&self) -> String {
        let mut text = String::from("\nWhat was shared\n");
        let CacheStatus { used_bytes, shared_bytes, private_bytes, hits, misses, .. } = &self.service.cache;
        let _ = writeln!(
            text,
            "  image          {} in {} on the disk, once for {} containers",
            size(self.image_bytes),
            count(self.layers as u64, "layer"),
            self.parts.len()
        );
        let _ = writeln!(
            text,
            "  cache          {}: {} of branches both use, {} of one only; {hits} of {} block reads from it",
            size(*used_bytes),
            size(*shared_bytes),
            size(*private_bytes),
            hits + misses
        );
        if let Some(memory) = self.memory_bytes {
            let _ = writeln!(text, "  memory         {} for the service and all containers", size(memory));
        }
        self.parts.iter().for_each(|part| part.describe(&mut text));
        self.describe_operations(&mut text);
        let verdict = if self.passed() { "Everything did what it should." } else { "Some steps FAILED, see above." };
        let _ = writeln!(text, "\n{verdict}");
        text
    }

    fn describe_operations(&self, text: &mut String) {
        let _ =
            writeln!(text, "\nWhich way operations took{}", if self.legacy { " (without the library)" } else { "" });
        for (path, title) in [(OperationPath::Library, "user level"), (OperationPath::Fuse, "FUSE")] {
            let mut kinds: BTreeMap<&str, KindStatus> = BTreeMap::new();
            for part in &self.parts {
                let counted = part.instance.iter().filter_map(|instance| instance.operations.get(&path)).flatten();
                for (kind, one) in counted {
                    let sum = kinds.entry(kind).or_default();
                    sum.count += one.count;
                    sum.p50_ns = sum.p50_ns.max(one.p50_ns);
                }
            }
            let total: u64 = kinds.values().map(|kind| kind.count).sum();
            let mut most: Vec<_> = kinds.into_iter().collect();
            most.sort_by_key(|(_, kind)| std::cmp::Reverse(kind.count));
            let shown = most.iter().take(SHOWN);
            let shown = shown.map(|(name, kind)| format!("{name} {} (p50 {})", kind.count, duration(kind.p50_ns)));
            let _ = writeln!(text, "  {title:14} {total:9}  {}", shown.collect::<Vec<_>>().join(", "));
        }
    }
}

impl Part {
    fn describe(&self, text: &mut String) {
        let _ = writeln!(text, "\nContainer {}", self.name);
        for step in &self.steps {
            let mark = if step.passed { "done  " } else { "FAILED" };
            let _ = writeln!(text, "  {mark} {:<26} {:6.1} s  {}", step.title, step.took.as_secs_f64(), step.note);
        }
        if let Some(union) = self.instance.as_ref().and_then(|instance| instance.union.as_ref()) {
            let UnionStatus { sketches, blocks_moved, blocks_copied, objects_copied, .. } = union;
            let _ = writeln!(
                text,
                "  copied up      {blocks_moved} blocks ({}) of {sketches} files by block, {blocks_copied} of them in part; \
                 {objects_copied} directories and links",
                size(blocks_moved.saturating_mul(4096))
            );
        }
        let whole: u64 = self.upper.sketches.iter().map(|(_, size, _)| size).sum();
        let stored: u64 = self.upper.sketches.iter().map(|(.., stored)| stored).sum();
        let _ =
            writeln!(text, "  by whole file  {} would have been copied; on the disk are {}", size(whole), size(stored));
        for (path, whole, stored) in self.upper.sketches.iter().take(SHOWN) {
            let _ = writeln!(text, "    {:<44} {:>9} of {:>9}", path.display(), size(*stored), size(*whole));
        }
        let _ = writeln!(text, "  written anew   {} in {} files", size(self.upper.file_bytes), self.upper.files);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use poolfs_service_protocol::{ReadCounts, Transport};
    use std::time::Duration;

    #[test]
    fn a_report_tells_what_was_shared_copied_and_counted() {
        let counted = KindStatus { count: 70, p50_ns: 2047, ..KindStatus::default() };
        let operations = BTreeMap::from([(OperationPath::Library, BTreeMap::from([("stat".to_owned(), counted)]))]);
        let instance = InstanceStatus {
            instance: "demo-1".into(),
            mount_point: "/m".into(),
            transport: Transport::IoUring,
            sessions: 1,
            sessions_refused: BTreeMap::new(),
            handles: 0,
            nodes: 0,
            kernel_cached_bytes: 0,
            operations,
            reads: ReadCounts::default(),
            programs: None,
            not_direct: BTreeMap::new(),
            posted_requests: 0,
            not_posted: BTreeMap::new(),
            waiting: None,
            timed_out: None,
            union: Some(UnionStatus { sketches: 1, blocks_moved: 3, ..UnionStatus::default() }),
        };
        let step = StepResult { title: "git", took: Duration::from_secs(2), note: "ok".into(), passed: true };
        let upper = UpperContent { sketches: vec![("usr/a".into(), 1 << 20, 4096)], files: 2, file_bytes: 100 };
        let parts = vec![Part { name: "one".into(), steps: vec![step], instance: Some(instance), upper }];
        let service = ServiceStatus {
            pool: "demo".into(),
            pid: 1,
            uptime_seconds: 1,
            cache: CacheStatus { shared_bytes: 2 << 20, ..CacheStatus::default() },
            memory: None,
            unresponsive_branches: Vec::new(),
            instances: Vec::new(),
        };
        let report = Report { image_bytes: 1 << 30, layers: 1, service, memory_bytes: None, legacy: false, parts };
        let text = report.text();
        for part in ["2.0 MiB of branches", "3 blocks", "4.0 KiB of   1.0 MiB", "stat 70", "Everything did"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(report.passed());
    }

    #[test]
    fn an_upper_branch_is_counted_without_the_work_directory() {
        let place = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(place.path().join(".poolfs/work")).expect("made");
        std::fs::write(place.path().join(".poolfs/work/x"), "hidden").expect("written");
        std::fs::create_dir(place.path().join("d")).expect("made");
        std::fs::write(place.path().join("d/new"), "four").expect("written");
        std::fs::write(place.path().join("d/sketch"), "content").expect("written");
        let sketch = place.path().join("d/sketch");
        rustix::fs::setxattr(&sketch, SKETCH_ATTRIBUTE, b"x", rustix::fs::XattrFlags::empty()).expect("root");
        let content = look_at_upper(place.path()).expect("counted");
        assert_eq!((content.files, content.file_bytes, content.sketches.len()), (1, 4, 1));
    }
}
