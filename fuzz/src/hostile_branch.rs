//! Fuzz target: upper branches that came from elsewhere, as real directories on which nothing need be what it seems.
//!
//! An input begins with two bytes: which sound branch it starts from, and what is done with it; edits of 16 bytes each follow. An edit
//! changes an attribute or bytes of a file, mostly with its checksum made right, or replaces an object by something else: a symbolic link,
//! a pipe, a device, a directory, a hard link, a mount. Then the branch is checked, repaired, used as the upper or a lower branch of a
//! union, or mounted by itself.
//!
//! Beside it is a directory that belongs to no branch. It must not change, nothing of it may be readable by the branch, a check without
//! repair must change nothing, and everything must end within the limits of time and memory.

mod edits;
mod sound;
mod tree;
mod watch;

use crate::take;
use edits::Target;
use poolfs_libservice::types::{Caller, FileType, Name, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes};
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Branch, Durability, Held, Opened};
use poolfs_service::stack::{Stack, StackBuilder, check};
use poolfs_service_protocol::{CheckSpec, StackSpec, Storage, UpperFormat, kept_directory};
use sound::{Ground, POOL};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use tree::Picture;

const ROOT: &Caller = &Caller::ROOT;

/// Edits of one input; more are ignored.
const EDITS_MAX: usize = 32;

/// Objects that are used after a branch was opened.
const USED_MAX: usize = 100;

const CACHE_BYTES: u64 = 1 << 20;

/// In every file of the directory that is no branch's, and in the names there.
pub(crate) const WITNESS: &[u8] = b"only-for-whom-it-concerns";

static GROUND: Mutex<Option<Ground>> = Mutex::new(None);

/// Removes the directory in memory that inputs are laid in.
pub fn clear_ground() {
    drop(GROUND.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// See the module.
pub fn hostile_branch(input: &[u8]) {
    let mut ground = GROUND.lock().unwrap_or_else(PoisonError::into_inner);
    let ground = ground.get_or_insert_with(Ground::new);
    let _watch = watch::begin(input);
    let mut bytes = input;
    let [from, how] = take::<2>(&mut bytes);
    ground.lay(from);
    let mut targets = Target::all(ground);
    for _ in 0..EDITS_MAX {
        if bytes.is_empty() {
            break;
        }
        edits::edit(ground, &targets, &take::<16>(&mut bytes));
        targets = Target::all(ground);
    }
    let before = ground.witness();
    let run = Run { ground: &*ground, how };
    run.all();
    let after = ground.witness();
    assert!(before == after, "what is no branch's has changed:\n{before:?}\n{after:?}");
    ground.clear();
}

struct Run<'a> {
    ground: &'a Ground,
    how: u8,
}

impl Run<'_> {
    fn all(&self) {
        if self.how & 1 != 0 {
            let before = Picture::of(&self.ground.upper());
            self.check(false);
            assert!(before == Picture::of(&self.ground.upper()), "a check that repairs nothing has changed something");
        }
        if self.how & 2 != 0 {
            self.check(true);
        }
        self.mount();
        if self.how & 4 != 0 {
            self.check(true);
            self.mount();
        }
    }

    fn lowers(&self) -> Vec<PathBuf> {
        if self.how & 8 != 0 { Vec::new() } else { vec![self.ground.lower()] }
    }

    fn check(&self, repair: bool) {
        let spec = CheckSpec {
            upper: self.ground.upper(),
            lowers: self.lowers(),
            repair,
            socket_directory: self.ground.run(),
            ceph: None,
        };
        let mut told = |finding: poolfs_service_protocol::CheckFinding| {
            assert!(!contains(finding.cause.as_bytes()), "told of what is no branch's: {finding:?}");
        };
        let _ = check::check(&spec, &mut told);
    }

    fn mount(&self) {
        let format = if self.how & 16 != 0 { UpperFormat::BcowSpace } else { UpperFormat::Sparse };
        let storage = Storage { format, size_bytes: (self.how & 32 != 0).then_some(64 << 20) };
        let stack = match self.how >> 6 {
            // The branch is a lower one, which may have been an upper one.
            2 => StackSpec::union(self.ground.above(), [vec![self.ground.upper()], self.lowers()].concat()),
            3 => StackSpec::directory(self.ground.upper()),
            _ => {
                StackSpec::Union { upper: self.ground.upper(), lowers: self.lowers(), storage, immutable_lowers: false }
            }
        };
        let kept_at = kept_directory(&self.ground.run(), POOL);
        let builder = StackBuilder::new(CACHE_BYTES, Some(kept_at)).expect("a cache");
        let builder = builder.with_states_of(&self.ground.run()).expect("its own");
        match builder.build(&stack) {
            Ok(stack) => use_all(&stack),
            Err(error) => assert!(!contains(error.to_string().as_bytes()), "told of what is no branch's: {error}"),
        }
        builder.end();
    }
}

fn contains(bytes: &[u8]) -> bool {
    bytes.windows(WITNESS.len()).any(|window| window == WITNESS)
}

fn found(branch: &Branch, path: &[u8]) -> Option<Held> {
    let mut held = Held::new(branch, NodeId::ROOT);
    for name in path.split(|&byte| byte == b'/') {
        held = Held::new(branch, branch.lookup(ROOT, held.node(), Name::new(name).ok()?).ok()?.node);
    }
    Some(held)
}

/// Everything that users do with what there is.
fn use_all(stack: &Stack) {
    let branch = stack.layer();
    let mut paths = Vec::new();
    let _ = walk(&branch, Held::new(&branch, NodeId::ROOT), b"", &mut |path, visited| {
        assert!(!contains(path), "a name of what is no branch's is shown");
        if let Ok((_, attributes)) = visited {
            paths.push((path.to_vec(), attributes.file_type));
        }
        Ok(paths.len() < USED_MAX)
    });
    for (path, file_type) in &paths {
        let Some(held) = found(&branch, path) else { continue };
        let _ = branch.listxattr(ROOT, held.node());
        if *file_type == FileType::Regular {
            use_file(&branch, &held);
            let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
            if name.len() == path.len() {
                let [old, new] = [name, b"renamed"].map(|name| Name::new(name).expect("a name"));
                let _ = branch.rename(ROOT, NodeId::ROOT, old, NodeId::ROOT, new, RenameFlags::empty());
                let _ = branch.unlink(ROOT, NodeId::ROOT, new);
            }
        }
    }
    let made = Name::new(b"made").expect("a name");
    if let Ok((entry, handle)) = branch.create(ROOT, NodeId::ROOT, made, 0o644, OpenFlags::READ_WRITE) {
        let _ = branch.write(ROOT, handle, 0, &[1; 50_000]);
        branch.release(handle);
        branch.forget(entry.node, 1);
    }
    if let Some(layered) = stack.layered() {
        let _ = layered.differences(&mut |path, _| {
            assert!(!contains(path), "a name of what is no branch's is shown");
            Ok(ControlFlow::Continue(()))
        });
        let _ = layered.flatten(&|| true);
    }
    let _ = branch.sync();
}

fn use_file(branch: &Branch, held: &Held) {
    let Ok(file) = Opened::file(branch, ROOT, held.node(), OpenFlags::READ_WRITE) else { return };
    let mut buffer = vec![0; 100_000];
    for at in [0, 5000, 299_000, (1 << 20) - 10] {
        if let Ok(count) = file.read(ROOT, at, &mut buffer) {
            assert!(!contains(&buffer[..count.min(buffer.len())]), "what is no branch's can be read");
        }
        let _ = branch.seek(ROOT, file.id(), at, SeekTo::Hole);
        let _ = file.write(ROOT, at, b"written");
    }
    let _ = branch.fsync(ROOT, file.id(), Durability::All);
    for size in [100, 50_000] {
        let size = SetAttributes { size: Some(size), ..SetAttributes::default() };
        let _ = branch.setattr(ROOT, held.node(), &size, None);
    }
}
