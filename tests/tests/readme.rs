//! The commands of README.md, run as they are written.

use poolfs_tests::{Outcome, Pool, isolated, name_of, program, run_within, workspace};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Commands that go on until somebody ends them; `timeout` ends them as Ctrl-C does.
const ENDLESS: &str = "--watch";
const LIMIT: Duration = Duration::from_secs(300);

/// The commands of the section, one a line, without what is said of them.
fn commands(readme: &str, section: &str) -> Vec<String> {
    let text = readme.split("\n## ").find(|part| part.starts_with(section)).expect("the section is there");
    let lines = text.lines().filter_map(|line| line.strip_prefix("    "));
    let bare = lines.map(|line| line.split(" # ").next().unwrap_or(line).trim().to_owned());
    bare.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

/// A command as the test has it run: with places and names of its own.
fn own(command: &str, folder: &Path, pool: &str) -> String {
    let folder = folder.display();
    let state = format!("./poolfs --state {folder}/state");
    let image = workspace().join(".poolfs-demo/root.tar").display().to_string();
    let line = command.replace("../../.poolfs-demo/root.tar", &image).replace("./poolfs", &state);
    let line = line.replace("/tmp/up", &format!("{folder}/up")).replace("/tmp/low", &format!("{folder}/low"));
    let line = line.replace("/mnt/", &format!("{folder}/mnt-")).replace("alice", pool);
    if line.contains(ENDLESS) { format!("timeout --preserve-status -s INT 12 {line}") } else { line }
}

#[test]
fn five_minutes_are_as_the_readme_says() {
    isolated("five_minutes_are_as_the_readme_says", |folder| {
        let readme = std::fs::read_to_string(workspace().join("README.md")).expect("readable");
        let pool = name_of(folder);
        let commands = commands(&readme, "Five minutes");
        assert_eq!(commands[0], "make build && cd target/release");
        assert!(commands.len() > 20, "{commands:#?}");
        let directory = program("poolfs").parent().expect("a folder").to_path_buf();
        let type_in = |command: &str| -> Outcome {
            let line = own(command, folder, &pool);
            let mut shell = Command::new("sh");
            run_within(shell.args(["-c", &line]).current_dir(&directory), LIMIT)
        };
        for command in &commands[1..] {
            let said = type_in(command);
            let code = if command.contains(ENDLESS) { 130 } else { 0 };
            assert_eq!(said.code, code, "{command}\n{}\n{}", said.out, said.err);
            let is_as_told = match command.as_str() {
                line if line.contains("tail -n 1") => said.out == "100000\n",
                line if line.contains("POOLFS_REPORT") => said.err.contains(" library."),
                line if line.contains("print(42)") => said.out == "42\n",
                line if line.contains("-- id") => said.out.contains("uid=0(root)"),
                _ => true,
            };
            assert!(is_as_told, "{command}\n{}\n{}", said.out, said.err);
            if command.contains("exec") && command.contains("tail -n 1") {
                assert!(reads_by_the_library(&type_in("./poolfs status alice --json").out) > 0, "{command}");
            }
        }
    });
}

/// Reads of an instance that the library made, in `status --json`.
fn reads_by_the_library(status: &str) -> u64 {
    let status: serde_json::Value = serde_json::from_str(status).expect("JSON");
    let reads = &status["service"]["instances"][0]["reads"];
    reads["library"].as_u64().expect("a number") + reads["direct"].as_u64().expect("a number")
}

#[test]
fn usage_errors_are_json_and_pipes_have_no_colours() {
    isolated("usage_errors_are_json_and_pipes_have_no_colours", |folder| {
        let pool = Pool::create(folder, "16M");
        let code = |arguments: &[&str]| {
            let said = pool.poolfs(arguments);
            let error: serde_json::Value = serde_json::from_str(&said.err).unwrap_or_else(|_| panic!("{}", said.err));
            (said.code, error["error"]["code"].as_str().expect("a code").to_owned())
        };
        assert_eq!(code(&["--json", "mount", "x"]), (2, "usage".to_owned()));
        assert_eq!(code(&["pool", "create", "--json", "x", "--memory", "lots"]), (2, "usage".to_owned()));
        assert_eq!(code(&["--json", "nonsense"]), (2, "usage".to_owned()));
        // Without a command: the help is for people, and some commands for poolfs itself.
        for arguments in [&["--json"][..], &["--json", "pool"]] {
            assert_eq!(code(arguments), (2, "usage".to_owned()));
            assert!(!pool.poolfs(arguments).err.contains("__"), "{arguments:?}");
        }
        assert_eq!(code(&["--json", "pool", "rm", "nowhere"]), (1, "not-found".to_owned()));
        let text = pool.poolfs(&["exec", "--nonsense", "--", "ls", "--json"]);
        assert!(text.code == 2 && text.err.starts_with("error:"), "{}", text.err);
        // What the command logs, with nobody at a terminal.
        let mut logging = pool.command();
        let said = run_within(logging.args(["pool", "ls"]).env("POOLFS_LOG", "trace"), LIMIT);
        assert!(said.code == 0 && !said.err.contains('\u{1b}') && !said.out.contains('\u{1b}'), "{said:?}");
    });
}
