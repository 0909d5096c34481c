//! Writes the tables of docs/suites.md and, for pjdfstest, of docs/semantics.md.

use crate::ask;
use crate::suite::{Suite, names};
use crate::target::Target;
use poolfs_tests::workspace;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;

const SUITES: &str = "docs/suites.md";
const SEMANTICS: &str = "docs/semantics.md";
/// Between this line and the next heading stands what this program writes into docs/semantics.md.
const JUDGED: &str = "## pjdfstest, case by case";
const JUDGE: &str = "pjdfstest";

fn text(result: &Value) -> &str {
    result["text"].as_str().unwrap_or_default()
}

/// The last line of what a suite printed sums it up.
fn summary(result: &Value) -> &str {
    text(result).lines().last().unwrap_or("(nothing)")
}

/// What is wrong with a run compared with that on the disk.
fn differences(disk: &Value, result: &Value, target: Target) -> Vec<String> {
    let mut found = Vec::new();
    if result["code"] != disk["code"] {
        found.push(format!("ended with {} instead of {}", result["code"], disk["code"]));
    }
    let (expected, got): (Vec<&str>, Vec<&str>) = (text(disk).lines().collect(), text(result).lines().collect());
    let (expected_set, got_set): (BTreeSet<_>, BTreeSet<_>) = (expected.iter().collect(), got.iter().collect());
    found.extend(got.iter().filter(|line| !expected_set.contains(line)).map(|line| format!("+ {line}")));
    found.extend(expected.iter().filter(|line| !got_set.contains(line)).map(|line| format!("- {line}")));
    if found.is_empty() && expected != got {
        found.push("the same lines in another order".to_owned());
    }
    let requests = result["requests"].as_u64().unwrap_or(0);
    match target {
        Target::Library if requests == 0 => found.push("no request came by the library".to_owned()),
        Target::Fuse if requests > 0 => found.push(format!("{requests} requests came by the library")),
        _ => {}
    }
    found
}

/// Prints how a suite went and puts it into the tables. Whether it went the same everywhere, and well on the disk.
pub fn report(suite: &Suite, results: &[(Target, Value)]) -> bool {
    let disk = &results[0].1;
    let mut good = disk["code"] == 0;
    if !good {
        println!("{} failed on the disk, see target/suites/{}-disk.err:\n{}", suite.name, suite.name, text(disk));
    }
    let mut row = format!("| {} | {} | {} |", suite.name, suite.about, suite.version());
    let seconds = |result: &Value| result["seconds"].as_f64().unwrap_or(0.0);
    let _ = write!(row, " {}{}, {:.0} s |", if good { "" } else { "FAILED: " }, summary(disk), seconds(disk));
    for (target, result) in results.iter().filter(|(target, _)| matches!(target, Target::Fuse | Target::Library)) {
        let differences = differences(disk, result, *target);
        let verdict = if differences.is_empty() { "same" } else { "DIFFERS" };
        let _ = write!(row, " {verdict}, {:.0} s |", seconds(result));
        if !differences.is_empty() {
            good = false;
            println!("{} by {} differs from the disk:\n  {}", suite.name, target.name(), differences.join("\n  "));
        }
    }
    let requests = results.iter().find(|(target, _)| *target == Target::Library);
    let _ = write!(row, " {} |", requests.map_or(0, |(_, result)| result["requests"].as_u64().unwrap_or(0)));
    println!("{row}");
    write_row(&suite.name, &row);
    if suite.name == JUDGE {
        write_judged(suite, results);
    }
    good
}

/// Replaces the suite's row; the others stay.
fn write_row(name: &str, row: &str) {
    let path = workspace().join(SUITES);
    let known = names();
    let mut rows: BTreeMap<String, String> = fs::read_to_string(&path)
        .unwrap_or_default()
        .lines()
        .filter_map(|line| {
            let name = line.strip_prefix("| ")?.split(' ').next()?;
            known.iter().any(|suite| suite == name).then(|| (name.to_owned(), line.to_owned()))
        })
        .collect();
    rows.insert(name.to_owned(), row.to_owned());
    let machine =
        ask("echo \"$(nproc) CPUs, Linux $(uname -r | cut -d- -f1), $(. /etc/os-release; echo $PRETTY_NAME)\"");
    let disk = ask("findmnt -n -o FSTYPE -T /tmp");
    let mut page = format!(
        "# Long program lists\n\nWritten by `make suites` (one of them: `make suites ONLY=NAME`). Each list runs in a fresh directory on the machine's disk ({disk}), on a union of\n\
         poolfs by FUSE (`poolfs exec --fuse`) and by the library (`poolfs exec`), and prints a summary without times and random names. \"same\": exit code and every line of the\n\
         summary are those of the disk, and the library was at work exactly where it should be. The lists are `tests/suites/NAME.sh`.\n\n\
         Machine: {machine}. The pool has 2 GiB of memory, 256 MiB of them cache.\n\n\
         | suite | what it does | version | disk | FUSE | library | requests by the library |\n|---|---|---|---|---|---|---|\n"
    );
    for row in rows.values() {
        page += row;
        page.push('\n');
    }
    fs::write(path, page).expect("docs/suites.md");
}

/// The table of every filesystem pjdfstest ran on, with the cases that fail somewhere.
fn write_judged(suite: &Suite, results: &[(Target, Value)]) {
    let failed: Vec<BTreeSet<&str>> = results
        .iter()
        .map(|(_, result)| text(result).lines().filter_map(|line| line.strip_prefix("FAILED ")).collect())
        .collect();
    let heads: Vec<String> = results.iter().map(|(target, _)| target.name().to_owned()).collect();
    let mut part = format!(
        "{JUDGED}\n\nWritten by `make suites ONLY={JUDGE}` (pjdfstest {}, as root; \"disk\" is the ext4 below all others, \"fuse\" and \"library\" are the two paths\nof poolfs). Not counted is `link::link_count_max`, which only runs where libc knows the most links by the filesystem's type: on ext4.\n\n| cases | {} |\n|---|{}\n",
        suite.version(),
        heads.join(" | "),
        "---|".repeat(heads.len())
    );
    let sums: Vec<&str> = results.iter().map(|(_, result)| summary(result)).collect();
    let _ = writeln!(part, "| all | {} |", sums.join(" | "));
    // Cases that fail on the same filesystems stand together.
    let mut groups: BTreeMap<Vec<bool>, Vec<String>> = BTreeMap::new();
    for case in failed.iter().flatten().copied().collect::<BTreeSet<&str>>() {
        let where_: Vec<bool> = failed.iter().map(|failed| failed.contains(case)).collect();
        groups.entry(where_).or_default().push(format!("`{case}`"));
    }
    for (where_, cases) in groups {
        let cells: Vec<&str> = where_.iter().map(|&fails| if fails { "fail" } else { "pass" }).collect();
        let _ = writeln!(part, "| {}: {} | {} |", cases.len(), cases.join(" "), cells.join(" | "));
    }
    let path = workspace().join(SEMANTICS);
    let page = fs::read_to_string(&path).expect("docs/semantics.md");
    fs::write(path, with_part(&page, JUDGED, &part)).expect("docs/semantics.md");
}

/// `page` with the part under the heading `heading` replaced, or added at the end.
fn with_part(page: &str, heading: &str, part: &str) -> String {
    let Some(start) = page.find(heading) else { return format!("{}\n\n{part}", page.trim_end()) };
    let rest = &page[start + heading.len()..];
    let end = rest.find("\n## ").map_or("", |end| &rest[end..]);
    format!("{}{part}{end}", &page[..start])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(code: i32, text: &str, requests: u64) -> Value {
        json!({ "code": code, "text": text, "seconds": 1.0, "requests": requests })
    }

    #[test]
    fn every_difference_is_found() {
        let disk = run(0, "a\nb\n", 0);
        assert!(differences(&disk, &run(0, "a\nb\n", 7), Target::Library).is_empty());
        assert!(differences(&disk, &run(0, "a\nb\n", 0), Target::Fuse).is_empty());
        for (other, target) in [
            (run(0, "a\nb\n", 0), Target::Library),
            (run(0, "a\nb\n", 1), Target::Fuse),
            (run(1, "a\nb\n", 7), Target::Library),
            (run(0, "b\na\n", 7), Target::Library),
            (run(0, "a\n", 7), Target::Library),
            (run(0, "a\nb\nb\n", 7), Target::Library),
            (run(0, "a\nc\n", 7), Target::Library),
        ] {
            assert!(!differences(&disk, &other, target).is_empty(), "{other}");
        }
    }

    #[test]
    fn a_part_of_a_page_is_replaced_alone() {
        let once = with_part("# A\n\ntext\n", "## P", "## P\n\none\n");
        assert_eq!(once, "# A\n\ntext\n\n## P\n\none\n");
        let more = format!("{once}\n## Q\n\nmore\n");
        assert_eq!(with_part(&more, "## P", "## P\n\ntwo\n"), "# A\n\ntext\n\n## P\n\ntwo\n\n## Q\n\nmore\n");
    }
}
