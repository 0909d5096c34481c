//! Tests of a mount whose branch takes long to examine, beside other changes of the same service: those that do not conflict with
//! it go on.

use crate::harness::{Running, answer_of, eventually, give, isolated, make, message, mounts};
use poolfs_service_protocol::{Answer, Command as Order, MountSpec, StackSpec, UnmountMode};
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest that anything takes which is not waited for on purpose. The kernel takes a lease away after 45 s.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// A file that nobody else opens until this is dropped: who tries waits.
struct Leased(File);

impl Leased {
    fn take(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("a file");
        // SAFETY: plain calls on our own descriptor. The signal by which the kernel tells of who waits would end the test.
        let taken = unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK)
        };
        assert_eq!(taken, 0, "{}", std::io::Error::last_os_error());
        Self(file)
    }

    /// Whether somebody waits.
    fn is_wanted(&self) -> bool {
        // SAFETY: as above.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETLEASE) != libc::F_WRLCK }
    }
}

/// An order that is not answered before long.
fn begun(service: &Running, order: &Order) -> UnixStream {
    let stream = UnixStream::connect(service.control_socket()).expect("the service listens");
    stream.set_read_timeout(Some(WAIT_MAX)).expect("a limit");
    give(&stream, order);
    stream
}

/// One that waits for nobody.
fn answered(service: &Running, order: &Order) -> Answer {
    answer_of(&begun(service, order))
}

fn unmount_of(name: &str) -> Order {
    Order::Unmount { instance: name.into(), ending: UnmountMode::Orderly }
}

/// Nothing has come yet.
fn is_silent(stream: &UnixStream) -> bool {
    let mut polled = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, valid for the call.
    unsafe { libc::poll(&raw mut polled, 1, 0) == 0 }
}

/// A union of branches below `folder` that was mounted before, and the file of its upper branch that every mount begins with.
fn union(service: &Running, folder: &Path) -> (MountSpec, PathBuf) {
    let [upper, lower] = ["upper", "lower"].map(|name| make(&folder.join(name)));
    let stack = StackSpec::union(upper.clone(), vec![lower]);
    let at = service.mount("one", stack.clone());
    fs::write(at.join("f"), b"in it").expect("written");
    assert_eq!(service.unmount("one"), Answer::Done);
    (service.spec("one", stack), upper.join(".poolfs/format"))
}

#[test]
fn who_has_nothing_to_do_with_a_mount_does_not_wait_for_it() {
    isolated("underway::who_has_nothing_to_do_with_a_mount_does_not_wait_for_it", |folder| {
        let service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let lease = Leased::take(&file);
        let slow = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        // Over the same lower branch.
        let StackSpec::Union { lowers, .. } = spec.stack.clone() else { panic!("a union") };
        let other = service.spec("two", StackSpec::union(make(&folder.join("upper-two")), lowers));
        assert_eq!(answered(&service, &Order::Mount(other.clone())), Answer::Done);
        assert_eq!(mounts(folder).len(), 1);
        fs::write(other.mount_point.join("g"), b"beside it").expect("written");
        assert!(matches!(answered(&service, &Order::Status), Answer::Status(status) if status.instances.len() == 1));
        let all = Answer::Instances { instances: vec!["two".into(), "one".into()] };
        assert_eq!(answered(&service, &Order::Instances), all, "nobody takes it for gone");
        assert_eq!(answered(&service, &unmount_of("two")), Answer::Done);
        assert!(is_silent(&slow) && mounts(folder).is_empty());
        drop(lease);
        assert_eq!(answer_of(&slow), Answer::Done);
        assert_eq!(fs::read(spec.mount_point.join("f")).expect("read"), b"in it");
    });
}

#[test]
fn what_a_mount_excludes_is_refused_when_it_is_there() {
    isolated("underway::what_a_mount_excludes_is_refused_when_it_is_there", |folder| {
        let service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let lease = Leased::take(&file);
        let first = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        let same_branch = begun(&service, &Order::Mount(service.spec("two", spec.stack.clone())));
        let elsewhere = StackSpec::directory(make(&folder.join("other")));
        let same_name = begun(&service, &Order::Mount(service.spec("one", elsewhere.clone())));
        let behind = StackSpec::directory(make(&spec.mount_point.join("below")));
        let behind = begun(&service, &Order::Mount(service.spec("three", behind)));
        drop(lease);
        assert_eq!(answer_of(&first), Answer::Done);
        for (what, refused) in [("while", same_branch), ("exists already", same_name), ("served by this pool", behind)]
        {
            let said = message(answer_of(&refused));
            assert!(said.contains(what), "{said}");
        }
        assert_eq!(mounts(folder).len(), 1);
        // Elsewhere there is room for it.
        assert_eq!(service.order(&Order::Mount(service.spec("two", elsewhere))), Answer::Done);
    });
}

#[test]
fn a_mount_that_is_under_way_can_be_given_up() {
    isolated("underway::a_mount_that_is_under_way_can_be_given_up", |folder| {
        let service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let lease = Leased::take(&file);
        let mount = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        // Whoever gives it up does not wait for it; whoever needs its branch does.
        assert_eq!(answered(&service, &unmount_of("one")), Answer::Done);
        let again = begun(&service, &Order::Mount(MountSpec { instance: "two".into(), ..spec.clone() }));
        // So can whoever tries the same elsewhere, however often.
        for _ in 0..3 {
            let elsewhere = begun(&service, &Order::Mount(service.spec("three", spec.stack.clone())));
            eventually("it is under way", || {
                let answer = answered(&service, &Order::Instances);
                matches!(answer, Answer::Instances { instances } if instances.contains(&"three".to_owned()))
            });
            assert_eq!(answered(&service, &unmount_of("three")), Answer::Done);
            assert!(message(answer_of(&elsewhere)).contains("was unmounted while"));
        }
        assert_eq!(answered(&service, &Order::Ping), Answer::Done);
        assert!(is_silent(&mount) && is_silent(&again));
        drop(lease);
        assert!(message(answer_of(&mount)).contains("was unmounted while"));
        assert_eq!(answer_of(&again), Answer::Done);
        assert_eq!(mounts(folder).len(), 1);
        assert_eq!(fs::read(spec.mount_point.join("f")).expect("read"), b"in it");
        assert_eq!(answered(&service, &unmount_of("two")), Answer::Done);
        // What was given up once is so no longer.
        assert_eq!(service.order(&Order::Mount(spec.clone())), Answer::Done);
        assert_eq!(answered(&service, &unmount_of("one")), Answer::Done);
    });
}

#[test]
fn the_end_of_a_service_gives_up_what_is_being_mounted() {
    isolated("underway::the_end_of_a_service_gives_up_what_is_being_mounted", |folder| {
        let mut service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let lease = Leased::take(&file);
        let mount = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        assert_eq!(answered(&service, &Order::Shutdown), Answer::Done);
        assert!(service.wait().success() && mounts(folder).is_empty());
        drop((lease, mount));
        let service = Running::start(folder);
        assert_eq!(service.order(&Order::Mount(spec.clone())), Answer::Done);
        assert_eq!(fs::read(spec.mount_point.join("f")).expect("read"), b"in it");
    });
}

#[test]
fn what_nobody_wants_any_more_is_not_mounted() {
    isolated("underway::what_nobody_wants_any_more_is_not_mounted", |folder| {
        let service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let another = |name: &str| Order::Mount(MountSpec { instance: name.into(), ..spec.clone() });
        let lease = Leased::take(&file);
        let first = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        let [given_up, left] = ["two", "three"].map(|name| begun(&service, &another(name)));
        // Of two orders of two connections, either comes first.
        eventually("they wait for it", || {
            let Answer::Instances { mut instances } = answered(&service, &Order::Instances) else { return false };
            instances.sort();
            instances == ["one", "three", "two"]
        });
        assert_eq!(answered(&service, &unmount_of("two")), Answer::Done);
        assert!(message(answer_of(&given_up)).contains("was unmounted while"));
        drop((left, first, lease));
        eventually("all have ended", || {
            answered(&service, &Order::Instances) == Answer::Instances { instances: vec![] }
        });
        assert!(mounts(folder).is_empty());
        assert_eq!(service.order(&Order::Mount(spec.clone())), Answer::Done);
    });
}

#[test]
fn a_service_is_reached_however_many_mounts_are_under_way() {
    isolated("underway::a_service_is_reached_however_many_mounts_are_under_way", |folder| {
        let service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let lease = Leased::take(&file);
        let first = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        let another = |n: u32| Order::Mount(MountSpec { instance: format!("{n}"), ..spec.clone() });
        let mut waiting: Vec<UnixStream> = (1..24).map(|n| begun(&service, &another(n))).collect();
        eventually("all are under way", || {
            let answer = answered(&service, &Order::Instances);
            matches!(answer, Answer::Instances { instances } if instances.len() == 24)
        });
        assert!(message(answered(&service, &another(24))).contains("are under way, which is the most"));
        assert_eq!(answered(&service, &Order::Ping), Answer::Done);
        assert!(waiting.iter().all(is_silent));
        waiting.clear();
        drop(lease);
        assert_eq!(answer_of(&first), Answer::Done);
        assert_eq!(fs::read(spec.mount_point.join("f")).expect("read"), b"in it");
    });
}

#[test]
fn a_place_that_is_taken_while_a_branch_is_looked_at_is_not_mounted_on() {
    isolated("underway::a_place_that_is_taken_while_a_branch_is_looked_at_is_not_mounted_on", |folder| {
        let service = Running::start(folder);
        let (spec, file) = union(&service, folder);
        let lease = Leased::take(&file);
        let mount = begun(&service, &Order::Mount(spec.clone()));
        eventually("its branch is looked at", || lease.is_wanted());
        fs::remove_dir(&spec.mount_point).expect("empty");
        fs::write(&spec.mount_point, "somebody's").expect("written");
        drop(lease);
        let said = message(answer_of(&mount));
        assert!(said.contains("mount point"), "{said}");
        fs::remove_file(&spec.mount_point).expect("ours");
        make(&spec.mount_point);
        assert_eq!(service.order(&Order::Mount(spec.clone())), Answer::Done);
        assert_eq!(fs::read(spec.mount_point.join("f")).expect("read"), b"in it");
    });
}
