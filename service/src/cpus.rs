//! CPU affinity of threads.

use rustix::thread::CpuSet;
use tracing::warn;

/// Keeps the calling thread on these CPUs; where it is, when there are none. A thread that cannot be kept there works all the same.
pub(crate) fn keep_on(cpus: &[u32]) {
    let mut set = CpuSet::new();
    cpus.iter().filter(|&&cpu| (cpu as usize) < CpuSet::MAX_CPU).for_each(|&cpu| set.set(cpu as usize));
    if set.count() > 0
        && let Err(error) = rustix::thread::sched_setaffinity(None, &set)
    {
        warn!(?cpus, %error, "a thread is not kept on its CPUs");
    }
}
