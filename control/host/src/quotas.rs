//! Detection of filesystems with disk quotas. The count of free blocks does not show a quota, so nothing may be promised there before it is
//! stored.

use crate::{Host, MountEntry};
use std::path::Path;

/// Options of ext4, xfs, f2fs, tmpfs and others by which quotas of users, groups or projects are in force.
const OPTIONS: [&str; 7] = ["quota", "usrquota", "uquota", "grpquota", "gquota", "prjquota", "pquota"];
/// Options of the same kind with a value: files that quotas are kept in, and tmpfs's limits for everybody.
const OPTIONS_WITH_VALUE: [&str; 5] =
    ["usrjquota", "grpjquota", "prjjquota", "usrquota_block_hardlimit", "grpquota_block_hardlimit"];
/// Where the kernel tells of each btrfs in use: a directory `UUID` with its `devices`, and `qgroups` where quotas are on.
const BTRFS: &str = "/sys/fs/btrfs";

impl MountEntry {
    /// Whether the filesystem keeps to quotas of users, groups, projects or (btrfs) subvolumes. Not known is those of servers, and those that
    /// were switched on by `quotaon` alone, without an option of the mount.
    #[must_use]
    pub fn has_quotas(&self, host: &dyn Host) -> bool {
        if self.kind == "btrfs" {
            return self.has_quota_groups(host);
        }
        self.options().any(|option| match option.split_once('=') {
            Some((name, value)) => OPTIONS_WITH_VALUE.contains(&name) && !value.is_empty(),
            None => OPTIONS.contains(&option),
        })
    }

    /// Whether the btrfs has quota groups: none of its options says so.
    fn has_quota_groups(&self, host: &dyn Host) -> bool {
        // A volume of LVM is called otherwise there than by its link in /dev/mapper.
        let device = std::fs::canonicalize(&self.source).unwrap_or_else(|_| self.source.clone().into());
        let Some(device) = device.file_name() else { return false };
        let known = host.list_directories(Path::new(BTRFS)).unwrap_or_default();
        let is_it = |volume: &Path| host.read_text(&volume.join("devices").join(device).join("dev")).is_ok();
        let is_on =
            |volume: &Path| host.read_text(&volume.join("qgroups/enabled")).is_ok_and(|enabled| enabled.trim() == "1");
        known.iter().map(|name| Path::new(BTRFS).join(name)).any(|volume| is_it(&volume) && is_on(&volume))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RecordingHost, parse_mount_table};

    fn entry(line: &str) -> MountEntry {
        parse_mount_table(&format!("90 27 8:1 / /m rw - {line}\n")).remove(0)
    }

    #[test]
    fn quotas_are_known_by_the_options_of_the_mount() {
        let host = RecordingHost::new();
        for with in [
            "ext4 /dev/a rw,usrquota,grpquota",
            "ext4 /dev/a rw,jqfmt=vfsv1,usrjquota=aquota.user",
            "xfs /dev/a rw,prjquota",
            "f2fs /dev/a rw,quota",
            "tmpfs tmpfs rw,usrquota_block_hardlimit=1M",
        ] {
            assert!(entry(with).has_quotas(&host), "{with}");
        }
        for without in
            ["ext4 /dev/a rw", "xfs /dev/a rw,noquota", "xfs /dev/a rw,uqnoenforce", "ext4 /dev/a rw,usrjquota="]
        {
            assert!(!entry(without).has_quotas(&host), "{without}");
        }
    }

    #[test]
    fn quota_groups_of_btrfs_are_those_of_its_own_volume() {
        let host = RecordingHost::new();
        let of = |name: &str| entry(&format!("btrfs /dev/{name} rw,subvol=/")).has_quotas(&host);
        for (volume, name) in [("1-a", "none1"), ("2-b", "none2"), ("3-c", "none3")] {
            host.set_file(format!("{BTRFS}/{volume}/devices/{name}/dev"), "7:1\n");
        }
        host.set_file(format!("{BTRFS}/2-b/qgroups/enabled"), "1\n");
        host.set_file(format!("{BTRFS}/3-c/qgroups/enabled"), "0\n");
        assert_eq!([of("none1"), of("none2"), of("none3"), of("none4")], [false, true, false, false]);
    }
}
