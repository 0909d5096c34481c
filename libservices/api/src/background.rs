//! Threads that belong to no request.

use std::io;
use std::thread::{Builder, JoinHandle};

/// Starts a thread that runs where the process does: who starts it may be kept on the CPU of whom it serves, and a new thread is where the
/// one was that started it.
///
/// # Errors
/// When no thread can be had.
pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.into()).spawn(move || {
        // The first thread is never kept anywhere; one that cannot leave does its work all the same.
        let of_process = rustix::thread::sched_getaffinity(Some(rustix::process::getpid()));
        let _ = of_process.and_then(|cpus| rustix::thread::sched_setaffinity(None, &cpus));
        work();
    })
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    #[test]
    fn a_thread_is_not_kept_where_the_one_is_that_started_it() {
        let of_process = sched_getaffinity(Some(rustix::process::getpid())).expect("known");
        let first = (0..CpuSet::MAX_CPU).find(|&cpu| of_process.is_set(cpu)).expect("it has one");
        let started = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).expect("it may run there");
            let (told, cpus) = std::sync::mpsc::channel();
            let work = move || {
                let _ = told.send(sched_getaffinity(None).expect("known").count());
            };
            super::start("background", work).expect("a thread").join().expect("no panic");
            cpus.recv().expect("told")
        });
        assert_eq!(started.join().expect("no panic"), of_process.count());
    }
}
