//! Fuzz target: the stored state of an upper branch (sketches with bitmaps, compact files with tables, marks, work directory, journal).
//!
//! An input is a list of edits of a sound branch. Its first byte says how the branch was stored and whether it is repaired. Each edit is an
//! object, what of it, a place, new bytes, and whether the checksum is made right again, without which few edits would get further.

use crate::take;
use poolfs_bcow::{Bcow, BcowConfig, Layout};
use poolfs_libservice::types::{
    Caller, FileType, Name, NodeId, OpenFlags, RenameFlags, SeekTo, SetAttributes, XattrFlags,
};
use poolfs_libservice::walk::walk;
use poolfs_libservice::{Branch, Durability, Held, Libservice, Memory, Opened};
use poolfs_union::check::Check;
use poolfs_union::{Lower, Union, UnionConfig};
use std::sync::Arc;
use std::time::Duration;

const ROOT: &Caller = &Caller::ROOT;

/// Files of the lower branch and their bytes.
const FILES: [(&[u8], u64); 4] = [(b"small", 9000), (b"large", 3 << 20), (b"linked", 40_000), (FIRST, 9000)];

/// The one whose first write was recorded by a service that died before it copied it up.
const FIRST: &[u8] = b"first";

/// Edits of one input.
const EDITS_MAX: usize = 64;

/// Attributes with a checksum, and where it is.
const SEALED: [(&[u8], usize); 3] =
    [(b"trusted.poolfs.origin", 40), (b"trusted.poolfs.sketch", 60), (b"trusted.poolfs.bcow", 60)];

/// Bytes of a bitmap's sector, and where the checksum of one is.
const SECTOR: (usize, usize) = (512, 28);

/// The same of a journal's record.
const RECORD: (usize, usize) = (40, 36);

/// What a service leaves that dies.
const JOURNAL: &[u8] = b".poolfs/journal-1";

/// See the module.
pub fn upper_branch(bytes: &[u8]) {
    let mut bytes = bytes;
    let [how] = take::<1>(&mut bytes);
    let layout = [None, Some(Layout::Performance), Some(Layout::Space)][usize::from(how % 3)];
    let lower = lower();
    let upper = sound(&lower, layout);
    for _ in 0..EDITS_MAX {
        if bytes.is_empty() {
            break;
        }
        edit(&upper, &take::<16>(&mut bytes));
    }
    let memory: Branch = upper.clone();
    let bcow = Bcow::new(BcowConfig { layout, flush_interval: Duration::ZERO, ..BcowConfig::new(memory) });
    let lowers = lowers(&lower);
    if how & 0x80 != 0 {
        let repair = how & 0x40 != 0;
        let _ = bcow.check(true, repair, &mut |_| {});
        let upper: Branch = bcow.clone();
        let check = Check { upper, lowers: Some(&lowers), repair, is_whole_below: true };
        let _ = check.run(&mut |_| {});
    }
    let _ = bcow.repair_all();
    let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(bcow.clone(), lowers) };
    if let Ok(union) = Union::open(config) {
        use_all(&(union.clone() as Branch));
        union.end_threads();
    }
    bcow.end_thread();
    drop(bcow);
    assert_eq!(upper.outstanding(), (0, 0), "references and handles that are left over");
}

fn lowers(lower: &Arc<Memory>) -> Vec<Lower> {
    vec![Lower { layer_id: "lower".to_owned(), layer: lower.clone(), is_union: false }]
}

fn lower() -> Arc<Memory> {
    let memory = Memory::new();
    for (name, size) in FILES {
        let (entry, handle) = memory
            .create(ROOT, NodeId::ROOT, Name::new(name).expect("a name"), 0o644, OpenFlags::READ_WRITE)
            .expect("made");
        memory.write(ROOT, handle, 0, &vec![7; size as usize]).expect("room");
        if name == b"linked" {
            let other =
                memory.link(ROOT, entry.node, NodeId::ROOT, Name::new(b"other").expect("a name")).expect("made");
            memory.forget(other.node, 1);
        }
        memory.release(handle);
        memory.forget(entry.node, 1);
    }
    memory
}

/// An upper branch with everything in it.
fn sound(lower: &Arc<Memory>, layout: Option<Layout>) -> Arc<Memory> {
    let upper = Memory::new();
    let bcow = Bcow::new(BcowConfig { layout, flush_interval: Duration::ZERO, ..BcowConfig::new(upper.clone()) });
    let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(bcow.clone(), lowers(lower)) };
    let union = Union::open(config).expect("sound");
    for (name, size) in FILES.into_iter().filter(|(name, _)| *name != FIRST) {
        let entry = union.lookup(ROOT, NodeId::ROOT, Name::new(name).expect("a name")).expect("there");
        let handle = union.open(ROOT, entry.node, OpenFlags::READ_WRITE).expect("opened");
        for at in (100..size).step_by(300_000) {
            union.write(ROOT, handle, at, b"new").expect("room");
        }
        union.fsync(ROOT, handle, Durability::All).expect("room");
        union.release(handle);
        union.forget(entry.node, 1);
    }
    let made = union.mkdir(ROOT, NodeId::ROOT, Name::new(b"directory").expect("a name"), 0o755).expect("made");
    let moved = Name::new(b"moved").expect("a name");
    union
        .rename(ROOT, NodeId::ROOT, Name::new(b"small").expect("a name"), made.node, moved, RenameFlags::empty())
        .expect("renamed");
    union.forget(made.node, 1);
    union.end_threads();
    drop(union);
    bcow.end_thread();
    leave_journal(lower, &upper, layout);
    upper
}

/// What a union leaves that does not end.
fn leave_journal(lower: &Arc<Memory>, upper: &Arc<Memory>, layout: Option<Layout>) {
    let branch: Branch = upper.clone();
    let bcow = Bcow::new(BcowConfig { layout, flush_interval: Duration::ZERO, ..BcowConfig::new(branch.clone()) });
    let config = UnionConfig { flush_interval: Duration::ZERO, ..UnionConfig::new(bcow.clone(), lowers(lower)) };
    let union = Union::open(UnionConfig { journal_bytes: 1 << 16, ..config }).expect("sound");
    let first = Name::new(FIRST).expect("a name");
    let entry = union.lookup(ROOT, NodeId::ROOT, first).expect("there");
    let handle = union.open(ROOT, entry.node, OpenFlags::READ_WRITE).expect("opened");
    union.write(ROOT, handle, 5000, b"accepted first").expect("room");
    union.release(handle);
    union.forget(entry.node, 1);
    let entry = union.lookup(ROOT, NodeId::ROOT, Name::new(b"large").expect("a name")).expect("there");
    let handle = union.open(ROOT, entry.node, OpenFlags::READ_WRITE).expect("opened");
    for at in (5000..3 << 20).step_by(700_000) {
        union.write(ROOT, handle, at, b"accepted").expect("room");
    }
    let mut journal = vec![0; 1 << 12];
    let found = found(&branch, JOURNAL).expect("made with the first write");
    let file = Opened::file(&branch, ROOT, found.node(), OpenFlags::READ_ONLY).expect("opened");
    let length = file.read_full(0, &mut journal).expect("read");
    assert_eq!(journal[72], 3, "the first record is that of a first write");
    drop((file, found));
    union.release(handle);
    union.forget(entry.node, 1);
    union.end_threads();
    drop(union);
    bcow.end_thread();
    // It was copied up when the union ended.
    upper.unlink(ROOT, NodeId::ROOT, first).expect("there");
    let (name, place) = (Name::new(b"journal-1").expect("a name"), self::found(&branch, b".poolfs").expect("there"));
    let (entry, handle) = upper.create(ROOT, place.node(), name, 0o600, OpenFlags::READ_WRITE).expect("made");
    upper.write(ROOT, handle, 0, &journal[..length]).expect("room");
    upper.release(handle);
    upper.forget(entry.node, 1);
}

/// Changes one thing of what is stored.
fn edit(upper: &Arc<Memory>, edit: &[u8; 16]) {
    let branch: Branch = upper.clone();
    let mut objects = Vec::new();
    let _ = walk(&branch, Held::new(&branch, NodeId::ROOT), b"", &mut |path, visited| {
        if let Ok((held, attributes)) = visited {
            let names = upper.listxattr(ROOT, held.node()).unwrap_or_default();
            objects.extend(names.into_iter().map(|name| (path.to_vec(), Some(name))));
            if attributes.file_type == FileType::Regular {
                objects.push((path.to_vec(), None));
            }
        }
        Ok(true)
    });
    let Some((path, attribute)) = objects.get(usize::from(edit[0]) % objects.len().max(1)) else { return };
    let Some(held) = found(&branch, path) else { return };
    let at = usize::from(u16::from_le_bytes([edit[1], edit[2]]));
    let (kind, new) = (edit[3], &edit[4..4 + usize::from(edit[15] % 12)]);
    let Some(attribute) = attribute else {
        let Ok(file) = Opened::file(&branch, ROOT, held.node(), OpenFlags::READ_WRITE) else { return };
        let (bytes, sum_at) = if path == JOURNAL { RECORD } else { SECTOR };
        let mut sector = vec![0; bytes];
        let at = at % (4 * bytes);
        let first = at / bytes * bytes;
        let got = file.read_full(first as u64, &mut sector).unwrap_or(0);
        put(&mut sector, at - first, new);
        if kind & 1 != 0 {
            seal(&mut sector, sum_at);
        }
        sector.truncate(got.max(at - first));
        let _ = file.write_full(first as u64, &sector);
        if kind & 2 != 0 {
            let size = SetAttributes { size: Some(at as u64), ..SetAttributes::default() };
            let _ = upper.setattr(ROOT, held.node(), &size, None);
        }
        return;
    };
    let mut value = upper.getxattr(ROOT, held.node(), attribute).unwrap_or_default();
    if kind & 2 != 0 {
        value.truncate(at % (value.len() + 1));
    }
    let length = value.len().max(1);
    put(&mut value, at % length, new);
    if kind & 1 != 0
        && let Some((_, place)) = SEALED.iter().find(|(sealed, _)| sealed == attribute)
    {
        seal(&mut value, *place);
    }
    let _ = upper.setxattr(ROOT, held.node(), attribute, &value, XattrFlags::empty());
}

fn put(bytes: &mut [u8], at: usize, new: &[u8]) {
    for (byte, new) in bytes.iter_mut().skip(at).zip(new) {
        *byte = *new;
    }
}

fn seal(bytes: &mut [u8], at: usize) {
    if bytes.len() >= at + 4 {
        bytes[at..at + 4].fill(0);
        let sum = crc32c::crc32c(bytes);
        bytes[at..at + 4].copy_from_slice(&sum.to_le_bytes());
    }
}

fn found(branch: &Branch, path: &[u8]) -> Option<Held> {
    let mut held = Held::new(branch, NodeId::ROOT);
    for name in path.split(|&byte| byte == b'/') {
        held = Held::new(branch, branch.lookup(ROOT, held.node(), Name::new(name).ok()?).ok()?.node);
    }
    Some(held)
}

/// Everything that users do with what there is.
fn use_all(union: &Branch) {
    let mut paths = Vec::new();
    let _ = walk(union, Held::new(union, NodeId::ROOT), b"", &mut |path, visited| {
        if let Ok((_, attributes)) = visited {
            paths.push((path.to_vec(), attributes.file_type));
        }
        Ok(paths.len() < 100)
    });
    let mut buffer = vec![0; 100_000];
    for (path, file_type) in &paths {
        let Some(held) = found(union, path) else { continue };
        let _ = union.listxattr(ROOT, held.node());
        if *file_type != FileType::Regular {
            continue;
        }
        let Ok(file) = Opened::file(union, ROOT, held.node(), OpenFlags::READ_WRITE) else { continue };
        for at in [0, 5000, 299_000, (3 << 20) - 10] {
            let _ = file.read(ROOT, at, &mut buffer);
            let _ = union.seek(ROOT, file.id(), at, SeekTo::Hole);
            let _ = file.write(ROOT, at, b"written");
        }
        let _ = union.fsync(ROOT, file.id(), Durability::All);
        for size in [100, 50_000] {
            let _ =
                union.setattr(ROOT, held.node(), &SetAttributes { size: Some(size), ..SetAttributes::default() }, None);
        }
        drop(file);
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
        if name.len() == path.len() {
            let [old, new] = [name, b"renamed"].map(|name| Name::new(name).expect("a name"));
            let _ = union.rename(ROOT, NodeId::ROOT, old, NodeId::ROOT, new, RenameFlags::empty());
            let _ = union.unlink(ROOT, NodeId::ROOT, new);
        }
    }
    let _ = union.sync();
}
