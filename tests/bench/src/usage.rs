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
