//! A node is away while a guest writes, and comes back: what is copied to it, and what the guest notices of
//! that.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cluster_rig::Cluster;
use guest_rig::process::wait_until;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::{say, start_penstock};
use crate::clock::Clock;
use crate::driver::{Direction, Driver, Load, Order};

/// The node that is away. The guest's disk is on node 1.
const AWAY: u8 = 3;
/// How long it is away, and with `--quick`.
const AWAY_TIME: Duration = Duration::from_secs(10);
const AWAY_TIME_QUICK: Duration = Duration::from_secs(3);
/// The disk is overwritten at random for so long before anything is measured: the store's own work behind
/// such writes is then part of both sides of the comparison.
const WARM_UP: Duration = Duration::from_secs(4);
/// Length of one window of one load. All loads take turns, so that each sees the whole of a resync.
const WINDOW: Duration = Duration::from_millis(200);
/// Turns of all loads before the node goes.
const TURNS_BEFORE: usize = 24;
/// A node that is back is taken in again within this.
const BACK_LIMIT: Duration = Duration::from_secs(60);
/// Depths of the loads that are timed.
const DEPTHS: [usize; 2] = [1, 32];
/// Latencies above this count as this.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// What one round has shown.
#[derive(Debug, Serialize)]
pub(super) struct Round {
    /// Distinct blocks written while the node was away, in bytes.
    pub(super) written_bytes: u64,
    /// What was copied to it when it was back.
    pub(super) copied_bytes: u64,
    /// From the first copied block to the last.
    pub(super) resync_s: f64,
    pub(super) loads: Vec<Timed>,
}

/// One load before and during a resync.
#[derive(Debug, Serialize)]
pub(super) struct Timed {
    pub(super) load: Load,
    pub(super) before: Quantiles,
    pub(super) during: Quantiles,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Quantiles {
    pub(super) requests: u64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

fn loads() -> Vec<Load> {
    let of = |direction| {
        DEPTHS.map(|depth| Load {
            direction,
            order: Order::Random,
            block: 4096,
            depth,
        })
    };
    [of(Direction::Write), of(Direction::Read)].concat()
}

/// One round on a new cluster in `directory`.
pub(super) fn round(
    directory: &Path,
    wire: &str,
    cpu: usize,
    clock: Clock,
    quick: bool,
) -> Result<Round> {
    let (mut cluster, socket) = start_penstock(wire, directory, cpu)?;
    let mut driver = Driver::connect(&socket, 1, clock)?;
    driver.fill()?;
    let [_, deep, ..] = loads()[..] else {
        anyhow::bail!("there are loads of two depths")
    };
    driver.run(&deep, WARM_UP)?;
    let mut before = Histograms::new()?;
    for _ in 0..TURNS_BEFORE {
        before.turn(&mut driver)?;
    }
    say(&format!("node {AWAY} goes away"));
    cluster.node_mut(AWAY)?.kill()?;
    driver.count_written();
    let away = match quick {
        true => AWAY_TIME_QUICK,
        false => AWAY_TIME,
    };
    driver.run(&deep, away)?;
    let written_bytes = driver.written_bytes();
    say(&format!("it is back; {} MiB to copy", written_bytes >> 20));
    cluster.node_mut(AWAY)?.start()?;
    wait_until(BACK_LIMIT, || {
        Ok((copied_bytes(&cluster)? > 0).then_some(()))
    })
    .context("the node that was away is not brought up to date")?;
    let (begin, mut during) = (Instant::now(), Histograms::new()?);
    while !cluster.is_ready()? {
        during.turn(&mut driver)?;
    }
    Ok(Round {
        written_bytes,
        copied_bytes: copied_bytes(&cluster)?,
        resync_s: begin.elapsed().as_secs_f64(),
        loads: before.beside(&during),
    })
}

/// Bytes copied to the node since it was started.
fn copied_bytes(cluster: &Cluster) -> Result<u64> {
    let daemon = cluster.node(AWAY)?.daemon();
    Ok(daemon.metric("penstock_resync_bytes_total")? as u64)
}

/// Latencies of all loads.
struct Histograms(Vec<(Load, Histogram<u64>)>);

impl Histograms {
    fn new() -> Result<Self> {
        let empty = |load| {
            let histogram = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
            Ok((load, histogram))
        };
        loads()
            .into_iter()
            .map(empty)
            .collect::<Result<_>>()
            .map(Self)
    }

    /// Every load for a while.
    fn turn(&mut self, driver: &mut Driver) -> Result<()> {
        for (load, histogram) in &mut self.0 {
            histogram.add(driver.run(load, WINDOW)?.latency)?;
        }
        Ok(())
    }

    fn beside(&self, during: &Self) -> Vec<Timed> {
        let both = self.0.iter().zip(&during.0);
        both.map(|((load, before), (_, during))| Timed {
            load: *load,
            before: quantiles(before),
            during: quantiles(during),
        })
        .collect()
    }
}

fn quantiles(histogram: &Histogram<u64>) -> Quantiles {
    Quantiles {
        requests: histogram.len(),
        p50_us: histogram.value_at_quantile(0.5) as f64 / 1e3,
        p99_us: histogram.value_at_quantile(0.99) as f64 / 1e3,
    }
}
