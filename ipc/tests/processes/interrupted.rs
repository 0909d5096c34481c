//! Tests of posts that a signal handler interrupts at any instruction: it posts itself, forks, or leaves by a jump.

use crate::common::{EchoService, assert_echo};
use poolfs_ipc::hold::Frame;
use poolfs_ipc::posts::PostGrant;
use poolfs_ipc::{CallError, Connection, PostAt, Posting};
use std::ffi::c_void;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const EPOCH: u32 = 5;

/// Slots that the tests post in, by the values' lowest bits.
const SLOTS: u64 = 2;

/// What tells the handler's values.
const OF_HANDLER: u64 = 1 << 48;

const VALUES_MAX: usize = 1 << 20;

/// Values that were posted, in room that is there already: nothing is allocated where a handler may leave it.
struct Values {
    count: AtomicUsize,
    values: Vec<AtomicU64>,
}

impl Values {
    fn new() -> Self {
        Self { count: AtomicUsize::new(0), values: (0..VALUES_MAX).map(|_| AtomicU64::new(0)).collect() }
    }

    fn push(&self, value: u64) {
        let at = self.count.load(Ordering::Relaxed);
        if let Some(place) = self.values.get(at) {
            place.store(value, Ordering::Relaxed);
            self.count.store(at + 1, Ordering::Relaxed);
        }
    }

    fn all(&self) -> Vec<u64> {
        let count = self.count.load(Ordering::Relaxed);
        self.values[..count].iter().map(|value| value.load(Ordering::Relaxed)).collect()
    }
}

/// Everything that the loop and its handler use.
struct Scene {
    connection: Connection,
    posted: Values,
    refused: Values,
    by_handler: Values,
    next: AtomicU64,
    signals: AtomicU32,
    /// The child of the latest signal; of the child itself, -1.
    child: AtomicU32,
    do_it: fn(&Scene),
    /// The loop that a handler may leave goes on, and so the place is one.
    may_leave: AtomicBool,
    place: Place,
}

static SCENE: AtomicPtr<Scene> = AtomicPtr::new(null_mut());

/// Where a jump goes: the registers of who called [`catch`].
#[derive(Default)]
#[repr(C)]
struct Place([AtomicUsize; 8]);

core::arch::global_asm!(
    ".globl poolfs_test_catch",
    "poolfs_test_catch:",
    "mov [rdi], rbx",
    "mov [rdi + 8], rbp",
    "mov [rdi + 16], r12",
    "mov [rdi + 24], r13",
    "mov [rdi + 32], r14",
    "mov [rdi + 40], r15",
    "mov [rdi + 48], rsp",
    "sub rsp, 8",
    "mov rdi, rdx",
    "call rsi",
    "add rsp, 8",
    "ret",
    ".globl poolfs_test_jump",
    "poolfs_test_jump:",
    "mov rbx, [rdi]",
    "mov rbp, [rdi + 8]",
    "mov r12, [rdi + 16]",
    "mov r13, [rdi + 24]",
    "mov r14, [rdi + 32]",
    "mov r15, [rdi + 40]",
    "mov rsp, [rdi + 48]",
    "ret",
);

unsafe extern "C" {
    /// Calls a function, and comes back when it does or when somebody jumps to the place.
    fn poolfs_test_catch(place: *const Place, run: extern "C" fn(*const c_void), scene: *const c_void);
    fn poolfs_test_jump(place: *const Place) -> !;
}

fn post(scene: &Scene, value: u64) -> Result<Posting, CallError> {
    let grant = PostGrant::new((value % SLOTS) as u32, EPOCH).expect("a grant");
    let bytes = value.to_le_bytes();
    // SAFETY: an array is readable for its length.
    unsafe { scene.connection.post(Frame::here(), grant, 7, PostAt::End, bytes.as_ptr(), bytes.len()) }
}

/// Posts one value after another.
fn post_next(scene: &Scene) {
    let value = scene.next.fetch_add(1, Ordering::Relaxed);
    let outcome = post(scene, value);
    if scene.child.load(Ordering::Relaxed) == u32::MAX {
        let code = match outcome {
            Ok(Posting::Posted | Posting::NotPosted) | Err(CallError::NoSession) => 0,
            Ok(Posting::Answered(_)) => 3,
            Err(_) => 4,
        };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(code) };
    }
    match outcome {
        Ok(Posting::Posted) => scene.posted.push(value),
        Ok(Posting::NotPosted) => {
            scene.refused.push(value);
            std::thread::yield_now();
        }
        // Nobody revokes, and nobody dies: the test ends by this.
        Ok(Posting::Answered(_)) | Err(_) => std::process::abort(),
    }
}

extern "C" fn post_for_ever(scene: *const c_void) {
    // SAFETY: it is a scene, which outlives the loop.
    let scene = unsafe { &*scene.cast::<Scene>() };
    scene.may_leave.store(true, Ordering::Relaxed);
    loop {
        post_next(scene);
    }
}

extern "C" fn on_signal(_: i32) {
    let scene = SCENE.load(Ordering::Relaxed);
    // SAFETY: it is set while signals come, and is the scene's address.
    if let Some(scene) = unsafe { scene.as_ref() } {
        scene.signals.fetch_add(1, Ordering::Relaxed);
        (scene.do_it)(scene);
    }
}

fn block(how: i32) {
    // SAFETY: plain system calls on a set of their own.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGALRM);
        assert_eq!(libc::pthread_sigmask(how, &raw const set, null_mut()), 0);
    }
}

fn set_timer(every_us: i64) {
    let time = libc::timeval { tv_sec: 0, tv_usec: every_us };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: the value is valid for the call.
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, null_mut()) }, 0);
}

/// Set when dropped, after a panic too.
struct Finally<'a>(&'a AtomicBool);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs while signals come; what was served, by slot. `leaves`: the handler may not come back.
fn play(
    socket: &Path,
    (tended, leaves): (bool, bool),
    do_it: fn(&Scene),
    run: impl Fn(&Scene),
) -> (Box<Scene>, Vec<Vec<u64>>) {
    block(libc::SIG_BLOCK);
    let service = EchoService::start(socket, 1, |_| {});
    let connection = service.connect();
    let session = service.endpoint.session(connection.session()).expect("the session");
    for slot in 0..SLOTS as usize {
        session.grant_posts(slot, EPOCH);
        session.tend_posts(slot, tended);
    }
    let scene = Box::new(Scene {
        connection,
        posted: Values::new(),
        refused: Values::new(),
        by_handler: Values::new(),
        next: AtomicU64::new(0),
        signals: AtomicU32::new(0),
        child: AtomicU32::new(0),
        do_it,
        may_leave: AtomicBool::new(false),
        place: Place::default(),
    });
    SCENE.store((&raw const *scene).cast_mut(), Ordering::Relaxed);
    // SAFETY: the handler uses atomics and what may be used in handlers; the structure is valid for the call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_signal as extern "C" fn(i32) as usize;
        // One that leaves by a jump does not come back to end this.
        action.sa_flags = libc::SA_RESTART | if leaves { libc::SA_NODEFER } else { 0 };
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, null_mut()), 0);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _done = Finally(&done);
        scope.spawn(|| {
            // Whoever tends the slots.
            while !done.load(Ordering::Relaxed) {
                (0..SLOTS as usize).for_each(|slot| service.posts.take(&session, slot));
                std::thread::sleep(Duration::from_micros(if tended { 100 } else { 10_000 }));
            }
        });
        block(libc::SIG_UNBLOCK);
        run(&scene);
        set_timer(0);
        block(libc::SIG_BLOCK);
    });
    SCENE.store(null_mut(), Ordering::Relaxed);
    // The holds that were left are found by the next calls of this thread, and all is as before.
    for _ in 0..SLOTS {
        let start = Instant::now();
        loop {
            let value = scene.next.fetch_add(1, Ordering::Relaxed);
            match post(&scene, value) {
                Ok(Posting::Posted) => break scene.posted.push(value),
                Ok(Posting::NotPosted) if start.elapsed() < Duration::from_secs(2) => {}
                other => panic!("the slot is not usable: {other:?}"),
            }
        }
    }
    assert_echo(&scene.connection, 1, b"and requests go");
    (0..SLOTS as usize).for_each(|slot| service.posts.take(&session, slot));
    (0..SLOTS as u32).for_each(|slot| assert!(!scene.connection.has_posts(slot)));
    let of_slot = |slot: u64| {
        let bytes = service.posts.bytes();
        let values = bytes.chunks(8).map(|value| u64::from_le_bytes(value.try_into().expect("eight bytes")));
        values.filter(|value| value % SLOTS == slot).collect()
    };
    let served = (0..SLOTS).map(of_slot).collect();
    (scene, served)
}

/// Each value at most once and in its order, all that were posted, and none that was refused.
fn assert_served(served: &[Vec<u64>], of_handler: bool, posted: &[u64], refused: &[u64]) -> usize {
    let mut unclear = 0;
    for (slot, values) in (0..).zip(served) {
        let values: Vec<u64> = values.iter().copied().filter(|value| (*value >= OF_HANDLER) == of_handler).collect();
        assert!(values.windows(2).all(|pair| pair[0] < pair[1]), "twice, or not in order");
        let is_served = |value: &u64| values.binary_search(value).is_ok();
        let of_slot = |all: &[u64]| all.iter().copied().filter(|value| value % SLOTS == slot).collect::<Vec<_>>();
        assert!(of_slot(posted).iter().all(is_served), "lost");
        assert!(!of_slot(refused).iter().any(is_served), "served though it was refused");
        unclear += values.len() - of_slot(posted).len();
    }
    unclear
}

/// Runs until so many signals have come.
fn until(scene: &Scene, signals: u32, every_us: i64, step: impl Fn(&Scene)) {
    set_timer(every_us);
    let start = Instant::now();
    let posted = || scene.posted.count.load(Ordering::Relaxed);
    while scene.signals.load(Ordering::Relaxed) < signals
        && start.elapsed() < Duration::from_secs(5)
        && posted() < VALUES_MAX / 2
    {
        step(scene);
    }
    assert!((1000..VALUES_MAX).contains(&posted()), "hardly anything was posted, or more than can be noted");
}

pub fn posts_that_a_handler_leaves_by_a_jump_happen_or_not(socket: &Path) {
    for tended in [false, true] {
        let leave = |scene: &Scene| {
            if scene.may_leave.swap(false, Ordering::Relaxed) {
                // SAFETY: the loop that the signal has interrupted was called by `catch`, and owns nothing.
                unsafe { poolfs_test_jump(&raw const scene.place) }
            }
        };
        let (scene, served) = play(socket, (tended, true), leave, |scene| {
            until(scene, 8000, 67, |scene| {
                // SAFETY: the place lives as long as the scene; whoever jumps there does so from within the call.
                unsafe {
                    poolfs_test_catch(&raw const scene.place, post_for_ever, (&raw const *scene).cast());
                }
            });
        });
        let unclear = assert_served(&served, false, &scene.posted.all(), &scene.refused.all());
        let (posted, refused) = (scene.posted.all().len(), scene.refused.all().len());
        println!("  {posted} posted, {refused} refused, {unclear} left and served, tended: {tended}");
    }
}

pub fn posts_of_a_handler_inside_a_post_are_served_once(socket: &Path) {
    for tended in [false, true] {
        let post_too = |scene: &Scene| {
            let value = OF_HANDLER + u64::from(scene.signals.load(Ordering::Relaxed)) * SLOTS;
            for value in value..value + SLOTS {
                match post(scene, value) {
                    Ok(Posting::Posted) => scene.by_handler.push(value),
                    Ok(Posting::NotPosted) => {}
                    Ok(Posting::Answered(_)) | Err(_) => std::process::abort(),
                }
            }
        };
        let (scene, served) = play(socket, (tended, false), post_too, |scene| until(scene, 8000, 67, post_next));
        assert_eq!(assert_served(&served, false, &scene.posted.all(), &scene.refused.all()), 0);
        let by_handler = scene.by_handler.all();
        assert_eq!(assert_served(&served, true, &by_handler, &[]), 0);
        println!("  {} posted, {} by the handler, tended: {tended}", scene.posted.all().len(), by_handler.len());
    }
}

pub fn posts_that_a_child_of_their_handler_goes_on_with_are_the_parents(socket: &Path) {
    let fork = |scene: &Scene| {
        // SAFETY: the child only goes on with the post and exits; the system call takes no locks of libc.
        let child = unsafe { libc::syscall(libc::SYS_fork) };
        if child != 0 {
            return scene.child.store(child as u32, Ordering::Relaxed);
        }
        scene.child.store(u32::MAX, Ordering::Relaxed);
        for (start, length) in scene.connection.ranges() {
            // As the library has it: the memory of the session is zeros in a child.
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: nothing is mapped there in the child, and only the session's code has pointers to it.
            let mapped = unsafe { libc::mmap(start as *mut c_void, length, access, flags, -1, 0) };
            if mapped == libc::MAP_FAILED {
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(2) };
            }
        }
    };
    let (scene, served) = play(socket, (false, false), fork, |scene| {
        let mut seen = 0;
        let start = Instant::now();
        while seen < 150 && start.elapsed() < Duration::from_secs(20) {
            scene.child.store(0, Ordering::Relaxed);
            let time = libc::timeval { tv_sec: 0, tv_usec: 40 + i64::from(seen) % 17 };
            let once = libc::itimerval { it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 }, it_value: time };
            // SAFETY: the value is valid for the call.
            assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const once, null_mut()) }, 0);
            while scene.child.load(Ordering::Relaxed) == 0 {
                post_next(scene);
            }
            let mut status = 0;
            let child = scene.child.load(Ordering::Relaxed) as i32;
            if child == -1 {
                // The signal came behind the post.
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(0) };
            }
            // SAFETY: `status` is valid for the call; the child is ours.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!((status, seen), (0, seen), "the child took the post for its own, or died");
            seen += 1;
        }
        println!("  {seen} children");
    });
    assert_eq!(assert_served(&served, false, &scene.posted.all(), &scene.refused.all()), 0);
}
