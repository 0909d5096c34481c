//! Upper branches whose backend exchanges no names.

use crate::hooked::{Call, Hooked};
use crate::support::*;
use poolfs_libservice::random_operations::{Comparison, populate};
use poolfs_libservice::types::{Caller, Errno, Name, NodeId, OpenFlags, RenameFlags};
use poolfs_libservice::{Filter, Libservice, Memory, Result, conformance, fail};
use poolfs_union::Union;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A layer that lacks `EXCHANGE`, as CephFS does.
struct Without(Arc<dyn Libservice>);

impl Filter for Without {
    fn below(&self) -> &dyn Libservice {
        &*self.0
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: NodeId,
        name: Name<'_>,
        new_parent: NodeId,
        new_name: Name<'_>,
        flags: RenameFlags,
    ) -> Result<()> {
        if flags.contains(RenameFlags::EXCHANGE) {
            return fail(Errno::EINVAL);
        }
        self.0.rename(caller, parent, name, new_parent, new_name, flags)
    }
}

pub fn open_without_exchange(upper: Arc<dyn Libservice>, lowers: &[Arc<Memory>]) -> Result<Arc<Union>> {
    open_over(Arc::new(Without(upper)), lowers)
}

fn open(branches: &Branches) -> Arc<Union> {
    open_without_exchange(branches.upper.clone(), &branches.lowers).expect("the union opens")
}

#[test]
fn conformance_without_exchange() {
    conformance::run(&|| open(&Branches::empty(2)));
}

#[test]
fn random_operations_without_exchange() {
    for seed in 0..6 {
        let branches = Branches::empty(3);
        populate(&*branches.lowers[1], seed, 60);
        let reference = Memory::new();
        populate(&*reference, seed, 60);
        let mut mounted = Remounted::default();
        let first = mounted.open(None, || open(&branches));
        let comparison = Comparison::new(seed, 2000).starting_from(reference);
        let summary = comparison.remounting(150, |layer| mounted.open(Some(layer), || open(&branches))).run(first);
        assert!(summary.succeeded > 500, "{summary:?}");
    }
}

fn exchange(union: &Union, one: &str, other: &str) -> Result<()> {
    let ((parent, name), (new_parent, new_name)) = (split(union, one), split(union, other));
    union.rename(ROOT, parent, name, new_parent, new_name, RenameFlags::EXCHANGE)
}

/// Each call of an exchange fails once: both names are what they were, or what they become, and so they are after the next opening.
#[test]
fn an_exchange_that_fails_leaves_both_names() {
    for failing in 0.. {
        let (upper, lower) = (Memory::new(), Memory::new());
        put(&*lower, "one", b"1");
        mkdir(&*lower, "other");
        put(&*lower, "other/inside", b"2");
        let hooked = Hooked::over(upper.clone());
        let lowers = [lower];
        let union = open_without_exchange(hooked.clone(), &lowers).expect("opens");
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        hooked.hook(move |call: Call| {
            let is_change = call.changes() || matches!(call, Call::SyncFile);
            if is_change && counted.fetch_add(1, Ordering::Relaxed) == failing { fail(Errno::EIO) } else { Ok(()) }
        });
        let exchanged = exchange(&union, "one", "other");
        hooked.unhook();
        let check = |union: &Union, when: &str| {
            let is_done = stat(union, "one").is_directory();
            let (file, directory) = if is_done { ("other", "one") } else { ("one", "other") };
            assert_eq!(get(union, file).expect(when), b"1", "{failing} {when} {exchanged:?}");
            assert_eq!(get(union, &format!("{directory}/inside")).expect(when), b"2", "{failing} {when} {exchanged:?}");
            assert!(!is_done || exchanged.is_ok() || when == "later", "{failing} {when} {exchanged:?}");
        };
        check(&union, "at once");
        // The next one is not held up by what is left.
        put(&*union, "x", b"");
        put(&*union, "y", b"");
        exchange(&union, "x", "y").expect("nothing fails any more");
        check(&union, "afterwards");
        close(union);
        let union = open_without_exchange(upper.clone(), &lowers).expect("opens");
        check(&union, "later");
        close(union);
        let left = list(&*upper, node(&*upper, ".poolfs").expect("there"));
        assert!(left.iter().all(|(name, _)| !name.starts_with(b"exchange")), "{failing}: {left:?}");
        if calls.load(Ordering::Relaxed) <= failing {
            assert!(failing > 8, "an exchange takes several calls");
            return;
        }
    }
}

/// What a union shows under each of these names.
fn shown(union: &Union) -> Vec<String> {
    let what = |path: &str| match node(union, path) {
        Err(error) => format!("{path}: {error}"),
        Ok(_) if stat(union, path).is_directory() => {
            let mut names: Vec<_> = ls(union, path).into_iter().collect();
            names.sort();
            format!("{path}: {names:?}")
        }
        Ok(_) => format!("{path}: {:?}", get(union, path)),
    };
    ["one", "other", "gone", "lower"].map(what).to_vec()
}

/// Every rename fails from one of them on: what has begun can neither go on nor back, and the next opening ends it.
#[test]
fn an_exchange_that_can_neither_go_on_nor_back_is_ended_later() {
    type Change = fn(&Union) -> Result<()>;
    let changes: [Change; 4] = [
        |union| exchange(union, "one", "other"),
        |union| union.mkdir(ROOT, NodeId::ROOT, name("gone"), 0o755).map(drop),
        |union| union.rmdir(ROOT, NodeId::ROOT, name("lower")),
        |union| union.rename(ROOT, NodeId::ROOT, name("lower"), NodeId::ROOT, name("gone"), RenameFlags::empty()),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut done = None;
        for failing in (0..12).rev() {
            let (upper, lower) = (Memory::new(), Memory::new());
            put(&*lower, "one", b"1");
            put(&*lower, "gone", b"hidden");
            for directory in ["other", "lower"] {
                mkdir(&*lower, directory);
                put(&*lower, &format!("{directory}/inside"), b"2");
            }
            let hooked = Hooked::over(upper.clone());
            let lowers = [lower];
            let union = open_without_exchange(hooked.clone(), &lowers).expect("opens");
            for path in ["gone", "lower/inside"] {
                let (parent, last) = split(&*union, path);
                union.unlink(ROOT, parent, last).expect("removed");
            }
            let before = shown(&union);
            let renames = AtomicUsize::new(0);
            hooked.hook(move |call: Call| {
                let fails = call == Call::Rename && renames.fetch_add(1, Ordering::Relaxed) >= failing;
                if fails { fail(Errno::ENOSPC) } else { Ok(()) }
            });
            let changed = change(&union);
            hooked.unhook();
            if changed.is_ok() {
                done = Some(shown(&union));
            }
            close(union);
            let union = open_without_exchange(upper.clone(), &lowers)
                .unwrap_or_else(|error| panic!("{number} {failing}: {error}"));
            let (now, done) = (shown(&union), done.as_ref().expect("it takes fewer renames"));
            assert!(now == *done || changed.is_err() && now == before, "{number} {failing}: {changed:?} {now:?}");
            close(union);
        }
    }
}

#[test]
fn a_note_that_no_union_wrote_loses_nothing() {
    let notes: [&[u8]; 6] = [
        b"",
        b"poolfs-exchange 1\n",
        b"poolfs-exchange 1\na\0b\0c\0",
        b"poolfs-exchange 1\n../a\0b\0",
        b"poolfs-exchange 1\n/\0\0",
        b"poolfs-exchange 1\none\0other\0",
    ];
    for note in notes {
        let upper = Memory::new();
        close(open_without_exchange(upper.clone(), &[Memory::new()]).expect("opens"));
        put(&*upper, "one", b"1");
        put(&*upper, "other", b"2");
        put(&*upper, ".poolfs/exchanged", b"precious");
        put(&*upper, ".poolfs/exchange", note);
        let refused =
            open_without_exchange(upper.clone(), &[Memory::new()]).err().expect("nobody knows where it belongs");
        assert_eq!(refused.errno(), Errno::EIO);
        assert_eq!(get(&*upper, ".poolfs/exchanged").expect("kept"), b"precious");
        assert_eq!(
            (get(&*upper, "one").expect("kept"), get(&*upper, "other").expect("kept")),
            (b"1".to_vec(), b"2".to_vec())
        );
        let handle = super::support::open(&*upper, ".poolfs/exchange", OpenFlags::READ_ONLY).expect("kept");
        upper.release(handle);
    }
}
