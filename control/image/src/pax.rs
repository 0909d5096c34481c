//! PAX extended headers: records `LENGTH KEYWORD=VALUE\n`, with binary values.

use crate::archive::Time;
use crate::unpack::is_kept_attribute;
use crate::{ImageError, Result};
use std::collections::BTreeMap;

const XATTR_PREFIX: &str = "SCHILY.xattr.";

/// Most extended attributes that one header names: more than a filesystem takes of a file.
const ATTRIBUTES_MAX: usize = 1024;

/// What extended headers say about a member, as far as it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PaxRecords {
    pub path: Option<Vec<u8>>,
    pub target: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub modified: Option<Time>,
    pub attributes: BTreeMap<String, Vec<u8>>,
    pub sparse: bool,
}

impl PaxRecords {
    /// The last value that is given for a name counts.
    fn set_attribute(&mut self, name: &str, value: &[u8]) -> Result<()> {
        if self.attributes.len() == ATTRIBUTES_MAX && !self.attributes.contains_key(name) {
            let cause = format!("an extended header names more than {ATTRIBUTES_MAX} extended attributes");
            return Err(ImageError::Archive(cause));
        }
        self.attributes.insert(name.to_owned(), value.to_vec());
        Ok(())
    }

    /// These records where `local` says nothing.
    pub(crate) fn overlaid_with(&self, local: PaxRecords) -> PaxRecords {
        let mut attributes = self.attributes.clone();
        attributes.extend(local.attributes);
        PaxRecords {
            path: local.path.or_else(|| self.path.clone()),
            target: local.target.or_else(|| self.target.clone()),
            size: local.size.or(self.size),
            uid: local.uid.or(self.uid),
            gid: local.gid.or(self.gid),
            modified: local.modified.or(self.modified),
            attributes,
            sparse: local.sparse || self.sparse,
        }
    }
}

/// Understand the content of an extended header.
pub(crate) fn parse(mut bytes: &[u8]) -> Result<PaxRecords> {
    let mut records = PaxRecords::default();
    while !bytes.is_empty() && bytes[0] != 0 {
        let (keyword, value, rest) = split_record(bytes).ok_or_else(malformed)?;
        bytes = rest;
        match keyword {
            "path" => records.path = Some(value.to_vec()),
            "linkpath" => records.target = Some(value.to_vec()),
            "size" => records.size = Some(number(value)?),
            "uid" => records.uid = Some(number(value)?),
            "gid" => records.gid = Some(number(value)?),
            "mtime" => records.modified = Some(time(value).ok_or_else(malformed)?),
            _ if keyword.starts_with("GNU.sparse.") => records.sparse = true,
            _ => {
                if let Some(name) = keyword.strip_prefix(XATTR_PREFIX).filter(|name| is_kept_attribute(name)) {
                    records.set_attribute(name, value)?;
                }
            }
        }
    }
    Ok(records)
}

fn malformed() -> ImageError {
    ImageError::Archive("an extended header is not understood".into())
}

fn split_record(bytes: &[u8]) -> Option<(&str, &[u8], &[u8])> {
    let blank = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..blank]).ok()?.parse().ok()?;
    if length > bytes.len() || length < blank + 2 {
        return None;
    }
    let (record, rest) = bytes.split_at(length);
    let body = record[blank + 1..].strip_suffix(b"\n")?;
    let equals = body.iter().position(|byte| *byte == b'=')?;
    Some((std::str::from_utf8(&body[..equals]).ok()?, &body[equals + 1..], rest))
}

fn number(value: &[u8]) -> Result<u64> {
    std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or_else(malformed)
}

/// Decimal seconds since 1970, possibly negative and with a fraction: `-1.25` is 0.75 s after -2 s.
fn time(value: &[u8]) -> Option<Time> {
    let text = std::str::from_utf8(value).ok()?;
    let (text, negative) = text.strip_prefix('-').map_or((text, false), |rest| (rest, true));
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let seconds: i64 = whole.parse().ok()?;
    let nanoseconds: u32 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    Some(match (negative, nanoseconds) {
        (false, _) => Time { seconds, nanoseconds },
        (true, 0) => Time { seconds: -seconds, nanoseconds },
        (true, _) => Time { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact() {
        let expect = |text: &str, seconds, nanoseconds| {
            assert_eq!(time(text.as_bytes()), Some(Time { seconds, nanoseconds }), "{text}");
        };
        expect("12", 12, 0);
        expect("12.5", 12, 500_000_000);
        expect("1.0000000019", 1, 1);
        expect("-3", -3, 0);
        expect("-3.000000001", -4, 999_999_999);
        for bad in ["", "x", "1.x", "1.2.3", "--1", "99999999999999999999"] {
            assert_eq!(time(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn attributes_are_kept_once_each_and_only_those_that_are_set() {
        let record = |name: &str, value: &str| {
            let body = format!(" {XATTR_PREFIX}{name}={value}\n");
            let digits = (1..5).find(|digits| (digits + body.len()).to_string().len() == *digits).expect("short");
            format!("{}{body}", digits + body.len())
        };
        let all = |records: &[String]| parse(records.concat().as_bytes());
        let given = [record("user.a", "1"), record("trusted.overlay.x", "2"), record("user.a", "3"), record("a", "4")];
        let expected = [("user.a".to_owned(), b"3".to_vec())];
        assert_eq!(all(&given).expect("sound").attributes, expected.into());
        let many: Vec<String> = (0..=ATTRIBUTES_MAX).map(|at| record(&format!("user.{at}"), "")).collect();
        assert_eq!(all(&many[1..]).expect("as many as may be").attributes.len(), ATTRIBUTES_MAX);
        assert!(all(&many).is_err());
        assert!(all(&vec![many[0].clone(); 5000]).is_ok(), "one, however often");
    }

    #[test]
    fn lying_lengths_are_refused() {
        for bad in
            [&b"5 a=b"[..], b"999 a=b\n", b"0 a=b\n", b"6 ab\n", b"x a=b\n", b"2 a", b"18446744073709551616 a=b\n"]
        {
            assert!(parse(bad).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
        assert_eq!(parse(b"7 uid=3\n").ok(), None);
        assert_eq!(parse(b"8 uid=3\n").expect("valid").uid, Some(3));
    }
}
