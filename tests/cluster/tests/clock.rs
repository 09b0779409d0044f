//! Clocks that are wrong. Leases and timeouts know monotonic time only; certificates alone look at the
//! calendar.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cluster_rig::{Cluster, ClusterOptions, Ledger, Load, Promise, load};
use guest_rig::paths::penstock_binary;

const SOON: Duration = Duration::from_secs(60);
const DISK_BYTES: u64 = 256 << 20;
const SOME: u64 = 300;
const HOUR_S: i64 = 3600;
/// No certificate is valid for so long.
const CENTURIES_S: i64 = 300 * 365 * 24 * HOUR_S;

#[test]
fn clock_jumps_are_harmless_and_expired_certificates_bar_a_node() -> Result<()> {
    let mut options = ClusterOptions::new(penstock_binary()?, 3);
    options.clocks = true;
    let mut cluster = Cluster::start(options)?;
    let socket = cluster.node(1)?.daemon().disk("disk", "256M", 1)?;
    let load = Load::start(&socket, Ledger::new(2048, DISK_BYTES));
    load.progress(SOME, SOON)?;

    for (node, seconds) in [
        (1, HOUR_S),
        (2, -30 * HOUR_S),
        (3, 30 * HOUR_S),
        (1, -HOUR_S),
    ] {
        cluster.node(node)?.set_clock(seconds)?;
        load.progress(SOME, SOON)
            .with_context(|| format!("node {node} {seconds} s off\n{}", cluster.report()))?;
    }
    (1..=3).try_for_each(|node| cluster.node(node)?.set_clock(0))?;
    cluster.wait_ready()?;

    // Node 3 takes everybody's certificates for expired, and they are: by its clock.
    cluster.node_mut(3)?.kill()?;
    cluster.node(3)?.set_clock(CENTURIES_S)?;
    cluster.node_mut(3)?.spawn()?;
    cluster.wait("node 3 is down", SOON, |cluster| {
        let shown = cluster.node(1)?.daemon().json(&["node", "show", "node3"])?;
        Ok((shown["state"] == "down").then_some(()))
    })?;
    load.progress(SOME, SOON)?;
    ensure!(
        !cluster.is_ready()?,
        "a node without valid certificates takes part"
    );
    cluster.node_mut(3)?.kill()?;
    cluster.node(3)?.set_clock(0)?;
    cluster.node_mut(3)?.start()?;
    cluster.wait_ready()?;
    let mut ledger = load.stop()?;
    load::check(&socket, &mut ledger, Promise::Acknowledged)
}
