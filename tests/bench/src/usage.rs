//! What a process costs: processor time and memory.

use std::time::Duration;

use anyhow::{Context, Result};

/// Processor time of all living threads of `pid` since they started, kernel work on their behalf included.
/// The scheduler counts it in nanoseconds, where utime and stime are sampled by the tick.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let mut total = 0u64;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))
        .with_context(|| format!("list the threads of {pid}"))?
    {
        // A thread may end between the listing and the reading; what it used is then missing, as for any
        // ended thread.
        let Ok(text) = std::fs::read_to_string(task?.path().join("schedstat")) else {
            continue;
        };
        let on_cpu = text
            .split_whitespace()
            .next()
            .context("schedstat is empty")?;
        total += on_cpu.parse::<u64>().context("schedstat holds no number")?;
    }
    Ok(Duration::from_nanos(total))
}

/// Resident memory of `pid` in bytes.
pub fn resident_bytes(pid: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))
        .with_context(|| format!("read status of {pid}"))?;
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .and_then(|rest| rest.split_whitespace().next())
        .context("no VmRSS in the process's status")?;
    Ok(kib.parse::<u64>().context("VmRSS is no number")? * 1024)
}

/// Bytes that `pid` made the block layer write.
pub fn written_bytes(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io"))
        .with_context(|| format!("read I/O counts of {pid}"))?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("write_bytes: "))
        .context("no write_bytes in io")?;
    value.trim().parse().context("write_bytes is no number")
}

/// Processor time of `pid` since it started, its ended threads included, in the kernel's ticks.
pub fn process_cpu_time(pid: u32) -> Result<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("read stat of {pid}"))?;
    let ticks = ticks_of(&text).with_context(|| format!("stat of {pid} holds {text:?}"))?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_nanos(ticks * (1_000_000_000 / per_second)))
}

/// utime and stime: fields 14 and 15, where the second, a name in brackets, may hold anything.
fn ticks_of(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let mut number = || fields.next()?.parse::<u64>().ok();
    Some(number()? + number()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_and_spaces_hides_no_processor_time() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 3 4 20 0 1 0 99 1000 10";
        assert_eq!(ticks_of(stat), Some(300));
        assert_eq!(ticks_of("7 (a) S 1"), None);
    }

    #[test]
    fn work_of_this_process_is_counted() {
        let pid = std::process::id();
        let by_clock = || {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
            Duration::try_from(now).unwrap()
        };
        let (counted, clock) = (process_cpu_time(pid).unwrap(), by_clock());
        let mut sum = 0u64;
        while by_clock() - clock < Duration::from_millis(300) {
            sum = std::hint::black_box(sum + 1);
        }
        let counted = process_cpu_time(pid).unwrap() - counted;
        let clock = by_clock() - clock;
        // The kernel's clock ticks are 10 ms, and both ends of the interval are rounded.
        let tolerance = Duration::from_millis(50);
        assert!(
            counted.abs_diff(clock) <= tolerance,
            "{counted:?} of {clock:?}"
        );
    }
}
