//! Programs that replace a file and sync nothing, or not all of it, and what a power cut may leave of it.
//!
//! They rely on what ext4 does by itself (`auto_da_alloc`). Content that takes another file's place by a rename is on the disk before the
//! commit that has the new name, and so is the content of a file that was truncated to nothing, written and closed. After the first commit
//! that follows the program the new content is there; a cut before it may leave the old one.

use std::fs;
use std::path::Path;

/// What makes the disk hold what the program has done, without the service being asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// a commit of the filesystem below, of names and of content that has blocks
    Commit,
    /// a write-back of all that this filesystem holds: it does not know which content is to come before a name
    WriteBack,
}

/// What a cut may show besides the old content and the new, while the program runs and until the disk holds it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Meanwhile {
    /// nothing else
    OldOrNew,
    /// the begin of the new content, or nothing of it: the old was truncated
    Truncated,
    /// no file, or a part of it: the old name was removed, or is another file's for a moment
    Missing,
}

/// One of them. Its script finds the file in `$F`, and in `$NEW` one with the content it is to get, in which "new" stands for each "old"
/// of the old one.
pub struct Program {
    /// What it is called, and the directory of its file.
    pub name: &'static str,
    /// What is done before, and durable.
    pub prepare: &'static str,
    /// What it does.
    pub script: &'static str,
    /// When it is on the disk.
    pub until: Until,
    /// What there is before.
    pub meanwhile: Meanwhile,
    /// Says on a mounted union which of the contents it has, "old" or "new"; nothing: the file is compared.
    pub ask: Option<&'static str>,
}

const REPLACES: Program =
    Program { name: "", prepare: "true", script: "", until: Until::Commit, meanwhile: Meanwhile::OldOrNew, ask: None };

/// Makes the file one of the upper branch.
const UPPER: &str = r#"cp "$F" "$F.copy"; mv "$F.copy" "$F""#;

/// All of them. Where nothing is prepared, the file is one of the lower branch: the upper one has nothing that is replaced.
pub const PROGRAMS: [Program; 16] = [
    Program { name: "rename", script: r#"cat "$NEW" >"$F.tmp"; mv -f "$F.tmp" "$F""#, ..REPLACES },
    Program {
        name: "rename-upper",
        prepare: UPPER,
        script: r#"cat "$NEW" >"$F.tmp"; mv -f "$F.tmp" "$F""#,
        ..REPLACES
    },
    Program { name: "sed", script: r#"sed -i s/old/new/ "$F""#, ..REPLACES },
    Program {
        name: "editor-backup-by-link",
        script: r#"ln "$F" "$F~"; cat "$NEW" >"$F.new"; mv -f "$F.new" "$F""#,
        ..REPLACES
    },
    Program {
        name: "editor-backup-by-copy",
        prepare: UPPER,
        script: r#"cp "$F" "$F~"; cat "$NEW" >"$F""#,
        meanwhile: Meanwhile::Truncated,
        ..REPLACES
    },
    Program {
        name: "dpkg",
        script: r#"cat "$NEW" >"$F.dpkg-new"; ln "$F" "$F.dpkg-tmp"; mv -f "$F.dpkg-new" "$F"; rm "$F.dpkg-tmp""#,
        ..REPLACES
    },
    Program {
        name: "pip",
        script: r#"/usr/bin/python3 -c '
import os, sys, tempfile
with tempfile.NamedTemporaryFile(delete=False, dir=os.path.dirname(sys.argv[1])) as new:
    new.write(open(sys.argv[2], "rb").read())
    new.flush()
    os.fsync(new.fileno())
os.replace(new.name, sys.argv[1])' "$F" "$NEW""#,
        ..REPLACES
    },
    Program { name: "truncate", script: r#"cat "$NEW" >"$F""#, meanwhile: Meanwhile::Truncated, ..REPLACES },
    Program {
        name: "truncate-upper",
        prepare: UPPER,
        script: r#"cat "$NEW" >"$F""#,
        meanwhile: Meanwhile::Truncated,
        ..REPLACES
    },
    Program {
        name: "truncate-by-size",
        prepare: UPPER,
        script: r#"truncate -s 0 "$F"; cat "$NEW" >>"$F""#,
        meanwhile: Meanwhile::Truncated,
        ..REPLACES
    },
    Program {
        name: "exchange",
        script: r#"cat "$NEW" >"$F.tmp"; /usr/bin/python3 -c '
import ctypes, os, sys
names = [os.fsencode(name) for name in sys.argv[1:]]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.renameat2(-100, names[0], -100, names[1], 2) == 0, os.strerror(ctypes.get_errno())' "$F.tmp" "$F""#,
        ..REPLACES
    },
    Program {
        name: "patched-in-place",
        script: r#"mv "$F" "$F.other"; cat "$NEW" | dd of="$F.other" conv=notrunc bs=3000 status=none; cp "$F.was" "$F"; mv -f "$F.other" "$F""#,
        prepare: r#"cp "$F" "$F.was""#,
        meanwhile: Meanwhile::Missing,
        ..REPLACES
    },
    Program {
        name: "link",
        script: r#"cat "$NEW" >"$F.tmp"; rm "$F"; ln "$F.tmp" "$F"; rm "$F.tmp""#,
        until: Until::WriteBack,
        meanwhile: Meanwhile::Missing,
        ..REPLACES
    },
    Program {
        name: "nameless",
        script: r#"rm "$F"; /usr/bin/python3 -c '
import ctypes, os, sys
file = os.open(os.path.dirname(sys.argv[1]), os.O_TMPFILE | os.O_WRONLY, 0o644)
os.write(file, open(sys.argv[2], "rb").read())
names = [f"/proc/self/fd/{file}".encode(), os.fsencode(sys.argv[1])]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.linkat(-100, names[0], -100, names[1], 0x400) == 0, os.strerror(ctypes.get_errno())' "$F" "$NEW""#,
        until: Until::WriteBack,
        meanwhile: Meanwhile::Missing,
        ..REPLACES
    },
    Program {
        name: "sqlite",
        prepare: r#"sqlite3 "$F.db" "PRAGMA journal_mode=delete; CREATE TABLE t(v); INSERT INTO t VALUES('old'), (randomblob(20000));""#,
        script: r#"sqlite3 "$F.db" "PRAGMA journal_mode=delete; UPDATE t SET v='new' WHERE v='old'; UPDATE t SET v=randomblob(30000) WHERE v<>'new';""#,
        ask: Some(
            r#"[ "$(sqlite3 "$F.db" "PRAGMA integrity_check")" = ok ]; sqlite3 "$F.db" "SELECT v FROM t WHERE v IN ('old', 'new')""#,
        ),
        ..REPLACES
    },
    // By default git leaves its objects to chance, as it does on ext4; the branch, its log and the index it always does.
    Program {
        name: "git",
        prepare: r#"cd "${F%/*}"; git init -q; git config user.name n; git config user.email e; git config core.fsync objects
git add conf; git commit -qm old"#,
        script: r#"cd "${F%/*}"; cat "$NEW" >conf; git commit -qam new"#,
        ask: Some(r#"cd "${F%/*}"; git fsck --full --strict >&2; git log --format=%s -1"#),
        ..REPLACES
    },
];

/// The content of a file before and after; its last block is not whole, and there are some in between.
#[must_use]
pub fn contents() -> [Vec<u8>; 2] {
    let lines = |word: &str| (0..2000).fold(String::new(), |text, line| text + &format!("{word} line {line}\n"));
    ["old", "new"].map(|word| lines(word).into_bytes())
}

impl Program {
    /// Makes its file in a lower branch.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn lay_out(&self, lower: &Path) {
        let directory = lower.join(self.name);
        fs::create_dir_all(&directory).expect("a folder");
        fs::write(directory.join("conf"), &contents()[0]).expect("a file");
    }

    /// A script with what it looks for in its variables; `new` is a file with the new content.
    #[must_use]
    pub fn with_variables(&self, script: &str, mounted: &Path, new: &Path) -> String {
        let file = mounted.join(self.name).join("conf");
        format!("F={} NEW={}\n{script}", file.display(), new.display())
    }

    /// Whether a union may look so after a cut; `held` says that the disk held by then what the program has done.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, mounted: &Path, held: bool) -> Result<(), String> {
        let [old, new] = contents();
        if let Some(ask) = self.ask {
            let answer = crate::shell(&self.with_variables(ask, mounted, Path::new("/dev/null")));
            let said = answer.out.trim();
            let is_fine = answer.code == 0 && (said == "new" || said == "old" && !held);
            return if is_fine { Ok(()) } else { Err(format!("{}: held: {held}, {answer:?}", self.name)) };
        }
        let shown = match fs::read(mounted.join(self.name).join("conf")) {
            Ok(shown) => shown,
            Err(_) if !held && self.meanwhile == Meanwhile::Missing => return Ok(()),
            Err(error) => return Err(format!("{}: {error}", self.name)),
        };
        let may_be_part = !held && self.meanwhile != Meanwhile::OldOrNew;
        let is_part = may_be_part && (new.starts_with(&shown) || self.meanwhile == Meanwhile::Missing);
        if shown == new || !held && shown == old || is_part {
            return Ok(());
        }
        let zeros = shown.iter().filter(|&&byte| byte == 0).count();
        Err(format!("{}: {} bytes, {zeros} of them zeros, held: {held}", self.name, shown.len()))
    }
}
