//! Tests of branches as the control side sends them: what the service accepts, and what it refuses.

use crate::harness::{Running, answer_of, isolated, make, message, mounts, private_mounts};
use poolfs_local::PrivateMount;
use poolfs_service_protocol::{Answer, Command as Order, StackSpec, send};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

fn private(path: &Path, read_only: bool) -> OwnedFd {
    PrivateMount::of(path, read_only).expect("made").as_fd().try_clone_to_owned().expect("a descriptor")
}

fn filled(path: &Path, content: &str) {
    make(path);
    fs::write(path.join("file"), content).expect("write");
}

fn open_files(service: &Running) -> usize {
    fs::read_dir(format!("/proc/{}/fd", service.pid())).expect("alive").count()
}

#[test]
fn a_branch_is_the_directory_that_was_sent_whatever_is_at_its_path() {
    isolated("branches::a_branch_is_the_directory_that_was_sent_whatever_is_at_its_path", |folder| {
        let service = Running::start(folder);
        let [named, sent] = ["named", "sent"].map(|name| folder.join(name));
        for (place, content) in [(&named, "named"), (&sent, "sent")] {
            filled(&place.join("upper"), content);
            filled(&place.join("lower"), content);
        }
        let directory = service.spec("one", StackSpec::directory(named.join("upper")));
        let at = directory.mount_point.clone();
        let descriptors = [private(&sent.join("upper"), false)];
        assert_eq!(service.order_with(&Order::Mount(directory), &descriptors), Answer::Done);
        assert_eq!(fs::read(at.join("file")).expect("there"), b"sent");
        fs::write(at.join("file"), b"changed").expect("write");
        assert_eq!(service.unmount("one"), Answer::Done);
        assert_eq!(fs::read(sent.join("upper/file")).expect("there"), b"changed");
        fs::remove_file(sent.join("upper/file")).expect("there");

        // Nothing is at these paths any more when the service is told.
        let union = service.spec("two", StackSpec::union(named.join("upper"), vec![named.join("lower")]));
        let at = union.mount_point.clone();
        let descriptors = [private(&sent.join("upper"), false), private(&sent.join("lower"), true)];
        fs::rename(&named, folder.join("elsewhere")).expect("moved");
        assert_eq!(service.order_with(&Order::Mount(union), &descriptors), Answer::Done);
        assert_eq!(fs::read(at.join("file")).expect("there"), b"sent");
        fs::write(at.join("new"), b"new").expect("write");
        assert_eq!(service.unmount("two"), Answer::Done);
        assert_eq!(fs::read(sent.join("upper/new")).expect("there"), b"new");
    });
}

#[test]
fn what_is_no_private_mount_of_a_directory_is_refused_and_closed() {
    isolated("branches::what_is_no_private_mount_of_a_directory_is_refused_and_closed", |folder| {
        let service = Running::start(folder);
        filled(&folder.join("dir"), "content");
        make(&folder.join("lower"));
        let (socket, _other) = UnixStream::pair().expect("sockets");
        let open = |path: &Path| OwnedFd::from(File::open(path).expect("there"));
        let directory = || StackSpec::directory(folder.join("dir"));
        let good = || private(&folder.join("dir"), false);
        let refused = |stack: StackSpec, descriptors: Vec<OwnedFd>, words: &str| {
            let said = message(service.order_with(&Order::Mount(service.spec("one", stack)), &descriptors));
            assert!(said.contains(words), "{said}");
        };
        // Who answers has started; a socket listens before that.
        assert_eq!(service.order(&Order::Ping), Answer::Done);
        let before = open_files(&service);
        for _ in 0..3 {
            refused(directory(), vec![open(&folder.join("dir"))], "no private mount");
            refused(directory(), vec![open(Path::new("/"))], "no private mount");
            refused(directory(), vec![open(&folder.join("dir/file"))], "must exist and be a directory");
            refused(
                directory(),
                vec![socket.try_clone().expect("a descriptor").into()],
                "must exist and be a directory",
            );
            refused(directory(), vec![], "descriptors of 0 directories for 1 branches");
            refused(directory(), vec![good(), good()], "descriptors of 2 directories for 1 branches");
            let union = StackSpec::union(folder.join("dir"), vec![folder.join("lower")]);
            refused(union, vec![good(), private(&folder.join("lower"), false)], "no private mount");
            let said = message(service.order_with(&Order::Ping, &[good()]));
            assert!(said.contains("takes none"), "{said}");
        }
        assert!(mounts(folder).is_empty());
        // Two messages make one line, with more than it can have.
        let mut stream = UnixStream::connect(service.control_socket()).expect("it listens");
        let one = good();
        let many = vec![one.as_fd(); poolfs_service_protocol::DESCRIPTORS_MAX];
        send(&stream, b"{", &many).expect("sent");
        // It may have hung up.
        let _ = send(&stream, b"\n", &many);
        let _ = stream.write_all(b"\n");
        assert!(message(answer_of(&stream)).contains("too many descriptors"));
        drop(stream);
        assert_eq!(service.order(&Order::Ping), Answer::Done);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while open_files(&service) > before {
            assert!(std::time::Instant::now() < deadline, "{} files, and {before} before", open_files(&service));
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        service.mount("one", directory());
    });
}

#[test]
fn one_directory_by_two_paths_is_known_to_be_one() {
    isolated("branches::one_directory_by_two_paths_is_known_to_be_one", |folder| {
        let service = Running::start(folder);
        let [a, b, c, other] = ["a", "b", "c", "other"].map(|name| make(&folder.join(name)));
        let status = Command::new("mount").arg("--bind").args([&a, &other]).status().expect("util-linux");
        assert!(status.success());
        let directory = |path: &Path| StackSpec::directory(path);
        let union = |upper: &Path, lower: &Path| StackSpec::union(upper, vec![lower.into()]);
        let refused = |stack: StackSpec, words: &str| {
            let spec = service.spec("other", stack);
            let said = message(service.order_with(&Order::Mount(spec.clone()), &private_mounts(&spec.stack)));
            assert!(said.contains(words), "{said}");
        };
        refused(union(&a, &other), "another branch");
        refused(StackSpec::union(b.clone(), vec![a.clone(), other.clone()]), "another branch");
        service.mount("one", directory(&a));
        refused(directory(&other), "cannot be a mounted directory while");
        refused(union(&other, &b), "cannot be the upper branch of a union while");
        refused(union(&b, &other), "cannot be a lower branch of a union while");
        assert_eq!(service.unmount("one"), Answer::Done);
        service.mount("one", union(&a, &b));
        refused(union(&other, &c), "cannot be the upper branch of a union while");
        refused(union(&c, &other), "cannot be a lower branch of a union while");
        // Who only reads it does not mind.
        assert_eq!(service.unmount("one"), Answer::Done);
        service.mount("one", union(&b, &a));
        service.mount("two", union(&c, &other));
    });
}

#[test]
fn a_branch_keeps_no_mount_of_the_host_in_use() {
    isolated("branches::a_branch_keeps_no_mount_of_the_host_in_use", |folder| {
        let service = Running::start(folder);
        let [upper, lower] = ["upper", "lower"].map(|name| make(&folder.join(name)));
        let run = |arguments: &[&str]| {
            assert!(Command::new(arguments[0]).args(&arguments[1..]).status().expect("util-linux").success());
        };
        for place in [&upper, &lower] {
            run(&["mount", "-t", "tmpfs", "branch", place.to_str().expect("UTF-8")]);
        }
        fs::write(lower.join("file"), "content").expect("write");
        let at = service.mount("one", StackSpec::union(upper.clone(), vec![lower.clone()]));
        for place in [&upper, &lower] {
            run(&["umount", place.to_str().expect("UTF-8")]);
        }
        assert_eq!(fs::read(at.join("file")).expect("there"), b"content");
        fs::write(at.join("file"), b"changed").expect("write");
        assert_eq!(fs::read(at.join("file")).expect("there"), b"changed");
        assert_eq!(service.unmount("one"), Answer::Done);
    });
}
