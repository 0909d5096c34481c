//! Branches at a Ceph cluster, by the commands that mount them.

use poolfs_tests::{Cluster, Daemon, Pool, Stepper, Way, compile, import_small, isolated, name_of, run, wait_until};
use rustix::process::Signal;
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A pool beside that of the test, whose control groups no other test has.
fn another(folder: &Path, name: &str) -> Pool {
    Pool::named(folder, &format!("{}-{name}", name_of(folder)), "16M")
}

/// A cluster with these directories, and how a mount names it.
fn cluster(folder: &Path, directories: &[&str]) -> (Cluster, String) {
    let cluster = Cluster::create(folder);
    cluster.make_directories(directories);
    let configuration = cluster.configuration().to_str().expect("text").to_owned();
    (cluster, configuration)
}

#[test]
fn a_directory_of_a_cluster_is_used_by_both_paths_and_by_one_pool_after_the_other() {
    isolated("a_directory_of_a_cluster_is_used_by_both_paths_and_by_one_pool_after_the_other", |folder| {
        let (_cluster, configuration) = cluster(folder, &["home/inside"]);
        let stack = |name| vec!["--dir", name, "--ceph-conf", &configuration];
        let (one, other) = (Pool::create(folder, "16M"), another(folder, "other"));
        let at = folder.join("mnt");
        let mounted = one.mount(&at, &stack("ceph:/home"));
        let script = format!(
            "cd {}; for i in $(seq 50); do echo $i > f$i; done; mkdir d; mv f1 d/g; ln d/g h; ln -s d/g s; rm f2; \
             cat s; stat -c %h h; truncate -s 5000000 big; sync big",
            at.display()
        );
        assert_eq!(one.shell(Way::Library, &script).expect("by the library").trim(), "1\n2");
        // A cluster without a manager does not say how much room it has.
        let mut writer = Stepper::start(&one, &compile(folder, "steps", false), Way::Library);
        let _ = writer.step(&format!("open {}/posted 66", at.display())).expect("opened");
        for round in 0..500 {
            assert_eq!(writer.step(&format!("pwrite {} 100 1", round * 100)), Ok(100));
        }
        let _ = writer.step(&format!("unlink {}/posted", at.display())).expect("removed");
        drop(writer);
        let posted = one.status()["service"]["instances"][0]["posted_requests"].as_u64().expect("counted");
        assert!(posted > 0, "none was posted");
        let seen = one.shell(Way::Fuse, &format!("cd {}; ls | wc -l; cat f50 d/g", at.display()));
        assert_eq!(seen.expect("by FUSE").trim(), "53\n50\n1");
        // The claims of two pools, whatever they call it.
        for name in ["ceph:/home", "ceph://home/.", "ceph:/home/inside"] {
            let refused = other.poolfs(
                &[&["mount", other.name(), folder.join("other").to_str().expect("text")][..], &stack(name)[..]]
                    .concat(),
            );
            assert!(refused.code != 0, "{name}");
        }
        // The same cluster by other files, and its filesystem by its name.
        let [link, copy] = ["link.conf", "copy.conf"].map(|name| folder.join(name).to_str().expect("text").to_owned());
        std::os::unix::fs::symlink(&configuration, &link).expect("linked");
        let _ = fs::copy(&configuration, &copy).expect("copied");
        for more in
            [&["--ceph-conf", &link][..], &["--ceph-conf", &copy], &["--ceph-fs", "cephfs", "--ceph-conf", &copy]]
        {
            for (pool, name) in [(&other, "ceph:/home/inside"), (&one, "ceph:/home/inside"), (&other, "ceph:/")] {
                let at = folder.join("other");
                let mount = ["mount", pool.name(), at.to_str().expect("text"), "--dir", name];
                let refused = pool.poolfs(&[&mount[..], more].concat());
                assert!(refused.code != 0 && refused.err.contains("remedy"), "{name} {more:?}: {refused:?}");
            }
        }
        let _ = mounted.unmount().expect("umount");
        let again = other.mount(&folder.join("again"), &stack("ceph:/home"));
        assert_eq!(fs::read_to_string(again.path().join("d/g")).expect("there"), "1\n");
        assert_eq!(fs::metadata(again.path().join("big")).expect("there").size(), 5_000_000);
        assert!(other.poolfs(&["pool", "inspect", other.name()]).expect("inspect").contains("ceph:/home"));
        let _ = again.unmount().expect("umount");
    });
}

#[test]
fn doctor_looks_at_a_cluster() {
    isolated("doctor_looks_at_a_cluster", |folder| {
        let (cluster, configuration) = cluster(folder, &["home"]);
        let _ = cluster.script(&["quota", "/home", "1073741824"]).expect("limited");
        let pool = Pool::create(folder, "16M");
        let found = |arguments: &[&str]| {
            let looked = pool.poolfs(&[&["doctor", "--json"][..], arguments].concat());
            let findings: serde_json::Value = serde_json::from_str(&looked.out).expect("JSON");
            let mut all = findings.as_array().expect("a list").clone();
            (looked.code, all.pop().expect("findings"), all.pop().expect("findings"))
        };
        let (_, library, _) = found(&[]);
        assert!(library["thing"] == "Ceph's library" && library["verdict"] == "fine", "{library}");
        let (_, home, library) = found(&["ceph:/home", "--ceph-conf", &configuration]);
        assert!(
            library["thing"] == "Ceph's library" && library["found"].as_str().is_some_and(|text| text.contains('.'))
        );
        assert!(home["thing"] == "ceph:/home" && home["verdict"] == "fine", "{home}");
        assert!(home["found"].as_str().is_some_and(|text| text.contains("of 1.0 GiB free")), "{home}");
        let (code, missing, _) = found(&["ceph:/missing", "--ceph-conf", &configuration]);
        assert!(code == 1 && missing["verdict"] == "broken", "{missing}");
        assert!(missing["remedy"].as_str().is_some_and(|text| text.contains("make the directory")), "{missing}");
        let wrong = pool.poolfs(&["doctor", folder.to_str().expect("text")]);
        assert!(wrong.code == 2 && wrong.err.contains("remedy"), "{wrong:?}");
    });
}

#[test]
fn what_others_change_at_a_cluster_is_seen_where_that_is_asked_for() {
    isolated("what_others_change_at_a_cluster_is_seen_where_that_is_asked_for", |folder| {
        let (_cluster, configuration) = cluster(folder, &["home"]);
        let stack = ["--dir", "ceph:/home", "--coherence", "timed:0s", "--ceph-conf", &configuration];
        let (one, other) = (Pool::create(folder, "16M"), another(folder, "other"));
        let mounts = [one.mount(&folder.join("mnt"), &stack), other.mount(&folder.join("other"), &stack)];
        for round in 0..20 {
            let (writer, reader) = (mounts[round % 2].path(), mounts[1 - round % 2].path());
            let text = format!("{round}: {}", "x".repeat(round * 500));
            fs::write(writer.join("f"), &text).expect("written");
            assert_eq!(fs::read_to_string(reader.join("f")).expect("there"), text);
            fs::rename(reader.join("f"), reader.join(format!("f{round}"))).expect("renamed");
            assert!(!writer.join("f").exists() && writer.join(format!("f{round}")).exists());
        }
        for mounted in mounts {
            let _ = mounted.unmount().expect("umount");
        }
    });
}

#[test]
fn unions_have_branches_at_a_cluster_and_of_the_host() {
    isolated("unions_have_branches_at_a_cluster_and_of_the_host", |folder| {
        let (_cluster, configuration) = cluster(folder, &["images/one", "uppers/a", "uppers/b"]);
        let pool = Pool::create(folder, "16M");
        for name in ["host", "upper"] {
            fs::create_dir(folder.join(name)).expect("made");
        }
        let big: Vec<u8> = (0..1_000_000_u32).map(|at| (at / 4096) as u8).collect();
        fs::write(folder.join("host/of-host"), &big).expect("written");
        let images = pool.mount(&folder.join("images"), &["--dir", "ceph:/images/one", "--ceph-conf", &configuration]);
        fs::write(images.path().join("of-image"), &big).expect("written");
        let _ = images.unmount().expect("umount");
        let host = folder.join("host").to_str().expect("text").to_owned();
        let upper = folder.join("upper").to_str().expect("text").to_owned();
        let lower = format!("ceph:/images/one:{host}");
        for (upper, format) in [("ceph:/uppers/a", "sparse"), ("ceph:/uppers/b", "bcow"), (&upper, "sparse")] {
            let stack = ["--upper", upper, "--lower", &lower, "--upper-format", format, "--ceph-conf", &configuration];
            let mut expected = big.clone();
            expected[500_000] = 255;
            for round in 0..2 {
                let mounted = pool.mount(&folder.join("mnt"), &stack);
                for name in ["of-image", "of-host"] {
                    let file = mounted.path().join(name);
                    if round == 0 {
                        let script = format!(
                            r"printf '\377' | dd of={} bs=1 seek=500000 conv=notrunc,fsync status=none",
                            file.display()
                        );
                        let _ = pool.shell(Way::Library, &script).expect("written");
                    }
                    assert!(fs::read(&file).expect("readable") == expected, "{upper} {name} {round}");
                }
                let status = pool.status();
                let union = &status["service"]["instances"][0]["union"];
                assert!(round > 0 || union["blocks_moved"].as_u64() == Some(2), "blocks move, not files: {status}");
                let _ = mounted.unmount().expect("umount");
            }
        }
        let images = pool.mount(&folder.join("images"), &["--dir", "ceph:/images/one", "--ceph-conf", &configuration]);
        assert!(fs::read(images.path().join("of-image")).expect("readable") == big, "nothing of it changed");
        assert!(fs::read(folder.join("host/of-host")).expect("readable") == big, "nothing of it changed");
        let _ = images.unmount().expect("umount");
    });
}

#[test]
fn what_a_killed_service_had_at_a_cluster_is_its_successors_at_once() {
    isolated("what_a_killed_service_had_at_a_cluster_is_its_successors_at_once", |folder| {
        let (_cluster, configuration) = cluster(folder, &["home", "lower"]);
        let pool = Pool::create(folder, "16M");
        let stacks = [
            vec!["--dir", "ceph:/home", "--ceph-conf", &configuration],
            vec!["--upper", "ceph:/home/upper", "--lower", "ceph:/lower", "--ceph-conf", &configuration],
        ];
        for (round, stack) in stacks.iter().enumerate() {
            let at = folder.join(format!("mnt-{round}"));
            let mounted = pool.mount(&at, stack);
            if round == 0 {
                fs::create_dir(at.join("upper")).expect("made");
            }
            let script = format!(
                "cd {}; for i in $(seq 20); do echo $i > f$i; sync f$i .; done; echo lost > after",
                at.display()
            );
            let _ = pool.shell(Way::Library, &script).expect("written");
            pool.kill_service();
            mounted.keep();
            // Its session would keep all of this for a minute.
            let _ =
                pool.poolfs(&[&["mount", pool.name(), at.to_str().expect("text")][..], stack].concat()).expect("mount");
            let again = pool.mounted(&at);
            for number in 1..=20 {
                assert_eq!(fs::read_to_string(at.join(format!("f{number}"))).expect("durable"), format!("{number}\n"));
            }
            fs::write(at.join("f1"), "new").expect("its own");
            let _ = again.unmount().expect("umount");
        }
    });
}

#[test]
fn a_cluster_that_does_not_answer_holds_up_nobody_else() {
    isolated("a_cluster_that_does_not_answer_holds_up_nobody_else", |folder| {
        let (cluster, configuration) = cluster(folder, &["home"]);
        let pool = Pool::create(folder, "16M");
        fs::create_dir(folder.join("data")).expect("made");
        let stack = ["--dir", "ceph:/home", "--timeout", "2s", "--ceph-conf", &configuration];
        let (mounted, healthy) = (
            pool.mount(&folder.join("mnt"), &stack),
            pool.mount_directory(&folder.join("healthy"), &folder.join("data")),
        );
        let file = fs::File::create(mounted.path().join("f")).expect("made");
        file.sync_all().expect("it answers");
        cluster.signal(Daemon::Osd, Signal::STOP);
        let text = vec![7; 1 << 20];
        (&file).write_all(&text).expect("the cache takes it");
        let failed = file.sync_all().expect_err("it has a limit");
        assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{failed}");
        wait_until("it is named", || {
            pool.status()["service"]["unresponsive_branches"][0]["path"].as_str() == Some("ceph:/home")
        });
        fs::write(healthy.path().join("g"), "healthy").expect("written");
        let _ = healthy.unmount().expect("umount");
        cluster.signal(Daemon::Osd, Signal::CONT);
        // It says that once for each open file.
        wait_until("all is stored", || file.sync_all().is_ok());
        drop(file);
        let _ = mounted.unmount().expect("umount");
        let again = pool.mount(&folder.join("mnt"), &stack);
        assert!(fs::read(again.path().join("f")).expect("there") == text);
        let _ = again.unmount().expect("umount");
    });
}

#[test]
fn who_asks_for_durability_is_told_that_the_cluster_has_ended_the_session() {
    isolated("who_asks_for_durability_is_told_that_the_cluster_has_ended_the_session", |folder| {
        let (cluster, configuration) = cluster(folder, &["home"]);
        let pool = Pool::create(folder, "16M");
        let stack = ["--dir", "ceph:/home", "--ceph-conf", &configuration];
        let mounted = pool.mount(&folder.join("mnt"), &stack);
        let make = |name: &str| fs::File::create(mounted.path().join(name)).expect("made");
        let (file, clean) = (make("f"), make("g"));
        for file in [&file, &clean] {
            file.sync_all().expect("durable");
        }
        (&file).write_all(&[7; 100_000]).expect("the cache takes it");
        let _ = cluster.script(&["evict"]).expect("evicted");
        for round in 0..3 {
            let failed = file.sync_all().expect_err("nothing is stored");
            assert_eq!(failed.raw_os_error(), Some(libc::EIO), "{round}: {failed}");
        }
        let script = format!("cd {}; echo more > h", mounted.path().display());
        for way in [Way::Library, Way::Fuse] {
            assert!(pool.shell(way, &script).code != 0, "{way}");
        }
        drop((file, clean));
        let _ =
            pool.poolfs(&["umount", pool.name(), mounted.path().to_str().expect("text"), "--force"]).expect("umount");
        mounted.keep();
        let again = pool.mount(&folder.join("mnt"), &stack);
        fs::write(again.path().join("f"), "new").expect("a session of its own");
        fs::File::open(again.path().join("f")).expect("there").sync_all().expect("durable");
        let _ = again.unmount().expect("umount");
    });
}

#[test]
fn containers_keep_what_they_write_where_it_was_asked_for() {
    isolated("containers_keep_what_they_write_where_it_was_asked_for", |folder| {
        let (_cluster, configuration) = cluster(folder, &["containers/web"]);
        let pool = Pool::create(folder, "64M");
        import_small(&pool, folder, "small", &[], |root| {
            fs::write(root.join("etc/motd"), "of the image").expect("written")
        });
        let host = folder.join("host");
        fs::create_dir(&host).expect("made");
        let host = host.to_str().expect("text");
        let ceph = ["--upper-dir", "ceph:/containers/web", "--ceph-conf", &configuration];
        let run = |upper: &[&str], script: &str| {
            let command = ["--rm", "--name", "web", "--", "/bin/sh", "-euc", script];
            pool.poolfs(&[&["run", pool.name(), "small"][..], upper, &command].concat())
        };
        for upper in [&ceph[..], &["--upper-dir", host]] {
            let written = "cat /etc/motd; echo one > /root/f; rm /etc/motd; ls /root";
            assert_eq!(run(upper, written).expect("a container"), "of the imagef\n", "{upper:?}");
            // It was removed, and what it wrote was not its own.
            let seen = "cat /root/f; test ! -e /etc/motd; echo two >> /root/f";
            assert_eq!(run(upper, seen).expect("the next"), "one\n", "{upper:?}");
            assert_eq!(run(upper, "cat /root/f").expect("a third"), "one\ntwo\n", "{upper:?}");
        }
        // Whoever has it keeps others from it.
        let web = ["-d", "--name", "first", "--", "/bin/sh", "-c", "while :; do sleep 1; done"];
        let _ = pool.poolfs(&[&["run", pool.name(), "small"][..], &ceph, &web].concat()).expect("run -d");
        let refused = run(&ceph, "true");
        assert!(refused.code != 0 && refused.err.contains("ceph:/containers/web"), "{refused:?}");
        let _ = pool.poolfs(&["stop", "--time", "0", "first"]).expect("stop");
        let _ = pool.poolfs(&["rm", "first"]).expect("rm");
        let missing = run(&["--upper-dir", "/no/such"], "true");
        assert!(missing.code != 0 && missing.err.contains("mkdir -p"), "{missing:?}");
        let without = run(&["--ceph-conf", &configuration], "true");
        assert!(without.code != 0 && without.err.contains("no branch is at a cluster"), "{without:?}");
        assert_eq!(pool.poolfs(&["ps"]).expect("ps").lines().count(), 1, "nothing is left");
    });
}

#[test]
fn what_cannot_be_reached_at_a_cluster_is_named_with_a_remedy() {
    isolated("what_cannot_be_reached_at_a_cluster_is_named_with_a_remedy", |folder| {
        let (cluster, configuration) = cluster(folder, &["tenants/a", "tenants/b"]);
        let key = cluster.authorize("a", "/tenants/a");
        let key = key.to_str().expect("text");
        let pool = Pool::create(folder, "16M");
        for name in ["mnt", "data", "ceph:", "ceph:/here"] {
            fs::create_dir_all(folder.join(name)).expect("made");
        }
        let at = folder.join("mnt").to_str().expect("text").to_owned();
        let data = folder.join("data").to_str().expect("text").to_owned();
        let conf = ["--ceph-conf", configuration.as_str()];
        for (stack, told) in [
            (vec!["--dir", "ceph:/none", conf[0], conf[1]], "there is no such directory"),
            (vec!["--dir", "ceph:/tenants/../x", conf[0], conf[1]], "goes up"),
            (vec!["--dir", "ceph:/tenants/a", "--ceph-conf", "/no/such"], "/no/such"),
            (vec!["--dir", "ceph:/tenants/a", "--ceph-user", "nobody", conf[0], conf[1]], "--ceph-keyring"),
            (
                vec!["--dir", "ceph:/tenants/b", "--ceph-user", "a", "--ceph-keyring", key, conf[0], conf[1]],
                "ceph fs authorize",
            ),
            (vec!["--dir", &data, conf[0], conf[1]], "no branch is at a cluster"),
            (vec!["--upper", "ceph:/tenants", "--lower", "ceph:/tenants/a", conf[0], conf[1]], "overlaps"),
        ] {
            let refused = pool.poolfs(&[&["mount", pool.name(), &at][..], &stack[..]].concat());
            assert!(refused.code != 0 && refused.err.contains(told), "{stack:?}: {refused:?}");
        }
        let own = pool.mount(
            Path::new(&at),
            &["--dir", "ceph:/tenants/a", "--ceph-user", "client.a", "--ceph-keyring", key, conf[0], conf[1]],
        );
        fs::write(own.path().join("f"), "of a").expect("written");
        let _ = own.unmount().expect("umount");
        // A directory of this host that is called so.
        let mut command = pool.command();
        let _ =
            run(command.current_dir(folder).args(["mount", pool.name(), &at, "--dir", "./ceph:/here"])).expect("mount");
        fs::write(folder.join("mnt/f"), "here").expect("written");
        let _ = pool.mounted(Path::new(&at)).unmount().expect("umount");
        assert_eq!(fs::read_to_string(folder.join("ceph:/here/f")).expect("there"), "here");
    });
}
