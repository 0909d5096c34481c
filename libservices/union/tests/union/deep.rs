//! Tests of paths in lower branches that are deeper than a program can name at once, and of what is kept of a tree on the way down.

use crate::support::{Branches, Counting, ROOT, close, mkdir, name, node};
use poolfs_libservice::types::{Errno, FileType, NodeId};
use poolfs_libservice::walk::WALK_DEPTH_MAX;
use poolfs_libservice::{Headroom, Layered, Libservice};
use poolfs_union::{Lower, Union, UnionConfig};
use std::ops::ControlFlow;
use std::sync::Arc;

const PART: usize = 250;
const PATH_MAX: usize = 4096;

fn make_deep(layer: &dyn Libservice, part: &str, depth: usize) {
    let mut at = NodeId::ROOT;
    for _ in 0..depth {
        at = layer.mkdir(ROOT, at, name(part), 0o755).expect("made").node;
    }
}

/// Goes down step by step, as who changes his working directory does: what he then holds, and why he came no further.
fn go_down(layer: &dyn Libservice, part: &str) -> (Vec<NodeId>, Errno) {
    let mut held = vec![NodeId::ROOT];
    loop {
        match layer.lookup(ROOT, *held.last().expect("the root"), name(part)) {
            Ok(entry) => held.push(entry.node),
            Err(error) => return (held, error.errno()),
        }
    }
}

fn open_counted(branches: &Branches, room: &Arc<Counting>) -> Arc<Union> {
    let lower = |(at, layer): (usize, &Arc<poolfs_libservice::Memory>)| Lower {
        layer_id: format!("layer-{at}"),
        layer: Arc::clone(layer) as Arc<dyn Libservice>,
        is_union: false,
    };
    let lowers = branches.lowers.iter().enumerate().map(lower).collect();
    let paths_room = Some(Arc::clone(room) as Arc<dyn Headroom>);
    Union::open(UnionConfig { paths_room, ..UnionConfig::new(branches.upper.clone(), lowers) })
        .expect("the union opens")
}

/// How much memory nodes take that somebody holds is neither their number by their depth, nor by how many branches have them.
#[test]
fn paths_in_lower_branches_are_bounded_and_counted_once() {
    const DEPTH: usize = 40;
    let part = "d".repeat(PART);
    for lowers in [1, 3] {
        let branches = Branches::empty(lowers);
        branches.lowers.iter().for_each(|layer| make_deep(&**layer, &part, DEPTH));
        let room = Arc::new(Counting::default());
        let union = open_counted(&branches, &room);
        let (held, why) = go_down(&*union, &part);
        assert_eq!((held.len() - 1, why), (PATH_MAX / (PART + 1), Errno::ENAMETOOLONG), "{lowers} lower branches");
        // Those of one part are so short that they count as part of the node.
        let paths: usize = (2..held.len()).map(|parts| parts * (PART + 1) - 1).sum();
        assert_eq!(room.count(), paths as u64, "{lowers} lower branches");
        held[1..].iter().for_each(|&node| union.forget(node, 1));
        assert_eq!(room.count(), 0, "all is given back");
        close(union);
    }
}

#[test]
fn the_upper_branch_is_not_bounded() {
    let part = "d".repeat(PART);
    let branches = Branches::empty(1);
    make_deep(&*branches.lowers[0], &part, 40);
    let union = branches.open();
    let (held, _) = go_down(&*union, &part);
    // The last directory of the lower branch that can be reached: what is made in it is deeper than any there may be.
    let last = *held.last().expect("the last");
    let own = "o".repeat(PART);
    let mut at = last;
    for _ in 0..20 {
        at = union.mkdir(ROOT, at, name(&own), 0o755).expect("made").node;
    }
    let refused = union.mkdir(ROOT, last, name(&part), 0o755).map(drop);
    assert_eq!(refused.map_err(|error| error.errno()), Err(Errno::ENAMETOOLONG), "something is there");
    close(union);
    let union = branches.open();
    let deep = vec![part; held.len() - 1].join("/") + &format!("/{own}").repeat(20);
    node(&*union, &deep).expect("it is found again");
    mkdir(&*union, &format!("{deep}/more"));
    union.rmdir(ROOT, node(&*union, &deep).expect("found"), name("more")).expect("removed");
    close(union);
}

#[test]
fn differences_and_flattening_go_as_deep_as_other_walks() {
    let branches = Branches::empty(1);
    make_deep(&*branches.upper, "d", WALK_DEPTH_MAX + 5);
    let union = branches.open();
    let mut told = 0;
    let listed = union.differences(&mut |path, _| {
        assert_eq!(path.len(), usize::saturating_sub(2 * told, 1));
        told += 1;
        Ok(ControlFlow::Continue(()))
    });
    assert_eq!(told, 1 + WALK_DEPTH_MAX, "the root, and what is below it");
    for error in [listed.expect_err("too deep"), union.flatten(&|| true).expect_err("too deep")] {
        assert_eq!(error, Errno::ENAMETOOLONG);
        let message = error.message().expect("words");
        assert!(message.starts_with("/d/d/d") && message.len() < PATH_MAX, "{message}");
        assert!(message.contains("below 4096 directories; move it"), "{message}");
    }
    close(union);
}

/// All directories on the way down have names that are still to come.
#[test]
fn names_on_the_way_down_are_counted_and_bounded() {
    const DEPTH: usize = 20;
    const WIDTH: usize = 100;
    let branches = Branches::empty(1);
    let mut at = NodeId::ROOT;
    for _ in 0..DEPTH {
        for number in 0..WIDTH {
            let file = format!("{number:0PART$}");
            branches.upper.mknod(ROOT, at, name(&file), FileType::Regular, 0o600, 0).expect("made");
        }
        at = branches.upper.mkdir(ROOT, at, name("directory"), 0o755).expect("made").node;
    }
    let names_bytes = (DEPTH * WIDTH * PART) as u64;
    let open = |listings_bytes_max, room: &Arc<Counting>| {
        let listings_room = Some(Arc::clone(room) as Arc<dyn Headroom>);
        let config = UnionConfig::new(branches.upper.clone(), Vec::new());
        Union::open(UnionConfig { listings_room, listings_bytes_max, ..config }).expect("the union opens")
    };
    let room = Arc::new(Counting::default());
    let union = open(u64::MAX, &room);
    let (mut told, mut most) = (0, 0);
    let visit = &mut |_: &[u8], _: poolfs_libservice::Difference<'_>| {
        told += 1;
        most = most.max(room.count());
        Ok(ControlFlow::Continue(()))
    };
    union.differences(visit).expect("told");
    assert_eq!(told, 1 + DEPTH * (WIDTH + 1));
    assert!((names_bytes..2 * names_bytes).contains(&most), "{most} of {names_bytes}");
    assert_eq!(room.count(), 0, "all is given back");
    close(union);

    let union = open(names_bytes / 2, &room);
    let error = union.differences(&mut |_, _| Ok(ControlFlow::Continue(()))).expect_err("no room");
    assert_eq!(error, Errno::ENOMEM);
    let message = error.message().expect("words");
    assert!(message.starts_with("/directory/directory") && message.contains("; "), "{message}");
    assert_eq!(room.count(), 0, "all is given back");
    close(union);
}
