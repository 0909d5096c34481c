//! The generator of random programs. They use few names, so that operations meet.

use super::{PROCESSES, TICK};

/// Marsaglia's xorshift64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

const NAMES: &[&str] = &[
    "a", "b", "d", "d/a", "d/b", "d/f", "d/f/a", "e", "e/a", "e/b", "e/d", "e/d/b", "l", "l/a", "p", "n", "d/n", "e/n",
];

const MODES: &[u32] = &[
    0o644, 0o666, 0o600, 0o755, 0o777, 0o444, 0o640, 0o4755, 0o2755, 0o6777, 0o2644, 0o1777, 0o2775, 0o000, 0o070,
    0o711,
];

/// How many operations there are between two looks at everything.
const LOOK_EVERY: u64 = 16;

/// A program of about `operations` lines.
#[must_use]
pub fn program(seed: u64, operations: usize) -> Vec<String> {
    let mut dice = Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut lines = Vec::with_capacity(operations + operations / 8);
    let processes = PROCESSES.len() as u64;
    // Some programs are one process's, most of them meet.
    let busy = dice.of(&[1, 2, processes, processes, processes]);
    let first = dice.below(processes);
    for count in 0..operations as u64 {
        if count % LOOK_EVERY == LOOK_EVERY - 1 {
            lines.push(format!("{} look", dice.below(2)));
            lines.push(format!("{} files", (first + dice.below(busy)) % processes));
            lines.push(TICK.to_owned());
        } else if dice.one_in(12) {
            lines.push(TICK.to_owned());
        }
        let process = (first + dice.below(busy)) % processes;
        let child = if dice.one_in(150) { "child " } else { "" };
        lines.push(format!("{process} {child}{}", line(&mut dice, processes)));
        if dice.one_in(60) {
            lines.extend(renewal(&mut dice));
        }
        if dice.one_in(30) {
            lines.extend(bursts(&mut dice, processes, process));
        }
    }
    lines.push("0 look".to_owned());
    lines.extend((0..processes).map(|process| format!("{process} files")));
    lines
}

/// What opens a tree again in which nobody may do anything any more.
fn renewal(dice: &mut Dice) -> Vec<String> {
    let by = dice.below(2);
    let folder = dice.of(&["d", "e", "e/d"]);
    let file = dice.of(&["a", "b", "d/a"]);
    let owner = dice.of(&[0, 1000, 2000]);
    vec![
        format!("{by} chmod / 0777 0"),
        format!("{by} rename /{folder} /n 0"),
        format!("{by} mkdir /{folder} 0777"),
        format!("{by} chmod /{folder} {:#o} 0", dice.of(&[0o777, 0o1777, 0o2777, 0o755])),
        format!("{by} chown /{folder} {owner} {owner} 0"),
        format!("{by} open 0 /{file} {:#o} 0666", libc::O_CREAT | libc::O_RDWR),
        format!("{by} pwrite 0 {} {} {}", dice.below(30_000), dice.below(40_000), dice.below(1_000)),
        format!("{by} fchmod 0 {:#o}", dice.of(&[0o666, 0o777, 0o6777, 0o644])),
    ]
}

/// One opens a file and writes it in runs of small writes; somebody else looks, or does more, in between.
fn bursts(dice: &mut Dice, processes: u64, by: u64) -> Vec<String> {
    let file = path(dice);
    let at = slot(dice);
    let flags = dice.of(&[libc::O_APPEND, libc::O_APPEND, 0, libc::O_APPEND | libc::O_TRUNC, libc::O_TRUNC]);
    let access = dice.of(&[libc::O_RDWR, libc::O_RDWR, libc::O_WRONLY]);
    let mut lines = vec![format!("{by} open {at} {file} {:#o} 0666", flags | access | libc::O_CREAT)];
    for _ in 0..1 + dice.below(3) {
        lines.push(format!("{by} {}", burst(dice, at)));
        let other = dice.below(processes);
        match dice.below(10) {
            0..=2 => lines.push(format!("{other} stat {file} 0")),
            3 => lines.push(format!("{} look", dice.below(2))),
            4 => lines.push(format!("{by} {}", by_heir(dice, at))),
            5 => lines.push(format!("{by} dup {at} {}", dice.below(4))),
            6 => lines.push(format!("{other} truncate {file} {}", size(dice))),
            7 => lines.push(format!("{by} child {}", burst(dice, at))),
            8 => lines.push(TICK.to_owned()),
            _ => lines.push(format!("{by} fstat {at}")),
        }
    }
    lines
}

fn burst(dice: &mut Dice, at: u64) -> String {
    let offset = if dice.one_in(3) { dice.below(50_000).to_string() } else { "-".to_owned() };
    let length = dice.of(&[1, 100, 128, 200, 512, 1_000, 4_096]);
    let count = 8 + dice.below(if length < 1_000 { 40 } else { 8 });
    format!("burst {at} {count} {offset} {length} {} {}", dice.below(1_000), dice.of(&[0, 0, 1, 2, 5, 8]))
}

fn name(dice: &mut Dice) -> &'static str {
    if dice.one_in(40) { "" } else { dice.of(NAMES) }
}

fn path(dice: &mut Dice) -> String {
    let name = name(dice);
    let name = match dice.below(60) {
        0 => format!("{name}/"),
        1 => format!("{name}/."),
        2 => format!("d/../{name}"),
        3 => format!("./{name}"),
        4 => format!("{name}/x"),
        5 => "y".repeat(256),
        _ => name.to_owned(),
    };
    match dice.below(20) {
        0..=10 => format!("/{name}"),
        11..=15 => format!("@{name}"),
        16 => format!("#{}:{}", dice.below(4), dice.of(&["a", "b", "n", "f", "d"])),
        _ => format!("={name}"),
    }
}

fn slot(dice: &mut Dice) -> u64 {
    dice.below(4).min(dice.below(4))
}

fn mode(dice: &mut Dice) -> String {
    format!("{:#o}", if dice.one_in(8) { dice.below(0o10000) as u32 } else { dice.of(MODES) })
}

fn offset(dice: &mut Dice) -> i64 {
    match dice.below(40) {
        0 => dice.of(&[-1, i64::MIN]),
        1..=8 => 4096 * dice.below(24) as i64,
        9..=20 => dice.below(6_000) as i64,
        _ => dice.below(90_000) as i64,
    }
}

fn length(dice: &mut Dice) -> u64 {
    match dice.below(20) {
        0 => 0,
        1 => 1,
        2..=5 => 4096 * dice.below(5),
        6..=8 => dice.below(70_000),
        _ => dice.below(5_000),
    }
}

fn size(dice: &mut Dice) -> i64 {
    if dice.one_in(60) { dice.of(&[-1, i64::MIN]) } else { offset(dice).clamp(0, 100_000) }
}

fn open_flags(dice: &mut Dice) -> i32 {
    let mut flags = dice.of(&[libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR, libc::O_RDWR, libc::O_RDWR]);
    for (flag, count) in [
        (libc::O_CREAT, 2),
        (libc::O_APPEND, 6),
        (libc::O_TRUNC, 8),
        (libc::O_EXCL, 12),
        (libc::O_NOFOLLOW, 12),
        (libc::O_DIRECTORY, 16),
        (libc::O_PATH, 25),
        (libc::O_DSYNC, 30),
        (libc::O_SYNC, 40),
        (libc::O_NOATIME, 30),
        (libc::O_CLOEXEC, 3),
    ] {
        if dice.one_in(count) {
            flags |= flag;
        }
    }
    flags
}

fn time(dice: &mut Dice) -> String {
    match dice.below(4) {
        0 => "now".to_owned(),
        1 => "omit".to_owned(),
        _ => (1_000_000_000 + dice.below(4) * 1_000_003).to_string(),
    }
}

fn id(dice: &mut Dice) -> i64 {
    dice.of(&[-1, -1, 0, 1000, 2000, 3000])
}

fn xattr(dice: &mut Dice) -> &'static str {
    dice.of(&[
        "user.a",
        "user.b",
        "user.a",
        "trusted.t",
        "security.s",
        "system.posix_acl_access",
        "system.posix_acl_default",
        "user.",
        "other",
        "system.other",
    ])
}

fn value(dice: &mut Dice) -> String {
    match dice.below(8) {
        0..=4 => format!("{}:{}", dice.below(60), dice.below(1_000)),
        5 => format!("{}:{}", dice.of(&[0, 1, 600, 70_000]), dice.below(1_000)),
        6 => format!("acl{:o}", dice.of(&[0o640, 0o755, 0o777, 0o600])),
        _ => format!("acl{:o}:{}:{}", dice.of(&[0o640, 0o755, 0o700]), dice.of(&[1000, 2000]), dice.below(8)),
    }
}

fn line(dice: &mut Dice, processes: u64) -> String {
    match dice.below(100) {
        0..=44 => on_file(dice, processes),
        45..=74 => on_names(dice),
        75..=93 => on_attributes(dice),
        _ => looks(dice),
    }
}

fn open(dice: &mut Dice) -> String {
    format!("open {} {} {:#o} {}", slot(dice), path(dice), open_flags(dice), mode(dice))
}

fn on_file(dice: &mut Dice, processes: u64) -> String {
    let at = slot(dice);
    let lock = |dice: &mut Dice| format!("{} {}", dice.of(&["p", "p", "o"]), dice.of(&["r", "w", "u"]));
    let range = |dice: &mut Dice| format!("{} {}", dice.below(4) * 100, dice.of(&[0, 100, 200, 50]));
    match dice.below(124) {
        0..=29 => open(dice),
        30..=33 => format!("close {at}"),
        34 => format!("dup {at} {}", dice.below(4)),
        35..=37 => format!("{} {at} {}", dice.of(&["read", "readv"]), length(dice)),
        38..=41 => format!("{} {at} {} {}", dice.of(&["pread", "preadv"]), offset(dice), length(dice)),
        42..=50 => format!("{} {at} {} {}", dice.of(&["write", "write", "writev"]), length(dice), dice.below(1_000)),
        51..=60 => {
            let name = dice.of(&["pwrite", "pwrite", "pwritev"]);
            format!("{name} {at} {} {} {}", offset(dice), length(dice), dice.below(1_000))
        }
        61..=63 => format!("seek {at} {} {}", offset(dice).clamp(-5, 100_000), dice.below(3)),
        64..=65 => format!("holes {at} {}", offset(dice)),
        66..=69 => format!("ftruncate {at} {}", size(dice)),
        70..=74 => {
            let mode = dice.of(&[0, 1, 3, 3, 2, 0x10, 0x11]);
            format!("fallocate {at} {mode} {} {}", offset(dice).clamp(-1, 100_000), length(dice))
        }
        75..=77 => {
            let from = if dice.one_in(3) { "-".to_owned() } else { offset(dice).to_string() };
            let to = if dice.one_in(3) { "-".to_owned() } else { offset(dice).to_string() };
            format!("copy {at} {from} {} {to} {}", dice.below(4), length(dice))
        }
        78..=79 => {
            let from = if dice.one_in(2) { "-".to_owned() } else { offset(dice).to_string() };
            format!("sendfile {at} {} {from} {}", dice.below(4), length(dice))
        }
        80..=81 => format!("{} {at}", dice.of(&["fsync", "fdatasync"])),
        82 => format!("setfl {at} {:#o}", dice.of(&[0, libc::O_APPEND])),
        83..=88 => format!("lock {at} {} {}", lock(dice), range(dice)),
        89..=90 => format!("getlock {at} {} {}", lock(dice), range(dice)),
        91..=93 => format!("flock {at} {}", dice.of(&["r", "w", "u"])),
        94..=95 => format!("map {at} {} {} {}", dice.of(&["r", "w"]), 4096 * dice.below(4), 4096 * (1 + dice.below(8))),
        96..=98 => format!("map-read {at} {} {}", dice.below(20_000), length(dice)),
        99..=102 => {
            format!("map-write {at} {} {} {} w", dice.below(20_000), length(dice), dice.below(1_000))
        }
        103 => format!("unmap {at}"),
        104..=105 => format!("give {at} {}", dice.below(processes)),
        106..=109 => format!("take {at}"),
        110 => format!("left {at}"),
        111 => format!("splice {at} {} {}", offset(dice), length(dice)),
        112 => format!("append {at} {} {}", length(dice), dice.below(1_000)),
        113 => burst(dice, at),
        114..=115 => "heir".to_owned(),
        _ => by_heir(dice, at),
    }
}

/// What a child without the library does with the descriptions of its parent.
fn by_heir(dice: &mut Dice, at: u64) -> String {
    match dice.below(7) {
        0 => format!("bare left {at} - -"),
        1 => format!("bare sendfile {at} {} {}", offset(dice), length(dice)),
        2 => format!("bare splice {at} {} {}", offset(dice), length(dice)),
        3 => format!("bare tail {at} {} -", offset(dice).max(0)),
        4 => format!("bare append {at} {} {}", length(dice), dice.below(1_000)),
        5 => format!("bare write-at-end {at} {} {}", length(dice), dice.below(1_000)),
        _ => format!("bare pread {at} {} {}", offset(dice), length(dice)),
    }
}

fn on_names(dice: &mut Dice) -> String {
    match dice.below(30) {
        0..=3 => format!("link {} {} {:#x}", path(dice), path(dice), dice.of(&[0, 0, libc::AT_SYMLINK_FOLLOW])),
        4..=5 => {
            let target = dice.of(&["=a", "=../a", "=d", "/a", "/d/a", "=n", "=../e", "=b/c", "=l"]);
            format!("symlink {target} {}", path(dice))
        }
        6..=9 => format!("unlink {}", path(dice)),
        10..=12 => format!("rmdir {}", path(dice)),
        13..=16 => format!("mkdir {} {}", path(dice), mode(dice)),
        17 => {
            let kind = dice.of(&[libc::S_IFIFO, libc::S_IFREG, libc::S_IFSOCK, libc::S_IFCHR]);
            format!(
                "mknod {} {:#o} {:#x}",
                path(dice),
                kind | dice.of(MODES),
                if kind == libc::S_IFCHR { 0x103 } else { 0 }
            )
        }
        18..=27 => {
            let flags = dice.of(&[0, 0, 0, 0, 0, 1, 2, 2, 3]);
            format!("rename {} {} {flags}", path(dice), path(dice))
        }
        28 => format!("chdir {}", dice.of(&["/", "/", "/d", "/e", "=d", "/l"])),
        _ => dice.of(&["umask 022", "umask 0", "umask 077", "umask 027", "fchdir 0", "chdir /"]).to_owned(),
    }
}

fn on_attributes(dice: &mut Dice) -> String {
    let at = slot(dice);
    let no_follow = dice.of(&[0, 0, libc::AT_SYMLINK_NOFOLLOW]);
    match dice.below(38) {
        0..=4 => format!("chmod {} {} {:#x}", path(dice), mode(dice), no_follow),
        5..=6 => format!("fchmod {at} {}", mode(dice)),
        7..=10 => format!("chown {} {} {} {:#x}", path(dice), id(dice), id(dice), no_follow),
        11 => format!("fchown {at} {} {}", id(dice), id(dice)),
        12..=14 => format!("utimens {} {} {} {:#x}", path(dice), time(dice), time(dice), no_follow),
        15 => format!("utimes-now {}", path(dice)),
        16 => format!("futimens {at} {} {}", time(dice), time(dice)),
        17..=19 => format!("truncate {} {}", path(dice), size(dice)),
        20..=24 => {
            let call = dice.of(&["setxattr", "setxattr", "lsetxattr"]);
            format!("{call} {} {} {} {}", path(dice), xattr(dice), value(dice), dice.of(&[0, 0, 1, 2, 3]))
        }
        25 => format!("fsetxattr {at} {} {} {}", xattr(dice), value(dice), dice.of(&[0, 0, 1, 2])),
        26..=28 => format!("getxattr {} {} {}", path(dice), xattr(dice), dice.of(&[0, 10, 4096, 70_000])),
        29 => format!("fgetxattr {at} {}", xattr(dice)),
        30..=31 => format!("{} {} {}", dice.of(&["removexattr", "lremovexattr"]), path(dice), xattr(dice)),
        32 => format!("fremovexattr {at} {}", xattr(dice)),
        33 => format!("listxattr {} {}", path(dice), dice.of(&[0, 5, 4096])),
        34 => format!("flistxattr {at}"),
        _ => {
            let flags = dice.of(&[0, 0, libc::AT_EACCESS, libc::AT_SYMLINK_NOFOLLOW]);
            format!("access {} {} {flags:#x}", path(dice), dice.below(8))
        }
    }
}

fn looks(dice: &mut Dice) -> String {
    match dice.below(10) {
        0..=2 => format!("stat {} {:#x}", path(dice), dice.of(&[0, libc::AT_SYMLINK_NOFOLLOW])),
        3 => format!("statx {} {:#x}", path(dice), dice.of(&[0, libc::AT_SYMLINK_NOFOLLOW])),
        4..=5 => format!("fstat {}", slot(dice)),
        6 => format!("readlink {}", path(dice)),
        7 => dice.of(&["getcwd", "realpath /l/a", "realpath /e/b", "realpath =."]).to_owned(),
        _ => format!("list {}", path(dice)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_one_program() {
        let one = program(7, 500);
        assert_eq!(one, program(7, 500));
        assert_ne!(one, program(8, 500));
        let ours =
            |line: &String| line == TICK || line.split_once(' ').is_some_and(|(who, _)| who.parse::<usize>().is_ok());
        assert!(one.len() > 500 && one.iter().all(ours));
    }
}
