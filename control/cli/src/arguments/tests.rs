//! Tests of what the command line takes and refuses.

use super::*;
use clap::CommandFactory;
use std::path::Path;

fn parse(line: &str) -> Result<Arguments, clap::Error> {
    Arguments::try_parse_from(line.split(' '))
}

#[test]
fn the_command_line_is_consistent() {
    Arguments::command().debug_assert();
}

#[test]
fn every_form_is_understood() {
    for line in [
        "poolfs pool create web --cpus 0-1 --memory 2G --cache 512M",
        "poolfs pool ls --json",
        "poolfs pool rm web --force",
        "poolfs mount web /mnt --dir /data",
        "poolfs mount web /mnt --dir /data --shared",
        "poolfs mount web /mnt --dir /data --coherence timed:1s",
        "poolfs mount web /mnt --dir ceph:/data --consistency strict",
        "poolfs image rm debian --force",
        "poolfs mount web /mnt --upper /u --lower /l1:/l2",
        "poolfs mount web /mnt --upper /u --lower /l1 --lower /l2 --suid --dev",
        "poolfs umount web /mnt",
        "poolfs umount web /mnt --force",
        "poolfs rm --force c",
        "poolfs diff web /mnt",
        "poolfs diff web c --blocks --json",
        "poolfs commit web c image:2",
        "poolfs flatten web /mnt",
        "poolfs exec -- ls -l",
        "poolfs exec web --mount at=/a,dir=/b --mount at=/c,upper=/u,lower=/l --fuse -- sh -c true",
        "poolfs image import debian oci:/x:v1",
        "poolfs image import debian tar:/x --to ceph:/images --ceph-conf /c --ceph-user u --ceph-keyring /k",
        "poolfs image add debian --from ceph:/images --ceph-fs f",
        "poolfs run web debian --name n --env A=B --memory 100M --legacy -i -t -d --rm -- sh",
        "poolfs run web debian -it",
        "poolfs run web debian --init -- sh",
        "poolfs run web debian --userns 0:100000:65536 --userns 70000:5:1 -- sh",
        "poolfs ps --state /tmp/s",
        "poolfs status web",
        "poolfs status web --wait 2",
        "poolfs status --watch",
        "poolfs status web --watch 5 --json",
        "poolfs trace web",
        "poolfs trace web --slower 10ms --seconds 60 --json",
        "poolfs trace web --summary",
        "poolfs why 42",
        "poolfs why 42 3 --json",
        "poolfs doctor",
        "poolfs demo --root-image root.tar --work w",
    ] {
        parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
}

/// The help of a command and of all below it.
fn help(command: &mut clap::Command, text: &mut String) {
    *text += &command.render_long_help().to_string();
    command.get_subcommands_mut().filter(|below| !below.is_hide_set()).for_each(|below| help(below, text));
}

/// What is before the tests of each source file, by the file's name.
fn read_sources(directory: &Path, sources: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(directory).expect("listed") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            read_sources(&path, sources);
        } else {
            let text = std::fs::read_to_string(&path).expect("read");
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            sources.push((name, text.split("#[cfg(test)]\nmod tests").next().expect("a part").to_owned()));
        }
    }
}

#[test]
fn help_lists_what_messages_tell_to_use() {
    let mut text = String::new();
    help(&mut Arguments::command(), &mut text);
    let mut sources = Vec::new();
    read_sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut sources);
    // What is understood, and what tests say, is no message.
    sources.retain(|(name, _)| !["arguments.rs", "tests.rs"].contains(&name.as_str()));
    assert!(sources.len() > 30, "{}", sources.len());
    let mut found = 0;
    for (name, line) in sources.iter().flat_map(|(name, source)| source.lines().map(move |line| (name, line))) {
        // What is passed to other programs, and what the tests write, is no message.
        let is_message = line.contains('"') && !line.contains(".arg") && !line.contains("cargo build");
        for word in line.split(|c: char| !c.is_ascii_lowercase() && c != '-').filter(|_| is_message) {
            if word.len() > 3 && word.starts_with("--") {
                assert!(text.contains(word), "{word} in {name}: {line}");
                found += 1;
            }
        }
    }
    assert!(found > 5 && text.contains("upper-format=FORMAT"), "{found}");
}

#[test]
fn wrong_combinations_are_refused() {
    for line in [
        "poolfs mount web /mnt",
        "poolfs mount web /mnt --upper /u",
        "poolfs mount web /mnt --upper /u --lower /l --shared",
        "poolfs mount web /mnt --upper /u --lower /l --coherence timed:1s",
        "poolfs mount web /mnt --dir /data --shared --coherence timed:1s",
        "poolfs mount web /mnt --dir ceph:/data --consistency strict --coherence timed:1s",
        "poolfs mount web /mnt --upper ceph:/u --lower ceph:/l --consistency close-to-open",
        "poolfs mount web /mnt --dir /data --coherence timed",
        "poolfs mount web /mnt --dir /d --upper /u --lower /l",
        "poolfs exec web",
        "poolfs pool create web --memory lots",
        "poolfs trace web --slower 10",
        "poolfs trace web --seconds 0",
        "poolfs run web debian --userns 0:100000",
        "poolfs run web debian --userns 0:4294967295:2",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn a_branch_that_is_missing_is_named_alone() {
    for (line, missing) in [
        ("poolfs mount web /mnt --upper /u", "--lower"),
        ("poolfs mount web /mnt --lower /l", "--upper"),
        ("poolfs mount web /mnt", "--dir"),
    ] {
        let told = parse(line).expect_err("one is missing").to_string();
        let named: Vec<&str> = told.lines().filter(|line| line.starts_with("  --")).collect();
        assert!(matches!(named[..], [one] if one.contains(missing)), "{told}");
    }
}
