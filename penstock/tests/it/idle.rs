//! What a daemon costs that serves many idle disks.

use std::fs;
use std::time::{Duration, Instant};

use crate::harness::{Daemon, greet, temp, text};

/// Attachments at once.
const ATTACHMENTS: usize = 64;
/// Bound on resident memory with all of them idle, in KiB.
const RSS_KIB_MAX: u64 = 200 << 10;
/// How long CPU time is measured; the figure is reported, not asserted.
const MEASURED: Duration = Duration::from_secs(2);

#[test]
fn sixty_four_idle_attachments_cost_little() {
    let dir = temp();
    let daemon = Daemon::start(dir.path());
    let mut guests = Vec::new();
    for i in 0..ATTACHMENTS {
        let volume = format!("v{i}");
        let socket = dir.path().join(format!("{i}.sock"));
        daemon.ok(&["volume", "create", &volume, "1G"]);
        daemon.ok(&["attach", "volume", &volume, "--socket", text(&socket)]);
        guests.push(greet(&socket));
    }
    let listed = daemon.json(&["attachments", "list"]);
    let connected = listed
        .as_array()
        .unwrap()
        .iter()
        .filter(|a| a["state"] == "connected")
        .count();
    assert_eq!(connected, ATTACHMENTS);

    let (start, before) = (Instant::now(), cpu_ticks(daemon.pid()));
    std::thread::sleep(MEASURED);
    let ticks = cpu_ticks(daemon.pid()) - before;
    let percent = ticks as f64 / 100.0 / start.elapsed().as_secs_f64() * 100.0;
    let rss_kib = rss_kib(daemon.pid());
    println!(
        "{ATTACHMENTS} idle attachments: {} MiB resident, {percent:.1} % of a core",
        rss_kib >> 10
    );
    assert!(rss_kib < RSS_KIB_MAX, "{rss_kib} KiB resident");
    drop(guests);
    assert!(daemon.terminate().success());
}

/// User and system time of a process in clock ticks (1/100 s).
fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat[stat.rfind(')').unwrap()..]
        .split_whitespace()
        .collect();
    fields[12].parse::<u64>().unwrap() + fields[13].parse::<u64>().unwrap()
}

fn rss_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").trim().parse().unwrap()
}
