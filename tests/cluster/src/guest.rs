//! What most tests begin with: a cluster and a disk under load, and the question whether the load goes on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cluster::{Cluster, ClusterOptions};
use crate::ledger::{Ledger, Promise};
use crate::load::{self, Load};

/// Requests go on within this after a fault: far above what the defaults promise, as the machine may be busy.
pub const SOON: Duration = Duration::from_secs(60);
/// The disk of these tests.
const DISK: &str = "256M";
const DISK_BYTES: u64 = 256 << 20;
const BLOCKS: u32 = 2048;
/// Requests after which a load counts as going on.
const SOME: u64 = 300;

/// A cluster, and a disk on node 1.
pub fn cluster_with_disk(options: ClusterOptions) -> Result<(Cluster, PathBuf)> {
    let cluster = Cluster::start(options)?;
    let socket = cluster.node(1)?.daemon().disk("disk", DISK, 1)?;
    Ok((cluster, socket))
}

/// The ledger of that disk, which nobody has written to.
pub fn ledger() -> Ledger {
    Ledger::new(BLOCKS, DISK_BYTES)
}

/// Waits until the load has had some answers, and says how long it had none.
pub fn goes_on(cluster: &Cluster, load: &Load, after: &str) -> Result<()> {
    load.progress(SOME, SOON)
        .with_context(|| format!("after {after}\n{}", cluster.report()))?;
    eprintln!(
        "{after}: {} ms without an answer",
        load.take_gap().as_millis()
    );
    Ok(())
}

/// The devices of a node, as `teller` tells.
pub fn devices(cluster: &Cluster, teller: u8, node: u8) -> Result<Vec<Value>> {
    let list = cluster.node(teller)?.daemon().json(&["device", "list"])?;
    let name = format!("node{node}");
    let list = list.as_array().cloned().unwrap_or_default();
    let of_node = list.into_iter().filter(|one| one["node"] == *name);
    Ok(of_node.collect())
}

/// Ends the load, and reads all back that was acknowledged.
pub fn check(cluster: &Cluster, socket: &Path, load: Load) -> Result<()> {
    let mut ledger = load.stop()?;
    load::check(socket, &mut ledger, Promise::Acknowledged)
        .with_context(|| format!("read all back\n{}", cluster.report()))
}
