//! Time limits of requests (`--timeout`): what an unresponsive branch holds up fails, and the mount goes on when the branch does.

use poolfs_tests::{Foreign, Pool, Stepper, Way, compile, hash, isolated, name_of, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::thread;

const FILE_BYTES: usize = 64 << 10;

/// More callers than a mount has threads.
const CALLERS: usize = 80;

/// A foreign filesystem, and a pool with a mount of a directory of it whose requests may take a second. There are files in it of which nothing is
/// cached, and beside it is a mount whose branch is well.
fn places(folder: &Path) -> (Foreign, Pool) {
    let foreign = Foreign::mount(folder);
    for name in ["mnt", "more", "data", "lower"] {
        fs::create_dir(folder.join(name)).expect("a folder");
    }
    foreign.make_upper();
    for number in 0..8 {
        fs::write(folder.join(format!("foreign-upper/upper/f{number}")), vec![b'a' + number; FILE_BYTES])
            .expect("made");
    }
    let pool = Pool::create(folder, "16M");
    let _ = pool.line("mount POOL @more --dir @data").output().expect("poolfs runs");
    mount(&pool);
    (foreign, pool)
}

fn mount(pool: &Pool) {
    let mounted = pool.line("mount POOL @mnt --upper @foreign/upper --lower @lower --timeout 1s").output();
    assert!(mounted.expect("poolfs runs").status.success());
}

fn unmount(pool: &Pool) {
    for at in ["@mnt", "@more"] {
        assert!(pool.line(&format!("umount POOL {at}")).status().expect("poolfs runs").success());
    }
}

fn has_failed<T>(outcome: io::Result<T>) -> bool {
    outcome.is_err_and(|error| error.raw_os_error() == Some(libc::EIO))
}

/// What does not use the branch goes on meanwhile.
fn others_go_on(folder: &Path, round: u8) {
    fs::write(folder.join("more/g"), [round; 100]).expect("its branch answers");
    assert_eq!(fs::read(folder.join("more/g")).expect("its branch answers"), [round; 100]);
}

fn timed_out(pool: &Pool) -> u64 {
    let status = pool.status();
    let instances = status["service"]["instances"].as_array().expect("some").clone();
    instances.iter().filter_map(|instance| instance["timed_out"].as_u64()).sum()
}

fn is_well(folder: &Path) -> bool {
    File::open(folder.join("mnt/f7")).and_then(|file| file.read_exact_at(&mut [0; 10], 0)).is_ok()
}

fn programs_fail_and_go_on(folder: &Path, way: Way) {
    let (foreign, pool) = places(folder);
    let program = compile(folder, "steps", way == Way::Fuse);
    let mut steppers: Vec<_> = (0..6).map(|_| Stepper::start(&pool, &program, way)).collect();
    for (number, stepper) in steppers.iter_mut().enumerate() {
        let path = folder.join(format!("mnt/f{number}"));
        assert_eq!(stepper.step(&format!("open {} {}", path.display(), libc::O_RDWR)), Ok(0));
    }
    assert_eq!(steppers[5].step("pwrite 100 10 90"), Ok(10));
    let others = pool.operations(way);
    foreign.stop();
    for stepper in &mut steppers[..4] {
        assert_eq!(stepper.step("pread 0 4096"), Err(libc::EIO), "the branch has not answered");
        others_go_on(folder, 1);
    }
    assert_eq!(steppers[5].step("sync"), Err(libc::EIO));
    assert!(pool.operations(way) >= others);
    if way == Way::Fuse {
        assert!(timed_out(&pool) >= 5);
        let text = pool.poolfs(&["status", pool.name()]).expect("status");
        assert!(text.contains("failed because they took longer than --timeout"), "{text}");
    }
    foreign.resume();
    for (number, stepper) in steppers.iter_mut().enumerate().take(5) {
        let content = hash(&vec![b'a' + number as u8; 4096]);
        wait_until("it goes on", || match stepper.step("pread 0 4096") {
            Ok(read) => read == content,
            Err(errno) => {
                assert_eq!(errno, libc::EIO);
                false
            }
        });
    }
    wait_until("it is stored", || steppers[5].step("sync").is_ok());
    drop(steppers);
    unmount(&pool);
    let mut content = vec![b'f'; FILE_BYTES];
    content[100..110].fill(90);
    assert_eq!(fs::read(folder.join("foreign-upper/upper/f5")).expect("there"), content, "nothing is lost");
}

#[test]
fn requests_by_fuse_fail_when_their_time_is_over_and_later_ones_do_not() {
    isolated("requests_by_fuse_fail_when_their_time_is_over_and_later_ones_do_not", |folder| {
        programs_fail_and_go_on(folder, Way::Fuse);
    });
}

#[test]
fn requests_of_the_library_fail_when_their_time_is_over_and_later_ones_do_not() {
    isolated("requests_of_the_library_fail_when_their_time_is_over_and_later_ones_do_not", |folder| {
        programs_fail_and_go_on(folder, Way::Library);
    });
}

#[test]
fn more_callers_than_there_are_threads_fail_too_and_what_they_give_back_is_taken_later() {
    isolated("more_callers_than_there_are_threads_fail_too_and_what_they_give_back_is_taken_later", |folder| {
        let (foreign, pool) = places(folder);
        let files: Vec<_> = (0..8).map(|n| File::open(folder.join(format!("mnt/f{n}"))).expect("opened")).collect();
        foreign.stop();
        for round in 0..2 {
            thread::scope(|scope| {
                for number in 0..CALLERS {
                    let path = folder.join(format!("mnt/none-{round}-{number}"));
                    scope.spawn(move || assert!(has_failed(fs::symlink_metadata(path))));
                }
            });
            others_go_on(folder, round);
        }
        // Nobody is there who could take these.
        drop(files);
        assert!(has_failed(fs::read_dir(folder.join("mnt"))));
        assert!(timed_out(&pool) > CALLERS as u64);
        foreign.resume();
        wait_until("it goes on", || is_well(folder));
        // The last that is refused may come while the first is served again.
        let looked_up = || fs::symlink_metadata(folder.join("mnt/none-0-0"));
        wait_until("it is not there", || looked_up().is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
        wait_until("what was open is closed", || {
            let status = pool.status();
            let instances = status["service"]["instances"].as_array().expect("some").clone();
            instances.iter().all(|instance| instance["handles"] == 0)
        });
        unmount(&pool);
    });
}

#[test]
fn what_has_failed_may_take_effect_later_and_is_seen_then() {
    isolated("what_has_failed_may_take_effect_later_and_is_seen_then", |folder| {
        let (foreign, pool) = places(folder);
        let at = |name: &str| folder.join("mnt").join(name);
        let mode = |path: &Path| fs::metadata(path).map(|there| there.permissions().mode() & 0o777).ok();
        let set_mode = |name: &str, mode: u32| fs::set_permissions(at(name), Permissions::from_mode(mode));
        // The kernel and the service know all of this.
        assert_eq!((mode(&at("f1")), mode(&at("f2"))), (Some(0o644), Some(0o644)));
        assert!(!at("made").exists() && !at("never").exists());
        foreign.stop();
        thread::scope(|scope| {
            scope.spawn(|| assert!(has_failed(fs::create_dir(at("made")))));
            scope.spawn(|| assert!(has_failed(set_mode("f1", 0o600))));
            scope.spawn(|| assert!(has_failed(set_mode("f2", 0o600))));
        });
        // None of these is begun before it is known what became of the others.
        assert!(has_failed(set_mode("f2", 0o611)) && has_failed(fs::create_dir(at("never"))));
        foreign.resume();
        wait_until("it can be changed", || set_mode("f2", 0o640).is_ok());
        wait_until("the directory is there", || at("made").is_dir());
        wait_until("the mode has changed", || mode(&at("f1")) == Some(0o600));
        fs::remove_dir(at("made")).expect("removed");
        unmount(&pool);
        let below = folder.join("foreign-upper/upper");
        assert_eq!(mode(&below.join("f1")), Some(0o600));
        assert_eq!(mode(&below.join("f2")), Some(0o640), "what failed does not come after what succeeded");
        assert!(!below.join("made").exists() && !below.join("never").exists());
    });
}

#[test]
fn a_lower_branch_whose_service_stands_still_fails_what_needs_it_and_nothing_else() {
    isolated("a_lower_branch_whose_service_stands_still_fails_what_needs_it_and_nothing_else", |folder| {
        for name in ["mnt", "lower", "data", "upper"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        for (name, byte) in [("data/f1", b'a'), ("data/f2", b'b'), ("upper/own", b'c')] {
            fs::write(folder.join(name), vec![byte; FILE_BYTES]).expect("made");
        }
        let (below, pool) =
            (Pool::named(folder, &format!("{}-below", name_of(folder)), "16M"), Pool::create(folder, "16M"));
        let mounted_below =
            below.mount(&folder.join("lower"), &["--dir", folder.join("data").to_str().expect("UTF-8")]);
        let mounted = pool.line("mount POOL @mnt --upper @upper --lower @lower --timeout 1s").status();
        assert!(mounted.expect("poolfs runs").success());
        let at = |name: &str| folder.join("mnt").join(name);
        let [lower, own] =
            ["f1", "own"].map(|name| File::options().read(true).write(true).open(at(name)).expect("opened"));
        let service = Pid::from_raw(below.service_pid()).expect("a number");
        kill_process(service, Signal::STOP).expect("ours");
        for round in 1..3 {
            assert!(has_failed(lower.read_exact_at(&mut [0; 4096], 0)));
            assert!(has_failed(fs::symlink_metadata(at(&format!("none-{round}")))));
            let mut seen = [0; 100];
            own.write_all_at(&[round; 100], 0).and_then(|()| own.read_exact_at(&mut seen, 0)).expect("it is not below");
            assert_eq!(seen, [round; 100]);
        }
        kill_process(service, Signal::CONT).expect("ours");
        let mut seen = vec![0; FILE_BYTES];
        wait_until("it goes on", || lower.read_exact_at(&mut seen, 0).is_ok());
        assert_eq!(seen, vec![b'a'; FILE_BYTES]);
        wait_until("names go on", || fs::read(at("f2")).is_ok_and(|content| content == vec![b'b'; FILE_BYTES]));
        drop((lower, own));
        assert!(pool.line("umount POOL @mnt").status().expect("poolfs runs").success());
        let _ = mounted_below.unmount().expect("umount");
    });
}

#[test]
fn a_time_limit_and_rings_exclude_each_other() {
    isolated("a_time_limit_and_rings_exclude_each_other", |folder| {
        fs::create_dir(folder.join("mnt")).expect("a folder");
        fs::create_dir(folder.join("data")).expect("a folder");
        let pool = Pool::create(folder, "16M");
        let refused = pool.line("mount POOL @mnt --dir @data --timeout 1s --fuse-transport io-uring").output();
        let text = String::from_utf8(refused.expect("poolfs runs").stderr).expect("UTF-8");
        assert!(text.contains("--timeout"), "{text}");
        let _ = pool.line("mount POOL @mnt --dir @data --timeout 1s").output().expect("poolfs runs");
        let status = pool.status();
        let instance = &status["service"]["instances"][0];
        assert_eq!((instance["transport"].as_str(), instance["timed_out"].as_u64()), (Some("dev-fuse"), Some(0)));
        assert!(pool.line("umount POOL @mnt").status().expect("poolfs runs").success());
    });
}
