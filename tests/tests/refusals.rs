//! Requests that are refused or reported because they would do harm.
//!
//! Among them: one directory in two pools, a limit that is dropped, more memory than there is, the removal of an image in use.

use poolfs_tests::Foreign;
use poolfs_tests::{Mounted, Outcome, Pool, import_small, isolated, name_of, program, run, shell};
use std::fs;
use std::path::Path;
use std::process::Command;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn try_mount(pool: &Pool, at: &Path, stack: &[&str]) -> Outcome {
    fs::create_dir_all(at).expect("a mount point");
    pool.poolfs(&[&["mount", pool.name(), text(at)], stack].concat())
}

#[test]
fn a_directory_is_mounted_by_two_pools_only_when_both_say_so() {
    isolated("a_directory_is_mounted_by_two_pools_only_when_both_say_so", |folder| {
        let one = Pool::create(folder, "16M");
        let two = Pool::named(folder, &format!("{}-2", one.name()), "16M");
        // What another state directory knows nothing of.
        let elsewhere = folder.join("elsewhere");
        fs::create_dir(&elsewhere).expect("a folder");
        let three = Pool::named(&elsewhere, &format!("{}-3", one.name()), "16M");
        let [data, inside, upper] = ["data", "data/inside", "upper"].map(|name| folder.join(name));
        for path in [&inside, &upper] {
            fs::create_dir_all(path).expect("a folder");
        }
        let at = |name: &str| folder.join(format!("mnt-{name}"));
        let refused = |pool: &Pool, stack: &[&str], parts: &[&str]| {
            let outcome = try_mount(pool, &at("refused"), stack);
            assert_ne!(outcome.code, 0, "{stack:?}: {outcome:?}");
            for part in parts {
                assert!(outcome.err.contains(part), "{stack:?}: {part} in {outcome:?}");
            }
        };
        let mounted = one.mount_directory(&at("one"), &data);
        fs::write(at("one").join("f"), "f").expect("written");
        let by = format!("by pool {}", one.name());
        refused(&two, &["--dir", text(&data)], &["it is what is mounted", &by, "--shared"]);
        refused(&two, &["--dir", text(&data), "--shared"], &[&by, "both with --shared"]);
        refused(&two, &["--dir", text(&inside)], &["contains, or lies in", &by]);
        refused(&two, &["--dir", text(folder)], &["contains, or lies in", &by]);
        refused(&two, &["--upper", text(&inside), "--lower", text(&elsewhere)], &[&by]);
        refused(&two, &["--upper", text(&upper), "--lower", text(&data)], &["it is what is mounted", &by]);
        refused(&three, &["--dir", text(&data)], &["another process has it mounted"]);
        let taken = try_mount(&two, &at("one"), &["--dir", text(&elsewhere)]);
        let remedy = format!("poolfs umount {} ", one.name());
        assert!(taken.code != 0 && taken.err.contains(&remedy), "whose mount it is: {taken:?}");
        // What one pool writes is no lower branch of another: it would show some of it, from its cache.
        let [around, written, part] = ["around", "around/written", "around/written/part"].map(|name| folder.join(name));
        fs::create_dir_all(&part).expect("a folder");
        let union = one.mount(&at("union"), &["--upper", text(&written), "--lower", text(&elsewhere)]);
        refused(
            &two,
            &["--upper", text(&upper), "--lower", text(&written)],
            &["the upper branch of what is mounted", &by],
        );
        refused(&two, &["--upper", text(&upper), "--lower", text(&part)], &[&by]);
        refused(&two, &["--upper", text(&upper), "--lower", text(&around)], &[&by]);
        drop(union);
        // Within one pool there is one cache.
        drop(one.mount_directory(&at("again"), &data));
        drop(mounted);

        // By name.
        let shared = ["--dir", text(&data), "--shared"];
        let mounts: Vec<Mounted> = [(&one, "one"), (&two, "two"), (&three, "three")]
            .into_iter()
            .map(|(pool, name)| pool.mount(&at(name), &shared))
            .collect();
        assert_eq!(fs::read_to_string(at("two").join("f")).expect("there"), "f");
        drop(mounts);
        let exec = |pool: &Pool, spec: &str| {
            fs::create_dir_all(at("exec")).expect("a mount point");
            let spec = format!("at={},dir={}{spec}", at("exec").display(), data.display());
            pool.poolfs(&["exec", pool.name(), "--mount", &spec, "--", "cat", text(&at("exec").join("f"))])
        };
        let mounted = one.mount(&at("one"), &shared);
        assert_ne!(exec(&two, "").code, 0);
        assert_eq!(exec(&two, ",shared=yes").expect("exec"), "f");
        drop(mounted);
        assert_eq!(exec(&two, "").expect("exec"), "f");
        drop(three);
    });
}

#[test]
fn what_a_pool_serves_is_served_by_another_only_when_it_says_so() {
    isolated("what_a_pool_serves_is_served_by_another_only_when_it_says_so", |folder| {
        let one = Pool::create(folder, "16M");
        let two = Pool::named(folder, &format!("{}-2", one.name()), "16M");
        let elsewhere = folder.join("elsewhere");
        let place = |name: &str| folder.join(name);
        for path in [place("data/inside"), place("lower"), place("alias"), elsewhere.clone()] {
            fs::create_dir_all(path).expect("a folder");
        }
        let three = Pool::named(&elsewhere, &format!("{}-3", one.name()), "16M");
        let mounted = one.mount_directory(&place("one"), &place("data"));
        let _ = shell(&format!("mount --bind {} {}", place("one").display(), place("alias").display())).expect("mount");
        let (known, unknown) = (format!("of pool {}", one.name()), "of a pool of another state directory".to_owned());
        for (pool, by) in [(&two, &known), (&three, &unknown)] {
            for name in ["one", "one/inside", "alias/inside"] {
                let directory = place(name);
                for stack in
                    [&["--dir", text(&directory)][..], &["--upper", text(&directory), "--lower", text(&place("lower"))]]
                {
                    let refused = try_mount(pool, &place("two"), stack);
                    let parts = ["it lies on a mount", by, &format!("{}-1", one.name()), "remedy"];
                    let is_told = parts.iter().all(|part| refused.err.contains(part));
                    assert!(refused.code == 1 && is_told, "{stack:?}: {refused:?}");
                }
                drop(pool.mount(&place("two"), &["--dir", text(&directory), "--shared"]));
            }
        }
        // Nothing is written to a lower branch.
        fs::create_dir(place("upper")).expect("a folder");
        drop(two.mount_union(&place("two"), &place("upper"), &[&place("one/inside")]));
        let _ = shell(&format!("umount {}", place("alias").display())).expect("umount");
        drop(mounted);
        drop(three);
    });
}

#[test]
fn a_directory_is_known_by_what_it_is_and_not_by_what_it_is_called() {
    isolated("a_directory_is_known_by_what_it_is_and_not_by_what_it_is_called", |folder| {
        let one = Pool::create(folder, "16M");
        let two = Pool::named(folder, &format!("{}-2", one.name()), "16M");
        let place = |name: &str| folder.join(name);
        for name in ["data/x/inside", "data/y", "other", "lower", "up", "alias", "alias-inside", "alias-data"] {
            fs::create_dir_all(place(name)).expect("a folder");
        }
        for (from, to) in [("data/x", "alias"), ("data/x/inside", "alias-inside"), ("data", "alias-data")] {
            let _ = run(Command::new("mount").arg("--bind").args([place(from), place(to)])).expect("mount --bind");
        }
        let refused = |pool: &Pool, stack: &[&str], part: &str| {
            let outcome = try_mount(pool, &place("refused"), stack);
            assert_ne!(outcome.code, 0, "{stack:?}: {outcome:?}");
            assert!(outcome.err.contains(part), "{stack:?}: {part} in {outcome:?}");
        };
        let directory = |name: &str| ["--dir".to_owned(), text(&place(name)).to_owned()];
        let union = |upper: &str, lower: &str| {
            ["--upper", text(&place(upper)), "--lower", text(&place(lower))].map(str::to_owned)
        };
        let apart = |stack: &[String], part: &str, pools: &[&Pool]| {
            let stack: Vec<&str> = stack.iter().map(String::as_str).collect();
            pools.iter().for_each(|pool| refused(pool, &stack, part));
        };
        let by = format!("by pool {}", one.name());

        // The same one, what it lies in, and what lies in it, by names that have nothing in common.
        let mounted = one.mount_directory(&place("one"), &place("data/x"));
        apart(&directory("alias"), "it is what is mounted", &[&two]);
        apart(&union("up", "alias"), &by, &[&two]);
        apart(&union("alias", "lower"), &by, &[&two]);
        apart(&directory("alias-inside"), "contains, or lies in", &[&one, &two]);
        apart(&union("alias-inside", "lower"), &by, &[&one, &two]);
        apart(&directory("alias-data"), "contains, or lies in", &[&one, &two]);
        apart(&union("up", "alias-data"), &by, &[&one, &two]);
        drop(mounted);
        // The other way round: the alias is there first.
        for (alias, same, inside, above) in
            [("alias", "data/x", "data/x/inside", "data"), ("alias-data/x", "data/x", "data/x/inside", "data")]
        {
            let mounted = one.mount_directory(&place("one"), &place(alias));
            apart(&directory(same), "it is what is mounted", &[&two]);
            apart(&directory(inside), "contains, or lies in", &[&one, &two]);
            apart(&directory(above), "contains, or lies in", &[&one, &two]);
            apart(&union("up", same), &by, &[&two]);
            apart(&union(inside, "lower"), &by, &[&one, &two]);
            drop(mounted);
        }
        let mounted = one.mount_union(&place("one"), &place("alias-inside"), &[&place("lower")]);
        apart(&directory("data/x"), "contains, or lies in", &[&one, &two]);
        apart(&union("data/x", "lower"), &by, &[&two]);
        apart(&union("data/x/inside", "lower"), "it is the upper branch", &[&one, &two]);
        let checked = one.poolfs(&["fsck", text(&place("data/x")), "--repair"]);
        assert!(checked.code == 8 && checked.err.contains("contains, or lies in"), "{checked:?}");
        drop(mounted);
        // Branches of one union.
        apart(&union("alias", "data/x"), "overlaps", &[&one]);
        apart(&union("alias-inside", "data/x"), "overlaps", &[&one]);
        apart(&union("up", &format!("data:{}", text(&place("alias-inside")))), "overlaps", &[&one]);

        // What is allowed by one name is by every name.
        let mounted = one.mount_union(&place("one"), &place("up"), &[&place("data/x")]);
        drop(two.mount_union(&place("two"), &place("lower"), &[&place("alias")]));
        drop(two.mount(&place("two"), &["--dir", text(&place("alias")), "--shared"]));
        drop(mounted);
        // What stands beside it is another one.
        let mounted = one.mount_directory(&place("one"), &place("alias"));
        drop(two.mount_directory(&place("two"), &place("alias-data/y")));

        // Moved, it is the same one, and what is at its place now is not.
        fs::rename(place("data/x"), place("other/moved")).expect("moved");
        fs::create_dir_all(place("data/x")).expect("a folder");
        drop(two.mount_directory(&place("two"), &place("data/x")));
        apart(&directory("other/moved"), "it is what is mounted", &[&two]);
        apart(&directory("other"), "contains, or lies in", &[&one, &two]);
        apart(&directory("other/moved/inside"), "contains, or lies in", &[&one, &two]);
        drop(mounted);
        drop(two.mount_directory(&place("two"), &place("other")));
    });
}

#[test]
fn what_lies_in_a_directory_is_known_behind_other_mounts_and_in_subvolumes() {
    isolated("what_lies_in_a_directory_is_known_behind_other_mounts_and_in_subvolumes", |folder| {
        let one = Pool::create(folder, "16M");
        let two = Pool::named(folder, &format!("{}-2", one.name()), "16M");
        // A subvolume in a directory, mounted by itself; its parent covered by a mount; and the top mounted nowhere but below that.
        let _ = shell(&format!(
            "set -eu; cd {}; truncate -s 256M img; mkfs.btrfs -q img; mkdir top sub beside; mount -o loop img top
             mkdir top/data; btrfs -q subvolume create top/data/sub >&2; mkdir top/data/sub/inside
             mount --bind top beside; mount -o subvol=data/sub \"$(findmnt -no SOURCE top)\" sub; mount -t tmpfs cover top/data",
            folder.display()
        ))
        .expect("a disk");
        let place = |name: &str| folder.join(name);
        let refused = |stack: &[&str]| {
            let outcome = try_mount(&two, &place("refused"), stack);
            assert!(outcome.code != 0 && outcome.err.contains("contains, or lies in"), "{stack:?}: {outcome:?}");
        };
        let mounted = one.mount_directory(&place("one"), &place("sub"));
        refused(&["--dir", text(&place("beside/data"))]);
        refused(&["--dir", text(&place("top"))]);
        refused(&["--dir", text(&place("sub/inside"))]);
        refused(&["--dir", text(&place("beside/data/sub/inside"))]);
        // What covers it is another filesystem.
        drop(two.mount_directory(&place("two"), &place("top/data")));
        drop(mounted);
        let mounted = one.mount_directory(&place("one"), &place("beside/data"));
        refused(&["--dir", text(&place("sub"))]);
        refused(&["--dir", text(&place("sub/inside"))]);
        drop(mounted);
        let _ = shell(&format!("cd {}; umount top/data sub beside top", folder.display())).expect("umount");
    });
}

#[test]
fn a_limit_that_a_mount_does_not_keep_is_told_of() {
    isolated("a_limit_that_a_mount_does_not_keep_is_told_of", |folder| {
        let pool = Pool::create(folder, "16M");
        let [at, upper, lower] = ["mnt", "upper", "lower"].map(|name| folder.join(name));
        for path in [&upper, &lower] {
            fs::create_dir(path).expect("a folder");
        }
        let says = |more: &[&str]| {
            let stack = [&["--upper", text(&upper), "--lower", text(&lower)], more].concat();
            let outcome = try_mount(&pool, &at, &stack);
            assert_eq!(outcome.code, 0, "{outcome:?}");
            let _ = pool.poolfs(&["umount", pool.name(), text(&at)]).expect("umount");
            outcome.err
        };
        assert_eq!(says(&[]), "");
        assert_eq!(says(&["--upper-size", "50M"]), "");
        assert_eq!(says(&["--upper-size", "60M"]), "");
        let told = says(&[]);
        let parts = ["had a limit of 60.0 MiB", &format!("--upper-size {}", 60 << 20), text(&upper)];
        assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        assert_eq!(says(&[]), "", "it is told once");
        let checked = pool.poolfs(&["fsck", text(&upper), "--lower", text(&lower)]);
        assert_eq!(checked.code, 0, "{checked:?}");
    });
}

#[test]
fn a_pool_with_more_than_the_host_has_is_refused() {
    isolated("a_pool_with_more_than_the_host_has_is_refused", |folder| {
        let pool = Pool::create(folder, "16M");
        for (options, part) in [
            (&["--memory", "1000T"][..], "more than the host's"),
            (&["--cpus", "8000"], "not online"),
            (&["--memory", "512M", "--cache", "512M"], "of memory at least"),
        ] {
            let outcome = pool.poolfs(&[&["pool", "create", "other"], options].concat());
            assert!(outcome.code != 0 && outcome.err.contains(part), "{options:?}: {outcome:?}");
        }
        assert_eq!(pool.poolfs(&["pool", "ls", "--json"]).expect("pool ls").matches("\"name\"").count(), 1);
    });
}

#[test]
fn control_groups_are_those_of_one_state_directory() {
    isolated("control_groups_are_those_of_one_state_directory", |folder| {
        let [first, second] = ["first", "second"].map(|name| folder.join(name));
        for path in [&first, &second] {
            fs::create_dir_all(path.join("data")).expect("a folder");
        }
        let name = name_of(folder);
        let one = Pool::named(&first, &name, "16M");
        // With sockets of its own it learns of the other by the groups only.
        let two = |arguments: &[&str]| {
            let mut command = Command::new(program("poolfs"));
            command.arg("--state").arg(second.join("state")).arg("--run-dir").arg(second.join("run"));
            run(command.args(arguments))
        };
        let create = || two(&["pool", "create", &name, "--memory", "1G", "--cache", "16M"]);
        let _ = create().expect("pool create");
        let mounted = one.mount_directory(&first.join("mnt"), &first.join("data"));
        let outlives = one.poolfs(&["exec", &name, "--", "sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"]);
        let outlives = outlives.expect("exec").trim().to_owned();
        let refused = |outcome: &Outcome, parts: &[&str]| {
            assert_ne!(outcome.code, 0, "{outcome:?}");
            assert!(parts.iter().all(|part| outcome.err.contains(part)), "{parts:?} in {outcome:?}");
        };
        fs::create_dir(second.join("mnt")).expect("a mount point");
        let mount = || two(&["mount", &name, text(&second.join("mnt")), "--dir", text(&second.join("data"))]);
        refused(&mount(), &["are those of the pool of this name in", text(&first.join("state"))]);
        refused(&two(&["exec", "--fuse", &name, "--", "true"]), &["are those of the pool of this name in"]);
        // It has nothing that could be killed.
        let _ = two(&["pool", "rm", "--force", &name]).expect("pool rm --force");
        refused(&create(), &["are those of the pool of this name in", "choose another name"]);

        // Moved it is the same one; to who looks where it was it is gone.
        fs::rename(first.join("state"), first.join("moved")).expect("moved");
        refused(&create(), &["run processes of a pool whose state directory", "is not there", &outlives]);
        fs::create_dir(first.join("state")).expect("a folder");
        refused(&create(), &["is not there", &outlives]);
        fs::remove_dir(first.join("state")).expect("removed");
        fs::rename(first.join("moved"), first.join("state")).expect("moved");
        drop(mounted);
        refused(&create(), &["are those of the pool of this name in"]);
        assert!(Path::new("/proc").join(&outlives).exists(), "what runs in it was killed");
        let ended = format!("kill -9 {outlives}; while kill -0 {outlives} 2> /dev/null; do sleep 0.02; done");
        let _ = shell(&ended).expect("it is ours");
        drop(one);
        let _ = create().expect("pool create");
        let _ = mount().expect("mount");
        let _ = two(&["umount", &name, text(&second.join("mnt"))]).expect("umount");
    });
}

#[test]
fn a_part_of_a_union_is_not_mounted_by_its_own_pool() {
    isolated("a_part_of_a_union_is_not_mounted_by_its_own_pool", |folder| {
        let pool = Pool::create(folder, "16M");
        let [upper, lower, data, at] = ["upper", "lower", "data", "at"].map(|name| folder.join(name));
        for path in [&upper, &lower, &data, &at] {
            fs::create_dir_all(path.join("part")).expect("a folder");
        }
        let refused = |remedy: &str| {
            let refused = try_mount(&pool, &folder.join("refused"), &["--dir", text(&at.join("part"))]);
            let is_told = refused.err.contains("it is served by this pool itself") && refused.err.contains(remedy);
            assert!(refused.code == 2 && is_told, "{refused:?}");
        };
        let union = pool.mount_union(&at, &upper, &[&lower]);
        refused("remedy: use it where it is");
        drop(union);
        let _directory = pool.mount_directory(&at, &data);
        refused("remedy: name the directory behind it");
    });
}

#[test]
fn an_import_that_fails_names_the_image() {
    isolated("an_import_that_fails_names_the_image", |folder| {
        let pool = Pool::create(folder, "16M");
        for (source, code) in [("tar:/nowhere.tar", "file"), ("zip:/tmp", "usage")] {
            let failed = pool.poolfs(&["--json", "image", "import", "small", source]);
            let told: serde_json::Value = serde_json::from_str(&failed.err).expect("JSON");
            assert_eq!(
                (&told["error"]["thing"], &told["error"]["code"]),
                (&"image small".into(), &code.into()),
                "{told}"
            );
        }
    });
}

#[test]
fn an_image_in_use_is_removed_only_by_force() {
    isolated("an_image_in_use_is_removed_only_by_force", |folder| {
        let pool = Pool::create(folder, "16M");
        import_small(&pool, folder, "small", &[], |_| {});
        let run = |name: &str, more: &[&str]| {
            let _ = pool.poolfs(&[&["run", pool.name(), "small", "--name", name], more].concat()).expect("run");
        };
        run("ended", &["--", "/bin/sh", "-c", ":"]);
        run("runs", &["-d", "--", "/bin/sleep", "600"]);
        let refused = pool.poolfs(&["image", "rm", "small"]);
        assert!(refused.code != 0 && refused.err.contains("ended, runs"), "{refused:?}");
        let _ = pool.poolfs(&["stop", "runs", "--time", "0"]).expect("stop");
        let refused = pool.poolfs(&["image", "rm", "small"]);
        assert!(refused.code != 0 && refused.err.contains("ended, runs"), "{refused:?}");
        let _ = pool.poolfs(&["image", "rm", "small", "--force"]).expect("image rm --force");
        // What it wrote can still be looked at: the layers are there.
        let _ = pool.poolfs(&["diff", pool.name(), "ended"]).expect("diff");
        for name in ["ended", "runs"] {
            let _ = pool.poolfs(&["rm", name]).expect("rm");
        }
        import_small(&pool, folder, "small", &[], |_| {});
        let _ = pool.poolfs(&["image", "rm", "small"]).expect("image rm");
    });
}

#[test]
fn failures_have_the_codes_and_the_exit_statuses_of_the_documents() {
    isolated("failures_have_the_codes_and_the_exit_statuses_of_the_documents", |folder| {
        let pool = Pool::create(folder, "16M");
        let fails = |arguments: &[&str], code: &str, status: i32| {
            let outcome = pool.poolfs(&[&["--json"], arguments].concat());
            let last = outcome.err.lines().last().unwrap_or_default();
            let told: serde_json::Value = serde_json::from_str(last).unwrap_or_default();
            assert_eq!(
                (told["error"]["code"].as_str(), outcome.code),
                (Some(code), status),
                "{arguments:?}: {outcome:?}"
            );
        };
        fails(&["pool", "create", "bad/name"], "usage", 2);
        fails(&["pool", "create", "other", "--memory", "3"], "usage", 2);
        fails(&["pool", "create", "other", "--cpus", "8000"], "usage", 2);
        fails(&["exec", pool.name(), "--mount", "x=y", "--", "true"], "usage", 2);
        fails(&["rm", "absent"], "not-found", 1);
        fails(&["exec", pool.name(), "--", "/absent"], "not-found", 127);
        import_small(&pool, folder, "small", &[], |_| {});
        for memory in ["1K", "0", "1000G"] {
            fails(&["run", pool.name(), "small", "--memory", memory], "usage", 2);
        }
        fails(&["why", "4194305"], "not-found", 1);
        fails(&["trace", pool.name(), "--seconds", "1"], "not-found", 1);
        let idle = pool.poolfs(&["trace", pool.name(), "--seconds", "1"]);
        assert!(idle.err.contains("its service is not running"), "{idle:?}");
        fails(&["mount", pool.name(), "/mnt", "--upper", "/tmp"], "usage", 2);
        for more in [&["--rm"][..], &["--rm", "-d"]] {
            let run = [&["run", pool.name(), "small"], more, &["--", "/absent"]].concat();
            fails(&run, "not-found", 127);
        }
        let [at, upper, lower] = ["mnt", "upper", "lower"].map(|name| folder.join(name));
        fs::create_dir_all(&upper).and_then(|()| fs::create_dir_all(&lower)).expect("folders");
        fs::write(lower.join("f"), "f").expect("written");
        let mounted = pool.mount(&at, &["--upper", text(&upper), "--lower", text(&lower)]);
        let user = fs::File::open(at.join("f")).expect("there");
        fails(&["umount", pool.name(), text(&at)], "in-use", 1);
        drop(user);
        let other = folder.join("other");
        fs::create_dir(&other).expect("a folder");
        fails(&["mount", pool.name(), text(&other), "--dir", text(&lower)], "in-use", 1);
        fails(&["fsck", text(&upper)], "in-use", 8);
        let used = pool.poolfs(&["fsck", text(&upper)]);
        let parts = [pool.name(), &format!("poolfs umount {} {}", pool.name(), text(&at))];
        assert!(parts.iter().all(|part| used.err.contains(part)), "{used:?}");
        fails(&["fsck", text(&at)], "usage", 8);
        let served = pool.poolfs(&["fsck", text(&at)]);
        let parts = ["it is the mount of the instance", &format!("poolfs fsck {}", text(&upper)), "poolfs umount"];
        assert!(parts.iter().all(|part| served.err.contains(part)), "{served:?}");
        drop(mounted);
    });
}

#[test]
fn an_upper_branch_that_keeps_no_marks_is_refused_and_no_trap_for_the_next_mount() {
    isolated("an_upper_branch_that_keeps_no_marks_is_refused_and_no_trap_for_the_next_mount", |folder| {
        let _foreign = Foreign::mount(folder);
        let [at, upper, lower] = ["mnt", "foreign/upper", "lower"].map(|name| folder.join(name));
        fs::create_dir(&upper).and_then(|()| fs::create_dir(&lower)).expect("folders");
        let pool = Pool::create(folder, "64M");
        for _ in 0..2 {
            let refused = try_mount(&pool, &at, &["--upper", text(&upper), "--lower", text(&lower)]);
            let parts = ["its filesystem does not keep the attribute trusted.overlay.opaque", text(&upper)];
            assert!(refused.code == 1 && parts.iter().all(|part| refused.err.contains(part)), "{refused:?}");
        }
    });
}
