//! The harness itself: what a test has of its own stays its own.

use poolfs_tests::{PRIVATE_RUN, isolated};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

#[test]
fn sockets_of_a_namespace_stay_when_the_directory_outside_is_removed() {
    isolated("sockets_of_a_namespace_stay_when_the_directory_outside_is_removed", |_| {
        let script = format!("{PRIVATE_RUN} && touch /run/poolfs/socket && echo ready && read -r go; ls /run/poolfs");
        let mut inside = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-euc", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare runs");
        let mut output = BufReader::new(inside.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("readable");
        assert_eq!(line, "ready\n");
        // As the last command of a pool does, out here.
        std::fs::remove_dir("/run/poolfs").expect("nothing is in it");
        writeln!(inside.stdin.take().expect("piped"), "go").expect("it reads");
        line.clear();
        output.read_line(&mut line).expect("readable");
        assert!(inside.wait().expect("it is ours").success());
        assert_eq!(line, "socket\n");
    });
}
