//! Random operations on a union, done by the model's `World`.

use super::content::BLOCK_BYTES;
use super::file::FileHistory;
use super::names::{Object, parent};
use super::{Disk, RecordingDevice, World};
use crate::{Pool, Way};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Files are not made longer than this, so that the disk does not become full.
const SIZE_MAX: usize = 200_000;
/// Files there are at most and at least, but for the first and last operations.
const FILES: (usize, usize) = (16, 7);
/// So many changes are left alone,
const CHANGES_LEFT_ALONE: usize = 15;
/// for so long that all layers bring them to the disk by themselves.
const LEFT_ALONE: Duration = Duration::from_millis(6500);

/// A few files get most of what is done, so that much happens to one between two of its fsyncs.
const BUSY: [&str; 4] = ["d/e/z", "d/x", "one", "two"];

/// Most writes at a time of the process that uses the library, and most bytes of each.
const LIBRARY_WRITES: usize = 16;
const LIBRARY_BYTES: usize = 900;

/// Names that files get.
const NEW_NAMES: [&str; 8] = ["n0", "n1", "d/n2", "d/n3", "d/e/n4", "m0/n5", "m1/n6", "two"];
const NEW_DIRECTORIES: [&str; 3] = ["m0", "m1", "d/m2"];
/// Names that directories are moved to.
const MOVED_DIRECTORIES: [&str; 6] = ["d", "d/e", "m0", "r0", "r0/r1", "d/r2"];

impl World {
    /// One operation.
    ///
    /// # Panics
    /// When it fails.
    pub fn step(&mut self, device: &RecordingDevice, disk: &Disk, pool: &Pool) {
        let begun = device.position();
        let told = match self.random.below(100) {
            0..42 => self.change_content(device),
            42..62 => self.sync_file(device),
            62..68 => self.sync_directory(device),
            68..70 => self.sync_all(device, pool),
            70..74 => {
                disk.write_back();
                "the kernel writes back".to_owned()
            }
            74..84 => self.rename(begun),
            84..88 => self.link(begun),
            88..92 => self.unlink(begun),
            92..95 => self.create(begun),
            95..98 => self.move_directory(begun),
            _ => self.make_directory(begun),
        };
        self.told.push((begun, told));
    }

    /// The first operations: some files get so many places that a compact branch has tables for them.
    ///
    /// # Panics
    /// When one of them fails.
    pub fn begin(&mut self, device: &RecordingDevice) {
        for (path, step, count) in [("d/x", 1, 60), ("two", 9, 50)] {
            let Some(Object::File(number)) = self.names.now().get(path).copied() else { continue };
            for block in 0..count {
                let (begun, at) = (device.position(), block * step * BLOCK_BYTES);
                let bytes = self.random.bytes(100);
                self.with_file(path, number, |file| file.write_all_at(&bytes, at as u64).expect("written"));
                self.files[number].write(begun, at, &bytes);
            }
            self.with_file(path, number, |file| file.sync_all().expect("synced"));
            self.files[number].promise(device.position());
            self.told.push((device.position(), format!("{count} parts of {path} are on the disk")));
        }
    }

    /// Leaves changes alone for so long that they are brought to the disk without anybody asking.
    ///
    /// # Panics
    /// When one of them fails.
    pub fn leave_alone(&mut self, device: &RecordingDevice) {
        for _ in 0..CHANGES_LEFT_ALONE {
            let begun = device.position();
            let told = self.change_content(device);
            self.told.push((begun, told));
        }
        self.told.push((device.position(), "left alone".to_owned()));
        std::thread::sleep(LEFT_ALONE);
    }

    /// All paths of files, with the files' numbers.
    fn paths(&self) -> Vec<(String, usize)> {
        let file = |(path, object): (&String, &Object)| match object {
            Object::File(file) => Some((path.clone(), *file)),
            Object::Directory => None,
        };
        self.names.now().iter().filter_map(file).collect()
    }

    fn any_path(&mut self) -> (String, usize) {
        let paths = self.paths();
        let busy = BUSY[self.random.below(BUSY.len())];
        let is_busy = self.random.chance(60);
        let found = paths.iter().find(|(path, _)| is_busy && path == busy).cloned();
        found.unwrap_or_else(|| paths[self.random.below(paths.len())].clone())
    }

    /// A name that a file can get, perhaps one that it has to replace.
    fn any_target(&mut self) -> Option<String> {
        let target = if self.random.chance(35) {
            self.any_path().0
        } else {
            NEW_NAMES[self.random.below(NEW_NAMES.len())].to_owned()
        };
        let directory = parent(&target);
        (directory.is_empty() || self.names.now().contains_key(directory)).then_some(target)
    }

    /// Has something done with the file, by a descriptor that perhaps stays open.
    fn with_file<T>(&mut self, path: &str, number: usize, work: impl FnOnce(&File) -> T) -> T {
        let open = || File::options().read(true).write(true).open(self.at.join(path)).expect("it can be opened");
        let file = self.open.remove(&number).unwrap_or_else(open);
        let result = work(&file);
        if self.random.chance(40) {
            self.open.insert(number, file);
        }
        result
    }

    fn change_content(&mut self, device: &RecordingDevice) -> String {
        let begun = device.position();
        let (path, number) = self.any_path();
        self.changed = Some(path.clone());
        let size = self.files[number].content().size();
        match self.random.below(10) {
            0..7 if self.library.is_some() && self.random.chance(50) => {
                self.write_by_library(device, &path, number, size)
            }
            0..7 => self.write(begun, &path, number, size),
            7..9 => {
                let end = if self.random.chance(50) { size } else { SIZE_MAX.max(size) };
                let to = self.random.below(end + 1);
                self.with_file(&path, number, |file| file.set_len(to as u64).expect("truncated"));
                self.files[number].truncate(begun, to);
                format!("truncate {path} from {size} to {to}")
            }
            _ => {
                let at = self.random.below(size.max(1));
                let length = 1 + self.random.below(5 * BLOCK_BYTES);
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.with_file(&path, number, |file| fallocate(file, mode, at as u64, length as u64).expect("punched"));
                self.files[number].punch(begun, at, length);
                format!("punch {path} at {at} + {length}")
            }
        }
    }

    fn write(&mut self, begun: usize, path: &str, number: usize, size: usize) -> String {
        let grows = size < SIZE_MAX && self.random.chance(25);
        let mut at = self.random.below(size.max(1)) + if grows { self.random.below(20_000) } else { 0 };
        let mut length = 1 + match self.random.below(20) {
            0..12 => self.random.below(700),
            12..16 => self.random.below(3 * BLOCK_BYTES),
            16..19 => self.random.below(60_000),
            // So much that its places need a table.
            _ => self.random.below(250_000),
        };
        if self.random.chance(25) {
            at -= at % BLOCK_BYTES;
            length = length.next_multiple_of(BLOCK_BYTES);
        }
        // The last file's end must not move for ever.
        if !grows {
            length = length.min((size - at.min(size)).max(1));
        }
        let bytes = self.random.bytes(length);
        self.with_file(path, number, |file| file.write_all_at(&bytes, at as u64).expect("written"));
        self.files[number].write(begun, at, &bytes);
        format!("write {path} at {at} + {length}, of {size}")
    }

    /// Small writes one after the other by a process that alone has the file open: all but the first few may be posted.
    fn write_by_library(&mut self, device: &RecordingDevice, path: &str, number: usize, size: usize) -> String {
        let _ = self.open.remove(&number);
        let begun = device.position();
        let from = self.random.below(size.saturating_sub(LIBRARY_WRITES * LIBRARY_BYTES).max(1));
        let (mut at, count) = (from, 3 + self.random.below(LIBRARY_WRITES - 3));
        self.ask(&format!("open {} {}", self.at.join(path).display(), libc::O_RDWR));
        for _ in 0..count {
            if self.random.chance(20) {
                at = self.random.below(from + 1);
            }
            let (length, byte) = (1 + self.random.below(LIBRARY_BYTES - 1), 1 + self.random.below(255));
            self.ask(&format!("pwrite {at} {length} {byte}"));
            self.files[number].write(begun, at, &vec![byte as u8; length]);
            at += length;
        }
        let is_synced = self.random.chance(30);
        if is_synced {
            self.ask("sync");
            self.promise(device, number);
            self.names.promise_file(device.position(), number);
        }
        self.ask("close");
        format!(
            "write {path} by the library {count} times from {from}, of {size}{}",
            if is_synced { ", synced" } else { "" }
        )
    }

    /// What a file holds is on the disk; since which event.
    fn promise(&mut self, device: &RecordingDevice, number: usize) -> usize {
        let position = device.position();
        self.promised.push(position);
        self.files[number].promise(position);
        position
    }

    fn ask(&mut self, command: &str) {
        let library = self.library.as_mut().expect("there is one");
        library.step(command).unwrap_or_else(|errno| panic!("{command}: error {errno}"));
    }

    fn sync_file(&mut self, device: &RecordingDevice) -> String {
        // Often right after the change, so that nothing but this brings it to the disk.
        let changed = self.changed.take().filter(|_| self.random.chance(60));
        let file = changed.and_then(|path| self.paths().into_iter().find(|(other, _)| *other == path));
        let (path, number) = file.unwrap_or_else(|| self.any_path());
        let data_only = self.random.chance(35);
        self.with_file(&path, number, |file| {
            if data_only { file.sync_data() } else { file.sync_all() }.expect("synced")
        });
        let position = self.promise(device, number);
        // A file that was made or renamed is found after its fsync as ext4 has it, which commits what came before.
        if !data_only {
            self.names.promise_file(position, number);
        }
        format!("{} {path}, up to {position}", if data_only { "fdatasync" } else { "fsync" })
    }

    fn sync_directory(&mut self, device: &RecordingDevice) -> String {
        let is_directory = |(path, object): (&String, &Object)| (*object == Object::Directory).then(|| path.clone());
        let mut directories: Vec<String> = self.names.now().iter().filter_map(is_directory).collect();
        directories.push(String::new());
        let path = directories.swap_remove(self.random.below(directories.len()));
        File::open(self.at.join(&path)).and_then(|directory| directory.sync_all()).expect("synced");
        let position = device.position();
        self.promised.push(position);
        self.names.promise_directory(position, &path);
        format!("fsync of directory /{path}, up to {position}")
    }

    /// By the library: by FUSE the kernel does not ask the service.
    fn sync_all(&mut self, device: &RecordingDevice, pool: &Pool) -> String {
        let _ = pool.shell(Way::Library, &format!("sync -f {}", self.at.display())).expect("sync");
        self.promise_all(device);
        format!("sync, up to {}", device.position())
    }

    fn rename(&mut self, begun: usize) -> String {
        let (from, number) = self.any_path();
        let Some(to) = self.any_target() else { return "nothing".to_owned() };
        let replaced = self.names.now().get(&to).copied();
        // Two names of one file: rename does nothing.
        if replaced == Some(Object::File(number)) || replaced == Some(Object::Directory) {
            return "nothing".to_owned();
        }
        if replaced.is_some() && self.paths().len() <= FILES.1 {
            return "nothing".to_owned();
        }
        fs::rename(self.at.join(&from), self.at.join(&to)).expect("renamed");
        self.names.change(begun, &[(&from, None), (&to, Some(Object::File(number)))]);
        self.close_nameless();
        format!("rename {from} {to}, which was {replaced:?}")
    }

    fn link(&mut self, begun: usize) -> String {
        let (from, number) = self.any_path();
        let to = self.any_target().filter(|to| !self.names.now().contains_key(to));
        let Some(to) = to.filter(|_| self.paths().len() < FILES.0) else { return "nothing".to_owned() };
        fs::hard_link(self.at.join(&from), self.at.join(&to)).expect("linked");
        self.names.change(begun, &[(&to, Some(Object::File(number)))]);
        format!("link {from} {to}")
    }

    fn unlink(&mut self, begun: usize) -> String {
        if self.paths().len() <= FILES.1 {
            return "nothing".to_owned();
        }
        let (path, _) = self.any_path();
        fs::remove_file(self.at.join(&path)).expect("removed");
        self.names.change(begun, &[(&path, None)]);
        self.close_nameless();
        format!("unlink {path}")
    }

    /// Files without a name stay open for a while, or not.
    fn close_nameless(&mut self) {
        let named: Vec<usize> = self.paths().into_iter().map(|(_, number)| number).collect();
        let all_go = self.random.chance(50);
        self.open.retain(|number, _| named.contains(number) || !all_go);
    }

    fn create(&mut self, begun: usize) -> String {
        let target = self.any_target().filter(|path| !self.names.now().contains_key(path));
        let Some(path) = target.filter(|_| self.paths().len() < FILES.0) else { return "nothing".to_owned() };
        let file = File::options().read(true).write(true).create_new(true).open(self.at.join(&path)).expect("made");
        let number = self.files.len();
        self.files.push(FileHistory::made(begun));
        self.names.change(begun, &[(&path, Some(Object::File(number)))]);
        self.open.insert(number, file);
        let length = self.random.below(30_000);
        let bytes = self.random.bytes(length);
        self.with_file(&path, number, |file| file.write_all_at(&bytes, 0).expect("written"));
        self.files[number].write(begun, 0, &bytes);
        format!("create {path}, {length} bytes")
    }

    fn move_directory(&mut self, begun: usize) -> String {
        let is_directory = |(path, object): (&String, &Object)| (*object == Object::Directory).then(|| path.clone());
        let mut directories: Vec<String> = self.names.now().iter().filter_map(is_directory).collect();
        if directories.is_empty() {
            return "nothing".to_owned();
        }
        let from = directories.swap_remove(self.random.below(directories.len()));
        let to = MOVED_DIRECTORIES[self.random.below(MOVED_DIRECTORIES.len())];
        let is_below_itself = to.strip_prefix(&*from).is_some_and(|rest| rest.starts_with('/'));
        if is_below_itself || !self.may_be_made(to) {
            return "nothing".to_owned();
        }
        fs::rename(self.at.join(&from), self.at.join(to)).expect("moved");
        self.names.move_directory(begun, &from, to);
        format!("move directory {from} {to}")
    }

    /// Whether there is no such name, but the directory for it.
    fn may_be_made(&self, path: &str) -> bool {
        let names = self.names.now();
        let directory = parent(path);
        !names.contains_key(path) && (directory.is_empty() || names.get(directory) == Some(&Object::Directory))
    }

    fn make_directory(&mut self, begun: usize) -> String {
        let path = NEW_DIRECTORIES[self.random.below(NEW_DIRECTORIES.len())];
        if !self.may_be_made(path) {
            return "nothing".to_owned();
        }
        fs::create_dir(self.at.join(path)).expect("made");
        self.names.change(begun, &[(path, Some(Object::Directory))]);
        format!("mkdir {path}")
    }
}
