//! What a daemon costs when its guests do nothing, and how long a large store takes to open after a crash.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use guest_rig::{Daemon, DaemonOptions};
use serde::Serialize;
use serde_json::Value;

use crate::backend::attach_afresh;
use crate::clock::Clock;
use crate::driver::{Direction, Driver, Load, Order};
use crate::ping_pong;
use crate::usage::{cpu_time, resident_bytes};

/// Attachments of the idle daemon.
const ATTACHMENTS: usize = 64;
/// Buffers of each of their drivers; idle ones use none.
const IDLE_BUFFER_BYTES: usize = 1 << 20;
/// Left alone before it is watched.
const WARM_UP: Duration = Duration::from_secs(2);
/// Size of the store that is opened after a crash; a sparse file.
const LARGE_STORE: &str = "1T";
/// Size of the volume in it; random writes spread over it touch as much metadata as there are writes.
const LARGE_VOLUME: u64 = 512 << 30;
/// Writes of the load before the crash last this long.
const CRASH_LOAD: Duration = Duration::from_secs(3);

/// The idle daemon.
#[derive(Debug, Serialize)]
pub struct Idle {
    /// Attachments served, each with a driver connected and two queues running.
    pub attachments: usize,
    /// Share of one core in percent.
    pub cpu_percent: f64,
    /// Resident memory.
    pub resident_bytes: u64,
}

/// The store that was opened after a crash.
#[derive(Debug, Serialize)]
pub struct Opened {
    /// Writes before the crash.
    pub writes: u64,
    /// From the start of the process to its first answer.
    pub seconds: f64,
    /// What the daemon said that it did.
    pub recovery: Vec<String>,
    /// What `device list --json` tells about the device afterwards.
    pub device: Value,
}

/// Watches a daemon with many attachments for `time`.
pub fn idle(directory: &Path, time: Duration, clock: Clock) -> Result<Idle> {
    let binary = guest_rig::paths::penstock_binary()?;
    let mut daemon = Daemon::start_with(
        &directory.join("idle"),
        DaemonOptions::new(binary, &["--device-size", "4G"]),
    )?;
    let mut drivers = Vec::new();
    for number in 0..ATTACHMENTS {
        let socket = daemon.disk(&format!("idle{number}"), "64M", 2)?;
        drivers.push(Driver::connect_with(&socket, 2, IDLE_BUFFER_BYTES, clock)?);
    }
    std::thread::sleep(WARM_UP);
    let pid = daemon.pid()?;
    let (before, start) = (cpu_time(pid)?, Instant::now());
    std::thread::sleep(time);
    let used = cpu_time(pid)?.saturating_sub(before);
    let cpu_percent = 100.0 * used.as_secs_f64() / start.elapsed().as_secs_f64();
    let idle = Idle {
        attachments: ATTACHMENTS,
        cpu_percent,
        resident_bytes: resident_bytes(pid)?,
    };
    drop(drivers);
    daemon.stop()?;
    Ok(idle)
}

/// Kills a daemon on a large sparse store under random writes, and times its next start.
pub fn open_after_crash(directory: &Path, clock: Clock, cpus: [usize; 2]) -> Result<Opened> {
    let binary = guest_rig::paths::penstock_binary()?;
    let sparse = ["--device-size", LARGE_STORE, "--preallocation", "off"];
    let options = DaemonOptions::new(binary, &sparse).cpu(cpus[1]);
    let mut daemon = Daemon::start_with(&directory.join("large"), options)?;
    let socket = attach_afresh(&daemon, LARGE_VOLUME, 1)?;
    ping_pong::pin(cpus[0])?;
    let mut driver = Driver::connect(&socket, 1, clock)?;
    let load = Load {
        direction: Direction::Write,
        order: Order::Random,
        block: 4096,
        depth: 32,
    };
    let writes = driver.run(&load, CRASH_LOAD)?.requests;
    daemon.kill()?;
    drop(driver);
    let start = Instant::now();
    daemon.start_again()?;
    let seconds = start.elapsed().as_secs_f64();
    let status = daemon.json(&["status"])?;
    let lines = status["recovery"]
        .as_array()
        .context("`status --json` tells no recovery")?;
    let recovery = lines
        .iter()
        .filter_map(|line| line.as_str().map(str::to_owned))
        .collect();
    let device = daemon.json(&["device", "list"])?[0].clone();
    daemon.stop()?;
    Ok(Opened {
        writes,
        seconds,
        recovery,
        device,
    })
}
