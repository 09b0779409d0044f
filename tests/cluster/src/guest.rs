//! What most tests begin with: a cluster and a disk under load, and the question whether the load goes on.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::cluster::{Cluster, ClusterOptions};
use crate::ledger::Ledger;
use crate::load::Load;

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
