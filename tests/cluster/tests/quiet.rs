//! The logs of a healthy cluster.

use anyhow::Result;
use cluster_rig::guest::{cluster_with_disk, goes_on, ledger};
use cluster_rig::{ClusterOptions, Load};
use guest_rig::complaints::LogMark;
use guest_rig::paths::penstock_binary;

/// Number of filesystems. All nodes found the group that keeps their names at the same time.
const FILESYSTEMS: usize = 3;
/// Number of front ends that connect to the disk, one after the other. Their memory is not sealed.
const FRONT_ENDS: usize = 3;

/// Starts, joins, front ends that connect and disconnect, filesystems, and the end of a node. No node is
/// killed or cut off, so no line requires action.
#[test]
fn a_healthy_cluster_logs_neither_warnings_nor_errors() -> Result<()> {
    let (mut cluster, socket) = cluster_with_disk(ClusterOptions::new(penstock_binary()?, 3))?;
    cluster.ensure_no_complaints()?;
    for number in 0..FILESYSTEMS {
        let name = format!("tree{number}");
        cluster.node(2)?.daemon().cli(&["fs", "create", &name])?;
    }
    let mut written = ledger();
    for _ in 0..FRONT_ENDS {
        let load = Load::start(&socket, written);
        goes_on(&cluster, &load, "a front end has connected")?;
        written = load.stop()?;
    }
    let tree = cluster.directory().join("tree.sock");
    let tree = tree.to_string_lossy();
    let one = cluster.node(1)?.daemon();
    one.cli(&["attach", "fs", "tree0", "--socket", &tree, "--tag", "tree"])?;
    one.cli(&["detach", &tree, "--yes"])?;
    one.cli(&["detach", "disk", "--yes"])?;
    one.cli(&["volume", "delete", "disk", "--yes"])?;
    one.cli(&["fs", "delete", "tree1", "--yes"])?;
    cluster.wait_ready()?;
    cluster.ensure_no_complaints()?;
    // A node that stops normally logs no problem. The others may log that it is missing.
    cluster.node_mut(3)?.stop()?;
    cluster
        .node(3)?
        .daemon()
        .ensure_no_complaints(LogMark::default())
}
