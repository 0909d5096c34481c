//! Text output and its units: sizes, times, counts, tables, messages on standard error.

use crate::failure::{Failure, Result};
use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Whether standard error is for programs.
static IS_JSON: AtomicBool = AtomicBool::new(false);

/// From here on every line on standard error is a JSON object.
pub fn complain_as_json() {
    IS_JSON.store(true, Ordering::Relaxed);
}

/// Understand a size: bytes, or with `K`, `M`, `G` or `T` (powers of 1024).
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(format!("{text:?} is no size: write a number and K, M, G or T, as in 512M")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text:?} is no size: write a whole number and K, M, G or T, as in 512M"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is too large"))
}

/// A path as it is written in a command that is to be pasted into a shell.
pub fn pasted(path: &Path) -> String {
    let text = path.display().to_string();
    // No path has a byte 0, which is all that cannot be quoted.
    shlex::try_quote(&text).map_or_else(|_| text.clone(), |quoted| quoted.into_owned())
}

/// Least limit of an upper branch: what it holds by itself has to fit.
pub const UPPER_SIZE_MIN: u64 = 1 << 20;

/// Understand the limit of an upper branch, a size.
pub fn parse_upper_size(text: &str) -> std::result::Result<u64, String> {
    match parse_size(text)? {
        bytes if bytes < UPPER_SIZE_MIN => Err(format!("{text:?} is too small: write 1M or more")),
        bytes => Ok(bytes),
    }
}

/// Understand a time: a number with `us`, `ms` or `s`.
pub fn parse_duration(text: &str) -> std::result::Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "us" => Duration::from_micros,
        "ms" => Duration::from_millis,
        "s" => Duration::from_secs,
        _ => return Err(format!("{text:?} is no time: write a number and us, ms or s, as in 10ms")),
    };
    digits.parse().map(unit).map_err(|_| format!("{text:?} is no time: write it as in 10ms"))
}

/// A size with a unit, three digits or so.
pub fn size(bytes: u64) -> String {
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1024.0 && unit < 4 {
        value /= 1024.0;
        unit += 1;
    }
    let unit_name = ["B", "KiB", "MiB", "GiB", "TiB"][unit];
    if unit == 0 || value >= 100.0 { format!("{value:.0} {unit_name}") } else { format!("{value:.1} {unit_name}") }
}

/// The same, rounded up to what can be written as a size: for the least that will do.
pub fn least_size(bytes: u64) -> String {
    let (shift, unit) = match bytes {
        0..1024 => return format!("{bytes} B"),
        1024..0x10_0000 => (10, "KiB"),
        _ => (20, "MiB"),
    };
    format!("{} {unit}", bytes.div_ceil(1 << shift))
}

/// A duration in nanoseconds with a unit.
pub fn duration(nanoseconds: u64) -> String {
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.1} us", nanoseconds as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", nanoseconds as f64 / 1e6),
        _ => format!("{:.1} s", nanoseconds as f64 / 1e9),
    }
}

/// How long something is ago.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Text in which strangers (images, containers' commands) may have hidden what steers terminals.
pub fn plain(text: &str) -> String {
    let one = |c: char| if c.is_control() && c != '\n' { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(one).collect()
}

/// A number of things, in the right form.
pub fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A table with these headings.
pub fn table(headings: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings.iter().map(|heading| heading.to_uppercase()));
    table
}

/// Write to standard output, [`plain`]; a reader that has gone away is no failure of ours.
pub fn print(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    match output.write_all(plain(text).as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new("standard output", error, "check where the output goes"))
        }
        _ => Ok(()),
    }
}

/// Whether standard output is a pipe that nobody reads any more: writing to it would be no failure, but for nobody.
pub fn reader_is_gone() -> bool {
    let stdout = std::io::stdout();
    let mut output = [rustix::event::PollFd::new(&stdout, rustix::event::PollFlags::empty())];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut output, Some(&now)).is_ok_and(|ready| ready > 0)
        && output[0].revents().intersects(rustix::event::PollFlags::ERR | rustix::event::PollFlags::HUP)
}

/// Write a line to standard error, whether anybody listens there or not; for programs as `{"note": LINE}`.
pub fn complain(line: &str) {
    let line = if IS_JSON.load(Ordering::Relaxed) { note(line) } else { line.to_owned() };
    let _ = writeln!(std::io::stderr(), "{}", plain(&line));
}

/// The same of a pool whose service is in this state now; for programs as `{"note": LINE, "pool": POOL, "state": STATE}`.
pub fn complain_of_state(pool: &str, state: &str, line: &str) {
    let text = format!("poolfs: pool {pool}: {line}");
    if !IS_JSON.load(Ordering::Relaxed) {
        return complain(&text);
    }
    let object = serde_json::json!({"note": text.trim_start_matches("poolfs: "), "pool": pool, "state": state});
    let _ = writeln!(std::io::stderr(), "{}", plain(&object.to_string()));
}

fn note(line: &str) -> String {
    serde_json::json!({"note": line.trim_start_matches("poolfs: ")}).to_string()
}

/// Say on standard error why the command fails.
pub fn complain_of(failure: &Failure) {
    let text = if IS_JSON.load(Ordering::Relaxed) { failure.json().to_string() } else { format!("poolfs: {failure}") };
    let _ = writeln!(std::io::stderr(), "{}", plain(&text));
}

/// Print a table, lines without trailing blanks.
pub fn print_table(table: &Table) -> Result<()> {
    let lines: Vec<String> = table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    print(&(lines.join("\n") + "\n"))
}

/// Print as JSON in one line, of several that come one after the other.
pub fn print_json_line<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|error| Failure::new("output", error, ""))?;
    print(&(text + "\n"))
}

/// Print as JSON.
pub fn print_json<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::new("output", error, ""))?;
    print(&(text + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_understood() {
        for (text, bytes) in [("0", 0), ("512M", 512 << 20), ("2g", 2 << 30), ("1KiB", 1024), ("3TB", 3 << 40)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "M", "1X", "-1", "1.5G", "99999999999T"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn paths_are_written_so_that_a_shell_understands_them() {
        assert_eq!(pasted(Path::new("/mnt/a-b_c.d")), "/mnt/a-b_c.d");
        assert_eq!(pasted(Path::new("/mnt/a b;c")), "'/mnt/a b;c'");
    }

    #[test]
    fn times_are_understood() {
        for (text, expected) in [("0ms", 0), ("15us", 15), ("10ms", 10_000), ("2s", 2_000_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_micros(expected)), "{text}");
        }
        for bad in ["", "10", "ms", "-1s", "1.5s", "10min", "99999999999999999999s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_get_units() {
        assert_eq!((size(0), size(1536), size(512 << 20)), ("0 B".into(), "1.5 KiB".into(), "512 MiB".into()));
        assert_eq!(
            (duration(15), duration(2047), duration(3_000_000)),
            ("15 ns".into(), "2.0 us".into(), "3.0 ms".into())
        );
        assert_eq!((count(1, "layer"), count(0, "layer")), ("1 layer".into(), "0 layers".into()));
        assert_eq!((age(5), age(600), age(90_000)), ("5 s".into(), "10 min".into(), "25 h".into()));
    }

    #[test]
    fn programs_get_notes_as_objects() {
        assert_eq!(note("poolfs: a \"b\"\nc"), r#"{"note":"a \"b\"\nc"}"#);
    }

    #[test]
    fn tables_have_headings_and_no_frames() {
        let mut table = table(&["name", "size"]);
        table.add_row(["a", "1 B"]);
        let lines: Vec<String> = table.to_string().lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines, ["NAMESIZE", "a1B"]);
    }
}
