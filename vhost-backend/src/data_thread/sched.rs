//! How the kernel runs a data thread: on which CPU, and how soon after it is woken.

use std::io;

/// What a data thread asks to run for at a time, where it shares its CPU. The kernel runs whoever asks for
/// less sooner after it is woken (its own default is some milliseconds), so a guest's request does not wait
/// behind a neighbour's whole turn. The kernel takes nothing shorter.
const SLICE_NS: u64 = 100_000;

/// Runs the calling thread on this CPU only.
pub(super) fn pin(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::from(rustix::io::Errno::INVAL));
    }
    set.set(cpu);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Asks for short turns, soon. Linux before 6.12 has no ear for it, and nothing depends on it. What an
/// operator has chosen for the daemon (a real-time policy, say) stays.
pub(super) fn shorten_slices() {
    // SAFETY: asks about the calling thread.
    if unsafe { libc::sched_getscheduler(0) } != libc::SCHED_OTHER {
        return;
    }
    let nice = rustix::process::nice(0).unwrap_or(0);
    let attr = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: 0,
        sched_nice: nice,
        sched_priority: 0,
        sched_runtime: SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel reads as many bytes as `size` says, which are there; 0 is the calling thread.
    let outcome = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    if outcome != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, "the kernel does not shorten the thread's turns");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_policy_and_nice_value() {
        let told = std::thread::spawn(|| {
            rustix::process::nice(3).expect("less is always allowed");
            shorten_slices();
            // SAFETY: asks about the calling thread.
            let policy = unsafe { libc::sched_getscheduler(0) };
            (policy, rustix::process::nice(0))
        });
        assert_eq!(told.join().unwrap(), (libc::SCHED_OTHER, Ok(3)));
    }

    #[test]
    fn no_thread_is_pinned_to_a_cpu_that_cannot_be() {
        let pinned = std::thread::spawn(|| pin(usize::MAX)).join().unwrap();
        assert_eq!(pinned.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
