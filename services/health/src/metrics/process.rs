//! What the kernel tells of this process. What it does not tell is left out.

use std::fs;
use std::path::Path;

use api::metrics::{Page, families};
use rustix::param::{clock_ticks_per_second, page_size};

/// Fields of `/proc/PID/stat` behind the command's name, counted from 0: `utime`, `stime`, `starttime`.
const USER_TICKS: usize = 11;
const SYSTEM_TICKS: usize = 12;
const START_TICKS: usize = 19;

/// Adds the values of the process and of the threads that carry guests' requests.
pub fn put(page: &mut Page) {
    let stat = fields(Path::new("/proc/self/stat"));
    if let Some(start) = stat.as_deref().and_then(started) {
        page.put_f64(&families::START_TIME, &[], start);
    }
    if let Some(cpu) = stat.as_deref().and_then(cpu) {
        page.put_f64(&families::CPU, &[], cpu);
    }
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let resident = statm
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    if let Some(pages) = resident {
        page.put(&families::RESIDENT, &[], pages * page_size() as u64);
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        page.put(&families::OPEN_FDS, &[], open.count() as u64);
    }
    page.put(&families::MAX_FDS, &[], sandbox::limits::open_files_max());
    put_threads(page);
}

fn put_threads(page: &mut Page) {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten();
    let mut threads: Vec<(String, f64)> = tasks
        .filter_map(|task| {
            let task = task.ok()?.path();
            let name = fs::read_to_string(task.join("comm")).ok()?;
            let name = name.trim_end();
            let is_meant = name.starts_with("data-") || name == "maintenance";
            let cpu = cpu(&fields(&task.join("stat")).filter(|_| is_meant)?)?;
            Some((name.to_owned(), cpu))
        })
        .collect();
    threads.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, cpu) in &threads {
        page.put_f64(&families::THREAD_CPU, &[name], *cpu);
    }
}

/// The fields behind the command's name, which may hold anything.
fn fields(path: &Path) -> Option<Vec<u64>> {
    let text = fs::read_to_string(path).ok()?;
    let (_, rest) = text.rsplit_once(") ")?;
    // The state is a letter; a number below zero is none of ours.
    Some(
        rest.split(' ')
            .map(|field| field.trim().parse().unwrap_or(0))
            .collect(),
    )
}

fn cpu(stat: &[u64]) -> Option<f64> {
    let ticks = stat.get(USER_TICKS)? + stat.get(SYSTEM_TICKS)?;
    Some(ticks as f64 / clock_ticks_per_second() as f64)
}

/// Since 1970: the start is told since boot.
fn started(stat: &[u64]) -> Option<f64> {
    let since_boot = *stat.get(START_TICKS)? as f64 / clock_ticks_per_second() as f64;
    let text = fs::read_to_string("/proc/stat").ok()?;
    let boot = text.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(boot.parse::<u64>().ok()? as f64 + since_boot)
}
