//! Tests of the passthrough state machine, without a kernel.

use super::*;
use crate::nodes::pruning::tests::Kernel;

const NODE: NodeId = NodeId(7);
const NUMBER: u64 = 70;

struct Scene {
    table: Arc<NodeTable>,
    kernel: Arc<Kernel>,
    pin: Arc<()>,
    is_covered: bool,
}

impl Scene {
    fn new() -> Self {
        let scene = Self { table: Arc::default(), kernel: Arc::default(), pin: Arc::default(), is_covered: false };
        assert_eq!(scene.table.enter(NODE, NUMBER), NUMBER);
        scene
    }

    fn asking(number: u64, thread: u32) -> Asking {
        Asking { node: NODE, number, thread }
    }

    fn backing(&self) -> Backing {
        let file = std::fs::File::open("/dev/null").expect("there").into();
        let text = poolfs_libservice::Text { file, bytes: 4096, pin: Arc::clone(&self.pin) as _ };
        self.table.backing(&(Arc::clone(&self.kernel) as _), text).expect("taken")
    }

    /// Opens it to be read, by this number; whether the kernel reads it by itself, or why not.
    fn open(&self, number: u64, thread: u32) -> Result<(TextUse, bool), Errno> {
        match self.table.begin_open(Self::asking(number, thread), false, || false)? {
            Opening::Undecided(undecided) => {
                match self.table.open_text(&undecided, Some(self.backing())).expect("known") {
                    Opening::Text(user, _) => Ok((user, true)),
                    Opening::Cached(user) => Ok((user, false)),
                    Opening::Undecided(_) => unreachable!("it was decided"),
                }
            }
            Opening::Text(user, _) => Ok((user, true)),
            Opening::Cached(user) => Ok((user, false)),
        }
    }

    fn write(&self, number: u64, thread: u32) -> Result<TextUse, Errno> {
        match self.table.begin_open(Self::asking(number, thread), true, || self.is_covered)? {
            Opening::Cached(user) => Ok(user),
            _ => unreachable!("nobody writes what the kernel reads by itself"),
        }
    }

    fn is_text(&self) -> bool {
        self.open(NUMBER, 1).expect("opened").1
    }
}

#[test]
fn what_the_kernel_was_given_stays_until_it_forgets() {
    let scene = Scene::new();
    let first = scene.open(NUMBER, 1).expect("opened");
    let second = scene.open(NUMBER, 2).expect("opened");
    assert!(first.1 && second.1);
    drop((first, second));
    assert_eq!(scene.table.texts(), TextCounts { bytes: 4096, files: 1, opens: 2 });
    assert_eq!((scene.kernel.has(), scene.table.unused_texts()), (1, vec![NUMBER]));
    scene.table.forget(NUMBER, 1);
    assert_eq!((scene.kernel.has(), Arc::strong_count(&scene.pin), scene.table.texts().bytes), (0, 1, 0));
}

#[test]
fn each_is_asked_for_in_its_turn() {
    let table: Arc<NodeTable> = Arc::default();
    let kernel: Arc<dyn KernelCache> = Arc::new(Kernel::default());
    for number in 10..14 {
        let node = NodeId(number);
        table.enter(node, number);
        let asking = Asking { node, number, thread: 1 };
        let Ok(Opening::Undecided(undecided)) = table.begin_open(asking, false, || false) else { panic!("unknown") };
        let file = std::fs::File::open("/dev/null").expect("there").into();
        let text = poolfs_libservice::Text { file, bytes: 1, pin: Arc::new(()) };
        let _ = table.open_text(&undecided, Some(table.backing(&kernel, text).expect("taken")));
    }
    assert_eq!(table.unused_texts(), [10, 11]);
    assert_eq!(table.unused_texts(), [12, 13]);
    assert_eq!(table.unused_texts(), [10, 11]);
}

#[test]
fn all_that_is_open_at_a_time_goes_one_way() {
    let scene = Scene::new();
    let writer = scene.write(NUMBER, 1).expect("opened");
    assert!(!scene.is_text(), "somebody writes it");
    drop(writer);
    let undecided = scene.table.begin_open(Scene::asking(NUMBER, 1), false, || false).expect("opened");
    let Opening::Undecided(undecided) = undecided else { panic!("nothing is known of it") };
    drop(scene.write(NUMBER, 2).expect("opened"));
    let late = scene.table.open_text(&undecided, Some(scene.backing())).expect("known");
    assert!(matches!(late, Opening::Cached(_)), "it may be another content by now");
    assert_eq!(scene.kernel.has(), 0);
    assert!(!scene.is_text(), "as the other that is open");
    drop(late);
    assert!(scene.is_text());
}

#[test]
fn the_first_change_of_what_nobody_has_open_leaves_mappings_alone() {
    let scene = Scene::new();
    assert!(scene.is_text());
    drop(scene.table.begin_own_change(NODE).expect("nobody has it open"));
    assert!(!scene.is_text() && scene.kernel.has() == 1);
    drop(scene.write(NUMBER, 1).expect("opened"));
    scene.table.forget(NUMBER, 1);
    assert_eq!(scene.kernel.has(), 0);
}

#[test]
fn who_changes_what_is_open_is_sent_to_another_number() {
    let scene = Scene::new();
    let table = &scene.table;
    table.enter(NODE, NUMBER);
    table.opened(NODE, false, false);
    let open = scene.open(NUMBER, 1).expect("opened");
    assert!(table.begin_own_change(NODE).is_none(), "the kernel has to look the name up");
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ESTALE));
    assert!(table.is_retired(NUMBER) && table.retired_number(NODE) == Some(NUMBER));
    let other = table.enter(NODE, NUMBER);
    assert_ne!(other, NUMBER);
    table.looked_up_again(NUMBER, 2);
    let writer = scene.write(other, 2).expect("opened");
    assert!(!scene.open(other, 3).expect("opened").1);
    // By another name of the file, which is looked up again.
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ESTALE));
    table.looked_up_again(NUMBER, 2);
    // By a descriptor, which is not.
    let resize = || table.begin_change(Scene::asking(NUMBER, 3), || false).err();
    assert_eq!((resize(), resize()), (Some(Errno::ESTALE), Some(Errno::ETXTBSY)));
    assert_eq!(scene.open(NUMBER, 4).err(), Some(Errno::ESTALE));
    let again = scene.open(NUMBER, 4).expect("the old content");
    assert!(again.1 && table.unused_texts().is_empty());
    drop((again, open));
    assert_eq!(table.unused_texts(), [NUMBER]);
    drop(writer);
    assert!(!scene.open(other, 3).expect("opened").1, "it is about to change, or has");
    assert_eq!(scene.kernel.has(), 1, "somebody may have it mapped");
    assert_eq!(table.forget(NUMBER, 1), Some((NODE, 1)));
    assert!(table.is_retired(NUMBER));
    assert_eq!(table.forget(NUMBER, 5), Some((NODE, 1)));
    assert_eq!((scene.kernel.has(), table.node(NUMBER), table.node(other)), (0, None, Some(NODE)));
}

#[test]
fn what_something_is_mounted_on_keeps_its_number() {
    let scene = Scene { is_covered: true, ..Scene::new() };
    let open = scene.open(NUMBER, 1).expect("opened");
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ETXTBSY));
    assert!(scene.table.retired_number(NODE).is_none() && scene.is_text());
    drop(open);
    assert!(scene.write(NUMBER, 2).is_ok(), "nobody has it open");
}

#[test]
fn a_number_comes_back_when_nobody_has_it_open_and_there_is_no_other() {
    let scene = Scene::new();
    let open = scene.open(NUMBER, 1).expect("opened");
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ESTALE));
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ETXTBSY));
    drop(open);
    let writer = scene.write(NUMBER, 2).expect("nobody has it open");
    assert!(!scene.table.is_retired(NUMBER) && !scene.is_text() && scene.kernel.has() == 1);
    drop(writer);
    assert_eq!((scene.table.len(), scene.table.enter(NODE, NUMBER)), (1, NUMBER));
    assert_eq!(scene.table.forget(NUMBER, 2), Some((NODE, 2)));
    assert_eq!((scene.table.len(), scene.kernel.has(), scene.table.node(NUMBER)), (0, 0, None));
}

#[test]
fn a_name_that_keeps_its_number_is_counted() {
    let scene = Scene::new();
    let _open = scene.open(NUMBER, 1).expect("opened");
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ESTALE));
    assert!(scene.table.enter_retired(NUMBER));
    assert_eq!(scene.write(NUMBER, 2).err(), Some(Errno::ETXTBSY), "it was not given another number");
    let owed = scene.table.forget_all();
    assert_eq!((owed, scene.kernel.has()), (vec![(NODE, 2)], 0));
    assert!(!scene.table.enter_retired(NUMBER));
}

#[test]
fn a_mount_that_is_served_no_more_keeps_what_its_kernel_has() {
    let scene = Scene::new();
    assert!(scene.is_text());
    scene.table.leave_texts();
    scene.table.forget_all();
    assert_eq!((scene.kernel.has(), Arc::strong_count(&scene.pin)), (1, 2));
    let Scene { table, kernel, pin, .. } = scene;
    drop(table);
    assert_eq!((kernel.has(), Arc::strong_count(&pin)), (0, 1));
}
