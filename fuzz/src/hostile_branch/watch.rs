//! Limits on one input: time, so that nothing waits for ever, and memory. A panic in another thread counts as a failure too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Far more than an input takes, also while other programs leave it next to nothing of the processors.
const SECONDS_MAX: u64 = 1200;

/// Most memory of the process, with the sound branches that inputs begin from.
const RESIDENT_KIB_MAX: u64 = 1 << 20;

static PANICS: AtomicU64 = AtomicU64::new(0);
static WATCHED: LazyLock<Mutex<Option<(Instant, Vec<u8>)>>> = LazyLock::new(|| {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        before(panic);
    }));
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            if let Some((begun, input)) = &*watched()
                && begun.elapsed() > Duration::from_secs(SECONDS_MAX)
            {
                std::fs::write("crash-slow", input).expect("writable");
                eprintln!("an input takes more than {SECONDS_MAX} seconds; it is in crash-slow");
                std::process::abort();
            }
        }
    });
    Mutex::default()
});

fn watched() -> MutexGuard<'static, Option<(Instant, Vec<u8>)>> {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An input under way.
pub(super) struct Watch {
    panics: u64,
}

pub(super) fn begin(input: &[u8]) -> Watch {
    *watched() = Some((Instant::now(), input.to_vec()));
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    Watch { panics: PANICS.load(Ordering::Relaxed) }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *watched() = None;
        if std::thread::panicking() {
            return;
        }
        assert_eq!(self.panics, PANICS.load(Ordering::Relaxed), "another thread has panicked");
        let status = std::fs::read_to_string("/proc/self/status").expect("readable");
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("told");
        let most: u64 = most.trim().trim_end_matches(" kB").parse().expect("a number");
        assert!(most < RESIDENT_KIB_MAX, "it has taken {most} KiB of memory");
    }
}
