//! One snapshot of the mounts: the instances' mount points, and those of everything mounted below them.

use crate::instance_name::InstanceName;

/// Mount points one table holds; with more the library leaves paths to the kernel.
pub const MOUNT_POINTS_MAX: usize = 256;

/// Bytes of all their paths.
pub const STRINGS_MAX: usize = 32 * 1024;

/// One mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MountPoint {
    /// The mount's number, as `stx_mnt_id` has it.
    pub id: u64,
    /// Major and minor device number, as `st_dev` has them.
    pub device: (u32, u32),
    /// None for a mount that is not ours.
    instance: InstanceName,
    /// 1: mounted read-only.
    read_only: u64,
    point: (u32, u32),
    root: (u32, u32),
}

impl MountPoint {
    /// The instance, or nothing when the mount is not ours.
    pub fn instance(&self) -> Option<&InstanceName> {
        Some(&self.instance).filter(|instance| !instance.is_none())
    }

    /// Whether nothing may be changed through this mount, whatever the instance allows.
    pub fn is_read_only(&self) -> bool {
        self.read_only != 0
    }
}

/// A reading of the mounts. All zeros is an empty one.
#[repr(C)]
pub struct Table {
    count: u32,
    used: u32,
    points: [MountPoint; MOUNT_POINTS_MAX],
    strings: [u8; STRINGS_MAX],
}

/// The table is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What a new mount point is.
#[derive(Clone, Copy, Debug)]
pub struct New<'a> {
    /// The mount's number.
    pub id: u64,
    /// Its device.
    pub device: (u32, u32),
    /// The instance; none for a foreign mount.
    pub instance: InstanceName,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Its place, an absolute path.
    pub point: &'a [u8],
    /// The part of the instance that is mounted.
    pub root: &'a [u8],
}

impl Table {
    /// Forgets everything.
    pub fn clear(&mut self) {
        self.count = 0;
        self.used = 0;
    }

    /// Adds a mount point.
    ///
    /// # Errors
    /// [`Full`].
    pub fn add(&mut self, new: &New<'_>) -> Result<(), Full> {
        let (point, root) = (self.keep(new.point)?, self.keep(new.root)?);
        let place = self.points.get_mut(self.count as usize).ok_or(Full)?;
        *place = MountPoint {
            id: new.id,
            device: new.device,
            instance: new.instance,
            read_only: u64::from(new.read_only),
            point,
            root,
        };
        self.count += 1;
        Ok(())
    }

    fn keep(&mut self, bytes: &[u8]) -> Result<(u32, u32), Full> {
        let start = self.used as usize;
        let place = self.strings.get_mut(start..start + bytes.len()).ok_or(Full)?;
        place.copy_from_slice(bytes);
        self.used += bytes.len() as u32;
        Ok((start as u32, bytes.len() as u32))
    }

    fn string(&self, (start, length): (u32, u32)) -> &[u8] {
        self.strings.get(start as usize..(start + length) as usize).unwrap_or_default()
    }

    /// All mount points.
    pub fn points(&self) -> &[MountPoint] {
        self.points.get(..self.count as usize).unwrap_or_default()
    }

    /// The place of a mount, an absolute path.
    pub fn place(&self, point: &MountPoint) -> &[u8] {
        self.string(point.point)
    }

    /// The part of the instance that is mounted there, an absolute path.
    pub fn root(&self, point: &MountPoint) -> &[u8] {
        self.string(point.root)
    }

    /// The instance's mount with this number.
    pub fn by_id(&self, id: u64) -> Option<&MountPoint> {
        self.points().iter().find(|point| point.id == id && !point.instance.is_none())
    }

    /// Whether anything but `mount` itself is mounted on places below it.
    pub fn has_mounts_below(&self, mount: &MountPoint) -> bool {
        let place = self.place(mount);
        self.points()
            .iter()
            .any(|other| other.id != mount.id && starts_with(components(self.place(other)), components(place)))
    }

    /// The mount that a path of these components leads into, and how many of them lead to its mount point.
    pub fn locate<'p, I>(&self, path: I) -> Option<(&MountPoint, usize)>
    where
        I: Iterator<Item = &'p [u8]> + Clone,
    {
        self.points()
            .iter()
            .filter(|point| starts_with(path.clone(), components(self.place(point))))
            .map(|point| (point, components(self.place(point)).count()))
            .max_by_key(|&(_, depth)| depth)
    }

    /// The first mount behind number `after` of those that stand for an instance each: of all its mounts that with the lowest number. Who may
    /// mount can give a mount the name of an instance, but not its device.
    pub fn next_instance(&self, after: u64) -> Option<&MountPoint> {
        let ours = || self.points().iter().filter(|mount| mount.instance().is_some());
        let is_same =
            |one: &MountPoint, other: &MountPoint| one.instance() == other.instance() && one.device == other.device;
        let is_first = |mount: &&MountPoint| !ours().any(|other| is_same(other, mount) && other.id < mount.id);
        ours().filter(|mount| mount.id > after && is_first(mount)).min_by_key(|mount| mount.id)
    }
}

/// The components of a path, without empty ones and `.`.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> + Clone {
    path.split(|&byte| byte == b'/').filter(|name| !name.is_empty() && *name != b".")
}

fn starts_with<'a, 'b>(mut path: impl Iterator<Item = &'a [u8]>, mut prefix: impl Iterator<Item = &'b [u8]>) -> bool {
    prefix.all(|name| path.next() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::boxed::Box;

    pub(crate) fn empty() -> Box<Table> {
        // SAFETY: numbers of zero.
        unsafe { Box::new_zeroed().assume_init() }
    }

    fn mount(id: u64, instance: Option<&str>, point: &'static str) -> New<'static> {
        let instance = instance.and_then(|name| InstanceName::new(name.as_bytes())).unwrap_or(InstanceName::NONE);
        New { id, device: (0, id as u32), instance, read_only: false, point: point.as_bytes(), root: b"/" }
    }

    #[test]
    fn the_deepest_mount_wins() {
        let mut table = empty();
        for new in [
            mount(1, Some("a"), "/"),
            mount(2, None, "/proc"),
            mount(3, Some("b"), "/data/a"),
            mount(4, None, "/data/a/x"),
        ] {
            table.add(&new).expect("room");
        }
        let locate =
            |path: &'static str| table.locate(components(path.as_bytes())).map(|(point, depth)| (point.id, depth));
        assert_eq!(locate("/etc/passwd"), Some((1, 0)));
        assert_eq!(locate("/proc/self"), Some((2, 1)));
        assert_eq!(locate("/proc2/self"), Some((1, 0)));
        assert_eq!(locate("//data/./a//f"), Some((3, 2)));
        assert_eq!(locate("/data/a/x"), Some((4, 3)));
        assert!(table.has_mounts_below(table.by_id(3).expect("mount 3")));
        assert!(table.by_id(2).is_none(), "a foreign mount is none of ours");
    }

    #[test]
    fn each_instance_is_reached_once_whatever_else_has_its_name() {
        let mut table = empty();
        // Further mounts of the two, an impostor, a mount of something else.
        for (id, minor, name) in [
            (9, 40, Some("a")),
            (3, 50, Some("a")),
            (4, 8, None),
            (5, 40, Some("a")),
            (7, 41, Some("b")),
            (8, 41, Some("b")),
        ] {
            table.add(&New { device: (0, minor), ..mount(id, name, "/at") }).expect("room");
        }
        let after = |id| table.next_instance(id).map(|mount| mount.id);
        assert_eq!([0, 3, 5, 7].map(after), [Some(3), Some(5), Some(7), None]);
    }

    #[test]
    fn a_full_table_says_so() {
        let mut table = empty();
        for id in 0..MOUNT_POINTS_MAX as u64 {
            table.add(&mount(id, None, "/a")).expect("room");
        }
        assert_eq!(table.add(&mount(999, None, "/a")), Err(Full));
        table.clear();
        let long = std::vec![b'a'; STRINGS_MAX];
        let new =
            New { id: 1, device: (0, 1), instance: InstanceName::NONE, read_only: false, point: &long, root: b"/" };
        assert_eq!(table.add(&new), Err(Full));
    }
}
