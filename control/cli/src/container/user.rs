//! The user of a container's first process: the image's user, looked up in the image's own files.

use crate::context::Context;
use crate::failure::{Failure, Result};
use crate::waiting;
use poolfs_service_protocol::IdMap;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Most bytes of `/etc/passwd` and `/etc/group`.
const FILE_BYTES_MAX: u64 = 8 << 20;
/// Most supplementary groups, as in Linux.
const GROUPS_MAX: usize = 65_536;

/// A user as a process has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// User number.
    pub uid: u32,
    /// Group number.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
    /// The home directory.
    pub home: String,
}

impl User {
    /// See to it that a user namespace with this map has the user and its groups.
    pub fn check_known(&self, map: &IdMap) -> Result<()> {
        match [self.uid, self.gid].iter().chain(&self.groups).find(|&&id| map.host(id).is_none()) {
            Some(id) => {
                let cause = format!("its user namespace does not have the id {id}");
                Err(Failure::usage(format!("user {}", self.uid), cause, "give a --userns range that contains it"))
            }
            None => Ok(()),
        }
    }
}

/// Look up `USER`, `UID`, `USER:GROUP` ... (empty: root) in the files below `root`, which are the image's: hostile.
pub fn look_up(context: &Context, root: &Path, wanted: &str) -> Result<User> {
    // Their service may come to a standstill.
    let looked_in = root.to_owned();
    let read = move || -> Result<(String, String)> {
        Ok((read_in(&looked_in, "etc/passwd")?, read_in(&looked_in, "etc/group")?))
    };
    let (passwd, group) = waiting::within(context, root, read)??;
    resolve(wanted, &passwd, &group).ok_or_else(|| {
        let remedy = "make an image whose user is in its /etc/passwd, or is a number";
        Failure::usage(format!("user {wanted:?}"), "the image does not have it", remedy)
    })
}

fn resolve(wanted: &str, passwd: &str, group: &str) -> Option<User> {
    let (user, own_group) = match wanted.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (wanted, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let number = user.parse::<u32>().ok();
    let lines = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let known = lines.filter(|fields| fields.len() >= 7).find(|fields| match number {
        Some(uid) => fields[2].parse() == Ok(uid),
        None => fields[0] == user,
    });
    let field = |at: usize| known.as_ref().map(|fields| fields[at]);
    let uid = number.or_else(|| field(2)?.parse().ok())?;
    let groups_of = |name: &str| -> Vec<u32> {
        let lines = group.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let member = lines.filter(|fields| fields.len() >= 4 && fields[3].split(',').any(|member| member == name));
        member.filter_map(|fields| fields[2].parse().ok()).take(GROUPS_MAX).collect()
    };
    let (gid, groups) = match own_group {
        Some(name) => (group_number(name, group)?, Vec::new()),
        None => {
            let gid = field(3).and_then(|gid| gid.parse().ok()).unwrap_or(0);
            (gid, field(0).map(groups_of).unwrap_or_default())
        }
    };
    let home = field(5).filter(|home| home.starts_with('/')).unwrap_or("/").to_owned();
    Some(User { uid, gid, groups, home })
}

fn group_number(name: &str, group: &str) -> Option<u32> {
    let by_name = || {
        let mut lines = group.lines().map(|line| line.split(':').collect::<Vec<_>>());
        lines.find(|fields| fields.len() >= 3 && fields[0] == name)?[2].parse().ok()
    };
    name.parse().ok().or_else(by_name)
}

/// A file of the image, never one outside; empty when it has none. Opening a device or a pipe of the image would already do
/// something: it is looked at before it is opened.
fn read_in(root: &Path, name: &str) -> Result<String> {
    let failed = |error: std::io::Error| Failure::file(&root.join(name), error);
    let directory = rustix::fs::openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| failed(errno.into()))?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    let found = match rustix::fs::openat2(directory, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve) {
        Ok(found) => File::from(found),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(String::new()),
        Err(errno) => return Err(failed(errno.into())),
    };
    if !found.metadata().map_err(failed)?.is_file() {
        return Ok(String::new());
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).map_err(failed)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a host without mounts.
    fn context() -> Context {
        let host = poolfs_host::RecordingHost::new();
        host.set_file("/proc/self/mountinfo", "");
        Context::for_test(Path::new("/nonexistent"), host)
    }

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\nwww:x:33:34::/srv:/bin/false\n";
    const GROUP: &str = "root:x:0:\nwww:x:34:\nadm:x:4:syslog,www\n";

    #[test]
    fn names_and_numbers_are_found() {
        let user = |wanted| resolve(wanted, PASSWD, GROUP);
        let root = User { uid: 0, gid: 0, groups: vec![], home: "/root".into() };
        assert_eq!(user("").expect("root"), root);
        assert_eq!(user("root").expect("root"), root);
        let www = User { uid: 33, gid: 34, groups: vec![4], home: "/srv".into() };
        assert_eq!(user("www").expect("known"), www);
        assert_eq!(user("33").expect("known"), www);
        assert_eq!(user("www:adm").expect("known").gid, 4);
        assert_eq!(user("7:8").expect("numbers"), User { uid: 7, gid: 8, groups: vec![], home: "/".into() });
        for bad in ["nobody", "www:nogroup", "-1"] {
            assert_eq!(user(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_user_is_refused_that_its_namespace_does_not_have() {
        let map = IdMap::parse_proc("0 100000 34").expect("a map");
        let user = |uid, gid, groups: &[u32]| User { uid, gid, groups: groups.to_vec(), home: "/".into() };
        assert!(user(33, 0, &[5, 33]).check_known(&map).is_ok());
        for (bad, id) in [(user(34, 0, &[]), "34"), (user(0, 70, &[]), "70"), (user(0, 0, &[5, 99]), "99")] {
            let text = bad.check_known(&map).expect_err(id).to_string();
            assert!(text.contains(id) && text.contains("--userns"), "{text}");
        }
    }

    #[test]
    fn an_image_cannot_have_its_devices_and_pipes_opened() {
        let place = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(place.path().join("etc")).expect("made");
        let pipe = place.path().join("etc/passwd");
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).expect("made");
        // A writer of a pipe without readers is refused (ENXIO): it sees whether somebody opens it, ever so briefly.
        let watched = std::sync::atomic::AtomicBool::new(true);
        let opened = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                let mut opened = 0;
                while watched.load(std::sync::atomic::Ordering::Relaxed) {
                    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
                    opened += u32::from(rustix::fs::open(&pipe, flags, Mode::empty()).is_ok());
                }
                opened
            });
            for _ in 0..2000 {
                assert_eq!(look_up(&context(), place.path(), "").expect("root needs no file").uid, 0);
            }
            watched.store(false, std::sync::atomic::Ordering::Relaxed);
            watcher.join().expect("no panic")
        });
        assert_eq!(opened, 0, "the pipe was opened");
    }

    #[test]
    fn an_image_cannot_point_at_files_of_the_host() {
        let place = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(place.path().join("etc")).expect("made");
        std::os::unix::fs::symlink("/etc/passwd", place.path().join("etc/passwd")).expect("linked");
        assert!(look_up(&context(), place.path(), "daemon").is_err(), "a link to itself inside, not the host's file");
        std::fs::remove_file(place.path().join("etc/passwd")).expect("removed");
        std::fs::write(place.path().join("etc/passwd"), PASSWD).expect("written");
        assert_eq!(look_up(&context(), place.path(), "www").expect("known").uid, 33);
    }
}
