//! Where threads run. A queue's thread is bound to the queue's core: a caller sleeps while its request is served, so
//! the two never need two cores, and waking an idle (virtual) core costs more than the request.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread to a core.
///
/// # Errors
/// EINVAL when the core is not there or not allowed.
pub fn bind_to_core(core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}

/// The cores that this thread may run on.
///
/// # Errors
/// The errors of sched_getaffinity(2).
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect())
}

/// Lets a new thread, which starts on the core that its starter is bound to, run on the cores of the process's first
/// thread.
pub fn unbind() {
    // Where either fails, as in a sandbox, the thread is slower and no more.
    if let Ok(cores) = sched_getaffinity(Some(rustix::process::getpid())) {
        let _ = sched_setaffinity(None, &cores);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread is bound to one core, and a core that does not exist is an error.
    #[test]
    fn a_thread_is_bound_and_comes_back() {
        let core = allowed_cores().unwrap()[0];
        std::thread::spawn(move || {
            bind_to_core(core).unwrap();
            assert_eq!(allowed_cores().unwrap(), [core]);
        })
        .join()
        .unwrap();
        assert!(bind_to_core(CpuSet::MAX_CPU).is_err());
    }

    /// A thread started by one that is bound can take all cores.
    #[test]
    fn a_thread_that_a_bound_one_starts_takes_all_cores() {
        let cores = allowed_cores().unwrap();
        std::thread::spawn(move || {
            bind_to_core(cores[0]).unwrap();
            std::thread::spawn(move || {
                unbind();
                assert_eq!(allowed_cores().unwrap(), cores);
            })
            .join()
            .unwrap();
        })
        .join()
        .unwrap();
    }
}
